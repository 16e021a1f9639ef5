"""`/slots`: who holds which seq_id; and what one holds saved, restored and erased, as llama-server has it."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Request

from cllm.server.body import json_of
from cllm.server.problems import Problem, invalid, unavailable
from cllm.server.state import ServerState, state_of

SLOTS_S = 5.0
FILE_NAME = re.compile(
    r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
)  # a file of that directory, and no other

router = APIRouter(tags=["operation"], prefix="/slots")


@router.get("", summary="Every seq_id and who holds it")
async def slots(request: Request) -> list[dict[str, Any]]:
    """Sequences with their requests, positions and cells."""
    slots = None
    with anyio.move_on_after(SLOTS_S):
        slots = await state_of(request).serving.slots()
    if slots is None:
        raise unavailable(f"the inference thread has not answered within {SLOTS_S:g} s")
    return [asdict(slot) for slot in slots]


@router.post("/{seq_id}", summary="Save, restore or erase what a seq_id holds")
async def change(
    seq_id: int, action: Literal["save", "restore", "erase"], request: Request
) -> dict[str, Any]:
    """With `filename` in the body, in the directory of `--slot-save-path`.

    What is restored is no slot's: every request that begins alike goes on after it.
    """
    state = state_of(request)
    engine = state.serving
    if action == "erase":
        return {"id_slot": seq_id, "n_erased": await engine.erase_slot(seq_id)}
    name, path = await _file_of(state, request)
    started = time.perf_counter()
    if action == "save":
        try:
            saved = await engine.save_slot(seq_id, path)
        except OSError as error:
            raise Problem(500, f"filename: {name!r} cannot be written: {error.strerror}") from None
        counts = {"n_saved": saved.n_tokens, "n_written": saved.n_bytes}
    else:
        if not path.is_file():
            raise Problem(404, f"filename: there is no {name!r}", param="filename")
        saved = await engine.restore_slot(path)
        counts = {"n_restored": saved.n_tokens, "n_read": saved.n_bytes}
    took_ms = round(1000 * (time.perf_counter() - started), 3)
    timings = {f"{action}_ms": took_ms}
    return {"id_slot": seq_id, "filename": name, **counts, "timings": timings}


async def _file_of(state: ServerState, request: Request) -> tuple[str, Path]:
    """The file that a body names."""
    directory = state.config.slot_save_path
    if directory is None:
        raise invalid("action", "slots have no directory; start the server with --slot-save-path")
    value = await json_of(request)
    name = value.get("filename") if isinstance(value, dict) else None
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        limit = "must be a name of at most 128 letters, digits, '.', '_' and '-', not begun by '.'"
        raise invalid("filename", limit)
    return name, Path(directory) / name
