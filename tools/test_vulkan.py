"""Run the tests of GPUs on lavapipe, Mesa's software Vulkan driver, each in a process of its own.

    python -m tools.test_vulkan LIBRARY [-k EXPRESSION] [--together]

LIBRARY is a directory with a libllama that has the Vulkan backend.  At times Mesa 22.3 (Debian 12) ends
a process that decodes, with SIGSEGV in a thread of its own, or with SIGABRT.  Such a test is repeated, at most
`N_TRIES` times in all.  A test that fails in any other way is not.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

N_TRIES = 5
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)
# Two GPUs.  Fused operations crash Mesa 22.3 always.  Its optimizations of shaders take minutes.
LAVAPIPE = {
    "GGML_VK_VISIBLE_DEVICES": "0,0", "GGML_VK_DISABLE_FUSION": "1", "GALLIVM_PERF": "nopt",
}  # fmt: skip
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "gpu", "--timeout=900"]


def names_of(selection: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Yield the names of the selected tests."""
    command = [*PYTEST, "--collect-only", *selection]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    yield from (line for line in done.stdout.splitlines() if "::" in line)


def main() -> None:
    """Run the tests; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("-k", default="", metavar="EXPRESSION")
    parser.add_argument("--together", action="store_true", help="all tests in one process")
    options = parser.parse_args()
    selection = ["tests/gpu", "-k", options.k]
    environment = os.environ | LAVAPIPE | {"CLLM_LIBRARY": options.library}
    n_passed, n_failed, n_crashes = 0, 0, 0
    runs = [selection] if options.together else ([n] for n in names_of(selection, environment))
    for run in runs:
        begun = time.monotonic()
        for _ in range(N_TRIES):
            done = subprocess.run(
                [*PYTEST, *run], env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode not in CRASHES:
                break
            n_crashes += 1
        if done.returncode:
            n_failed += 1
            print(done.stdout, done.stderr, sep="\n")
        n_passed += not done.returncode
        took_s, lines = time.monotonic() - begun, done.stdout.split("\n")
        summary = next((line for line in reversed(lines) if line), "no output")
        print(f"{run[0]}: exit {done.returncode} after {took_s:.0f} s: {summary}", flush=True)
    print(f"{n_passed} runs passed, {n_failed} failed; the driver crashed {n_crashes} times")
    sys.exit(bool(n_failed) or not n_passed)


if __name__ == "__main__":
    main()
