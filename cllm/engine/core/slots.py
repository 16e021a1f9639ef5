"""Who holds which seq_id, and how far it has come: a picture for operators."""

from __future__ import annotations

from cllm.engine.core.kv_cache_manager import KVCacheManager
from cllm.engine.core.messages import SlotInfo, SlotState
from cllm.engine.core.run_queue import RunQueue


def slots_of(queue: RunQueue, manager: KVCacheManager, now: float) -> tuple[SlotInfo, ...]:
    """Every seq_id, in order."""
    slots = {
        entry.slot.seq_id: SlotInfo(
            entry.slot.seq_id, SlotState.CACHED, n_computed=entry.slot.n_computed
        )
        for entry in manager.prefixes.entries
    }
    for sequence in queue.running:
        assert sequence.slot is not None
        if sequence.is_paused:
            state = SlotState.PAUSED
        elif not sequence.is_placed:
            state = SlotState.WAITING
        else:
            state = SlotState.PREFILL if sequence.n_pending > 1 else SlotState.DECODE
        slots[sequence.slot.seq_id] = SlotInfo(
            seq_id=sequence.slot.seq_id,
            state=state,
            request_id=sequence.request_id,
            n_prompt=sequence.n_prompt,
            n_output=sequence.n_output,
            n_computed=sequence.n_computed,
            n_cached=sequence.n_cached,
            age_s=now - sequence.request.submitted_at,
            n_preemptions=sequence.n_preemptions,
        )
    return tuple(
        slots.get(seq_id, SlotInfo(seq_id, SlotState.FREE))
        for seq_id in range(manager.kv_cache.n_seq_ids)
    )
