"""Embedder: an engine that computes vectors of texts; `EmbeddingMethods` are shared with `Engine`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.engine.config import EngineConfig
from cllm.engine.embedding import Classification, Embeddings, Ranked
from cllm.engine.lifecycle import Lifecycle
from cllm.engine.llama.backend import LlamaEmbedderBackend
from cllm.engine.loop.request_call import Prompt, Urgency
from cllm.engine.thread.backend import Backend
from cllm.errors import InvalidArgumentError


class EmbeddingMethods(Lifecycle):
    """Methods of all engines for vectors, rankings, classes and tokens of texts; event loop only."""

    # --- Texts -------------------------------------------------------------------------------
    async def embed(
        self,
        texts: Sequence[Prompt],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """Return the vectors of texts.

        Add a prefix that the model needs, such as "query: ", yourself.  Texts of several calls share
        batches, and streams keep their pace (see `target_itl_ms`).

        Parameters
        ----------
        texts : sequence of str or of sequences of int
            Texts, or token ids.
        normalize : bool
            Scale each vector to length 1, so that dot products are cosines.
        dimensions : int, optional
            Keep the first numbers of each vector only, before normalizing: for models trained for that
            (Matryoshka).
        truncate : bool
            Cut texts that are too long, instead of rejecting them.
        priority : int
            Lower is more urgent.
        timeout : float, optional
            Seconds until a `DeadlineError`.

        Returns
        -------
        ndarray
            float32, `(n_texts, n_values)`; a new array.

        Raises
        ------
        InvalidRequestError
            Names the text, the value and the limit.  It is raised before anything is computed.
        EmbeddingError
            A text cannot be computed (`__cause__` says why), or `drain` or `aclose` cancelled the call.
        DeadlineError
            `timeout` seconds have passed; also a `TimeoutError`.
        QueueFullError
            `max_queue` requests wait already.
        ClosedError, EngineFailedError
            The engine does not serve requests.
        """
        found = await self.embeddings(
            texts,
            normalize=normalize,
            dimensions=dimensions,
            truncate=truncate,
            priority=priority,
            timeout=timeout,
        )
        return found.vectors

    async def embeddings(
        self,
        texts: Sequence[Prompt],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Embeddings:
        """Return vectors and the number of tokens of each text; arguments and errors as for `embed`."""
        with self._serving() as parts:
            return await parts.embeddings.embed(
                texts,
                Urgency(priority, timeout),
                normalize=normalize,
                dimensions=dimensions,
                truncate=truncate,
            )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[Ranked]:
        """Return documents in the order of their relevance to a query, the best first.

        Parameters
        ----------
        query : str
        documents : sequence of str
        truncate : bool
            Cut documents that are too long beside the query, instead of rejecting them.
        priority, timeout :
            As for `embed`.

        Raises
        ------
        InvalidRequestError
            An argument is invalid, or the model has no classifier that ranks.  Other errors as for `embed`.
        """
        with self._serving() as parts:
            return await parts.embeddings.rerank(
                query, documents, Urgency(priority, timeout), truncate=truncate
            )

    async def classify(
        self,
        texts: Sequence[Prompt],
        *,
        truncate: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[Classification]:
        """Return the classifier's scores of each text; arguments as for `embed`.

        Raises
        ------
        InvalidRequestError
            An argument is invalid, or the model has no classifier.  Other errors as for `embed`.
        """
        with self._serving() as parts:
            return await parts.embeddings.classify(
                texts, Urgency(priority, timeout), truncate=truncate
            )

    # --- Tokens ------------------------------------------------------------------------------
    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        add_special : bool
            Add the beginning-of-sequence token if the model uses one.
        parse_special : bool
            Read the names of control tokens in the text as control tokens.

        Raises
        ------
        InvalidArgumentError
            `text` is not a string, has more than 1 MiB of UTF-8, or has a lone surrogate.
        """
        with self._serving() as parts:
            return await parts.input_processor.texts.tokenize(
                text, add_special=add_special, parse_special=parse_special
            )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with U+FFFD for bytes that are no UTF-8.  Control tokens have no text.

        Raises
        ------
        InvalidArgumentError
            `token_ids` is not a sequence, or an id is not in the vocabulary.
        """
        with self._serving() as parts:
            return await parts.input_processor.texts.detokenize(token_ids)

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token: perhaps a part of a character, and none for a control token.

        Raises
        ------
        InvalidArgumentError
            `token_ids` is not a sequence, or an id is not in the vocabulary.
        """
        with self._serving() as parts:
            return await parts.input_processor.texts.pieces(token_ids)


class Embedder(EmbeddingMethods):
    """An engine for vectors, rankings and classes only.

    It has no context for generation, which saves memory.  Use it with `async with`.  Arguments and errors
    are those of `Engine`; with `embedding_model` or `mmproj`, entering raises `InvalidArgumentError`.
    """

    _child_backend = "cllm.engine.llama.backend:LlamaEmbedderBackend"

    def _make_backend(self, config: EngineConfig) -> Backend:
        if config.embedding_model is not None:
            limit = "None: an Embedder has one model"
            raise InvalidArgumentError("embedding_model", str(config.embedding_model), limit)
        if config.mmproj is not None:
            limit = "None: an Embedder computes vectors of texts"
            raise InvalidArgumentError("mmproj", str(config.mmproj), limit)
        return LlamaEmbedderBackend(config)
