"""Log probabilities of tokens, from the logits as the model computed them.

Temperature, penalties and other samplers have no effect on them.  Natural logarithms.  Inference
thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.engine.output import TokenLogprob
from cllm.engine.sampling.batch_sampler import NOT_FINITE, NotFiniteError
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.vocabulary import SpellingVocabulary


class LogprobReader:
    """Reads log probabilities off rows of logits.

    Parameters
    ----------
    vocabulary : SpellingVocabulary
        Source of the text of a token.
    n_vocab : int
    """

    def __init__(self, vocabulary: SpellingVocabulary, n_vocab: int) -> None:
        self._vocabulary = vocabulary
        self._scan = RowScan(n_vocab)
        self._scratch: NDArray[np.float32] = np.empty(n_vocab, np.float32)

    def read(self, row: NDArray[np.float32], token: int, n_top: int) -> TokenLogprob:
        """Return the log probability of a token, and of the `n_top` most likely ones.

        Raise `NotFiniteError` if the largest logit of the row is not finite.

        Parameters
        ----------
        row : ndarray
            float32, shape `(n_vocab,)`: the logits the token was chosen from.
        """
        scan = self._scan
        largest = scan.read(row)
        if not math.isfinite(largest):
            raise NotFiniteError(NOT_FINITE)
        np.subtract(row, np.float32(largest), out=self._scratch)
        np.exp(self._scratch, out=self._scratch)
        total = largest + math.log(float(self._scratch.sum()))
        top: tuple[TokenLogprob, ...] = ()
        if n_top:
            ids = scan.at_least(min(n_top, scan.n_vocab))
            if ids is None:
                ids = np.arange(scan.n_vocab)
            # Largest first; a stable sort leaves equals in the order of their ids.
            best = ids[np.argsort(-row[ids], kind="stable")[:n_top]].tolist()
            top = tuple(self._token(other, float(row[other]) - total) for other in best)
        return self._token(token, float(row[token]) - total, top)

    def _token(self, token: int, logprob: float, top: Sequence[TokenLogprob] = ()) -> TokenLogprob:
        spelling = self._vocabulary.spelling(token).decode("utf-8", "replace")
        return TokenLogprob(token, spelling, self._vocabulary.piece(token), logprob, tuple(top))
