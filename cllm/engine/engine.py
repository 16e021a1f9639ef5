"""Engine: one model as a service of this event loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import anyio

from cllm.checks import INT32_MAX, check_bool, check_int
from cllm.engine.chat.template_abilities import TemplateAbilities
from cllm.engine.core.commands import EraseSlot
from cllm.engine.embedder import EmbeddingMethods
from cllm.engine.embedding import Ranked
from cllm.engine.loop.embedding_calls import ranking
from cllm.engine.loop.generates import Generates
from cllm.engine.loop.input_processor import InputProcessor
from cllm.engine.loop.request_call import (
    ChatPromptOptions,
    Prompt,
    RequestCall,
    Urgency,
    chat_prompt_of,
)
from cllm.engine.loop.saved_generation import SavedGeneration
from cllm.engine.loop.stream import TokenStream
from cllm.engine.lora import LoraInfo
from cllm.engine.parts import Parts
from cllm.engine.request import RenderedPrompt, Score
from cllm.engine.sampling_params import SamplingOptions
from cllm.errors import DeadlineError, InvalidRequestError, QueueFullError
from cllm.removed import replacement


class Engine(Generates[TokenStream], EmbeddingMethods):
    """An engine that runs many requests on one llama.cpp model.

    Use it with `async with`, which loads the model in a thread and frees everything at the end.  Call all
    methods in the event loop in which the engine was entered.  `statistics` and `health` may be called from
    any thread.

    Parameters
    ----------
    model : str or Path, optional
        A GGUF file, or a name (`hf:user/repo:quant`); None: the embedded model.
    config : EngineConfig, optional
        All settings as one value, instead of `model` and `options`.
    on_restart : callable, optional
        Called in the event loop with a `Restart` after each restart of the engine's process (`process=True`).
    **options
        The fields of `EngineConfig`.

    Raises
    ------
    TypeError
        An option is unknown, or `config` is combined with `model` or options.
    InvalidArgumentError
        An option has a value that cannot be used.
    ModelLoadError, DownloadError
        Raised when the engine is entered: the model cannot be loaded or downloaded.
    """

    if not TYPE_CHECKING:  # or a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise `AttributeError`; the error names the replacement of a removed method."""
            if hasattr(type(self), name):  # a property raised: raise its own error again
                return object.__getattribute__(self, name)
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if instead := replacement(name):
                text += f"; instead: {instead}"
            raise AttributeError(text, name=name, obj=self)

    # --- Requests ----------------------------------------------------------------------------
    def _open(self, call: RequestCall) -> TokenStream:
        self._check_serving()
        return TokenStream(call, self._source)

    def _source(self) -> InputProcessor:
        return self._parts.input_processor

    def _sampling_defaults(self) -> SamplingOptions:
        return self.sampling_defaults

    @property
    def _n_at_once(self) -> int:
        return 2 * self.config.n_seq_max

    async def _wait_for_room(self, error: QueueFullError) -> None:
        await self._parts.gate.wait_left()

    def resume(
        self,
        saved: SavedGeneration,
        *,
        priority: int | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> TokenStream:
        """Return a stream that continues a suspended generation, perhaps of another process.

        The stream yields the deltas that were not read before; its completion has the whole output.

        Parameters
        ----------
        saved : SavedGeneration
            It is not changed, and may be resumed again.
        priority : int, optional
            None: as before.
        timeout : float, optional
            Seconds from submission until the request ends with `deadline`; None: no limit.
        request_id : str, optional
            None: as before.

        Raises
        ------
        InvalidRequestError
            The generation belongs to another model; raised when the stream is entered.  Other errors as for
            `stream`.
        """
        self._check_serving()
        if not isinstance(saved, SavedGeneration):
            raise InvalidRequestError("saved", saved, "a SavedGeneration")
        call = replace(
            saved.call,
            priority=saved.call.priority if priority is None else priority,
            timeout=timeout,
            request_id=saved.request_id if request_id is None else request_id,
        )
        return TokenStream(call, self._source, saved.on)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatPromptOptions]
    ) -> RenderedPrompt:
        """Return the prompt of a chat without generating an answer; arguments as for `stream_chat`.

        Raises
        ------
        InvalidRequestError
            Names the message and the field, or the error of the template.
        """
        with self._serving() as parts:
            prompt, _ = chat_prompt_of(messages, options)
            return await parts.input_processor.texts.render_chat(prompt)

    async def template_abilities(self) -> TemplateAbilities | None:
        """Return the abilities of the chat template; None without a template.

        Raises
        ------
        InvalidRequestError
            The template cannot be used, or the extra `chat` is not installed.
        """
        with self._serving() as parts:
            return await parts.input_processor.texts.template_abilities()

    async def score(
        self,
        prompt: Prompt,
        continuation: Prompt,
        *,
        lora: Mapping[str, float] | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout: float | None = None,
    ) -> Score:
        """Return the log probabilities of a continuation after a prompt, before any sampler.

        The prompt is cached as for any request, so that several continuations of one prompt compute it
        once.

        Parameters
        ----------
        prompt, continuation : str or sequence of int
            Text, or token ids.  The continuation is tokenized by itself if its first token would contain
            the end of the prompt, or if the prompt is token ids.
        lora, priority, tenant, timeout :
            As for `stream`.

        Raises
        ------
        DeadlineError
            `timeout` seconds passed before the continuation was scored.
        ClosedError
            The engine was closed, or `drain` cancelled the request.
        RequestError
            Names the field, the value and the limit.
        """
        options = {"lora": lora, "tenant": tenant}
        urgency = Urgency(priority, timeout)
        with self._serving() as parts:
            return await _score(parts.input_processor, prompt, continuation, urgency, **options)

    # --- Adapters ----------------------------------------------------------------------------
    async def load_lora(self, name: str, path: str | Path, *, scale: float = 0.0) -> LoraInfo:
        """Load a LoRA adapter, so that later requests can name it, and return its description.

        The file is read between two ticks, which pauses all streams.  With `preflight`, a child process
        tries the file first.

        Parameters
        ----------
        scale : float
            Scale for requests that name no adapters.

        Raises
        ------
        InvalidRequestError
            Another adapter has this name, an argument is invalid, or the engine is deterministic.
        ModelLoadError
            The file is no adapter, or an adapter of another model.
        """
        with self._serving() as parts:
            return await parts.loras.load(name, path, scale)

    async def unload_lora(self, name: str) -> None:
        """Free an adapter when its last request has ended; new requests cannot name it.

        Raises
        ------
        InvalidRequestError
            No loaded adapter has this name.
        """
        with self._serving() as parts:
            await parts.loras.unload(name)

    # --- Slots -------------------------------------------------------------------------------
    async def erase_slot(self, seq_id: int) -> int:
        """Free the cells of a cached prefix.

        Returns
        -------
        int
            Number of tokens of the prefix; 0 if this seq_id has none.

        Raises
        ------
        InvalidRequestError
            A request runs in this seq_id, or `seq_id` is not an integer from 0 to 2³¹−1.
        """
        seq_id = check_int("seq_id", seq_id, 0, INT32_MAX, InvalidRequestError)
        with self._serving() as parts:
            n_tokens: int = await parts.dispatcher.ask(EraseSlot(seq_id))
            return n_tokens

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool = False,
        priority: int = 0,
        timeout: float | None = None,
        template: str | None = None,
    ) -> list[Ranked]:
        """Return documents in the order of their relevance to a query, the best first.

        The model's classifier computes the scores, if there is one.  Models such as Qwen3-Reranker generate
        "yes" or "no" instead: the score is p(yes) / (p(yes) + p(no)), and each document is two requests.

        Parameters
        ----------
        truncate : bool
            Cut documents that are too long, instead of rejecting them.  For a classifier only.
        priority, timeout :
            As for `embed`.
        template : str, optional
            Prompt with `{query}` and `{document}` for a model without classifier; None: the model's own.

        Raises
        ------
        InvalidRequestError
            An argument is invalid, or the model is neither a classifier nor such a reranker.
        DeadlineError
            `timeout` seconds have passed.  Other errors as for `embed`, and for `score` without classifier.
        """
        self._check_serving()
        if template is not None and not isinstance(template, str):
            raise InvalidRequestError("template", template, "a str")
        model = self.model
        form = model.rank_template if template is None else template
        is_classifier = model.embedding is not None and model.embedding.is_classifier
        if is_classifier or not model.generates or form is None:
            return await super().rerank(
                query, documents, truncate=truncate, priority=priority, timeout=timeout
            )
        check_bool("truncate", truncate, InvalidRequestError)
        urgency = Urgency(priority, timeout)
        with self._serving() as parts, anyio.move_on_after(urgency.timeout) as scope:
            prompts = await parts.embeddings.rank_prompts(form, query, documents)
            return await self._rank(parts, prompts, urgency.priority)
        assert scope.cancelled_caught
        raise DeadlineError(
            f"{len(documents)} documents were not ranked within {timeout} s (timeout)"
        )

    async def _rank(self, parts: Parts, prompts: Sequence[Prompt], priority: int) -> list[Ranked]:
        """Return the ranking of the prompts by p(yes) / (p(yes) + p(no)), by the model of `parts`."""
        source = parts.input_processor
        words = [await source.texts.tokenize(word, add_special=False) for word in ("yes", "no")]

        async def ask(prompt: Prompt) -> float:
            yes, no = [
                (await _score(source, prompt, word[:1], Urgency(priority))).total for word in words
            ]
            return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))

        scores = await self._run_all(ask, prompts, wait_for_room=lambda _: parts.gate.wait_left())
        return ranking(scores, list(map(len, prompts)))


async def _score(
    source: InputProcessor, prompt: Prompt, continuation: Prompt, urgency: Urgency, **options: Any
) -> Score:
    """Return the log probabilities by one model, even if `reload` replaces it meanwhile."""
    call = await urgency.prepared(source.score_call(prompt, continuation))
    call = replace(call, priority=urgency.priority, timeout=urgency.left_s, **options)
    async with TokenStream(call, lambda: source) as stream:
        return Score.of(await stream.completion())
