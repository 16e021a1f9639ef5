"""Prefixes in host memory and in files, and every fault of what copies, writes and reads them.

    python -m tests.reliability.tier_faults [--calls N] [--save]

Two engines serve prompts that evict one another, the second after the first has ended.  It uses the files that
the first left in the directory.  Faults are: the k-th file call, or native call of a copy, fails; files are
damaged between the two engines; another process removes files.  No answer may change, and audits must find
no difference from the bookkeeping.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from cllm import Completion, Engine, InvalidArgumentError
from cllm.engine.core import saved_states
from cllm.engine.thread import inference_thread, prefix_files
from cllm.engine.thread.prefix_files import SUFFIX
from tests.conftest import QUIET, our_threads
from tests.reliability.answers import unlike
from tests.reliability.fault_matrix import CACHE
from tests.reliability.file_faults import ERRNOS, FUNCTIONS, FileFault, FileFaults, Real, fails
from tests.reliability.native_faults import Fault, NativeFaults, Outcome
from tests.reliability.record import Record, Table, conclude

CLAIM = (
    "A copy of the KV cache that cannot be made, kept, written, read or put back, a damaged or foreign file, and "
    "another process in the same directory change no answer: what is missing is computed.  A directory that cannot "
    "be used when an engine starts is refused by name."
)
# With `deterministic` each sequence has its own cells.  There are only two sequences.
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 2, "deterministic": True, **QUIET}
TIERS: dict[str, dict[str, Any]] = {
    "host memory": {"prefix_cache_bytes": 1 << 24},
    "files": {"prefix_cache_bytes": 0},
    "both": {"prefix_cache_bytes": 1 << 20},
}
HEADS = ("count: 1 2 3 4 5 6 7 8 9 " * 4, "repeat: a b c d e f g h " * 4, "In a small town " * 6)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
# Indices into `HEADS` of the prompts of each round.  Rounds run in turn, and each evicts the prefix of the
# round before the last.  The last round has two prompts at once.
ROUNDS = ((0,), (1,), (2,), (0,), (1,), (2, 0))
NATIVE = ("llama_state_seq_get_size", "llama_state_seq_get_data", "llama_state_seq_set_data")
HANG_S = 30.0
COMMAND = (sys.executable, "-m", "tests.reliability.tier_faults")


@dataclass
class Tried:
    """Counts of one kind of fault, and wrong results."""

    tier: str
    what: str
    n_calls: int = 0
    n_tried: int = 0
    n_met: int = 0
    n_compared: int = 0
    n_restored: int = 0
    wrong: list[str] = field(default_factory=list)


class Bench:
    """A directory, and engines on it one after another."""

    def __init__(self, tier: str, directory: Path) -> None:
        self.tier = tier
        self.directory = directory.resolve()
        self.native = NativeFaults()
        self.files = FileFaults(directory)
        self._alone: dict[str, Completion] = {}
        self.n_compared = 0
        self._stack = ExitStack()

    async def __aenter__(self) -> Self:
        with ExitStack() as entered:
            for each in (self.native, self.files, always_restored()):
                entered.enter_context(each)
            await self._ask_alone()
            self._stack = entered.pop_all()
        return self

    async def _ask_alone(self) -> None:
        async with Engine(prefix_cache=False, **OPTIONS) as engine:
            for prompt in {p for n in (1, 2) for pair in _prompts(n) for p in pair}:
                self._alone[prompt] = await engine.generate(prompt, **GREEDY)

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()

    async def run(
        self, between: Callable[[Path], None] = lambda _: None, **options: Any
    ) -> tuple[int, list[str]]:
        """Run an engine, call `between`, run another one; return the number of restored prefixes and faults."""
        n_restored, wrong = 0, list[str]()
        for number in (1, 2):
            n_met = self.files.n_met
            with anyio.move_on_after(HANG_S) as scope:
                try:
                    async with Engine(**OPTIONS, **self._tier_options, **options) as engine:
                        wrong += await self._serve(engine, number)
                        n_restored += engine.statistics().n_restored_prefixes
                except InvalidArgumentError as error:  # the directory cannot be used
                    is_told = self.files.n_met > n_met and error.field == "prefix_cache_dir"
                    wrong += [] if is_told else [repr(error)]
            if scope.cancelled_caught:
                wrong.append("it hangs")
            wrong += [f"{name} is left" for name in our_threads()]
            if number == 1:
                between(self.directory)
        return n_restored, wrong

    async def _serve(self, engine: Engine, number: int) -> list[str]:
        wrong: list[str] = []
        for pair in _prompts(number):
            answers = await engine.generate_all(pair, **GREEDY)
            for prompt, answer in zip(pair, answers, strict=True):
                self.n_compared += 1
                if found := unlike(answer, self._alone[prompt]):
                    wrong.append(f"{prompt[-20:]!r}: {found}")
        return wrong + await engine.audit()

    @property
    def _tier_options(self) -> dict[str, Any]:
        options, has_files = TIERS[self.tier], self.tier != "host memory"
        return options | {"prefix_cache_dir": self.directory} if has_files else options

    def begin(self, file: FileFault | None = None, native: Fault | None = None) -> None:
        """Empty the directory, and arm a fault of a file call or of a native call, if given."""
        self.files.arm(None)
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        self.files.arm(file)
        self.native.arm(*([] if native is None else [native]))

    async def count(self) -> tuple[Counter[str], Counter[str]]:
        """Return the numbers of file calls and of native calls in a run without faults."""
        self.begin()
        n_restored, wrong = await self.run()
        assert not wrong, wrong
        assert n_restored, "nothing has come back from the tiers"
        return Counter(self.files.n_calls), Counter(self.native.n_calls)

    async def try_file(self, fault: FileFault, tried: Tried) -> None:
        """Run with a fault of one file call, and count the results."""
        self.begin(file=fault)
        await self.try_once(tried, f"{fault.function} {fault.k}: {fault.words}")
        tried.n_met += self.files.n_met

    async def try_native(self, function: str, k: int, outcome: Outcome, tried: Tried) -> None:
        """Run with a fault of one native call, and count the results."""
        self.begin(native=Fault(function, k, outcome))
        await self.try_once(tried, f"{function} {k}: {outcome}")
        tried.n_met += len(self.native.met)

    async def try_damage(self, name: str, damage: Callable[[Path], None], tried: Tried) -> None:
        """Run with damage to the files that the first engine left, and count the results."""
        self.begin()
        await self.try_once(tried, name, damage)
        tried.n_met += 1

    async def try_once(
        self, tried: Tried, what: str, between: Callable[[Path], None] = lambda _: None
    ) -> None:
        """Run both engines, and add the results to `tried`."""
        n_before = self.n_compared
        n_restored, wrong = await self.run(between)
        tried.n_tried += 1
        tried.n_compared += self.n_compared - n_before
        tried.n_restored += n_restored
        tried.wrong += [f"{self.tier}, {what}: {line}" for line in wrong]


def _prompts(number: int) -> list[list[str]]:
    return [[f"{HEADS[i]}{number}{turn}" for i in pair] for turn, pair in enumerate(ROUNDS)]


@contextmanager
def always_restored() -> Iterator[None]:
    """Make runs repeatable: always restore prefixes, disable automatic audits, write all files at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference_thread, "AUDIT_EVERY_TICK", False)
        patch.setattr(inference_thread, "IDLE_AUDIT_S", float("inf"))
        patch.setattr(saved_states.SavedStates, "restore_s", lambda *_: 0.0)
        patch.setattr(saved_states.SavedStates, "copy_s", lambda *_: 0.0)
        patch.setattr(prefix_files, "CLOSE_S", 20.0)  # time to write all waiting files
        yield


# --- Damage -------------------------------------------------------------------------------------
def _each(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for path in directory.rglob(f"*{SUFFIX}"):
            path.write_bytes(change(path.read_bytes()))

    return damage


def _cut(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(share * len(data))]


def _flipped(share: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        i = min(len(data) - 1, int(share * len(data)))
        return data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :]

    return change


def _swapped(directory: Path) -> None:
    """Give each file the bytes of another one."""
    paths = sorted(directory.rglob(f"*{SUFFIX}"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def _directories(directory: Path) -> None:
    """Replace each file by a directory."""
    for path in list(directory.rglob(f"*{SUFFIX}")):
        path.unlink()
        path.mkdir()


def _gone(directory: Path) -> None:
    for path in list(directory.rglob(f"*{SUFFIX}")):
        path.unlink()


def _foreign(directory: Path) -> None:
    """Add files that cllm did not write: random bytes and an empty file in each directory."""
    for path in list(directory.rglob(f"*{SUFFIX}")):
        path.with_name(f"foreign{SUFFIX}").write_bytes(os.urandom(1000))
        path.with_name(f"empty{SUFFIX}").write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"cut off at {s}": _each(_cut(s)) for s in (0.0, 0.01, 0.5, 0.999)},
    **{f"a bit flipped at {s}": _each(_flipped(s)) for s in (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)},
    "longer": _each(lambda data: data + b"\0"),
    "each with another's bytes": _swapped,
    "directories in their place": _directories,
    "gone": _gone,
    "foreign files beside them": _foreign,
}  # fmt: skip


def _half(real: Real) -> Any:
    """Return half of what was read, as with a file that is being truncated."""
    done = real()
    return done[: len(done) // 2] if isinstance(done, bytes) else done // 2


# --- The whole ----------------------------------------------------------------------------------
async def try_tier(tier: str, n_calls: int, errnos: Sequence[int] = ERRNOS) -> list[Tried]:
    """Try every fault of one tier, and these error numbers, at each of the first `n_calls` calls."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        async with Bench(tier, Path(name)) as bench:
            file_calls, native_calls = await bench.count()
            for function in FUNCTIONS:
                tried = Tried(tier, function, file_calls[function])
                for k in range(1, min(n_calls, tried.n_calls) + 1):
                    for number in errnos:
                        fault = FileFault(function, k, os.strerror(number), fails(number))
                        await bench.try_file(fault, tried)
                    if function == "read":
                        await bench.try_file(FileFault(function, k, "half of it", _half), tried)
                if tried.n_tried:
                    found.append(tried)
            for function in NATIVE:
                tried = Tried(tier, function, native_calls[function])
                for outcome in CACHE[function]:
                    for k in range(1, min(n_calls, tried.n_calls) + 1):
                        await bench.try_native(function, k, outcome, tried)
                found.append(tried)
            if tier != "host memory":
                for words, damage in DAMAGES.items():
                    tried = Tried(tier, f"files {words}")
                    await bench.try_damage(words, damage, tried)
                    found.append(tried)
                found.append(await _beside_another(bench))
    return found


async def _beside_another(bench: Bench, n_runs: int = 5) -> Tried:
    """Serve while another process uses the directory with a limit of 128 KiB, and so removes files."""
    tried = Tried(bench.tier, "another process removes files")
    bench.begin()
    other = subprocess.Popen(
        [*COMMAND, "--neighbour", str(bench.directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert other.stdout is not None
    try:
        await anyio.to_thread.run_sync(other.stdout.readline)
        for _ in range(n_runs):
            await bench.try_once(tried, "beside another process")
            tried.n_met += 1
    finally:
        try:
            output, _ = await anyio.to_thread.run_sync(partial(other.communicate, timeout=60))
        finally:
            other.kill()
    if other.returncode or b"0 wrong" not in output:
        tried.wrong.append(f"the other process: {output!r}")
    return tried


async def be_neighbour(directory: Path) -> int:
    """Serve on a directory until standard input ends; 1 if an answer was wrong."""
    ended = anyio.Event()
    n_wrong = n_served = 0

    async def watch() -> None:
        await anyio.to_thread.run_sync(sys.stdin.read)
        ended.set()

    async with Bench("files", directory) as bench, anyio.create_task_group() as tasks:
        print("ready", flush=True)
        tasks.start_soon(watch)
        while not ended.is_set():
            _, wrong = await bench.run(prefix_cache_dir_bytes=1 << 17)
            n_wrong, n_served = n_wrong + len(wrong), n_served + 1
    print(f"{n_served} times, {n_wrong} wrong", flush=True)
    return int(bool(n_wrong))


def record(found: list[Tried], seconds: float, options: list[str]) -> Record:
    """Return the record: the figures and the table."""
    head = ("tier", "what fails", "calls made", "faults", "met", "restored meanwhile", "wrong")
    rows = [
        (t.tier, t.what, t.n_calls, t.n_tried, t.n_met, t.n_restored, len(t.wrong)) for t in found
    ]
    figures: dict[str, Any] = {
        "kinds of faults": len(found),
        "faults, each with two engines one after another": sum(t.n_tried for t in found),
        "faults that were met: threads do not always call as often": sum(t.n_met for t in found),
        "answers compared": sum(t.n_compared for t in found),
        "prefixes restored meanwhile": sum(t.n_restored for t in found),
        "not as it is to be": sum(len(t.wrong) for t in found),
        "seconds": round(seconds, 1),
    }
    command = " ".join(["python -m tests.reliability.tier_faults", *options, "--save"])
    return Record("tier_faults", CLAIM, command, figures, [Table(head, rows, "One fault each.")])


async def prove(tiers: list[str], n_calls: int) -> list[Tried]:
    """Try every fault of these tiers."""
    return [tried for tier in tiers for tried in await try_tier(tier, n_calls)]


def main() -> int:
    """Run the command line; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.tier_faults")
    parser.add_argument("--calls", type=int, default=100, help="k from 1 to this")
    parser.add_argument("--neighbour", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="keep the record")
    given = parser.parse_args()
    if given.neighbour is not None:
        return anyio.run(be_neighbour, given.neighbour)
    started = time.perf_counter()
    found = anyio.run(prove, list(TIERS), given.calls)
    wrong = [line for tried in found for line in tried.wrong]
    options = [argument for argument in sys.argv[1:] if argument != "--save"]
    made = record(found, time.perf_counter() - started, options)
    return conclude(made, wrong, is_kept=given.save)


if __name__ == "__main__":
    sys.exit(main())
