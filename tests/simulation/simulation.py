"""simulate: run thousands of seeded schedules, and save a shrunk copy of the first that fails."""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from cllm.checks import INT32_MAX, check_int
from tests.simulation.schedules import (
    Check,
    MakeSimulator,
    Schedule,
    ScheduleError,
    check_options,
    random_schedule,
)
from tests.simulation.simulator import Simulator
from tests.simulation.steps import FailDecode, Step, Submit, Tick

MakeSchedule = Callable[..., Schedule]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Counts of a simulation.

    Attributes
    ----------
    n_preemptions, n_rebuilds : int
        Number of times a request lost its cells, and of times a context was recreated.
    seconds : float
        Duration, in seconds of the real clock.
    """

    n_schedules: int = 0
    n_requests: int = 0
    n_ticks: int = 0
    n_tokens: int = 0
    n_preemptions: int = 0
    n_rebuilds: int = 0
    seconds: float = 0.0

    @property
    def schedules_per_s(self) -> float:
        """Schedules a second."""
        return self.n_schedules / self.seconds if self.seconds else 0.0


class SimulationFailure(AssertionError):
    """A schedule that failed.

    Attributes
    ----------
    schedule : Schedule
        The failing schedule, shrunk.
    path : Path
        File of the shrunk schedule, for `Schedule.load`.
    error : ScheduleError
        Error of the shrunk schedule.
    """

    def __init__(self, seed: int, schedule: Schedule, path: Path, error: ScheduleError) -> None:
        super().__init__(
            f"the schedule of seed {seed} fails: {error}\n"
            f"{len(schedule.steps)} steps are left of it; "
            f"tests.simulation.schedules.Schedule.load({str(path)!r}).run()"
        )
        self.schedule = schedule
        self.path = path
        self.error = error


def simulate(
    n_schedules: int = 1000,
    *,
    seed: int = 0,
    n_workers: int = 1,
    check: Check | None = None,
    make: MakeSchedule = random_schedule,
    simulator: MakeSimulator = Simulator,
    directory: str | Path | None = None,
    **options: Any,
) -> SimulationReport:
    """Run the schedules of the seeds from `seed` on: arrivals, cancellations, slow readers, faults.

    After every tick, check that the bookkeeping agrees with the cache and that no request is lost.  At the end,
    check that every answer is that of its request alone, only the right requests failed, and nothing is left.

    Parameters
    ----------
    n_schedules : int
        At least 1.
    seed : int
    n_workers : int
        Number of processes, at least 1.  With more than one, the callables must be importable.
    check : callable, optional
        Another check of the `Simulator` at the end of each schedule; raises if something is wrong.
    make : callable
        Makes a schedule from a seed and the options.
    simulator : callable
        Makes the `Simulator` from a schedule's options.
    directory : str or Path, optional
        Folder for the file of a failing schedule; None: a new temporary one.
    **options
        Options of `Simulator` for all schedules; the others are drawn.  The file of a failing schedule has
        them, so they must be JSON values.  Use `simulator` for an `answer`, a `poison`, a `decoder_type`
        or faults.

    Raises
    ------
    InvalidArgumentError
        `n_schedules` or `n_workers` is below 1, or an option is not a JSON value.
    SimulationFailure
        A schedule failed: the one with the lowest seed of those that were found, shrunk.
    """
    check_int("n_schedules", n_schedules, 1, INT32_MAX)
    check_int("n_workers", n_workers, 1, INT32_MAX)
    check_options(options)
    check_options(make(seed, **options).options)  # a schedule of the caller's making has its own
    course = _Course(check, make, simulator, options)
    started = time.perf_counter()
    if n_workers == 1:
        outcomes = [course.run(range(seed, seed + n_schedules))]
    else:
        shares = [range(seed + i, seed + n_schedules, n_workers) for i in range(n_workers)]
        context = multiprocessing.get_context("spawn")  # threads do not survive a fork
        with ProcessPoolExecutor(n_workers, mp_context=context) as pool:
            outcomes = list(pool.map(course.run, shares))
    failing = [outcome for outcome in outcomes if isinstance(outcome, int)]
    if failing:
        failure = course.failure(min(failing), directory)
        raise failure from failure.error
    reports = [outcome for outcome in outcomes if isinstance(outcome, SimulationReport)]
    totals = [sum(column) for column in zip(*map(astuple, reports), strict=True)]
    return replace(SimulationReport(*totals), seconds=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Course:
    """How schedules are made and run."""

    check: Check | None
    make: MakeSchedule
    simulator: MakeSimulator
    options: dict[str, Any]

    def run(self, seeds: range) -> SimulationReport | int:
        """Run the schedules of these seeds; return their report, or the first seed that fails."""
        n_requests = n_ticks = n_tokens = n_preemptions = n_rebuilds = 0
        with _silence():
            for seed in seeds:
                schedule = self.make(seed, **self.options)
                try:
                    sim = schedule.run(check=self.check, simulator=self.simulator)
                except ScheduleError:
                    return seed
                recorder = sim.core.recorder
                n_requests += len(sim.requests)
                n_ticks += recorder.n_ticks
                n_tokens += recorder.n_output_tokens
                n_preemptions += recorder.n_preemptions
                n_rebuilds += sim.decoder.n_rebuilds
        return SimulationReport(
            len(seeds), n_requests, n_ticks, n_tokens, n_preemptions, n_rebuilds
        )

    def failure(self, seed: int, directory: str | Path | None) -> SimulationFailure:
        """Shrink the failing schedule of a seed, save it, and return the failure."""
        schedule = self.make(seed, **self.options)
        error = self._error(schedule)
        if error is None:
            raise AssertionError(f"the schedule of seed {seed} fails only now and then")
        cause = type(error.__cause__)

        def is_failing(candidate: Schedule) -> bool:
            # An error of another type would be another fault, perhaps caused by shrinking.
            found = self._error(candidate)
            return found is not None and type(found.__cause__) is cause

        small = shrunk(schedule, is_failing)
        error = self._error(small) or error
        folder = Path(tempfile.mkdtemp(prefix="cllm-")) if directory is None else Path(directory)
        path = small.save(folder / f"schedule-{seed}.jsonl", error=str(error))
        return SimulationFailure(seed, small, path, error)

    def _error(self, schedule: Schedule) -> ScheduleError | None:
        try:
            with _silence():
                schedule.run(check=self.check, simulator=self.simulator)
        except ScheduleError as error:
            return error
        return None


@contextmanager
def _silence() -> Iterator[None]:
    """Disable the engine's log: schedules cause failures on purpose."""
    logger = logging.getLogger("cllm.engine")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def shrunk(schedule: Schedule, is_failing: Callable[[Schedule], bool]) -> Schedule:
    """Return a smaller schedule that still fails, with no step or value that can be removed.

    Parameters
    ----------
    is_failing : callable
        Returns True if a schedule still fails in the same way.
    """
    while True:
        smaller = next(filter(is_failing, _smaller(schedule)), None)
        if smaller is None:
            return schedule
        schedule = smaller


def _smaller(schedule: Schedule) -> Iterable[Schedule]:
    """Yield smaller schedules, the smallest first."""
    steps = schedule.steps
    size = len(steps) // 2
    while size:
        for start in range(0, len(steps), size):
            yield replace(schedule, steps=steps[:start] + steps[start + size :])
        size //= 2
    for index, step in enumerate(steps):
        for simpler in _simpler(step):
            yield replace(schedule, steps=(*steps[:index], simpler, *steps[index + 1 :]))


def _simpler(step: Step) -> Iterable[Step]:
    match step:
        case Tick(n) if n > 1:
            yield from (Tick(1), Tick(n - 1))
        case FailDecode(fault) if fault != -3:
            yield FailDecode(-3)
        case Submit():
            plain = Submit(step.name, step.prompt, step.max_tokens)
            for name in ("temperature", "stop", "priority", "timeout", "tenant"):
                if getattr(step, name) != getattr(plain, name):
                    yield replace(step, **{name: getattr(plain, name)})
            if len(step.prompt) > 1:
                yield from (replace(step, prompt=p) for p in (step.prompt[1:], step.prompt[:-1]))
            if step.max_tokens is None or step.max_tokens > 1:
                yield replace(
                    step, max_tokens=1 if step.max_tokens is None else step.max_tokens - 1
                )
