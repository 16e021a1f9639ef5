"""Prefixes as files: there tomorrow, and a fault of a disk is no fault of an answer."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import Engine, InvalidArgumentError
from cllm.engine import state_file
from cllm.engine.core.commands import PrefixesRemoved, PrefixLoaded
from cllm.engine.core.saved_states import SavedStates
from cllm.engine.request import SequenceState
from cllm.engine.state_file import MAGIC
from cllm.engine.thread import prefix_files
from cllm.engine.thread.prefix_files import SUFFIX, PrefixFiles
from cllm.testing import FakeEngine
from tests.conftest import QUIET

KNOWN, OTHER = "known " * 40, "other " * 45
ANSWERS = {"": "an answer"}
SMALL: dict[str, Any] = {"n_ctx": 320, "n_seq_max": 1}


@pytest.fixture(autouse=True)
def _no_time_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all waiting files at the end, and restore every prefix: a slow disk makes no difference."""
    monkeypatch.setattr(prefix_files, "CLOSE_S", 50.0)
    for cost_s in ("copy_s", "restore_s"):
        monkeypatch.setattr(SavedStates, cost_s, lambda *_: 0.0)


class Told:
    """What the inference thread is told, and a way to wait for it."""

    def __init__(self) -> None:
        self.loaded: list[PrefixLoaded | PrefixesRemoved] = []
        self._has_come = threading.Semaphore(0)

    def __call__(self, loaded: PrefixLoaded | PrefixesRemoved) -> None:
        self.loaded.append(loaded)
        self._has_come.release()

    def next(self) -> PrefixLoaded | PrefixesRemoved:
        assert self._has_come.acquire(timeout=30)
        return self.loaded[-1]


def opened(
    directory: Path, told: Callable[[PrefixLoaded | PrefixesRemoved], None], n_bytes: int = 1 << 20
) -> PrefixFiles:
    return PrefixFiles(directory, "key", n_bytes, told)


def written(directory: Path, n: int, n_bytes: int = 100) -> list[str]:
    """Files of so many prefixes, written and closed."""
    files = opened(directory, Told(), 1 << 30)
    names = [
        files.write(np.arange(i, i + 64, dtype=np.int32), SequenceState(bytes(n_bytes), 64))
        for i in range(n)
    ]
    files.close()
    return [name for name in names if name is not None]


def test_what_was_written_is_found_by_the_next_and_read(tmp_path: Path) -> None:
    told = Told()
    names = written(tmp_path, 3)
    files = opened(tmp_path, told)
    try:
        assert {name for _, name, _ in files.stored} == set(names)
        assert [len(tokens) for tokens, _, _ in files.stored] == [64] * 3
        assert files.n_bytes == sum(p.stat().st_size for p in tmp_path.glob(f"*/*{SUFFIX}"))
        files.load(names[1])
        assert told.next() == PrefixLoaded(names[1], SequenceState(bytes(100), 64))
    finally:
        files.close()


def test_one_that_is_still_being_written_is_read_from_memory(tmp_path: Path) -> None:
    told, state = Told(), SequenceState(b"state", 64)
    files = opened(tmp_path, told)
    try:
        name = files.write(np.arange(64, dtype=np.int32), state)
        assert name is not None
        files.load(name)
        assert told.next() == PrefixLoaded(name, state)
    finally:
        files.close()


def test_one_that_is_of_no_use_is_removed_also_if_it_is_being_written(tmp_path: Path) -> None:
    (there,) = written(tmp_path, 1)
    files = opened(tmp_path, Told())
    files.remove(there)
    other = files.write(np.arange(7, 71, dtype=np.int32), SequenceState(bytes(100), 64))
    assert other is not None
    files.remove(other)
    files.close()
    assert list(tmp_path.glob("*/*")) == []
    assert files.n_bytes == 0


def test_files_never_take_more_than_they_may_and_the_oldest_go(tmp_path: Path) -> None:
    names = written(tmp_path, 6, 10_000)
    for i, name in enumerate(names):
        os.utime(tmp_path / "key" / name, (i, i))
    files = opened(tmp_path, Told(), 45_000)
    files.touch(names[0])
    files.write(np.arange(500, 564, dtype=np.int32), SequenceState(bytes(10_000), 64))
    files.close()
    left = {p.name for p in tmp_path.glob(f"*/*{SUFFIX}")}
    assert sum(p.stat().st_size for p in tmp_path.glob(f"*/*{SUFFIX}")) <= 45_000
    assert names[0] in left
    assert names[1] not in left


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-1],
    "cut in its header": lambda data: data[:70],
    "empty": lambda data: b"",
    "a bit flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "another kind": lambda data: b"something else entirely" + data,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_seen_at_start", [True, False])
def test_a_damaged_file_is_removed_and_never_used(
    damage: str, is_seen_at_start: bool, tmp_path: Path
) -> None:
    (name,) = written(tmp_path, 1)
    path = tmp_path / "key" / name
    if is_seen_at_start:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    told = Told()
    files = opened(tmp_path, told)
    if not is_seen_at_start:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    files.load(name)
    assert told.next() == PrefixLoaded(name, None)
    files.close()
    assert not path.exists()


def test_who_waits_hears_of_it_whatever_reading_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise MemoryError

    (name,) = written(tmp_path, 1)
    told = Told()
    files = opened(tmp_path, told)
    monkeypatch.setattr(prefix_files, "read_state_file", fails)
    files.load(name)
    assert told.next() == PrefixLoaded(name, None)
    files.close()
    assert (tmp_path / "key" / name).exists()  # it may be read another time


def test_one_that_another_engine_has_removed_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (name,) = written(tmp_path, 1)
    told = Told()
    files = opened(tmp_path, told)
    (tmp_path / "key" / name).unlink()
    files.load(name)
    assert told.next() == PrefixLoaded(name, None)
    files.close()
    assert not caplog.records


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "mkstemp"])
def test_a_disk_that_fails_is_told_of_once_and_nothing_stays(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = opened(tmp_path, Told())
    if call == "mkstemp":
        monkeypatch.setattr(tempfile, "mkstemp", fails)
    elif call == "write":
        monkeypatch.setattr(os, "fdopen", FullFile)
    elif call == "replace":
        monkeypatch.setattr(Path, "replace", fails)
    else:
        monkeypatch.setattr(os, "fsync", fails)
    for i in range(3):
        files.write(np.arange(i, i + 64, dtype=np.int32), SequenceState(bytes(100), 64))
    files.close()
    assert sum("writes no files" in record.message for record in caplog.records) == 1
    assert list(tmp_path.glob("*/*")) == []


class FullFile:
    """A file on a disk that has no room for it."""

    def __init__(self, handle: int, mode: str) -> None:
        self._handle = handle

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)

    def write(self, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_killed_process_has_begun_is_removed_later(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    folder.mkdir()
    for name, age_s in ((".old.part", 2 * prefix_files.STALE_S), (".new.part", 0)):
        (folder / name).write_bytes(b"half")
        when = (folder / name).stat().st_mtime - age_s
        os.utime(folder / name, (when, when))
    opened(tmp_path, Told()).close()
    assert [p.name for p in folder.iterdir()] == [".new.part"]


# --- With an engine -----------------------------------------------------------------------------
pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


async def use(directory: Path, prompts: list[str], **options: Any) -> list[int]:
    """Computed tokens of each of these prompts, one after another."""
    found = []
    options = {**SMALL, **options}
    async with FakeEngine(ANSWERS, prefix_cache_dir=directory, **options) as engine:
        for prompt in prompts:
            before = engine.statistics()
            assert (await engine.generate(prompt)).text == ANSWERS[""]
            after = engine.statistics()
            found.append(after.n_prefill_tokens - before.n_prefill_tokens)
        assert await engine.audit() == []
    return found


async def test_yesterdays_prefixes_are_there_today(tmp_path: Path) -> None:
    first = await use(tmp_path, [KNOWN + "1"])
    assert first == [len(KNOWN) + 1]
    assert await use(tmp_path, [KNOWN + "2"]) == [1]
    assert await use(tmp_path, [KNOWN + "3", OTHER, KNOWN + "4"], prefix_cache_bytes=0) == [
        1,
        len(OTHER),
        1,
    ]


async def test_forgetting_the_prefix_cache_removes_its_files(tmp_path: Path) -> None:
    await use(tmp_path, [KNOWN])
    async with FakeEngine(ANSWERS, prefix_cache_dir=tmp_path, **SMALL) as engine:
        await engine.reset_prefix_cache()
        before = engine.statistics().n_prefill_tokens
        await engine.generate(KNOWN)
        assert engine.statistics().n_prefill_tokens - before == len(KNOWN)


async def test_forgetting_the_prefix_cache_ends_when_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed directly after the call leaves no file."""
    await use(tmp_path, [KNOWN])
    may_remove = threading.Event()
    remove = PrefixFiles._remove

    def slow(files: PrefixFiles, path: Path) -> None:
        assert may_remove.wait(30)
        remove(files, path)

    monkeypatch.setattr(PrefixFiles, "_remove", slow)
    left: list[list[Path]] = []

    async def reset(engine: Engine) -> None:
        await engine.reset_prefix_cache()
        left.append(stored_in(tmp_path))

    async with FakeEngine(ANSWERS, prefix_cache_dir=tmp_path, **SMALL) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reset, engine)
            await engine.generate("short")
            await engine.audit()
            await anyio.lowlevel.checkpoint()
            assert stored_in(tmp_path)
            assert not left, "it has not returned"
            may_remove.set()
        assert left == [[]]


def stored_in(directory: Path) -> list[Path]:
    return list(directory.glob(f"*/*{SUFFIX}"))


def test_a_prefix_that_is_forgotten_before_it_is_written_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, n_written = threading.Event(), 0
    write = state_file.write_state_file

    def slow(*args: Any) -> int:
        nonlocal n_written
        assert may_write.wait(30)
        n_written += 1
        return write(*args)

    monkeypatch.setattr(prefix_files, "write_state_file", slow)
    told = Told()
    files = opened(tmp_path, told)
    try:
        for i in range(3):  # the thread may have begun to write the first
            assert files.write(np.arange(i, i + 64, dtype=np.int32), SequenceState(b"a", 64))
        files.clear()
        assert files.is_clearing
        may_write.set()
        assert told.next() == PrefixesRemoved()
        assert not files.is_clearing
        assert n_written <= 1
        assert not stored_in(tmp_path)
        assert files.write(np.arange(64, dtype=np.int32), SequenceState(b"a", 64))
    finally:
        files.close()
    assert len(stored_in(tmp_path)) == 1


async def test_two_engines_use_one_directory_at_once(tmp_path: Path) -> None:
    async with (
        FakeEngine(ANSWERS, prefix_cache_dir=tmp_path, **SMALL) as one,
        FakeEngine(ANSWERS, prefix_cache_dir=tmp_path, **SMALL) as other,
    ):
        for prompt in (KNOWN, OTHER, KNOWN, OTHER):
            for engine in (one, other):
                assert (await engine.generate(prompt)).text == ANSWERS[""]
        await one.reset_prefix_cache()
        for engine in (one, other):
            assert (await engine.generate(KNOWN)).text == ANSWERS[""]
            assert await engine.audit() == []


async def test_a_request_that_waits_for_a_file_can_be_cancelled_or_expire_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await use(tmp_path, [KNOWN])
    may_read = threading.Event()
    read = state_file.read_state_file

    def slow(path: Path) -> Any:
        assert may_read.wait(30)
        return read(path)

    monkeypatch.setattr(prefix_files, "read_state_file", slow)
    async with FakeEngine(ANSWERS, prefix_cache_dir=tmp_path, **SMALL) as engine:
        async with engine.stream(KNOWN + "1") as waiting:
            expired = await engine.generate(KNOWN + "2", timeout=0.05)
            assert expired.finish_reason == "deadline"
            assert (await engine.generate("short")).text == ANSWERS[""]
            assert engine.statistics().n_waiting == 1
            await waiting.cancel()
            assert (await waiting.completion()).finish_reason == "cancelled"
        async with engine.stream(KNOWN + "3") as waiting:
            may_read.set()
            assert (await waiting.completion()).text == ANSWERS[""]
        assert await engine.audit() == []


async def test_a_directory_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidArgumentError) as caught:
        async with FakeEngine(ANSWERS, prefix_cache_dir=file):
            pass
    assert caught.value.field == "prefix_cache_dir"


async def test_a_real_engine_goes_on_from_files_with_the_same_tokens_and_over_a_process(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 2, "deterministic": True, **QUIET}
    prompt = "count: 1 2 3 4 5 6 7 8 9 " * 6
    async with Engine(**options) as engine:
        alone = await engine.generate(prompt, temperature=0.0, max_tokens=8)
    for process in (False, True):
        found = []
        for _ in range(2):
            async with Engine(
                prefix_cache_dir=tmp_path / str(process), process=process, **options
            ) as engine:
                completion = await engine.generate(prompt, temperature=0.0, max_tokens=8)
                assert completion.token_ids == alone.token_ids
                found.append(completion.usage.n_cached)
                assert await engine.audit() == []
        assert found[0] == 0
        assert found[1] >= completion.usage.n_prompt - 1


# --- What others do in the directory --------------------------------------------------------------
def test_a_limit_holds_for_the_directory_whoever_has_filled_it(tmp_path: Path) -> None:
    engines = [PrefixFiles(tmp_path, key, 4000, Told()) for key in "abc"]
    for files in engines:
        for n in range(8):
            files.write(np.arange(n, n + 8, dtype=np.int32), SequenceState(bytes(500), 8))
    for files in engines:
        files.close()
    assert sum(path.stat().st_size for path in tmp_path.rglob(f"*{SUFFIX}")) <= 4000


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


def put_deep_header(path: Path) -> None:
    head = b'{"kind": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    path.write_bytes(MAGIC + bytes(32) + struct.pack("<QQ", len(head), 0) + head)


def put_sparse_header(path: Path) -> None:
    path.write_bytes(MAGIC + bytes(32) + struct.pack("<QQ", 1 << 42, 0))
    os.truncate(path, (1 << 42) + len(MAGIC) + 48)


def put_sparse_data(path: Path) -> None:
    head = b'{"kind": "prefix 1", "token_ids": [1, 2]}'
    path.write_bytes(MAGIC + bytes(32) + struct.pack("<QQ", len(head), 1 << 42) + head)
    os.truncate(path, (1 << 42) + len(MAGIC) + 48 + len(head))


@pytest.mark.parametrize(
    "put", [put_fifo, put_link_to_fifo, put_deep_header, put_sparse_header, put_sparse_data]
)
def test_what_is_no_file_of_ours_neither_hangs_nor_ends_the_engine(
    put: Callable[[Path], None], tmp_path: Path
) -> None:
    names = written(tmp_path, 1)
    put(tmp_path / "key" / f"other{SUFFIX}")
    told = Told()
    files = opened(tmp_path, told)
    try:
        assert names[0] in {name for _, name, _ in files.stored}
        files.load(f"other{SUFFIX}")
        assert told.next() == PrefixLoaded(f"other{SUFFIX}", None)
        files.load(names[0])
        assert told.next() != PrefixLoaded(names[0], None)
    finally:
        files.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
@pytest.mark.parametrize("place", [".", "key"])
def test_a_directory_that_others_can_write_to_is_rejected(
    place: str, mode: int, tmp_path: Path
) -> None:
    (tmp_path / "key").mkdir(mode=0o700)
    (tmp_path / place).chmod(mode)
    with pytest.raises(InvalidArgumentError, match="no other can write to"):
        opened(tmp_path, Told())


def test_a_directory_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidArgumentError, match="of this user"):
        opened(tmp_path, Told())


def test_what_is_made_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        opened(tmp_path / "a" / "b", Told()).close()
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
