"""Types for the hazard cases of the engine: `Case`, `Topic`, and `Scene`, the objects that a case uses.

Each case does one thing through `cllm.Engine` that would make libllama abort, hang or return wrong
results.  The cases are in `engine_hazards_*.py`, by topic; `engine_hazard_server` runs them.
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
# The bystander's stream is read only before and after a case.  Its request pauses after this many tokens.
STREAM_BUFFER = 8


class WrongAnswerError(AssertionError):
    """A call was accepted and gave a wrong result."""


@dataclass
class Scene:
    """An engine that has a bystander's request running, and a directory for files."""

    engine: Engine
    directory: Path

    async def ask(self, **sampling: Any) -> Completion:
        """Ask the question that every engine can answer, with these parameters."""
        return await self.engine.generate(QUESTION, **{"max_tokens": 4, **sampling})

    async def start(self, *args: Any, **options: Any) -> Completion:
        """Start another engine, ask it, and close it."""
        async with Engine(*args, **{**OPTIONS, **options}) as engine:
            return await engine.generate(QUESTION, temperature=0, max_tokens=4)

    def file(self, name: str, content: bytes) -> Path:
        """Write a file with this content, and return its path."""
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
        Row of the hazard tables: "1.5 logit_bias out of range"; see `hazard_rows`.
    options : callable
        Returns further options of the engine of the scene; called in the process of the case.
    in_full_only : bool
        True: left out of `make test`, since it takes a second or more, or is one of many similar cases.
    """

    claim: str
    row: str
    act: Act
    error: type[Exception] | None
    says: tuple[str, ...] = ()
    options: Callable[[], dict[str, Any]] = dict
    in_full_only: bool = False


@dataclass
class Topic:
    """Cases of one kind; `row` is the default row of a case, `options` returns further options of its engine."""

    row: str = ""
    options: Callable[[], dict[str, Any]] = dict
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

        self.cases.append(
            Case(claim, row or self.row, bound_act, error, says, self.options, in_full_only)
        )

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

        self.cases.append(
            Case(claim, row or self.row, bound_act, None, (), self.options, in_full_only)
        )


def check_finite(answer: object) -> None:
    """Raise `WrongAnswerError` if a completion ended with an error, or has an invalid log probability."""
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
    """Return the repr of a value for a claim, shortened if it has more than 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:40]}... ({type(value).__name__})"
