"""Damaged model files: `python -m tests.reliability.damaged_models [--files N] [--save]`.

Every file of the corpus (`gguf_damage`) is opened as a user opens it, by `Engine(path,
preflight=True)`.  A file that passes the preflight can still harm the process that loads it, so that
process, the *host*, is a child, too.  One host opens many files.  It is a finding if a file ends the
host, leaves memory, threads or descriptors in it, or takes long.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import re
import resource
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from benchmarks.measure import percentile, rss_mib
from cllm import CllmError, Engine, ModelLoadError, SamplingParams
from tests.reliability.gguf_damage import BASES, N_FILES, Member, base, damage, members
from tests.reliability.record import Cell, Record, Table, conclude

NAME = "damaged_models"
CLAIM = (
    "A damaged model file is a ModelLoadError with its path and a reason within 10 s, or loads and "
    "serves; the process that opens it survives and keeps nothing of it."
)
LIMIT_S = 10.0  # for a verdict, in a run whose record is kept
BUSY_LIMIT_S = 100.0  # in every other run: its machine may be busy
HANG_S = 200.0  # longer than a preflight may take
MAX_GROWTH_MIB = 8.0
N_FOR_GROWTH = 100  # the growth of a host with fewer files is not checked
TASKS = "/proc/self/task"
OPTIONS: dict[str, Any] = {
    "preflight": True, "n_ctx": 512, "n_seq_max": 2, "n_threads": 1, "n_threads_batch": 1,
}  # fmt: skip
# All characters up to U+00FF, and names of control tokens, to reach every part of the vocabulary.
EVERY_BYTE = "".join(map(chr, range(256))) + "<|bos|><|im_end|> 1+1="
# The vocabularies that need most memory: a token of a MiB, tokens of up to 259 spaces.
LARGEST: list[Member] = [("the vocabulary", 27), ("the vocabulary", 39)]
CHAT = [{"role": "user", "content": "1+1="}]


@dataclass
class Verdict:
    """Result of one file.

    Attributes
    ----------
    verdict : str
        "loaded", "refused", the name of the signal that ended the preflight's process, "hangs" (the
        preflight reached its time limit), or "broken": the claim does not hold.
    reason : str
        Reason of the `ModelLoadError`, or a description of what is broken.
    ends : list of str
        Finish reasons or errors of the requests, if the file was loaded.
    n_threads, n_fds, rss_mib
        Threads, file descriptors and resident memory in MiB of the host after the file.
    """

    kind: str
    serial: int
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    ends: Sequence[str] = ()
    n_threads: int = 0
    n_fds: int = 0
    rss_mib: float = 0.0


# --- The host ----------------------------------------------------------------------------------
def host() -> None:
    """Open the files whose kind and number come as JSON lines; answer with verdicts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "damaged.gguf"
        # Warm-up: libraries and memory pools that a process takes once and keeps are not leaks.
        for index in range(len(BASES)):
            for backend in ("asyncio", "trio"):
                path.write_bytes(base(index)[0])
                anyio.run(
                    _open,
                    path,
                    {"preflight": index == 0},
                    Verdict("sound", index, ""),
                    backend=backend,
                )
        for member in LARGEST:
            path.write_bytes(damage(*member).data)
            anyio.run(_open, path, {}, Verdict(*member, ""))
        n_threads = len(os.listdir(TASKS))  # noqa: PTH208
        for line in sys.stdin:
            kind, serial = json.loads(line)
            verdict = _examine(kind, serial, path, n_threads)
            sys.stdout.write(json.dumps(asdict(verdict)) + "\n")
            sys.stdout.flush()


def _examine(kind: str, serial: int, path: Path, n_threads_before: int) -> Verdict:
    damaged = damage(kind, serial)
    path.write_bytes(damaged.data)
    verdict = Verdict(kind, serial, "broken")
    started = time.perf_counter()
    backend = ("asyncio", "trio")[serial % 2]
    try:
        anyio.run(_open, path, damaged.options, verdict, backend=backend)
    except BaseException as error:  # any error is a finding of this program
        verdict.verdict, verdict.reason = "broken", f"{type(error).__name__}: {error}"
    path.unlink()
    verdict.seconds = verdict.seconds or time.perf_counter() - started
    gc.collect()
    verdict.n_threads = _n_threads(n_threads_before)
    verdict.n_fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    verdict.rss_mib = rss_mib()
    return verdict


def _n_threads(n_expected: int) -> int:
    """Return the number of threads; wait up to 2 s, since the kernel may still list a joined one."""
    deadline = time.monotonic() + 2.0
    while (n := len(os.listdir(TASKS))) > n_expected and time.monotonic() < deadline:  # noqa: PTH208
        os.sched_yield()
    return n


async def _open(path: Path, options: dict[str, Any], verdict: Verdict) -> None:
    started = time.perf_counter()
    try:
        async with Engine(path, **{**OPTIONS, **options}) as engine:
            verdict.seconds = time.perf_counter() - started
            verdict.ends = [await end async for end in _requests(engine)]
        verdict.verdict = "loaded"
    except ModelLoadError as error:
        verdict.seconds = time.perf_counter() - started
        verdict.reason = error.reason
        if error.path == str(path) and error.path in str(error) and error.reason.strip():
            verdict.verdict = _kind_of_refusal(error.reason)


async def _requests(engine: Engine) -> Any:
    """Yield how four requests end: a greedy one, `EVERY_BYTE`, a chat, and every fifth token id."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    sampled = SamplingParams(max_tokens=32, temperature=1.0, seed=1, ignore_eos=True)
    for start in (
        lambda: engine.generate("1+1=", greedy),
        lambda: engine.generate(EVERY_BYTE, sampled),
        lambda: engine.chat(CHAT, sampled),
        lambda: engine.generate(list(range(0, engine.model.n_vocab, 5)), greedy),
    ):
        yield _ending(start)


async def _ending(start: Any) -> str:
    try:
        with anyio.fail_after(HANG_S / 4):  # four requests of a file, before its host seems to hang
            return str((await start()).finish_reason)
    except CllmError as error:
        return f"{type(error).__name__}: {error.__cause__ or error}"


def _kind_of_refusal(reason: str) -> str:
    if (found := re.match(r"the process that tried it ended with (SIG\w+)", reason)) is not None:
        return found[1]
    return "hangs" if "does not end within" in reason else "refused"


# --- The parent of the hosts -------------------------------------------------------------------
class Host:
    """A child process that opens files; it is started again after a file has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def examine(self, member: Member) -> Verdict:
        """Return the verdict on a file; "broken" if the host ends or hangs."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.reliability.damaged_models", "--host"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, cwd=Path(__file__).parents[2],
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        started = time.perf_counter()
        process.stdin.write(json.dumps(member) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            has_answered = bool(selector.select(HANG_S))
        line = process.stdout.readline() if has_answered else ""
        if line:
            return Verdict(**json.loads(line))
        why = f"the host ended: {process.wait()}" if has_answered else "the host hangs"
        self.close(kill=True)
        return Verdict(*member, "broken", why, time.perf_counter() - started)

    def close(self, *, kill: bool = False) -> None:
        """End the process."""
        if self._process is None:
            return
        with self._process as process:
            if kill:
                process.kill()
        self._process = None


def examine(chosen: Sequence[Member], *, n_hosts: int = 2) -> list[list[Verdict]]:
    """Return the verdicts of each host; the files are shuffled and dealt to the hosts in turn."""
    mixed = random.Random(1).sample(list(chosen), len(chosen))
    shares = [mixed[first::n_hosts] for first in range(n_hosts)]
    found: list[list[Verdict]] = [[] for _ in shares]

    def work(share: Sequence[Member], into: list[Verdict]) -> None:
        host = Host()
        for member in share:
            into.append(host.examine(member))
            if sum(map(len, found)) % 50 == 0:
                sys.stderr.write(f"{sum(map(len, found))} of {len(chosen)}\n")
        host.close()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(shares, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# --- Evaluation --------------------------------------------------------------------------------
def growth_mib(verdicts: Sequence[Verdict]) -> float:
    """Return the growth of a host's resident memory, in MiB, from the first quarter of its files to its end."""
    tenth = max(1, len(verdicts) // 10)
    begin = sorted(v.rss_mib for v in verdicts[len(verdicts) // 4 :][:tenth])
    end = sorted(v.rss_mib for v in verdicts[-tenth:])
    return end[tenth // 2] - begin[tenth // 2]


def findings(hosts: Sequence[Sequence[Verdict]], *, limit_s: float = LIMIT_S) -> list[str]:
    """Return the contradictions to the claim, with `limit_s` seconds for each verdict."""
    found = []
    for verdicts in hosts:
        for v in verdicts:
            name = f"{v.kind} {v.serial}"
            if v.verdict == "broken":
                found.append(f"{name}: {v.reason or 'a refusal without path or reason'}")
            if v.seconds >= limit_s:
                found.append(f"{name}: the verdict took {v.seconds:.1f} s")
            if v.verdict == "loaded" and len(v.ends) < 4:
                found.append(f"{name}: {len(v.ends)} of 4 requests ended")
            if bad := [end for end in v.ends if end.startswith(("EngineFailed", "Closed"))]:
                found.append(f"{name}: the engine did not serve on ({bad[0]})")
        alive = [v for v in verdicts if v.n_threads]
        for what in ("n_threads", "n_fds"):
            counts = collections.Counter(getattr(v, what) for v in alive)
            if len(counts) > 1:
                found.append(f"{what} of a host: {dict(counts)}")
        if len(alive) >= N_FOR_GROWTH and (growth := growth_mib(alive)) > MAX_GROWTH_MIB:
            found.append(f"a host has grown by {growth:.1f} MiB")
    return found


def _least_and_most(hosts: Sequence[Sequence[Verdict]], what: str) -> str:
    counts = [getattr(v, what) for verdicts in hosts for v in verdicts if v.n_threads]
    return f"{min(counts)}, {max(counts)}"


def record(hosts: Sequence[Sequence[Verdict]]) -> Record:
    """Return the record: figures, a table of damage and verdicts, and one of ended requests."""
    verdicts = [v for share in hosts for v in share]
    names = collections.Counter(v.verdict for v in verdicts)
    columns = [name for name in ("loaded", "refused") if names[name]]
    columns += sorted(name for name in names if name not in ("loaded", "refused"))
    kinds = list(dict.fromkeys(kind for kind, _ in members(N_FILES)))
    rows: list[list[Cell]] = []
    for kind in kinds:
        of_kind = [v for v in verdicts if v.kind == kind]
        counts = collections.Counter(v.verdict for v in of_kind)
        slowest = max((v.seconds for v in of_kind), default=0.0)
        rows.append([kind, len(of_kind), *(counts[name] for name in columns), round(slowest, 2)])
    rows.append(["all", len(verdicts), *(names[name] for name in columns), ""])
    rows[-1][-1] = round(max(v.seconds for v in verdicts), 2)
    ends = collections.Counter(end for v in verdicts for end in v.ends)
    seconds = [v.seconds for v in verdicts]
    figures: dict[str, Cell] = {
        "files": len(verdicts),
        "loaded": names["loaded"],
        "refused": len(verdicts) - names["loaded"] - names["broken"],
        "of these, ended the process that tried them": sum(
            n for name, n in names.items() if name.startswith("SIG")
        ),
        "harmed the process that opened them": names["broken"],
        "seconds to a verdict, median": round(percentile(seconds, 50), 2),
        "seconds to a verdict, longest": round(max(seconds), 2),
        "requests of loaded files that ended": sum(ends.values()),
        "threads of a host, least and most": _least_and_most(hosts, "n_threads"),
        "file descriptors of a host, least and most": _least_and_most(hosts, "n_fds"),
        "growth of a host, MiB": round(max(growth_mib(share) for share in hosts), 2),
    }
    tables = [
        Table(["damage", "files", *columns, "slowest, s"], rows, "Damage and verdict."),
        Table(["a request ended", "times"], ends.most_common(), "Requests of files that loaded."),
    ]
    return Record(NAME, CLAIM, f"python -m tests.reliability.{NAME} --save", figures, tables)


def main(arguments: Sequence[str] | None = None) -> int:
    """Open files; 1 if one of them contradicts the claim."""
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--files", type=int, default=N_FILES, help=f"number of files, of {N_FILES}")
    parser.add_argument("--hosts", type=int, default=2, help="hosts at a time (2)")
    parser.add_argument("--save", action="store_true", help="keep a record")
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.host:
        host()
        return 0
    hosts = examine(members(min(given.files, N_FILES)), n_hosts=given.hosts)
    found = findings(hosts, limit_s=LIMIT_S if given.save else BUSY_LIMIT_S)
    return conclude(record(hosts), found, is_kept=given.save)


if __name__ == "__main__":
    sys.exit(main())
