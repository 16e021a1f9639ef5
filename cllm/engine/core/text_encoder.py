"""TextEncoder: what the engine needs of a context that computes vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TextEncoder(Protocol):
    """A context and its batch.  Raises the errors of `EmbeddingContext`.

    Attributes
    ----------
    n_batch, n_texts_max : int
        Largest number of tokens, and of texts, in a batch.
    n_batch_target : int
        Tokens that a batch gets if it has more than one text: more would make each slower.
    """

    n_batch: int
    n_batch_target: int
    n_texts_max: int

    @property
    def computes_in_pieces(self) -> bool:
        """True if a text may come in several batches: each token depends on those before it only."""

    def open(self) -> None:
        """Make the encoder ready for `compute`; do nothing if it is."""

    def compute(self, texts: Sequence[Sequence[int]], n_computed: int = 0) -> NDArray[np.float32]:
        """Return the vectors of texts, float32 `(n_texts, n_values)`, in the order of the texts.

        Parameters
        ----------
        texts : sequence of sequence of int
            Tokens of each text, at least one.
        n_computed : int
            Number of tokens that the calls just before have computed of the only text; `texts` has the
            next ones.  The vector is that of all these tokens.  0 unless it `computes_in_pieces`.
        """

    def close(self) -> None:
        """Free everything that `open` created."""
