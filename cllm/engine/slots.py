"""Who holds which seq_id, and how far it has come: a picture for operators."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cllm.engine.kv_cache_manager import KVCacheManager
from cllm.engine.run_queue import RunQueue


class SlotState(StrEnum):
    """What a seq_id is held for."""

    FREE = "free"
    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"
    """For the tokens that another sequence computes for both."""
    PAUSED = "paused"
    """For its reader."""
    CACHED = "cached"
    """By the prefix cache."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One seq_id.

    Attributes
    ----------
    request_id : str or None
    n_prompt, n_output : int
        Tokens of its request, prompt and sampled.
    n_computed : int
        Positions in the KV cache; those shared with others count here too.
    n_cached : int
        Prompt tokens that were shared and not computed.
    age_s : float
        Seconds since its request was submitted.
    n_preemptions : int
    """

    seq_id: int
    state: SlotState
    request_id: str | None = None
    n_prompt: int = 0
    n_output: int = 0
    n_computed: int = 0
    n_cached: int = 0
    age_s: float = 0.0
    n_preemptions: int = 0


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
        for seq_id in range(manager.books.n_seq_ids)
    )
