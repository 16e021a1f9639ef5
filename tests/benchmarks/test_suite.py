"""The order of the turns, what a failing or missing peer costs, and one run of the engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.side_by_side import bare_loop, engine_loop, http_load, servers, workload
from benchmarks.side_by_side.embedding import TextSizes
from benchmarks.side_by_side.engine_loop import Decoding
from benchmarks.side_by_side.http_loop import LoopSizes
from benchmarks.side_by_side.page import SECTIONS
from benchmarks.side_by_side.peers import Peers
from benchmarks.side_by_side.quiet import Quiet
from benchmarks.side_by_side.sequential import SequentialSizes
from benchmarks.side_by_side.suite import MEASUREMENTS, Options, available, in_turns
from benchmarks.side_by_side.targets import TARGETS
from benchmarks.side_by_side.workload import Setup
from cllm.bindings import Batch, Context, EmbeddingContext, Logits, Model
from cllm.engine.config import EMBEDDED_MODEL
from tools import make_model


def options(n_turns: int, told: list[str], missing: Mapping[str, str] | None = None) -> Options:
    peers = Peers(None, None, missing or {})
    quiet = Quiet(lambda: [1.0, 1.0])
    return Options(
        peers, n_threads=1, n_turns=n_turns, is_quick=True, tell=told.append, quiet=quiet
    )


def test_peers_take_turns_and_every_other_turn_the_last_begins() -> None:
    calls: list[str] = []

    def task(name: str) -> Mapping[str, float]:
        calls.append(name)
        return {"n": len(calls)}

    tasks = {name: lambda name=name: task(name) for name in "ABC"}
    records = list(in_turns(options(3, []), "a", "model", "case", tasks))
    assert calls == [*"ABC", *"CBA", *"ABC"]
    assert [(r.peer, r.turn, r.metrics["n"]) for r in records[:4]] == [
        ("A", 0, 1), ("B", 0, 2), ("C", 0, 3), ("C", 1, 4),
    ]  # fmt: skip


def test_only_the_cases_that_are_asked_for_are_measured() -> None:
    chosen = dataclasses.replace(options(1, []), cases=frozenset({"8 clients"}))
    for case, n_records in (("8 clients", 1), ("32 clients", 0)):
        assert len(list(in_turns(chosen, "b", "model", case, {"A": dict}))) == n_records


def test_a_turn_on_a_disturbed_machine_is_thrown_away_and_told_of() -> None:
    told: list[str] = []
    # Before the first turn, and after each peer: the second peer of the first turn met another.
    loops = iter([1.0, 1.1, 1.5, *(1.0, 1.05, 1.2)])
    quiet = Quiet(lambda: [next(loops)] * 2)
    calls: list[str] = []

    def task(name: str) -> Mapping[str, float]:
        calls.append(name)
        return {"n": len(calls)}

    tasks = {name: lambda name=name: task(name) for name in "AB"}
    chosen = dataclasses.replace(options(1, told), quiet=quiet)
    records = list(in_turns(chosen, "a", "model", "case", tasks))
    assert calls == [*"AB", *"AB"]
    assert [(r.peer, r.metrics["n"], r.busy) for r in records] == [("A", 3, 1.05), ("B", 4, 1.2)]
    assert [line for line in told if "thrown away" in line] == [
        "a case turn 1: thrown away, a loop took 1.50 times as long as at its fastest"
    ]


def test_where_the_machine_is_never_left_alone_the_last_turn_stays() -> None:
    loops = iter([1.0, 1.0, 2.0, 1.0, 1.0, 2.0])
    chosen = dataclasses.replace(options(1, []), quiet=Quiet(lambda: [next(loops)] * 2))
    records = list(in_turns(chosen, "a", "model", "case", {"A": dict, "B": dict}))
    assert [r.busy for r in records] == [1.0, 2.0]


def test_a_machine_that_is_always_as_busy_is_not_disturbed() -> None:
    told: list[str] = []
    quiet = Quiet(lambda: [1.0, 2.0, 2.0])
    chosen = dataclasses.replace(options(2, told), quiet=quiet)
    records = list(in_turns(chosen, "a", "model", "case", {"A": dict}))
    assert [r.busy for r in records] == pytest.approx([5 / 3, 5 / 3])
    assert not [line for line in told if "thrown away" in line]


def test_a_peer_that_fails_is_told_of_and_the_others_are_measured() -> None:
    def fails() -> Mapping[str, float]:
        raise RuntimeError("it fell over")

    told: list[str] = []
    tasks = {"A": fails, "B": lambda: {"n": 1.0}}
    assert [r.peer for r in in_turns(options(1, told), "a", "model", "case", tasks)] == ["B"]
    assert "it fell over" in told[0]


def test_a_missing_peer_is_not_measured() -> None:
    there = available(options(1, [], {"A": "", "B": "not built"}), {"A": dict, "B": dict})
    assert list(there) == ["A"]


def test_every_measurement_has_a_section_and_every_target_a_measurement() -> None:
    assert set(MEASUREMENTS) == set(SECTIONS) == {target.measurement for target in TARGETS}


@pytest.mark.parametrize(
    "sizes",
    [LoopSizes(3, 2, n_prompt=12, n_output=4), SequentialSizes(2, n_requests=3, n_prompt=12)],
)
def test_llama_cpp_alone_computes_each_prompt_and_output(
    monkeypatch: pytest.MonkeyPatch, sizes: LoopSizes | SequentialSizes
) -> None:
    rows: list[tuple[int, int]] = []  # sequences and rows of each decode

    def decode(self: Context, batch: Batch) -> Logits:
        rows.append((len(batch.runs), batch.n_rows))
        return computed(self, batch)

    computed = Context.decode
    monkeypatch.setattr(Context, "decode", decode)
    setup = Setup(EMBEDDED_MODEL, n_threads=1, n_ctx=512, n_seq_max=sizes.n_seq_max, n_batch=32)
    work = bare_loop.Work.of(setup, sizes)
    bare_loop.measure(work)
    n, n_rounds = len(work.rounds[0]), len(work.rounds) + 1  # one round more: the warm-up
    prompts = [(2, 24), (1, 12)] if n == 3 else [(1, 12)]
    assert rows == (prompts + (work.n_output - 1) * [(n, n)]) * n_rounds
    assert work.n_tokens == n * (n_rounds - 1) * work.n_output


def test_llama_cpp_alone_encodes_as_many_tokens_as_the_texts_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_rows: list[int] = []

    def compute(self: EmbeddingContext, batch: Batch) -> NDArray[np.float32]:
        n_rows.append(batch.n_rows)
        return computed(self, batch)

    computed = EmbeddingContext.compute
    monkeypatch.setattr(EmbeddingContext, "compute", compute)
    encoder = make_model.ensure("tiny-encoder", "F16")
    setup = Setup(encoder, n_threads=1, n_ctx=512, n_seq_max=3, n_batch=2048, embeds=True)
    sizes = TextSizes(3, 2)
    work = bare_loop.Work.of(setup, sizes)
    bare_loop.measure(work)
    with Model(encoder, vocab_only=True) as model:
        lengths = [
            [len(model.vocab.tokenize(sizes.text(client, index))) for client in range(3)]
            for index in range(2)
        ]
    assert work.rounds == lengths
    assert sum(n_rows) == sum(map(sum, [lengths[0], *lengths]))


def test_llama_cpp_alone_runs_in_a_process_and_tells_why_it_failed(tmp_path: Path) -> None:
    setup = Setup(EMBEDDED_MODEL, n_threads=1, n_ctx=512, n_seq_max=2)
    sizes = LoopSizes(2, 1, n_prompt=8, n_output=3)
    assert bare_loop.in_a_process(setup, sizes).keys() == {"tokens_per_s"}
    one = SequentialSizes(1, n_requests=2)
    assert bare_loop.in_a_process(setup, one).keys() == {"total_s"}
    missing = dataclasses.replace(setup, model=tmp_path / "missing.gguf")
    with pytest.raises(RuntimeError, match=r"missing\.gguf"):
        bare_loop.in_a_process(missing, sizes)


def test_texts_share_a_batch_while_there_is_room() -> None:
    assert list(bare_loop.batches([5, 5, 3, 8, 2], 10)) == [[0, 1], [2], [3, 4]]
    assert list(bare_loop.batches([4], 4)) == [[0]]


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_engine_is_measured_with_every_token_read(
    monkeypatch: pytest.MonkeyPatch, *, is_busy: bool
) -> None:
    monkeypatch.setattr(workload, "TEXT_TOKENS", range(40, 90))
    setup = Setup(EMBEDDED_MODEL, n_threads=1, n_ctx=512, n_seq_max=4)
    call = Decoding(setup, n_prompt=8, n_output=100, is_busy=is_busy)
    rate = anyio.run(engine_loop.measure, call)
    assert rate.tokens_per_s > 0
    assert rate.outside_us > 0
    assert rate.handovers_per_tick >= 3  # decode, synchronize, argmax


def test_the_bare_server_sends_each_token_of_each_client_in_an_event() -> None:
    setup = Setup(EMBEDDED_MODEL, n_threads=1, n_ctx=512, n_seq_max=2, n_batch=32)
    bodies = [{"prompt": [5] * 12, "max_tokens": n_output} for n_output in (4, 1, 3)]
    port = servers.free_port()
    with servers.running(servers.bare_server(setup, port), port):
        for _ in range(2):
            answers = asyncio.run(http_load.ask_together(port, bodies))
            assert [a.failure for a in answers] == ["", "", ""]
            assert [(a.n_tokens, a.n_events) for a in answers] == [(4, 4), (1, 1), (3, 3)]
