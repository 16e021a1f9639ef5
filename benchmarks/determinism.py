"""Measure the cost of `deterministic`: decode of 1, 4, 8 and 16 streams, and prompts, against the default.

    python -m benchmarks.determinism [MODEL/TYPE ...]

Both take turns, each in its own process, because llama.cpp reads one of the settings only once per process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import anyio

from benchmarks.measure import machine
from cllm import Engine
from tools import make_model, real_model

MODELS = ("SmolLM2", *(f"qwen3-wide/{t}" for t in ("F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K")))
N_TURNS = 3
N_TOKENS = 16  # of each stream
WIDTHS, PROMPTS = (1, 4, 8, 16), (64, 256)


async def measured(path: Path, *, deterministic: bool) -> dict[str, float]:
    """Return the seconds of each case, the shorter of two runs."""
    options = {"n_ctx": 16 * 1024, "n_seq_max": 16, "prefix_cache": False}
    seconds: dict[str, float] = {}
    async with Engine(path, deterministic=deterministic, **options) as engine:  # type: ignore[arg-type]
        for _ in range(2):
            for n_streams in WIDTHS:
                prompts = [[5 + i, 9, 11] for i in range(n_streams)]
                completions = await engine.generate_all(
                    prompts, temperature=0.0, ignore_eos=True, max_tokens=N_TOKENS
                )
                took = median(c.timings.decode_s for c in completions)
                key = f"{n_streams} streams"
                seconds[key] = min(took, seconds.get(key, took))
            for n_tokens in PROMPTS:
                started = time.perf_counter()
                prompt = [3 + (7 * i) % 200 for i in range(n_tokens)]
                await engine.generate(prompt, max_tokens=1, temperature=0.0)
                took = time.perf_counter() - started
                key = f"prompt of {n_tokens}"
                seconds[key] = min(took, seconds.get(key, took))
    return seconds


def turn(path: Path, *, deterministic: bool) -> dict[str, float]:
    """Run `measured` in a child process."""
    command = [sys.executable, "-m", "benchmarks.determinism", "--measure", str(path)]
    done = subprocess.run(
        [*command, *["--deterministic"] * deterministic], check=True, capture_output=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL/TYPE")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(
            json.dumps(
                anyio.run(partial(measured, given.measure, deterministic=given.deterministic))
            )
        )
        return
    print(f"{machine()}; deterministic / default, median of {N_TURNS} turns (least, most)")
    for name in given.models:
        model, _, file_type = name.partition("/")
        path = real_model.fetch() if name == "SmolLM2" else make_model.ensure(model, file_type)
        turns = [
            (turn(path, deterministic=False), turn(path, deterministic=True))
            for _ in range(N_TURNS)
        ]
        shown = []
        for case in turns[0][0]:
            ratios = sorted(exact[case] / plain[case] for plain, exact in turns)
            shown.append(f"{case} {median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})")
        print(f"{name}: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
