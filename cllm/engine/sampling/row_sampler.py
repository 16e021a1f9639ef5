"""Choose the next token of one row, from the candidates that can matter.

A row of 152k logits is cut to a few candidates before llama.cpp's samplers run.  Probabilities, and
the token for a seed, are the same as over the whole row.

*Touched* tokens are those whose logit a bias, a penalty or DRY changes: they are always candidates.
If the first sampler that narrows is top_k, so are the k largest of the others.  If it is min_p, so
are the others that it could keep.  In all other cases the whole row is used.
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
from cllm.errors import InvalidArgumentError

# Samplers that change logits of touched tokens alone, and may come before the one that narrows.
TOUCHING = ("penalties", "dry")

Ids = TypeVar("Ids", bound="np.integer[Any]")


class Chain(Protocol):
    """Samplers that choose among candidates, and remember the choice."""

    def choose(self, ids: NDArray[np.integer], logits: NDArray[np.float32]) -> int:
        """Return one of `ids`, which are in ascending order; `logits` belong to them."""

    def choose_from_row(self, row: NDArray[np.float32], banned: NDArray[np.integer]) -> int:
        """Return a token of the row that is not in `banned`, which is in ascending order."""

    def accept(self, token: int) -> None: ...
    def draw(self) -> None:
        """Advance the random state as for one token, without logits."""

    def close(self) -> None: ...


class RowSampler:
    """A `TokenSampler` that cuts its row before a chain decides.

    Parameters
    ----------
    chain : Chain
        Its samplers `params.prompt_samplers` have accepted the prompt already.
    params : SamplingParams
    prompt : sequence of int
        Tokens of the prompt, of which the samplers `params.prompt_samplers` know.
    banned : iterable of int
        Tokens that are never sampled.
    ends : iterable of int
        Tokens that end the output: not sampled before `min_tokens`, and never with `ignore_eos`,
        unless a constraint allows no other token.
    n_ctx : int
        Number of last tokens that penalties and DRY look at if their setting is -1.
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
        seen = prompt if params.prompt_samplers else ()
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
        """Return a token of the scanned row; if `allowed` is given, one of these tokens."""
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
        ids = without(ids, banned)
        try:
            return self._chain.choose(ids, scan.row[ids])
        except InvalidArgumentError:
            if allowed is None:
                raise
            limit = "at least 1 that no bias, no ban and no other sampler excludes"
            raise InvalidArgumentError(
                "number of tokens that the constraint allows", 0, limit
            ) from None

    def accept(self, token: int) -> None:
        """Report the finally chosen token."""
        if self.constraint is not None:
            self.constraint.accept(token)
        self._chain.accept(token)
        self._recent.append(token)
        self._n_until_end -= 1

    def recall(self, token: int) -> None:
        """Accept a token sampled elsewhere, and draw as often as its sampling did; see `TokenSampler`."""
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
        """Return ids, ascending, with every untouched candidate that is not banned; None: the whole row."""
        n_changed = len(touched) + len(banned)
        if self._k:
            # Enough to leave k, even if all touched and banned tokens are among them.
            return scan.at_least(self._k + n_changed)
        if self._below == math.inf:
            return None
        ids = scan.at_least(1 + n_changed)
        if ids is None:
            return None
        unchanged = without(without(ids, touched), banned)
        return scan.above(float(scan.row[unchanged].max()) - self._below)


def _ids(tokens: Iterable[int]) -> NDArray[np.int32]:
    """Distinct token ids, ascending."""
    return np.unique(np.fromiter(tokens, np.int32))


def _union(a: NDArray[Ids], b: NDArray[np.int32]) -> NDArray[Ids]:
    """Return the union of two arrays of ids; each is ascending and distinct, and so is the result."""
    if not len(b):
        return a
    # `numpy.union1d` uses a hash table, which takes longer than the rest of the work for a row.
    both: NDArray[Ids] = np.concatenate([a, b], dtype=a.dtype)
    both.sort(kind="stable")
    is_first = np.ones(len(both), np.bool_)
    np.not_equal(both[1:], both[:-1], out=is_first[1:])
    return both[is_first]


def without(ids: NDArray[Ids], excluded: NDArray[np.int32]) -> NDArray[Ids]:
    """Return `ids` without `excluded`; each is ascending and distinct, and so is the result."""
    # `numpy.setdiff1d` takes 25 calls, in every row.
    places, ends = ids.searchsorted(excluded), ids.searchsorted(excluded, side="right")
    found = places[places != ends]
    if not len(found):
        return ids
    is_kept = np.ones(len(ids), np.bool_)
    is_kept[found] = False
    return ids[is_kept]


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

    The last sampler of a chain draws once for each token.  xtc draws only if at least two candidates are
    left.  A constraint that rejects the first token makes the chain draw again.
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
    """Return True if restoring a sampler needs the logits of each token; otherwise `recall` is enough."""
    # The end of a thought may depend on the token that the model preferred (`ThinkingConstraint.mask`).
    return thinking is not None or draws_by_logits(params, is_constrained=constraint is not None)


def narrowing(params: SamplingParams) -> list[str]:
    """Return the active samplers in order, without those that only change touched tokens."""
    return [name for name in params.active_samplers if name not in TOUCHING]


def n_largest(params: SamplingParams) -> int:
    """Return how many of the largest untouched logits can matter; 0 if the parameters set no limit."""
    if params.is_greedy:
        return 1
    # Everything after top_k, penalties included, sees no more than its k.
    return params.top_k if not params.mirostat and narrowing(params)[:1] == ["top_k"] else 0


def n_below(params: SamplingParams) -> float:
    """Return how far below the largest a logit can lie and still matter; inf: any."""
    is_first = narrowing(params)[:1] == ["min_p"] and not params.mirostat
    return -math.log(params.min_p) + 1e-3 if is_first and params.min_keep <= 1 else math.inf
