"""replay: the ticks of a log again, without a model, from the plans to the events.

An engine with `tick_log=path` writes down what crossed the borders of its core.  `replay` puts the
same commands, times, tokens and failures into a new core and compares what it plans: a schedule
that went wrong somewhere can be looked at, step by step, anywhere.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm import errors
from cllm.engine.config import EngineConfig
from cllm.engine.handoff import Event
from cllm.engine.kv_cache import KVCache
from cllm.engine.request import GenerationRequest, SamplingParams
from cllm.engine.sampling import NotFiniteError
from cllm.engine.tick import EngineCore
from cllm.engine.tick_log import describe_event
from cllm.errors import LlamaCallError

Runs = list[list[int]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay left the log."""

    line: int
    what: str
    recorded: object
    replayed: object


@dataclass(slots=True)
class Replay:
    """The outcome of a replay.

    Attributes
    ----------
    n_ticks, n_batches, n_tokens : int
        What was repeated.
    differences : list of Difference
        Empty: the core did the same again.  The replay ends at the first.
    """

    n_ticks: int = 0
    n_batches: int = 0
    n_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


def replay(path: str | Path) -> Replay:
    """Repeat a log of `EngineConfig.tick_log`.

    Raises
    ------
    ValueError
        The file is not such a log.
    """
    result = Replay()
    with Path(path).open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    if not lines or "header" not in lines[0]:
        raise ValueError(f"{path} is not a tick log: it has no header")
    script = _Script(lines)
    for number, line in enumerate(lines[1:], 2):
        script.begin(line)
        try:
            script.repeat(line)
        except errors.EngineFailedError:
            script.has_failed = True
        found = [Difference(number, *rest) for rest in script.differences(line)]
        result.n_ticks += "tick" in line
        if found:
            result.differences = found
            return result
        if "tick" in line:
            result.n_batches += len(line["tick"]["batches"])
            result.n_tokens += sum(len(e["tokens"]) for e in line["tick"]["events"] if e)
    return result


class _Script:
    """A core, and everything around it played from the log."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        header = dict(lines[0]["header"])
        books = KVCache(**header.pop("books"))
        self._times: deque[float] = deque()
        self.has_failed = False
        self.decoder = _ScriptedDecoder(header["n_batch"], _faults(lines))
        self._pieces = {
            int(token): (bytes.fromhex(piece), is_eog)
            for line in lines
            for token, (piece, is_eog) in line.get("pieces", {}).items()
        }
        self._tokens = _tokens(lines)
        self._n_samplers = 0
        self._submitting = ""
        self.core = EngineCore(
            self.decoder, self, books, self._make_sampler, EngineConfig(**header), clock=self._clock
        )
        self._events: list[Event] = []

    def begin(self, line: dict[str, Any]) -> None:
        """Lay out what a line needs."""
        self._times.extend(line.get("clock", ()))
        self.decoder.script = deque(line["tick"]["batches"] if "tick" in line else ())
        self.decoder.decoded = []

    def repeat(self, line: dict[str, Any]) -> None:
        """Do what a line says."""
        core = self.core
        match line:
            case {"submit": dict() as values}:
                self._submitting = values["request_id"]
                params = SamplingParams(**values["params"])
                values = {**values, "prompt_token_ids": tuple(values["prompt_token_ids"])}
                core.submit(GenerationRequest(**{**values, "params": params}))
            case {"cancel": str() as request_id}:
                core.cancel(request_id)
            case {"read": [request_id, n_deltas]}:
                core.read(request_id, n_deltas)
            case {"reset_prefix_cache": True}:
                core.reset_prefix_cache()
            case {"cancel_all": True}:
                core.cancel_all()
            case {"tick": _}:
                core.tick()

    def differences(self, line: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
        """What is not as the line says."""
        if self._times:
            yield "clock readings left", len(self._times), 0
        if "tick" not in line or self.has_failed:
            return
        batches = [batch["runs"] for batch in line["tick"]["batches"]]
        if batches != self.decoder.decoded:
            yield "batches", batches, self.decoder.decoded
        events = json.loads(json.dumps([*map(describe_event, self.core.take_events())]))
        recorded = [event for event in line["tick"]["events"] if event is not None]
        if recorded != events:
            yield "events", recorded, events

    def _clock(self) -> float:
        # More readings than were recorded is a difference too, found by the plans that follow.
        return self._times.popleft() if self._times else float("inf")

    # --- The vocabulary ----------------------------------------------------------------------
    def piece(self, token: int) -> bytes:
        """See `Vocabulary`."""
        return self._pieces[token][0]

    def is_eog(self, token: int) -> bool:
        """See `Vocabulary`."""
        return bool(self._pieces[token][1])

    # --- The samplers ------------------------------------------------------------------------
    def _make_sampler(self, params: SamplingParams) -> _ScriptedSampler:
        self._n_samplers += 1
        self.decoder.fail("make_sampler", self._n_samplers)
        return _ScriptedSampler(self._tokens[self._submitting])


class _ScriptedSampler:
    """Says the tokens of one request again."""

    def __init__(self, choices: deque[int | Exception]) -> None:
        self._choices = choices

    def sample(self, logits: NDArray[np.float32]) -> int:
        choice = self._choices.popleft()
        if isinstance(choice, Exception):
            raise choice
        return choice

    def close(self) -> None:
        """Nothing to free."""


class _ScriptedDecoder:
    """Positions without tokens, and failures where the log has them."""

    def __init__(self, n_batch: int, faults: dict[tuple[str, int], bool | str]) -> None:
        self.n_batch = n_batch
        self._faults = faults
        self._n_calls: Counter[str] = Counter()
        self._lengths: dict[int, int] = {}
        self._runs: Runs = []
        self.script: deque[dict[str, Any]] = deque()
        self.decoded: list[Runs] = []

    def fail(self, name: str, n_call: int) -> None:
        """Raise what the log has for this call."""
        fault = self._faults.get((name, n_call))
        if isinstance(fault, str):
            raise LlamaCallError(name, 0, fault)

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
            for seq_id, last in batch["kept"].items():
                self._lengths[int(seq_id)] = 0 if last is None else last + 1
            error_type = getattr(errors, batch["error"], None)
            if isinstance(error_type, type) and issubclass(error_type, LlamaCallError):
                raise error_type("llama_decode", batch["code"], batch["message"])
            # Any other exception is treated alike; its name is all that events tell of it.
            raise type(batch["error"], (RuntimeError,), {})(batch["message"])
        for seq_id, p0, n_tokens, _ in self._runs:
            self._lengths[seq_id] = p0 + n_tokens
        return np.zeros((sum(run[3] for run in self._runs), 1), np.float32)

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        if self._count("seq_rm") is False:
            return False
        self._lengths[seq_id] = min(self._lengths.get(seq_id, 0), p0 or 0)
        return True

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        self._count("seq_cp")
        length = self._lengths.get(seq_id_src, 0)
        self._lengths[seq_id_dst] = length if p1 is None else min(length, p1)

    def state_seq_get_data(self, seq_id: int) -> bytes:
        self._count("state_seq_get_data")
        return bytes(self._lengths.get(seq_id, 0))

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        self._count("state_seq_set_data")
        self._lengths[seq_id] = n_positions

    def rebuild(self) -> None:
        self._count("rebuild")
        self._lengths.clear()

    def seq_pos_min(self, seq_id: int) -> int | None:
        return 0 if self._lengths.get(seq_id) else None

    def seq_pos_max(self, seq_id: int) -> int | None:
        return self._lengths.get(seq_id, 0) - 1 if self._lengths.get(seq_id) else None

    def _count(self, name: str) -> bool | str | None:
        self._n_calls[name] += 1
        self.fail(name, self._n_calls[name])
        return self._faults.get((name, self._n_calls[name]))


def _faults(lines: list[dict[str, Any]]) -> dict[tuple[str, int], bool | str]:
    """The calls that failed, by method and number."""
    return {
        (name, n_call): outcome
        for line in lines
        for name, n_call, outcome in line.get("faults", ())
    }  # fmt: skip


def _tokens(lines: list[dict[str, Any]]) -> dict[str, deque[int | Exception]]:
    """What was sampled for each request, in order."""
    choices: dict[str, deque[int | Exception]] = {}
    for line in lines:
        if "submit" in line:
            choices[line["submit"]["request_id"]] = deque()
        for event in line["tick"]["events"] if "tick" in line else ():
            if event is None:
                continue
            choices[event["id"]].extend(event["tokens"])
            if (name := event.get("error")) and not event["tokens"]:
                is_nan = name == NotFiniteError.__name__
                error_type = NotFiniteError if is_nan else type(name, (RuntimeError,), {})
                choices[event["id"]].append(error_type("as recorded"))
    return choices
