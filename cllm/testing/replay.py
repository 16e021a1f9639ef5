"""replay: what went wrong once, again, without a model: a tick log, or a failing schedule.

An engine with `tick_log=path` writes down what crossed the borders of its core.  `replay` puts the
same commands, times, tokens and failures into a new core and compares what it plans: a schedule
that went wrong somewhere can be looked at, step by step, anywhere.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.engine.constraint import Mask
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.core.messages import AddRequest
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.tick_log import describe_event
from cllm.engine.lora import LoraSet
from cllm.engine.request import GenerationRequest, TokenLogprob
from cllm.engine.sampling.row_scan import RowScan
from cllm.testing.reference import AskedSampler
from cllm.testing.schedules import Check, MakeSimulator, Schedule, ScheduleError
from cllm.testing.simulator import Simulator
from cllm.testing.tick_log_file import (
    CancelAll,
    Distrust,
    ForgetLora,
    LogLine,
    Ticked,
    TickLogFile,
    exception_named,
    read_objects,
)

Runs = list[list[int]]
MAX_SHOWN = 400  # characters of what a difference is about


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay left the log.

    Attributes
    ----------
    line : int
        Of the log, from 1 on.
    """

    line: int
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        recorded, replayed = (
            text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
            for text in (repr(self.recorded), repr(self.replayed))
        )
        return f"line {self.line}, {self.what}: {recorded} recorded, {replayed} replayed"


@dataclass(slots=True)
class Replay:
    """The outcome of a replay.

    Attributes
    ----------
    n_ticks, n_batches, n_tokens : int
        What was repeated.
    differences : list of Difference
        Empty: the core did the same again.  The replay ends at the first.
    failure : ScheduleError or None
        What a schedule of `simulate` still does wrong.
    """

    n_ticks: int = 0
    n_batches: int = 0
    n_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    failure: ScheduleError | None = None

    def check(self) -> None:
        """Demand that the core did the same again, and that a schedule holds what it must.

        Raises
        ------
        AssertionError
            The first difference, or what the schedule still does wrong.
        """
        if self.failure is not None:
            raise AssertionError(f"the schedule fails at {self.failure}") from self.failure
        if self.differences:
            raise AssertionError(f"the replay differs at {self.differences[0]}")


def replay(
    path: str | Path, *, check: Check | None = None, simulator: MakeSimulator = Simulator
) -> Replay:
    """Repeat a log of `EngineConfig.tick_log`, or a schedule that `simulate` has found to fail.

    A log may end in the middle of a line, as that of a full disk or of a process that was killed:
    what is left of this line is not repeated.

    Parameters
    ----------
    check, simulator : callable
        Of a schedule, as they were given to `simulate`.

    Returns
    -------
    Replay
        What was found, and nothing raised for it: in a test, `replay(path).check()`.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is neither, or a log in another format than this version's; names the file and the line.
    """
    objects = read_objects(path)
    if objects and "format" in objects[0]:
        return _replay_schedule(Schedule.load(path), check, simulator)
    if not objects or "header" not in objects[0]:
        raise ValueError(f"{path} is neither a tick log nor a schedule: it has no header")
    return _replay_log(TickLogFile.of(path, objects))


def _replay_schedule(schedule: Schedule, check: Check | None, simulator: MakeSimulator) -> Replay:
    try:
        sim = schedule.run(check=check, simulator=simulator)
    except ScheduleError as error:
        return Replay(failure=error)
    statistics = sim.core.statistics()
    return Replay(statistics.n_ticks, len(sim.decoder.batches), statistics.n_output_tokens)


def _replay_log(log: TickLogFile) -> Replay:
    result = Replay()
    script = _Script(log)
    for line in log.lines:
        script.begin(line)
        try:
            script.repeat(line)
        except Exception as error:  # the end of the engine, as in the inference thread
            script.core.fail_all(error)
        result.differences = [Difference(line.number, *d) for d in script.differences(line)]
        result.n_ticks += isinstance(line.command, Ticked)
        if result.differences:
            return result
        if isinstance(line.command, Ticked):
            result.n_batches += len(line.command.batches)
            result.n_tokens += sum(len(event["tokens"]) for event in line.command.events)
    return result


class _Script:
    """A core, and everything around it played from the log."""

    def __init__(self, log: TickLogFile) -> None:
        self._times: deque[float] = deque()
        self.calls = _Calls(log.faults())
        self.decoder = _ScriptedDecoder(log, self.calls)
        self._pieces = log.pieces()
        self._tokens = log.tokens()
        self._choices: deque[int | Exception] = deque()
        self._drafts: deque[dict[int, tuple[int, ...]]] = deque()
        self.core = EngineCore(
            self.decoder,
            self,
            log.kv_cache,
            self._make_sampler,
            self._read_logprob,
            log.config,
            clock=self._clock,
            speculation=self,
        )

    def begin(self, line: LogLine) -> None:
        """Lay out what a line needs."""
        self._times.extend(line.clock)
        self.decoder.positions.extend(line.positions)
        self.decoder.sizes.extend(line.sizes)
        self._drafts.extend(line.drafts)
        batches = line.command.batches if isinstance(line.command, Ticked) else ()
        self.decoder.script = deque(batches)
        self.decoder.decoded = []

    def repeat(self, line: LogLine) -> None:
        """Do what a line says."""
        core = self.core
        match line.command:
            case CancelAll():
                core.queue.cancel_all()
            case Distrust(message):
                core.mark_corrupt(RuntimeError(message))
            case ForgetLora(name):
                core.forget_lora(name)
            case Ticked():
                core.tick()
            case command:
                if isinstance(command, AddRequest):
                    self._choices = self._tokens[command.request.request_id].popleft()
                core.handle(command)

    def differences(self, line: LogLine) -> Iterator[tuple[str, object, object]]:
        """What is not as the line says."""
        if self._times:
            yield "clock readings left", len(self._times), 0
        if not isinstance(line.command, Ticked):
            return
        batches = [batch["runs"] for batch in line.command.batches]
        if batches != self.decoder.decoded:
            yield "batches", batches, self.decoder.decoded
        events = json.loads(json.dumps([*map(describe_event, self.core.take_events())]))
        if line.command.events != events:
            yield "events", line.command.events, events

    def _clock(self) -> float:
        # More readings than were recorded is a difference too, found by the plans that follow.
        return self._times.popleft() if self._times else float("inf")

    # --- The vocabulary ----------------------------------------------------------------------
    def piece(self, token: int) -> bytes:
        """See `Vocabulary`."""
        self.calls.count("piece")
        return self._pieces[token][0]

    def is_eog(self, token: int) -> bool:
        """See `Vocabulary`."""
        self.calls.count("is_eog")
        # A token whose piece could not be made has none in the log.
        return bool(self._pieces.get(token, (b"", False))[1])

    # --- The drafts --------------------------------------------------------------------------
    def extend(
        self, chunks: list[Chunk], n_rows: int, n_outputs: int, target_s: float | None
    ) -> list[Chunk]:
        """See `Speculation`."""
        drafts = self._drafts.popleft() if self._drafts else {}
        return [
            replace(chunk, drafts=drafts.get(chunk.sequence.slot.seq_id, ()))
            if chunk.sequence.slot
            else chunk
            for chunk in chunks
        ]

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """See `Speculation`: they are not chosen by what is learned, but from the log."""

    # --- The samplers ------------------------------------------------------------------------
    def _make_sampler(self, request: GenerationRequest) -> _ScriptedSampler:
        self.calls.count("make_sampler")
        seen = request.generated_token_ids if request.resamples else ()
        return _ScriptedSampler(deque([*seen, *self._choices]))

    def _read_logprob(self, row: NDArray[np.float32], token: int, n_top: int) -> TokenLogprob:
        self.calls.count("read_logprob")
        return TokenLogprob(token, "", b"", 0.0)


class _Calls:
    """Lets the calls fail that failed."""

    def __init__(self, faults: dict[tuple[str, int], bool | str]) -> None:
        self._faults = faults
        self._n_calls: Counter[str] = Counter()

    def count(self, name: str) -> bool:
        """One more call: whether it worked; raises what it raised."""
        self._n_calls[name] += 1
        outcome = self._faults.get((name, self._n_calls[name]), True)
        if isinstance(outcome, str):
            raise exception_named(outcome)
        return outcome


class _ScriptedSampler(AskedSampler):
    """Says the tokens of one request again."""

    def __init__(self, choices: deque[int | Exception]) -> None:
        self._choices = choices

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        choice = self._choices.popleft()
        if isinstance(choice, Exception):
            raise choice
        return choice


class _Sized(bytes):
    """As many bytes as were copied, of which nobody looks at any."""

    def __new__(cls, n_bytes: int) -> _Sized:
        sized = super().__new__(cls)
        sized.n_bytes = n_bytes
        return sized

    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes

    def __bool__(self) -> bool:
        return self.n_bytes > 0


class _ScriptedDecoder:
    """Answers what the log has, and computes nothing."""

    n_vocab = 1

    def __init__(self, log: TickLogFile, calls: _Calls) -> None:
        self.n_batch = log.n_batch
        self.n_outputs_max = log.n_outputs_max
        self.separates_prompts = log.separates_prompts
        self._calls = calls
        self._runs: Runs = []
        self.script: deque[dict[str, Any]] = deque()
        self.positions: deque[int | None] = deque()
        self.sizes: deque[int] = deque()
        self.decoded: list[Runs] = []

    def set_loras(self, loras: LoraSet) -> None:
        self._calls.count("set_loras")

    def clear(self) -> None:
        self._runs = []

    def add(self, seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        n_before = sum(run[3] for run in self._runs)
        self._runs.append([seq_id, p0, len(tokens), n_outputs])
        return range(n_before, n_before + n_outputs)

    def decode(self) -> NDArray[np.float32]:
        self.decoded.append(self._runs)
        batch = self.script.popleft() if self.script else {}
        if "error" in batch:
            raise exception_named(batch["error"], batch["code"])
        return np.zeros((sum(run[3] for run in self._runs), 1), np.float32)

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        return self._calls.count("seq_rm")

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        self._calls.count("seq_cp")

    def state_seq_get_data(self, seq_id: int) -> bytes:
        self._calls.count("state_seq_get_data")
        return _Sized(self.sizes.popleft()) if self.sizes else b""

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        self._calls.count("state_seq_set_data")

    def rebuild(self) -> None:
        self._calls.count("rebuild")

    def seq_pos_min(self, seq_id: int) -> int | None:
        return None  # nothing is decided by it

    def seq_pos_max(self, seq_id: int) -> int | None:
        self._calls.count("seq_pos_max")
        return self.positions.popleft() if self.positions else None
