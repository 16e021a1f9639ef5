"""Check that generations which one process suspends continue in another process with the same tokens.

    python -m tests.reliability.suspensions [--each N] [--model embedded|SmolLM2]

The program tries all samplers and constraints of `tests.engine.samplings` with three prompts each, on
deterministic engines.  The first process computes each generation to its end, and suspends and saves it after
every token.  Then it kills itself.  The second process loads each file, resumes it, and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from cllm import Engine, SavedGeneration
from tests.engine.samplings import PROMPTS, SAMPLINGS
from tests.reliability.determinism import model_path
from tests.time_limits import raise_time_limits

N_PROMPTS, N_OUTPUT = 3, 12
COMMAND = (sys.executable, "-m", "tests.reliability.suspensions")


def engine_of(model: str) -> Engine:
    """Return a deterministic engine whose requests compute at most 2 deltas ahead of their readers."""
    return Engine(model_path(model), n_ctx=4096, n_seq_max=4, deterministic=True, stream_buffer=2)


async def save(directory: Path, model: str, each: int) -> None:
    """Compute every generation whole, and save it after every `each`-th token."""
    wholes: dict[str, Any] = {}
    async with engine_of(model) as engine:
        for name, sampling in SAMPLINGS.items():
            for number, prompt in enumerate(PROMPTS[:N_PROMPTS]):
                options: dict[str, Any] = {"max_tokens": N_OUTPUT, "logprobs": 0, **sampling}
                whole = await engine.generate(prompt, **options)
                for n_read in range(1, len(whole.token_ids), each):
                    async with engine.stream(prompt, **options) as stream:
                        read = ""
                        for _ in range(n_read):
                            read += (await anext(stream)).text
                        saved = await stream.suspend()
                    file = f"{name}-{number}-{n_read}"
                    saved.save(directory / file)
                    wholes[file] = {
                        "read": read,
                        "text": whole.text,
                        "token_ids": whole.token_ids,
                        "logprobs": [p.logprob for p in whole.logprobs or ()],
                        "finish_reason": whole.finish_reason,
                        "stop_reason": whole.stop_reason,
                    }
        (directory / "wholes.json").write_text(json.dumps(wholes))
    os.kill(os.getpid(), signal.SIGKILL)


async def resume(directory: Path, model: str) -> int:
    """Resume every file; return the number of answers that differ, plus discrepancies of the audit."""
    wholes = json.loads((directory / "wholes.json").read_text())
    n_wrong = n_restored = 0
    async with engine_of(model) as engine:
        for file, expected in wholes.items():
            saved = SavedGeneration.load(directory / file)
            n_restored += saved.n_state_bytes > 0
            async with engine.resume(saved) as stream:
                text = expected.pop("read")
                async for delta in stream:
                    text += delta.text
                completion = await stream.completion()
            found = {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "logprobs": [p.logprob for p in completion.logprobs or ()],
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if found != expected or text != expected["text"]:
                n_wrong += 1
                print(f"{file}: {found} and {text!r}, not {expected}")
        statistics = engine.statistics()
        discrepancies = await engine.audit()
    print(
        f"{len(wholes)} suspensions of {len(SAMPLINGS) * N_PROMPTS} generations, {n_restored} with their "
        f"cells: {n_wrong} went on differently, {len(discrepancies)} discrepancies; "
        f"{statistics.n_output_tokens} tokens computed"
    )
    return n_wrong + len(discrepancies)


def main() -> int:
    """Run the command line: both halves, each in its own process; 0 if all answers are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=1, help="suspend after every N-th token")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--half", choices=("save", "resume"))
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    raise_time_limits()
    if given.half == "save":
        anyio.run(save, given.directory, given.model, given.each)
    if given.half == "resume":
        return anyio.run(resume, given.directory, given.model)
    with tempfile.TemporaryDirectory() as directory:
        rest = ("--directory", directory, "--model", given.model, "--each", str(given.each))
        saved = subprocess.run([*COMMAND, "--half", "save", *rest], check=False)
        if saved.returncode != -signal.SIGKILL:
            print(f"the process that saves ended with {saved.returncode}")
            return 1
        return subprocess.run([*COMMAND, "--half", "resume", *rest], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
