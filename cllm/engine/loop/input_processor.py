"""InputProcessor: from what a caller gives to a submitted request.  Event loop only.

Texts are tokenized off the loop where they are long, and everything that needs the model to be
known about a request is checked here, before the inference thread hears of it.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import anyio

from cllm.checks import MAX_SEED, check_bool, check_several
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import AnswerFormat, ChatTokenizer
from cllm.engine.chat.control_tokens import ControlTokens, Piece
from cllm.engine.chat.template_abilities import TemplateAbilities
from cllm.engine.chat.tool_schema import ToolParameters
from cllm.engine.constraint import CompiledConstraint
from cllm.engine.loop.channel import Channel, Continuation, Prepared
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.loop.loras import Loras
from cllm.engine.loop.output_channels import OutputChannels
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.loop.request_call import (
    Prompt,
    RequestCall,
    check_length,
    check_lengths,
    check_prompt,
    check_tokens,
    new_request_id,
    texts_told,
)
from cllm.engine.lora import NO_LORA
from cllm.engine.request import GenerationRequest, ModelInfo, RenderedPrompt, Thinking
from cllm.engine.sampling.row_sampler import resamples
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.backend import Constraints
from cllm.engine.thread.worker_thread import WorkerThread, WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import GenerationError, InvalidRequestError

logger = logging.getLogger("cllm.engine")

# Texts up to this many characters are tokenized on the event loop, in microseconds; longer ones can
# recurse deeply or take long and go to a thread with a large stack.
SHORT_TEXT = 64
SHORT_TOKENS = 1024
MARKS = re.compile(r"[<\[]")  # what names of control tokens have, and few texts


class InputProcessor:
    """The way in.

    Parameters
    ----------
    check_serving : callable
        The vocabulary, or why requests are not served; with `draining`, the last ones are enough.
    constraints : Constraints
        Ended by `aclose`.
    workers : WorkerThreads
        Those of the engine.
    tokenizer : WorkerThread
        The one of them for texts.
    """

    def __init__(
        self,
        check_serving: Callable[..., EngineVocabulary],
        gate: QueueGate,
        dispatcher: Dispatcher,
        loras: Loras,
        *,
        stream_buffer: int,
        constraints: Constraints,
        workers: WorkerThreads,
        tokenizer: WorkerThread,
        can_speculate: bool,
    ) -> None:
        self._check_serving = check_serving
        self._gate = gate
        self._dispatcher = dispatcher
        self._loras = loras
        self._stream_buffer = stream_buffer
        self._has_warned = self._has_warned_of_names = False
        self._names: ControlTokens | None = None
        self._chats: ChatTokenizer | None = None
        self._workers = workers
        self._tokenizer = tokenizer
        self._constraints = constraints
        self._can_speculate = can_speculate

    async def aclose(self) -> None:
        """End what tries constraints."""
        await self._constraints.aclose()

    @property
    def model(self) -> ModelInfo:
        """What is loaded."""
        model = self._dispatcher.model
        assert model is not None
        return model

    @property
    def _n_ctx(self) -> int:
        """Positions that one sequence can have."""
        return self.model.n_ctx

    def _check_generates(self) -> None:
        model = self.model
        if not model.generates:
            limit = "one that generates text: this one is here for embeddings"
            raise InvalidRequestError("model", model.name or model.path, limit)

    async def open(self, call: RequestCall, continuation: Continuation | None = None) -> Channel:
        """Tokenize, check and submit; see `TokenStream` for what it raises."""
        self._check_serving()
        self._check_generates()
        if continuation is not None and continuation.is_finished:
            return self._dispatcher.open_finished(self._finished(call, continuation))
        self._gate.enter()
        try:
            prepared = await self._prepare(call, continuation)
            if self._dispatcher.is_open(call.request_id):
                raise InvalidRequestError("request_id", call.request_id, "not in use")
        except BaseException:
            self._gate.leave(is_served=False)
            raise
        # Nothing is awaited from here on: a submitted request always has its channel.
        return self._submit(prepared)

    def _finished(self, call: RequestCall, continuation: Continuation) -> Prepared:
        """Of an output that only its reader has not all of: nobody is asked for anything."""
        request = GenerationRequest(
            request_id=call.request_id,
            serial=0,
            prompt_token_ids=continuation.prompt_token_ids,
            params=call.params,
            priority=call.priority,
            submitted_at=time.perf_counter(),
            deadline=None,
            generated_token_ids=call.generated,
        )
        source = weakref.ref(self)
        return Prepared(call, request, source, continuation.answer, continuation=continuation)

    async def reopen(
        self, channel: Channel, call: RequestCall, continuation: Continuation
    ) -> Channel:
        """Let the request of a channel go on as `call` says; if that is refused, nothing has changed."""
        # Its place is kept: who is being served does not wait for others, nor for a model that goes.
        with self._gate.visit():
            prepared = await self._prepare(call, continuation, is_running=True)
            await channel.take()
            if channel.error is not None and not isinstance(channel.error, GenerationError):
                raise channel.error
            self._check_serving(draining=True)
            self._gate.enter(is_known=True)
            earlier = channel.completion
            return self._submit(
                replace(prepared, continuation=replace(continuation, earlier=earlier))
            )

    def _submit(self, prepared: Prepared) -> Channel:
        request = replace(prepared.request, serial=self._dispatcher.next_serial())
        return self._dispatcher.submit(replace(prepared, request=request), self._stream_buffer)

    async def _prepare(
        self,
        call: RequestCall,
        continuation: Continuation | None,
        *,
        is_running: bool = False,
    ) -> Prepared:
        """A call as a request that the engine can work on; its place in the queue is the caller's."""
        vocabulary = self._check_serving(draining=is_running)
        if call.params.speculation and not self._can_speculate:
            limit = "left out: the engine was started without speculation"
            raise InvalidRequestError("speculation", True, limit)
        call.check_generated()
        call = replace(call, params=await self._with_stop_tokens(call.params))
        submitted_at = time.perf_counter()
        tokens: tuple[int, ...] = ()
        answer: AnswerFormat | None = None
        constraint: CompiledConstraint | None = None
        strips_space = False
        told: list[str] = []
        # What expires here is submitted all the same: it ends as every other that expires.
        with anyio.move_on_after(call.timeout) as scope:
            tokens, answer = await self._prompt(call, continuation)
            check_tokens(tokens, call.params, self._n_ctx, vocabulary.n_tokens, call.generated)
            _check_marks(call, len(tokens), vocabulary.n_tokens)
            self._loras.use(call.lora, tokens)  # refused before what takes long
            self._warn_of_length(len(tokens))
            strips_space = vocabulary.prefixes_space and _begins_text(call.prompt, vocabulary)
            told = await self._told(call, answer, strips_space=strips_space)
            constraint = await self._compile(call.params, answer)
        self._check_serving(draining=True)
        lora = self._loras.use(call.lora, tokens)  # one may have left meanwhile
        first_scored = call.first_scored
        if first_scored is None and call.params.prompt_logprobs is not None:
            first_scored = 1
        deadline = None if call.timeout is None else submitted_at + call.timeout
        if scope.cancelled_caught:  # without its constraint, it must not compute a token
            deadline = submitted_at
        thinking = _thinking_of(answer, constraint)
        call = _with_drawn(call)
        request = GenerationRequest(
            request_id=call.request_id,
            serial=0,
            prompt_token_ids=tokens,
            params=call.params,
            priority=call.priority,
            submitted_at=submitted_at,
            deadline=deadline,
            first_scored=first_scored,
            strips_space=strips_space,
            constraint=constraint,
            spelled={} if answer is None else answer.spelled,
            thinking=thinking,
            fingerprint=self.model.fingerprint,
            generated_token_ids=call.generated,
            lora=lora,
            resamples=bool(call.generated) and resamples(call.params, constraint, thinking),
            seed=call.seed,
            excluded=call.excluded,
            tenant=call.tenant,
        )
        channels, is_whole = None, continuation is not None
        if answer is not None:
            channels = OutputChannels(answer.parser(call.ids_seed), told, is_whole=is_whole)
        if continuation is not None:
            request = _continued(request, continuation)
        source, text = weakref.ref(self), "".join(told)
        return Prepared(call, request, source, answer, channels, text, continuation)

    async def _prompt(
        self, call: RequestCall, continuation: Continuation | None
    ) -> tuple[tuple[int, ...], AnswerFormat | None]:
        """The tokens of a prompt, and how an answer to it is read."""
        if not isinstance(call.prompt, ChatPrompt):
            if continuation is not None:
                return continuation.prompt_token_ids, None
            return await self._tokens(call.prompt, parse_special=call.parse_special), None
        if continuation is None:
            return await self._chat_tokens(call.prompt)
        # Rendered anew, a template that tells the time would say something else.
        tokens, answer = continuation.prompt_token_ids, continuation.answer
        if answer is None:
            _, answer = await self._chat_tokens(call.prompt)
        return tokens, answer

    async def _told(
        self, call: RequestCall, answer: AnswerFormat | None, *, strips_space: bool
    ) -> list[str]:
        """What the reader has been told of an output that goes on, with each token."""
        if not call.generated:
            return []
        vocabulary = self._check_serving(draining=True)

        def tell() -> list[str]:
            return texts_told(
                call.generated,
                call.params,
                vocabulary,
                spelled={} if answer is None else answer.spelled,
                strips_space=strips_space,
            )

        is_short = len(call.generated) <= SHORT_TOKENS
        return tell() if is_short else await self._tokenizer.run(tell)

    def _warn_of_length(self, n_tokens: int) -> None:
        """Once: a prompt longer than any that the model was trained on."""
        model = self.model
        if n_tokens > model.n_ctx_train and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a prompt of %d tokens: %s was trained on %d at most",
                n_tokens, model.name or model.path, model.n_ctx_train,
            )  # fmt: skip

    async def score_call(
        self,
        prompt: Prompt,
        continuation: Prompt,
        priority: int = 0,
        lora: Mapping[str, float] | None = None,
    ) -> RequestCall:
        """The request that gives the log probabilities of a continuation."""
        prompt = check_prompt(prompt)
        continuation = check_prompt(continuation, "continuation")
        before = await self._tokens(prompt)
        after = await self._continuation(prompt, before, continuation)
        for field, tokens in (("prompt", before), ("continuation", after)):
            if not tokens:
                raise InvalidRequestError(field, "", "at least one token")
        n_vocab = self._check_serving(draining=True).n_tokens
        if max(after) >= n_vocab:
            raise InvalidRequestError("continuation", max(after), f"token ids 0 to {n_vocab - 1}")
        return RequestCall(
            prompt=(*before, *after),
            params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            priority=priority,
            timeout=None,
            request_id=new_request_id(),
            first_scored=len(before),
            lora=lora,
        )

    async def _continuation(
        self,
        prompt: str | tuple[int, ...],
        before: tuple[int, ...],
        continuation: str | tuple[int, ...],
    ) -> tuple[int, ...]:
        """The tokens of a continuation as it would be generated: after those of the prompt."""
        if not isinstance(continuation, str):
            return continuation
        check_length(continuation, self._n_ctx, "continuation")
        if isinstance(prompt, str):
            both = await self._tokens(prompt + continuation)
            if both[: len(before)] == before:
                return both[len(before) :]
        return tuple(await self.tokenize(continuation, add_special=False))

    async def _tokens(
        self, prompt: str | tuple[int, ...], *, parse_special: bool = False
    ) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        check_length(prompt, self._n_ctx)
        if not parse_special:
            await self._warn_of_control_tokens(prompt)
        return tuple(await self.tokenize(prompt, parse_special=parse_special))

    async def _warn_of_control_tokens(self, prompt: str) -> None:
        """Warn once of a prompt that spells control tokens, which are text there."""
        if self._has_warned_of_names or not MARKS.search(prompt):
            return
        found = (await self._control_names()).search(prompt)
        if found is not None:
            self._has_warned_of_names = True
            logger.warning(
                "a prompt spells the control token %r, which is text there: parse_special=True makes it "
                "the token",
                found.group(),
            )

    async def _control_names(self) -> ControlTokens:
        """Return the names of control tokens, found when they are first wanted."""
        if self._names is None:
            vocabulary = self._check_serving(draining=True)
            self._names = await self._tokenizer.run(
                lambda: ControlTokens(vocabulary.control_names())
            )
        return self._names

    async def _with_stop_tokens(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the control tokens that stop strings name: these have no text."""
        found: list[int] = []
        vocabulary = self._check_serving(draining=True)
        for text in filter(MARKS.search, params.stop):
            if (await self._control_names()).search(text) is not None:
                tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
                known = (*params.stop_token_ids, *found)
                found += tokens if len(tokens) == 1 and tokens[0] not in known else []
        if not found:
            return params
        return replace(params, stop_token_ids=(*params.stop_token_ids, *found))

    async def _chat_tokens(self, prompt: ChatPrompt) -> tuple[tuple[int, ...], AnswerFormat | None]:
        chat = self._chat
        rendered = await self._tokenizer.run(lambda: chat.render(prompt))
        return await self._piece_tokens(rendered.pieces), rendered.answer

    async def _compile(
        self, params: SamplingParams, answer: AnswerFormat | None
    ) -> CompiledConstraint | None:
        grammar = None if answer is None else answer.grammar
        try:
            return await self._constraints.compile(params, grammar)
        except InvalidRequestError as error:
            if answer is None or error.field != "tools":
                raise
            raise await self._error_of_tools(answer.tools, error) from error

    async def _error_of_tools(
        self, tools: Sequence[ToolParameters], error: InvalidRequestError
    ) -> InvalidRequestError:
        """Return the error of a grammar, which the caller has not seen, as that of a tool's schema."""
        for tool in tools if error.__cause__ is None else ():
            options = {} if tool.is_strict else {"x-guidance": {"lenient": True}}
            schema = {**await self._tokenizer.run(tool.json), **options}
            try:
                await self._constraints.compile(SamplingParams(json_schema=schema))
            except InvalidRequestError as found:
                return InvalidRequestError(tool.field, schema, found.limit)
        return InvalidRequestError("tools", [tool.name for tool in tools], error.limit)

    async def _piece_tokens(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        check_lengths([piece.text for piece in pieces], self._n_ctx, "messages")
        self._check_serving(draining=True)
        chat = self._chat
        return tuple(await self._tokenizer.run(lambda: chat.tokenize(pieces)))

    async def render_chat(self, prompt: ChatPrompt) -> RenderedPrompt:
        """See `Engine.render_chat`."""
        chat = self._chat
        rendered = await self._tokenizer.run(lambda: chat.render(prompt))
        text = "".join(piece.text for piece in rendered.pieces)
        return RenderedPrompt(text, await self._piece_tokens(rendered.pieces))

    async def template_abilities(self) -> TemplateAbilities | None:
        """See `Engine.template_abilities`."""
        if self.model.chat_template is None:
            return None
        chat = self._chat
        return await self._tokenizer.run(lambda: chat.abilities)

    @property
    def _chat(self) -> ChatTokenizer:
        """Made when the first chat comes."""
        if self._chats is None:
            model, vocabulary = self.model, self._check_serving(draining=True)
            self._chats = ChatTokenizer(vocabulary, model.chat_template, model.tool_chat_template)
            self._workers.end_first(self._chats.close)
        return self._chats

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """See `Engine.tokenize`."""
        vocabulary = self._check_serving(draining=True)
        check_bool("add_special", add_special)
        check_bool("parse_special", parse_special)

        def call() -> list[int]:
            return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

        if not isinstance(text, str) or len(text) <= SHORT_TEXT:
            return call()
        return await self._tokenizer.run(call)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Engine.detokenize`."""
        vocabulary = self._check_serving(draining=True)
        check_several("token_ids", token_ids, "a sequence of token ids")

        def call() -> str:
            return vocabulary.join(token_ids).decode("utf-8", "replace")

        return call() if len(token_ids) <= SHORT_TOKENS else await self._tokenizer.run(call)

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """See `Engine.pieces`."""
        vocabulary = self._check_serving(draining=True)
        check_several("token_ids", token_ids, "a sequence of token ids")

        def call() -> list[bytes]:
            return [vocabulary.piece(token) for token in token_ids]

        return call() if len(token_ids) <= SHORT_TOKENS else await self._tokenizer.run(call)


def _check_marks(call: RequestCall, n_prompt: int, n_vocab: int) -> None:
    """Reject values that only a damaged file can have."""
    if call.first_scored is not None and call.first_scored > n_prompt:
        raise InvalidRequestError("first_scored", call.first_scored, f"0 to {n_prompt}")
    if call.excluded and max(call.excluded) >= n_vocab:
        raise InvalidRequestError("excluded", max(call.excluded), f"token ids below {n_vocab}")


def _with_drawn(call: RequestCall) -> RequestCall:
    """With what is random settled: what goes on elsewhere has to draw the same."""
    seed = call.params.seed if call.seed is None else call.seed
    return replace(
        call,
        seed=secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
        # The ids of calls are nobody else's, even where a gateway gives all requests one id.
        ids_seed=call.ids_seed or f"{call.request_id}:{secrets.token_hex(8)}",
    )


def _continued(request: GenerationRequest, continuation: Continuation) -> GenerationRequest:
    """With what it takes along from the request before it."""
    if continuation.submitted_at is not None:  # its caller has waited since then
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
    """Return how the output thinks, if a constraint or a budget depends on it."""
    if answer is None or answer.thinking is None:
        return None
    return answer.thinking if constraint or answer.thinking.budget is not None else None


def _begins_text(prompt: str | tuple[int, ...] | ChatPrompt, vocabulary: EngineVocabulary) -> bool:
    """Whether an output stands for itself: an answer in a chat, or what follows no text."""
    if isinstance(prompt, tuple):
        return not any(map(vocabulary.piece, prompt))
    return isinstance(prompt, ChatPrompt) or not prompt
