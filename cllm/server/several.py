"""The application of several models; the `model` of a request selects one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from cllm import Engine, EngineConfig, ModelInfo, __version__
from cllm.server.app import add_guards, add_outermost, answer_errors
from cllm.server.config import ServerConfig
from cllm.server.engine_task import make_engine
from cllm.server.http.body import SafeRoute, parsed
from cllm.server.http.limits import ADMIN_PATHS, is_open
from cllm.server.http.problems import Problem, problem_of, route_path, unavailable
from cllm.server.model_pool import ModelPool, PooledModel
from cllm.server.operation.metrics import MetricsOfModels
from cllm.server.routes import ollama
from cllm.server.routes.info import LATEST, metrics_answer
from cllm.server.routes.openai import architecture_of, listed, model_list
from cllm.server.routes.transcriptions import FORM_TYPE

MAX_PARTS, MAX_PART_BYTES = 64, 1024  # of a form: parts that are looked at, and bytes of each


def create_models_app(
    models: Mapping[str, EngineConfig],
    config: ServerConfig | None = None,
    *,
    make_engine: Callable[[EngineConfig], Engine] = make_engine,
) -> FastAPI:
    """Return an ASGI application of several models, each loaded at its first request.

    The query parameter `model`, or else the field `model` of the body, selects the model of a request.  Without
    either, it is the first loaded model, or the first of all if none is loaded.

    Parameters
    ----------
    models : mapping
        Engine settings by model name; at least one.
    config : ServerConfig, optional
        Settings of the server; None: the defaults.
    make_engine : callable
        Returns an engine for the settings, not entered.
    """
    config = ServerConfig() if config is None else config
    pool = ModelPool(models, config, make_engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with pool.running():
            yield

    app = FastAPI(title="cllm", version=__version__, openapi_url=None, lifespan=lifespan)
    app.state.server = pool
    started_at = int(time.time())

    @app.get("/v1/models")
    async def all_models() -> dict[str, Any]:
        pool.pulls.settle()
        return model_list([_told(each, started_at) for each in pool.models.values()])

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, Any]:
        return _told(_named(pool, name), started_at)

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return await ollama.version()

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        pool.pulls.settle()
        return {"models": [_listed(each) for each in pool.models.values()]}

    @app.get("/api/ps")
    async def ps() -> dict[str, Any]:
        loaded = [each for each in pool.models.values() if each.is_loaded]
        return {"models": [ollama.running(each.name, _info_of(each)) for each in loaded]}

    safe = APIRouter(route_class=SafeRoute)

    @safe.post("/api/pull")
    async def pull(body: ollama.OllamaPullBody, _: Request) -> Response:
        return ollama.pulled(pool.pulls, body)

    @safe.delete("/api/pull")
    async def cancel_pull() -> dict[str, str]:
        return pool.pulls.cancel()

    app.include_router(safe)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        asked = request.query_params.get("model")
        models = pool.models.values() if asked is None else (_named(pool, asked),)
        of_models = {model.name: model.app.state.server.metrics for model in models}
        return metrics_answer(request, MetricsOfModels(pool.metrics, of_models))

    @app.get("/v1/health")
    @app.get("/healthz")
    @app.get("/readyz")
    @app.get("/livez")
    @app.get("/health")
    async def health() -> JSONResponse:
        pool.pulls.settle()
        models = {model.name: model.status for model in pool.models.values()}
        answer = {
            "status": "draining" if pool.is_draining else "ok",
            "version": __version__,
            "models": models,
            "ping_interval_s": config.ping_interval_s,
        }
        return JSONResponse(answer)

    app.mount("", _Front(pool))
    answer_errors(app)
    add_guards(app, config)
    add_outermost(app, pool.metrics, pool.default.app.state.known_paths)
    return app


class _Front:
    """ASGI application that passes each request to the application of its model."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Files are the same for all models.  A request without a route needs no model.
        if is_open(route_path(scope)) or not self._is_answered(scope):
            await self._pool.default.app(scope, receive, send)
            return
        try:
            name, unloads, receive = await _read(scope, receive)
            model = self._pool.default if name is None else _named(self._pool, name)
            path = route_path(scope)
            if path == "/api/show" and not model.is_loaded:  # clients ask for all models
                await JSONResponse(ollama.UNLOADED)(scope, receive, send)
                return
            if unloads is not None and not model.is_loaded:
                await JSONResponse(unloads)(scope, receive, send)
                return
            if (scope["method"] != "POST" or path in ADMIN_PATHS) and not model.is_loaded:
                # A GET loads nothing: a page of another site can cause one that has no Origin.
                raise unavailable(
                    f"the model {model.name!r} is not loaded: a request for an answer loads it, a GET does not"
                )
            if scope["method"] != "POST":  # what watches a model does not keep it from being freed
                await model.app(scope, receive, send)
                return
            async with self._pool.using(model) as app:
                await app(scope, receive, send)
        except Problem as problem:
            await problem_of(problem).response_to(scope)(scope, receive, send)

    def _is_answered(self, scope: Scope) -> bool:
        """True if there is a route of this path and method."""
        app = self._pool.default.app
        return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)


async def _read(
    scope: Scope, receive: Receive
) -> tuple[str | None, dict[str, Any] | None, Receive]:
    """Return the model that a request names, if any, and a `receive` that repeats its body.

    Between them is the answer for a request that only unloads its model; None for another request.
    """
    (asked,) = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])[:1]
    if scope["method"] != "POST":
        return asked, None, receive
    messages: list[Message] = []
    while not messages or messages[-1].get("more_body", False):
        messages.append(await receive())
        if messages[-1]["type"] == "http.disconnect":
            raise Problem(400, "the client has left before its body was complete")
    kind = Headers(scope=scope).get("content-type", "")
    body = b"".join(each.get("body", b"") for each in messages)
    named = _name_in(body, kind)
    if named is None and route_path(scope) == "/api/show":
        named = _name_in(body, kind, "name")
    unloads = ollama.unload_answer(route_path(scope), body)
    return named if asked is None else asked, unloads, _again(messages, receive)


def _name_in(body: bytes, content_type: str = "", field: str = "model") -> str | None:
    """Return the model that a field of a body names; None if it names none.

    Raises
    ------
    Problem
        400: the body is not JSON, or too large to parse; see `parsed`.
    """
    kind, options = parse_options_header(content_type)
    if kind == FORM_TYPE:
        return _name_in_form(body, options.get(b"boundary", b""))
    value = parsed(body) if body else None
    name = value.get(field) if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


def _name_in_form(body: bytes, boundary: bytes) -> str | None:
    """Return the value of the field `model`, which is in no file; None without one.

    It looks at the first `MAX_PARTS` parts, and at `MAX_PART_BYTES` of each.
    """
    mark, at = b"--" + boundary, 0
    for _ in range(MAX_PARTS if boundary and body.startswith(mark) else 0):
        at += len(mark)
        head, separator, value = body[at : at + MAX_PART_BYTES].partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            name, _, said = line.partition(b":")
            if not separator or name.strip().lower() != b"content-disposition":
                continue
            _, options = parse_options_header(said)
            if options.get(b"name") == b"model" and b"filename" not in options:
                return value.partition(b"\r\n--" + boundary)[0].decode("utf-8", "replace")
        mark = b"\r\n--" + boundary
        if (at := body.find(mark, at)) < 0:
            break
    return None


def _again(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def again() -> Message:
        for message in left:
            return message
        return await receive()

    return again


def _named(pool: ModelPool, name: str) -> PooledModel:
    pool.pulls.settle()
    model = pool.models.get(name) or pool.models.get(name.removesuffix(LATEST))
    if model is None:
        known = ", ".join(map(repr, pool.models))
        raise Problem(404, f"there is no model {name[:80]!r}, only {known}", param="model")
    return model


def _info_of(model: PooledModel) -> ModelInfo:
    """Return the properties of a loaded model."""
    info: ModelInfo = model.app.state.server.engine.model
    return info


def _listed(model: PooledModel) -> dict[str, Any]:
    """Return a model as Ollama lists it; one that is not loaded with its name alone."""
    if model.is_loaded:
        return ollama.listed(model.name, _info_of(model))
    return {"name": model.name, "model": model.name, "size": 0, "digest": "", "details": {}}


def _told(model: PooledModel, started_at: int) -> dict[str, Any]:
    told = listed(model.name, started_at, status=model.status)
    if model.is_loaded:
        info = _info_of(model)
        told |= {"max_model_len": info.n_ctx, "architecture": architecture_of(info)}
    return told
