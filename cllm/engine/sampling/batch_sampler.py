"""Choose the next token of every output row of a tick.

If every row is greedy and unconstrained, one `argmax` decides all of them.  Otherwise each greedy
row has an `argmax` of its own.  The others are first cut to a few candidates (`row_sampler`).

Structured output works as in llama-server: sample a token, and check that one.  Rejected rows are
masked, together for all such rows of the tick, and sampled again.  Let p be the probability that the
first token is allowed.  A token with the share q of the allowed ones gets p q at first, and (1 - p) q
on the second try: q in all, as in the masked row.  Samplers that narrow change this: tokens that are
likely in the whole row are then preferred.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.engine.constraint import ConstraintFamily, Mask, TokenConstraint
from cllm.engine.sampling.row_scan import RowScan
from cllm.errors import InvalidArgumentError

N_HANDOVERS_OF_A_SCAN = 3  # numpy calls that release the GIL: maxima of buckets, their maximum, cut
NOT_FINITE = "the model computed logits that are not finite"


class TokenSampler(Protocol):
    """The sampler of one sequence, with its random state.  Inference thread only."""

    @property
    def constraint(self) -> TokenConstraint | None:
        """Constraint on the output; None without one."""

    @property
    def is_greedy(self) -> bool:
        """True if the sampler takes the largest logit, and changes logits only by banning tokens."""

    def may_be(self, token: int) -> bool:
        """Return True if a token is not banned."""

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        """Return a token of the scanned row; if `allowed` is given, one of these tokens."""

    def accept(self, token: int) -> None:
        """Report the finally chosen token."""

    def recall(self, token: int) -> None:
        """Accept a token that was sampled elsewhere, and draw as often as its sampling did.

        Restores the random state only if the draws do not depend on logits; see `draws_by_logits`.

        Raises
        ------
        InvalidArgumentError
            The constraint does not allow the token.
        """

    def close(self) -> None:
        """Free all resources."""


class NotFiniteError(ArithmeticError):
    """A row of logits has no finite maximum: the model computed NaN or infinity."""


class BatchSampler:
    """Sampler of all output rows of a tick.  Inference thread only.

    Parameters
    ----------
    n_vocab : int

    Attributes
    ----------
    n_gil_handovers : int
        Number of numpy calls so far that released the GIL.
    """

    def __init__(self, n_vocab: int) -> None:
        self.n_gil_handovers: int = 0
        self._scan = RowScan(n_vocab)
        self._masked: NDArray[np.float32] | None = None

    def sample(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[int],
        samplers: Sequence[TokenSampler | None],
    ) -> list[int | Exception]:
        """Return a sampled token, or an exception, for each of `rows`; samplers accept their tokens.

        Parameters
        ----------
        logits : ndarray
            float32, shape `(n_rows, n_vocab)`.
        rows : sequence of int
            Indices of the rows to sample from, in ascending order.
        samplers : sequence
            One for each of `rows`; None means greedy.
        """
        if len(rows) == len(logits) and all(map(_takes_largest, samplers)):
            return self._largest(logits, samplers)
        results = self._choose(logits, rows, samplers)
        return [_accept(token, sampler) for token, sampler in zip(results, samplers, strict=True)]

    def resample(self, row: NDArray[np.float32], sampler: TokenSampler, token: int) -> None:
        """Restore the state of a sampler: sample from the logits again, but accept a given token.

        Raises
        ------
        Exception
            Sampling failed, or the constraint does not allow the token.
        """
        (chosen,) = self._choose(row.reshape(1, -1), [0], [sampler])
        if isinstance(chosen, Exception):
            raise chosen
        check_recalled(token, sampler.constraint)
        sampler.accept(token)

    def _choose(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[int],
        samplers: Sequence[TokenSampler | None],
    ) -> list[int | Exception]:
        """Return a token, or an exception, for each row; samplers have not accepted them yet."""
        results = [
            self._attempt(logits[row], sampler) for row, sampler in zip(rows, samplers, strict=True)
        ]
        refused = []
        for index, sampler in enumerate(samplers):
            try:
                if sampler is not None and _is_refused(results[index], sampler.constraint):
                    refused.append(index)
            except Exception as error:
                results[index] = error
        for index, mask in self._masks(refused, samplers) if refused else ():
            sampler = samplers[index]
            assert sampler is not None
            results[index] = (
                mask
                if isinstance(mask, Exception)
                else self._attempt(self._mask(logits[rows[index]], mask), sampler, mask)
            )
        return results

    def _largest(
        self, logits: NDArray[np.float32], samplers: Sequence[TokenSampler | None]
    ) -> list[int | Exception]:
        """Return the token with the largest logit of each row, by one call; samplers accept their tokens."""
        self.n_gil_handovers += 1
        results: list[int | Exception] = logits.argmax(axis=1).tolist()
        for index, sampler in enumerate(samplers):
            token = results[index]
            assert isinstance(token, int)
            # `argmax` returns a NaN if the row has one: this one value shows NaN or +inf anywhere.
            if not math.isfinite(logits[index, token]):
                results[index] = NotFiniteError(NOT_FINITE)
            elif sampler is not None:
                if not sampler.may_be(token):
                    results[index] = self._attempt(logits[index], sampler)
                results[index] = _accept(results[index], sampler)
        return results

    def _attempt(
        self,
        row: NDArray[np.float32],
        sampler: TokenSampler | None,
        allowed: Mask | None = None,
    ) -> int | Exception:
        try:
            if sampler is None or (sampler.is_greedy and allowed is None):
                self.n_gil_handovers += 1
                token = int(row.argmax())
                if not math.isfinite(row[token]):
                    return NotFiniteError(NOT_FINITE)
                if sampler is None or sampler.may_be(token):
                    return token
            self.n_gil_handovers += N_HANDOVERS_OF_A_SCAN
            if not math.isfinite(self._scan.read(row)) and allowed is None:
                return NotFiniteError(NOT_FINITE)
            return sampler.choose(self._scan, allowed)
        except Exception as error:
            return error

    def _masks(
        self, refused: Sequence[int], samplers: Sequence[TokenSampler | None]
    ) -> Iterable[tuple[int, Mask | Exception]]:
        """Yield `(index, mask or exception)` for these samplers; each family computes its masks together."""
        families: dict[ConstraintFamily, list[tuple[int, TokenConstraint]]] = defaultdict(list)
        for index in refused:
            sampler = samplers[index]
            assert sampler is not None
            assert sampler.constraint is not None
            families[sampler.constraint.family].append((index, sampler.constraint))
        for family, members in families.items():
            masks: Sequence[Mask | Exception]
            try:
                masks = family.masks([constraint for _, constraint in members])
            except Exception as error:
                masks = [error] * len(members)
            yield from ((index, mask) for (index, _), mask in zip(members, masks, strict=True))

    def _mask(self, row: NDArray[np.float32], mask: Mask) -> NDArray[np.float32]:
        """Return a copy of a row with -inf for tokens outside the mask; valid until the next call."""
        if self._masked is None:
            self._masked = np.empty(self._scan.n_vocab, np.float32)
        self._masked.fill(-np.inf)
        np.copyto(self._masked, row, where=mask)
        return self._masked


def check_recalled(token: int, constraint: TokenConstraint | None) -> None:
    """Raise `InvalidArgumentError` if the constraint does not allow the token."""
    if constraint is not None and not constraint.allows(token):
        raise InvalidArgumentError("generated", token, "tokens that the constraint allows")


def _takes_largest(sampler: TokenSampler | None) -> bool:
    """Return True if the sampler takes the largest logit that is not banned."""
    return sampler is None or (sampler.is_greedy and sampler.constraint is None)


def _is_refused(token: int | Exception, constraint: TokenConstraint | None) -> bool:
    """Return True if the row must be masked by its constraint and sampled again."""
    if constraint is None:
        return False
    if isinstance(token, Exception):
        # No candidate was left: with a mask, `RowSampler` can lift bans.
        return isinstance(token, InvalidArgumentError)
    return not constraint.allows(token)


def _accept(token: int | Exception, sampler: TokenSampler | None) -> int | Exception:
    if sampler is None or isinstance(token, Exception):
        return token
    try:
        sampler.accept(token)
    except Exception as error:
        return error
    return token
