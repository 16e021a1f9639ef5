"""The steps of a schedule: what can happen to an engine's core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Submit:
    """A request; `name` is what later steps call it.

    The adapter `lora` computes its tokens from `lora_start` on.
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
    """Its caller gives a request up."""

    name: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """A request ends, and another goes on with its tokens and what the cache held, under its name."""

    name: str


@dataclass(frozen=True, slots=True)
class StopReading:
    """The reader of a request stops."""

    name: str


@dataclass(frozen=True, slots=True)
class ReadOn:
    """The reader of a request goes on."""

    name: str


@dataclass(frozen=True, slots=True)
class Wait:
    """So many seconds pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """So many ticks."""

    n: int = 1


@dataclass(frozen=True, slots=True)
class FailDecode:
    """The next decode fails, whenever it is, and two ticks pass.

    `fault` is a code of `llama_decode`, "nan", or "raise".  While the core still recovers from the
    last fault the step means nothing.
    """

    fault: int | Literal["nan", "raise"]


@dataclass(frozen=True, slots=True)
class FailCall:
    """The next call of this method of the decoder raises, whenever it is, and two ticks pass."""

    method: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """What finished requests have left is forgotten."""


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
    """The step that a line of a file has: `{"Cancel": {"name": "r0"}}`."""
    [(name, values)] = line.items()
    kind: Any = STEPS[name]
    step: Step = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return step
