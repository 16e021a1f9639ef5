"""PromptTokenizer: converts texts and chats to token ids, and back.  Event loop only.

Long texts are tokenized in a worker thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cllm.checks import check_bool, check_lengths, check_several
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import AnswerFormat, ChatTokenizer
from cllm.engine.chat.control_tokens import ControlTokens, Piece
from cllm.engine.chat.media_marks import media_in_words
from cllm.engine.chat.template_abilities import TemplateAbilities
from cllm.engine.loop.media_reader import MAX_PROMPT_BYTES, MediaReader
from cllm.engine.loop.request_call import (
    MixedPrompt,
    Prompt,
    RequestCall,
    check_length,
    check_prompt,
    texts_told,
)
from cllm.engine.media import MediaInput
from cllm.engine.media_source import NamedMedia
from cllm.engine.request import ModelInfo, RenderedPrompt
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.worker_thread import WorkerThread, WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import InvalidRequestError, PromptTooLongError

logger: logging.Logger = logging.getLogger("cllm.engine")

T = TypeVar("T")

# Texts up to this many characters are tokenized on the event loop, in microseconds; longer ones can
# recurse deeply or take long and go to a thread with a large stack.
SHORT_TEXT = 64
SHORT_TOKENS = 1024
MARKS = re.compile(r"[<\[]")  # in the names of control tokens, and in few other texts


class PromptTokenizer:
    """Conversions between text and token ids.

    Parameters
    ----------
    vocabulary : callable
        Returns the vocabulary, also of a draining engine; raises the error that says why none is served.
    model : callable
        Returns the loaded model.
    workers : WorkerThreads
        Worker threads of the engine.
    worker : WorkerThread
        Worker thread for texts.
    media : MediaReader
    """

    def __init__(
        self,
        vocabulary: Callable[[], EngineVocabulary],
        model: Callable[[], ModelInfo],
        workers: WorkerThreads,
        worker: WorkerThread,
        media: MediaReader,
    ) -> None:
        self.vocabulary = vocabulary
        self._model = model
        self._workers = workers
        self.worker = worker
        self.media: MediaReader = media
        self._has_warned = self._has_warned_of_names = False
        self._names: ControlTokens | None = None
        self._chats: ChatTokenizer | None = None

    # --- Prompts -----------------------------------------------------------------------------
    async def tokens(
        self, prompt: str | tuple[int, ...] | MixedPrompt, *, parse_special: bool = False
    ) -> tuple[tuple[int, ...], tuple[MediaInput, ...]]:
        """Return the tokens of a raw prompt, with the rows of its media, and the media."""
        if isinstance(prompt, str):
            return await self._text_tokens(prompt, parse_special=parse_special), ()
        if not isinstance(prompt, MixedPrompt):
            return prompt, ()
        texts = [part for part in prompt.parts if isinstance(part, str)]
        check_lengths(texts, self._model().n_ctx, "prompt")
        vocabulary, tokens = self.vocabulary(), list[int]()
        if vocabulary.adds_bos and vocabulary.bos is not None:
            tokens.append(vocabulary.bos)
        first, *others = prompt.parts if isinstance(prompt.parts[0], str) else ("", *prompt.parts)
        assert isinstance(first, str)
        tokens += await self.worker.run(
            partial(vocabulary.tokenize, first, add_special=False, parse_special=parse_special)
        )
        inside = partial(vocabulary.tokenize_inside, parse_special=parse_special)
        return await self._with_media(tokens, others, inside)

    async def _with_media(
        self,
        tokens: list[int],
        parts: Sequence[T | NamedMedia],
        tokenize: Callable[[T], list[int]],
        words: Callable[[NamedMedia], T] | None = None,
    ) -> tuple[tuple[int, ...], tuple[MediaInput, ...]]:
        """Return `tokens` with those of the parts behind them, and the media among the parts.

        Parameters
        ----------
        tokenize : callable
            Returns the tokens of a part that is text; called in the worker thread.
        words : callable, optional
            Returns a part that replaces optional media that cannot be read.

        Raises
        ------
        PromptTooLongError
            There are too many; nothing further is decoded.
        InvalidRequestError
            An image or audio cannot be read, or all have too many bytes together.
        """
        media, n_ctx, n_bytes = list[MediaInput](), self._model().n_ctx, 0
        async with self.media.turn() as decoder:
            for part in parts:
                if not isinstance(part, NamedMedia):
                    tokens += await self.worker.run(partial(tokenize, part))
                    continue
                try:
                    found = await self.media.read(part, decoder)
                except InvalidRequestError:
                    if words is None or not part.is_optional:
                        raise
                    tokens += await self.worker.run(partial(tokenize, words(part)))
                    continue
                tokens += found.tokens
                media.append(found.media)
                if len(tokens) > n_ctx:
                    raise PromptTooLongError(len(tokens), n_ctx)
                n_bytes += len(found.media.data)
                if n_bytes > MAX_PROMPT_BYTES:
                    limit = f"at most {MAX_PROMPT_BYTES} bytes of pixels and samples in a prompt"
                    raise InvalidRequestError(part.field, f"{n_bytes} bytes", limit)
        return tuple(tokens), tuple(media)

    async def _text_tokens(self, prompt: str, *, parse_special: bool = False) -> tuple[int, ...]:
        check_length(prompt, self._model().n_ctx)
        if not parse_special:
            await self._warn_of_control_tokens(prompt)
        return tuple(await self.tokenize(prompt, parse_special=parse_special))

    async def scored(
        self, prompt: Prompt, continuation: Prompt
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens of a prompt, and those of a continuation as it would be generated."""
        prompt = check_prompt(prompt)
        continuation = check_prompt(continuation, "continuation")
        before, _ = await self.tokens(prompt)
        after = await self._continuation(prompt, before, continuation)
        for field, tokens in (("prompt", before), ("continuation", after)):
            if not tokens:
                raise InvalidRequestError(field, "", "at least one token")
        n_vocab = self.vocabulary().n_tokens
        if max(after) >= n_vocab:
            raise InvalidRequestError("continuation", max(after), f"token ids 0 to {n_vocab - 1}")
        return before, after

    async def _continuation(
        self,
        prompt: str | tuple[int, ...],
        before: tuple[int, ...],
        continuation: str | tuple[int, ...],
    ) -> tuple[int, ...]:
        """Return the tokens of a continuation, as the model would generate them after the prompt."""
        if not isinstance(continuation, str):
            return continuation
        check_length(continuation, self._model().n_ctx, "continuation")
        if isinstance(prompt, str):
            both = await self._text_tokens(prompt + continuation)
            if both[: len(before)] == before:
                return both[len(before) :]
        return tuple(await self.tokenize(continuation, add_special=False))

    async def texts_of_generated(
        self, call: RequestCall, answer: AnswerFormat | None, *, strips_space: bool
    ) -> list[str]:
        """Return the text that the reader received for each token of `generated`."""
        if not call.generated:
            return []
        vocabulary = self.vocabulary()

        def tell() -> list[str]:
            return texts_told(
                call.generated,
                call.params,
                vocabulary,
                spelled={} if answer is None else answer.spelled,
                strips_space=strips_space,
            )

        return await self.run_for(call.generated, tell)

    async def run_for(self, token_ids: Sequence[int], call: Callable[[], T]) -> T:
        """Return the result of a call that handles each of these tokens; in the worker thread if they are many."""
        return call() if len(token_ids) <= SHORT_TOKENS else await self.worker.run(call)

    def warn_of_length(self, n_tokens: int) -> None:
        """Warn once of a prompt that is longer than any that the model was trained on."""
        model = self._model()
        if n_tokens > model.n_ctx_train and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a prompt has %d tokens, but %s was trained on at most %d",
                n_tokens, model.name or model.path, model.n_ctx_train,
            )  # fmt: skip

    async def with_stop_tokens(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with stop tokens for stop strings that name control tokens (without text)."""
        found: list[int] = []
        vocabulary = self.vocabulary()
        for text in filter(MARKS.search, params.stop):
            if (await self._control_names()).search(text) is not None:
                tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
                known = (*params.stop_token_ids, *found)
                found += tokens if len(tokens) == 1 and tokens[0] not in known else []
        if not found:
            return params
        return replace(params, stop_token_ids=(*params.stop_token_ids, *found))

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
        """Return the names of control tokens, computed at the first use."""
        if self._names is None:
            vocabulary = self.vocabulary()
            self._names = await self.worker.run(lambda: ControlTokens(vocabulary.control_names()))
        return self._names

    # --- Chats -------------------------------------------------------------------------------
    async def chat_tokens(
        self, prompt: ChatPrompt
    ) -> tuple[tuple[int, ...], tuple[MediaInput, ...], AnswerFormat | None]:
        """Return the tokens of a chat with the rows of its media, the media, and how an answer is read."""
        chat = self._chat
        rendered = await self.worker.run(lambda: chat.render(prompt))
        tokens, media = await self._piece_tokens(prompt, rendered.pieces)
        return tokens, media, rendered.answer

    async def answer_format(self, prompt: ChatPrompt) -> AnswerFormat | None:
        """Return how an answer to a chat is read."""
        chat = self._chat
        return (await self.worker.run(lambda: chat.render(prompt))).answer

    async def _piece_tokens(
        self, prompt: ChatPrompt, pieces: Sequence[Piece]
    ) -> tuple[tuple[int, ...], tuple[MediaInput, ...]]:
        check_lengths([piece.text for piece in pieces], self._model().n_ctx, "messages")
        self.vocabulary()
        chat = self._chat
        if prompt.marks is None:
            return tuple(await self.worker.run(lambda: chat.tokenize(pieces))), ()
        first, *others = prompt.marks.cut(pieces, self._model().modalities)
        assert isinstance(first, list)
        tokens = await self.worker.run(partial(chat.tokenize, first))
        return await self._with_media(tokens, others, chat.tokenize_inside, media_in_words)

    async def render_chat(self, prompt: ChatPrompt) -> RenderedPrompt:
        """See `Engine.render_chat`."""
        chat = self._chat
        rendered = await self.worker.run(lambda: chat.render(prompt))
        text = "".join(piece.text for piece in rendered.pieces)
        tokens, _ = await self._piece_tokens(prompt, rendered.pieces)
        return RenderedPrompt(text if prompt.marks is None else prompt.marks.shown(text), tokens)

    async def template_abilities(self) -> TemplateAbilities | None:
        """See `Engine.template_abilities`."""
        if self._model().chat_template is None:
            return None
        chat = self._chat
        return await self.worker.run(lambda: chat.abilities)

    @property
    def _chat(self) -> ChatTokenizer:
        """Renderer and tokenizer of chats, created at the first use."""
        if self._chats is None:
            model, vocabulary = self._model(), self.vocabulary()
            self._chats = ChatTokenizer(vocabulary, model.chat_template, model.tool_chat_template)
            self._workers.end_first(self._chats.close)
        return self._chats

    # --- For callers -------------------------------------------------------------------------
    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """See `Engine.tokenize`."""
        vocabulary = self.vocabulary()
        check_bool("add_special", add_special)
        check_bool("parse_special", parse_special)

        def call() -> list[int]:
            return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

        if not isinstance(text, str) or len(text) <= SHORT_TEXT:
            return call()
        return await self.worker.run(call)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Engine.detokenize`."""
        vocabulary = self.vocabulary()
        check_several("token_ids", token_ids, "a sequence of token ids")

        def call() -> str:
            return vocabulary.join(token_ids).decode("utf-8", "replace")

        return await self.run_for(token_ids, call)

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """See `Engine.pieces`."""
        vocabulary = self.vocabulary()
        check_several("token_ids", token_ids, "a sequence of token ids")

        def call() -> list[bytes]:
            return [vocabulary.piece(token) for token in token_ids]

        return await self.run_for(token_ids, call)
