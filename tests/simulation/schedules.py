"""Schedules: sequences of steps that happen to an engine's core, and their files.

A schedule is drawn from a seed and runs on a `Simulator`; `ScheduleError` says what was wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cllm.errors import InvalidArgumentError
from tests.simulation.schedule_actor import Actor
from tests.simulation.simulator import Simulator
from tests.simulation.steps import (
    Cancel,
    FailCall,
    FailDecode,
    ReadOn,
    ResetPrefixCache,
    Step,
    StopReading,
    Submit,
    Suspend,
    Tick,
    Wait,
    step_from,
)

FORMAT = "cllm schedule 1"

Check = Callable[[Simulator], None]
MakeSimulator = Callable[..., Simulator]


class ScheduleError(AssertionError):
    """A schedule found something wrong; `step` is the number of the failing step, from 1."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step = step


@dataclass(frozen=True, slots=True)
class Schedule:
    """An engine's options, and what happens to it.

    Attributes
    ----------
    options : mapping
        Options of `Simulator` that JSON can hold: fields of `EngineConfig`, `latency_s`.
    steps : tuple of Step
        Steps in their order.  A step for a request that is not alive does nothing, so any can be left out.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    def run(self, *, check: Check | None = None, simulator: MakeSimulator = Simulator) -> Simulator:
        """Do all steps, run until no request is left, and check everything.

        Parameters
        ----------
        check : callable, optional
            Another check of the simulator, called at the end; raises if something is wrong.
        simulator : callable
            Makes the `Simulator`; one with an `answer` or a decoder of its own, for example.

        Raises
        ------
        ScheduleError
            The bookkeeping, an answer, an ending or `check` was wrong.
        """
        sim = simulator(**self.options)
        actor = Actor(sim)
        n_done = 0
        try:
            for step in self.steps:
                actor.do(step)
                n_done += 1
            actor.finish()
            if check is not None:
                check(sim)
        except Exception as error:
            reason = str(error).split("\n")[0] or repr(error)
            raise ScheduleError(n_done + 1, f"{type(error).__name__}: {reason}") from error
        return sim

    # --- Files -------------------------------------------------------------------------------
    def save(self, path: str | Path, *, error: str = "") -> Path:
        """Write a file for `load`: a header, then one step a line.

        Parameters
        ----------
        error : str
            Fault that the schedule shows, for readers of the file.

        Returns
        -------
        Path
            Path of the file.  Its folder is made if it does not exist.

        Raises
        ------
        InvalidArgumentError
            An option that a file cannot hold.
        """
        check_options(self.options)
        header = {"format": FORMAT, "error": error, "options": dict(self.options)}
        lines = [header, *({type(step).__name__: asdict(step)} for step in self.steps)]
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8", newline="\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a file that `save` wrote.

        Raises
        ------
        ValueError
            The file is not a schedule.
        """
        try:
            # Not `splitlines`: texts may have line separators of their own.
            text = Path(path).read_text(encoding="utf-8").removesuffix("\n")
            header, *lines = map(json.loads, text.split("\n"))
            if header["format"] != FORMAT:
                raise ValueError(header["format"])
            return cls(header["options"], tuple(step_from(line) for line in lines))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a schedule: {error!r}") from None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `InvalidArgumentError` for values that JSON changes: functions, keys that are not text, NaN."""
    for name, value in options.items():
        try:
            is_kept = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            is_kept = False
        if not is_kept:
            raise InvalidArgumentError(name, value, "what JSON can hold: pass simulator= instead")


# --- From a number ------------------------------------------------------------------------------
HEADS = ("", "h", "head", "headhead")
FAULTS: Sequence[int | Literal["nan", "raise"]] = (1, 2, -1, -2, -3, "nan", "raise")
METHODS = ("seq_rm", "seq_cp", "state_seq_get_data", "state_seq_set_data", "set_loras")


def random_schedule(seed: int, *, with_images: bool = False, **options: Any) -> Schedule:
    """Return a random schedule: the interleaved steps of one to four clients.

    Parameters
    ----------
    seed : int
        The same seed gives the same schedule.
    with_images : bool
        True: most prompts have images, and sequences have room for them.
    **options
        Options of `Simulator`.  Others are drawn, small enough that cells run out.
    """
    choose = random.Random(seed)
    n_seq_max = int(options.get("n_seq_max", choose.randint(1, 3)))
    drawn = {
        "n_seq_max": n_seq_max,
        "n_ctx": n_seq_max * (choose.randint(4, 12) + 12 * with_images),
        "n_batch": n_seq_max + choose.randint(0, 4) + 6 * with_images,
        "kv_unified": choose.random() < 0.7,
        "prefix_cache": choose.random() < 0.7,
        "stream_buffer": choose.randint(1, 4),
        "prefix_cache_bytes": choose.choice((1 << 20, 0, 200)),
        "latency_s": choose.choice((0.0, 0.01)),
    }
    drawn.update(options)
    clients = [
        _client(choose, f"r{number}", with_images=with_images)
        for number in range(choose.randint(1, 4))
    ]
    return Schedule(drawn, tuple(_interleaved(choose, clients)))


def _client(choose: random.Random, name: str, *, with_images: bool) -> list[Step]:
    """Return the steps of one client, in their order."""
    prompt = choose.choice(HEADS) + choose.choice("xyz") * choose.randint(1, 5)
    if with_images and choose.random() < 0.7:
        at = choose.randint(0, len(prompt))
        prompt = prompt[:at] + choose.choice(("A", "B", "C", "D", "E", "AC", "CxC")) + prompt[at:]
    steps: list[Step] = [
        Submit(
            name,
            prompt,
            max_tokens=choose.choice((1, 2, 3, 5, 8, None)),
            temperature=choose.choice((0.0, 0.0, 1.0)),
            stop=choose.choice(((), (), ("ab",), ("b", "é"))),
            priority=choose.randint(-1, 1),
            timeout=choose.choice((None, None, None, 2.0)),
            tenant=choose.choice(("", "", "a", "b")),
            lora=choose.choice(("", "", "a", "b")),
            lora_start=choose.choice((0, 0, 3)),
        )
    ]
    course = choose.random()
    if course < 0.2:
        steps.append(Cancel(name))
    elif course < 0.4:
        steps += [StopReading(name), ReadOn(name)]
    elif course < 0.5:
        steps += [StopReading(name), Cancel(name)]
    elif course < 0.7:
        steps += [Suspend(name)] * choose.randint(1, 3)
    return steps


def _interleaved(choose: random.Random, clients: list[list[Step]]) -> Iterable[Step]:
    """Yield the steps of all clients, each client's in their order, with ticks and faults between them."""
    while clients := [steps for steps in clients if steps]:
        yield choose.choice(clients).pop(0)
        what = choose.random()
        if what < 0.5:
            yield Tick(choose.randint(1, 3))
        elif what < 0.58:
            yield FailDecode(choose.choice(FAULTS))
        elif what < 0.62:
            yield FailCall(choose.choice(METHODS))
        elif what < 0.66:
            yield Wait(choose.choice((1.0, 3.0)))
        elif what < 0.68:
            yield ResetPrefixCache()
