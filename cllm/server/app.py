"""The ASGI application of one engine: its routes and its middleware."""

from __future__ import annotations

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
from cllm.server.config import ServerConfig
from cllm.server.engine_task import EngineTask, MountedStart, make_engine
from cllm.server.http.api_keys import KeyRing
from cllm.server.http.limits import STATIC_URL, HeadAsGet, Limits, OtherPaths
from cllm.server.http.problems import RESPONSES, FaultsAnswered, Problem, answer_problem
from cllm.server.operation.access import AccessLog
from cllm.server.operation.metrics import AnswerCounter, Metrics
from cllm.server.routes import (
    embeddings,
    generate,
    info,
    llama_server,
    loras,
    messages,
    ollama,
    openai,
    responses,
    slots,
    tokens,
    transcriptions,
)
from cllm.server.routes.page import add_page
from cllm.server.state import ServerState

N_CTX_UNKNOWN = 128 << 10  # tokens, for limits on a body that has yet to name one of several models


def create_app(
    engine: Engine | EngineConfig | None = None,
    config: ServerConfig | None = None,
    *,
    on_failed: Callable[[], None] = lambda: None,
    make_engine: Callable[[EngineConfig], Engine] = make_engine,
    is_guarded: bool = True,
) -> FastAPI:
    """Return an ASGI application that serves one model, to be run or mounted in another one.

    Run by itself, it starts to load the model at once and answers 503 until the model is loaded.  A mounted
    application gets no start event.  It loads the model at its first request, which waits, and frees the
    model when the event loop ends.

    Parameters
    ----------
    engine : Engine or EngineConfig, optional
        An engine that the caller has entered and closes; or the settings of an engine that the application
        owns.  None: an engine with the embedded model.
    config : ServerConfig, optional
    on_failed : callable
        Called without arguments when the model cannot be loaded, or when the engine fails later.
    make_engine : callable
        Returns an engine for the settings, not entered.
    is_guarded : bool
        False leaves the checks of hosts, origins, keys and sizes to the outer application; see `add_guards`.
        Downloads and reloads then need no key.

    Raises
    ------
    MissingExtraError
        `otlp_traces_endpoint` is set, but the extra `tracing` is not installed.
    """
    config = ServerConfig() if config is None else config
    state = ServerState(config)
    task: EngineTask | None = None
    if isinstance(engine, Engine):
        state.engine, state.settings = engine, engine.given_config
        state.metrics.watch(engine.statistics)
    else:
        state.settings = EngineConfig() if engine is None else engine
        task = EngineTask(state, state.settings, on_failed, make_engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        finished = anyio.Event()
        async with anyio.create_task_group() as group:
            if task is not None:
                task.renew()  # the application may have been made in another event loop
                group.start_soon(task.run, finished)
                task.has_begun = True
            try:
                yield
            finally:
                state.stop()
                finished.set()
                if state.engine is None:  # still loading: no request waits for the model
                    group.cancel_scope.cancel()
        await state.tracing.aclose()

    # `Limits` checks the key before a body is read; the dependency only adds the button to `/docs`.
    app = FastAPIOffline(
        title="cllm",
        version=__version__,
        summary="One llama.cpp model behind HTTP",
        redoc_url=None,
        static_url=STATIC_URL,
        dependencies=[Security(HTTPBearer(auto_error=False))] if config.needs_key else [],
        lifespan=lifespan,
    )
    app.state.server, app.state.engine_task = state, task
    routes = (  # they are searched in this order: the usual ones first
        generate,
        openai,
        embeddings,
        messages,
        responses,
        transcriptions,
        llama_server,
        ollama,
        loras,
        tokens,
        slots,
        info,
    )
    for each in routes:
        app.include_router(each.router, responses=RESPONSES)
    if config.page:
        add_page(app)
    _build(app)
    answer_errors(app)
    if task is not None:
        app.add_middleware(MountedStart, task=task)
    if is_guarded:
        add_guards(app, config, state.n_body_bytes_max)
    known = frozenset(route.path for each in routes for route in each.router.routes)
    app.state.known_paths = known
    add_outermost(app, state.metrics, known)
    return app


def _build(app: FastAPI) -> None:
    """Build the routes now.

    FastAPI builds those of a router at its first request: for 55 ms, in the event loop.  It changes Python's
    filters of warnings meanwhile, which are shared by all threads: of several servers that build at the same
    time, one raises a warning of pydantic as an error, if warnings are errors.
    """
    nowhere = {"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []}
    for route in app.routes:
        route.matches(dict(nowhere))


def answer_errors(app: FastAPI) -> None:
    """Answer the errors of an application in the form of its clients; the first middleware to be added."""
    for error in (CllmError, Problem, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, answer_problem)
    app.add_middleware(FaultsAnswered)


def add_outermost(app: FastAPI, metrics: Metrics, known: frozenset[str]) -> None:
    """Add the middleware that sees all requests and answers, rejections included; the last to be added.

    Parameters
    ----------
    metrics : Metrics
        Counts the answers.
    known : frozenset of str
        Paths of the routes.
    """
    app.add_middleware(AnswerCounter, metrics=metrics)
    app.add_middleware(HeadAsGet)
    app.add_middleware(OtherPaths, known=known)


def add_guards(
    app: FastAPI, config: ServerConfig, n_bytes_max: Callable[[], int] | None = None
) -> None:
    """Add the middleware that checks requests before the application sees them.

    Parameters
    ----------
    n_bytes_max : callable, optional
        Returns how many bytes a body may have.  None: the model is not known yet.
    """
    unknown = config.n_body_bytes_max(N_CTX_UNKNOWN, takes_media=True)
    keys = None if config.api_keys is None else KeyRing(config.api_keys)
    app.add_middleware(
        Limits, config=config, n_bytes_max=n_bytes_max or (lambda: unknown), keys=keys
    )
    app.add_middleware(AccessLog)
    if config.cors_origins:
        # Outside `Limits`: browsers send no key with a preflight, and pages may read rejections.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-ID"],
        )
