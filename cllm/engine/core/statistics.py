"""Counters of the inference thread, and the immutable snapshot that any thread may read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Self

from cllm.engine.core.kv_cache import KVCache
from cllm.engine.output import FinishReason


@dataclass(frozen=True, slots=True)
class TickTimes:
    """Seconds spent in each stage of all ticks so far: plan, decode, sample, detokenize, deliver, embed.

    A tick whose decode failed counts in `plan_s` alone.
    `detokenize_s` includes log probabilities of the output, `deliver_s` is the delivery of events to the event loop.
    Events that are delivered as a decode begins count in `decode_s` alone.  Batches of texts that
    become vectors (`embed_s`) are computed between two ticks.
    """

    plan_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0
    deliver_s: float = 0.0
    embed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters of an engine, and its state at the end of the last tick.  Immutable; any thread.

    With `process=True`, the counters can be 0.1 s older while tokens are sampled.

    Attributes
    ----------
    n_waiting, n_running, n_paused : int
        Requests without a seq_id, requests with one, and those of either kind whose reader is behind.
    n_finished : mapping
        Requests that ended, for every `FinishReason`.
    n_ticks, n_decode_rows : int
        Successful decodes, and the rows in them.
    n_decoding_ticks, n_decoding_rows : int
        Decodes that sampled at least one token, and the tokens they sampled.
    n_prefill_tokens, n_cached_tokens, n_output_tokens : int
        Prompt tokens computed, prompt tokens shared or restored instead, tokens sampled.
    n_drafted_tokens, n_accepted_tokens : int
        Drafts that were computed (speculation), and those of them that were right.
    n_preemptions, n_swaps : int
        Sequences sent back to the queue, and those of them whose cells were saved.
    n_evictions, n_rebuilds : int
        Cached prefixes that have left the cells; contexts recreated after a failure.
    n_checkpoints : int
        Checkpoints: saved memory of one position (recurrent models, sliding windows) to start from.
    n_restored_prefixes : int
        Requests that started from a saved prefix, in host memory or from a file.
    n_prefix_bytes_host, n_prefix_bytes_disk : int
        Bytes of saved prefixes in host memory, and of all files in the prefix cache's directory.
    n_discrepancies : int
        Differences between the bookkeeping and llama.cpp that audits found, and that were repaired.
    n_kv_cells_used, n_kv_cells_cached, n_kv_cells : int
        KV cells held by live requests, held by the prefix cache (some may be both), in all.
    n_seq_ids_used, n_seq_ids_cached : int
        seq_ids held by live requests, held by the prefix cache.
    n_waiting_texts : int
        Texts that wait to become vectors.
    n_embedded_texts, n_embedded_tokens, n_embedding_batches : int
        Texts that became vectors, their tokens, and the batches that they were computed in.
    n_restarts : int
        Number of times that the engine's process crashed, hung or was killed, and was started again.
    n_threads : int
        Compute threads; fewer than configured while other programs keep the processors busy.
    n_gil_handovers : int
        Calls within ticks that release the GIL and acquire it again.
    uptime_s : float
        Seconds since the model was loaded in the present process of the engine.
    tick_times : TickTimes
    """

    n_waiting: int = 0
    n_running: int = 0
    n_paused: int = 0
    n_finished: Mapping[FinishReason, int] = field(default_factory=lambda: _by_reason({}))
    n_ticks: int = 0
    n_decode_rows: int = 0
    n_decoding_ticks: int = 0
    n_decoding_rows: int = 0
    n_prefill_tokens: int = 0
    n_cached_tokens: int = 0
    n_output_tokens: int = 0
    n_drafted_tokens: int = 0
    n_accepted_tokens: int = 0
    n_preemptions: int = 0
    n_swaps: int = 0
    n_evictions: int = 0
    n_rebuilds: int = 0
    n_checkpoints: int = 0
    n_restored_prefixes: int = 0
    n_prefix_bytes_host: int = 0
    n_prefix_bytes_disk: int = 0
    n_discrepancies: int = 0
    n_kv_cells_used: int = 0
    n_kv_cells_cached: int = 0
    n_kv_cells: int = 0
    n_seq_ids_used: int = 0
    n_seq_ids_cached: int = 0
    n_threads: int = 0
    n_gil_handovers: int = 0
    n_waiting_texts: int = 0
    n_embedded_texts: int = 0
    n_embedded_tokens: int = 0
    n_embedding_batches: int = 0
    n_restarts: int = 0
    uptime_s: float = 0.0
    tick_times: TickTimes = field(default_factory=TickTimes)

    @classmethod
    def of(cls, recorder: Recorder) -> Self:
        """Return the counts of a recorder at the time of its snapshot."""
        values = {name: getattr(recorder, name) for name in SAME_NAMES}
        times = TickTimes(*(getattr(recorder, f.name) for f in fields(TickTimes)))
        return cls(**values, n_finished=_by_reason(recorder.n_finished), tick_times=times)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cells that live requests hold, 0 to 1."""
        return self.n_kv_cells_used / self.n_kv_cells if self.n_kv_cells else 0.0

    def plus(self, other: EngineStatistics, *, is_present: bool = False) -> Self:
        """Return the sum with the counters of `other`; with its gauges too if `is_present`."""
        names = SAME_NAMES - ({"uptime_s"} if is_present else GAUGES)
        counts = {n: getattr(other, n) + getattr(self, n) for n in names}
        finished = dict(self.n_finished)
        for reason, n_requests in other.n_finished.items():
            finished[reason] = finished.get(reason, 0) + n_requests
        times = (
            getattr(other.tick_times, f.name) + getattr(self.tick_times, f.name)
            for f in fields(TickTimes)
        )
        return replace(
            self,
            **counts,
            n_finished=_by_reason(finished),
            n_restarts=other.n_restarts + self.n_restarts,
            tick_times=TickTimes(*times),
        )


SAME_NAMES = {f.name for f in fields(EngineStatistics)} - {
    "n_finished", "tick_times", "n_restarts",
}  # fmt: skip


# Present values; all others are counters, which only grow.
GAUGES = {
    "n_waiting", "n_running", "n_paused", "n_kv_cells_used", "n_kv_cells_cached", "n_kv_cells",
    "n_seq_ids_used", "n_seq_ids_cached", "n_waiting_texts", "uptime_s", "n_prefix_bytes_host",
    "n_prefix_bytes_disk", "n_threads",
}  # fmt: skip


class Recorder:
    """The counters behind `EngineStatistics`, mostly by the same names.  Inference thread only.

    Numbers of requests, cells, seq_ids and bytes are set when a snapshot is taken.
    """

    n_waiting: int = 0
    n_running: int = 0
    n_paused: int = 0
    n_ticks: int = 0
    n_decode_rows: int = 0
    n_decoding_ticks: int = 0
    n_decoding_rows: int = 0
    n_prefill_tokens: int = 0
    n_cached_tokens: int = 0
    n_output_tokens: int = 0
    n_drafted_tokens: int = 0
    n_accepted_tokens: int = 0
    n_preemptions: int = 0
    n_swaps: int = 0
    n_evictions: int = 0
    n_rebuilds: int = 0
    n_checkpoints: int = 0
    n_restored_prefixes: int = 0
    n_prefix_bytes_host: int = 0
    n_prefix_bytes_disk: int = 0
    n_discrepancies: int = 0
    n_kv_cells_used: int = 0
    n_kv_cells_cached: int = 0
    n_kv_cells: int = 0
    n_seq_ids_used: int = 0
    n_seq_ids_cached: int = 0
    n_threads: int = 0
    n_gil_handovers: int = 0
    n_waiting_texts: int = 0
    n_embedded_texts: int = 0
    n_embedded_tokens: int = 0
    n_embedding_batches: int = 0
    plan_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0
    deliver_s: float = 0.0
    embed_s: float = 0.0
    uptime_s: float = 0.0
    n_finished: Mapping[FinishReason, int]

    def __init__(self) -> None:
        self._started_at = time.perf_counter()
        self.n_finished = {}

    def count_tick(self, n_rows: int, n_outputs: int) -> None:
        """Count a decoded batch of `n_rows` rows, of which `n_outputs` are sampled."""
        self.n_ticks += 1
        self.n_decode_rows += n_rows
        self.n_decoding_ticks += n_outputs > 0
        self.n_decoding_rows += n_outputs
        self.n_gil_handovers += 2  # decode and synchronize; sampling counts its own

    def count_finished(self, reason: FinishReason) -> None:
        """Count the end of a request."""
        # A new mapping: a snapshot keeps the old one.
        self.n_finished = {**self.n_finished, reason: self.n_finished.get(reason, 0) + 1}

    def snapshot(
        self, kv_cache: KVCache, *, n_waiting: int, n_running: int, n_paused: int
    ) -> Recorder:
        """Return a copy that later ticks do not change."""
        self.n_waiting, self.n_running, self.n_paused = n_waiting, n_running, n_paused
        self.n_kv_cells_used, self.n_kv_cells_cached = kv_cache.n_used, kv_cache.n_cached
        self.n_kv_cells = kv_cache.n_cells
        self.n_seq_ids_used, self.n_seq_ids_cached = len(kv_cache.live_ids), kv_cache.n_cached_ids
        self.uptime_s = time.perf_counter() - self._started_at
        snapshot = Recorder.__new__(Recorder)
        # After every tick: copy.copy takes five times as long.
        snapshot.__dict__.update(self.__dict__)
        return snapshot


def _by_reason(counts: Mapping[FinishReason, int]) -> Mapping[FinishReason, int]:
    return MappingProxyType({reason: counts.get(reason, 0) for reason in FinishReason})
