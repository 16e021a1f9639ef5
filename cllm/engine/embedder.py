"""Embedder: texts to vectors; and what every engine has of that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.engine.config import EngineConfig
from cllm.engine.embedding import Classification, Embeddings, Ranked
from cllm.engine.lifecycle import Lifecycle
from cllm.engine.llama.backend import LlamaEmbedderBackend
from cllm.engine.loop.embedding_calls import Urgency
from cllm.engine.loop.request_call import Prompt
from cllm.engine.thread.backend import Backend
from cllm.errors import InvalidArgumentError


class EmbeddingMethods(Lifecycle):
    """Methods for whole texts; event loop only."""

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
            Names the text, the value and the limit, before anything is computed.
        EmbeddingError
            A text cannot be computed; `__cause__` says why.
        DeadlineError
            A `TimeoutError` too.
        QueueFullError
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
        """Return vectors as `embed` does, with the number of tokens of each text."""
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
            As of `embed`.

        Raises
        ------
        InvalidRequestError
            Names the field, the value and the limit; or the model has no classifier.  Other errors as for
            `embed`.
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
        """Return the classifier's scores of each text; arguments as of `embed`.

        Raises
        ------
        InvalidRequestError
            Names what is wrong; the model may have no classifier.  Other errors as of `embed`.
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
            Not a text, longer than 1 MiB, or with a lone surrogate.
        """
        with self._serving() as parts:
            return await parts.input_processor.texts.tokenize(
                text, add_special=add_special, parse_special=parse_special
            )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; control tokens have none.

        Raises
        ------
        InvalidArgumentError
            Not a sequence of token ids.
        """
        with self._serving() as parts:
            return await parts.input_processor.texts.detokenize(token_ids)

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; a token may be part of a character.

        Raises
        ------
        InvalidArgumentError
            Not a sequence of token ids.
        """
        with self._serving() as parts:
            return await parts.input_processor.texts.pieces(token_ids)


class Embedder(EmbeddingMethods):
    """An engine for vectors, rankings and classes only.

    It has no context that generates: for an encoder, or to save memory.  Use it with `async with`;
    arguments and errors are those of `Engine`.
    """

    _child_backend = "cllm.engine.llama.backend:LlamaEmbedderBackend"

    def _make_backend(self, config: EngineConfig) -> Backend:
        if config.embedding_model is not None:
            limit = "None: an Embedder has one model"
            raise InvalidArgumentError("embedding_model", str(config.embedding_model), limit)
        return LlamaEmbedderBackend(config)
