"""Counters of the inference thread, and the immutable snapshot that any thread may read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Self

from cllm.engine.kv_cache import KVCache
from cllm.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class TickTimes:
    """Seconds spent in each stage of all ticks so far."""

    plan_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0
    deliver_s: float = 0.0


N_TIMES = len(fields(TickTimes))
# The values of an `EngineStatistics` in its order, with those of its `TickTimes` at the end.
Readings = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The state of an engine at the end of a tick.

    Attributes
    ----------
    n_waiting, n_running, n_paused : int
        Requests without a seq_id, with one, and those whose reader has stopped (of either kind).
    n_finished : mapping
        Requests that ended, for every `FinishReason`.
    n_ticks, n_decode_rows : int
        Decodes, and the rows in them.
    n_decoding_ticks, n_decoding_rows : int
        Decodes that sampled at least one token, and the tokens they sampled.
    n_prefill_tokens, n_cached_tokens, n_output_tokens : int
        Prompt tokens computed, prompt tokens shared instead, tokens sampled.
    n_preemptions, n_swaps : int
        Sequences sent back to the queue, and those of them whose cells were saved.
    n_evictions, n_rebuilds : int
        Cached prefixes given up; contexts made anew after a failure.
    n_discrepancies : int
        What audits found, those of an idle engine too; all of it was mended.
    n_kv_cells_used, n_kv_cells_cached, n_kv_cells : int
        Held by live requests, held by the prefix cache (some may be both), in all.
    n_seq_ids_used, n_seq_ids_cached : int
        Held by live requests, held by the prefix cache.
    n_gil_handovers : int
        Calls of a tick that give the GIL away and have to get it back.
    """

    n_waiting: int = 0
    n_running: int = 0
    n_paused: int = 0
    n_finished: Mapping[FinishReason, int] = field(default_factory=lambda: _by_reason(Counter()))
    n_ticks: int = 0
    n_decode_rows: int = 0
    n_decoding_ticks: int = 0
    n_decoding_rows: int = 0
    n_prefill_tokens: int = 0
    n_cached_tokens: int = 0
    n_output_tokens: int = 0
    n_preemptions: int = 0
    n_swaps: int = 0
    n_evictions: int = 0
    n_rebuilds: int = 0
    n_discrepancies: int = 0
    n_kv_cells_used: int = 0
    n_kv_cells_cached: int = 0
    n_kv_cells: int = 0
    n_seq_ids_used: int = 0
    n_seq_ids_cached: int = 0
    n_gil_handovers: int = 0
    uptime_s: float = 0.0
    tick_times: TickTimes = field(default_factory=TickTimes)

    @classmethod
    def of(cls, readings: Readings) -> Self:
        """What a `Recorder` read."""
        values = list(readings[:-N_TIMES])
        values[3] = _by_reason(values[3])
        values.append(TickTimes(*readings[-N_TIMES:]))
        return cls(*values)


class Recorder:
    """The counters behind `EngineStatistics`.  Inference thread only."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()
        self.n_finished: Counter[FinishReason] = Counter()
        self.n_ticks = 0
        self.n_decode_rows = 0
        self.n_decoding_ticks = 0
        self.n_decoding_rows = 0
        self.n_prefill_tokens = 0
        self.n_cached_tokens = 0
        self.n_output_tokens = 0
        self.n_preemptions = self.n_swaps = self.n_evictions = self.n_rebuilds = 0
        self.n_discrepancies = 0
        self.n_gil_handovers = 0
        self.plan_s = self.decode_s = self.sample_s = self.detokenize_s = self.deliver_s = 0.0

    def count_tick(self, n_rows: int, n_outputs: int) -> None:
        """A batch of so many rows was decoded, so many of them to be sampled from."""
        self.n_ticks += 1
        self.n_decode_rows += n_rows
        self.n_decoding_ticks += n_outputs > 0
        self.n_decoding_rows += n_outputs
        self.n_gil_handovers += 2  # decode and synchronize; sampling counts its own

    def readings(
        self,
        *,
        n_waiting: int,
        n_running: int,
        n_paused: int,
        books: KVCache,
    ) -> Readings:
        """The counters and the given state; a tuple, since it is made after every tick."""
        return (
            n_waiting,
            n_running,
            n_paused,
            dict(self.n_finished),
            self.n_ticks,
            self.n_decode_rows,
            self.n_decoding_ticks,
            self.n_decoding_rows,
            self.n_prefill_tokens,
            self.n_cached_tokens,
            self.n_output_tokens,
            self.n_preemptions,
            self.n_swaps,
            self.n_evictions,
            self.n_rebuilds,
            self.n_discrepancies,
            books.n_used,
            books.n_cached,
            books.n_cells,
            books.n_live_ids,
            books.n_cached_ids,
            self.n_gil_handovers,
            time.perf_counter() - self._started_at,
            self.plan_s,
            self.decode_s,
            self.sample_s,
            self.detokenize_s,
            self.deliver_s,
        )


def _by_reason(counts: Mapping[FinishReason, int]) -> Mapping[FinishReason, int]:
    return MappingProxyType({reason: counts.get(reason, 0) for reason in FinishReason})
