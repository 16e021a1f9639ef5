"""State of the engine for observers: the holder of each seq_id and cell, and the content of the last ticks."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from cllm.engine.core.commands import ExtentInfo, LiveView, SlotInfo, SlotState, TickInfo
from cllm.engine.core.decode_cost import TickShape
from cllm.engine.core.kv_cache import KVCache, Slot
from cllm.engine.core.kv_cache_manager import KVCacheManager
from cllm.engine.core.run_queue import RunQueue
from cllm.engine.core.scheduler import seq_id_of

N_TICKS_KEPT = 512


class TickTrace:
    """Record of the last `N_TICKS_KEPT` ticks, in memory that does not grow."""

    def __init__(self) -> None:
        self._rows = np.zeros((N_TICKS_KEPT, len(fields(TickInfo))))
        self._n_noted = 0
        self._n_taken = 0

    def note(
        self,
        shape: TickShape,
        n_drafts: int,
        started: float,
        planned: float,
        decoded: float,
        ended: float,
    ) -> None:
        """Note a tick that was decoded, and when it and each of its parts began and ended."""
        n_prompt_rows = shape.n_rows - shape.n_decoding - n_drafts
        times = planned - started, decoded - planned, ended - decoded
        row = (shape.n_decoding, n_prompt_rows, n_drafts, *times, started)
        self._rows[self._n_noted % N_TICKS_KEPT] = row
        self._n_noted += 1

    def take(self) -> tuple[TickInfo, ...]:
        """Return the ticks since the last call, oldest first."""
        first = max(self._n_taken, self._n_noted - N_TICKS_KEPT)
        numbers = np.arange(first, self._n_noted) % N_TICKS_KEPT
        self._n_taken = self._n_noted
        return tuple(
            TickInfo(int(n_decode), int(n_prompt), int(n_draft), *seconds)
            for n_decode, n_prompt, n_draft, *seconds in self._rows[numbers].tolist()
        )


def view_of(queue: RunQueue, manager: KVCacheManager, trace: TickTrace, now: float) -> LiveView:
    """Return the present state of the engine, and the ticks since the last look."""
    return LiveView(
        slots=slots_of(queue, manager, now),
        extents=extents_of(manager.cells.kv_cache),
        ticks=trace.take(),
        n_waiting=len(queue.waiting),
        oldest_waiting_s=max((now - s.request.submitted_at for s in queue.waiting), default=0.0),
    )


def extents_of(kv_cache: KVCache) -> tuple[ExtentInfo, ...]:
    """Return the content of the KV cache, parents first."""
    holders = kv_cache.holders()
    numbers = {extent: number for number, extent in enumerate(holders)}
    return tuple(
        ExtentInfo(
            extent.start,
            extent.end,
            -1 if extent.parent is None else numbers[extent.parent],
            tuple(seq_ids),
        )
        for extent, seq_ids in holders.items()
    )


def _media_of(slot: Slot) -> tuple[tuple[int, int], ...]:
    """Return the rows `[start, end)` of each media chunk that a slot holds."""
    n = slot.n_computed
    return tuple((span.start, min(span.end, n)) for span in slot.spans if span.start < n)


def slots_of(queue: RunQueue, manager: KVCacheManager, now: float) -> tuple[SlotInfo, ...]:
    """Return the state of every seq_id, in ascending order."""
    slots = {
        entry.slot.seq_id: SlotInfo(
            entry.slot.seq_id,
            SlotState.CACHED,
            n_computed=entry.slot.n_computed,
            media=_media_of(entry.slot),
        )
        for entry in manager.cells.prefixes.entries
    }
    for sequence in queue.running:
        assert sequence.placement.slot is not None
        if sequence.is_paused:
            state = SlotState.PAUSED
        elif not sequence.placement.is_placed:
            state = SlotState.WAITING
        else:
            state = SlotState.PREFILL if sequence.n_pending > 1 else SlotState.DECODE
        leader = sequence.placement.leader
        slots[sequence.placement.slot.seq_id] = SlotInfo(
            seq_id=sequence.placement.slot.seq_id,
            state=state,
            request_id=sequence.request_id,
            n_prompt=sequence.n_prompt,
            n_output=sequence.n_output,
            n_computed=sequence.n_computed,
            n_cached=sequence.n_cached,
            age_s=now - sequence.request.submitted_at,
            n_preemptions=sequence.n_preemptions,
            media=_media_of(sequence.placement.slot),
            tenant=sequence.tenant.name,
            waits_for=None if leader is None else seq_id_of(leader),
        )
    return tuple(
        slots.get(seq_id, SlotInfo(seq_id, SlotState.FREE))
        for seq_id in range(manager.cells.kv_cache.n_seq_ids)
    )
