"""500 random schedules: whatever else is in the batch, an answer is the one computed alone.

Each schedule is a number: the same number is the same requests, arrivals, readers and cancellations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from cllm import Completion, Engine, FinishReason, SamplingOptions
from cllm.testing.reproducibility import DeltaClock
from tests.conftest import QUIET
from tests.simulation.oracle_drafter import OracleDrafter, OracleEngine, known_answers

pytestmark = [pytest.mark.anyio, pytest.mark.full]

N_SCHEDULES = 50  # for each configuration and each event loop
GREEDY: SamplingOptions = {"temperature": 0.0}
# Equal heads of every length, short and long answers, more than one byte for a character.
PROMPTS = [
    *[f"count:{n}..{n + length}" for n in (3, 10, 11, 120) for length in (2, 12, 25)],
    *[f"{a}+{b}=" for a, b in ((1, 1), (12, 30), (12, 31), (99, 99))],
    *[f"repeat:{text}" for text in ("abc", "abcdef", "你好🙂", "Hello, world")],
    *[f"reverse:{text}" for text in ("abc", "streams")],
    *["a note\n" * n + "count:5..19" for n in (1, 4, 9)],
]
# A sequence that waits for a slow reader is preempted by the next, again and again.
TIGHT: dict[str, Any] = {"n_ctx": 160, "n_seq_max": 2, "n_batch": 8, "stream_buffer": 1}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {"n_ctx": 4096, "n_seq_max": 4},
    "tight": TIGHT,
    "tight without prefixes": {**TIGHT, "prefix_cache": False},
    "per-sequence": {"n_ctx": 1024, "n_seq_max": 4, "n_batch": 32, "kv_unified": False},
    "one at a time": {"n_ctx": 256, "n_seq_max": 1, "n_batch": 16},
}


@dataclass
class Planned:
    """One request of a schedule."""

    prompt: str
    arrives_after: int  # deltas that the whole schedule has seen
    max_tokens: int | None
    priority: int
    cancelled_after: int | None
    stops_reading_after: int | None


@dataclass
class Schedule:
    """The requests of a number, and what became of them."""

    number: int
    requests: list[Planned] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    clock: DeltaClock = field(default_factory=DeltaClock)

    def __post_init__(self) -> None:
        choose = random.Random(self.number)
        for _ in range(choose.randint(2, 7)):
            self.requests.append(
                Planned(
                    prompt=choose.choice(PROMPTS),
                    arrives_after=choose.choice([0, 0, 1, 5, 20, 50]),
                    max_tokens=choose.choice([None, None, 1, 9]),
                    priority=choose.randint(-1, 1),
                    cancelled_after=choose.choice([None, None, None, 0, 3, 20]),
                    stops_reading_after=choose.choice([None, None, None, 1, 8]),
                )
            )

    async def run(self, engine: Engine) -> None:
        """All requests, each in a task of its own."""
        async with anyio.create_task_group() as tasks:
            for index in range(len(self.requests)):
                tasks.start_soon(self._run_one, engine, index)

    async def _run_one(self, engine: Engine, index: int) -> None:
        planned, clock = self.requests[index], self.clock
        await clock.wait(planned.arrives_after)
        stream = engine.stream(
            planned.prompt, max_tokens=planned.max_tokens, priority=planned.priority, temperature=0
        )
        clock.count(n_streaming=1)
        async with stream:
            n_read = 0
            while n_read != planned.cancelled_after:
                if n_read == planned.stops_reading_after:
                    clock.count(n_streaming=-1)
                    await clock.wait(clock.n_deltas + 30)
                    clock.count(n_streaming=1)
                try:
                    await stream.__anext__()
                except StopAsyncIteration:
                    break
                n_read += 1
                clock.count(n_deltas=1)
            await stream.cancel()
            self.completions[index] = await stream.completion()
        clock.count(n_streaming=-1)

    def check(self, oracle: dict[str, tuple[int, ...]]) -> None:
        """Who ended by itself gave what it gives alone; the others the beginning of it."""
        for index, completion in self.completions.items():
            planned, ids = self.requests[index], completion.token_ids
            what = f"schedule {self.number}, {planned}"
            assert ids == oracle[planned.prompt][: len(ids)], what
            if completion.finish_reason is FinishReason.STOP:
                assert ids == oracle[planned.prompt], what
            elif completion.finish_reason is FinishReason.LENGTH:
                assert len(ids) == planned.max_tokens, what
            else:
                assert completion.finish_reason is FinishReason.CANCELLED, what
                assert planned.cancelled_after is not None, what
        assert len(self.completions) == len(self.requests)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("free_rows")
@pytest.mark.parametrize("share", [None, 0.6], ids=["no guesses", "guesses"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
async def test_every_answer_is_the_one_computed_alone(
    anyio_backend: str, name: str, share: float | None
) -> None:
    async with Engine(n_ctx=512, n_seq_max=1, prefix_cache=False, **QUIET) as engine:
        alone = {p: await engine.generate(p, **GREEDY) for p in PROMPTS}
    oracle = {prompt: completion.token_ids for prompt, completion in alone.items()}
    options: dict[str, Any] = {"stream_buffer": 4, **CONFIGURATIONS[name], **QUIET}
    made = Engine(**options)
    if share is not None:
        drafter = OracleDrafter(known_answers(alone.values()), share)
        options["stream_buffer"] = 4  # guesses need room at the reader
        made = OracleEngine(drafter=drafter, **options)
    async with made as engine:
        for number in range(N_SCHEDULES):
            schedule = Schedule(number + 1000 * list(CONFIGURATIONS).index(name))
            with anyio.fail_after(100):
                await schedule.run(engine)
            schedule.check(oracle)
            assert await engine.audit() == []
            assert engine.statistics().n_kv_cells_used == 0
        statistics = engine.statistics()
        assert statistics.n_finished[FinishReason.CANCELLED] > 0
        assert statistics.n_finished[FinishReason.ERROR] == 0
        assert (statistics.n_accepted_tokens > 0) == (share is not None)
        # How many depends on how soon readers read, and so on the machine.
        assert statistics.n_preemptions > 0 or "tight" not in name
        assert (statistics.n_cached_tokens > 0) == (name != "tight without prefixes")
