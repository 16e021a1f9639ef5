"""Choose the next token of one row, from the candidates that can matter.

A row of 152k logits is cut before llama.cpp's own samplers decide over that handful: the same
candidates, the same probabilities, the same token for the same seed as over the whole row.

What can matter.  *Touched* are tokens whose logit a bias, a penalty or DRY changes: they are always
candidates.  If the first sampler that narrows is top_k, then so are the k largest of the others; if
only min_p narrows, those it could leave.  Anything else wants the whole row.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cllm.engine.constraint import CompiledConstraint, Mask, TokenConstraint
from cllm.engine.request import Thinking
from cllm.engine.sampling.batch_sampler import check_recalled
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.sampling_params import SamplingParams, window

# Samplers that change logits of touched tokens alone, and may come before the one that narrows.
TOUCHING = ("penalties", "dry")

Ids = TypeVar("Ids", bound="np.integer[Any]")


class Chain(Protocol):
    """Samplers that choose among candidates, and remember the choice."""

    def choose(self, ids: NDArray[np.integer], logits: NDArray[np.float32]) -> int:
        """One of `ids`, which are in ascending order."""

    def choose_from_row(self, row: NDArray[np.float32], banned: NDArray[np.integer]) -> int:
        """One of a row's tokens, but none of `banned`, which are in ascending order."""

    def accept(self, token: int) -> None: ...
    def draw(self) -> None:
        """Draw as for one token, from nothing."""

    def close(self) -> None: ...


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
        Those that end the output: not sampled before `min_tokens`, nor ever with `ignore_eos`,
        unless a constraint leaves nothing else.
    constraint : TokenConstraint, optional
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
        constraint: TokenConstraint | None = None,
    ) -> None:
        self._chain = chain
        self.constraint: TokenConstraint | None = constraint
        self._banned = _ids(banned)
        ends = tuple(ends)
        self._ignored = _ids([*self._banned, *ends]) if params.ignore_eos else self._banned
        self._early = _ids([*self._banned, *ends, *params.stop_token_ids])
        self._n_until_end = params.min_tokens
        self._biased = _ids(params.logit_bias)
        seen = prompt if params.remembers_prompt else ()
        self._recent = _Recent(seen, _window(params, n_ctx))
        self.is_greedy: bool = params.is_greedy and not params.changes_logits
        self._banned_sets = frozenset(self._early.tolist()), frozenset(self._ignored.tolist())
        self._k = n_largest(params)
        self._below = math.inf if self._k else n_below(params)

    def may_be(self, token: int) -> bool:
        """See `TokenSampler`."""
        early, ignored = self._banned_sets
        return token not in (early if self._n_until_end > 0 else ignored)

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        """Choose from the row that was scanned; with `allowed`, from these tokens of it."""
        banned = self._early if self._n_until_end > 0 else self._ignored
        if allowed is not None and np.count_nonzero(allowed) == np.count_nonzero(allowed[banned]):
            banned = self._banned
        touched = self._recent.tokens(self._biased)
        ids = self._candidates(scan, touched, banned)
        if allowed is None:
            if ids is None:
                return self._chain.choose_from_row(scan.row, banned)
            ids = _union(ids, touched)
        elif ids is None:
            (ids,) = allowed.nonzero()
        else:
            ids = _union(ids, touched)
            ids = ids[allowed[ids]]
        if len(banned):
            ids = np.setdiff1d(ids, banned, assume_unique=True)
        return self._chain.choose(ids, scan.row[ids])

    def accept(self, token: int) -> None:
        """Report the finally chosen token."""
        if self.constraint is not None:
            self.constraint.accept(token)
        self._chain.accept(token)
        self._recent.append(token)
        self._n_until_end -= 1

    def recall(self, token: int) -> None:
        """See `TokenSampler`."""
        check_recalled(token, self.constraint)
        self._chain.draw()
        self.accept(token)

    def close(self) -> None:
        """Free all resources."""
        try:
            self._chain.close()
        finally:
            if self.constraint is not None:
                self.constraint.close()

    def _candidates(
        self, scan: RowScan, touched: NDArray[np.int32], banned: NDArray[np.int32]
    ) -> NDArray[np.intp] | None:
        """Ids, ascending: all that can matter of the tokens that nothing touches; None: the row."""
        n_changed = len(touched) + len(banned)
        if self._k:
            # So many survivors that k are left, were all touched and banned ones among them.
            return scan.at_least(self._k + n_changed)
        if self._below == math.inf:
            return None
        ids = scan.at_least(1 + n_changed)
        if ids is None:
            return None
        unchanged = np.setdiff1d(ids, np.concatenate([touched, banned]), assume_unique=True)
        return scan.above(float(scan.row[unchanged].max()) - self._below)


def _ids(tokens: Iterable[int]) -> NDArray[np.int32]:
    """Distinct token ids, ascending."""
    return np.unique(np.fromiter(tokens, np.int32))


def _union(a: NDArray[Ids], b: NDArray[np.int32]) -> NDArray[Ids]:
    """The distinct ids of both, which are ascending and distinct already."""
    if not len(b):
        return a
    # numpy's own goes through a hash table, which costs more than the rest of a row.
    both: NDArray[Ids] = np.concatenate([a, b], dtype=a.dtype)
    both.sort(kind="stable")
    is_first = np.ones(len(both), np.bool_)
    np.not_equal(both[1:], both[:-1], out=is_first[1:])
    return both[is_first]


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
        """Return these tokens and `others`, ascending."""
        if not self._counts:
            return others
        return _union(np.sort(np.fromiter(self._counts, np.int32, len(self._counts))), others)


def _window(params: SamplingParams, n_ctx: int) -> int:
    """Return the number of last tokens that penalties and DRY look at."""
    lengths = [0]
    if params.has_penalties:
        lengths.append(window(params.repeat_last_n, n_ctx))
    if params.has_dry:
        lengths.append(window(params.dry_penalty_last_n, n_ctx))
    return max(lengths)


def draws_by_logits(params: SamplingParams, *, is_constrained: bool) -> bool:
    """Return True if the number of draws, or the remembered state, depends on logits and not on tokens alone.

    The last sampler of a chain draws once for each token; xtc only where two candidates are left,
    and a constraint lets it draw again where the first token is refused.
    """
    if params.is_greedy:
        return False
    return bool(
        is_constrained
        or params.mirostat
        or params.adaptive_target >= 0
        or "xtc" in params.active_samplers
    )


def resamples(
    params: SamplingParams, constraint: CompiledConstraint | None, thinking: Thinking | None
) -> bool:
    """Return True if a sampler must replay tokens chosen elsewhere to restore its state."""
    # How a thought ends may depend on what the model wanted to say instead.
    return thinking is not None or draws_by_logits(params, is_constrained=constraint is not None)


def narrowing(params: SamplingParams) -> list[str]:
    """Return the active samplers in order, without those that only change touched tokens."""
    return [name for name in params.active_samplers if name not in TOUCHING]


def n_largest(params: SamplingParams) -> int:
    """Return how many of the largest logits are enough; 0 if unknown."""
    if params.is_greedy:
        return 1
    # Everything after top_k, penalties included, sees no more than its k.
    return params.top_k if not params.mirostat and narrowing(params)[:1] == ["top_k"] else 0


def n_below(params: SamplingParams) -> float:
    """Return how far below the largest a logit can lie and still matter; inf: any."""
    is_first = narrowing(params)[:1] == ["min_p"] and not params.mirostat
    return -math.log(params.min_p) + 1e-3 if is_first and params.min_keep <= 1 else math.inf
