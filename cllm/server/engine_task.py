"""EngineTask: the engine of one application, from its load to its end, in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import anyio
from anyio.lowlevel import current_token
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm import CllmError, ClosedError, Engine, EngineConfig, EngineFailedError, FinishReason
from cllm.server.http.limits import is_file, is_open
from cllm.server.http.problems import route_path
from cllm.server.state import ServerState

logger: logging.Logger = logging.getLogger("cllm.server")

WARM_UP_LIMIT_S = 10.0  # for a chat template that is slow to render the test messages


def make_engine(config: EngineConfig) -> Engine:
    """Return an engine with these settings, not entered."""
    return Engine(config=config)


class EngineTask:
    """Task that loads the model, gives it to requests, and drains the engine at the end of the server.

    Parameters
    ----------
    state : ServerState
        Receives the engine as `engine`, or the error as `failure`.
    config : EngineConfig
    on_failed : callable
        Called without arguments when the model cannot be loaded, or when the engine fails later.
    make_engine : callable
        Returns an engine for the settings, not entered.

    Attributes
    ----------
    has_begun : bool
        True if `run` has been started, or if its caller starts it: `begin` then does nothing.
    is_background : bool
        True if `begin` has started `run`, for an application without a lifespan.
    load_ended : anyio.Event
        Set when the model is loaded or its load has failed.
    """

    def __init__(
        self,
        state: ServerState,
        config: EngineConfig,
        on_failed: Callable[[], None],
        make_engine: Callable[[EngineConfig], Engine],
    ) -> None:
        self._state = state
        self._config = config
        self._on_failed = on_failed
        self._make_engine = make_engine
        self._background: object = None  # an asyncio task without a reference may be collected
        self.has_begun: bool = False
        self.is_background: bool = False
        self.load_ended: anyio.Event = anyio.Event()

    async def run(self, finished: anyio.Event | None = None) -> None:
        """Load the model, serve until `ServerState.stop`, then drain and close the engine.

        The engine closes once `finished` is set: all answers are read.  Errors are logged and kept, not raised.
        """
        state = self._state
        try:
            async with self._make_engine(self._config) as engine:
                await _warm_up(engine)
                state.metrics.watch(engine.statistics)
                state.engine = engine
                logger.info("serving %s", engine.config.model_path.name)
                self.load_ended.set()
                await self._until_stopping(engine)
                await _drain(engine, state.config.drain_timeout_s)
                if finished is not None:
                    await finished.wait()  # clients may not have read the last answers yet
        except Exception as error:
            state.failure, state.engine = error, None
            is_told = isinstance(error, CllmError)
            logger.error("%s", error if is_told else "the engine has failed", exc_info=not is_told)
            self._on_failed()
        finally:
            self.load_ended.set()
            if self.is_background:
                if state.failure is None:
                    self.renew()
                await state.tracing.aclose()

    async def _until_stopping(self, engine: Engine) -> None:
        """Wait until the server is to stop; raise `EngineFailedError` if the engine stops first."""

        async def watch() -> None:
            await engine.wait_stopped()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await self._state.stopping.wait()
            tasks.cancel_scope.cancel()
        if not self._state.is_draining:
            raise EngineFailedError(f"the engine has failed: {engine.health().reason}")

    def renew(self) -> None:
        """Prepare for another run, perhaps in another event loop."""
        self._state.renew()
        self.has_begun = False
        self.is_background = False
        self.load_ended = anyio.Event()

    def begin(self) -> None:
        """Start `run` as a background task, unless it has begun; the end of the event loop cancels it."""
        if self.has_begun:
            return
        self.has_begun = self.is_background = True
        token = current_token().native_token
        if isinstance(token, asyncio.AbstractEventLoop):
            self._background = token.create_task(self.run())
        else:
            import trio

            trio.lowlevel.spawn_system_task(self.run)


async def _drain(engine: Engine, timeout_s: float) -> None:
    """Let the requests of the engine finish, and log how that goes."""
    before = engine.statistics()
    n_open = before.n_running + before.n_waiting
    if n_open:
        logger.info("draining: %d requests may finish within %g s", n_open, timeout_s)
    started_at = anyio.current_time()
    await engine.drain(timeout_s)
    finished = engine.statistics().n_finished
    n_cancelled = finished[FinishReason.CANCELLED] - before.n_finished[FinishReason.CANCELLED]
    seconds = anyio.current_time() - started_at
    logger.info("drained in %.1f s, %d requests were cancelled", seconds, n_cancelled)


async def _warm_up(engine: Engine) -> None:
    """Compile and test the chat template, so that the first chat does not wait for that."""
    try:
        with anyio.move_on_after(WARM_UP_LIMIT_S):
            if await engine.template_abilities() is not None:
                await engine.render_chat([{"role": "user", "content": "?"}])
    except (ClosedError, EngineFailedError):
        raise
    except Exception as error:  # chats will fail with it; all other requests work
        logger.warning("the chat template cannot be used: %s", error)


class MountedStart:
    """ASGI middleware: an application without a lifespan loads its model at the first request.

    Starlette runs only the lifespan of the outermost application.  In a mounted application, the first
    request starts the load, except one for a file of the page or the documentation.  Requests wait for
    the model, except those for `/health` and `/metrics`.
    """

    def __init__(self, app: ASGIApp, task: EngineTask) -> None:
        self._app = app
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = route_path(scope) if scope["type"] == "http" else "/"
        if not is_file(path) and not self._task.load_ended.is_set():
            self._task.begin()
            if self._task.is_background and not (is_open(path) or path == "/metrics"):
                await self._task.load_ended.wait()
        await self._app(scope, receive, send)
