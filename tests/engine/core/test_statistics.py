"""What is read after a tick is what the snapshot says, name by name."""

from __future__ import annotations

from typing import get_type_hints

from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.statistics import EngineStatistics, Recorder
from cllm.engine.output import FinishReason


def test_every_counter_comes_out_under_its_own_name() -> None:
    recorder = Recorder()
    found_by_a_snapshot = ("n_waiting", "n_running", "n_paused", "n_kv_", "n_seq_ids", "n_finished")
    counters = {
        name: n
        for n, name in enumerate(get_type_hints(Recorder), 100)
        if name.startswith("n_") and not name.startswith(found_by_a_snapshot)
    }
    times = {
        name: n / 10
        for n, name in enumerate(get_type_hints(Recorder))
        if name.endswith("_s") and name != "uptime_s"
    }
    for name, value in {**counters, **times}.items():
        setattr(recorder, name, value)
    for _ in range(7):
        recorder.count_finished(FinishReason.STOP)
    kv_cache = KVCache(n_cells=64, n_seq_ids=4, n_ctx_seq=64)
    kv_cache.advance(kv_cache.open(), 5)
    snapshot = recorder.snapshot(kv_cache, n_waiting=1, n_running=2, n_paused=3)
    recorder.count_finished(FinishReason.STOP)  # what was taken stays as it was
    recorder.count_tick(1, 1)
    said = EngineStatistics.of(snapshot)
    assert len(counters) == 23
    assert {name: getattr(said, name) for name in counters} == counters
    assert {name: getattr(said.tick_times, name) for name in times} == times
    assert (said.n_waiting, said.n_running, said.n_paused) == (1, 2, 3)
    assert (said.n_kv_cells_used, said.n_kv_cells, said.n_seq_ids_used) == (5, 64, 1)
    assert said.n_finished[FinishReason.STOP] == 7
    assert said.n_finished[FinishReason.CANCELLED] == 0
    assert said.uptime_s > 0
