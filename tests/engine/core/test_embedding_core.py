"""EmbeddingCore: every text gets its vector, whatever fails; streams get the time that is theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.commands import AddEmbedding, CancelRequest, Embedded
from cllm.engine.core.embedding_core import IDLE_BATCH_S, EmbeddingCore
from cllm.engine.core.sequence import AGEING_S
from cllm.engine.core.statistics import Recorder
from cllm.engine.embedding import EmbeddingRequest
from cllm.errors import ContextError, DeadlineError, DecodeFailedError, EngineFailedError
from cllm.testing.fake_encoder import N_VALUES, FakeTextEncoder, TextFault, vector_of

ABORTED = DecodeFailedError("llama_encode", 2, "aborted")
BROKEN = DecodeFailedError("llama_encode", -3, "broken")
S_PER_TOKEN = 0.001


@dataclass
class Bench:
    """A core over a fake encoder, and a clock that batches move."""

    encoder: FakeTextEncoder = field(default_factory=FakeTextEncoder)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        self.told: list[dict[str, int]] = []
        self.core = EmbeddingCore(self.encoder, self.recorder, lambda: self.now, self._on_batch)
        self.ended: dict[str, Embedded] = {}
        self._n_serial = 0

    def _on_batch(self, n_tokens: Mapping[str, int]) -> None:
        self.told.append(dict(n_tokens))
        self.now += S_PER_TOKEN * sum(n_tokens.values())

    def add(
        self,
        name: str,
        texts: Sequence[str],
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        self._n_serial += 1
        tokens = tuple(tuple(text.encode()) for text in texts)
        request = EmbeddingRequest(name, self._n_serial, tokens, priority, self.now, deadline)
        self.core.handle(AddEmbedding(request))

    def tick(self, budget_s: float | None = None) -> list[int]:
        """Of one batch: the number of tokens of each text."""
        n_before = len(self.encoder.batches)
        self.core.tick(budget_s)
        for event in self.core.take_events():
            assert isinstance(event, Embedded)
            assert event.request_id not in self.ended
            self.ended[event.request_id] = event
        return [len(text) for batch in self.encoder.batches[n_before:] for text in batch]

    def run(self) -> None:
        for _ in range(10_000):
            if not self.core.has_work:
                return
            self.tick()
        raise AssertionError("it does not end")

    def vectors(self, name: str) -> list[list[float]]:
        event = self.ended[name]
        assert event.error is None
        return np.frombuffer(event.vectors, np.float32).reshape(-1, event.n_values or 1).tolist()

    def warm(self) -> None:
        """Let it learn what tokens cost."""
        for _ in range(12):
            self.add("warm", ["w" * 40] * 60)
            self.run()
            del self.ended["warm"]


TEXTS = ["one", "a second text", "x" * 500, "?", "the fifth and last of the texts"]


def expected(texts: Sequence[str]) -> list[list[float]]:
    return [vector_of(text.encode()) for text in texts]


def test_each_text_gets_its_own_vector_in_the_order_of_the_request() -> None:
    bench = Bench()
    bench.add("a", TEXTS)
    bench.add("b", TEXTS[::-1])
    bench.run()
    assert bench.vectors("a") == expected(TEXTS)
    assert bench.vectors("b") == expected(TEXTS[::-1])
    assert bench.recorder.n_embedded_texts == 2 * len(TEXTS)
    assert bench.recorder.n_embedded_tokens == 2 * sum(map(len, TEXTS))
    assert bench.recorder.n_waiting_texts == 0


def test_a_request_of_no_texts_ends_at_once() -> None:
    bench = Bench()
    bench.add("a", [])
    bench.tick()
    assert bench.ended["a"] == Embedded("a")
    assert bench.encoder.n_opened == 0


def test_long_texts_go_first_and_short_ones_fill_the_batch() -> None:
    bench = Bench(FakeTextEncoder(n_batch=100))
    bench.warm()
    bench.add("a", ["s" * 10, "l" * 70, "m" * 30, "m" * 60, "s" * 20])
    assert bench.tick() == [70, 30]
    assert bench.tick() == [60, 20, 10]


def test_a_text_longer_than_a_good_batch_is_one_alone_and_others_are_together_up_to_it() -> None:
    bench = Bench(FakeTextEncoder(n_batch=100, n_batch_target=40))
    bench.warm()
    bench.add("a", ["l" * 70, "m" * 30, "s" * 10, "s" * 5])
    assert bench.tick() == [70]
    assert bench.tick() == [30, 10]
    assert bench.tick() == [5]


def test_no_batch_has_more_texts_than_the_encoder_takes() -> None:
    bench = Bench(FakeTextEncoder(n_texts_max=3))
    bench.add("a", ["x"] * 8)
    assert [len(bench.tick()) for _ in range(3)] == [3, 3, 2]


def test_requests_take_turns_so_that_a_short_one_is_not_behind_a_thousand_texts() -> None:
    bench = Bench(FakeTextEncoder(n_batch=100))
    bench.warm()
    bench.add("many", ["l" * 90] * 1000)
    bench.tick()
    bench.add("one", ["q" * 90])
    bench.tick()
    assert set(bench.ended) == {"one"}


def test_the_more_urgent_goes_first_until_the_other_has_waited() -> None:
    bench = Bench(FakeTextEncoder(n_batch=100))
    bench.warm()
    bench.add("later", ["l" * 90], priority=2)
    bench.add("first", ["f" * 90])
    bench.tick()
    assert set(bench.ended) == {"first"}
    bench.now += 3 * AGEING_S
    bench.add("fresh", ["f" * 90], priority=-1)
    bench.tick()
    assert set(bench.ended) == {"first", "later"}


# --- Beside streams ------------------------------------------------------------------------------
def test_with_a_budget_a_batch_takes_about_as_long_as_that() -> None:
    bench = Bench()
    bench.warm()
    bench.add("a", ["x" * 5] * 200)
    for budget_s in (0.02, 0.05, 0.1):
        started = bench.now
        bench.tick(budget_s)
        assert bench.now - started == pytest.approx(budget_s, rel=0.3)


def test_without_time_nothing_is_computed() -> None:
    bench = Bench()
    bench.warm()
    bench.add("a", ["x"])
    assert bench.tick(0.0) == []
    assert bench.tick(-1.0) == []
    assert bench.tick(0.01) == [1]


def test_a_text_that_takes_longer_saves_up_its_time_and_then_goes_alone() -> None:
    bench = Bench()
    bench.warm()
    bench.add("a", ["x" * 100])
    n_ticks = 1
    while not bench.tick(0.02):
        n_ticks += 1
    assert n_ticks == pytest.approx(0.1 / 0.02, abs=1)


def in_pieces() -> Bench:
    bench = Bench(FakeTextEncoder(computes_in_pieces=True))
    bench.warm()
    return bench


def test_a_text_that_takes_longer_comes_in_pieces_where_the_model_allows_it() -> None:
    bench = in_pieces()
    bench.add("a", ["a text of many words " * 20, "x" * 90])
    n_before, sizes = len(bench.encoder.batches), list[int]()
    while bench.core.has_work:
        sizes += bench.tick(0.05)
    assert bench.vectors("a") == expected(["a text of many words " * 20, "x" * 90])
    assert sum(sizes) == 420 + 90
    assert max(sizes) <= 60
    assert len(sizes) <= 13
    pieces = b"".join(bytes(text) for (text,) in bench.encoder.batches[n_before:])
    assert pieces == b"x" * 90 + b"a text of many words " * 20
    assert bench.recorder.n_embedded_texts == 12 * 60 + 2


def test_a_piece_is_not_smaller_than_is_worth_a_batch() -> None:
    bench = in_pieces()
    bench.add("a", ["x" * 20])
    sizes = [size for _ in range(20) for size in bench.tick(0.002)]
    assert sizes == [8, 8, 4]
    assert bench.vectors("a") == expected(["x" * 20])


def test_a_text_in_pieces_that_is_cancelled_leaves_the_next_one_alone() -> None:
    bench = in_pieces()
    bench.add("a", ["x" * 200])
    assert bench.tick(0.05) != [200]
    bench.add("b", ["y" * 200])
    bench.core.handle(CancelRequest("a"))
    bench.run()
    assert bench.ended["a"].error is not None
    assert bench.vectors("b") == expected(["y" * 200])


@pytest.mark.parametrize("fault", [ABORTED, BROKEN, "nan"])
def test_a_piece_that_fails_costs_the_pieces_before_it_and_no_answer(fault: TextFault) -> None:
    bench = in_pieces()
    bench.add("a", ["x" * 200])
    bench.tick(0.05)
    bench.encoder.faults[len(bench.encoder.batches) + 1] = fault
    bench.tick(10.0)
    assert "a" not in bench.ended
    assert bench.tick(10.0) == [200]
    assert bench.vectors("a") == expected(["x" * 200])


def test_where_nobody_generates_a_batch_takes_no_longer_than_a_new_request_may_wait() -> None:
    bench = Bench(FakeTextEncoder(n_batch=4096))
    bench.add("a", ["x" * 20] * 1000)
    longest = 0.0
    while bench.core.has_work:
        started = bench.now
        bench.tick()
        longest = max(longest, bench.now - started)
    assert longest < 1.3 * IDLE_BATCH_S


# --- Failures ------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", [BROKEN, "nan"])
def test_a_text_that_fails_ends_its_own_request_and_no_other(fault: TextFault) -> None:
    def poison(tokens: Sequence[int]) -> TextFault | None:
        return fault if bytes(tokens) == b"poison" else None

    bench = Bench(FakeTextEncoder(poison=poison))
    bench.add("good", TEXTS)
    bench.add("bad", ["fine", "poison", "fine too"])
    bench.add("also good", TEXTS)
    bench.run()
    assert bench.vectors("good") == bench.vectors("also good") == expected(TEXTS)
    error = bench.ended["bad"].error
    assert error is not None
    assert ("NaN" if fault == "nan" else "broken") in str(error.__cause__)
    assert bench.encoder.n_opened == (1 if fault == "nan" else 3)  # two batches with it, then none


def test_a_batch_that_fails_once_is_computed_again_text_by_text() -> None:
    bench = Bench(FakeTextEncoder(faults={1: BROKEN}))
    bench.add("a", TEXTS[:2])
    bench.run()
    assert bench.vectors("a") == expected(TEXTS[:2])
    assert list(map(len, bench.encoder.batches)) == [2, 1, 1]


def test_an_aborted_batch_is_computed_again_without_what_was_cancelled() -> None:
    bench = Bench(FakeTextEncoder(faults={1: ABORTED}))
    bench.add("a", TEXTS[:2])
    bench.add("b", TEXTS[:2])
    bench.tick()
    bench.core.handle(CancelRequest("b"))
    bench.run()
    assert bench.vectors("a") == expected(TEXTS[:2])
    assert "cancelled" in str(bench.ended["b"].error)
    assert bench.encoder.n_opened == 1


def test_an_encoder_that_cannot_be_made_ends_those_who_wait_and_is_tried_again() -> None:
    bench = Bench()
    bench.encoder.open_fault = ContextError("no memory")
    bench.add("a", ["x"])
    bench.tick()
    assert "no memory" in str(bench.ended["a"].error)
    bench.encoder.open_fault = None
    bench.add("b", ["x"])
    bench.run()
    assert bench.vectors("b") == expected(["x"])


def test_what_is_not_computed_by_its_deadline_is_not_computed() -> None:
    bench = Bench()
    bench.add("late", ["x"], deadline=1.0)
    assert bench.core.next_deadline == 1.0
    bench.now = 1.0
    assert bench.tick() == []
    assert isinstance(bench.ended["late"].error, DeadlineError)


def test_when_the_engine_fails_every_request_ends_with_that() -> None:
    bench = Bench()
    bench.add("a", ["x"])
    bench.add("b", ["y"])
    bench.core.fail_all(ValueError("gone"))
    events = bench.core.take_events()
    assert all(isinstance(e, Embedded) and isinstance(e.error, EngineFailedError) for e in events)
    assert len(events) == 2
    assert not bench.core.has_work


def test_a_request_that_reuses_an_id_gets_nothing_of_the_one_before() -> None:
    bench = Bench(FakeTextEncoder(faults={1: BROKEN}))
    bench.add("a", ["x", "y"])
    bench.tick()
    bench.core.handle(CancelRequest("a"))
    bench.tick()
    del bench.ended["a"]
    bench.add("a", ["z"])
    bench.run()
    assert bench.vectors("a") == expected(["z"])


# --- State ---------------------------------------------------------------------------------------
STEPS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.text("ab", min_size=1, max_size=30), max_size=6)),
    st.tuples(st.just("tick"), st.sampled_from([None, 0.0, 0.004, 0.05])),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("fail"), st.sampled_from([BROKEN, ABORTED, "nan"])),
)


@given(st.lists(STEPS, max_size=40), st.booleans())
def test_every_request_ends_once_with_its_own_vectors_or_an_error(
    steps: list[tuple[str, object]], in_pieces: bool
) -> None:
    encoder = FakeTextEncoder(n_batch=30, n_texts_max=4, computes_in_pieces=in_pieces)
    bench = Bench(encoder)
    asked: dict[str, list[str]] = {}
    cancelled: set[str] = set()
    has_failed = False
    for kind, value in steps:
        if kind == "add":
            assert isinstance(value, list)
            name = str(len(asked))
            asked[name] = value
            bench.add(name, value)
        elif kind == "tick":
            assert value is None or isinstance(value, float)
            bench.tick(value)
        elif kind == "cancel":
            cancelled.add(str(value))
            bench.core.handle(CancelRequest(str(value)))
        else:
            has_failed = True
            bench.encoder.faults[len(bench.encoder.batches) + 1] = value  # type: ignore[assignment]
    bench.run()
    bench.tick()
    assert set(bench.ended) == set(asked)
    for name, texts in asked.items():
        event = bench.ended[name]
        if event.error is None:
            assert event.n_values in (0, N_VALUES)
            assert bench.vectors(name) == expected(texts)
        else:
            assert has_failed or name in cancelled
    assert bench.recorder.n_waiting_texts == 0


@pytest.mark.parametrize("fault", [MemoryError("once"), "nan"])
def test_a_text_that_fails_once_is_computed_again_though_it_was_alone(
    fault: Exception | Literal["nan"],
) -> None:
    bench = Bench(FakeTextEncoder(faults={1: fault}))
    bench.add("a", ["x" * 9])
    for _ in range(2):
        bench.tick()
    assert bench.vectors("a") == expected(["x" * 9])
    assert len(bench.encoder.batches) == 2
