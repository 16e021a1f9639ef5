"""Tuning: find the fastest of the settings that change speed, and at most the rounding.  Pure.

Which is fastest depends on the processor, on the types of the weights and on the shape of a batch.  Candidates
are compared in stages.  Each stage starts from the settings that the stage before has chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from cllm.checks import MAX_THREADS
from cllm.engine.config import EngineConfig
from cllm.engine.core.tick_shares import SHAPES
from cllm.errors import CllmError

Settings = dict[str, bool | int]  # fields of `EngineConfig` that differ from its defaults

LEAST_GAIN = 0.03  # beyond noise, for which a default is left
# Part of the time of past ticks whose shapes must have been measured: a setting that is faster for one row may be
# slower for prompts.
LEAST_KNOWN = 0.7
N_TURNS, N_TURNS_MIN = 7, 5  # measurements of each candidate
# Standard error of the median of n values with a normal distribution: this times their median absolute deviation,
# divided by the root of n.
ERROR_OF_MEDIAN = 1.86
N_ERRORS = 2  # standard errors that a gain must exceed: the best of several candidates looks better than it is
# Ratio to the fastest spin loop above which a measurement is discarded.  Compared with the median, a machine that
# another program keeps busy would look calm.
DISTURBED = 1.75
TILED = ("8", "16", "p64", "p256")  # shapes that llama.cpp multiplies by tiles


class Reading(NamedTuple):
    """Seconds of a decode, and of the slower spin loop around it."""

    seconds: float
    spin_s: float


class Measurer(Protocol):
    """A model with some settings, in a process of its own."""

    def turn(self, shapes: Sequence[str]) -> Mapping[str, Reading]:
        """Measure each shape once; the first call loads the model.

        Raises
        ------
        MeasurementError
            The model cannot be used with these settings, or the time is over.
        """


OpenMeasurer = Callable[[Settings], AbstractContextManager[Measurer]]


class Candidate(NamedTuple):
    """Settings to compare with those that were chosen before, and the shapes that they can change."""

    changes: Settings
    shapes: tuple[str, ...] = SHAPES


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate beside the settings that were chosen before it.

    Attributes
    ----------
    changes, base : dict
        What the candidate changes, and what was chosen before it.
    ms, base_ms : mapping
        Median milliseconds by shape; only shapes that the candidate changes and that were measured.
    ratios : mapping
        Median ratio of paired measurements by shape, candidate to base.
    score : float
        Mean of the ratios, weighted by shares; other shapes count as 1.
    noise : float
        Standard error of the score, from the scatter of the ratios.
    known : float
        Share of the shapes that were measured, or that the candidate cannot change.
    """

    changes: Settings
    base: Settings
    ms: Mapping[str, float]
    base_ms: Mapping[str, float]
    ratios: Mapping[str, float]
    score: float
    noise: float
    known: float = 1.0

    @property
    def settings(self) -> Settings:
        """All settings of the candidate that differ from the defaults."""
        return self.base | self.changes

    @property
    def is_gain(self) -> bool:
        """True if the candidate is faster by `LEAST_GAIN` beyond the noise, and enough shapes were measured."""
        is_sure = self.score + N_ERRORS * self.noise <= 1 - LEAST_GAIN
        return is_sure and self.known >= LEAST_KNOWN


@dataclass(frozen=True, slots=True)
class Tuning:
    """Result of a search.

    Attributes
    ----------
    chosen : dict
        Fields of `EngineConfig` that are left for other values than their defaults.
    shares : mapping
        Weight of each shape.
    comparisons : tuple of Comparison
    """

    chosen: Settings
    shares: Mapping[str, float]
    comparisons: tuple[Comparison, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the values for JSON."""
        return asdict(self)


class MeasurementError(CllmError):
    """A model cannot be measured with some settings, or not in time."""


class NotTunedError(CllmError):
    """Error of a search that compared nothing in the given time."""


def stages(config: EngineConfig, *, n_processors: int, has_tiles: bool) -> list[list[Candidate]]:
    """Return the candidates of each stage; none for a setting that the configuration sets itself.

    Two settings are not among them.  Without flash attention the memory for a prompt grows with `n_ctx`.  A smaller
    `n_ubatch` is slower for prompts that it does not divide.

    Parameters
    ----------
    n_processors : int
        Processors that the engine may use.
    has_tiles : bool
        True if llama.cpp multiplies matrices of the model by tiles.
    """
    kernels: list[Candidate] = []
    # llama.cpp reads this once per process: it must be a process of the engine's own.
    can_change_tiles = config.process and has_tiles and config.tiled_matmul
    if can_change_tiles:
        kernels.append(Candidate({"tiled_matmul": False}, TILED))
    if config.repack:
        kernels.append(Candidate({"repack": False}))
    if config.repack and can_change_tiles:
        kernels.append(Candidate({"tiled_matmul": False, "repack": False}))
    found = [kernels]
    n_single, n_batch = config.compute_threads
    has_own_threads = config.n_threads is not None or config.n_threads_batch is not None
    if config.model is not None and not has_own_threads:  # the embedded model needs one thread
        numbers = sorted({max(1, n_single - 1), n_single, min(n_processors, MAX_THREADS)})
        one = ({"n_threads": n, "n_threads_batch": n_batch} for n in numbers if n != n_single)
        several = ({"n_threads_batch": n} for n in numbers if n != n_batch)
        found.append([Candidate(each, ("1",)) for each in one])
        found.append([Candidate(each, SHAPES[1:]) for each in several])
    return [stage for stage in found if stage]


def tune(
    candidates: Sequence[Sequence[Candidate]],
    shares: Mapping[str, float],
    open_measurer: OpenMeasurer,
    *,
    limit_s: float,
    clock: Callable[[], float],
    on_stage: Callable[[Sequence[Candidate]], None] = lambda stage: None,
) -> Tuning:
    """Return the settings that are faster than the defaults, if any.

    Parameters
    ----------
    limit_s : float
        Seconds for the search.  Expensive shapes are left out where all of them take too long.

    Raises
    ------
    NotTunedError
        Nothing was compared in this time.
    """
    began = clock()
    search = _Search(shares, open_measurer, clock, began + limit_s)
    chosen: Settings = {}
    comparisons: list[Comparison] = []
    reason = "the model is too slow, or other programs use the processors"
    for stage in candidates:
        on_stage(stage)
        try:
            found = search.compare(chosen, stage)
        except MeasurementError as error:  # of the base; what was found before stays
            reason = str(error)
            continue
        comparisons += found
        best = min((c for c in found if c.is_gain), key=lambda c: c.score, default=None)
        if best is not None:
            chosen = best.settings
    if not comparisons and any(candidates):
        raise NotTunedError(
            f"no setting was compared in {clock() - began:.0f} s of at most {limit_s:.0f}: {reason}"
        )
    return Tuning(chosen, dict(shares), tuple(comparisons))


class _Search:
    def __init__(
        self,
        shares: Mapping[str, float],
        open_measurer: OpenMeasurer,
        clock: Callable[[], float],
        deadline: float,
    ) -> None:
        self._shares = shares
        self._open = open_measurer
        self._clock = clock
        self._deadline = deadline
        self._spins_s: list[float] = []

    def compare(self, base: Settings, stage: Sequence[Candidate]) -> list[Comparison]:
        """Measure the candidates and their base by turns; return those of which enough is known."""
        if self._left_s <= 0:
            return []
        with ExitStack() as stack:
            began = self._clock()
            own = stack.enter_context(self._open(base))
            own.turn(())
            open_s = self._clock() - began  # a candidate takes as long
            shapes = self._affordable(own, stage, open_s)
            measured = [
                _Measured(each, [shape for shape in shapes if shape in each.shapes])
                for each in stage
                if set(each.shapes) & set(shapes)
            ]
            for each in measured:
                with suppress(MeasurementError), ExitStack() as opening:
                    measurer = opening.enter_context(self._open(base | each.candidate.changes))
                    measurer.turn(())
                    each.measurer = measurer
                    stack.push(opening.pop_all())
            for turn in range(N_TURNS if measured else 0):
                turn_began = self._clock()
                try:
                    self._turn(own, shapes, measured, is_own_first=not turn % 2)
                except MeasurementError:  # of the base: the turns before it are whole
                    break
                if self._clock() - turn_began > self._left_s:
                    break
        compared = (self._comparison(base, each) for each in measured)
        return [each for each in compared if each is not None]

    def _turn(
        self,
        own: Measurer,
        shapes: Sequence[str],
        measured: Sequence[_Measured],
        *,
        is_own_first: bool,
    ) -> None:
        """Measure each once; a candidate that fails is not measured again."""
        readings = own.turn(shapes) if is_own_first else {}
        found: list[tuple[_Measured, Mapping[str, Reading]]] = []
        for each in measured if is_own_first else reversed(measured):
            try:
                found.append((each, each.turn()))
            except MeasurementError:
                each.measurer = None
        readings = readings or own.turn(shapes)
        for each, its in found:
            each.pairs.append((readings, its))
        for turn in (readings, *(its for _, its in found)):
            self._spins_s += [reading.spin_s for reading in turn.values()]

    @property
    def _left_s(self) -> float:
        return self._deadline - self._clock()

    def _affordable(self, own: Measurer, stage: Sequence[Candidate], open_s: float) -> list[str]:
        """Return the shapes for which there is time; those that take most for their share are left out first."""
        shapes = [s for s in SHAPES if any(s in candidate.shapes for candidate in stage)]
        began = self._clock()
        first = own.turn(shapes)
        # The spin loops take time, too.
        other_s = (self._clock() - began - sum(r.seconds for r in first.values())) / len(shapes)
        self._spins_s += [reading.spin_s for reading in first.values()]
        left_s = self._left_s - len(stage) * open_s

        def needed_s(shape: str) -> float:
            n_readings = 1 + sum(shape in candidate.shapes for candidate in stage)
            return N_TURNS_MIN * n_readings * (first[shape].seconds + max(0.0, other_s))

        for shape in sorted(shapes, key=lambda s: -needed_s(s) / max(1e-9, self._shares.get(s, 0))):
            if sum(map(needed_s, shapes)) <= left_s:
                break
            shapes.remove(shape)
        return shapes

    def _comparison(self, base: Settings, measured: _Measured) -> Comparison | None:
        calm_s = DISTURBED * min(self._spins_s)
        candidate = measured.candidate
        ratios: dict[str, float] = {}
        noises: dict[str, float] = {}
        times: dict[str, tuple[float, float]] = {}
        for shape in measured.shapes:
            calm = [
                (ours[shape].seconds, its[shape].seconds)
                for ours, its in measured.pairs
                if max(ours[shape].spin_s, its[shape].spin_s) <= calm_s
            ]
            if len(calm) < N_TURNS_MIN:
                continue
            each = [b / a for a, b in calm]
            ratios[shape] = median(each)
            deviation = median(abs(ratio - ratios[shape]) for ratio in each)
            noises[shape] = ERROR_OF_MEDIAN * deviation / math.sqrt(len(each))
            times[shape] = median(a for a, _ in calm), median(b for _, b in calm)
        if not ratios:
            return None
        shares = self._shares
        unknown = [s for s in SHAPES if s in candidate.shapes and s not in ratios]
        return Comparison(
            changes=candidate.changes,
            base=base,
            ms={shape: 1000 * b for shape, (_, b) in times.items()},
            base_ms={shape: 1000 * a for shape, (a, _) in times.items()},
            ratios=ratios,
            score=math.fsum(shares[shape] * ratios.get(shape, 1.0) for shape in SHAPES),
            noise=math.hypot(*(shares[shape] * noise for shape, noise in noises.items())),
            known=1 - math.fsum(shares[shape] for shape in unknown),
        )


@dataclass(slots=True)
class _Measured:
    """A candidate while it is measured."""

    candidate: Candidate
    shapes: Sequence[str]
    measurer: Measurer | None = None
    pairs: list[tuple[Mapping[str, Reading], Mapping[str, Reading]]] = field(default_factory=list)

    def turn(self) -> Mapping[str, Reading]:
        """Measure its shapes once."""
        if self.measurer is None:
            raise MeasurementError("it failed before")
        return self.measurer.turn(self.shapes)
