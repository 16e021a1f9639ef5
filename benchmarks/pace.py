"""Measure the gaps between tokens of streams that a long prompt joins, with and without `target_itl_ms`.

The program first measures the median tick of the streams alone.  Then the same prompt joins by turns
(A B A B …): greedy, with `target_itl_ms` off, and paced, with a multiple of that tick.  Gaps are measured where
a user sees them: between two deltas of a stream, on the event loop.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import anyio

from benchmarks.measure import TEXT_TOKENS, machine, percentile
from cllm import Engine
from tools import make_model

N_STREAMS = 4


@dataclass
class Run:
    """One prompt among the streams."""

    gaps_s: list[float]
    prefill_s: float
    n_prompt: int

    @property
    def rate(self) -> float:
        """Prompt tokens per second."""
        return self.n_prompt / self.prefill_s


async def streams_and(engine: Engine, prompt: list[int] | None, seconds: float) -> Run:
    """Run four decoding streams, and measure for some seconds or until a prompt has its first token."""
    gaps: list[float] = []
    is_measuring = False

    async def read(seed: int) -> None:
        tokens = random.Random(seed).choices(TEXT_TOKENS, k=16)
        nonlocal is_measuring
        while True:  # random weights may end an answer at any token
            stream = engine.stream(tokens, temperature=1.0, seed=seed)
            last = None
            async with stream:
                async for _ in stream:
                    now = time.perf_counter()
                    if is_measuring and last is not None:
                        gaps.append(now - last)
                    last = now

    async with anyio.create_task_group() as tasks:
        for seed in range(N_STREAMS):
            tasks.start_soon(read, seed)
        await anyio.sleep(seconds / 2)
        is_measuring = True
        started = time.perf_counter()
        if prompt is None:
            await anyio.sleep(seconds)
        else:
            await engine.generate(prompt, max_tokens=1, temperature=0)
        elapsed = time.perf_counter() - started
        tasks.cancel_scope.cancel()
    return Run(gaps, elapsed, len(prompt or ()))


async def measure(options: argparse.Namespace) -> None:
    """Run all measurements and print them."""
    path = make_model.ensure(options.model, options.file_type)
    prompt = random.Random(7).choices(TEXT_TOKENS, k=options.prompt)
    settings: dict[str, Any] = {
        "n_ctx": 4096,
        "n_seq_max": N_STREAMS + 1,
        "prefix_cache": False,
        "flash_attn": options.flash_attn == "on",
    }
    print(
        f"{options.model} {options.file_type}, flash attention {options.flash_attn}, "
        f"{N_STREAMS} streams, {options.prompt} tokens join"
    )
    print(machine())
    async with Engine(path, **settings) as engine:
        alone = await streams_and(engine, None, 5.0)
    tick_s = median(alone.gaps_s)
    target_s = options.factor * tick_s
    print(f"tick of {N_STREAMS} rows {tick_s * 1e3:.1f} ms, target {target_s * 1e3:.1f} ms")
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * options.turns):
        is_paced = turn % 2 == 1
        target_itl_ms = target_s * 1e3 if is_paced else None
        async with Engine(path, target_itl_ms=target_itl_ms, **settings) as engine:
            run = await streams_and(engine, prompt, 3.0)
        rates[is_paced].append(run.rate)
        p50, p99, worst = (percentile(run.gaps_s, p) / target_s for p in (50, 99, 100))
        print(
            f"{'paced ' if is_paced else 'greedy'}  gap / target: p50 {p50:5.2f}  p99 {p99:5.2f}  "
            f"max {worst:5.2f}  ({len(run.gaps_s)} gaps)   prefill {run.rate:6.1f} tokens/s"
        )
    kept = median(rates[True]) / median(rates[False])
    print(f"prefill throughput kept: {kept:.2f} of greedy")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--file-type", default="F16")
    parser.add_argument("--flash-attn", choices=("on", "off"), default="off")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=2)
    anyio.run(measure, parser.parse_args())
