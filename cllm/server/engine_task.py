"""EngineTask: the engine of one application, from its load to its end, in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import anyio
from anyio.lowlevel import current_token
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm import CllmError, ClosedError, Engine, EngineConfig, EngineFailedError
from cllm.server.http.limits import is_file, is_open, route_path
from cllm.server.state import ServerState

logger: logging.Logger = logging.getLogger("cllm.server")

WARM_UP_LIMIT_S = 10.0  # of a template that takes its time over everything it is tried with


def make_engine(config: EngineConfig) -> Engine:
    """An engine of these settings."""
    return Engine(config=config)


class EngineTask:
    """Loads the model, lets requests have it, drains it when the server is to stop.

    Parameters
    ----------
    state : ServerState
        Gets the engine, or why there is none.
    config : EngineConfig
    on_failed : callable
        Called when the model cannot be loaded.
    make_engine : callable
        Makes the engine of such settings.

    Attributes
    ----------
    has_begun, is_background : bool
        Whether it runs or has run, and whether without a lifespan.
    load_ended : anyio.Event
        The model is loaded, or cannot be.
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
        """Serve until the state says stop; `finished` when all answers have been read."""
        state = self._state
        try:
            async with self._make_engine(self._config) as engine:
                await _warm_up(engine)
                state.metrics.watch(engine.statistics)
                state.engine = engine
                logger.info("serving %s", engine.config.model_path.name)
                self.load_ended.set()
                await self._until_stopping(engine)
                await engine.drain(state.config.drain_timeout_s)
                if finished is not None:
                    await finished.wait()  # what it has said may not have been read yet
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
        """Wait for the end of the server, or of the engine: then the server has to end too."""

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
        """Run beside everything else, until the event loop ends and cancels it; once."""
        if self.has_begun:
            return
        self.has_begun = self.is_background = True
        token = current_token().native_token
        if isinstance(token, asyncio.AbstractEventLoop):
            self._background = token.create_task(self.run())
        else:
            import trio

            trio.lowlevel.spawn_system_task(self.run)


async def _warm_up(engine: Engine) -> None:
    """Prepare the chat template: the first chat would wait for its import, compilation and test."""
    try:
        with anyio.move_on_after(WARM_UP_LIMIT_S):
            if await engine.template_abilities() is not None:
                await engine.render_chat([{"role": "user", "content": "?"}])
    except (ClosedError, EngineFailedError):
        raise
    except Exception as error:  # a chat will be told; whatever else is asked for can be had
        logger.warning("the chat template cannot be used: %s", error)


class MountedStart:
    """ASGI middleware: an application without a lifespan loads its model with the first request.

    Starlette runs the lifespan of the outermost application alone, so one that is mounted would wait
    for its own for ever.  Requests wait for the model; `/health` answers at once, and files begin nothing.
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
