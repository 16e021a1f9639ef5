"""SlotCommands: what a seq_id holds is copied, freed, or kept for others by hand.  Inference thread only."""

from __future__ import annotations

import numpy as np

from cllm.engine.core.decoder import CacheMemory
from cllm.engine.core.kv_cache import Slot
from cllm.engine.core.kv_cache_manager import KVCacheManager
from cllm.engine.core.messages import (
    MAX_STATE_BYTES,
    EraseSlot,
    RestorePrefix,
    SaveSlot,
    SlotAnswered,
)
from cllm.engine.core.prefix_tiers import BLOCK, Tokens
from cllm.engine.core.run_queue import RunQueue
from cllm.engine.lora import NO_LORA, LoraUse
from cllm.engine.request import SequenceState
from cllm.errors import CllmError, InvalidRequestError


class SlotCommands:
    """Answers them between ticks: what is copied keeps all streams waiting as long as that takes."""

    def __init__(self, memory: CacheMemory, manager: KVCacheManager, queue: RunQueue) -> None:
        self._memory = memory
        self._manager = manager
        self._queue = queue

    def answer(self, command: SaveSlot | RestorePrefix | EraseSlot) -> SlotAnswered:
        """Do what a command says."""
        call_id = command.call_id
        try:
            match command:
                case SaveSlot(_, seq_id):
                    return self._save(call_id, seq_id)
                case RestorePrefix(_, token_ids, state):
                    return SlotAnswered(call_id, self._restore(token_ids, state))
                case EraseSlot(_, seq_id):
                    return SlotAnswered(call_id, self._erase(seq_id))
        except CllmError as error:
            return SlotAnswered(call_id, error=error)

    def _held(self, seq_id: int) -> tuple[Tokens, Slot, LoraUse] | None:
        """The tokens that a seq_id holds, of a request or of the prefix cache."""
        for sequence in self._queue.running:
            slot = sequence.slot
            if slot is not None and slot.seq_id == seq_id:
                return sequence.token_array()[: slot.n_computed], slot, sequence.request.lora
        for entry in self._manager.prefixes.entries:
            if entry.slot.seq_id == seq_id:
                return entry.tokens, entry.slot, entry.lora
        return None

    def _save(self, call_id: int, seq_id: int) -> SlotAnswered:
        held = self._held(seq_id)
        if held is None or self._manager.fault is not None or not len(held[0]):
            return SlotAnswered(call_id)
        tokens, slot, lora = held
        if lora != NO_LORA:
            limit = "a slot without LoRA adapters: elsewhere others have their names"
            raise InvalidRequestError("seq_id", seq_id, limit)
        try:
            data = self._memory.state_seq_get_data(slot.seq_id)
        except CllmError:
            raise
        except Exception as error:
            raise CllmError(f"slot {seq_id} cannot be copied: {error!r}") from error
        if not data or len(data) > MAX_STATE_BYTES:
            limit = f"a slot of at most {MAX_STATE_BYTES} bytes; it has {len(data)}"
            raise InvalidRequestError("seq_id", seq_id, limit)
        token_ids = tuple(tokens.tolist())
        return SlotAnswered(call_id, len(tokens), token_ids, SequenceState(data, len(tokens)))

    def _restore(self, token_ids: tuple[int, ...], state: SequenceState) -> int:
        tiers, n_bytes = self._manager.tiers, len(state.data)
        if tiers is None or n_bytes > tiers.n_bytes_max:
            n_most = 0 if tiers is None else tiers.n_bytes_max
            limit = f"at most prefix_cache_bytes, {n_most}"
            raise InvalidRequestError("bytes of the slot", n_bytes, limit)
        if len(token_ids) < BLOCK:  # never found again
            return 0
        tokens = np.array(token_ids, np.int32)
        if not tiers.has(tokens, NO_LORA):
            tiers.add(tokens, NO_LORA, state)
        return len(tokens) if tiers.has(tokens, NO_LORA) else 0

    def _erase(self, seq_id: int) -> int:
        entries = self._manager.prefixes.entries
        entry = next((e for e in entries if e.slot.seq_id == seq_id), None)
        if entry is not None:
            self._manager.evict(entry, saves=False)
            return len(entry.tokens)
        if self._held(seq_id) is not None:
            raise InvalidRequestError("seq_id", seq_id, "that of a slot in which no request runs")
        return 0
