"""The search for faster settings, on measurers that compute their times from a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm import EngineConfig
from cllm.engine.core.tick_shares import SHAPES, shares_of
from cllm.engine.llama.tuning import (
    LEAST_GAIN,
    Candidate,
    MeasurementError,
    NotTunedError,
    Reading,
    Settings,
    Tuning,
    stages,
    tune,
)

EQUAL = shares_of({})
SPIN_S = 0.01
Factor = Callable[[Settings, str], float]


class Machine:
    """Measures by a table: `factor` times the seconds of a shape.  Its clock counts what it measures."""

    def __init__(self, factor: Factor, *, scale: float = 1.0, open_s: float = 0.1) -> None:
        self.now = 0.0
        self.n_open = 0
        self.opened: list[Settings] = []
        self.spins: Iterator[float] | None = None
        self.noise: Iterator[float] | None = None
        self.broken: list[Settings] = []
        self.deadline = float("inf")
        self._factor = factor
        self._seconds = {shape: scale * 0.01 * (i + 1) for i, shape in enumerate(SHAPES)}
        self._open_s = open_s

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Any]:
        self.opened.append(settings)
        self.n_open += 1
        try:
            yield _Measured(self, settings)
        finally:
            self.n_open -= 1

    def read(self, settings: Settings, shape: str) -> Reading:
        seconds = self._seconds[shape] * self._factor(settings, shape)
        if self.noise is not None:
            seconds *= next(self.noise)
        self.now += seconds
        if self.now > self.deadline:
            raise MeasurementError("it took too long")
        return Reading(seconds, SPIN_S if self.spins is None else next(self.spins))

    def load(self, settings: Settings) -> None:
        self.now += self._open_s
        if settings in self.broken:
            raise MeasurementError("it is broken")

    def tune(
        self,
        *candidates: Sequence[Candidate],
        shares: Mapping[str, float] = EQUAL,
        limit_s: float = 1000.0,
    ) -> Tuning:
        self.deadline = self.now + limit_s
        return tune(candidates, shares, self.open, limit_s=limit_s, clock=lambda: self.now)


class _Measured:
    def __init__(self, machine: Machine, settings: Settings) -> None:
        self._machine = machine
        self._settings = settings
        self._is_loaded = False

    def turn(self, shapes: Sequence[str]) -> dict[str, Reading]:
        if not self._is_loaded:
            self._machine.load(self._settings)
            self._is_loaded = True
        return {shape: self._machine.read(self._settings, shape) for shape in shapes}


NO_REPACK, NO_TILES = Candidate({"repack": False}), Candidate({"tiled_matmul": False})


def faster(amount: float, **wanted: object) -> Factor:
    return lambda settings, shape: amount if wanted.items() <= settings.items() else 1.0


@pytest.mark.parametrize("factor", [1.0, 1.2, 0.98])
def test_the_defaults_stay_without_a_gain_of_three_percent(factor: float) -> None:
    machine = Machine(faster(factor, repack=False))
    tuning = machine.tune([NO_REPACK])
    assert tuning.chosen == {}
    assert tuning.comparisons[0].score == pytest.approx(factor)


def test_a_setting_that_is_faster_is_chosen_and_the_next_stage_starts_from_it() -> None:
    machine = Machine(faster(0.8, repack=False))
    tuning = machine.tune([NO_TILES, NO_REPACK], [Candidate({"n_threads_batch": 1})])
    assert tuning.chosen == {"repack": False}
    assert machine.opened[-2:] == [{"repack": False}, {"repack": False, "n_threads_batch": 1}]
    assert machine.n_open == 0


def test_a_candidate_that_fails_does_not_disturb_the_others() -> None:
    machine = Machine(faster(0.8, repack=False))
    machine.broken = [NO_TILES.changes]
    tuning = machine.tune([NO_TILES, NO_REPACK])
    assert [each.settings for each in tuning.comparisons] == [NO_REPACK.changes]
    assert tuning.chosen == {"repack": False}


def test_a_base_that_fails_in_a_later_stage_leaves_what_was_found() -> None:
    machine = Machine(faster(0.8, repack=False))
    opened = machine.opened
    real = machine.load

    def load(settings: Settings) -> None:
        real(settings)
        if len(opened) > 2:
            raise MeasurementError("it ended")

    machine.load = load  # type: ignore[method-assign]
    assert machine.tune([NO_REPACK], [NO_TILES]).chosen == {"repack": False}
    assert machine.n_open == 0


def test_a_candidate_that_cannot_be_loaded_is_loaded_once_and_closed() -> None:
    machine = Machine(faster(0.8, repack=False))
    machine.broken = [NO_TILES.changes]
    loads: list[Settings] = []
    real = machine.load

    def load(settings: Settings) -> None:
        loads.append(settings)
        real(settings)

    machine.load = load  # type: ignore[method-assign]
    machine.tune([NO_TILES, NO_REPACK])
    assert loads == [{}, NO_TILES.changes, NO_REPACK.changes]


def test_the_reason_is_told_where_nothing_can_be_measured() -> None:
    machine = Machine(faster(1.0))
    machine.broken = [{}]
    with pytest.raises(NotTunedError, match="it is broken"):
        machine.tune([NO_REPACK])


@pytest.mark.parametrize("limit_s", [1.0, 5.0, 12.0, 20.0, 25.0, 31.0])
def test_a_search_ends_at_its_limit_and_keeps_whole_turns(limit_s: float) -> None:
    machine = Machine(faster(0.8, repack=False), scale=5.0, open_s=3.0)
    try:
        tuning = machine.tune([NO_TILES, NO_REPACK], limit_s=limit_s)
    except NotTunedError:
        assert limit_s < 25.0
    else:
        assert tuning.comparisons
    assert machine.now <= limit_s + 3.0 * 3
    assert machine.n_open == 0


def test_the_best_of_several_gains_is_chosen() -> None:
    both = Candidate({"tiled_matmul": False, "repack": False})

    def factor(settings: Settings, shape: str) -> float:
        return {0: 1.0, 1: 0.9, 2: 0.7}[len(settings)]

    assert Machine(factor).tune([NO_TILES, NO_REPACK, both]).chosen == both.changes


@pytest.mark.parametrize(("past", "chosen"), [("p256", {"repack": False}), ("1", {})])
def test_the_shapes_of_past_ticks_decide(past: str, chosen: Settings) -> None:
    def factor(settings: Settings, shape: str) -> float:
        return 1.0 if settings.get("repack", True) else 0.8 if shape == "p256" else 1.2

    shares = shares_of({past: 60.0})
    assert Machine(factor).tune([NO_REPACK], shares=shares).chosen == chosen


def test_shapes_that_a_candidate_cannot_change_count_as_before() -> None:
    candidate = Candidate({"n_threads": 1, "n_threads_batch": 2}, ("1",))
    (found,) = Machine(faster(0.5, n_threads=1)).tune([candidate]).comparisons
    assert found.ratios == {"1": pytest.approx(0.5)}
    assert found.score == pytest.approx(1 - 0.5 / len(SHAPES))


def test_a_gain_within_the_noise_changes_nothing() -> None:
    machine = Machine(faster(0.93, repack=False))
    machine.noise = (1.0 + 0.4 * (i * 7 % 5 - 2) / 2 for i in count())
    (found,) = machine.tune([NO_REPACK]).comparisons
    assert found.score <= 1 - LEAST_GAIN < found.score + 2 * found.noise
    assert not found.is_gain


def test_readings_beside_a_slow_spin_loop_are_discarded() -> None:
    machine = Machine(faster(0.8, repack=False))
    # Another program uses the processors in the first two turns of both.
    n_disturbed = 2 * 2 * len(SHAPES) + len(SHAPES)
    machine.spins = (3 * SPIN_S if i < n_disturbed else SPIN_S for i in count())
    machine.noise = (1.0 + i % 7 if i < n_disturbed else 1.0 for i in count())
    tuning = machine.tune([NO_REPACK])
    assert tuning.comparisons[0].score == pytest.approx(0.8)
    assert tuning.comparisons[0].noise == pytest.approx(0.0)


def test_nothing_is_chosen_on_a_machine_that_is_never_calm() -> None:
    machine = Machine(faster(0.5, repack=False))
    machine.spins = (2 * SPIN_S if i else SPIN_S for i in count())
    with pytest.raises(NotTunedError, match="other programs"):
        machine.tune([NO_REPACK])


def test_shapes_that_take_long_for_their_share_are_left_out_when_time_is_short() -> None:
    machine = Machine(faster(0.8, repack=False), scale=10.0)
    tuning = machine.tune([NO_REPACK], limit_s=18.0)
    (found,) = tuning.comparisons
    assert "p256" not in found.ratios
    assert 0.7 < found.known < 1
    assert found.score == pytest.approx(1 - 0.2 * len(found.ratios) / len(SHAPES))
    assert tuning.chosen == {"repack": False}


def test_nothing_is_chosen_that_was_not_measured_with_most_of_what_the_engine_does() -> None:
    machine = Machine(faster(0.5, repack=False), scale=10.0)
    prompts = shares_of({"p256": 90.0, "1": 10.0})
    tuning = machine.tune([NO_REPACK], shares=prompts, limit_s=18.0)
    assert "p256" in tuning.comparisons[0].ratios  # cheap for its share
    machine = Machine(faster(0.5, repack=False), scale=10.0)
    tuning = machine.tune([NO_REPACK], limit_s=5.0)
    assert tuning.comparisons[0].known < 0.7
    assert tuning.chosen == {}


def test_a_model_that_is_too_slow_is_not_tuned() -> None:
    machine = Machine(faster(0.5, repack=False), scale=1000.0)
    with pytest.raises(NotTunedError):
        machine.tune([NO_REPACK], limit_s=20.0)
    assert machine.n_open == 0


def test_no_stage_begins_after_the_limit() -> None:
    machine = Machine(faster(1.0), open_s=100.0)
    with pytest.raises(NotTunedError):
        machine.tune([NO_REPACK], [NO_TILES], limit_s=50.0)
    assert machine.opened == [{}]
    assert machine.n_open == 0


@given(
    st.dictionaries(st.sampled_from(SHAPES), st.floats(0.5, 2.0)),
    st.dictionaries(st.sampled_from(SHAPES), st.floats(0.0, 1e4)),
)
def test_a_choice_is_faster_by_the_weights_or_it_is_the_default(
    factors: dict[str, float], seconds: dict[str, float]
) -> None:
    shares = shares_of(seconds)
    machine = Machine(lambda settings, shape: factors.get(shape, 1.0) if settings else 1.0)
    tuning = machine.tune([NO_REPACK], shares=shares)
    expected = sum(part * factors.get(shape, 1.0) for shape, part in shares.items())
    assert tuning.comparisons[0].score == pytest.approx(expected)
    if abs(expected - (1 - LEAST_GAIN)) > 1e-9:
        assert bool(tuning.chosen) == (expected < 1 - LEAST_GAIN)


def changes(**options: Any) -> list[Settings]:
    given: dict[str, Any] = {"model": "m.gguf", "process": True, **options}
    has_tiles = given.pop("has_tiles", True)
    found = stages(EngineConfig(**given), n_processors=600, has_tiles=has_tiles)
    return [candidate.changes for stage in found for candidate in stage]


def test_settings_of_the_user_have_no_candidates() -> None:
    fields = {name for change in changes() for name in change}
    assert fields == {"tiled_matmul", "repack", "n_threads", "n_threads_batch"}
    options: dict[str, Any]
    for options in ({"repack": False}, {"tiled_matmul": False}):
        left = changes(**options)
        assert not any(name in change for change in left for name in options), options
    for options in ({"n_threads": 3}, {"n_threads_batch": 3}):
        assert not any("n_threads" in name for change in changes(**options) for name in change)


def test_each_candidate_is_a_configuration() -> None:
    for change in changes():
        EngineConfig(**change)  # type: ignore[arg-type]


def test_tiles_are_changed_only_in_a_process_of_the_engines_own() -> None:
    assert not any("tiled_matmul" in change for change in changes(process=False))
    assert not any("tiled_matmul" in change for change in changes(has_tiles=False))


def test_the_number_of_threads_of_the_embedded_model_stays() -> None:
    assert not any("n_threads" in change for change in changes(model=None))
