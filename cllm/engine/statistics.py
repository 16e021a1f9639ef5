"""Counters of the inference thread, and the immutable snapshot that any thread may read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cllm.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class TickTimes:
    """Seconds spent in each stage of all ticks so far."""

    plan_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0
    deliver_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The state of an engine at the end of a tick.

    Attributes
    ----------
    n_waiting, n_running, n_paused : int
        Requests without a seq_id, with one, and those whose reader has stopped (of either kind).
    n_finished : mapping
        Requests that ended, by `FinishReason`.
    n_ticks, n_decode_rows : int
        Decodes, and the rows in them.
    n_decoding_ticks, n_decoding_rows : int
        Decodes that sampled at least one token, and the tokens they sampled.
    n_prefill_tokens, n_cached_tokens, n_output_tokens : int
        Prompt tokens computed, prompt tokens shared instead, tokens sampled.
    n_kv_cells_used, n_kv_cells_cached, n_kv_cells : int
        Held by live requests, held by the prefix cache, in all.
    n_gil_handovers : int
        Calls of a tick that give the GIL away and have to get it back.
    """

    n_waiting: int = 0
    n_running: int = 0
    n_paused: int = 0
    n_finished: Mapping[FinishReason, int] = field(default_factory=dict)
    n_ticks: int = 0
    n_decode_rows: int = 0
    n_decoding_ticks: int = 0
    n_decoding_rows: int = 0
    n_prefill_tokens: int = 0
    n_cached_tokens: int = 0
    n_output_tokens: int = 0
    n_preemptions: int = 0
    n_kv_cells_used: int = 0
    n_kv_cells_cached: int = 0
    n_kv_cells: int = 0
    n_seq_ids_used: int = 0
    n_gil_handovers: int = 0
    uptime_s: float = 0.0
    tick_times: TickTimes = field(default_factory=TickTimes)


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
        self.n_output_tokens = 0
        self.n_preemptions = 0
        self.n_gil_handovers = 0
        self.plan_s = self.decode_s = self.sample_s = self.detokenize_s = self.deliver_s = 0.0

    def snapshot(
        self,
        *,
        n_waiting: int,
        n_running: int,
        n_paused: int,
        n_kv_cells_used: int,
        n_kv_cells: int,
        n_seq_ids_used: int,
    ) -> EngineStatistics:
        """The counters and the given state as one immutable value."""
        return EngineStatistics(
            n_waiting=n_waiting,
            n_running=n_running,
            n_paused=n_paused,
            n_finished=MappingProxyType(dict(self.n_finished)),
            n_ticks=self.n_ticks,
            n_decode_rows=self.n_decode_rows,
            n_decoding_ticks=self.n_decoding_ticks,
            n_decoding_rows=self.n_decoding_rows,
            n_prefill_tokens=self.n_prefill_tokens,
            n_output_tokens=self.n_output_tokens,
            n_preemptions=self.n_preemptions,
            n_kv_cells_used=n_kv_cells_used,
            n_kv_cells=n_kv_cells,
            n_seq_ids_used=n_seq_ids_used,
            n_gil_handovers=self.n_gil_handovers,
            uptime_s=time.perf_counter() - self._started_at,
            tick_times=TickTimes(
                self.plan_s, self.decode_s, self.sample_s, self.detokenize_s, self.deliver_s
            ),
        )
