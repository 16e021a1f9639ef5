"""Choose the next token of every output row of a tick.

Greedy rows are decided together by one `argmax`; the others go through their sampler chain one by
one.  A row without a finite maximum fails its own request and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenSampler(Protocol):
    """The sampler of one sequence, with its random state.  Inference thread only."""

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose from one row, float32 of shape `(n_vocab,)`, and remember the choice."""

    def close(self) -> None:
        """Free what it holds."""


class NotFiniteError(ArithmeticError):
    """A row of logits has no finite maximum: the model computed NaN or infinity."""


def sample(
    logits: NDArray[np.float32], samplers: Sequence[TokenSampler | None]
) -> list[int | Exception]:
    """One token, or the exception that its row met, for each row.

    Parameters
    ----------
    logits : ndarray
        float32, shape `(n_rows, n_vocab)`.
    samplers : sequence
        One for each row; None means greedy.
    """
    # argmax takes the first NaN for the largest value, so its value tells about the whole row.
    best = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(best)), best]).tolist()
    chosen: list[int | Exception] = []
    for row, (token, sampler) in enumerate(zip(best.tolist(), samplers, strict=True)):
        if not finite[row]:
            chosen.append(NotFiniteError("the model computed logits that are not finite"))
        elif sampler is None:
            chosen.append(token)
        else:
            try:
                chosen.append(sampler.sample(logits[row]))
            except Exception as error:
                chosen.append(error)
    return chosen
