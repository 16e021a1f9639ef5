"""`/slots`: the holder of each seq_id, and the erasure of a cached prefix."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Request

from cllm.removed import replacement
from cllm.server.http.problems import Problem, unavailable
from cllm.server.state import state_of, visible_slots

SLOTS_S = 5.0

router: APIRouter = APIRouter(tags=["operation"], prefix="/slots")


@router.get("", summary="Every seq_id and its holder")
async def slots(request: Request) -> list[dict[str, Any]]:
    """Return each seq_id with its request, positions and cells; status 503 after 5 s without an answer."""
    slots = None
    with anyio.move_on_after(SLOTS_S):
        slots = await state_of(request).serving.slots()
    if slots is None:
        raise unavailable(f"the inference thread has not answered within {SLOTS_S:g} s")
    return [asdict(slot) for slot in visible_slots(request, slots)]


@router.post("/{seq_id}", summary="Erase a cached prefix")
async def change(
    seq_id: int, action: Literal["save", "restore", "erase"], request: Request
) -> dict[str, Any]:
    """Free the cells of a cached prefix of `n_erased` tokens; 501 for llama-server's `save` and `restore`."""
    if action != "erase":
        raise Problem(
            501, f"action={action} is not supported; instead: {replacement('slot_save_path')}"
        )
    if "key" in request.scope["state"]:
        raise Problem(403, "a key of a client erases no cached prefix: others may use it")
    n_erased = await state_of(request).serving.erase_slot(seq_id)
    return {"id_slot": seq_id, "n_erased": n_erased}
