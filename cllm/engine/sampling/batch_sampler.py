"""Choose the next token of every output row of a tick.

Greedy rows that nothing touches are decided together by one `argmax`; every other row is cut to the
candidates that can matter first (`row_sampler`).

Structured output: sample first and ask for that one token; only where it is refused is the whole
row masked, for all such rows of the tick together, and sampled again, as llama-server does.  With p
the probability that the first is allowed, each allowed token gets its share of p at first and of
1 - p then: without samplers that narrow, the distribution is that of the masked row.  With them, what
is likely in the whole row is preferred.
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

N_HANDOVERS_OF_A_SCAN = 3  # the maxima of the buckets, the largest of them, the cut
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
        """Choose from the row that was scanned; with `allowed`, from these tokens of it."""

    def accept(self, token: int) -> None:
        """Report the finally chosen token."""

    def recall(self, token: int) -> None:
        """Remember a token that was chosen elsewhere, and draw as often as that took.

        Enough where the draws do not depend on logits; see `draws_by_logits`.

        Raises
        ------
        InvalidArgumentError
            The output could not have gone on with it.
        """

    def close(self) -> None:
        """Free all resources."""


class NotFiniteError(ArithmeticError):
    """A row of logits has no finite maximum: the model computed NaN or infinity."""


class BatchSampler:
    """One token for each output row of a tick, or the exception that its row met.

    Parameters
    ----------
    n_vocab : int

    Attributes
    ----------
    n_gil_handovers : int
        Calls so far that gave the GIL away.
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
        """Sample, and let the samplers remember it.

        Parameters
        ----------
        logits : ndarray
            float32, shape `(n_rows, n_vocab)`.
        rows : sequence of int
            Those to sample from, in ascending order.
        samplers : sequence
            One for each of `rows`; None means greedy.
        """
        if len(rows) == len(logits) and all(map(_takes_largest, samplers)):
            return self._largest(logits, samplers)
        results = self._choose(logits, rows, samplers)
        return [_accept(token, sampler) for token, sampler in zip(results, samplers, strict=True)]

    def resample(self, row: NDArray[np.float32], sampler: TokenSampler, token: int) -> None:
        """Make a sampler choose a given token from its logits, so that its memory is restored.

        Raises
        ------
        Exception
            What the row met, or the output could not have gone on with the token.
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
        """A token for each row, which its sampler does not remember yet."""
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
        for index, mask in self._masks(refused, samplers):
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
        """Return the largest logit of each row with one call, which releases the GIL once."""
        self.n_gil_handovers += 1
        results: list[int | Exception] = logits.argmax(axis=1).tolist()
        for index, sampler in enumerate(samplers):
            token = results[index]
            assert isinstance(token, int)
            # The largest value of a row is NaN if any is, and so tells about all of it.
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
        """The masks of these samplers' constraints, each family's computed together."""
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
    """Refuse a token that a constraint forbids."""
    if constraint is not None and not constraint.allows(token):
        raise InvalidArgumentError("generated", token, "tokens that the constraint allows")


def _takes_largest(sampler: TokenSampler | None) -> bool:
    """Return True if the sampler takes the largest logit that is not banned."""
    return sampler is None or (sampler.is_greedy and sampler.constraint is None)


def _is_refused(token: int | Exception, constraint: TokenConstraint | None) -> bool:
    """Return True if a constraint must name the alternatives."""
    if constraint is None:
        return False
    if isinstance(token, Exception):
        # Nothing was left to choose from: the constraint may bring back what was banned.
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
