"""Protocols of a constraint on an output: a grammar, a schema, a regular expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.errors import CllmError

# Which tokens may come next: shape `(n_vocab,)`.
Mask = NDArray[np.bool_]


class NotAvailableError(CllmError):
    """A package for constraints of this kind is missing."""


class ConstraintFamily(Protocol):
    """Constraints of one kind, which compute their masks together."""

    def masks(self, constraints: Sequence[Any]) -> Sequence[Mask | Exception]:
        """Return, for each constraint, the tokens that may come next: bool of shape `(n_vocab,)`, or an error.

        Valid until the next call.  A token that ends the output is among them where the output is
        complete.  An exception in place of the mask of one that cannot go on.
        """


class TokenConstraint(Protocol):
    """Constraint on the tokens of one output.  Inference thread only."""

    @property
    def family(self) -> ConstraintFamily:
        """Family with which the constraint computes its masks."""

    def allows(self, token: int) -> bool:
        """Return True if the output may continue, or end, with this token."""

    def accept(self, token: int) -> None:
        """Advance the constraint by a token that it allows."""

    def forced(self) -> Sequence[int]:
        """Return the next tokens that the constraint forces; empty if unknown."""

    def close(self) -> None:
        """Free all resources."""


class NamedConstraint(NamedTuple):
    """A constraint that was tried here, and is compiled in the process that samples.

    Attributes
    ----------
    field : str
        A constraint of `SamplingParams`, or `tools`.
    """

    field: str
    text: str

    def start(self) -> TokenConstraint:
        """See `CompiledConstraint`."""
        raise NotImplementedError(f"{self.field} is compiled in the process that samples")


class CompiledConstraint(Protocol):
    """A constraint that was compiled off the inference thread, for any number of outputs."""

    def start(self) -> TokenConstraint:
        """Return the constraint at the beginning of an output."""
