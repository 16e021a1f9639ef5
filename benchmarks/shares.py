"""Where the time of a tick goes: 32 streams on a random-weight model with a 152k vocabulary.

Each kind of sampling by turns; the share of every stage in all of the inference thread's time, and
what sampling, detokenizing and delivering take together.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import median
from typing import Any

import anyio

from benchmarks.measure import machine
from cllm import Engine, TokenStream
from tools import make_model

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {"seed": 1},
    "repeat penalty": {"seed": 1, "repeat_penalty": 1.1},
}
STAGES = ("plan", "decode", "sample", "detokenize", "deliver")


async def run(engine: Engine, n_streams: int, n_tokens: int, **sampling: Any) -> dict[str, float]:
    """Seconds of each stage while all streams are read to their ends."""
    before = asdict(engine.statistics().tick_times)

    async def read(stream: TokenStream) -> None:
        async with stream:
            async for _ in stream:
                pass

    async with anyio.create_task_group() as tasks:
        for n in range(n_streams):
            prompt = list(range(1000 + 8 * n, 1008 + 8 * n))
            tasks.start_soon(read, engine.stream(prompt, max_tokens=n_tokens, **sampling))
    after = asdict(engine.statistics().tick_times)
    return {stage: after[f"{stage}_s"] - before[f"{stage}_s"] for stage in STAGES}


async def measure(options: argparse.Namespace) -> None:
    """Everything, printed."""
    path = make_model.ensure(options.model, options.file_type)
    print(f"{options.model} {options.file_type}: {options.streams} streams, {machine()}")
    async with Engine(path, n_ctx=8192, n_seq_max=options.streams, prefix_cache=False) as engine:
        shares: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
        for _ in range(options.turns):
            for name, sampling in CASES.items():
                times = await run(engine, options.streams, options.tokens, **sampling)
                total = sum(times.values())
                shares[name].append({stage: 100 * times[stage] / total for stage in STAGES})
                shares[name][-1]["ms a tick"] = 1e3 * total / options.tokens
    for name, turns in shares.items():
        middle = {stage: median(turn[stage] for turn in turns) for stage in (*STAGES, "ms a tick")}
        text = sum(middle[stage] for stage in STAGES[2:])
        shown = "  ".join(f"{stage} {middle[stage]:5.1f} %" for stage in STAGES)
        print(f"{name:15} {shown}   sample + detokenize + deliver {text:4.1f} %  "
              f"({middle['ms a tick']:.2f} ms a tick)")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="two-layer")
    parser.add_argument("--file-type", default="F16")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--turns", type=int, default=4)
    anyio.run(measure, parser.parse_args())
