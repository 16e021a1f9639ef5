"""Texts to vectors: what callers say and get, and what crosses to the inference thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """Abilities of a model with whole texts.

    Attributes
    ----------
    pooling : str
        What becomes of the vectors of a text's tokens: "mean", "cls" (that of the first), "last",
        or "rank" (the scores of the model's classifier).
    n_values : int
        Numbers of a vector, or scores of a text.
    n_tokens_max : int
        Tokens of one text, which is computed in one piece.
    labels : tuple of str
        What the scores of a classifier stand for, where the file says so.
    between, after : tuple of int
        Tokens between a query and a document, and those that end a text.
    is_softmaxed : bool
        The scores are likelihoods already.
    """

    pooling: str
    n_values: int
    n_tokens_max: int
    labels: tuple[str, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    is_softmaxed: bool = False

    @property
    def is_classifier(self) -> bool:
        """True if the model gives scores instead of vectors."""
        return self.pooling == "rank"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts, tokenized and checked.

    Attributes
    ----------
    serial : int
        In the order of submission, among all requests.
    texts : tuple of tuple of int
        Token ids, each no more than fit into a batch.
    priority : int
        Lower is more urgent.
    submitted_at : float
        Of `time.perf_counter`.
    deadline : float or None
        Likewise; what is not computed by then is not computed.
    """

    request_id: str
    serial: int
    texts: tuple[tuple[int, ...], ...]
    priority: int = 0
    submitted_at: float = 0.0
    deadline: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The vectors of some texts.

    Attributes
    ----------
    vectors : ndarray
        float32, `(n_texts, n_values)`; the caller's own.
    n_tokens : tuple of int
        Tokens of each text that were computed.
    """

    vectors: NDArray[np.float32]
    n_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place in a ranking.

    Attributes
    ----------
    index : int
        Among the documents as they were given.
    score : float
        How relevant it is to the query, 0 to 1.
    n_tokens : int
        Computed for it: of the query and the document.
    """

    index: int
    score: float
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Classification:
    """Scores of a classifier for a text.

    Attributes
    ----------
    label : str
        The likeliest; where the model's file names none, its number.
    score : float
        How likely that is, 0 to 1.
    scores : dict of str to float
        Of every label.
    n_tokens : int
        Of the text, that were computed.
    """

    label: str
    score: float
    scores: dict[str, float]
    n_tokens: int
