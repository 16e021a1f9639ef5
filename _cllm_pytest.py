"""The pytest plugin of cllm: `cllm_engine` and `cllm_fake_engine`, for pytest-asyncio and anyio; `cllm_server`.

Outside the package, because pytest imports every plugin in every run, and importing the package costs
numpy: nothing of cllm is imported before a test asks for an engine.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import pytest

if TYPE_CHECKING:
    from cllm import Engine, EngineConfig
    from cllm.testing import FakeEngine
    from cllm.testing.fake_server import FakeServer

    AnyEngine = TypeVar("AnyEngine", bound=Engine)

# One compute thread: the embedded model is too small for two, and spinning threads of several test
# processes slow each other down.
QUIET: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 8, "n_threads": 1, "n_threads_batch": 1}

# An engine that has not answered for so many seconds after a test is stuck in a decode.
TEARDOWN_S = 3.0

MARKERS = (
    "cllm_engine(model=None, **options): what the fixture `cllm_engine` is made with",
    "cllm_fake_engine(answers=None, **options): what the fixture `cllm_fake_engine` is made with",
    "cllm_server(rules): what the fixture `cllm_server` answers",
)
# Packages whose frames are left out of the tracebacks of failed tests.
HIDDEN = {"cllm", "_cllm_pytest"}
TEST_LOOP_SCOPE = "asyncio_default_test_loop_scope"
LoopScope = Literal["function", "class", "module", "package", "session"]


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known, and the fixtures for pytest-asyncio if it is there."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if _default_loop_scope(config) is not None:
        config.pluginmanager.register(_asyncio_fixtures(), "cllm-asyncio")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Hide the frames of cllm in the traceback of a failed test; `--full-trace` shows them."""
    error = None if call.excinfo is None else call.excinfo.value
    seen = set[int]()  # causes can form a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] in HIDDEN:
                frame.f_globals["__tracebackhide__"] = True
        error = error.__context__ if error.__cause__ is None else error.__cause__


@pytest.fixture
def cllm_engine(request: pytest.FixtureRequest) -> Engine:
    """An engine that serves, of the embedded model unless `@pytest.mark.cllm_engine` says another.

    When the test has ended, nothing may run any more and its bookkeeping must agree with llama.cpp's.
    """
    engine: Engine = request.getfixturevalue(_variant(request, "cllm_engine"))
    return engine


@pytest.fixture
def cllm_fake_engine(request: pytest.FixtureRequest) -> FakeEngine:
    """A `FakeEngine` that serves, with what `@pytest.mark.cllm_fake_engine` says.

    When the test has ended, nothing may run any more and its bookkeeping must agree with its decoder's.
    """
    engine: FakeEngine = request.getfixturevalue(_variant(request, "cllm_fake_engine"))
    return engine


@pytest.fixture
def cllm_server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """A server without a model on a free port, which answers as `@pytest.mark.cllm_server(rules)` says.

    For any client, in any language, with or without an event loop: `url`, `base_url` of OpenAI's
    clients, and what was `asked`.
    """
    from cllm.testing.fake_server import fake_server

    mark = request.node.get_closest_marker("cllm_server")
    with ExitStack() as owned:
        with _in_one_line("cllm_server"):
            said = () if mark is None else mark.args
            rules = inspect.signature(lambda rules=(): rules).bind(
                *said, **(mark.kwargs if mark else {})
            )
            server = owned.enter_context(fake_server(rules.arguments.get("rules", [])))
        yield server


def _variant(request: pytest.FixtureRequest, name: str) -> str:
    """The fixture that opens its engine in the event loop of this test."""
    if "anyio_backend" in request.fixturenames:
        return f"_{name}_anyio"
    scope = _default_loop_scope(request.config)
    if scope is None:
        raise pytest.UsageError(
            f"{request.node.name} needs an event loop for {name}: "
            "mark it with pytest.mark.anyio, or install pytest-asyncio 0.26 or later"
        )
    mark = request.node.get_closest_marker("asyncio")
    if mark is not None:
        scope = mark.kwargs.get("loop_scope") or mark.kwargs.get("scope") or scope
    return f"_{name}_asyncio_{scope}"


def _default_loop_scope(config: pytest.Config) -> str | None:
    """Return the scope of the event loop that pytest-asyncio's tests share; None without pytest-asyncio, or with an older one."""
    try:
        return str(config.getini(TEST_LOOP_SCOPE))
    except (KeyError, ValueError):
        return None


def _made(
    request: pytest.FixtureRequest, marker: str, kind: type[AnyEngine], config: EngineConfig
) -> AnyEngine:
    """An engine as the markers of a test say, the closest last.

    What they say is merged; a `config` replaces all the settings that were said before it.
    """
    from cllm.engine.config import check_known

    signature = inspect.signature(kind)
    settings: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers(marker))):
        said = signature.bind(*mark.args, **mark.kwargs).arguments
        if (whole := said.pop("config", None)) is not None:
            config, settings = kind(config=whole).config, {}  # says what is wrong with it
        check_known(options := said.pop("options", {}))
        settings |= options
        if "model" in said:
            settings["model"] = said.pop("model")
        others |= said
    return kind(**others, config=replace(config, **settings))


@contextmanager
def _in_one_line(marker: str) -> Iterator[None]:
    """Make an error of the block, about what a marker says, one line without a traceback."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise pytest.fail.Exception(f"@pytest.mark.{marker}: {error}", pytrace=False) from None


def _engine(request: pytest.FixtureRequest) -> Engine:
    import cllm

    with _in_one_line("cllm_engine"):
        return _made(request, "cllm_engine", cllm.Engine, cllm.EngineConfig(**QUIET))


def _fake_engine(request: pytest.FixtureRequest) -> FakeEngine:
    from cllm import EngineConfig
    from cllm.testing import FakeEngine

    with _in_one_line("cllm_fake_engine"):
        return _made(request, "cllm_fake_engine", FakeEngine, EngineConfig())


def _opened(make: Callable[[pytest.FixtureRequest], Engine]) -> Callable[..., Any]:
    """The function of a fixture: each of them needs one of its own."""

    async def open_engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        async with _serving(make(request)) as engine:
            yield engine

    return open_engine


_cllm_engine_anyio = pytest.fixture(_opened(_engine))
_cllm_fake_engine_anyio = pytest.fixture(_opened(_fake_engine))


def _asyncio_fixtures() -> ModuleType:
    """A fixture of each kind for every scope that the event loop of a test can have."""
    import pytest_asyncio

    module = ModuleType("cllm_asyncio_fixtures")
    for scope in get_args(LoopScope):
        fixture = pytest_asyncio.fixture(loop_scope=scope)
        setattr(module, f"_cllm_engine_asyncio_{scope}", fixture(_opened(_engine)))
        setattr(module, f"_cllm_fake_engine_asyncio_{scope}", fixture(_opened(_fake_engine)))
    return module


@asynccontextmanager
async def _serving(engine: Engine) -> AsyncIterator[Engine]:
    import anyio

    async with engine:
        yield engine
        if engine.health().status in ("ready", "stalled", "draining"):
            with anyio.move_on_after(TEARDOWN_S):  # closing ends the decode it is stuck in
                await _check_left(engine)


async def _check_left(engine: Engine) -> None:
    """A test has ended: its requests have too, and the bookkeeping agrees."""
    from cllm.testing import assert_books_agree

    slots = await engine.slots()  # answered when all that was cancelled before has ended
    try:
        await assert_books_agree(engine, idle=True)
    except AssertionError as error:
        if running := [slot.request_id for slot in slots if slot.request_id is not None]:
            error.add_note(f"a stream was left open: {', '.join(running)}")
        raise
