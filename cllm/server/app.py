"""The application: one engine, its routes, and what stands around them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from cllm import CllmError, Engine, EngineConfig, __version__
from cllm.server import generate, info, openai, tokens
from cllm.server.config import ServerConfig
from cllm.server.limits import STATIC_URL, Limits
from cllm.server.metrics import AnswerCounter
from cllm.server.problems import RESPONSES, Problem, answer_problem
from cllm.server.state import ServerState

logger = logging.getLogger("cllm.server")


def create_app(
    engine: EngineConfig | None = None,
    config: ServerConfig | None = None,
    *,
    on_failed: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An ASGI application that serves one model.

    It answers from the start on: 503 until the model is loaded.

    Parameters
    ----------
    engine : EngineConfig, optional
        None: the embedded model.
    config : ServerConfig, optional
    on_failed : callable
        Called when the model cannot be loaded.
    """
    config = ServerConfig() if config is None else config
    state = ServerState(config)

    async def serve(finished: anyio.Event, engine: Engine) -> None:
        try:
            async with engine:
                state.metrics.watch(engine.statistics)
                state.engine = engine
                logger.info("serving %s", engine.config.model_path.name)
                await state.stopping.wait()
                await engine.drain(config.drain_timeout_s)
                await finished.wait()  # what it has said may not have been read yet
        except Exception as error:
            state.failure = error
            is_told = isinstance(error, CllmError)
            logger.error("%s", error if is_told else "the engine has failed", exc_info=not is_told)
            on_failed()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        finished = anyio.Event()
        made = Engine(config=EngineConfig() if engine is None else engine)
        async with anyio.create_task_group() as group:
            group.start_soon(serve, finished, made)
            try:
                yield
            finally:
                state.stop()
                finished.set()
                if state.engine is None:  # nobody is to wait for a model that is still loaded
                    group.cancel_scope.cancel()
        await state.tracing.aclose()

    # Checked by `Limits`, before a body is read; here for the button on the page.
    has_key = config.api_key is not None
    app = FastAPIOffline(
        title="cllm",
        version=__version__,
        summary="One llama.cpp model behind HTTP",
        redoc_url=None,
        static_url=STATIC_URL,
        dependencies=[Security(HTTPBearer(auto_error=False))] if has_key else [],
        lifespan=lifespan,
    )
    app.state.server = state
    for routes in (generate, openai, tokens, info):
        app.include_router(routes.router, responses=RESPONSES)
    for error in (CllmError, Problem, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, answer_problem)
    app.add_middleware(Limits, config=config)
    if config.cors_origins:
        # Around the limits: browsers send no key with a preflight, and pages may read refusals.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-ID"],
        )
    app.add_middleware(AnswerCounter, metrics=state.metrics)
    return app
