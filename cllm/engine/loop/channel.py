"""Channel: the event loop's side of a running request; the engine fills it, a stream empties it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio
import anyio.lowlevel

from cllm.engine.chat.chat_tokenizer import AnswerFormat
from cllm.engine.core.commands import CancelRequest, Finished, Read
from cllm.engine.loop.loop_guard import LoopGuard, Waiter
from cllm.engine.loop.output_channels import OutputChannels
from cllm.engine.loop.request_call import RequestCall
from cllm.engine.media import MediaInput
from cllm.engine.output import Completion, FinishReason, Timings, TokenDelta, TokenLogprob
from cllm.engine.request import GenerationRequest, SequenceState
from cllm.engine.thread.mailbox import Inbox
from cllm.errors import ClosedError, EngineFailedError, GenerationError, InvalidRequestError

logger: logging.Logger = logging.getLogger("cllm.engine")


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """State from which a request continues, besides the tokens in its call's `generated`.

    The completion of the request contains the whole output, but for the tokens that are left out.

    Attributes
    ----------
    prompt_token_ids : tuple of int
        Tokens of the prompt.
    answer : AnswerFormat or None
        Parser settings for the answer; None: no chat, or they are computed from the chat again.
    earlier : Completion or None
        Completion of the earlier request, with its output but for the tokens that are left out; None for a fork.
    n_left_out : int
        Number of the first tokens of `generated` that the completion leaves out, because the caller of the
        stream has given them.
    logprobs : tuple of TokenLogprob
        Log probabilities of the other tokens of `generated`, if requested.
    unread : tuple of TokenDelta
        Deltas of `generated` that the reader has not received.
    state : SequenceState or None
        Saved KV state of the first tokens; None: it is computed again.
    media : tuple of MediaInput
        Images and audio of the prompt.
    submitted_at, deadline : float or None
        Values of the earlier request, if it is the same stream; see `GenerationRequest`.
    """

    prompt_token_ids: tuple[int, ...]
    answer: AnswerFormat | None = None
    earlier: Completion | None = None
    n_left_out: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    unread: tuple[TokenDelta, ...] = ()
    state: SequenceState | None = None
    media: tuple[MediaInput, ...] = ()
    submitted_at: float | None = None
    deadline: float | None = None

    @property
    def is_finished(self) -> bool:
        """True if the output is complete, but the reader has not received all of it."""
        return bool(self.unread) and self.unread[-1].finish_reason is not None


class CancelHandle:
    """A handle that cancels a request, without a reference to its stream or channel.

    Attributes
    ----------
    is_over : bool
        True if the request has ended.
    """

    __slots__ = ("_inbox", "is_over", "request_id")

    def __init__(self, request_id: str, inbox: Inbox) -> None:
        self.request_id: str = request_id
        self._inbox = inbox
        self.is_over: bool = False

    def cancel(self) -> None:
        """Cancel the request; does nothing after its end."""
        if not self.is_over:
            self._inbox.put(CancelRequest(self.request_id))


class Channel:
    """The deltas of one request that its reader has not read yet.  Event loop only.

    The inference thread pauses the request while the reader has `capacity` unread deltas.

    Parameters
    ----------
    capacity : int
        Largest number of unread deltas, without the last delta of the output.
    outputs : OutputChannels, optional
        Splits the text of an answer in a chat into content, reasoning and calls.

    Attributes
    ----------
    call : RequestCall
        Arguments of the request, with the random values that were drawn for it.
    request : GenerationRequest
        Request as the inference thread gets it.
    answer : AnswerFormat or None
        Parser settings for the answer to a chat.
    told : sequence of str
        Text of each token of `call.generated`.
    continuation : Continuation or None
        State from which the request continues.
    lease : CancelHandle
    completion : Completion or None
        Completion of the request; None until it has ended.
    error : CllmError or None
        Reason for which the request failed.
    """

    def __init__(
        self,
        call: RequestCall,
        request: GenerationRequest,
        inbox: Inbox,
        loop_guard: LoopGuard,
        capacity: int,
        *,
        answer: AnswerFormat | None = None,
        outputs: OutputChannels | None = None,
        told: Sequence[str] = (),
        continuation: Continuation | None = None,
    ) -> None:
        self.call = call
        self.request = request
        self.answer = answer
        n_told = len(call.generated) if continuation is None else continuation.n_left_out
        self._told_left_out, self._told = "".join(told[:n_told]), "".join(told[n_told:])
        self.continuation = continuation
        self._outputs = outputs
        self.lease: CancelHandle = CancelHandle(request.request_id, inbox)
        self._inbox = inbox
        # Reads are reported to the thread after half of the buffer: it continues computing meanwhile.
        self._n_told_at_once = max(1, capacity // 2)
        self._n_read = 0
        self._deltas = deque(() if continuation is None else continuation.unread)
        self._waiter: Waiter | None = None
        self._loop_guard = loop_guard
        self._is_taken = False  # another channel continues it: its last delta is dropped
        self._state: SequenceState | None = None
        self.completion: Completion | None = None
        if continuation is not None and continuation.is_finished:
            assert continuation.earlier is not None
            self.completion = replace(continuation.earlier, request_id=self.request_id)
            self.lease.is_over = True
        self.error: ClosedError | GenerationError | EngineFailedError | None = None

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        """True if the last delta has arrived."""
        return self.completion is not None or self.error is not None

    @property
    def unread(self) -> tuple[TokenDelta, ...]:
        """Deltas that the reader has not taken yet."""
        return tuple(self._deltas)

    def push(self, delta: TokenDelta) -> None:
        """Add a delta that has arrived, and wake the reader."""
        if self._outputs is not None:
            try:
                delta = self._outputs.split(delta)
            except Exception:
                self._give_up_outputs()
        self._deltas.append(delta)
        self.wake()

    def finish(self, event: Finished) -> None:
        """Set the completion or the error, and add the last delta.  After `take`, the delta is dropped."""
        self.lease.is_over = True
        completion = event.completion
        if self.continuation is not None:
            completion = self._whole(self.continuation, completion)
        self.completion = completion
        self.error = event.error
        self._state = event.state
        if self._is_taken and event.completion.finish_reason is FinishReason.CANCELLED:
            self.wake()
            return
        self._is_taken = False
        delta = event.delta
        if self._outputs is not None:
            try:
                delta, self.completion = self._outputs.finish(delta, completion)
            except Exception:
                self._give_up_outputs()
        if isinstance(self.error, GenerationError):
            self.error.completion = self.completion
        self._deltas.append(delta)
        self.wake()

    def _give_up_outputs(self) -> None:
        """Log an error of the parser; the rest of the stream is text that is not parsed."""
        logger.exception("the answer of %s cannot be split into channels", self.request_id)
        self._outputs = None

    def cancel(self) -> None:
        """Cancel the request; does nothing after its end."""
        self.lease.cancel()

    def check_idle(self) -> None:
        """Raise an error if another task is reading.

        Raises
        ------
        WrongThreadError, anyio.BusyResourceError
        """
        self._loop_guard.check_thread()
        self._loop_guard.check()
        if self._waiter is not None:
            raise anyio.BusyResourceError("reading from")

    async def take(self, *, saves_state: bool = False) -> SequenceState | None:
        """Cancel the request without a last delta, because another channel continues it; wait for its end.

        Return its KV state with `saves_state`; None if it had ended, or has no state.  Raise an error if
        another task is reading.
        """
        self.check_idle()
        if not self.is_finished:
            self._is_taken = True
            self._inbox.put(CancelRequest(self.request_id, saves_state))
        while not self.is_finished:
            self._waiter = self._loop_guard.waiter()
            try:
                await self._waiter.wait()
            finally:
                self._waiter = None
        return self._state

    @property
    def is_taken(self) -> bool:
        """True if `take` cancelled the request; False if the request ended by itself before."""
        return self._is_taken

    def whole_completion(self) -> Completion:
        """Return the completion, with the tokens that the request continued from."""
        completion, n_tokens = self.completion, self.n_left_out
        assert completion is not None
        if not n_tokens:
            return completion
        whole = replace(
            completion,
            text=self._told_left_out + completion.text,
            token_ids=self.call.generated[:n_tokens] + completion.token_ids,
            usage=replace(completion.usage, n_output=n_tokens + completion.usage.n_output),
        )
        return whole if self._outputs is None else self._outputs.with_left_out(whole)

    # --- What goes on from here --------------------------------------------------------------
    @property
    def n_left_out(self) -> int:
        """Number of the first tokens of `call.generated` that the completion leaves out."""
        before = self.continuation
        return len(self.call.generated) if before is None else before.n_left_out

    @property
    def call_ids(self) -> tuple[str, ...]:
        """Ids that were given to tool calls without ids of their own, also to calls that the reader has not received."""
        return self.call.call_ids if self._outputs is None else self._outputs.call_ids

    @property
    def text_before(self) -> str:
        """Text of the output before the first delta, as a reader has received it; read it before any delta arrives."""
        before = self.continuation
        outputs = self._outputs
        told = self._told_left_out + self._told if outputs is None else outputs.told
        if before is None:
            return told
        if before.is_finished and before.earlier is not None:
            told = before.earlier.text
        return told[: len(told) - sum(len(delta.text) for delta in before.unread)]

    def position(self, read_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the output tokens that the reader has received; `read_ids` are the last of them."""
        given, before = self.call.generated, self.continuation
        unread = () if before is None else before.unread
        n_given = len(given) - sum(len(delta.token_ids) for delta in unread)
        return (*given[:n_given], *read_ids)

    def check_logprobs(self) -> None:
        """Reject log probabilities of tokens for which none were computed.

        Raises
        ------
        InvalidRequestError
        """
        n_top = self.call.params.logprobs
        if n_top is not None and self.n_left_out:
            limit = "left out: log probabilities of the generated tokens were not computed"
            raise InvalidRequestError("logprobs", n_top, limit)

    def continued(
        self,
        read_ids: Sequence[int],
        read_logprobs: Sequence[TokenLogprob],
        *,
        is_whole: bool = True,
    ) -> Continuation:
        """Return the state for a request that continues after the reader's position.

        Without `is_whole`, its completion leaves out what this one leaves out.
        """
        if is_whole:
            self.check_logprobs()
        logprobs = () if self.continuation is None else self.continuation.logprobs
        n_given = len(self.position(read_ids)) - len(read_ids) - self.n_left_out
        return Continuation(
            prompt_token_ids=self.request.prompt_token_ids,
            answer=self.answer,
            n_left_out=0 if is_whole else self.n_left_out,
            logprobs=(*logprobs[:n_given], *read_logprobs),
            media=self.request.media,
        )

    def _whole(self, continuation: Continuation, last: Completion) -> Completion:
        """Return the output: `last`, with the tokens that its request continued from but for those left out."""
        n_left_out, earlier = continuation.n_left_out, continuation.earlier
        generated = self.call.generated[n_left_out:]
        usage = replace(last.usage, n_output=len(generated) + last.usage.n_output)
        timings = last.timings
        if earlier is not None:
            usage = replace(
                usage,
                n_cached=earlier.usage.n_cached,
                n_drafted=earlier.usage.n_drafted + usage.n_drafted,
                n_accepted=earlier.usage.n_accepted + usage.n_accepted,
            )
            is_same = continuation.submitted_at is not None
            timings = _joined(earlier.timings, timings, is_same_submission=is_same)
        return replace(
            last,
            text=self._told + last.text,
            token_ids=generated + last.token_ids,
            usage=usage,
            timings=timings,
            logprobs=None if last.logprobs is None else continuation.logprobs + last.logprobs,
        )

    def fail(self, error: ClosedError | EngineFailedError) -> None:
        """End with an error: no more deltas arrive."""
        self.lease.is_over = True
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Wake the reader, if it waits for a delta."""
        if self._waiter is not None:
            self._waiter.set()
            self._waiter = None

    async def next(self) -> TokenDelta | None:
        """Wait for the next delta and return it; None after the last.

        Raises
        ------
        WrongThreadError, anyio.BusyResourceError
            Called from another thread or event loop, or while another task waits for a delta.
        """
        self._loop_guard.check_thread()
        if self._deltas or self.is_finished:
            await anyio.lowlevel.checkpoint()
        while not self._deltas:
            if self.is_finished:
                return None
            if self._waiter is not None:
                raise anyio.BusyResourceError("reading from")
            self._loop_guard.check()
            self._waiter = self._loop_guard.waiter()
            try:
                await self._waiter.wait()
            finally:
                self._waiter = None
        self._n_read += 1
        if self._n_read == self._n_told_at_once:
            if not self.is_finished:
                self._inbox.put(Read(self.request_id, self._n_read))
            self._n_read = 0
        return self._deltas.popleft()


def _joined(first: Timings, last: Timings, *, is_same_submission: bool) -> Timings:
    """Return the timings of an output in two parts.  `total_s` of one submission has the time between too."""
    if first.ttft_s is None:
        return replace(last, n_preemptions=first.n_preemptions + last.n_preemptions)
    gaps = [gap for gap in (first.itl_max_s, last.itl_max_s) if gap is not None]
    return replace(
        first,
        decode_s=first.decode_s + last.decode_s,
        total_s=last.total_s + (0.0 if is_same_submission else first.total_s),
        itl_p50_s=first.itl_p50_s if last.itl_p50_s is None else last.itl_p50_s,
        itl_max_s=max(gaps, default=None),
        n_preemptions=first.n_preemptions + last.n_preemptions,
    )
