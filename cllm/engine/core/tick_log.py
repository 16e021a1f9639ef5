"""TickLog: what crossed the borders of `EngineCore`, a JSON object a line.

Commands, times, the batches and what became of them, the tokens: everything that decides what the
next tick does.  `cllm.testing.replay` puts it into a core without a model and gets the same plans.

The lines: a `header` with the `format`; `submit`, `cancel`, `suspend`, `read`, `reset_prefix_cache` and
`cancel_all` as they are handled; `mark_corrupt` after an audit; `forget_lora`; `tick` with its batches as
`[seq_id, p0, n_tokens, n_outputs]`.
Each has what was read while it lasted: the `clock`, the `positions` that llama.cpp answered, the
`sizes` of copies of what it holds, the `faults` of calls, the `drafts` of each batch by seq_id, the `pieces` of tokens met for the first
time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cllm.engine.config import EngineConfig
from cllm.engine.core.decoder import Decoder
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.messages import (
    AddRequest,
    CancelRequest,
    ClearPrefixCache,
    EraseSlot,
    Event,
    Finished,
    Progressed,
    Read,
)
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.speculation import Drafts, Speculation
from cllm.engine.lora import LoraSet
from cllm.engine.vocabulary import OutputVocabulary
from cllm.errors import InvalidArgumentError, LlamaCallError

logger = logging.getLogger("cllm.engine")
T = TypeVar("T")

# Another one for each change of what a line says: no replay then takes an old log for a wrong one.
FORMAT = "cllm tick log 9"
KV_CACHE = ("n_cells", "n_seq_ids", "n_ctx_seq", "kv_unified", "has_pos_min", "is_windowed")
DECODER = ("n_batch", "n_outputs_max", "separates_prompts")
# What of the configuration, with its None replaced, decides about ticks.
SETTINGS = (
    "n_ctx", "n_seq_max", "n_batch", "kv_unified", "flash_attn", "prefix_cache",
    "prefix_cache_tokens", "prefix_cache_bytes", "swap_tokens", "n_prefill_chunk", "target_itl_ms", "stream_buffer",
)  # fmt: skip


class TickLog:
    """One log file, open.  Inference thread only.

    A file that can no longer be written is given up with a warning: the engine goes on.

    Raises
    ------
    InvalidArgumentError
        The file cannot be made.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._read_clock = clock
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # see `close`
        except OSError as error:
            raise InvalidArgumentError(
                "tick_log", str(path), f"a file to write ({error})"
            ) from None
        self._is_failing = False
        self._clock: list[float] = []
        self._batches: list[dict[str, Any]] = []
        self._faults: list[tuple[str, int, bool | str]] = []
        self._positions: list[int | None] = []
        self._sizes: list[int] = []
        self._drafts: list[dict[int, Drafts]] = []
        self._pieces: dict[int, tuple[str, bool]] = {}
        self._known: set[int] = set()

    def header(self, config: EngineConfig, kv_cache: KVCache, decoder: Decoder) -> None:
        """The first line; `config` is the one that the core is made with."""
        settings = {name: getattr(config, name) for name in SETTINGS}
        new_kv_cache = {name: getattr(kv_cache, name) for name in KV_CACHE}
        limits = {name: getattr(decoder, name) for name in DECODER}
        header = {"format": FORMAT, **settings, "kv_cache": new_kv_cache, "decoder": limits}
        self._write(header=header)

    def clock(self) -> float:
        """The time, noted."""
        now = self._read_clock()
        self._clock.append(now)
        return now

    def command(self, command: object) -> None:
        """A command has been obeyed."""
        match command:
            case AddRequest(request):
                values = {f.name: getattr(request, f.name) for f in fields(request)}
                # They have decided about the tokens, which are noted.
                del values["constraint"], values["thinking"], values["excluded"]
                params = {f.name: getattr(request.params, f.name) for f in fields(request.params)}
                params["logit_bias"] = dict(request.params.logit_bias)
                values["lora"] = asdict(request.lora)
                values["state"] = None if request.state is None else request.state.n_tokens
                spelled = {t: name.hex() for t, name in request.spelled.items()}
                self._write(submit={**values, "params": params, "spelled": spelled})
            case CancelRequest(request_id, saves_state):
                self._write(**{"suspend" if saves_state else "cancel": request_id})
            case Read(request_id, n_deltas):
                self._write(read=(request_id, n_deltas))
            case ClearPrefixCache():
                self._write(reset_prefix_cache=True)
            case EraseSlot(_, seq_id):
                self._write(erase_slot=seq_id)

    def cancel_all(self) -> None:
        """Everything has been cancelled."""
        self._write(cancel_all=True)

    def forget_lora(self, name: str) -> None:
        """An adapter has been freed."""
        self._write(forget_lora=name)

    def mark_corrupt(self, error: Exception) -> None:
        """An audit found that the KV cache bookkeeping and llama.cpp disagree."""
        self._write(mark_corrupt=str(error))

    def tick(self, events: Sequence[Event]) -> None:
        """A tick is over, or has failed; all events since the last one."""
        self._write(tick={"batches": self._batches, "events": [*map(describe_event, events)]})
        self._batches = []

    def _write(self, **line: Any) -> None:
        extra = {
            "clock": self._clock,
            "faults": self._faults,
            "positions": self._positions,
            "sizes": self._sizes,
            "drafts": self._drafts,
            "pieces": self._pieces,
        }
        line.update({name: value for name, value in extra.items() if value})
        self._clock, self._faults, self._positions, self._sizes = [], [], [], []
        self._drafts, self._pieces = [], {}
        if self._is_failing:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()  # the last line before a crash is the one that is wanted
        except OSError as error:
            logger.warning("the tick log ends here: %s", error)
            self._is_failing = True

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            self._file.close()

    # --- Noted by the wrappers below ---------------------------------------------------------
    def batch(self, runs: list[tuple[int, int, int, int]]) -> dict[str, Any]:
        """A decode begins; what becomes of it is added to the returned entry."""
        entry = {"runs": runs}
        self._batches.append(entry)
        return entry

    def calls(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """A function whose failures are noted under this name."""
        call = _Calls(self).call
        return lambda *args: call(name, function, *args)

    def fault(self, name: str, n_call: int, outcome: bool | str) -> None:
        """The `n_call`-th call of a method returned False, or raised this type of exception."""
        self._faults.append((name, n_call, outcome))

    def position(self, position: int | None) -> None:
        """What llama.cpp said about the end of a sequence."""
        self._positions.append(position)

    def size(self, n_bytes: int) -> None:
        """How large a copy of what a sequence holds is: what is kept of them depends on it."""
        self._sizes.append(n_bytes)

    def drafts(self, drafts: dict[int, Drafts]) -> None:
        """What was guessed in a tick that could have guesses, by seq_id."""
        self._drafts.append(drafts)

    def piece(self, token: int, piece: bytes, is_eog: bool) -> None:
        """What a token is, the first time it is met."""
        if token not in self._known:
            self._known.add(token)
            self._pieces[token] = (piece.hex(), is_eog)


def describe_event(event: Event) -> dict[str, Any] | None:
    """What of an event a replay has to repeat; None if nothing."""
    match event:
        case Progressed(request_id, delta):
            return {"id": request_id, "tokens": delta.token_ids, "text": delta.text}
        case Finished(request_id, delta, _, error):
            return {
                "id": request_id,
                "tokens": delta.token_ids,
                "text": delta.text,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                "error": None if error is None else type(error.__cause__).__name__,
            }
    return None


class _Calls:
    """Counts calls, and notes those that fail."""

    def __init__(self, log: TickLog) -> None:
        self._log = log
        self._n_calls: Counter[str] = Counter()

    def call(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._n_calls[name] += 1
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self._log.fault(name, self._n_calls[name], type(error).__name__)
            raise
        if result is False or result == b"":
            self._log.fault(name, self._n_calls[name], False)
        return result


class LoggedDecoder:
    """A `Decoder` whose batches, answers and failures are noted."""

    def __init__(self, decoder: Decoder, log: TickLog) -> None:
        self._decoder = decoder
        self._log = log
        self._call = _Calls(log).call
        self._runs: list[tuple[int, int, int, int]] = []
        self.n_batch, self.n_vocab = decoder.n_batch, decoder.n_vocab
        self.n_outputs_max = decoder.n_outputs_max
        self.separates_prompts = decoder.separates_prompts

    def set_loras(self, loras: LoraSet) -> None:
        """See `Decoder`."""
        self._call("set_loras", self._decoder.set_loras, loras)

    def clear(self) -> None:
        """See `Decoder`."""
        self._runs = []
        self._decoder.clear()

    def add(self, seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        """See `Decoder`."""
        self._runs.append((seq_id, p0, len(tokens), n_outputs))
        return self._decoder.add(seq_id, tokens, p0, n_outputs=n_outputs)

    def decode(self) -> NDArray[np.float32]:
        """See `Decoder`."""
        entry = self._log.batch(self._runs)
        try:
            return self._decoder.decode()
        except Exception as error:
            code = error.code if isinstance(error, LlamaCallError) else None
            entry.update(error=type(error).__name__, code=code)
            raise

    def seq_pos_min(self, seq_id: int) -> int | None:
        """See `Decoder`.  Nothing is decided by it."""
        return self._decoder.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int | None:
        """See `Decoder`."""
        position = self._call("seq_pos_max", self._decoder.seq_pos_max, seq_id)
        self._log.position(position)
        return position

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """See `Decoder`."""
        return self._call("seq_rm", self._decoder.seq_rm, seq_id, p0, p1)

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        """See `Decoder`."""
        self._call("seq_cp", self._decoder.seq_cp, seq_id_src, seq_id_dst, p0, p1)

    def state_seq_get_data(self, seq_id: int) -> bytes:
        """See `Decoder`."""
        data = self._call("state_seq_get_data", self._decoder.state_seq_get_data, seq_id)
        self._log.size(len(data))
        return data

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        """See `Decoder`."""
        restore = self._decoder.state_seq_set_data
        self._call("state_seq_set_data", restore, data, seq_id, n_positions=n_positions)

    def rebuild(self) -> None:
        """See `Decoder`."""
        self._call("rebuild", self._decoder.rebuild)


class LoggedSpeculation:
    """A `Speculation` whose drafts are noted."""

    def __init__(self, speculation: Speculation, log: TickLog) -> None:
        self._speculation = speculation
        self._log = log
        self.observe = speculation.observe

    def extend(
        self, chunks: list[Chunk], n_rows: int, n_outputs: int, target_s: float | None
    ) -> list[Chunk]:
        """See `Speculation`."""
        extended = self._speculation.extend(chunks, n_rows, n_outputs, target_s)
        slots = ((chunk.sequence.slot, chunk.drafts) for chunk in extended)
        self._log.drafts({slot.seq_id: drafts for slot, drafts in slots if slot and drafts})
        return extended


class LoggedVocabulary:
    """A `OutputVocabulary` whose answers are noted."""

    def __init__(self, vocabulary: OutputVocabulary, log: TickLog) -> None:
        self._vocabulary = vocabulary
        self._log = log
        self._call = _Calls(log).call

    def piece(self, token: int) -> bytes:
        """See `OutputVocabulary`."""
        piece = self._call("piece", self._vocabulary.piece, token)
        self._log.piece(token, piece, False)
        return piece

    def is_eog(self, token: int) -> bool:
        """See `OutputVocabulary`."""
        is_eog = self._call("is_eog", self._vocabulary.is_eog, token)
        if is_eog:
            self._log.piece(token, b"", True)
        return is_eog
