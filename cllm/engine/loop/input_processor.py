"""InputProcessor: from a checked call to a submitted request.  Event loop only.

All checks of a request that need the model are made here, before the request is submitted.  A request
goes through these passes once, in this order:

| pass | it finds out |
|---|---|
| `_check` | whether this model, and this engine, can serve such a request at all |
| `_read` | the tokens of the prompt, and how an answer to it is read |
| `_fit` | whether the tokens fit into the context and the vocabulary, and which adapters compute them |
| `_recall` | the text of the tokens in `generated`, and its channels, if the request continues an output |
| `_constrain` | the compiled constraint of the output |
| `_channel` | the request, and the channel of its deltas |
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import anyio

from cllm.checks import MAX_SEED
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import AnswerFormat
from cllm.engine.chat.tool_schema import ToolParameters
from cllm.engine.constraint import CompiledConstraint
from cllm.engine.loop.channel import Channel, Continuation
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.loop.loras import LoraRegistry
from cllm.engine.loop.output_channels import OutputChannels
from cllm.engine.loop.prompt_tokenizer import PromptTokenizer
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.loop.request_call import MixedPrompt, Prompt, RequestCall, check_tokens
from cllm.engine.lora import NO_LORA, LoraUse
from cllm.engine.media import MediaInput
from cllm.engine.request import GenerationRequest, ModelInfo, Thinking
from cllm.engine.sampling.row_sampler import resamples
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.backend import Constraints
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import GenerationError, InvalidRequestError


@dataclass(slots=True)
class _Draft:
    """A request on its way through the passes."""

    call: RequestCall
    continuation: Continuation | None
    vocabulary: EngineVocabulary
    submitted_at: float
    like: Channel | None = None
    lora: LoraUse | None = None
    tokens: tuple[int, ...] = ()
    media: tuple[MediaInput, ...] = ()
    answer: AnswerFormat | None = None
    strips_space: bool = False
    told: list[str] = field(default_factory=list)
    outputs: OutputChannels | None = None
    constraint: CompiledConstraint | None = None


class InputProcessor:
    """Checks, tokenizes and submits requests.

    Parameters
    ----------
    check_serving : callable
        Returns the vocabulary, or raises the error that says why no requests are served.  With
        `draining=True` a draining engine counts as serving.
    texts : PromptTokenizer
    constraints : Constraints
        Compiler of constraints; `aclose` ends it.
    """

    def __init__(
        self,
        check_serving: Callable[..., EngineVocabulary],
        gate: QueueGate,
        dispatcher: Dispatcher,
        loras: LoraRegistry,
        texts: PromptTokenizer,
        *,
        stream_buffer: int,
        constraints: Constraints,
        can_speculate: bool,
    ) -> None:
        self._check_serving = check_serving
        self._gate = gate
        self._dispatcher = dispatcher
        self._loras = loras
        self.texts = texts
        self._stream_buffer = stream_buffer
        self._constraints = constraints
        self._can_speculate = can_speculate

    async def aclose(self) -> None:
        """End the child process that tries constraints."""
        await self._constraints.aclose()

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        return self._dispatcher.loaded()

    # --- Channels ----------------------------------------------------------------------------
    async def open(
        self,
        call: RequestCall,
        continuation: Continuation | None = None,
        like: Channel | None = None,
    ) -> Channel:
        """Tokenize, check and submit a request; see `TokenStream` for the errors.

        `like` is the channel of a request with the same prompt, which is then not read again.
        """
        self._check_serving()
        if not self.model.generates:
            limit = "a model that generates text: this one computes embeddings only"
            raise InvalidRequestError("model", self.model.name or self.model.path, limit)
        if continuation is not None and continuation.is_finished:
            return self._finished(call, continuation)
        self._gate.enter()
        try:
            channel = await self._prepare(call, continuation, like=like)
            if self._dispatcher.is_open(call.request_id):
                raise InvalidRequestError("request_id", call.request_id, "not in use")
            # Nothing is awaited from here on: a submitted request always has its channel.
            self._dispatcher.submit(channel)
        except BaseException:
            self._gate.leave(is_served=False)
            raise
        return channel

    def _finished(self, call: RequestCall, continuation: Continuation) -> Channel:
        """Return the channel of an output that is complete but not read to its end; nothing is submitted."""
        request = GenerationRequest(
            request_id=call.request_id,
            serial=0,
            prompt_token_ids=continuation.prompt_token_ids,
            params=call.params,
            priority=call.priority,
            submitted_at=time.perf_counter(),
            deadline=None,
            generated_token_ids=call.generated,
            tenant=call.tenant,
            media=continuation.media,
        )
        return self._dispatcher.channel(
            call, request, 1, answer=continuation.answer, continuation=continuation
        )

    async def reopen(
        self, channel: Channel, call: RequestCall, continuation: Continuation
    ) -> Channel:
        """Replace the request of a channel by `call`; if that is rejected, nothing has changed.

        Raises
        ------
        InvalidRequestError
            As for `open`; or the request has ended, and another one has its id.
        """
        # An output that was complete has no request; its adapters are those of its call.
        is_request = channel.continuation is None or not channel.continuation.is_finished
        # `visit` keeps an old model until the request continues, and `is_known` skips the queue: a running
        # request does not wait for others.
        with self._gate.visit(), self._dispatcher.kept_id(channel):
            lora = channel.request.lora if is_request else None  # whatever was loaded since
            follower = await self._prepare(call, continuation, is_running=True, lora=lora)
            await channel.take()
            if channel.error is not None and not isinstance(channel.error, GenerationError):
                raise channel.error
            self._check_serving(draining=True)
            follower.continuation = replace(continuation, earlier=channel.completion)
            self._dispatcher.submit(follower)
            self._gate.enter(is_known=True)
            return follower

    async def score_call(self, prompt: Prompt, continuation: Prompt) -> RequestCall:
        """Return a request, not submitted yet, for the log probabilities of a continuation."""
        before, after = await self.texts.scored(prompt, continuation)
        return RequestCall(
            prompt=(*before, *after),
            params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            first_scored=len(before),
        )

    # --- Passes ------------------------------------------------------------------------------
    async def _prepare(
        self,
        call: RequestCall,
        continuation: Continuation | None,
        *,
        is_running: bool = False,
        like: Channel | None = None,
        lora: LoraUse | None = None,
    ) -> Channel:
        """Return the channel of a request that can be submitted; the caller has entered it in the gate."""
        vocabulary = self._check_serving(draining=is_running)
        now = time.perf_counter()
        draft = _Draft(_with_drawn(call), continuation, vocabulary, now, like, lora)
        # A request that expires here is still submitted, and ends like any other that expires.
        with anyio.move_on_after(call.timeout) as scope:
            for visit in (self._check, self._read, self._fit, self._recall, self._constrain):
                await visit(draft)
        self._check_serving(draining=True)
        return self._channel(draft, has_expired=scope.cancelled_caught)

    async def _check(self, draft: _Draft) -> None:
        call = draft.call
        if call.params.speculation and not self._can_speculate:
            limit = "left out: the engine was started without speculation"
            raise InvalidRequestError("speculation", True, limit)
        call.check_generated()
        draft.call = replace(call, params=await self.texts.with_stop_tokens(call.params))

    async def _read(self, draft: _Draft) -> None:
        call, continuation = draft.call, draft.continuation
        if continuation is not None:
            # Not rendered again: the template may write the present time.
            draft.tokens, draft.answer = continuation.prompt_token_ids, continuation.answer
            draft.media = continuation.media
            await self.texts.media.check(draft.media, draft.tokens)
            if isinstance(call.prompt, ChatPrompt) and draft.answer is None:
                draft.answer = await self.texts.answer_format(call.prompt)
        elif (like := draft.like) is not None:
            draft.tokens, draft.media = like.request.prompt_token_ids, like.request.media
            draft.answer = like.answer
        elif isinstance(call.prompt, ChatPrompt):
            draft.tokens, draft.media, draft.answer = await self.texts.chat_tokens(call.prompt)
        else:
            draft.tokens, draft.media = await self.texts.tokens(
                call.prompt, parse_special=call.parse_special
            )
        if draft.media and _first_scored(call) is not None:
            limit = "left out: a prompt with images or audio has no log probabilities"
            raise InvalidRequestError("prompt_logprobs", call.params.prompt_logprobs, limit)

    async def _fit(self, draft: _Draft) -> None:
        call, tokens, n_vocab = draft.call, draft.tokens, draft.vocabulary.n_tokens
        check_tokens(tokens, call.params, self.model.n_ctx, n_vocab, call.generated)
        _check_marks(call, len(tokens), n_vocab)
        self._lora_of(draft)  # reject unknown adapters before the slow passes
        self.texts.warn_of_length(len(tokens))

    def _lora_of(self, draft: _Draft) -> LoraUse:
        """Return the adapters of a request: of a request that goes on, those that it has."""
        if draft.lora is not None and self._loras.has(draft.lora):
            return draft.lora
        return self._loras.use(draft.call.lora, draft.tokens)

    async def _recall(self, draft: _Draft) -> None:
        call, vocabulary = draft.call, draft.vocabulary
        draft.strips_space = vocabulary.prefixes_space and _begins_text(call.prompt, vocabulary)
        told = await self.texts.texts_of_generated(
            call, draft.answer, strips_space=draft.strips_space
        )
        if (answer := draft.answer) is not None:
            before = draft.continuation
            n_left_out = len(told) if before is None else before.n_left_out

            def split() -> OutputChannels:
                parser = answer.parser(call.ids_seed, call.call_ids)
                return OutputChannels(parser, told, n_left_out)

            draft.outputs = await self.texts.run_for(call.generated, split)
            # Ids of calls behind `generated` are dropped.
            draft.call = replace(call, call_ids=draft.outputs.call_ids)
        draft.told = told

    async def _constrain(self, draft: _Draft) -> None:
        answer = draft.answer
        grammar = None if answer is None else answer.grammar
        try:
            draft.constraint = await self._constraints.compile(draft.call.params, grammar)
        except InvalidRequestError as error:
            if answer is None or error.field != "tools":
                raise
            raise await self._error_of_tools(answer.tools, error) from error

    async def _error_of_tools(
        self, tools: Sequence[ToolParameters], error: InvalidRequestError
    ) -> InvalidRequestError:
        """Return the error of a grammar as one of the tool's schema, or of `tools` if no tool alone causes it."""
        for tool in tools if error.__cause__ is None else ():
            options = {} if tool.is_strict else {"x-guidance": {"lenient": True}}
            schema = {**await self.texts.worker.run(tool.json), **options}
            try:
                await self._constraints.compile(SamplingParams(json_schema=schema))
            except InvalidRequestError as found:
                return InvalidRequestError(tool.field, schema, found.limit)
        return InvalidRequestError("tools", [tool.name for tool in tools], error.limit)

    def _channel(self, draft: _Draft, *, has_expired: bool) -> Channel:
        call, answer, continuation = draft.call, draft.answer, draft.continuation
        thinking = _thinking_of(answer, draft.constraint)
        request = GenerationRequest(
            request_id=call.request_id,
            serial=self._dispatcher.next_serial(),
            prompt_token_ids=draft.tokens,
            params=call.params,
            priority=call.priority,
            submitted_at=draft.submitted_at,
            deadline=_deadline(draft, has_expired=has_expired),
            first_scored=_first_scored(call),
            strips_space=draft.strips_space,
            constraint=draft.constraint,
            spelled={} if answer is None else answer.spelled,
            thinking=thinking,
            fingerprint=self.model.fingerprint,
            generated_token_ids=call.generated,
            lora=self._lora_of(draft),  # may be unloaded since `_fit`
            resamples=bool(call.generated) and resamples(call.params, draft.constraint, thinking),
            seed=call.seed,
            excluded=call.excluded,
            tenant=call.tenant,
            media=draft.media,
        )
        if continuation is not None:
            request = _continued(request, continuation)
        return self._dispatcher.channel(
            call,
            request,
            self._stream_buffer,
            answer=answer,
            outputs=draft.outputs,
            told=draft.told,
            continuation=continuation,
        )


def _deadline(draft: _Draft, *, has_expired: bool) -> float | None:
    if has_expired:  # its constraint may be missing: no token may be computed
        return draft.submitted_at
    timeout = draft.call.timeout
    return None if timeout is None else draft.submitted_at + timeout


def _first_scored(call: RequestCall) -> int | None:
    if call.first_scored is None and call.params.prompt_logprobs is not None:
        return 1
    return call.first_scored


def _check_marks(call: RequestCall, n_prompt: int, n_vocab: int) -> None:
    """Reject values that only a damaged file of a `SavedGeneration` can have."""
    if call.first_scored is not None and call.first_scored > n_prompt:
        raise InvalidRequestError("first_scored", call.first_scored, f"0 to {n_prompt}")
    if call.excluded and max(call.excluded) >= n_vocab:
        raise InvalidRequestError("excluded", max(call.excluded), f"token ids below {n_vocab}")


def _with_drawn(call: RequestCall) -> RequestCall:
    """Return the call with its random values drawn, so that a continuation elsewhere draws the same."""
    seed = call.params.seed if call.seed is None else call.seed
    return replace(
        call,
        seed=secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
        # The ids of calls are unique, even where a gateway gives all requests one id.
        ids_seed=call.ids_seed or f"{call.request_id}:{secrets.token_hex(8)}",
    )


def _continued(request: GenerationRequest, continuation: Continuation) -> GenerationRequest:
    """Return the request with the state that it inherits from the one it continues."""
    if continuation.submitted_at is not None:  # the same stream: its time runs since then
        request = replace(
            request, submitted_at=continuation.submitted_at, deadline=continuation.deadline
        )
    return replace(
        request,
        n_unread=len(continuation.unread),
        state=continuation.state if request.lora == NO_LORA else None,
    )


def _thinking_of(
    answer: AnswerFormat | None, constraint: CompiledConstraint | None
) -> Thinking | None:
    """Return the markers and the budget of the thought; None unless a constraint or a budget needs them."""
    if answer is None or answer.thinking is None:
        return None
    return answer.thinking if constraint or answer.thinking.budget is not None else None


def _begins_text(
    prompt: str | tuple[int, ...] | MixedPrompt | ChatPrompt, vocabulary: EngineVocabulary
) -> bool:
    """Return True if an output begins a text: an answer in a chat, or the output of a prompt without text."""
    if isinstance(prompt, tuple):
        return not any(map(vocabulary.piece, prompt))
    if isinstance(prompt, MixedPrompt):
        return not any(isinstance(part, str) and part for part in prompt.parts)
    return isinstance(prompt, ChatPrompt) or not prompt
