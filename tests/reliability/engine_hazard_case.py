"""What a case of the engine's hazards is, and what it is given to act on.

Every case is one thing that would make libllama abort, hang or lie, done through `cllm.Engine`.  The
cases themselves are in `engine_hazards_*.py`, by topic; `engine_hazard_server` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cllm import Completion, Engine, FinishReason, TokenLogprob
from cllm.errors import InvalidRequestError
from tools import make_model

NAN, INF = float("nan"), float("inf")
N_VOCAB = 260
QUESTION, ANSWER = "1+1=", "2"
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "n_threads": 1, "n_threads_batch": 1}
# The bystander is read before and after a case: meanwhile it computes so many tokens, then it waits.
STREAM_BUFFER = 8


class WrongAnswerError(AssertionError):
    """What was accepted did not give what it should."""


@dataclass
class Scene:
    """An engine that has a bystander's request running, and a directory for files."""

    engine: Engine
    directory: Path

    async def ask(self, **sampling: Any) -> Completion:
        """The question that every engine can answer, with these parameters."""
        return await self.engine.generate(QUESTION, **{"max_tokens": 4, **sampling})

    async def start(self, *args: Any, **options: Any) -> Completion:
        """Start another engine, ask it, and close it."""
        async with Engine(*args, **{**OPTIONS, **options}) as engine:
            return await engine.generate(QUESTION, temperature=0, max_tokens=4)

    def file(self, name: str, content: bytes) -> Path:
        """A file with this content."""
        path = self.directory / name
        path.write_bytes(content)
        return path

    @staticmethod
    def tiny_model() -> Path:
        """A random-weight model."""
        return make_model.ensure("tiny-llama", "F16")


Act = Callable[[Scene], Awaitable[object]]


@dataclass(frozen=True)
class Case:
    """`act(scene)` must raise `error` and say all of `says`; if there is no error, it must answer.

    Attributes
    ----------
    row : str
        Of the table of hazards: "1.5 logit_bias out of range"; see `hazard_rows`.
    in_full_only : bool
        Left to the full numbers: it takes a second or more, or is one of many alike.
    """

    claim: str
    row: str
    act: Act
    error: type[Exception] | None
    says: tuple[str, ...] = ()
    in_full_only: bool = False


@dataclass
class Topic:
    """Cases of one kind; `row` is that of those which do not name another."""

    row: str = ""
    cases: list[Case] = field(default_factory=list)

    def refuse(
        self,
        claim: str,
        act: Callable[..., Awaitable[object]],
        *says: str,
        error: type[Exception] = InvalidRequestError,
        row: str = "",
        in_full_only: bool = False,
        **bound: Any,
    ) -> None:
        """Add a case that is refused; `bound` are further arguments of `act`."""

        async def bound_act(scene: Scene) -> object:
            return await act(scene, **bound)

        self.cases.append(Case(claim, row or self.row, bound_act, error, says, in_full_only))

    def accept(
        self,
        claim: str,
        act: Callable[..., Awaitable[object]],
        *,
        row: str = "",
        in_full_only: bool = False,
        **bound: Any,
    ) -> None:
        """Add a case that is legal: it must answer, and what it answers must be finite."""

        async def bound_act(scene: Scene) -> object:
            check_finite(await act(scene, **bound))
            return None

        self.cases.append(Case(claim, row or self.row, bound_act, None, (), in_full_only))


def check_finite(answer: object) -> None:
    """Raise if a completion did not end well, or has a number in it that is none."""
    if not isinstance(answer, Completion):
        return
    if answer.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise WrongAnswerError(f"it ended by {answer.finish_reason}")
    for scores in (answer.logprobs, answer.prompt_logprobs):
        for score in scores or ():
            if score is not None and not _is_probability(score):
                raise WrongAnswerError(f"{score} has no probability")


def _is_probability(score: TokenLogprob) -> bool:
    return all(not math.isnan(one.logprob) and one.logprob <= 1e-5 for one in (score, *score.top))


def short(value: object) -> str:
    """A value as a claim names it."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:40]}... ({type(value).__name__})"
