"""Every architecture of llama.cpp: `python -m tests.reliability.architectures [--save] [NAME ...]`.

llama.cpp's own generator writes a small random model of each (`tools.architecture_models`).  Each file,
as written and quantized, goes through the features of an engine in every layout of the KV cache: load,
requests alone and together, shared beginnings, preemption, fork, rewind, suspend and resume, and audit.
Most prompts are longer than the sliding window, which has 32 positions.

Each token is scored again, alone, by an engine without any of that: its log probability has to be the
same, with `deterministic` to the bit.  A child process, the *host*, examines the layouts of a file one
after the other: what ends it is a finding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from cllm import CllmError, Completion, Engine, SamplingParams
from cllm.bindings import quantize
from tests.reliability.record import ROOT, Record, Table, conclude
from tools import architecture_models

NAME = "architectures"
CLAIM = (
    "Every architecture of llama.cpp gives the same answers in any company and in every layout, or is "
    "rejected with a typed error when it is loaded; none ends the process that loads it."
)
WINDOW = 32
LAYOUTS: dict[str, dict[str, Any]] = {
    "unified": {"kv_unified": True},
    "per-sequence": {"kv_unified": False},
    "deterministic": {"deterministic": True},
}
TYPES = ("F32", "Q8_0", "Q4_K_M")
# A process of its own loads the same libllama in the same way: one type says whether it does.
PROCESS_TYPE = "Q8_0"
N_SEQ_MAX = 3
N_CTX_SEQ = 192
# In the unified layout, for all sequences together: less than they need, so that some are preempted.
N_CTX_UNIFIED = 256
N_OUTPUT, N_LONG = 10, 80
MAX_DIFFERENCE = 0.05  # of log probabilities, where another shape of a batch rounds otherwise
LIMIT_S = 120.0  # for one layout of one file
OPTIONS: dict[str, Any] = {
    "n_seq_max": N_SEQ_MAX, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1,
    "stream_buffer": 4,
}  # fmt: skip
WORKS = "works"


class Cell(NamedTuple):
    """One way to use a file."""

    layout: str
    file_type: str
    process: bool


CELLS = [
    *(Cell(layout, kind, False) for layout in LAYOUTS for kind in TYPES),
    *(Cell(layout, PROCESS_TYPE, True) for layout in LAYOUTS),
]


@dataclass(frozen=True)
class Verdict:
    """What became of a file in one cell.

    Attributes
    ----------
    result : str
        "works", "rejected", "wrong", or the end of the host.
    reason : str
        The error's text, or the difference.
    """

    name: str
    layout: str
    file_type: str
    process: bool
    result: str
    reason: str = ""

    @property
    def is_right(self) -> bool:
        """True if the claim holds for it."""
        return self.result in (WORKS, "rejected")


# --- The host ----------------------------------------------------------------------------------
def host(path: Path) -> None:
    """Examine a file in the cells that come as JSON lines; answer with verdicts."""
    passed = set[str]()  # layouts that the preflight need not try again
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            cell = Cell(*json.loads(line))
            result, reason = WORKS, ""
            try:
                file = _as_type(path, cell.file_type, Path(folder))
                anyio.run(partial(_examine, file, cell, preflight=cell.layout not in passed))
                passed.add(cell.layout)
            except CllmError as error:
                result, reason = "rejected", f"{type(error).__name__}: {error}"
            except BaseException as error:  # whatever it is, it is what this program looks for
                result, reason = "wrong", f"{type(error).__name__}: {error}"
            print(json.dumps(asdict(Verdict(path.stem, *cell, result, reason))), flush=True)


def _as_type(path: Path, file_type: str, folder: Path) -> Path:
    """Return the file with weights of a type."""
    if file_type == "F32":
        return path
    made = folder / f"{path.stem}-{file_type}.gguf"
    if not made.is_file():
        quantize(path, made, file_type)
    return made


async def _examine(path: Path, cell: Cell, *, preflight: bool) -> None:
    """Raise an error if a feature does not work, or an answer is wrong."""
    own_shares = cell.layout != "unified"
    options = {
        **OPTIONS, **LAYOUTS[cell.layout], "process": cell.process, "preflight": preflight,
        "n_ctx": N_CTX_SEQ * N_SEQ_MAX if own_shares else N_CTX_UNIFIED,
    }  # fmt: skip
    with anyio.fail_after(LIMIT_S):
        async with Engine(path, **options) as engine:
            asked = await _use(engine)
            n_preemptions = engine.statistics().n_preemptions
        await _check(path, asked, is_exact=cell.layout == "deterministic")
    assert own_shares or n_preemptions, "nothing was preempted"


Asked = tuple[list[int], Completion]


async def _use(engine: Engine) -> list[Asked]:
    """Use every feature once; return the prompts with their answers."""
    assert engine.model is not None
    choose = random.Random(1)
    usable = range(1, engine.model.n_vocab)

    def tokens(n: int) -> list[int]:
        return choose.choices(usable, k=n)

    params = SamplingParams(
        max_tokens=N_OUTPUT, temperature=0.0, logprobs=1, ignore_eos=True, seed=1
    )
    head = tokens(2 * WINDOW)
    prompts = [
        tokens(5), tokens(3 * WINDOW), [*head, *tokens(WINDOW)], [*head, *tokens(2 * WINDOW)],
        [*head[:40], *tokens(9)], [*head, *tokens(3)],
    ]  # fmt: skip
    asked = [(prompt, await engine.generate(prompt, params)) for prompt in prompts[:3]]
    together = await engine.generate_all(prompts, params)
    asked += zip(prompts, together, strict=True)
    # Together they grow beyond the cells of the unified layout.
    grown = [tokens(30) for _ in range(N_SEQ_MAX)]
    long = replace(params, max_tokens=N_LONG)
    asked += zip(grown, await engine.generate_all(grown, long), strict=True)
    for _ in range(2):  # the second turn of a chat, and one more
        before, answer = asked[5] if _ == 0 else asked[-1]
        turn = [*before, *answer.token_ids, *tokens(4)]
        asked.append((turn, await engine.generate(turn, params)))
    prompt = prompts[2]
    async with engine.stream(prompt, params) as stream:
        for _ in range(4):
            await stream.__anext__()
        (fork,) = stream.fork(1)
        asked.append((prompt, await fork.completion()))
        await stream.rewind(2)
        asked.append((prompt, await stream.completion()))
    async with engine.stream(prompts[3], params) as stream:
        for _ in range(3):
            await stream.__anext__()
        saved = await stream.suspend()
    async with engine.resume(saved) as stream:
        asked.append((prompts[3], await stream.completion()))
    async with engine.stream(prompts[1], params) as stream:
        await stream.__anext__()
    found = await engine.audit()
    assert found == [], found
    while engine.statistics().n_running:
        await engine.audit()
    assert engine.statistics().n_kv_cells_used == 0
    return asked


async def _check(path: Path, asked: Sequence[Asked], *, is_exact: bool) -> None:
    """Score every answer again, alone."""
    alone: dict[str, Any] = {
        **OPTIONS, "n_seq_max": 1, "n_ctx": 2 * N_CTX_SEQ, "prefix_cache": False,
        "deterministic": is_exact,
    }  # fmt: skip
    async with Engine(path, **alone) as engine:
        for prompt, answer in asked:
            assert len(answer.token_ids) in (N_OUTPUT, N_LONG), answer.finish_reason
            assert answer.logprobs is not None
            score = await engine.score(prompt, answer.token_ids)
            for i, (given, right) in enumerate(zip(answer.logprobs, score.logprobs, strict=True)):
                is_same = (
                    given.logprob == right
                    if is_exact
                    else math.isclose(given.logprob, right, abs_tol=MAX_DIFFERENCE)
                )
                assert is_same, f"token {i} of {len(prompt)}+: {given.logprob} instead of {right}"


# --- The keeper of the hosts -------------------------------------------------------------------
def examine(path: Path, cells: Iterable[Cell] = CELLS) -> list[Verdict]:
    """Return the verdicts on a file; a host that ends is replaced.

    `deterministic` has hosts of its own: llama.cpp reads one of its settings once per process.
    """
    wanted = list(cells)
    exact = [cell for cell in wanted if cell.layout == "deterministic"]
    return [
        *_examine_in_hosts(path, [cell for cell in wanted if cell not in exact]),
        *_examine_in_hosts(path, exact),
    ]


def _examine_in_hosts(path: Path, left: list[Cell]) -> list[Verdict]:
    found = list[Verdict]()
    command = [sys.executable, "-m", f"tests.reliability.{NAME}", "--host", str(path)]
    while left:
        lines = "".join(json.dumps(cell) + "\n" for cell in left)
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, check=False, cwd=ROOT,
            timeout=2 * LIMIT_S * len(left),
        )  # fmt: skip
        verdicts = [Verdict(**json.loads(line)) for line in done.stdout.splitlines()]
        found += verdicts
        left = left[len(verdicts) :]
        if left:
            last = next(iter(reversed(done.stderr.strip().splitlines())), "")
            result = f"ended the host ({done.returncode})"
            found.append(Verdict(path.stem, *left.pop(0), result, last))
    return found


def table(verdicts: Sequence[Verdict]) -> Table:
    """Return what became of each file, by layout."""
    rows = []
    for name, group in itertools.groupby(verdicts, lambda verdict: verdict.name):
        of_file = list(group)
        row = [name]
        for layout in LAYOUTS:
            results = {(v.file_type, v.process): v.result for v in of_file if v.layout == layout}
            kinds = set(results.values())
            row.append(
                kinds.pop()
                if len(kinds) == 1
                else ", ".join(
                    f"{kind}{' in a process' if process else ''} {result}"
                    for (kind, process), result in results.items()
                    if result != WORKS
                )
            )
        rows.append(row)
    return Table(("file", *LAYOUTS), rows)


def record(verdicts: Sequence[Verdict]) -> Record:
    """Return what was found, with the reasons."""
    names = sorted({verdict.name for verdict in verdicts})
    entirely = [n for n in names if all(v.result == WORKS for v in verdicts if v.name == n)]
    reasons = sorted({(v.name, v.layout, v.reason) for v in verdicts if v.reason})
    figures = {
        "n_files": len(names),
        "n_files_that_work_in_every_way": len(entirely),
        "n_cells": len(verdicts),
        **{
            f"n_files_that_work_{layout}": sum(
                all(v.result == WORKS for v in verdicts if (v.name, v.layout) == (name, layout))
                for name in names
            )
            for layout in LAYOUTS
        },
    }
    others = [name for name in names if name not in entirely]
    tables = [
        table([v for v in verdicts if v.name in others]),
        Table(("file", "layout", "reason"), reasons),
    ]
    return Record(NAME, CLAIM, f"python -m tests.reliability.{NAME}", figures, tables)


def main() -> int:
    """Run the command line; 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of architectures; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--host", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.host is not None:
        host(given.host)
        return 0
    files = [path for name in given.names or [""] for path in architecture_models.ensure(name)]
    verdicts = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for found in pool.map(examine, files):
            verdicts += found
            wrong = [v for v in found if v.result != WORKS]
            print(found[0].name, f"{len(found) - len(wrong)}/{len(found)}", file=sys.stderr)
            for v in wrong:
                print("   ", *asdict(v).values(), file=sys.stderr)
    bad = [
        f"{v.name} {v.layout} {v.file_type}: {v.result} {v.reason}"
        for v in verdicts
        if not v.is_right
    ]
    return conclude(record(verdicts), bad, is_kept=given.save)


if __name__ == "__main__":
    sys.exit(main())
