"""simulate: what it runs, what it finds, how small it makes it, and that the file says it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm.engine.core.kv_cache_manager import KVCacheManager
from cllm.engine.core.sequence import Sequence
from cllm.errors import InvalidArgumentError
from tests.simulation.schedules import Schedule, ScheduleError, random_schedule
from tests.simulation.simulation import SimulationFailure, simulate
from tests.simulation.simulator import Simulator, WatchedDecoder
from tests.simulation.steps import Cancel, FailDecode, Submit, Tick

N_SCHEDULES = 1000


def test_a_thousand_schedules_hold_what_they_must() -> None:
    report = simulate(N_SCHEDULES)
    assert report.n_schedules == N_SCHEDULES
    assert report.n_requests > 2 * N_SCHEDULES
    assert min(report.n_tokens, report.n_preemptions, report.n_rebuilds) > 0
    assert report.schedules_per_s > 0


MEMORIES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, a sequence each": {"kv_unified": False},
    "window": {"is_windowed": True},
    "states": {"has_pos_min": False},
    "states, a sequence each": {"has_pos_min": False, "kv_unified": False},
    "without copies": {"can_copy": False},
    "drafts": {"draft_share": 0.5},
    "states with drafts": {"has_pos_min": False, "n_rollback": 2, "draft_share": 0.5},
    "target_itl_ms": {"target_itl_ms": 20, "latency_s": 0.01},
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_schedules_with_images_hold_what_they_must(memory: str) -> None:
    n_encoded = 0
    for seed in range(120):
        schedule = random_schedule(seed, with_images=True, **MEMORIES[memory])
        try:
            n_encoded += schedule.run().encoder.n_encoded
        except ScheduleError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert n_encoded > 100


def test_a_seed_is_a_schedule() -> None:
    assert random_schedule(7) == random_schedule(7)
    assert random_schedule(7) != random_schedule(8)
    assert random_schedule(7, n_ctx=99).options["n_ctx"] == 99
    for seed in range(20):  # what is drawn goes with what is given
        random_schedule(seed, n_seq_max=9).run()


def test_workers_share_the_seeds_and_run_the_same() -> None:
    alone, shared = simulate(40), simulate(40, n_workers=2)
    assert (alone.n_requests, alone.n_ticks) == (shared.n_requests, shared.n_ticks)


def forget_to_leave(patch: pytest.MonkeyPatch) -> None:
    """A cancelled request stays in the cache."""
    leave = KVCacheManager.leave

    def kept(manager: KVCacheManager, sequence: Sequence, *, keep: bool) -> None:
        if sequence.n_output != 2:  # a mistake that needs two tokens to show
            leave(manager, sequence, keep=keep)

    patch.setattr(KVCacheManager, "leave", kept)


def test_a_mistake_of_the_engine_is_found_made_small_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        forget_to_leave(patch)
        with pytest.raises(SimulationFailure) as caught:
            simulate(N_SCHEDULES, directory=tmp_path)
        failure = caught.value
        assert len(failure.schedule.steps) <= 3
        assert failure.path.parent == tmp_path
        assert len(failure.path.read_text().splitlines()) <= 4
        assert Schedule.load(failure.path) == failure.schedule
        with pytest.raises(ScheduleError, match="step") as again:
            failure.schedule.run()
        assert str(again.value) in failure.path.read_text()
    assert Schedule.load(failure.path).run().core.statistics().n_ticks > 0


def test_a_failure_says_what_is_wrong_with_what_was_there_and_raises_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only `AssertionError`: somebody else has to find the mistake by it."""
    forget_to_leave(monkeypatch)
    with pytest.raises(SimulationFailure) as caught:
        simulate(N_SCHEDULES, directory=tmp_path)
    failure = caught.value
    assert failure.__cause__ is failure.error
    reason = str(failure.error).split("AssertionError: ")[1]
    what, _, numbers = reason.partition(": ")
    assert len(what.split()) >= 2
    assert ", expected " in numbers
    assert str(failure.error.__cause__).startswith(reason)


@pytest.mark.parametrize(
    "options",
    [
        {"answer": ord}, {"decoder_type": WatchedDecoder}, {"poison": print},
        {"faults": {3: -3}}, {"call_faults": {("seq_rm", 1): False}}, {"latency_s": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_a_file_cannot_hold_is_refused_before_anything_runs(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Else the file of a failure could not be written, or its replay would hold."""
    (name,) = options
    with pytest.raises(InvalidArgumentError, match="pass simulator= instead") as caught:
        simulate(5, **options)
    assert caught.value.field == name
    with pytest.raises(InvalidArgumentError, match=name):
        Schedule(options).save(tmp_path / "file.jsonl")


def test_an_option_of_a_schedule_of_the_callers_is_looked_at_too() -> None:
    with pytest.raises(InvalidArgumentError, match="pass simulator= instead"):
        simulate(5, make=lambda seed: Schedule({"answer": ord}))


@pytest.mark.parametrize(
    "wrong", [{"n_schedules": 0}, {"n_schedules": -1}, {"n_workers": 0}], ids=str
)
def test_to_simulate_nothing_shows_nothing_and_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        simulate(**wrong)


def test_a_schedule_of_any_text_is_read_as_it_was_written(
    tmp_path: Path,
) -> None:
    """With line separators of Unicode in it; and in UTF-8, whatever the locale says."""
    schedule = Schedule({"n_ctx": 16}, (Submit("é", "a\u2028b\x85c\rd\ne 你好"), Tick(1)))
    path = schedule.save(tmp_path / "file.jsonl", error="\u2029")
    assert "你好" in path.read_bytes().decode("utf-8")
    assert Schedule.load(path) == schedule
    Schedule.load(path).run()


def nobody_says_an_x(sim: Simulator) -> None:
    assert not any("x" in text for text in sim.texts.values()), "an x"


def test_a_claim_of_the_caller_is_one_that_can_fail(tmp_path: Path) -> None:
    with pytest.raises(SimulationFailure, match="an x") as caught:
        simulate(check=nobody_says_an_x, directory=tmp_path, simulator=_alphabet)
    assert [type(step) for step in caught.value.schedule.steps] == [Submit]
    small = Schedule.load(caught.value.path)
    with pytest.raises(ScheduleError, match="an x"):
        small.run(check=nobody_says_an_x, simulator=_alphabet)
    small.run(simulator=_alphabet)


def _alphabet(**options: object) -> Simulator:
    """Says the letters of the alphabet, one after another."""
    return Simulator(answer=lambda prefix: ord("a") + len(prefix) % 26, **options)  # type: ignore[arg-type]


def test_who_has_to_fail_is_known_from_the_fault_alone() -> None:
    steps = (Submit("a", "xyz", max_tokens=4), Submit("b", "uvw", max_tokens=4))
    sim = Schedule({"n_ctx": 64}, (*steps, FailDecode("nan"))).run()
    assert len(sim.failed()) == 1
    assert Schedule({"n_ctx": 64}, (*steps, FailDecode(-3))).run().failed() == set()


def test_steps_about_requests_that_are_not_there_mean_nothing() -> None:
    sim = Schedule({}, (Cancel("nobody"), Tick(2))).run()
    assert not sim.requests


@pytest.mark.parametrize(
    "text",
    ["", "{}\n", '{"format": "another"}\n', '{"format": "cllm schedule 1", "options": {}}\n{"Jump": {}}\n'],
)  # fmt: skip
def test_a_file_that_is_no_schedule_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"file\.jsonl is not"):
        Schedule.load(path)


def test_an_error_says_the_step() -> None:
    schedule = Schedule({"n_ctx": 2}, (Tick(1),))  # too small for four sequences
    with pytest.raises(Exception, match="n_ctx"):
        schedule.run()
    with pytest.raises(ScheduleError, match="step 2: AssertionError: wrong"):
        Schedule({}, (Tick(1),)).run(check=_wrong)


def _wrong(sim: Simulator) -> None:
    raise AssertionError("wrong")
