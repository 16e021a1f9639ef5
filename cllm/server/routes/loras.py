"""`/lora-adapters`, and the adapters that a body selects: by name, by llama-server's id, or by `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from cllm import Engine
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import invalid
from cllm.server.state import state_of

router: APIRouter = APIRouter(route_class=SafeRoute, tags=["operation"])


def loras_of(
    engine: Engine, lora: dict[str, float] | list[dict[str, float]] | None, model: str | None
) -> dict[str, float] | None:
    """Return the scales of the adapters of a request by their names; None for the default scales.

    Without `lora`, an adapter's name as `model` selects that adapter alone.

    Raises
    ------
    Problem
        400: an entry of `lora` is malformed, or has an unknown id.
    """
    loaded = engine.model.loras
    if isinstance(lora, Mapping):
        return dict(lora)
    if lora is not None:
        wanted: dict[str, float] = {}
        for i, each in enumerate(lora):
            number, scale = each.get("id"), each.get("scale")
            if not isinstance(number, int) or scale is None:
                raise invalid(f"lora[{i}]", 'must be {"id": …, "scale": …}')
            if not 0 <= number < len(loaded):
                raise invalid(f"lora[{i}].id", f"is {number}, there are {len(loaded)} adapters")
            wanted[loaded[number].name] = scale
        return wanted
    named = next((info for info in loaded if info.name == model), None)
    return None if named is None else {named.name: named.scale or 1.0}


@router.get("/lora-adapters", summary="The LoRA adapters that requests may name")
async def lora_adapters(request: Request) -> list[dict[str, Any]]:
    """Return the adapters as llama-server does, with names; `scale` holds for requests that name no adapters."""
    loaded = state_of(request).serving.model.loras
    return [
        {
            "id": number,
            "name": info.name,
            "path": info.path,
            "scale": info.scale,
            "alora_invocation_tokens": list(info.invocation_tokens),
        }
        for number, info in enumerate(loaded)
    ]
