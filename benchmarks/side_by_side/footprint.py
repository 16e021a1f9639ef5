"""i: what cllm costs a process besides the model, its cache and llama.cpp's own buffers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.side_by_side.engine_loop import Decoding, command_of
from benchmarks.side_by_side.peers import Peers
from benchmarks.side_by_side.raw_loop import raw_command
from benchmarks.side_by_side.workload import Setup

N_PROMPT, N_OUTPUT = 64, 16
IMPORT = "import time; t = time.perf_counter(); import cllm; print(time.perf_counter() - t)"
FIRST_TOKEN = """
import asyncio, json, sys, cllm
async def main(given):
    async with cllm.Engine(**given) as engine, engine.stream("1+1=", max_tokens=1) as stream:
        async for _ in stream:
            print(flush=True)
asyncio.run(main(json.loads(sys.argv[1])))
"""


def measure(peers: Peers, setup: Setup) -> Mapping[str, float]:
    """Measure memory, import and the first token, each in a fresh process.

    `rss_mib` is the peak memory of a process that decodes with cllm.  `rss_above_mib` is that minus the peak
    of llama-batched-bench, which holds the same model, cache and buffers and does the same work.
    """
    metrics = {"import_s": import_s(), "cold_ttft_s": cold_ttft_s(setup)}
    if peers.tools is not None:
        ours = peak_rss_mib(command_of(Decoding(setup, N_PROMPT, N_OUTPUT)))
        raw = peak_rss_mib(raw_command(peers.tools, setup, N_PROMPT, N_OUTPUT))
        metrics |= {"rss_mib": ours, "rss_above_mib": ours - raw}
    return metrics


def peak_rss_mib(command: Sequence[str]) -> float:
    """Run a command, and return the peak resident memory of its process in MiB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss / 1024


def import_s() -> float:
    """Return the seconds of `import cllm` in a fresh interpreter: the shortest of three runs."""
    return min(
        float(
            subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True).stdout
        )
        for _ in range(3)
    )


def cold_ttft_s(setup: Setup) -> float:
    """Return the seconds from the start of the process to the first token."""
    given = json.dumps(setup.engine_options, default=str)
    command = [sys.executable, "-c", FIRST_TOKEN, given]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("there was no token")
        return time.perf_counter() - started
