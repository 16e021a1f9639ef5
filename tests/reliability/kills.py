"""Kills of an engine's process: `python -m tests.reliability.kills [--kills N] [--minutes M] [--save]`.

`--files N` changes one of the engine's files at each of N kills instead.

Readers repeat requests while the process is killed at random moments, crashes inside `llama_decode`, or
is stopped by SIGSTOP.  Every answer must have the tokens and the text that the request had before the kills,
and each delta once.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai

from benchmarks.measure import rss_mib
from cllm import Completion, Engine, EngineFailedError, EngineStatus, ModelChangedError, Restart
from cllm.engine.config import EMBEDDED_MODEL
from tests.conftest import QUIET
from tests.file_changes import CHANGES, FILE_KINDS, file_of
from tests.reliability.record import Record, Table, conclude
from tests.server.conftest import running

CLAIM = (
    "However the process of an engine ends, every stream goes on: each answer has the tokens and the "
    "text that it would have had, none twice and none lost, over HTTP too."
)
N_STREAMS, N_KILLS, N_CLIENTS = 200, 100, 8
PAUSE_S = (0.02, 0.4)  # between a restart and the next kill, by chance
MAX_GROWTH_MIB = 24.0
OPTIONS: dict[str, Any] = {
    "deterministic": True, "n_ctx": 8192, "n_seq_max": 16, "max_queue": 1000, "process": True,
    "hang_timeout_s": 1.5, **QUIET,
}  # fmt: skip
# Most requests draw random tokens: the state of a sampler is lost most easily.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *((f"count:{n}..{n + 30}", {"temperature": 0.0, "max_tokens": 120}) for n in range(0, 60, 10)),
    *((f"count:{n}..", {"temperature": 1.3, "seed": n, "max_tokens": 60, "ignore_eos": True})
      for n in range(10)),
    *((f"{n}+{n}=", {"temperature": 1.0, "seed": n, "mirostat": 2, "max_tokens": 30,
                     "ignore_eos": True}) for n in range(4)),
]  # fmt: skip


class Segfaults(Engine):
    """An engine whose process crashes with SIGSEGV inside `llama_decode`."""

    _child_backend = "tests.engine.process.poisonous:SegfaultsInDecode"


# Ways in which a process ends: by a signal that this program sends, or by itself (None).
KINDS: dict[str, tuple[type[Engine], signal.Signals | None]] = {
    "SIGKILL": (Engine, signal.SIGKILL),
    "SIGSEGV in llama_decode": (Segfaults, None),
    "SIGSTOP": (Engine, signal.SIGSTOP),
}


@dataclass
class Found:
    """Results of one way in which a process ends, under one event loop.

    Attributes
    ----------
    longest_gap_s : float
        Longest time between two deltas of a stream.
    """

    kind: str
    loop: str
    n_restarts: int = 0
    n_answers: int = 0
    n_tokens: int = 0
    longest_gap_s: float = 0.0
    restart_s: list[float] = field(default_factory=list)
    growth_mib: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        """Add a fault; only the first 20 are kept."""
        if len(self.wrong) < 20:
            self.wrong.append(f"{self.kind}, {self.loop}: {what}")


def n_descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


class Readers:
    """Concurrent readers, each with one request after the other, until `is_over`."""

    def __init__(self, engine: Engine, wholes: Sequence[Completion], found: Found) -> None:
        self._engine, self._wholes, self._found = engine, wholes, found
        self._numbers = itertools.count()
        self.is_over = False

    async def run(self, n_streams: int, until: Callable[[], Awaitable[None]]) -> None:
        """Run `n_streams` readers until `until` returns, and wait for their last answers."""
        async with anyio.create_task_group() as tasks:
            for _ in range(n_streams):
                tasks.start_soon(self._read_on)
            await until()
            self.is_over = True

    async def _read_on(self) -> None:
        while not self.is_over:
            number = next(self._numbers) % len(REQUESTS)
            try:
                await self._read(number)
            except Exception as error:
                self._found.note(f"{REQUESTS[number][0]} has ended with {error!r}")
                return

    async def _read(self, number: int) -> None:
        (prompt, options), whole = REQUESTS[number], self._wholes[number]
        ids: list[int] = []
        text, last = "", None
        async with self._engine.stream(prompt, **options) as stream:
            async for delta in stream:
                now = time.perf_counter()
                if last is not None:
                    self._found.longest_gap_s = max(self._found.longest_gap_s, now - last)
                last = now
                ids += delta.token_ids
                text += delta.text
            completion = await stream.completion()
        self._found.n_answers += 1
        self._found.n_tokens += len(ids)
        if not tuple(ids) == completion.token_ids == whole.token_ids:
            self._found.note(f"{prompt} has the tokens {ids}, not {whole.token_ids}")
        if not text == completion.text == whole.text:
            self._found.note(f"{prompt} is {text!r}, not {whole.text!r}")
        if completion.finish_reason != whole.finish_reason:
            self._found.note(f"{prompt} ends with {completion.finish_reason}")


async def kill(
    kind: str, *, loop: str, n_streams: int, n_kills: int, seconds: float = 0.0, seed: int = 0
) -> Found:
    """Kill a process at least `n_kills` times while streams run; with `seconds`, every 5 s for that time."""
    engine_type, number = KINDS[kind]
    found, draw = Found(kind, loop), random.Random(seed)
    async with Engine(**OPTIONS) as engine:
        wholes = [await engine.generate(prompt, **options) for prompt, options in REQUESTS]
    restarts: list[Restart] = []
    n_open = n_descriptors()
    async with engine_type(on_restart=restarts.append, **OPTIONS) as engine:
        readers = Readers(engine, wholes, found)
        rss = rss_mib()

        async def strike() -> None:
            ends_at = time.monotonic() + seconds
            while len(restarts) < n_kills or time.monotonic() < ends_at:
                n_before = len(restarts)
                await anyio.sleep(5.0 if seconds else draw.uniform(*PAUSE_S))
                pid = engine._parts.thread.pid  # type: ignore[attr-defined]
                if number is not None and pid is not None:
                    os.kill(pid, number)
                while len(restarts) == n_before:
                    await anyio.sleep(0.005)
            if number is None:  # this process crashes again and again, so the readers must stop now
                readers.is_over = True

        await readers.run(n_streams, strike)
        found.n_restarts = engine.statistics().n_restarts
        if found_by_audit := await engine.audit():
            found.note(f"the books differ: {found_by_audit}")
        told = engine.statistics()
        if told.n_kv_cells_used or told.n_running or told.n_waiting:
            found.note(f"something is left: {told}")
        gc.collect()
        found.growth_mib = rss_mib() - rss
    found.restart_s = [restart.duration_s for restart in restarts]
    if found.n_restarts < n_kills:
        found.note(f"{found.n_restarts} restarts of {n_kills}")
    if (n_left := n_descriptors()) > n_open:
        found.note(f"{n_left} descriptors, {n_open} before")
    if found.growth_mib > MAX_GROWTH_MIB:
        found.note(f"{found.growth_mib:.1f} MiB more")
    return found


# --- With other files -----------------------------------------------------------------------------
FILES = (*FILE_KINDS, "template")


async def change(file_kind: str, how: str, *, loop: str, seed: int) -> Found:
    """Change a file and kill the process at a random moment: no reader gets a token of other weights.

    A request that ends early ends with an `EngineFailedError` because of a `ModelChangedError`.
    """
    found, draw = Found(f"{file_kind} {how}", loop), random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(shutil.copyfile(EMBEDDED_MODEL, Path(directory) / "model.gguf"))
        file, more = file_of(file_kind, model)
        options = {**OPTIONS, "model": model, "n_ctx": 2048, "n_seq_max": 4, **more}
        requests = REQUESTS[4:8]
        async with Engine(**options) as engine:
            wholes = [await engine.generate(prompt, **asked) for prompt, asked in requests]

            async def read_on(number: int) -> None:
                (prompt, asked), whole, ids = (
                    requests[number],
                    wholes[number].token_ids,
                    list[int](),
                )
                try:
                    while True:
                        ids.clear()
                        async with engine.stream(prompt, **asked) as stream:
                            async for delta in stream:
                                ids += delta.token_ids
                        found.n_answers += 1
                        found.n_tokens += len(ids)
                        if tuple(ids) != whole:
                            found.note(f"{prompt} has the tokens {ids}, not {whole}")
                        if is_over.is_set():
                            return
                except EngineFailedError as error:
                    if not isinstance(error.__cause__, ModelChangedError):
                        found.note(f"{prompt} has ended with {error!r}")
                    if tuple(ids) != whole[: len(ids)]:
                        found.note(f"{prompt} had the tokens {ids}, not those of {whole}")

            is_over = anyio.Event()
            async with anyio.create_task_group() as tasks:
                for number in range(len(requests)):
                    tasks.start_soon(read_on, number)
                await anyio.sleep(draw.uniform(0.0, 0.1))
                CHANGES[how](file)
                await anyio.sleep(draw.choice((0.0, draw.uniform(0.0, 0.02))))
                if (pid := engine._parts.thread.pid) is not None:  # type: ignore[attr-defined]
                    os.kill(pid, signal.SIGKILL)
                is_over.set()
            found.n_restarts = 1
            if file_kind != "template":
                with anyio.move_on_after(30):
                    await engine.wait_stopped()
            has_failed = engine.health().status is EngineStatus.FAILED
            if has_failed != (file_kind != "template"):
                found.note(f"the engine {'has failed' if has_failed else 'serves on'}")
    return found


# --- Over HTTP ---------------------------------------------------------------------------------
async def kill_over_http(*, n_clients: int, n_kills: int, seed: int = 0) -> Found:
    """Kill the engine's process of a server while openai's client streams."""
    found, draw, is_over = Found("SIGKILL, openai's client", "asyncio"), random.Random(seed), False
    questions = [f"count:{n}..{n + 60}" for n in range(0, 80, 10)]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with running(log, "--deterministic", "--n-seq-max", "16") as server:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)

            async def ask(question: str) -> str:
                text, last = "", None
                stream = await client.completions.create(
                    model="m", prompt=question, temperature=0.7, seed=3, max_tokens=400, stream=True
                )
                async for chunk in stream:
                    now = time.perf_counter()
                    if last is not None:
                        found.longest_gap_s = max(found.longest_gap_s, now - last)
                    last = now
                    text += chunk.choices[0].text
                return text

            wholes = {question: await ask(question) for question in questions}
            found.longest_gap_s = 0.0

            async def read_on(number: int) -> None:
                for question in itertools.cycle(questions[number:] + questions[:number]):
                    if is_over:
                        return
                    try:
                        text = await ask(question)
                    except (openai.OpenAIError, httpx.HTTPError) as error:
                        found.note(f"{question} has ended with {error!r}")
                        return
                    found.n_answers += 1
                    if text != wholes[question]:
                        found.note(f"{question} is {text!r}, not {wholes[question]!r}")

            async with anyio.create_task_group() as tasks:
                for number in range(n_clients):
                    tasks.start_soon(read_on, number)
                for n_before in range(n_kills):
                    await anyio.sleep(draw.uniform(0.2, 1.0))
                    os.kill(server.engine_pid, signal.SIGKILL)
                    while server.metrics().get("cllm_restarts_total", 0) <= n_before:
                        await anyio.sleep(0.02)
                    while "restarting" in (await client._client.get(f"{server.url}/health")).text:
                        await anyio.sleep(0.02)
                is_over = True
            found.n_restarts = int(server.metrics()["cllm_restarts_total"])
            server.wait_idle()
            await client.close()
    return found


def record_of(all_found: Sequence[Found], command: str) -> Record:
    """Return the record for docs/reliability.md."""
    rows = [
        (
            f.kind, f.loop, f.n_restarts, f.n_answers, f.n_tokens or "-",
            f"{sorted(f.restart_s)[len(f.restart_s) // 2]:.2f}" if f.restart_s else "-",
            f"{f.longest_gap_s:.2f}", f"{f.growth_mib:.1f}", len(f.wrong),
        )
        for f in all_found
    ]  # fmt: skip
    head = (
        "how", "event loop", "restarts", "answers", "tokens", "restart s, p50", "longest gap s",
        "growth MiB", "wrong",
    )  # fmt: skip
    return Record(
        name="kills",
        claim=CLAIM,
        command=command,
        figures={
            "restarts": sum(f.n_restarts for f in all_found),
            "answers compared whole": sum(f.n_answers for f in all_found),
            "wrong": sum(len(f.wrong) for f in all_found),
        },
        tables=[
            Table(head, rows, "A gap may have several restarts in it, where they come in a row.")
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=N_KILLS)
    parser.add_argument("--streams", type=int, default=N_STREAMS)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="then kill every 5 s for this many minutes"
    )
    parser.add_argument(
        "--files", type=int, default=0, help="instead: kills at which a file changes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the figures")
    options = parser.parse_args(arguments)
    all_found: list[Found] = []

    def report(found: Found) -> None:
        all_found.append(found)
        print(f"{found.kind}, {found.loop}: {found.n_restarts} restarts, {found.n_answers} answers, "
              f"{len(found.wrong)} wrong", file=sys.stderr, flush=True)  # fmt: skip

    def run(kind: str, loop: str, n_kills: int, seconds: float = 0.0) -> None:
        async def kill_it() -> Found:
            return await kill(
                kind, loop=loop, n_streams=options.streams, n_kills=n_kills, seconds=seconds,
                seed=options.seed,
            )  # fmt: skip

        report(anyio.run(kill_it, backend=loop))

    def change_files() -> None:
        cases = itertools.cycle(itertools.product(("asyncio", "trio"), FILES, CHANGES))
        together: dict[tuple[str, str], Found] = {}
        for number, (loop, kind, how) in enumerate(itertools.islice(cases, options.files)):
            seed = options.seed + number
            found = anyio.run(partial(change, kind, how, loop=loop, seed=seed), backend=loop)
            so_far = together.setdefault((found.kind, loop), Found(found.kind, loop))
            so_far.n_restarts += found.n_restarts
            so_far.n_answers += found.n_answers
            so_far.n_tokens += found.n_tokens
            so_far.wrong += found.wrong
        for so_far in together.values():
            report(so_far)

    if options.files:
        change_files()
        wrong = [line for found in all_found for line in found.wrong]
        print(*wrong, sep="\n")
        return 1 if wrong else 0
    for loop in ("asyncio", "trio"):
        for kind in KINDS:
            run(kind, loop, max(1, options.kills // (10 if kind == "SIGSTOP" else 1)))

    async def over_http() -> Found:
        n_kills = max(5, options.kills // 5)
        return await kill_over_http(n_clients=N_CLIENTS, n_kills=n_kills, seed=options.seed)

    report(anyio.run(over_http))
    if options.minutes:
        run("SIGKILL", "asyncio", 1, 60 * options.minutes)
    assert threading.active_count() == 1
    command = f"python -m tests.reliability.kills --kills {options.kills} --seed {options.seed}"
    command += f" --minutes {options.minutes:g}" if options.minutes else ""
    wrong = [line for found in all_found for line in found.wrong]
    return conclude(record_of(all_found, command), wrong, is_kept=options.save)


if __name__ == "__main__":
    sys.exit(main())
