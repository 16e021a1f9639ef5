"""`/live`: the engine as it runs, as server-sent events, for the page at `/`.

The engine is queried only while the page is open; several pages share one query.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from cllm import CllmError, Engine, EngineStatus, LiveView, TickInfo, __version__
from cllm.server.operation.latest_frame import PERIOD_S
from cllm.server.state import ServerState

IDLE_PERIOD_S = 0.5  # for an idle engine: each query wakes the inference thread
QUANTILES = (0.5, 0.99)
_fields_of = attrgetter(*(field.name for field in fields(TickInfo)))


def period_s(frame: dict[str, Any]) -> float:
    """Return the seconds to wait after a frame; more if it has no ticks and no waiting requests."""
    is_idle = not (frame.get("ticks") or frame.get("n_waiting"))
    return IDLE_PERIOD_S if is_idle else PERIOD_S


async def frame_of(state: ServerState) -> dict[str, Any]:
    """Return the present state as a JSON object; only its status if no engine serves."""
    engine = state.engine
    if engine is None or state.is_draining:
        is_failed = state.failure is not None
        return {"status": EngineStatus.FAILED if is_failed else EngineStatus.STARTING}
    status = engine.health().status
    try:
        return {
            "status": status,
            **_view_as(await engine.live_view()),
            **_numbers_of(state, engine),
        }
    except CllmError as error:  # closed, failed, or being started again
        return {"status": status, "reason": str(error)}


def _view_as(view: LiveView) -> dict[str, Any]:
    """Return a view as a dict, with extents and ticks as tuples to keep the frame small."""
    return {
        "slots": view.slots,
        "extents": [(e.start, e.end, e.parent, e.seq_ids) for e in view.extents],
        "ticks": [_fields_of(tick) for tick in view.ticks],
        "n_waiting": view.n_waiting,
        "oldest_waiting_s": view.oldest_waiting_s,
    }


def _numbers_of(state: ServerState, engine: Engine) -> dict[str, Any]:
    now = engine.statistics()
    return {
        "model": state.model_name,
        "version": __version__,
        "n_ctx": engine.model.n_ctx,
        "devices": engine.model.devices,
        "has_process": engine.config.process,
        "now": time.monotonic(),
        "statistics": {
            "n_running": now.n_running,
            "n_paused": now.n_paused,
            "n_ticks": now.n_ticks,
            "n_output_tokens": now.n_output_tokens,
            "n_prefill_tokens": now.n_prefill_tokens,
            "n_cached_tokens": now.n_cached_tokens,
            "n_preemptions": now.n_preemptions,
            "n_swaps": now.n_swaps,
            "n_evictions": now.n_evictions,
            "n_restarts": now.n_restarts,
            "n_kv_cells": now.n_kv_cells,
            "n_kv_cells_used": now.n_kv_cells_used,
            "n_kv_cells_cached": now.n_kv_cells_cached,
            "n_prefix_bytes_host": now.n_prefix_bytes_host,
            "n_prefix_bytes_disk": now.n_prefix_bytes_disk,
            "n_finished": sum(now.n_finished.values()),
        },
        "ttft_s": _quantiles(state.metrics.latest_ttfts),
        "itl_s": _quantiles(state.metrics.latest_gaps),
    }


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[int(q * (len(ordered) - 1))] for q in QUANTILES] if ordered else []
