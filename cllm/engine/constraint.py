"""Protocols of a constraint on an output: a grammar, a schema, a regular expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.errors import CllmError

# True for each token that may come next; bool of shape `(n_vocab,)`.
Mask = NDArray[np.bool_]


class NotAvailableError(CllmError):
    """A package for constraints of this kind is missing."""


class ConstraintFamily(Protocol):
    """Constraints of one kind, which compute their masks together."""

    def masks(self, constraints: Sequence[Any]) -> Sequence[Mask | Exception]:
        """Return the mask of each constraint, or an exception for a constraint that cannot continue.

        A mask is a bool array of shape `(n_vocab,)`: True for each token that may come next.  Tokens that
        end the output are allowed if the output is complete.  The masks are valid until the next call.
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
    """Text of a constraint that was tested and is compiled later, in the process that samples.

    Attributes
    ----------
    field : str
        Name of a field of `SamplingParams`, such as "json_schema"; or "tools".
    text : str
        Source text of the constraint.
    """

    field: str
    text: str

    def start(self) -> TokenConstraint:
        """Raise `NotImplementedError`: only a compiled constraint can start."""
        raise NotImplementedError(f"{self.field} is compiled in the process that samples")


class CompiledConstraint(Protocol):
    """A constraint that was compiled off the inference thread, for any number of outputs."""

    def start(self) -> TokenConstraint:
        """Return the constraint at the beginning of an output."""
