"""The steps of a schedule: what can happen to an engine's core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Submit:
    """A request; `name` is what later steps call it.

    The adapter `lora` computes its tokens from `lora_start` on.  A capital letter of the prompt is an image:
    see `tests.simulation.images`.
    """

    name: str
    prompt: str
    max_tokens: int | None = None
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    priority: int = 0
    timeout: float | None = None
    tenant: str = ""
    lora: str = ""
    lora_start: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller of a request cancels it."""

    name: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """A request is suspended, and another resumes it from its tokens and saved state, under its name."""

    name: str


@dataclass(frozen=True, slots=True)
class StopReading:
    """The reader of a request stops."""

    name: str


@dataclass(frozen=True, slots=True)
class ReadOn:
    """The reader of a request reads again."""

    name: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The clock advances by `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The core runs `n` ticks."""

    n: int = 1


@dataclass(frozen=True, slots=True)
class FailDecode:
    """The next decode fails, now or later, and two ticks pass.

    `fault` is a return code of `llama_decode`, "nan", or "raise".  The step does nothing while the core
    recovers from an earlier fault.
    """

    fault: int | Literal["nan", "raise"]


@dataclass(frozen=True, slots=True)
class FailCall:
    """The next call of this decoder method raises, and two ticks pass; no `set_loras` fails in a recovery."""

    method: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """The prefix cache is emptied."""


Step = (
    Submit
    | Cancel
    | Suspend
    | StopReading
    | ReadOn
    | Wait
    | Tick
    | FailDecode
    | FailCall
    | ResetPrefixCache
)
STEPS: Mapping[str, type[Step]] = {
    kind.__name__: kind
    for kind in (
        Submit, Cancel, Suspend, StopReading, ReadOn, Wait, Tick, FailDecode, FailCall, ResetPrefixCache,
    )
}  # fmt: skip


def step_from(line: Mapping[str, Mapping[str, Any]]) -> Step:
    """Return the step of a line of a file, such as `{"Cancel": {"name": "r0"}}`."""
    [(name, values)] = line.items()
    kind: Any = STEPS[name]
    step: Step = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return step
