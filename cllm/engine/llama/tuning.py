"""Tuning: find the fastest of the settings that change speed, and at most the rounding.  Pure.

Which is fastest depends on the processor, on the types of the weights and on the shape of a batch.  Candidates
are compared in stages.  Each stage starts from the settings that the stage before has chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple, Protocol

from cllm.engine.config import PLAIN_TYPES, EngineConfig
from cllm.engine.core.tick_shares import SHAPES
from cllm.errors import CllmError

Settings = dict[str, bool | int]  # fields of `EngineConfig` that differ from its defaults

LEAST_GAIN = 0.03  # beyond noise, for which a default is left
N_TURNS, N_TURNS_MIN = 5, 2  # measurements of each candidate
# Ratio to the fastest spin loop above which a measurement is discarded.  Compared with the median, a machine that
# another program keeps busy would look calm.
DISTURBED = 1.4
WHOLE_PROMPT = ("p256",)


class Reading(NamedTuple):
    """Seconds of a decode, and of the slower spin loop around it."""

    seconds: float
    spin_s: float


class Measurer(Protocol):
    """A model with some settings, in a process of its own."""

    def turn(self, shapes: Sequence[str]) -> Mapping[str, Reading]:
        """Measure each shape once."""


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
    settings, base : dict
        What both change of the defaults.
    ms, base_ms : mapping
        Median milliseconds by shape; only shapes that the candidate changes and that were measured.
    ratios : mapping
        Median ratio of paired measurements by shape, candidate to base.
    score : float
        Mean of the ratios, weighted by shares; other shapes count as 1.
    noise : float
        Median absolute deviation of the ratios, weighted as the score.
    """

    settings: Settings
    base: Settings
    ms: Mapping[str, float]
    base_ms: Mapping[str, float]
    ratios: Mapping[str, float]
    score: float
    noise: float

    @property
    def changes(self) -> Settings:
        """Settings of the candidate alone."""
        return {name: v for name, v in self.settings.items() if self.base.get(name) != v}

    @property
    def is_gain(self) -> bool:
        """True if the candidate is faster by `LEAST_GAIN` and the noise."""
        return self.score + self.noise <= 1 - LEAST_GAIN


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


class TooSlowToTuneError(CllmError):
    """The model is too large or too slow to be measured in the given time."""


def stages(
    config: EngineConfig, *, n_processors: int, has_tiles: bool, has_openmp: bool, embeds: bool
) -> list[list[Candidate]]:
    """Return the candidates of each stage; none for a setting that the configuration sets itself.

    Parameters
    ----------
    n_processors : int
        Processors that the engine may use.
    has_tiles : bool
        True if llama.cpp multiplies matrices of the model by tiles.
    has_openmp : bool
        True if the library computes with OpenMP's threads.
    embeds : bool
        True if the engine computes vectors: `n_ubatch` then limits the length of a text.
    """
    kernels: list[Settings] = []
    # llama.cpp reads this once per process: it must be a process of the engine's own.
    can_change_tiles = config.process and has_tiles and config.tiled_matmul
    if can_change_tiles:
        kernels.append({"tiled_matmul": False})
    if config.repack:
        kernels.append({"repack": False})
    if config.repack and can_change_tiles:
        kernels.append({"tiled_matmul": False, "repack": False})
    found = [[Candidate(each) for each in kernels]]
    n_single, n_batch = config.compute_threads
    if config.model is not None:  # the embedded model is too small for several threads
        numbers = sorted({max(1, n_single - 1), n_single, n_processors})
        if config.n_threads is None:
            one = ({"n_threads": n, "n_threads_batch": n_batch} for n in numbers if n != n_single)
            found.append([Candidate(each, ("1",)) for each in one])
        if config.n_threads is None and config.n_threads_batch is None:
            several = ({"n_threads_batch": n} for n in numbers if n != n_batch)
            found.append([Candidate(each, SHAPES[1:]) for each in several])
    if config.n_ubatch == EngineConfig().n_ubatch and not embeds:
        found.append([Candidate({"n_ubatch": n}, WHOLE_PROMPT) for n in (64, 128)])
    if config.flash_attn is None and config.type_v in PLAIN_TYPES:
        found.append([Candidate({"flash_attn": False})])
    if config.poll is None and not has_openmp:
        found.append([Candidate({"poll": level}) for level in (0, 100)])
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
    TooSlowToTuneError
        Nothing was measured in this time.
    """
    search = _Search(shares, open_measurer, clock, clock() + limit_s)
    chosen: Settings = {}
    comparisons: list[Comparison] = []
    for stage in candidates:
        on_stage(stage)
        found = search.compare(chosen, stage)
        comparisons += found
        best = min((c for c in found if c.is_gain), key=lambda c: c.score, default=None)
        if best is not None:
            chosen = best.settings
    if not comparisons and any(candidates):
        raise TooSlowToTuneError(
            f"no setting could be compared in {limit_s:.0f} s: the model is too slow, or other programs use the "
            "processors"
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
        self._shapes: list[str] = list(SHAPES)  # that there is time for
        self._spins_s: list[float] = []

    def compare(self, base: Settings, stage: Sequence[Candidate]) -> list[Comparison]:
        """Measure the candidates and their base by turns; return those of which enough is known."""
        if self._left_s <= 0:
            return []
        turns: list[list[Mapping[str, Reading]]] = []
        with ExitStack() as stack:
            began = self._clock()
            measurers = [stack.enter_context(self._open(base))]
            first = measurers[0].turn(self._shapes)
            self._spins_s += [reading.spin_s for reading in first.values()]
            # Each candidate takes as long to be loaded, and as long for each turn.
            open_s = self._clock() - began - sum(reading.seconds for reading in first.values())
            if not self._leave_out_expensive(first, len(stage), open_s):
                return []
            stage = [each for each in stage if set(each.shapes) & set(self._shapes)]
            for candidate in stage:
                measurers.append(stack.enter_context(self._open(base | candidate.changes)))
            wanted = [SHAPES, *(candidate.shapes for candidate in stage)]
            asked = [[shape for shape in self._shapes if shape in each] for each in wanted]
            for turn in range(N_TURNS):
                turn_began = self._clock()
                found: dict[int, Mapping[str, Reading]] = {}
                order = range(len(measurers))
                for i in order if turn % 2 else reversed(order):
                    found[i] = measurers[i].turn(asked[i])
                turns.append([found[i] for i in order])
                if self._clock() - turn_began > self._left_s:
                    break
        self._spins_s += [r.spin_s for turn in turns for each in turn for r in each.values()]
        compared = (
            self._comparison(base, candidate, [(turn[0], turn[i]) for turn in turns])
            for i, candidate in enumerate(stage, start=1)
        )
        return [each for each in compared if each is not None]

    @property
    def _left_s(self) -> float:
        return self._deadline - self._clock()

    def _leave_out_expensive(
        self, first: Mapping[str, Reading], n_candidates: int, open_s: float
    ) -> bool:
        """Leave out the most expensive shapes until there is time for a few turns; False if there is none."""
        left_s = self._left_s - n_candidates * open_s
        n_decodes = N_TURNS_MIN * (1 + n_candidates)
        for shape in sorted(self._shapes, key=lambda shape: -first[shape].seconds):
            if n_decodes * sum(first[each].seconds for each in self._shapes) <= left_s:
                return True
            self._shapes.remove(shape)
        return False

    def _comparison(
        self,
        base: Settings,
        candidate: Candidate,
        pairs: Sequence[tuple[Mapping[str, Reading], Mapping[str, Reading]]],
    ) -> Comparison | None:
        calm_s = DISTURBED * min(self._spins_s)
        ratios: dict[str, float] = {}
        noises: dict[str, float] = {}
        times: dict[str, tuple[float, float]] = {}
        for shape in self._shapes:
            calm = [
                (ours[shape].seconds, its[shape].seconds)
                for ours, its in pairs
                if shape in its and max(ours[shape].spin_s, its[shape].spin_s) <= calm_s
            ]
            if len(calm) < N_TURNS_MIN:
                continue
            each = [b / a for a, b in calm]
            ratios[shape] = median(each)
            noises[shape] = median(abs(ratio - ratios[shape]) for ratio in each)
            times[shape] = median(a for a, _ in calm), median(b for _, b in calm)
        if not ratios:
            return None
        # A shape that was not measured says nothing; one that the candidate cannot change is as before.
        unchanged = set(SHAPES) - set(candidate.shapes)
        weights = {shape: self._shares.get(shape, 0.0) for shape in {*ratios, *unchanged}}
        total = math.fsum(weights.values())
        if not total:
            return None
        known = {shape: weight / total for shape, weight in weights.items()}
        return Comparison(
            settings=base | candidate.changes,
            base=base,
            ms={shape: 1000 * b for shape, (_, b) in times.items()},
            base_ms={shape: 1000 * a for shape, (a, _) in times.items()},
            ratios=ratios,
            score=math.fsum(part * ratios.get(shape, 1.0) for shape, part in known.items()),
            noise=math.fsum(part * noises.get(shape, 0.0) for shape, part in known.items()),
        )
