"""EmbeddingCalls: from texts to vectors, as callers see it.  Event loop only.

Texts are tokenized off the loop and checked before any is computed.  The inference thread gets them in
requests of at most `N_TEXTS` texts, and at most `N_AHEAD` requests of a call at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cllm.checks import (
    MAX_CHARACTERS_PER_TOKEN,
    check_bool,
    check_int,
    check_several,
    encode_prompt,
    encode_text,
)
from cllm.engine.chat.rank_prompt import RankPrompt
from cllm.engine.embedding import (
    Classification,
    EmbeddingInfo,
    EmbeddingRequest,
    Embeddings,
    Ranked,
)
from cllm.engine.loop.dispatcher import Dispatcher, PendingEmbedding
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.loop.request_call import (
    Prompt,
    Urgency,
    check_length,
    check_prompt,
    new_request_id,
)
from cllm.engine.thread.worker_thread import WorkerThread
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import InvalidRequestError

N_TEXTS = 256  # of one request; also the number that is tokenized in one call of the thread
N_CHARACTERS = 1 << 16  # of texts that are tokenized in one call of the thread: about 0.03 s
N_AHEAD = 2  # requests of one call that wait on the inference thread

Tokens = tuple[int, ...]


class EmbeddingCalls:
    """Texts of one model.

    Parameters
    ----------
    check_serving : callable
        Returns the vocabulary, or raises the error that says why no requests are served.  With
        `draining=True` a draining engine counts as serving.
    text_vocabulary : callable
        Returns the vocabulary of the model that computes texts; None if no requests are served.
    tokenizer : WorkerThread
    """

    def __init__(
        self,
        check_serving: Callable[..., EngineVocabulary],
        text_vocabulary: Callable[[], EngineVocabulary | None],
        gate: QueueGate,
        dispatcher: Dispatcher,
        tokenizer: WorkerThread,
    ) -> None:
        self._check_serving = check_serving
        self._text_vocabulary = text_vocabulary
        self._gate = gate
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer

    # --- What callers ask for ------------------------------------------------------------------
    async def embed(
        self,
        texts: Sequence[Prompt],
        urgency: Urgency,
        *,
        normalize: bool,
        dimensions: int | None,
        truncate: bool,
    ) -> Embeddings:
        """See `Embedder.embeddings`."""
        info = self._info(wants_scores=False)
        check_bool("normalize", normalize, InvalidRequestError)
        n_values = info.n_values
        if dimensions is not None:
            n_values = check_int("dimensions", dimensions, 1, n_values, InvalidRequestError)
        computed = await self._compute("texts", texts, urgency, truncate=truncate)
        vectors = computed.vectors[:, :n_values]
        if normalize:
            norms: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
            norms[norms == 0.0] = 1.0
            vectors = vectors / norms
        return Embeddings(np.ascontiguousarray(vectors), computed.n_tokens)

    async def classify(
        self, texts: Sequence[Prompt], urgency: Urgency, *, truncate: bool
    ) -> list[Classification]:
        """See `Embedder.classify`."""
        info = self._info(wants_scores=True)
        computed = await self._compute("texts", texts, urgency, truncate=truncate)
        labels = info.labels or tuple(map(str, range(info.n_values)))
        all_scores = _probabilities(info, computed.vectors).tolist()
        return [
            _classified(labels, scores, n_tokens)
            for scores, n_tokens in zip(all_scores, computed.n_tokens, strict=True)
        ]

    async def rerank(
        self, query: str, documents: Sequence[str], urgency: Urgency, *, truncate: bool
    ) -> list[Ranked]:
        """See `Embedder.rerank`."""
        info = self._info(wants_scores=True)
        column = _column_of_yes(info)
        check_query(query, documents)
        check_bool("truncate", truncate, InvalidRequestError)
        with self._place():
            pairs = await urgency.prepared(self._pairs(info, query, documents, truncate=truncate))
            scores = await self._vectors(info, pairs, urgency)
        return ranking(_probabilities(info, scores)[:, column].tolist(), list(map(len, pairs)))

    async def rank_prompts(
        self, template: str, query: str, documents: Sequence[str]
    ) -> list[Tokens]:
        """Return the prompt tokens of the query with each document, for a model that writes "yes" or "no"."""
        check_query(query, documents)
        documents = tuple(documents)  # the caller may change its list while they are tokenized
        prompt = RankPrompt(template, self._check_serving())
        n_ctx = self._dispatcher.loaded().n_ctx
        check_length(query, n_ctx, "query")
        for i, text in enumerate(documents):
            check_length(text, n_ctx, f"documents[{i}]")

        def tokenize(part: range) -> list[Tokens]:
            return [tuple(prompt.tokens(query, documents[i])) for i in part]

        return await self._by_parts([len(query) + len(text) for text in documents], tokenize)

    # --- Steps ---------------------------------------------------------------------------------
    @contextmanager
    def _place(self) -> Iterator[None]:
        """Hold one place in the queue, for any number of texts; raise `QueueFullError` if it is full."""
        self._gate.enter()
        is_served = False
        try:
            yield
            is_served = True
        finally:
            self._gate.leave(is_served=is_served)

    def _info(self, *, wants_scores: bool) -> EmbeddingInfo:
        """Return the model's abilities with texts; raise `InvalidRequestError` if it lacks the wanted one."""
        self._check_serving()
        model = self._dispatcher.model
        assert model is not None
        info = model.embedding
        if info is None:
            limit = "mean, cls or last when the engine is started: the model's file names none"
            raise InvalidRequestError("pooling", None, limit)
        if info.is_classifier and not wants_scores:
            limit = "a model that computes embeddings: this one computes scores (rerank, classify)"
            raise InvalidRequestError("model", model.name or model.path, limit)
        if wants_scores and not info.is_classifier:
            limit = "a model with a classifier (pooling is rank): this one has none"
            raise InvalidRequestError("model", model.name or model.path, limit)
        return info

    async def _compute(
        self, field: str, texts: Sequence[Prompt], urgency: Urgency, *, truncate: bool
    ) -> Embeddings:
        """Return the vectors of texts without normalization."""
        model = self._dispatcher.model
        assert model is not None
        assert model.embedding is not None
        check_several(field, texts, "a sequence of texts", InvalidRequestError)
        check_bool("truncate", truncate, InvalidRequestError)
        with self._place():
            tokens = await urgency.prepared(
                self._tokens(model.embedding, field, texts, truncate=truncate)
            )
            vectors = await self._vectors(model.embedding, tokens, urgency)
        return Embeddings(vectors, tuple(map(len, tokens)))

    def _check_texts(self) -> EngineVocabulary:
        """Return the vocabulary of texts, or raise the error that says why no requests are served."""
        self._check_serving(draining=True)
        vocabulary = self._text_vocabulary()
        assert vocabulary is not None
        return vocabulary

    async def _tokens(
        self, info: EmbeddingInfo, field: str, texts: Sequence[Prompt], *, truncate: bool
    ) -> list[Tokens]:
        """Return the checked token ids of texts."""
        vocabulary = self._check_texts()
        given = [check_prompt(text, f"{field}[{i}]") for i, text in enumerate(texts)]

        def tokenize(part: range) -> list[Tokens]:
            return [_tokens_of(vocabulary, info, f"{field}[{i}]", given[i], truncate) for i in part]

        return await self._by_parts(list(map(len, given)), tokenize)

    async def _pairs(
        self, info: EmbeddingInfo, query: str, documents: Sequence[str], *, truncate: bool
    ) -> list[Tokens]:
        """Return the checked token ids of the query with each document."""
        vocabulary = self._check_texts()
        model = self._dispatcher.model
        assert model is not None
        _check_characters(query, info, "query", truncate=False)
        texts = [
            _check_characters(text, info, f"documents[{i}]", truncate)
            for i, text in enumerate(documents)
        ]
        pair_of = _by_tokens(vocabulary, info, query)
        if model.rank_template is not None:
            prompt = RankPrompt(model.rank_template, vocabulary)
            pair_of = partial(prompt.tokens, query)

        def tokenize(part: range) -> list[Tokens]:
            n_most = info.n_tokens_max if truncate else None
            pairs: list[Tokens] = []
            for i in part:
                pairs.append(tuple(pair_of(texts[i], n_most)))
                if len(pairs[-1]) > info.n_tokens_max:
                    field = "query" if truncate else f"documents[{i}]"
                    raise _too_long(field, f"{len(pairs[-1])} tokens with both", info)
            return pairs

        return await self._by_parts([len(query) + len(text) for text in texts], tokenize)

    async def _by_parts(
        self, sizes: Sequence[int], tokenize: Callable[[range], list[Tokens]]
    ) -> list[Tokens]:
        """Return the results of `tokenize`, called for parts of the texts; other calls run between."""
        found: list[Tokens] = []
        for part in _parts(sizes):
            found += await self._tokenizer.run(partial(tokenize, part))
        return found

    async def _vectors(
        self, info: EmbeddingInfo, texts: Sequence[Tokens], urgency: Urgency
    ) -> NDArray[np.float32]:
        """Return the vectors of texts, in their order."""
        rows: list[NDArray[np.float32]] = []
        waiting: deque[PendingEmbedding] = deque()
        try:
            for first in range(0, len(texts), N_TEXTS):
                if len(waiting) == N_AHEAD:
                    rows.append(await waiting[0].vectors())
                    waiting.popleft()
                self._check_serving(draining=True)  # no await until `embed`: it is answered
                request = EmbeddingRequest(
                    request_id=f"embed-{new_request_id()}",
                    serial=self._dispatcher.next_serial(),
                    texts=tuple(texts[first : first + N_TEXTS]),
                    priority=urgency.priority,
                    submitted_at=urgency.begun_at,
                    deadline=urgency.deadline,
                )
                waiting.append(self._dispatcher.embed(request))
            while waiting:
                rows.append(await waiting[0].vectors())
                waiting.popleft()
        finally:
            for left in waiting:
                left.cancel()
        return np.concatenate(rows) if rows else np.empty((0, info.n_values), np.float32)


def _parts(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the indices of texts with these numbers of characters, in parts that are tokenized at once.

    A part has at most `N_TEXTS` texts.  Only a single text has more than `N_CHARACTERS` characters.
    """
    first = n_characters = 0
    for i, size in enumerate(sizes):
        if i > first and (i - first == N_TEXTS or n_characters + size > N_CHARACTERS):
            yield range(first, i)
            first, n_characters = i, 0
        n_characters += size
    if first < len(sizes):
        yield range(first, len(sizes))


def check_query(query: object, documents: object) -> None:
    """Reject a query or a document that no tokenizer takes, or that is empty."""
    _check_text("query", query)
    check_several("documents", documents, "a sequence of texts", InvalidRequestError)
    for i, document in enumerate(documents):  # type: ignore[arg-type, var-annotated]
        _check_text(f"documents[{i}]", document)


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(field, text, "a text that is not empty")
    encode_text(field, text, InvalidRequestError)


def ranking(scores: Sequence[float], n_tokens: Sequence[int]) -> list[Ranked]:
    """Return the documents by descending score; documents with equal scores keep their order."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [Ranked(i, scores[i], n_tokens[i]) for i in order]


def _tokens_of(
    vocabulary: EngineVocabulary,
    info: EmbeddingInfo,
    field: str,
    text: str | Tokens,
    truncate: bool,
) -> Tokens:
    """Return the tokens of one text, checked against the model's limits."""
    if isinstance(text, str):
        if not text:
            raise InvalidRequestError(field, text, "a text that is not empty")
        tokens = tuple(vocabulary.tokenize(_check_characters(text, info, field, truncate)))
    else:
        tokens = text
        if tokens and max(tokens) >= vocabulary.n_tokens:
            limit = f"token ids 0 to {vocabulary.n_tokens - 1}"
            raise InvalidRequestError(field, max(tokens), limit)
    if not tokens:
        raise InvalidRequestError(field, "", "at least one token")
    return _fitting(tokens, info, info.after if isinstance(text, str) else (), field, truncate)


def _by_tokens(
    vocabulary: EngineVocabulary, info: EmbeddingInfo, query: str
) -> Callable[[str, int | None], Sequence[int]]:
    """Return a function that joins the query and a document as tokens; it cuts the document to fit `n_most`."""

    def pair_of(document: str, n_most: int | None) -> Sequence[int]:
        head = vocabulary.tokenize(query)
        del head[len(head) - len(info.after) :]
        head += info.between
        tokens = vocabulary.tokenize(document, add_special=False)
        if n_most is not None:
            del tokens[max(0, n_most - len(head) - len(info.after)) :]
        return [*head, *tokens, *info.after]

    return pair_of


def _check_characters(text: str, info: EmbeddingInfo, field: str, truncate: bool) -> str:
    """Cut (with `truncate`) or reject a text that is far too long, before it is tokenized; return it.

    A text that no tokenizer takes is rejected, with the name of its field.
    """
    n_most = info.n_tokens_max * MAX_CHARACTERS_PER_TOKEN
    if len(text) > n_most:
        if not truncate:
            raise _too_long(field, f"{len(text)} characters", info)
        text = text[:n_most]
    encode_prompt(text, field, InvalidRequestError)
    return text


def _fitting(
    tokens: Tokens, info: EmbeddingInfo, after: Tokens, field: str, truncate: bool
) -> Tokens:
    """Return the tokens of a text; with `truncate`, too many are cut, but the tokens that end a text stay."""
    n_most = info.n_tokens_max
    if len(tokens) <= n_most:
        return tokens
    if not truncate:
        raise _too_long(field, f"{len(tokens)} tokens", info)
    n_after = min(len(after), n_most)
    return tokens[: n_most - n_after] + after[len(after) - n_after :]


def _too_long(field: str, value: str, info: EmbeddingInfo) -> InvalidRequestError:
    limit = f"at most {info.n_tokens_max} tokens (n_ubatch, and what the model was trained for)"
    return InvalidRequestError(field, value, limit)


def _column_of_yes(info: EmbeddingInfo) -> int:
    """Return the index of the classifier's score that says a document is relevant."""
    if info.n_values == 1:
        return 0
    if "yes" in info.labels:
        return info.labels.index("yes")
    limit = (
        "a model that ranks: with one score, or with a label 'yes' (classify returns all scores)"
    )
    raise InvalidRequestError("model", f"a classifier of {info.n_values} labels", limit)


def _probabilities(info: EmbeddingInfo, scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return probabilities: the sigmoid of a single score; the softmax of several, unless llama.cpp has applied it."""
    values = scores.astype(np.float64)
    if info.is_softmaxed:
        return values
    if values.shape[1] == 1:
        return 1.0 / (1.0 + np.exp(-np.clip(values, -700.0, 700.0)))
    powers: NDArray[np.float64] = np.exp(values - values.max(axis=1, keepdims=True))
    sums: NDArray[np.float64] = powers.sum(axis=1, keepdims=True)
    return powers / sums


def _classified(labels: Sequence[str], scores: Sequence[float], n_tokens: int) -> Classification:
    by_label = dict(zip(labels, scores, strict=True))
    best = max(by_label, key=by_label.__getitem__)
    return Classification(best, by_label[best], by_label, n_tokens)
