"""`/health`, `/props`, `/metrics`, `/live`: for operators."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, ClassVar

import anyio
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from cllm import DownloadError, EngineStatus, ModelLoadError, SamplingParams, __version__
from cllm.server.bodies.fields import MEDIA_MARKER, Text
from cllm.server.bodies.schemas import Body
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import RETRY_AFTER_S, Problem, invalid
from cllm.server.http.replies import Reply, Writer
from cllm.server.operation.metrics import Metrics, MetricsOfModels
from cllm.server.routes.live_feed import frame_of, period_s
from cllm.server.state import state_of, visible_slots

router: APIRouter = APIRouter(route_class=SafeRoute, tags=["operation"])
LATEST = ":latest"  # the tag that clients of Ollama add to a name without one


class ReloadBody(Body):
    """`POST /admin/reload`: another model, by file or name; without one, the present model again."""

    is_optional: ClassVar[bool] = True

    model: Text | None = None


DEAD = (EngineStatus.FAILED, EngineStatus.CLOSED)


@router.get("/v1/health", summary="Whether requests are served", include_in_schema=False)
@router.get("/healthz", summary="Whether requests are served", include_in_schema=False)
@router.get("/readyz", summary="Whether requests are served", include_in_schema=False)
@router.get("/health", summary="Whether requests are served")
async def health(request: Request) -> JSONResponse:
    """Return the status of the engine: 200 while it is ready, otherwise 503 with a reason."""
    answer = _health(request)
    if answer["status"] == EngineStatus.READY:
        return JSONResponse({**answer, "status": "ok"})
    return JSONResponse(answer, 503, headers={"Retry-After": str(RETRY_AFTER_S)})


@router.get("/livez", summary="Whether the server works, or has to be restarted")
async def livez(request: Request) -> JSONResponse:
    """Return the status of the engine: 503 if only a restart helps, otherwise 200, also while it loads or drains.

    A stalled engine with a process of its own is alive: the process is replaced after `hang_timeout_s`.
    """
    answer, engine = _health(request), state_of(request).engine
    is_stalled = answer["status"] == EngineStatus.STALLED
    is_mended = engine is not None and engine.config.process and engine.config.hang_timeout_s
    is_dead = answer["status"] in DEAD or (is_stalled and not is_mended)
    return JSONResponse(answer, 503 if is_dead else 200)


def _health(request: Request) -> dict[str, Any]:
    state = state_of(request)
    answer: dict[str, Any]
    if state.engine is None:
        failure = state.failure
        reason = "the model is being loaded" if failure is None else str(failure)
        status = EngineStatus.STARTING if failure is None else EngineStatus.FAILED
        answer = {"status": status, "reason": reason}
    else:
        now = state.engine.health()
        answer = {
            "status": now.status,
            "model": state.model_name,
            "modalities": state.engine.model.modalities,
            "version": __version__,
            "heartbeat_age_s": round(now.heartbeat_age_s, 3),
            "ping_interval_s": state.config.ping_interval_s,
        }
        if now.reason:
            answer["reason"] = now.reason
        if state.is_draining:
            answer = {"status": EngineStatus.DRAINING, "reason": "the server is shutting down"}
    return answer


@router.post(
    "/admin/reload",
    summary="Read the model again, without a gap",
    openapi_extra={"requestBody": {"required": False}},
)
async def reload(body: ReloadBody, request: Request) -> dict[str, Any]:
    """Load the model's file, or another model, beside the present model, and use it for new requests.

    The middleware `Limits` has checked the admin key.
    """
    state = state_of(request)
    try:
        model = body.model
        # With several models, the field has selected this one.
        is_this = model is not None and model.removesuffix(LATEST) == state.model_name
        if model is not None and not is_this and state.is_pooled:
            raise invalid(
                "model",
                f"{model[:80]!r} is not this model: use POST /api/pull, or a server of one model",
            )
        seconds = await state.reload(None if is_this else model)
    except anyio.BusyResourceError:
        raise Problem(409, "the model is being reloaded") from None
    except DownloadError as error:
        raise Problem(502, str(error)) from None
    except (ModelLoadError, OSError) as error:
        if model is None:
            raise
        raise invalid("model", str(error)) from None
    return {"model": state.model_name, "seconds": round(seconds, 3)}


@router.get("/props", summary="The model, its chat template and the abilities of the template")
async def props(request: Request) -> dict[str, Any]:
    """Return the properties of the model, as llama-server does; its clients read them when they start."""
    engine = state_of(request).serving
    model, config = engine.model, engine.config
    abilities = await engine.template_abilities()
    params = SamplingParams()
    defaults = {field.name: getattr(params, field.name) for field in fields(params)}
    defaults["logit_bias"] = {}
    return {
        "default_generation_settings": {"n_ctx": model.n_ctx, "params": defaults},
        "total_slots": config.n_seq_max,
        "model_alias": state_of(request).model_name,
        "model_path": model.path,
        "modalities": {
            "vision": "image" in model.modalities,
            "audio": "audio" in model.modalities,
        },
        "devices": model.devices,
        "tuned": model.tuned,
        "media_marker": MEDIA_MARKER,
        "chat_template": model.chat_template,
        "bos_token": model.bos_token or "",
        "eos_token": model.eos_token or "",
        "chat_template_caps": None if abilities is None else asdict(abilities),
        "build_info": f"cllm {__version__}",
    }


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return metrics_answer(request, state_of(request).metrics)


def metrics_answer(request: Request, metrics: Metrics | MetricsOfModels) -> Response:
    """Return metrics in Prometheus' text format.

    Those of the clients' keys are added for the general key alone: a client must not see the others.
    """
    state = request.scope["state"]
    keys = None if "key" in state else state.get("keys")
    text = metrics.text() + (b"" if keys is None else keys.text())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/live", summary="The engine as it runs, as server-sent events")
async def live(request: Request) -> Response:
    """Send the state of the engine at most ten times a second, until the client leaves or the server stops."""
    state = state_of(request)

    async def produce(writer: Writer) -> None:
        is_first = True
        while not state.is_draining:
            frame = await state.live.get(lambda: frame_of(state))
            told = state.live.with_history(frame) if is_first else frame
            if "slots" in told:
                told = told | {"slots": visible_slots(request, told["slots"])}
            await writer.events([(None, told)])
            is_first = False
            with anyio.move_on_after(period_s(frame)):
                await state.stopping.wait()
        await writer.end([])

    return Reply(produce, state.config.ping_interval_s)
