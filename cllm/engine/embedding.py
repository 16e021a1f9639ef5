"""Values of embeddings: the results for callers, and the requests to the inference thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cllm.engine.output import FinishReason
from cllm.errors import DeadlineError, EmbeddingError


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """Properties of a model that computes vectors or scores of texts.

    Attributes
    ----------
    pooling : str
        Source of a text's vector: "mean" of all tokens, the first token ("cls") or the last one ("last").
        "rank": the model's classifier computes scores instead.
    n_values : int
        Length of a vector, or number of scores.
    n_tokens_max : int
        Largest number of tokens of one text.
    labels : tuple of str
        Labels of the classifier's scores; empty if the file has none.
    between, after : tuple of int
        Tokens between a query and a document, and tokens at the end of a text.
    is_softmaxed : bool
        True if llama.cpp returns the scores as probabilities.
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
        Time by `time.perf_counter` at which the whole request fails; None: no deadline.
    """

    request_id: str
    serial: int
    texts: tuple[tuple[int, ...], ...]
    priority: int = 0
    submitted_at: float = 0.0
    deadline: float | None = None


def ended_early(request_id: str, reason: FinishReason) -> EmbeddingError | DeadlineError:
    """Return the error of a request that was cancelled, or whose deadline has passed."""
    if reason is FinishReason.DEADLINE:
        return DeadlineError(f"request {request_id}: its deadline has passed")
    return EmbeddingError(f"request {request_id} was cancelled")


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The vectors of some texts.

    Attributes
    ----------
    vectors : ndarray
        float32, `(n_texts, n_values)`, in the order of the texts; the caller owns the array.
    n_tokens : tuple of int
        Number of computed tokens of each text, after a cut by `truncate`.
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
        Number of tokens of the query and the document together.
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
