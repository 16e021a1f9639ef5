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
        "mean" of the tokens' vectors, that of the first ("cls") or the "last"; or "rank": scores of the
        model's classifier.
    n_values : int
        Length of a vector, or number of scores.
    n_tokens_max : int
        Tokens of one text at most.
    labels : tuple of str
        Labels of the classifier's scores; empty if the file has none.
    between, after : tuple of int
        Tokens between a query and a document, and those that end a text.
    is_softmaxed : bool
        True if the scores are probabilities already.
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
        Order of submission among all requests.
    texts : tuple of tuple of int
        Token ids; each text fits into a batch.
    priority : int
        Lower is more urgent.
    submitted_at : float
        Time by `time.perf_counter`.
    deadline : float or None
        The same; texts that are not computed by then are dropped.
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
        float32, `(n_texts, n_values)`; a new array.
    n_tokens : tuple of int
        Tokens of each text that were computed.
    """

    vectors: NDArray[np.float32]
    n_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Place of a document in a ranking.

    Attributes
    ----------
    index : int
        Index among the given documents.
    score : float
        Relevance to the query, 0 to 1.
    n_tokens : int
        Computed tokens: query and document.
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
        Most likely label; its number if the file has no labels.
    score : float
        Probability of the label, 0 to 1.
    scores : dict of str to float
        Probability of each label.
    n_tokens : int
        Computed tokens of the text.
    """

    label: str
    score: float
    scores: dict[str, float]
    n_tokens: int
