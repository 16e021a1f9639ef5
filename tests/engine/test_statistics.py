"""What is read after a tick is what the snapshot says, name by name."""

from __future__ import annotations

from cllm.engine.kv_cache import KVCache
from cllm.engine.request import FinishReason
from cllm.engine.statistics import EngineStatistics, Recorder


def test_every_counter_comes_out_under_its_own_name() -> None:
    recorder = Recorder()
    counters = {name: n for n, name in enumerate(vars(recorder), 100) if name.startswith("n_")}
    del counters["n_finished"]
    times = {name: n / 10 for n, name in enumerate(vars(recorder)) if name.endswith("_s")}
    for name, value in {**counters, **times}.items():
        setattr(recorder, name, value)
    recorder.n_finished[FinishReason.STOP] = 7
    books = KVCache(n_cells=64, n_seq_ids=4, n_ctx_seq=64)
    books.advance(books.open(), 5)
    read = recorder.readings(n_waiting=1, n_running=2, n_paused=3, books=books)
    recorder.n_finished[FinishReason.STOP] += 1  # what was read stays as it was
    said = EngineStatistics.of(read)
    assert {name: getattr(said, name) for name in counters} == counters
    assert {name: getattr(said.tick_times, name) for name in times} == times
    assert (said.n_waiting, said.n_running, said.n_paused) == (1, 2, 3)
    assert (said.n_kv_cells_used, said.n_kv_cells, said.n_seq_ids_used) == (5, 64, 1)
    assert said.n_finished[FinishReason.STOP] == 7
    assert said.n_finished[FinishReason.CANCELLED] == 0
    assert said.uptime_s > 0
