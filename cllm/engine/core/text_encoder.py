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
        Tokens, and texts, of a batch.
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
        """Make it ready to compute; nothing if it is."""

    def compute(self, texts: Sequence[Sequence[int]], n_computed: int = 0) -> NDArray[np.float32]:
        """The vectors `(n_texts, n_values)` of texts, each of at least one token, in their order.

        Parameters
        ----------
        texts : sequence of sequence of int
        n_computed : int
            There is one text, and the calls just before have computed so many tokens of it; these go on
            with it, and its vector is that of all of them.  Only where it `computes_in_pieces`.
        """

    def close(self) -> None:
        """Free everything that `open` created."""
