"""Run llama-batched-bench: a loop in C++ that only decodes, and therefore an upper limit of the speed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.side_by_side.records import BATCHED_BENCH
from benchmarks.side_by_side.workload import Setup


def raw_command(tools: Path, setup: Setup, n_prompt: int, n_output: int) -> list[str]:
    """Return the command of llama-batched-bench, with the unified layout of the KV cache."""
    return [
        str(tools / BATCHED_BENCH),
        *("-m", str(setup.model), "-c", str(setup.n_ctx)),
        *("-b", str(setup.n_batch), "-ub", str(setup.n_ubatch)),
        *("-t", str(setup.n_threads), "-tb", str(setup.n_threads)),
        *("-npp", str(n_prompt), "-ntg", str(n_output), "-npl", str(setup.n_seq_max)),
        *("--kv-unified", "--output-format", "jsonl"),
    ]


def raw_decode_rate(tools: Path, setup: Setup, n_prompt: int, n_output: int) -> float:
    """Tokens per second that all sequences decode together."""
    command = raw_command(tools, setup, n_prompt, n_output)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return float(lines[-1]["speed_tg"])
