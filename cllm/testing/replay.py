"""replay: the ticks of a log again, without a model, from the plans to the events.

An engine with `tick_log=path` writes down what crossed the borders of its core.  `replay` puts the
same commands, times, tokens and failures into a new core and compares what it plans: a schedule
that went wrong somewhere can be looked at, step by step, anywhere.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm import errors
from cllm.engine.config import EngineConfig
from cllm.engine.kv_cache import KVCache
from cllm.engine.request import GenerationRequest, TokenLogprob
from cllm.engine.row_scan import RowScan
from cllm.engine.sampling import Mask, NotFiniteError
from cllm.engine.sampling_params import SamplingParams
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
        except Exception as error:  # the end of the engine, as in the inference thread
            script.core.fail_all(error)
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
        self.calls = _Calls(_faults(lines))
        self.decoder = _ScriptedDecoder(header["n_batch"], books.n_seq_ids, self.calls)
        self._pieces = {
            int(token): (bytes.fromhex(piece), is_eog)
            for line in lines
            for token, (piece, is_eog) in line.get("pieces", {}).items()
        }
        self._tokens = _tokens(lines)
        self._choices: deque[int | Exception] = deque()
        self.core = EngineCore(
            self.decoder,
            self,
            books,
            self._make_sampler,
            self._read_logprob,
            EngineConfig(**header),
            clock=self._clock,
        )

    def begin(self, line: dict[str, Any]) -> None:
        """Lay out what a line needs."""
        self._times.extend(line.get("clock", ()))
        self.decoder.positions.extend(line.get("positions", ()))
        self.decoder.script = deque(line["tick"]["batches"] if "tick" in line else ())
        self.decoder.decoded = []

    def repeat(self, line: dict[str, Any]) -> None:
        """Do what a line says."""
        core = self.core
        match line:
            case {"submit": dict() as values}:
                self._choices = self._tokens[values["request_id"]].popleft()
                biases = values["params"]["logit_bias"]
                biases = {int(token): bias for token, bias in biases.items()}
                params = SamplingParams(**{**values["params"], "logit_bias": biases})
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
            case {"distrust": str() as message}:
                core.distrust(RuntimeError(message))
            case {"tick": _}:
                core.tick()

    def differences(self, line: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
        """What is not as the line says."""
        if self._times:
            yield "clock readings left", len(self._times), 0
        if "tick" not in line:
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
        self.calls.count("piece")
        return self._pieces[token][0]

    def is_eog(self, token: int) -> bool:
        """See `Vocabulary`."""
        self.calls.count("is_eog")
        # A token whose piece could not be made has none in the log.
        return bool(self._pieces.get(token, (b"", False))[1])

    # --- The samplers ------------------------------------------------------------------------
    def _make_sampler(self, request: GenerationRequest) -> _ScriptedSampler:
        self.calls.count("make_sampler")
        return _ScriptedSampler(self._choices)

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
            raise _exception(outcome)
        return outcome


class _ScriptedSampler:
    """Says the tokens of one request again."""

    constraint = None

    def __init__(self, choices: deque[int | Exception]) -> None:
        self._choices = choices

    is_greedy = False

    def may_be(self, token: int) -> bool:
        raise AssertionError(f"{token}: asked of those that are greedy")

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        choice = self._choices.popleft()
        if isinstance(choice, Exception):
            raise choice
        return choice

    def accept(self, token: int) -> None:
        """Nothing to remember."""

    def close(self) -> None:
        """Nothing to free."""


class _ScriptedDecoder:
    """Answers what the log has, and computes nothing."""

    n_vocab = 1

    def __init__(self, n_batch: int, n_outputs_max: int, calls: _Calls) -> None:
        self.n_batch = n_batch
        self.n_outputs_max = n_outputs_max
        self._calls = calls
        self._runs: Runs = []
        self.script: deque[dict[str, Any]] = deque()
        self.positions: deque[int | None] = deque()
        self.decoded: list[Runs] = []

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
            raise _exception(batch["error"], batch["code"])
        return np.zeros((sum(run[3] for run in self._runs), 1), np.float32)

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        return self._calls.count("seq_rm")

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        self._calls.count("seq_cp")

    def state_seq_get_data(self, seq_id: int) -> bytes:
        return b"state" if self._calls.count("state_seq_get_data") else b""

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        self._calls.count("state_seq_set_data")

    def rebuild(self) -> None:
        self._calls.count("rebuild")

    def seq_pos_min(self, seq_id: int) -> int | None:
        return None  # nothing is decided by it

    def seq_pos_max(self, seq_id: int) -> int | None:
        self._calls.count("seq_pos_max")
        return self.positions.popleft() if self.positions else None


def _exception(name: str, code: int | None = None) -> Exception:
    """An exception of this name: one that the core knows, or any."""
    error_type = getattr(errors, name, None)
    if isinstance(error_type, type) and issubclass(error_type, LlamaCallError):
        return error_type("as recorded", code or 0)
    if name == NotFiniteError.__name__:
        return NotFiniteError("as recorded")
    made: type[Exception] = type(name, (Exception,), {})
    return made("as recorded")


def _faults(lines: list[dict[str, Any]]) -> dict[tuple[str, int], bool | str]:
    """The calls that failed, by method and number."""
    return {
        (name, n_call): outcome
        for line in lines
        for name, n_call, outcome in line.get("faults", ())
    }  # fmt: skip


def _tokens(lines: list[dict[str, Any]]) -> dict[str, deque[deque[int | Exception]]]:
    """What was sampled for each request, in order; an id may have been used more than once."""
    choices: dict[str, deque[deque[int | Exception]]] = defaultdict(deque)
    for line in lines:
        if "submit" in line:
            choices[line["submit"]["request_id"]].append(deque())
        for event in line["tick"]["events"] if "tick" in line else ():
            if event is None or not choices[event["id"]]:
                continue
            latest = choices[event["id"]][-1]
            latest.extend(event["tokens"])
            if (name := event.get("error")) and not event["tokens"]:
                latest.append(_exception(name))
    return choices
