"""Measure whether the last of 1,000 sequential requests takes longer than the first.

Requests are identical or distinct, of 1 or 16 tokens, with the prefix cache on or off.  The program prints the
decode time of the last hundred divided by that of the first hundred (medians, the best of three runs).  It
also prints the rows of a request, the growth of memory, and the KV cells in use at the end.  Then it runs
5,000 cycles of four tokens on the context itself, on rotating seq_ids.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import anyio

from benchmarks.measure import machine, rss_mib
from cllm import Engine
from cllm.bindings import Batch, Context, Model
from cllm.engine.config import EMBEDDED_MODEL


@dataclass(frozen=True)
class Run:
    """Results of one run: ratio of times, rows of a request, growth in MiB, KV cells in use at the end."""

    ratio: float
    n_rows: set[int]
    growth: float
    n_cells: int


async def sequential(
    n_requests: int, *, max_tokens: int, is_distinct: bool, prefix_cache: bool
) -> Run:
    """Run the given number of requests one after another."""
    seconds, n_rows = [], []
    async with Engine(
        prefix_cache=prefix_cache, n_threads=1, n_threads_batch=1, speculation=None
    ) as engine:

        async def one(number: int) -> None:
            before = engine.statistics()
            first = 100 + number % 800 if is_distinct else 100
            prompt = f"count:{first}..{first + 40}"  # an answer of 164 tokens
            await engine.generate(prompt, max_tokens=max_tokens, temperature=0)
            await engine.audit()
            after = engine.statistics()
            seconds.append(after.tick_times.decode_s - before.tick_times.decode_s)
            n_rows.append(after.n_decode_rows - before.n_decode_rows)

        for number in range(50):  # warm-up: fills the prefix cache
            await one(number)
        seconds.clear()
        n_rows.clear()
        rss = rss_mib()
        for number in range(n_requests):
            await one(50 + number)
        growth = rss_mib() - rss
        # No call of llama.cpp counts cells.  If one was still held, exactly n_ctx would not fit.
        await engine.reset_prefix_cache()
        assert await engine.audit() == []
        n_ctx = engine.model.n_ctx
        full = await engine.generate([65] * n_ctx, max_tokens=1, temperature=0)
        assert full.usage.n_output == 1
        n_cells = engine.statistics().n_kv_cells_used
    ratio = median(seconds[-100:]) / median(seconds[:100])
    return Run(ratio, set(n_rows), growth, n_cells)


def rotating(n_cycles: int, *, kv_unified: bool) -> tuple[float, float]:
    """Run cycles on eight seq_ids; return the time of the last tenth over the first, and the growth in MiB."""
    seconds = []
    with (
        Model(EMBEDDED_MODEL) as model,
        Context(
            model, n_ctx=2048, n_seq_max=8, n_threads=1, n_threads_batch=1, kv_unified=kv_unified
        ) as context,
    ):
        batch = Batch(8)
        rss = rss_mib()
        for cycle in range(n_cycles):
            seq_id = cycle % 8
            started = time.perf_counter()
            batch.clear()
            batch.add(seq_id, [256, 65, 66, 67], 0, n_outputs=1)
            context.decode(batch)
            context.seq_rm(seq_id)
            seconds.append(time.perf_counter() - started)
            assert context.seq_pos_max(seq_id) is None
        growth = rss_mib() - rss
    tenth = n_cycles // 10
    return median(seconds[-tenth:]) / median(seconds[:tenth]), growth


async def measure(options: argparse.Namespace) -> None:
    """Run all measurements and print them."""
    print(f"{Path(EMBEDDED_MODEL).name}, {options.requests} requests each; {machine()}")
    for max_tokens, is_distinct, prefix_cache in product((1, 16), (False, True), (False, True)):
        runs = [
            await sequential(
                options.requests,
                max_tokens=max_tokens,
                is_distinct=is_distinct,
                prefix_cache=prefix_cache,
            )
            for _ in range(options.runs)
        ]
        ratio = min(run.ratio for run in runs)
        rows = sorted(set().union(*(run.n_rows for run in runs)))
        print(
            f"max_tokens {max_tokens:2}  {'distinct ' if is_distinct else 'identical'}  "
            f"prefix cache {'on ' if prefix_cache else 'off'}  last/first hundred {ratio:.3f}  "
            f"rows {rows}  memory {max(run.growth for run in runs):+.1f} MiB  "
            f"cells in use at the end {max(run.n_cells for run in runs)}, exactly n_ctx tokens fit"
        )
    for kv_unified in (True, False):
        cycles = [rotating(options.cycles, kv_unified=kv_unified) for _ in range(options.runs)]
        print(
            f"{options.cycles} tiny cycles, 8 rotating seq_ids, "
            f"{'unified     ' if kv_unified else 'per-sequence'}  last/first tenth "
            f"{min(cycles)[0]:.3f}  memory {max(growth for _, growth in cycles):+.1f} MiB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cycles", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=3)
    anyio.run(measure, parser.parse_args())
