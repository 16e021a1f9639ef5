"""Random schedules on deterministic engines: every answer is that of the request alone, to the bit.

    python -m tests.reliability.determinism [--schedules 200] [--speculation SHARE] [MODEL/TYPE ...]

Each engine has random settings: sequences, rows of a tick, chunks, threads, prefix cache, host memory.
Each schedule is a random order of arrivals, cancellations and late readers.  `--speculation` drafts
tokens of which SHARE are right.  `--without` counts the differences without `deterministic`, and does
not require that there are none.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from cllm import Completion, Engine, EngineStatistics, InvalidArgumentError, SamplingParams
from cllm.testing.load_calls import make_calls
from cllm.testing.reproducibility import Round, difference
from tests.simulation.oracle_drafter import OracleDrafter, OracleEngine, known_answers
from tools import make_model, real_model

MODELS = (
    "embedded", "SmolLM2",
    *(f"qwen3-wide/{t}" for t in ("F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K")),
)  # fmt: skip
N_SCHEDULES = 200
N_SCHEDULES_EACH = 5  # of one engine
N_REQUESTS, N_OUTPUT = 7, 12
N_CTX_SEQ = 512
N_UNREAD = 8  # least `stream_buffer` with speculation: draft tokens need room in the buffer
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "seed": 4, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "seed": 5, "repeat_penalty": 1.2, "dry_multiplier": 0.5},
    {"mirostat": 2, "seed": 6},
)


@dataclasses.dataclass
class Tally:
    """Counts of one model: compared answers, different ones, preemptions, cached and drafted tokens."""

    n_compared: int = 0
    n_differing: int = 0
    n_preemptions: int = 0
    n_cached_tokens: int = 0
    n_drafted_tokens: int = 0
    n_accepted_tokens: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)

    def count(self, statistics: EngineStatistics) -> None:
        """Add the counts of one engine."""
        assert statistics.n_discrepancies == 0
        self.n_preemptions += statistics.n_preemptions
        self.n_cached_tokens += statistics.n_cached_tokens
        self.n_drafted_tokens += statistics.n_drafted_tokens
        self.n_accepted_tokens += statistics.n_accepted_tokens


def model_path(name: str) -> Path | None:
    """The file of a model; None for the embedded one."""
    if name == "embedded":
        return None
    if name == "SmolLM2":
        return real_model.fetch()
    model, _, file_type = name.partition("/")
    return make_model.ensure(model, file_type)  # type: ignore[arg-type]


def drawn_options(choose: random.Random) -> dict[str, Any]:
    """The settings of one engine."""
    n_seq_max = choose.choice([1, 2, 3, 5])
    return {
        "n_seq_max": n_seq_max,
        "n_ctx": N_CTX_SEQ * n_seq_max,
        "n_batch": choose.choice([7, 16, 100, 512]),
        "n_prefill_chunk": choose.choice([7, 60, 128, 512]),
        "n_threads": choose.choice([1, 2]),
        "prefix_cache": choose.random() < 0.7,
        "prefix_cache_bytes": choose.choice([0, None]),
        "stream_buffer": choose.choice([1, 64]),
    }


Request = tuple[list[int], SamplingParams]


def drawn_requests(choose: random.Random, n_vocab: int) -> list[Request]:
    """Draw requests with prompts of 1 to 290 tokens, which share beginnings."""
    head = [choose.randrange(3, n_vocab) for _ in range(300)]
    requests = []
    for _ in range(N_REQUESTS):
        n_shared, n_own = choose.choice([0, 1, 63, 64, 200]), choose.choice([1, 2, 9, 90])
        prompt = [*head[:n_shared], *(choose.randrange(3, n_vocab) for _ in range(n_own))]
        params = SamplingParams(
            max_tokens=choose.choice([1, N_OUTPUT]), logprobs=2, ignore_eos=True,
            **choose.choice(SAMPLINGS),
        )  # fmt: skip
        requests.append((prompt, params))
    return requests


async def alone(
    path: Path | None, choose: random.Random, *, deterministic: bool
) -> tuple[list[Request], list[Completion]]:
    """Draw requests, and answer each alone on an engine with one sequence and no prefix cache."""
    options: dict[str, Any] = {"n_seq_max": 1, "n_ctx": N_CTX_SEQ, "prefix_cache": False}
    async with Engine(path, deterministic=deterministic, **options) as engine:
        assert engine.model is not None
        requests = drawn_requests(choose, engine.model.n_vocab)
        return requests, [await engine.generate(*request) for request in requests]


async def examine(
    name: str, n_schedules: int, *, deterministic: bool = True, share: float | None = None
) -> Tally:
    """Run all schedules of a model; with `share`, use an oracle whose drafts are right that often."""
    tally, path = Tally(), model_path(name)
    layout: dict[str, Any] = {} if deterministic else {"kv_unified": True}
    for first in range(0, n_schedules, N_SCHEDULES_EACH):
        choose = random.Random(f"{name} {first}")
        options = {**drawn_options(choose), **layout, "deterministic": deterministic}
        requests, expected = await alone(path, choose, deterministic=deterministic)
        if share is None:
            made = Engine(path, **options)
        else:
            drafter = OracleDrafter(known_answers(expected), share)
            options["stream_buffer"] = max(options["stream_buffer"], N_UNREAD)
            made = OracleEngine(path, drafter=drafter, **options)
        async with made as engine:
            calls = [
                call
                for prompt, params in requests
                for call in make_calls(engine, [prompt], params, {})
            ]
            for number in range(first, min(first + N_SCHEDULES_EACH, n_schedules)):
                found = await Round(engine, calls, random.Random(f"{name} {number}")).run()
                for index, completion in found.items():
                    said = difference(completion, expected[index])
                    tally.n_compared += 1
                    tally.n_differing += bool(said)
                    if said:
                        tally.examples.append(f"schedule {number}, {options}: {said}")
            tally.count(engine.statistics())
    return tally


def main() -> int:
    """Run the command line; 1 if an answer differs, but 0 with `--without`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL/TYPE")
    parser.add_argument("--schedules", type=int, default=N_SCHEDULES)
    parser.add_argument("--without", action="store_true", help="count without deterministic")
    parser.add_argument("--speculation", type=float, metavar="SHARE", help="share of right drafts")
    given = parser.parse_args()
    n_wrong = 0
    for name in given.models:
        try:
            tally = anyio.run(
                partial(
                    examine,
                    name,
                    given.schedules,
                    deterministic=not given.without,
                    share=given.speculation,
                )
            )
        except InvalidArgumentError as refused:
            print(f"{name}: refused: {refused}", flush=True)
            continue
        print(
            f"{name}: {given.schedules} schedules, {tally.n_compared} answers, "
            f"{tally.n_differing} differ from the answer alone; {tally.n_preemptions} preemptions, "
            f"{tally.n_cached_tokens} tokens from the prefix cache, "
            f"{tally.n_drafted_tokens} drafted, {tally.n_accepted_tokens} of them accepted",
            *tally.examples[:2], sep="\n    ", flush=True,
        )  # fmt: skip
        n_wrong += tally.n_differing
    return int(n_wrong > 0 and not given.without)


if __name__ == "__main__":
    sys.exit(main())
