"""Choose the next token of every output row of a tick.

A row of 152k logits is cut to the candidates that can matter before llama.cpp's own samplers decide
over that handful: the same candidates, the same probabilities, the same token for the same seed as
over the whole row.  Greedy rows that nothing touches are decided together by one `argmax`.

What can matter.  *Touched* are tokens whose logit a bias, a penalty or DRY changes: they are always
candidates.  If the first sampler that narrows is top_k, then so are the k largest of the others; if
only min_p narrows, those it could leave.  Anything else wants the whole row.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.engine.sampling_params import SamplingParams, window

# Samplers that change logits of touched tokens alone, and may come before the one that narrows.
TOUCHING = ("penalties", "dry")
# A first guess at how far below the largest logit the k-th is; it follows the rows afterwards.
FIRST_GAP = 8.0
GROW, SHRINK, MAX_EXCESS = 1.2, 0.8, 4
WHOLE_GAP = 1e4
NOT_FINITE = "the model computed logits that are not finite"


class TokenSampler(Protocol):
    """The sampler of one sequence, with its random state.  Inference thread only."""

    def sample(self, logits: NDArray[np.float32], largest: float) -> int:
        """Choose from one row, float32 of shape `(n_vocab,)`, and remember the choice."""

    def close(self) -> None:
        """Free what it holds."""


class Chain(Protocol):
    """Samplers that decide over a handful of candidates, and remember what was chosen."""

    def choose(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int:
        """One of `ids`, which are in ascending order."""

    def accept(self, token: int) -> None: ...
    def close(self) -> None: ...


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
    # The largest value of a row is NaN if any is, and so tells about all of it.
    if not any(samplers):
        best = logits.argmax(axis=1)
        largest = logits[np.arange(len(best)), best].tolist()
        return [
            token if math.isfinite(value) else NotFiniteError(NOT_FINITE)
            for token, value in zip(best.tolist(), largest, strict=True)
        ]
    return [_sample_row(row, sampler) for row, sampler in zip(logits, samplers, strict=True)]


def _sample_row(logits: NDArray[np.float32], sampler: TokenSampler | None) -> int | Exception:
    try:
        if sampler is None:
            token = int(logits.argmax())
            largest = float(logits[token])
        else:
            largest = float(logits.max())
        if not math.isfinite(largest):
            return NotFiniteError(NOT_FINITE)
        return token if sampler is None else sampler.sample(logits, largest)
    except Exception as error:
        return error


class RowSampler:
    """A `TokenSampler` that cuts its row before a chain decides.

    Parameters
    ----------
    chain : Chain
        Has seen the prompt already.
    params : SamplingParams
    prompt : sequence of int
        Penalties see it.
    banned : iterable of int
        Tokens that are never sampled.
    ends : iterable of int
        Tokens that are not sampled before `min_tokens`.
    scratch : ndarray
        bool, shape `(n_vocab,)`, shared by all samplers of the thread.
    """

    def __init__(
        self,
        chain: Chain,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        banned: Iterable[int],
        ends: Iterable[int],
        n_ctx: int,
        scratch: NDArray[np.bool_],
    ) -> None:
        self._chain = chain
        self.close = chain.close
        self._scratch = scratch
        self._n_until_end = params.min_tokens
        self._banned = np.unique(np.fromiter(banned, np.int32))
        self._ends = np.union1d(self._banned, np.fromiter(ends, np.int32)).astype(np.int32)
        self._biased = np.fromiter(sorted(params.logit_bias), np.int32)
        self._recent = _Recent(prompt, _window(params, n_ctx))
        self._k = n_largest(params)
        self._below = math.inf if self._k else n_below(params)
        self._gap = FIRST_GAP

    def sample(self, logits: NDArray[np.float32], largest: float) -> int:
        """Choose from one row, float32 of shape `(n_vocab,)`, and remember the choice."""
        banned = self._ends if self._n_until_end > 0 else self._banned
        touched = self._recent.tokens(self._biased)
        ids = self._candidates(logits, largest, touched, banned)
        if len(touched):
            ids = np.union1d(ids, touched)
        if len(banned):
            ids = np.setdiff1d(ids, banned, assume_unique=True)
        token = self._chain.choose(ids.astype(np.int32, copy=False), logits[ids])
        self._chain.accept(token)
        self._recent.append(token)
        self._n_until_end -= 1
        return token

    def _candidates(
        self,
        logits: NDArray[np.float32],
        largest: float,
        touched: NDArray[np.int32],
        banned: NDArray[np.int32],
    ) -> NDArray[np.intp]:
        """Ids in ascending order: all that can matter of the tokens that nothing touches."""
        n_vocab = len(logits)
        if self._k:
            # So many survivors that k are left, were all touched and banned ones among them.
            n_wanted = self._k + len(touched) + len(banned)
            if n_wanted >= n_vocab:
                return np.arange(n_vocab)
            gap = self._gap
            while gap < WHOLE_GAP:
                ids = self._above(logits, largest - gap)
                if len(ids) >= n_wanted:
                    # The next row is like this one: towards a cut that leaves a few times more.
                    self._gap = gap * SHRINK if len(ids) > MAX_EXCESS * n_wanted else gap
                    return ids
                gap *= GROW
            self._gap = FIRST_GAP
            return np.arange(n_vocab)
        if self._below < math.inf:
            changed = np.concatenate([touched, banned])
            # In place, and put back: a copy would be as large as the vocabulary.
            kept = logits[changed]
            logits[changed] = -np.inf
            largest = float(logits.max())
            logits[changed] = kept
            return self._above(logits, largest - self._below)
        return np.arange(n_vocab)

    def _above(self, logits: NDArray[np.float32], cut: float) -> NDArray[np.intp]:
        np.greater_equal(logits, np.float32(cut), out=self._scratch)
        return np.flatnonzero(self._scratch)


class _Recent:
    """The distinct tokens among the last `n` of a sequence."""

    def __init__(self, prompt: Sequence[int], n: int) -> None:
        self._tokens: deque[int] = deque(prompt[-n:] if n else (), maxlen=n)
        self._counts = Counter(self._tokens)

    def append(self, token: int) -> None:
        tokens = self._tokens
        if not tokens.maxlen:
            return
        if len(tokens) == tokens.maxlen:
            oldest = tokens[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        tokens.append(token)
        self._counts[token] += 1

    def tokens(self, others: NDArray[np.int32]) -> NDArray[np.int32]:
        """They and `others`, ascending."""
        if not self._counts:
            return others
        return np.union1d(np.fromiter(self._counts, np.int32, len(self._counts)), others)


def _window(params: SamplingParams, n_ctx: int) -> int:
    """How many of the last tokens penalties and DRY look at."""
    lengths = [0]
    if params.has_penalties:
        lengths.append(window(params.repeat_last_n, n_ctx))
    if params.has_dry:
        lengths.append(window(params.dry_penalty_last_n, n_ctx))
    return max(lengths)


def narrowing(params: SamplingParams) -> list[str]:
    """The samplers that are on, in order, without those that change touched tokens alone."""
    return [name for name in params.active_samplers if name not in TOUCHING]


def n_largest(params: SamplingParams) -> int:
    """So many of the largest untouched logits are enough; 0 if that cannot be said."""
    if params.is_greedy:
        return 1
    # Everything after top_k, penalties included, sees no more than its k.
    return params.top_k if not params.mirostat and narrowing(params)[:1] == ["top_k"] else 0


def n_below(params: SamplingParams) -> float:
    """How far below the largest an untouched logit can lie and still matter; inf: any."""
    is_first = narrowing(params)[:1] == ["min_p"] and not params.mirostat
    return -math.log(params.min_p) + 1e-3 if is_first and params.min_keep <= 1 else math.inf
