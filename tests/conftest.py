"""Fixtures named after states; every engine test runs under asyncio and trio."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

# Every engine of the suite, those in child processes too, compares its bookkeeping with llama.cpp's after
# every tick, and fails where they differ.  Read when cllm is imported.
os.environ.setdefault("CLLM_AUDIT", "tick")

# A background job inherits an ignored SIGINT and passes it to its children.  A test that ends a child with
# Ctrl-C would then wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import _cllm_pytest
from cllm import Engine, EngineConfig, log_once
from cllm.engine.core.commands import AddRequest, Command
from cllm.engine.core.row_cost import RowCost
from cllm.engine.process.engine_process import EngineProcess
from cllm.engine.thread.mailbox import Inbox
from tests.time_limits import raise_time_limits
from tools import make_model

T = TypeVar("T")
# The same examples every time; `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.register_profile("fast", settings.get_profile("suite"), max_examples=30)
settings.register_profile("search", deadline=None, max_examples=2000)


def examples(n: int, **given: Any) -> settings:
    """Hypothesis settings: n examples in `make test-full`, a quarter of them in `make test`."""
    is_fast = settings().max_examples == settings.get_profile("fast").max_examples
    return settings(max_examples=n // 4 if is_fast else n, **given)


def few_in_fast(values: Iterable[T], is_fast: Callable[[T], bool]) -> list[Any]:
    """Parameters of a test: in `make test` those that are fast, in `make test-full` the others, too."""
    return [v if is_fast(v) else pytest.param(v, marks=pytest.mark.full) for v in values]


def some_in_fast(values: Iterable[T], every: int = 3) -> list[Any]:
    """Parameters of a test: in `make test` the first of each `every`, in `make test-full` the others, too."""
    return [
        pytest.param(
            *(v if isinstance(v, tuple) else (v,)), marks=[pytest.mark.full] * bool(i % every)
        )
        for i, v in enumerate(values)
    ]


def is_there(pid: int) -> bool:
    """Return True if the process exists; a zombie, which has ended and was not waited for, counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def our_threads() -> list[str]:
    """The names of cllm's own threads in this process."""
    return [t.name for t in threading.enumerate() if t.name.startswith("cllm")]


def n_threads() -> int:
    """Return the number of threads of this process, those of libraries too, but for worker threads of event loops.

    How many worker threads an event loop has depends on what ran at the same moment, and idle ones stay
    for some seconds.
    """
    while True:
        threads = threading.enumerate()
        n_all = len([*Path("/proc/self/task").iterdir()])
        if threads == threading.enumerate():  # no worker has begun or ended meanwhile
            break
    return n_all - sum(t.name.startswith(("AnyIO worker", "Trio thread")) for t in threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option of the suite."""
    parser.addoption(
        "--over-process", action="store_true",
        help="give every engine a process of its own, but for those of tests marked same_process",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Load the hypothesis profile of the run, and set the defaults of engines and the limits of their helpers.

    `process=True` is the default with --over-process.  No engine uses what the developer's own engines have tuned.
    None guesses tokens by default: how many ticks an answer takes would depend on the speed of the machine.
    """
    is_fast = "not full" in config.getoption("markexpr")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast" if is_fast else "suite"))
    defaults = EngineConfig.__init__.__kwdefaults__
    assert defaults is not None
    defaults["tune"] = defaults["speculation"] = None
    raise_time_limits()  # some tests set others
    _cllm_pytest.HIDDEN.clear()  # here, the frames of cllm say what is wrong
    if config.getoption("--over-process"):
        defaults["process"] = True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the collected tests from garbage collection, which took 7 % of the CPU time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what only `make test-exhaustive` runs; with --over-process, leave out tests without an engine."""
    _mark_other_loops(items)
    _mark_other_cases(items)
    if config.getoption("--over-process"):
        config.hook.pytest_deselected(items=[item for item in items if not _names_engine(item)])
        items[:] = filter(_names_engine, items)
        _skip_same_process(items)


def _mark_other_loops(items: Iterable[pytest.Item]) -> None:
    """Mark one event loop of each `one_loop` test `exhaustive`."""
    on_loops: dict[str, list[pytest.Item]] = {}
    for item in items:
        loop = getattr(getattr(item, "callspec", None), "params", {}).get("anyio_backend")
        if loop in EVENT_LOOPS and item.get_closest_marker("one_loop") is not None:
            on_loops.setdefault(item.nodeid.replace(loop, ""), []).append(item)
    for name, twins in on_loops.items():
        if len(twins) == 2:
            twins[zlib.crc32(name.encode()) % 2].add_marker("exhaustive")


def _mark_other_cases(items: Iterable[pytest.Item]) -> None:
    """Mark cases of `sampled` tests `exhaustive`: all but about one in n of those that are marked `full`."""
    for item in items:
        markers = {marker.name: marker for marker in item.iter_markers()}
        if not {"sampled", "full"} <= markers.keys() or "exhaustive" in markers:
            continue
        # Not each n-th: parameters alternate.
        if zlib.crc32(item.nodeid.encode()) % markers["sampled"].args[0]:
            item.add_marker("exhaustive")


def _names_engine(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    return module is not None and "Engine" in vars(module.obj)


def _skip_same_process(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if (marker := item.get_closest_marker("same_process")) is not None:
            reason = f"needs its engine in this process: {marker.args[0]}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the crash reports of the suite out of the user's state directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _nothing_was_said() -> None:
    """Forget the messages that `log_once` has logged in earlier tests."""
    log_once._said.clear()


@pytest.fixture(scope="module", autouse=True)
def _all_threads_end() -> Iterator[None]:
    """Check after each file that no thread of cllm is left: it could make a test of another file fail."""
    yield
    assert our_threads() == []


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give rows a fixed small cost, so that drafts do not depend on how busy the machine is."""
    for name in ("seconds", "measured"):
        monkeypatch.setattr(RowCost, name, lambda _self, n_rows: 1.0 + 0.001 * n_rows)


def indices_selected(request: pytest.FixtureRequest, test: Callable[..., object]) -> list[int]:
    """The `index` of each case of a test that this run selects."""
    return [
        int(str(item.callspec.params["index"]))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.obj is test
    ]


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """A random-weight llama model, F16, written once into the cache directory."""
    return make_model.ensure("tiny-llama", "F16")


@pytest.fixture
def deadly_model(tiny_model_path: Path, tmp_path: Path) -> Path:
    """A model whose vocabulary has a token twice: llama.cpp aborts the process that loads it."""
    one, other = b"\x01\0\0\0\0\0\0\0a", b"\x01\0\0\0\0\0\0\0b"
    data = tiny_model_path.read_bytes()
    assert data.count(one + other) == 1
    path = tmp_path / "deadly.gguf"
    path.write_bytes(data.replace(one + other, one + one))
    return path


@pytest.fixture(scope="session")
def llama_cpp_source() -> Path:
    """The source of llama.cpp, with its vocabularies and templates."""
    try:
        return make_model.llama_cpp_source()
    except make_model.MakeModelError as error:
        pytest.skip(str(error))


def type_name(value: object) -> str:
    """Return a test id for a value whose repr has its address: every worker has to find the same ids."""
    return type(value).__name__


EVENT_LOOPS = ("asyncio", "trio")
IS_SANITIZED = (
    "CLLM_SANITIZER_REPORTS" in os.environ
)  # libllama has sanitizers: see `make test-asan`


def on_either_loop(name: str, values: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize by `name`, under one event loop and the other in turn.

    Use it for long lists of cases that take a second each and hardly depend on the event loop.
    """
    pairs = [(value, EVENT_LOOPS[n % 2]) for n, value in enumerate(values)]
    return pytest.mark.parametrize((name, "anyio_backend"), pairs)


@pytest.fixture(params=EVENT_LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops."""
    backend: str = request.param
    return backend


# One compute thread: the embedded model is too small for two, and a busy neighbour makes llama.cpp's
# spinning threads many times slower.
QUIET: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}


def running_batch(engine: Engine) -> Mapping[str, int]:
    """Return rows of the running decode by request id; for an engine process, 1 for each id of its latest."""
    if isinstance(host := engine._parts.thread, EngineProcess):
        process = host._process
        return dict.fromkeys(process._batch.read().request_ids if process is not None else (), 1)
    return engine._parts.interrupter.batch


def put_at_once(inbox: Inbox, commands: Iterable[Command]) -> None:
    """Put commands into an inbox so that one tick sees all of them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the thread that the first one wakes gets the GIL after the last one
    try:
        for command in commands:
            inbox.put(command)
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def submitted_together(engine: Engine, n_requests: int) -> Iterator[None]:
    """Hold back the next `n_requests` requests until the last of them is submitted.

    The scheduler then sees them together, also on a machine that is slow to submit them.
    """
    inbox = engine._parts.inbox
    held: list[Command] = []
    with pytest.MonkeyPatch.context() as patch:

        def hold(command: Command) -> None:
            held.append(command)
            if sum(isinstance(c, AddRequest) for c in held) == n_requests:
                patch.undo()
                put_at_once(inbox, held)

        patch.setattr(inbox, "put", hold)
        yield
        assert inbox.put != hold, "fewer requests were submitted"


@pytest.fixture
async def engine(anyio_backend: str) -> AsyncIterator[Engine]:
    """The embedded model with sixteen running sequences."""
    async with Engine(n_ctx=4096, n_seq_max=16, **QUIET) as engine:
        yield engine
