"""TokenStream: one request as its caller sees it, on the event loop."""

from __future__ import annotations

import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

import anyio
import anyio.lowlevel

from cllm.checks import INT32_MAX, MAX_SEED, check_int
from cllm.engine.loop.banned_strings import Ban, BannedStrings
from cllm.engine.loop.channel import CancelHandle, Channel, Continuation
from cllm.engine.loop.input_processor import InputProcessor
from cllm.engine.loop.request_call import RequestCall, new_request_id, token_ids_of
from cllm.engine.loop.saved_generation import SavedGeneration
from cllm.engine.lora import NO_LORA
from cllm.engine.output import Completion, FinishReason, TokenDelta, TokenLogprob
from cllm.engine.request import ModelInfo
from cllm.errors import ClosedError, GenerationError, InvalidArgumentError, InvalidRequestError

MAX_FORKS = 256
# Number of tokens excluded at one position before the previous token is excluded instead, and the maximum.
N_TRIES, MAX_TRIES = 8, 256
CLOSED = "the stream was closed before its end"

FindSource = Callable[[], InputProcessor]
Continues = Callable[[ModelInfo], Continuation]


class _Seeds:
    """Seeds of a stream and of all its forks, of which no two are the same.

    Parameters
    ----------
    first : int or None
        Seed of the stream; None: all are random.
    """

    def __init__(self, first: int | None) -> None:
        self._latest = first

    def next(self) -> int:
        """Return a seed that was not used."""
        if self._latest is None:
            return secrets.randbelow(MAX_SEED + 1)
        self._latest = (self._latest + 1) % (MAX_SEED + 1)
        return self._latest


class TokenStream:
    """The output of one request, token by token.

    A stream is an async iterator of `TokenDelta`, and an async context manager.  Prefer `async with`: it
    cancels a request that was not read to its end.  Entering the block, or the first step without one,
    submits the request.

    A step that is cancelled inside the block, for example by a timeout, loses no delta, and the next step
    continues.  Two cancelled steps end the stream: one without a block, and one that replaces a banned
    string.  A stream that ended early raises `ClosedError` at the next step, so that it never looks complete.

    Attributes
    ----------
    request_id : str

    Raises
    ------
    PromptTooLongError, QueueFullError, InvalidRequestError, ClosedError, EngineFailedError
        When the request is submitted.
    GenerationError
        After the last delta of a request that failed; `.completion` has the partial output.
    ClosedError
        The stream was closed, or its reader cancelled, before its end.
    """

    def __init__(
        self,
        call: RequestCall,
        find_source: FindSource,
        continues: Continues | None = None,
        first: TokenStream | None = None,
    ) -> None:
        # The first output of the request: what was read of its prompt is used again.
        self._first = first
        self.request_id: str = call.request_id
        self._call = call
        # An engine may get another model before the request is submitted.
        self._find_source: FindSource | None = find_source
        self._continues = continues
        self._source: InputProcessor | None = None
        self._is_submitting = False
        self._is_continuing = False  # another request is replacing the present one
        self._channel: Channel | None = None
        self._is_closed = self._is_given_up = False
        self._is_entered = self._has_ended = False
        # It must not refer to the engine: the stream and the engine may be dropped together.
        self._finalizer: weakref.finalize[[CancelHandle], TokenStream] | None = None
        # Tokens read from the present request, and their log probabilities, if requested.
        self._read_ids: list[int] = []
        self._read_logprobs: list[TokenLogprob] = []
        self._banned: BannedStrings | None = None
        self._seeds = _Seeds(call.params.seed if call.seed is None else call.seed)
        self._excluded: dict[int, set[int]] = {}  # by the number of tokens before
        self._forced: set[int] = set()  # numbers of tokens before which no other token is allowed
        # Deltas of the last banned string, from the excluded token on.
        self._rest: tuple[TokenDelta, ...] = ()
        self._failure: GenerationError | None = (
            None  # no request has it: banned strings leave no token
        )

    async def __aenter__(self) -> Self:
        await self._submit()
        self._is_entered = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        self._check_not_continuing()
        channel = self._channel or await self._submit()
        if self._is_closed:  # perhaps while it was submitted
            if self._has_ended:
                raise StopAsyncIteration
            raise ClosedError(CLOSED)
        if self._failure is not None:
            raise self._failure
        try:
            delta = await (channel.next() if self._banned is None else self._allowed())
        except anyio.get_cancelled_exc_class():
            if not self._is_entered:
                self._abandon()
            raise
        if delta is not None:
            self._read_ids += delta.token_ids
            if delta.logprobs:
                self._read_logprobs += delta.logprobs
            return delta
        self._has_ended = True
        self._abandon()
        channel = self._present
        if channel.error is not None:
            raise channel.error
        raise StopAsyncIteration

    @property
    def n_prompt(self) -> int:
        """Number of prompt tokens; 0 until the request is submitted."""
        return 0 if self._channel is None else len(self._channel.request.prompt_token_ids)

    async def completion(self) -> Completion:
        """Read to the end and return the whole output, including deltas that were read before.

        Raises
        ------
        GenerationError, EngineFailedError
            The request failed; `.completion` has the partial output.
        ClosedError
            The engine was closed, or the stream was closed before it was entered.
        """
        if not self._is_closed:
            async for _ in self:
                pass
        if self._failure is not None:
            raise self._failure
        channel = self._present
        if channel.error is not None:
            raise channel.error
        # Closed before its end: the completion arrives when the thread has cancelled the request.
        while channel.completion is None:
            self._take_unread(await channel.next())
            if channel.error is not None:
                raise channel.error
        while self._banned is not None and (delta := await channel.next()) is not None:
            self._take_unread(delta)
        return self._without_banned(channel.completion)

    def _take_unread(self, delta: TokenDelta | None) -> None:
        """End the output of a closed stream before a banned string, if this delta completes one."""
        if self._banned is None or delta is None:
            return
        if (ban := self._banned.push(delta)) is not None:
            self._banned.end(ban, delta)

    def _without_banned(self, done: Completion) -> Completion:
        """Return a completion without what the engine wrote from a banned string on, before it was cancelled."""
        if self._banned is None or not self._banned.n_dropped_tokens:
            return done
        n_tokens = len(done.token_ids) - self._banned.n_dropped_tokens
        usage = done.usage
        return replace(
            done,
            text=done.text[: len(done.text) - self._banned.n_dropped_characters],
            token_ids=done.token_ids[:n_tokens],
            logprobs=None if done.logprobs is None else done.logprobs[:n_tokens],
            usage=replace(
                usage,
                n_output=usage.n_output - self._banned.n_dropped_tokens,
                n_reasoning=min(usage.n_reasoning, n_tokens),
            ),
        )

    async def cancel(self) -> None:
        """Cancel the request; the stream ends with `finish_reason="cancelled"`.

        Its cells are free before the second tick from now.  A request that is not submitted yet is cancelled
        as soon as it is.  Cancelling again, or after the end, does nothing.
        """
        self._is_given_up = True
        if self._channel is not None:
            self._channel.cancel()
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Cancel the request unless it has ended, and stop iterating."""
        self._abandon()
        await anyio.lowlevel.checkpoint()

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, as `Engine.detokenize` does, by the model of this stream.

        It works while the engine drains, and after `Engine.reload`.
        """
        return await self._opener.texts.detokenize(token_ids)

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token, as `Engine.pieces` does, by the model of this stream."""
        return await self._opener.texts.pieces(token_ids)

    # --- A generation as a value -------------------------------------------------------------
    async def suspend(self) -> SavedGeneration:
        """End the stream and return its state, from which `Engine.resume` continues.

        The resumed stream has the same tokens; on a `deterministic` engine to the bit.  The state has the
        tokens, the seed, the unread deltas, and without adapters the KV state.  An engine with the same
        fingerprint restores the KV state; another one computes it again.

        Raises
        ------
        ClosedError
            The whole output has been read, or the stream has been closed.
        InvalidRequestError
            The request has `logprobs`, and `generated` without their log probabilities.
        anyio.BusyResourceError
            Another task is reading.
        """
        channel = await self._submit()
        channel.check_idle()
        channel.check_logprobs()
        if self._is_closed:
            raise ClosedError("the stream is closed: there is nothing to suspend")
        # What adapters have computed is another's, for all that a file can say of it.
        has_own = channel.request.lora == NO_LORA
        with self._closed_if_taken(channel):
            state = await channel.take(saves_state=has_own)
        if channel.error is not None:
            raise channel.error
        held = () if self._banned is None else self._banned.held
        unread = held + channel.unread
        if not unread and not channel.is_taken:
            raise ClosedError("the output has ended: there is nothing to suspend")
        self._abandon()
        earlier = channel.whole_completion()
        call, generated = channel.call, earlier.token_ids
        is_before = len(generated) == len(call.generated)
        call = replace(
            call,
            generated=generated,
            timeout=None,
            call_ids=channel.call_ids,
            excluded=call.excluded if is_before else (),
        )
        continuation = Continuation(
            prompt_token_ids=channel.request.prompt_token_ids,
            answer=channel.answer,
            earlier=earlier,
            logprobs=earlier.logprobs or (),
            unread=unread,
            state=state,
            media=channel.request.media,
        )
        return SavedGeneration.of(call, continuation, self._opener.model)

    def again(self, index: int, request_id: str) -> TokenStream:
        """Return the stream of another output of the same request; the prompt is not checked once more.

        If this stream is submitted first, its tokens, images and audio are used again.

        Parameters
        ----------
        index : int
            With `seed`, the output uses `seed + index`.
        request_id : str

        Raises
        ------
        ClosedError
            This stream was submitted or closed.
        InvalidRequestError
            `request_id` is not valid, or the stream continues another one.
        """
        if self._find_source is None or self._is_closed:
            raise ClosedError("the stream was submitted or closed")
        if self._continues is not None:
            raise InvalidRequestError("again", index, "asked of a stream that continues no other")
        index = check_int("index", index, 0, INT32_MAX, InvalidRequestError)
        seed = self._call.params.seed
        seed = None if seed is None else (seed + index) % (MAX_SEED + 1)
        call = replace(self._call, request_id=request_id, seed=seed)
        return TokenStream(call, self._find_source, first=self._first or self)

    def fork(self, n: int) -> list[TokenStream]:
        """Return more streams that begin with the output read so far; this one continues too.

        The new streams share the cells of this one.  Each draws its own random numbers: with `seed`, those of
        the next seed that neither a fork nor a `rewind` has used, first `seed + 1`.  Their deltas begin here;
        their completions have the whole output.

        Parameters
        ----------
        n : int
            1 to 256.

        Raises
        ------
        InvalidRequestError
            `n` is out of range.  If the output has ended here, entering a new stream raises it.
        ClosedError
            The stream has not been entered.
        """
        n = check_int("n", n, 1, MAX_FORKS, InvalidRequestError)
        channel, source = self._present, self._opener
        continuation = self._continuation()
        made = []
        for _ in range(n):
            call = replace(
                channel.call,
                generated=self._position,
                request_id=new_request_id(),
                seed=self._seeds.next(),
                ids_seed="",
                call_ids=channel.call_ids,
                excluded=(),
            )
            fork = TokenStream(call, lambda: source, lambda model: continuation)
            fork._seeds = self._seeds
            made.append(fork)
        return made

    async def rewind(self, n_tokens: int) -> None:
        """Remove the last tokens that were read, and continue the output before them.

        New random numbers are drawn: with `seed`, those of the next seed, as for `fork`.

        Parameters
        ----------
        n_tokens : int
            1 to the number of output tokens so far.

        Raises
        ------
        InvalidRequestError
            The output has fewer tokens; nothing has changed.
        anyio.BusyResourceError
            Another task is reading.
        """
        with self._going_on():
            await self._submit()
            position = self._position
            n_tokens = check_int("n_tokens", n_tokens, 1, len(position), InvalidRequestError)
            await self._go_on_from(position[:-n_tokens], seed=self._seeds.next())
        self._forget_places()

    async def inject(self, text: str | Sequence[int]) -> None:
        """Append a text, or tokens, to the output as if the model had written them.

        They count as output tokens.  No delta contains them.

        Raises
        ------
        InvalidRequestError
            There is nothing to inject, a token would end the output, no token of `max_tokens` is left, or
            the request has `logprobs`.  Nothing has changed.
        anyio.BusyResourceError
            Another task is reading.
        """
        with self._going_on():
            channel = await self._submit()
            if channel.call.params.logprobs is not None:
                limit = "left out where tokens are injected"
                raise InvalidRequestError("logprobs", channel.call.params.logprobs, limit)
            if isinstance(text, str):
                tokens = tuple(await self._opener.texts.tokenize(text, add_special=False))
            else:
                tokens = token_ids_of("text", text)
            if not tokens:
                raise InvalidRequestError("text", text, "at least one token")
            await self._go_on_from(self._position + tokens)
        self._forget_places()

    @property
    def _position(self) -> tuple[int, ...]:
        """Tokens of the output that the reader has received."""
        return self._present.position(self._read_ids)

    def _continuation(self, *, is_whole: bool = True) -> Continuation:
        """Return the state for a request that continues from here."""
        return self._present.continued(self._read_ids, self._read_logprobs, is_whole=is_whole)

    async def _go_on_from(
        self,
        generated: tuple[int, ...],
        *,
        seed: int | None = None,
        excluded: Sequence[int] = (),
        unread: tuple[TokenDelta, ...] = (),
        is_whole: bool = True,
    ) -> None:
        """Replace the request by one that continues from these tokens, the last of which may be unread.

        With another seed, later calls have other ids, too.  Without `is_whole`, the completion leaves out what
        that of the replaced request leaves out.  Call it within `_going_on`.
        """
        channel, continuation = self._present, self._continuation(is_whole=is_whole)
        call = channel.call
        call = replace(
            call,
            generated=generated,
            excluded=tuple(excluded),
        )
        if seed is not None:
            call = replace(call, seed=seed, ids_seed="", call_ids=channel.call_ids)
        request = channel.request
        coming = tuple(logprob for delta in unread for logprob in delta.logprobs or ())
        n_known = len(generated) - continuation.n_left_out
        continuation = replace(
            continuation,
            logprobs=(*continuation.logprobs, *coming)[:n_known],
            unread=unread,
            submitted_at=request.submitted_at,
            deadline=request.deadline,
        )
        with self._closed_if_taken(channel):
            self._adopt(await self._opener.reopen(channel, call, continuation))
        self._read_ids, self._read_logprobs, self._failure = [], [], None
        self._has_ended = False

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Replace the request in the block.  A stream that has ended is open again, unless another task ends it there.

        Raises
        ------
        anyio.BusyResourceError
            Another task reads, or replaces the request.
        """
        self._check_not_continuing()
        was_closed, was_given_up = self._is_closed, self._is_given_up
        if self._channel is not None:
            self._channel.check_idle()
            self._is_closed = self._is_given_up = False
        self._is_continuing = True
        try:
            yield
        except BaseException:
            self._is_closed |= was_closed
            self._is_given_up |= was_given_up
            raise
        finally:
            self._is_continuing = False

    def _check_not_continuing(self) -> None:
        if self._is_continuing:
            raise anyio.BusyResourceError("continuing")

    @contextmanager
    def _closed_if_taken(self, channel: Channel) -> Iterator[None]:
        """Close the stream if the block fails when the request has ended and no other continues it."""
        try:
            yield
        except BaseException:
            if channel.is_taken and channel.error is None:
                self._abandon()
            raise

    # --- Strings that are banned -------------------------------------------------------------
    async def _allowed(self) -> TokenDelta | None:
        """Return the next delta without banned strings; None after the last."""
        while self._banned is not None:
            if (delta := self._banned.take()) is not None:
                return delta
            if (delta := await self._present.next()) is None:
                return None
            ban = self._dead_end() if delta.finish_reason is FinishReason.ERROR else None
            if ban is None and (ban := self._banned.push(delta)) is None:
                continue
            ended = self._present.completion
            is_cancelled = ended is not None and ended.finish_reason is FinishReason.CANCELLED
            if self._is_given_up or is_cancelled:
                self._banned.end(ban, delta)
            else:
                try:
                    await self._without(ban)
                except anyio.get_cancelled_exc_class():
                    self._abandon()  # the old request may have ended, and there is no new one
                    raise
        return None

    def _dead_end(self) -> Ban | None:
        """Return the ban to be placed elsewhere, if no token is left beside those that are excluded here.

        None for other errors.
        """
        assert self._banned is not None
        channel, held = self._present, self._banned.held
        n_tokens = len(self._position) + sum(len(delta.token_ids) for delta in held)
        if not (
            channel.call.excluded
            and n_tokens == len(channel.call.generated)  # nothing was generated since
            and channel.error is not None
            and isinstance(channel.error.__cause__, InvalidArgumentError)
        ):
            return None
        self._forced.add(n_tokens)
        return Ban(held, self._rest)

    async def _without(self, ban: Ban) -> None:
        """Continue before a banned string, with another token than the one that began it.

        Raises
        ------
        GenerationError
            No other token is possible, or the reader already has those that could be another.
        """
        limit = "other strings: no other token is left where one of them begins"
        strings = self._present.call.params.banned_strings
        placed = ban.placed(len(self._position), self._forced)
        if placed is None:
            self._fail(InvalidRequestError("banned_strings", strings, limit))
        kept, self._rest = placed.kept, placed.rest
        token = self._rest[0].token_ids[0]
        n_before = len(self._position) + sum(len(delta.token_ids) for delta in kept)
        n_tried = len(self._excluded.get(n_before, ()))
        if n_tried >= N_TRIES and kept and kept[-1].token_ids:
            # Banned strings follow whatever token is tried: exclude the token before instead.
            *before, last = kept
            kept, token, self._rest = tuple(before), last.token_ids[0], (last,)
            n_before -= len(last.token_ids)
        elif n_tried >= MAX_TRIES:
            self._fail(ValueError(f"{n_tried} tokens in one place begin a banned string"))
        self._excluded = {n: tokens for n, tokens in self._excluded.items() if n <= n_before}
        self._forced = {n for n in self._forced if n < n_before}
        excluded = self._excluded.setdefault(n_before, set())
        if token in excluded:  # the engine came back to it: it has no other
            self._fail(InvalidRequestError("banned_strings", strings, limit))
        excluded.add(token)
        generated = self._position + tuple(t for delta in kept for t in delta.token_ids)
        with self._going_on():
            await self._go_on_from(
                generated, excluded=sorted(excluded), unread=kept, is_whole=False
            )

    def _fail(self, cause: Exception) -> NoReturn:
        """Cancel the request, and raise an error at this step and at every later one."""
        self._failure = GenerationError.of(self.request_id, cause)
        self._failure.completion = self._present.completion
        self._present.cancel()
        raise self._failure

    def _forget_places(self) -> None:
        """Forget the places of banned strings: they belong to another beginning of the output."""
        self._excluded.clear()
        self._forced.clear()
        self._rest = ()

    # --- Its channel -------------------------------------------------------------------------
    @property
    def _present(self) -> Channel:
        """Channel of the stream's present request."""
        if self._channel is None:
            raise ClosedError("the stream has not been entered")
        return self._channel

    @property
    def _opener(self) -> InputProcessor:
        """Input processor that opened the channel."""
        if self._source is None:
            raise ClosedError("the stream has not been entered")
        return self._source

    async def _submit(self) -> Channel:
        """Submit the request at the first call; return the channel of the present request."""
        if self._channel is None:
            if self._is_closed:
                raise ClosedError(CLOSED)
            if self._is_submitting:
                raise anyio.BusyResourceError("submitting")
            self._is_submitting = True
            assert self._find_source is not None
            try:
                source = self._find_source()
                continuation = None if self._continues is None else self._continues(source.model)
                channel = await source.open(self._call, continuation, self._like(source))
            finally:
                self._is_submitting = False  # if nothing was submitted, it may be tried again
            self._first = None
            # Keep the input processor, which does not refer to the engine.
            self._source, self._find_source, self._continues = source, None, None
            self._adopt(channel)
        return self._present

    def _like(self, source: InputProcessor) -> Channel | None:
        """Return the channel of the first output, if this model has read its prompt before it expired."""
        first = self._first
        if first is None or first._source is not source or first._channel is None:
            return None
        return first._channel if first._channel.request.prompt_token_ids else None

    def _adopt(self, channel: Channel) -> None:
        """Read the deltas of another channel from now on."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._channel = channel
        if strings := channel.call.params.banned_strings:
            self._banned = BannedStrings(strings, channel.text_before)
        if not (channel.is_finished or self._is_closed):
            self._finalizer = weakref.finalize(self, _drop, channel.lease)
            self._finalizer.atexit = False
        if self._is_given_up:  # while the request was prepared
            channel.cancel()

    def _abandon(self) -> None:
        """Cancel unless finished, without waiting.  Idempotent."""
        self._is_closed = self._is_given_up = True
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._channel is not None:
            self._channel.cancel()


def _drop(lease: CancelHandle) -> None:
    """Cancel the request of a stream that was garbage-collected before its end, with a `ResourceWarning`."""
    if not lease.is_over:
        lease.cancel()
        warnings.warn(
            f"TokenStream {lease.request_id} was dropped without being closed",
            ResourceWarning,
            stacklevel=2,
        )
