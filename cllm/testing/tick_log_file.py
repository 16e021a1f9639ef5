"""TickLogFile: a log of `EngineConfig.tick_log`, read back into the values that it was made of.

Whatever is wrong with a file is a `ValueError` that names it and the line, before anything of it is
repeated.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cllm import errors
from cllm.engine.config import EngineConfig
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.messages import (
    AddRequest,
    CancelRequest,
    ClearPrefixCache,
    EraseSlot,
    Read,
)
from cllm.engine.core.tick_log import FORMAT
from cllm.engine.lora import LoraUse
from cllm.engine.request import GenerationRequest, SequenceState
from cllm.engine.sampling.batch_sampler import NotFiniteError
from cllm.engine.sampling_params import SamplingParams
from cllm.errors import LlamaCallError

_TOKENS = ("prompt_token_ids", "generated_token_ids")

MALFORMED = (AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class CancelAll:
    """The engine was closed."""


@dataclass(frozen=True, slots=True)
class Distrust:
    """An audit found that the KV cache bookkeeping and llama.cpp disagree."""

    message: str


@dataclass(frozen=True, slots=True)
class ForgetLora:
    """An adapter has been freed."""

    name: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """A tick: its batches with what became of them, and the events that it was followed by."""

    batches: list[dict[str, Any]]
    events: list[dict[str, Any]]


Entry = (
    AddRequest
    | CancelRequest
    | Read
    | ClearPrefixCache
    | EraseSlot
    | CancelAll
    | Distrust
    | ForgetLora
    | Ticked
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line.

    Attributes
    ----------
    number : int
        In the file, from 1 on.
    clock, positions, sizes, faults, drafts, pieces
        What was read while it lasted; see `cllm.engine.core.tick_log`.
    """

    number: int
    command: Entry
    clock: list[float]
    positions: list[int | None]
    sizes: list[int]
    faults: list[tuple[str, int, bool | str]]
    drafts: list[dict[int, tuple[int, ...]]]
    pieces: dict[int, tuple[bytes, bool]]


@dataclass(frozen=True, slots=True)
class TickLogFile:
    """A whole log."""

    config: EngineConfig
    kv_cache: KVCache
    n_batch: int
    n_outputs_max: int
    separates_prompts: bool
    lines: list[LogLine]

    @classmethod
    def of(cls, path: str | Path, objects: list[dict[str, Any]]) -> TickLogFile:
        """The log that a file's lines are.

        Raises
        ------
        ValueError
            They are none, or one of another format.
        """
        with _malformed(path, 1):
            header = dict(objects[0]["header"])
        if (name := header.pop("format", None)) != FORMAT:
            raise ValueError(
                f"{path} is a tick log of the format {name!r}, must be {FORMAT!r}: "
                "it can be repeated by the version of cllm that has written it"
            )
        with _malformed(path, 1):
            kv_cache = KVCache(**header.pop("kv_cache"))
            limits = header.pop("decoder")
            n_batch, n_outputs_max = int(limits["n_batch"]), int(limits["n_outputs_max"])
            separates_prompts = bool(limits["separates_prompts"])
            config = EngineConfig(**header)
        lines: list[LogLine] = []
        for number, values in enumerate(objects[1:], 2):
            with _malformed(path, number):
                lines.append(_line(number, values))
        return cls(config, kv_cache, n_batch, n_outputs_max, separates_prompts, lines)

    def faults(self) -> dict[tuple[str, int], bool | str]:
        """The calls that failed, by method and number."""
        return {(name, n): outcome for line in self.lines for name, n, outcome in line.faults}

    def pieces(self) -> dict[int, tuple[bytes, bool]]:
        """The bytes of every token that was met, and whether it ends a generation."""
        return {token: piece for line in self.lines for token, piece in line.pieces.items()}

    def tokens(self) -> dict[str, deque[deque[int | Exception]]]:
        """What was sampled for each request, in order; an id may have been used more than once."""
        choices: dict[str, deque[deque[int | Exception]]] = defaultdict(deque)
        for command in (line.command for line in self.lines):
            if isinstance(command, AddRequest):
                choices[command.request.request_id].append(deque())
            for event in command.events if isinstance(command, Ticked) else ():
                if not choices[event["id"]]:
                    continue
                latest = choices[event["id"]][-1]
                latest.extend(event["tokens"])
                if (name := event.get("error")) and not event["tokens"]:
                    latest.append(exception_named(name))
        return choices


def read_objects(path: str | Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; the beginning of one at its end is left out.

    Raises
    ------
    ValueError
        A line is not a JSON object.
    """
    *lines, last = Path(path).read_bytes().split(b"\n")
    objects = []
    for number, line in enumerate(lines, 1):
        with _malformed(path, number):
            objects.append(_object(line))
    with contextlib.suppress(ValueError):
        objects.append(_object(last))
    return objects


def _object(line: bytes) -> dict[str, Any]:
    value = json.loads(line.decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # it is about a file, not a call
    return value


@contextlib.contextmanager
def _malformed(path: str | Path, number: int) -> Iterator[None]:
    try:
        yield
    except MALFORMED as error:
        raise ValueError(f"{path} is malformed in line {number}: {error!r}") from error


def _line(number: int, values: dict[str, Any]) -> LogLine:
    values = dict(values)
    clock, positions = values.pop("clock", []), values.pop("positions", [])
    sizes = [int(n_bytes) for n_bytes in values.pop("sizes", [])]
    faults = [(name, n, outcome) for name, n, outcome in values.pop("faults", [])]
    pieces = {
        int(token): (bytes.fromhex(piece), is_eog)
        for token, (piece, is_eog) in values.pop("pieces", {}).items()
    }
    drafts = [
        {int(seq_id): tuple(tokens) for seq_id, tokens in of_batch.items()}
        for of_batch in values.pop("drafts", [])
    ]
    return LogLine(number, _entry(values), [*clock], [*positions], sizes, faults, drafts, pieces)


def _entry(values: dict[str, Any]) -> Entry:
    match values:
        case {"submit": dict() as request, **others} if not others:
            return AddRequest(_request(request))
        case {"cancel": str() as request_id, **others} if not others:
            return CancelRequest(request_id)
        case {"suspend": str() as request_id, **others} if not others:
            return CancelRequest(request_id, saves_state=True)
        case {"read": [str() as request_id, int() as n_deltas], **others} if not others:
            return Read(request_id, n_deltas)
        case {"reset_prefix_cache": True, **others} if not others:
            return ClearPrefixCache()
        case {"erase_slot": int() as seq_id, **others} if not others:
            return EraseSlot(0, seq_id)
        case {"cancel_all": True, **others} if not others:
            return CancelAll()
        case {"mark_corrupt": str() as message, **others} if not others:
            return Distrust(message)
        case {"forget_lora": str() as name, **others} if not others:
            return ForgetLora(name)
        case {"tick": dict() as tick, **others} if not others:
            return _ticked(**tick)
        case _:
            raise ValueError(f"unknown kind of line: {', '.join(values)}")


def _request(values: dict[str, Any]) -> GenerationRequest:
    biases = {int(token): bias for token, bias in values["params"]["logit_bias"].items()}
    params = SamplingParams(**{**values["params"], "logit_bias": biases})
    ids = {name: tuple(values[name]) for name in _TOKENS}
    spelled = {int(token): bytes.fromhex(name) for token, name in values["spelled"].items()}
    loras, before = (
        tuple((str(name), float(scale)) for name, scale in values["lora"][part])
        for part in ("loras", "before")
    )
    lora = LoraUse(loras, before, int(values["lora"]["start"]))
    n_tokens = values["state"]  # how many: what they were is no part of a log
    state = None if n_tokens is None else SequenceState(b"state", int(n_tokens))
    given = {"params": params, "spelled": spelled, "lora": lora, "state": state}
    return GenerationRequest(**{**values, **ids, **given})


def _ticked(batches: list[dict[str, Any]], events: list[dict[str, Any] | None]) -> Ticked:
    if any(len(run) != 4 for batch in batches for run in batch["runs"]):
        raise ValueError("a run is [seq_id, p0, n_tokens, n_outputs]")
    told = [event for event in events if event is not None]
    if not all({"id", "tokens", "text"} <= event.keys() for event in told):
        raise ValueError("an event has an id, tokens and a text")
    return Ticked(batches, told)


def exception_named(name: str, code: int | None = None) -> Exception:
    """An exception of this name: one that the core knows, or any."""
    error_type = getattr(errors, name, None)
    if isinstance(error_type, type) and issubclass(error_type, LlamaCallError):
        return error_type("as recorded", code or 0)
    if name == NotFiniteError.__name__:
        return NotFiniteError("as recorded")
    made: type[Exception] = type(name, (Exception,), {})
    return made("as recorded")
