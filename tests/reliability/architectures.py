"""Every architecture of llama.cpp: `python -m tests.reliability.architectures [--save] [NAME ...]`.

llama.cpp's own generator writes a small random model of each (`tools.architecture_models`).  Each file,
as written and quantized, goes through the features of an engine in every layout of the KV cache: load,
requests alone and together, shared beginnings, preemption, fork, rewind, suspend and resume, and audit.
Most prompts are longer than the sliding window, which has 32 positions.

Another engine scores each token again, alone and without these features.  The log probability must be the
same up to rounding, and to the bit with `deterministic`.  A child process, the *host*, examines the layouts of
a file in turn.  If the host ends or an answer is wrong, another host tries again with `preflight`, as
`cllm serve` does.  The preflight must reject the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import signal
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
from cllm.engine.llama.shapes import MAX_DIFFERENCE
from tests.reliability.record import ROOT, Record, Table, conclude
from tests.reliability.record import Cell as Figure
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
# Type of the files that an engine with a process of its own examines, as in `cllm serve`.  One type is
# enough: the process loads the same libllama in the same way.
PROCESS_TYPE = "Q8_0"
N_SEQ_MAX = 3
# Context of one sequence.  In the unified layout all sequences share it, too few cells, so some are preempted.
# The number is the same for all engines, since rotary embeddings may depend on it.
N_CTX_SEQ = 256
N_OUTPUT, N_LONG = 10, 80
# Largest differences of log probabilities: batches of other shapes round differently.  With quantized
# weights, the layers of some models amplify this up to the limit of the preflight.
MAX_DIFFERENCES = {"F32": 0.05, "Q8_0": MAX_DIFFERENCE, "Q4_K_M": MAX_DIFFERENCE}
LIMIT_S, HANG_S = 120.0, 300  # for one layout of one file
OPTIONS: dict[str, Any] = {
    "n_seq_max": N_SEQ_MAX, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1,
    "stream_buffer": 4,
}  # fmt: skip
WORKS = "works"


class Cell(NamedTuple):
    """One way to use a file."""

    layout: str
    file_type: str
    process: bool = False
    preflight: bool = False


CELLS = [
    *(Cell(layout, kind) for layout in LAYOUTS for kind in TYPES),
    *(Cell(layout, PROCESS_TYPE, True, True) for layout in ("unified", "deterministic")),
]


@dataclass(frozen=True)
class Verdict:
    """Result of a file in one cell.

    Attributes
    ----------
    result : str
        "works", "rejected", "wrong", or "ended the host (EXIT CODE)".
    reason : str
        Text of the error, or the difference; the last line of standard error if the host ended.
    """

    name: str
    layout: str
    file_type: str
    process: bool
    preflight: bool
    result: str
    reason: str = ""

    @property
    def is_right(self) -> bool:
        """True if the claim holds for it."""
        return self.result in (WORKS, "rejected")

    def __str__(self) -> str:
        process = " in a process" if self.process else ""
        return f"{self.layout} {self.file_type}{process}: {self.result} {self.reason}"


class _Rejected(Exception):
    """The engine did not load the file."""

    def __init__(self, error: CllmError) -> None:
        self.error = error


# --- The host ----------------------------------------------------------------------------------
def host(path: Path) -> None:
    """Examine a file in the cells that come as JSON lines; answer with verdicts."""
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            cell = Cell(*json.loads(line))
            signal.alarm(HANG_S)  # a call that does not return ends the host
            result, reason = WORKS, ""
            try:
                file = _as_type(path, cell.file_type, Path(folder))
                anyio.run(partial(_examine, file, cell))
            except _Rejected as rejected:
                result, reason = "rejected", f"{type(rejected.error).__name__}: {rejected.error}"
            except BaseException as error:  # any error is a finding of this program
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


async def _examine(path: Path, cell: Cell) -> None:
    """Raise an error if a feature does not work, or an answer is wrong."""
    own_shares = cell.layout != "unified"
    options = {
        **OPTIONS, **LAYOUTS[cell.layout], "process": cell.process, "preflight": cell.preflight,
        "n_ctx": N_CTX_SEQ * N_SEQ_MAX if own_shares else N_CTX_SEQ,
    }  # fmt: skip
    with anyio.fail_after(LIMIT_S):
        engine = Engine(path, **options)
        try:
            await engine.__aenter__()
        except CllmError as error:
            raise _Rejected(error) from None
        try:
            asked = await _use(engine)
            n_preemptions = engine.statistics().n_preemptions
        finally:
            await engine.__aexit__(None, None, None)
        is_exact = cell.layout == "deterministic"
        await _check(path, asked, 0.0 if is_exact else MAX_DIFFERENCES[cell.file_type])
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
    for before, answer in (asked[5], asked[-1]):  # second turns of chats
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


async def _check(path: Path, asked: Sequence[Asked], tolerance: float) -> None:
    """Score every answer again, alone; a tolerance of 0 makes the engine `deterministic`."""
    alone: dict[str, Any] = {
        **OPTIONS, "n_seq_max": 1, "n_ctx": N_CTX_SEQ, "prefix_cache": False,
        "deterministic": not tolerance,
    }  # fmt: skip
    async with Engine(path, **alone) as engine:
        for prompt, answer in asked:
            assert len(answer.token_ids) in (N_OUTPUT, N_LONG), answer.finish_reason
            assert answer.logprobs is not None
            score = await engine.score(prompt, answer.token_ids)
            for i, (given, right) in enumerate(zip(answer.logprobs, score.logprobs, strict=True)):
                is_same = math.isclose(given.logprob, right, rel_tol=0.0, abs_tol=tolerance)
                assert is_same, f"token {i} of {len(prompt)}+: {given.logprob} instead of {right}"


# --- The keeper of the hosts -------------------------------------------------------------------
def examine(path: Path, cells: Iterable[Cell] = CELLS) -> list[Verdict]:
    """Return the verdicts on a file.

    `deterministic` has hosts of its own: llama.cpp reads one of its settings once per process.
    """
    wanted, found = list(cells), list[Verdict]()
    exact = [cell for cell in wanted if cell.layout == "deterministic"]
    for some in ([cell for cell in wanted if cell not in exact], exact):
        for cell, verdict in zip(some, _in_hosts(path, some), strict=True):
            if not (verdict.is_right or cell.preflight):
                (again,) = _in_hosts(path, [cell._replace(preflight=True)])
                verdict = again if again.result == "rejected" else verdict
            found.append(verdict)
    return found


def _in_hosts(path: Path, cells: Sequence[Cell]) -> list[Verdict]:
    """Return a verdict for each cell; a host that ends is replaced."""
    left, found = list(cells), list[Verdict]()
    command = [sys.executable, "-m", f"tests.reliability.{NAME}", "--host", str(path)]
    while left:
        lines = "".join(json.dumps(cell) + "\n" for cell in left)
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, check=False, cwd=ROOT
        )
        verdicts = [Verdict(**json.loads(line)) for line in done.stdout.splitlines()]
        found += verdicts
        left = left[len(verdicts) :]
        if left:
            last = next(iter(reversed(done.stderr.strip().splitlines())), "")
            result = f"ended the host ({done.returncode})"
            found.append(Verdict(path.stem, *left.pop(0), result, last))
    return found


def summary(verdicts: Sequence[Verdict]) -> Table:
    """Return a table of the results of each file, by layout."""
    rows = []
    for name, group in itertools.groupby(verdicts, lambda verdict: verdict.name):
        of_file = list(group)
        row = [name]
        for layout in LAYOUTS:
            results = {v.file_type: v.result for v in of_file if v.layout == layout}
            works = [kind for kind in TYPES if results.get(kind) == WORKS]
            row.append("yes" if works == list(TYPES) else ", ".join(works) or "no")
        rows.append(row)
    return Table(("file", *LAYOUTS), rows)


def reasons(verdicts: Sequence[Verdict]) -> Table:
    """Return a table of the reasons for rejections, each once for a file and a layout."""
    told = {(v.name, v.layout, _short(v.reason)) for v in verdicts if v.result != WORKS}
    return Table(("file", "layout", "reason"), sorted(told))


def _short(reason: str) -> str:
    """Return the first line of a reason, without the names of directories, and without the file's."""
    first = reason.splitlines()[0] if reason else ""
    return re.sub(r"\S*/(\S*/)*", "", re.sub(r"cannot load '.*?': ", "", first))


def record(verdicts: Sequence[Verdict]) -> Record:
    """Return the record of all verdicts."""
    table = summary(verdicts)
    whole = [row[0] for row in table.rows if set(row[1:]) == {"yes"}]
    figures: dict[str, Figure] = {
        "n_files": len(table.rows),
        "n_uses": len(verdicts),
        "n_files_that_work_in_every_way": len(whole),
    }
    for column, layout in enumerate(LAYOUTS, 1):
        figures[f"n_files_that_work_{layout}"] = sum(row[column] != "no" for row in table.rows)
    figures["n_files_rejected"] = sum(set(row[1:]) == {"no"} for row in table.rows)
    others = Table(table.head, [row for row in table.rows if row[0] not in whole])
    command = f"python -m tests.reliability.{NAME}"
    return Record(NAME, CLAIM, command, figures, [others, reasons(verdicts)])


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
            n_right = sum(verdict.result == WORKS for verdict in found)
            print(f"{found[0].name}: {n_right} of {len(found)}", file=sys.stderr, flush=True)
    wrong = [f"{verdict.name} {verdict}" for verdict in verdicts if not verdict.is_right]
    return conclude(record(verdicts), wrong, is_kept=given.save)


if __name__ == "__main__":
    sys.exit(main())
