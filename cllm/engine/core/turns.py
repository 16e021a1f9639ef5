"""Turns: which sequences have a turn in a tick, and how many rows of prompts the tick has.

The rules, in the order in which they narrow the running sequences:

| rule | where | the tick is of |
|---|---|---|
| kinds | prompts and decoding sequences are dear together (`separates_prompts`), no `target_itl_ms`, both are there | one kind: prompts, unless some decoding sequences have waited since the last tick of prompts |
| long turns | kinds are apart, tiles of several prompts are dear | prompts again, as long as their turn is shorter than a tick that decodes |
| guests | kinds are apart, prompts of several tenants | no prompts of tenants with more requests than the one that is furthest behind its share |
| short ticks | kinds are apart, most of a tick's time goes into its rows, another tenant, which would come before that of the prompts, may send one at any time | prompts again, also of that other tenant, until the turn has `n_prefill_chunk` rows |
| adapters | the sequences have several sets of LoRA adapters | one set: the one that had no turn for longest, among those that decode and that of the most urgent prompt |
| tenants | requests of several tenants wait for rows or a seq_id (`tenants`) | first the tenant that is furthest behind its share, within a level of priority |
| media | a sequence's next rows are of a media chunk | one media chunk alone, in a second decode after the others |
| tiles | a tick of decoding sequences, 64 or more | 63 of them, those first that have waited longest, then in the order of their seq_ids |

The rows of prompts in a tick are limited by

| limit | where |
|---|---|
| `n_prefill_chunk` | no `target_itl_ms`, and some sequence waits for the tick |
| what keeps the gap between two tokens at the target | `target_itl_ms`, and some sequence waits for the tick |
| nothing | `target_itl_ms`, and the gap of the streams belongs to rows of a media chunk or to an encode |
| rows computed within `max_tick_s` | the decoder has a `max_tick_s`, and `target_itl_ms` sets no limit |
| what is best computed together | `separates_prompts`, and a prompt is ready |
| rows computed within half the time of a tick that decodes | short ticks |
| a row for each decoding sequence is left free | a tick of prompts alone |

`scheduler.plan` then shares the rows, which count for their tenants.  No clock, no llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cllm.engine.config import EngineConfig
from cllm.engine.core import scheduler
from cllm.engine.core.decode_cost import DecodeCost
from cllm.engine.core.decoder import Decoder
from cllm.engine.core.gap_budget import MIN_SHARE, Aim
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.scheduler import ATTENTION_TILE, Chunk, most_urgent, seq_id_of
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.tenants import Tenants
from cllm.engine.lora import LoraSet

# The work that may fill the gap between two tokens of the streams, besides their own rows.
OWNERS = PROMPTS, MEDIA, ENCODER = "prompts", "media", "encoder"
# A tick that another tenant may have to wait for takes this share of one that decodes, and the rows of its prompt
# are a multiple of what llama.cpp's matrix products on a CPU compute well together.
SHORT_SHARE, N_SHORT_ROWS = 1 / 2, 8


@dataclass(frozen=True, slots=True)
class _ShortTurn:
    """Ticks of a tenant's prompts, one after another, each of which another tenant may have to wait for.

    Attributes
    ----------
    cut : Sequence
        Sequence whose prompt the last tick has cut; any of its sequences if it has cut none.
    n_rows : int
        Rows of all these ticks.
    """

    cut: Sequence
    n_rows: int

    @classmethod
    def after(cls, before: _ShortTurn | None, chunks: list[Chunk]) -> _ShortTurn | None:
        """Return the turn with one more tick; None without rows."""
        if not chunks:
            return None
        n_before = before.n_rows if before is not None else 0
        last = next((chunk for chunk in chunks if not chunk.completes), chunks[-1])
        return cls(last.sequence, n_before + sum(chunk.n_rows for chunk in chunks))

    def goes_on(self, first: Sequence | None, decoding: list[Sequence], n_rows_max: int) -> bool:
        """Return True if `first` is computed next, also if sequences that decode wait."""
        tenant = self.cut.tenant
        # The prompt of a new request of another tenant may be in the cache but for its last token.
        is_new = any(s.n_output == 0 and s.tenant is not tenant for s in decoding)
        if first is None or is_new or self.n_rows >= n_rows_max:
            return False
        return first is self.cut or first.tenant is not tenant


class Turns:
    """Plans ticks, one after another.

    Parameters
    ----------
    kv_cache : KVCache
    decoder : Decoder
        Only its limits are read.
    config : EngineConfig
    cost : DecodeCost

    Attributes
    ----------
    n : int
        Plans so far: the number of this tick.
    tenants : Tenants
        The tenants that have requests.
    """

    def __init__(
        self, kv_cache: KVCache, decoder: Decoder, config: EngineConfig, cost: DecodeCost
    ) -> None:
        self.n: int = 0
        self.tenants: Tenants = Tenants(dict(config.tenant_weights or ()))
        self._kv_cache = kv_cache
        self._decoder = decoder
        self._cost = cost
        target_ms = config.target_itl_ms
        self._target_s = None if target_ms is None else target_ms / 1000.0
        self._n_prefill_chunk = config.n_prefill_chunk if target_ms is None else None
        # The gap between two tokens of the streams: its begin, the work that may fill it, and whether it did.
        self._aim = Aim(1.0)
        self._gap_began: float | None = None
        self._owner: str | None = None
        self._is_full = False
        self._n_prompts_turn = 0  # the last tick of prompts alone
        self._short: _ShortTurn | None = None  # the last tick was one of its ticks
        self._last_id = -1  # seq_id of the last decoding sequence that had its turn

    def plan(
        self, running: list[Sequence], n_rows: int, *, has_loras: bool, now: float
    ) -> list[Chunk]:
        """Return the chunks of the next tick.

        Parameters
        ----------
        n_rows : int
            Rows that there is room for.
        has_loras : bool
            False if no sequence has adapters.
        """
        self.n += 1
        running = [s for s in running if s.media_index is None]
        ready = [s for s in running if s.is_ready]
        decoding = [s for s in ready if s.is_decoding]
        n_sets = max(1, len({s.loras for s in ready})) if has_loras else 1
        has_prompts = self._decoder.separates_prompts and len(ready) > len(decoding)
        n_together = self._cost.n_rows_together(self._kv_cache.n_held) if has_prompts else math.inf
        first = self._first_of_several_tenants(running, decoding, now) if has_prompts else None
        # A tick of prompts leaves a row for each decoding sequence: without another one it would compute nothing.
        has_prompts = has_prompts and n_rows > len(decoding)
        is_prompts = has_prompts and self._is_prompts_turn(decoding, first, n_rows)
        is_decoding = not is_prompts and self._are_kinds_apart(decoding)
        is_short = False
        turn = running
        if is_prompts:
            self._n_prompts_turn = self.n
            turn = prompts_of(running)
            if first is not None:
                present = [s.tenant for s in turn if s.n_pending > 1]
                is_short = self._cost.are_rows_dear and self.tenants.may_come(
                    first.tenant, present, now
                )
                n_most = first.tenant.n_requests
                turn = [s for s in turn if s.tenant.n_requests <= n_most or not s.is_ready]
        if is_decoding:
            turn = decoding
        if n_sets > 1:
            turn = with_same_loras(turn, now)
        if is_decoding:
            turn, self._last_id = decoding_of(turn, self._last_id)
        n_prompt_rows = self._n_prompt_rows(turn, n_sets)
        if first is not None and is_short:
            n_short = self._cost.n_rows_within(SHORT_SHARE, first.n_computed)
            n_short = max(1, n_short // N_SHORT_ROWS) * N_SHORT_ROWS
            n_prompt_rows = min(n_short, n_rows if n_prompt_rows is None else n_prompt_rows)
        chunks = scheduler.plan(
            turn,
            n_rows - (len(decoding) if is_prompts else 0),
            n_prompt_rows,
            is_awaited=is_prompts or n_sets > 1,
            n_prefill_chunk=self._n_prefill_chunk,
            n_together=n_together,
            n_outputs_max=self._decoder.n_outputs_max,
            now=now,
        )
        self._short = _ShortTurn.after(self._short, chunks) if is_short else None
        self._is_full |= len(chunks) > len(decoding) and self._has_room(decoding)
        self.tenants.charge((chunk.sequence, chunk.n_rows) for chunk in chunks)
        return chunks

    def plan_media(
        self, sequences: list[Sequence], chunks: list[Chunk], n_rows_max: int, now: float
    ) -> Chunk | None:
        """Return the rows of a media chunk that are decoded after the other rows of this tick.

        Parameters
        ----------
        sequences : list of Sequence
            Those whose next rows are of a media chunk that is encoded.
        chunks : list of Chunk
            The other rows of this tick.
        n_rows_max : int
            Rows that one decode can have.
        """
        if not sequences or (self._gap_began is not None and self._owner != MEDIA):
            return None
        turn = [c.sequence for c in chunks]
        n_rows, n_prompt_rows = n_rows_max, self._n_prompt_rows(turn, 1, is_apart=True)
        if n_prompt_rows is not None:
            n_rows = n_prompt_rows - sum(c.n_tokens for c in chunks if c.n_tokens > 1)
        elif chunks and self._n_prefill_chunk is not None:
            n_rows = self._n_prefill_chunk
        chunk = scheduler.plan_media(sequences, self._kv_cache.n_free, n_rows, n_rows_max, now)
        if chunk is not None:
            self._is_full |= self._has_room([s for s in turn if s.is_decoding])
            self.tenants.charge([(chunk.sequence, chunk.n_rows)])
        return chunk

    def begin_gap(
        self, chunks: list[Chunk], running: Iterable[Sequence], now: float, *, is_encoding: bool
    ) -> None:
        """Begin a gap between two tokens of the streams, after the decode of these chunks.

        With `target_itl_ms`, each kind of other work takes all that the target leaves: rows of prompts, rows
        of media, and an encode.  So the kinds that have work take gaps by turns.
        """
        if self._target_s is None:
            return
        if self._gap_began is not None and self._is_full:
            self._aim.observe(now - self._gap_began, self._target_s)
        self._gap_began = now if any(map(scheduler.is_decoding, chunks)) else None
        self._is_full = False
        ready = [s for s in running if s.is_ready]
        has_work = {
            PROMPTS: any(s.media_index is None and s.n_pending > 1 for s in ready),
            MEDIA: any(s.media_index is not None for s in ready),
            ENCODER: is_encoding,
        }
        last = OWNERS.index(self._owner) if self._owner else -1
        order = (*OWNERS[last + 1 :], *OWNERS[: last + 1])
        self._owner = next((owner for owner in order if has_work[owner]), None)

    def _has_room(self, decoding: list[Sequence]) -> bool:
        """Return True if streams leave more of the target than the share that prompts have in any case."""
        if self._target_s is None or not decoding:
            return False
        cells = sum(s.n_computed for s in decoding)
        left = self._aim.share * self._target_s - self._cost.ticks.seconds(len(decoding), cells)
        return left > MIN_SHARE * self._target_s

    def next_tick_s(self, running: Iterable[Sequence], *, has_loras: bool) -> float:
        """Return the expected seconds until all these sequences have had a turn; 0 while unknown."""
        ready = [s for s in running if s.is_ready]
        decoding = [s for s in ready if s.is_decoding]
        n_sets = len({s.loras for s in decoding}) if has_loras else 1
        return self._cost.next_tick_s(len(decoding), len(ready) - len(decoding), n_sets)

    def _are_kinds_apart(self, decoding: list[Sequence]) -> bool:
        """Return True if prompts and decoding sequences have ticks of their own."""
        return self._decoder.separates_prompts and self._target_s is None and bool(decoding)

    def _is_prompts_turn(
        self, decoding: list[Sequence], first: Sequence | None, n_rows: int
    ) -> bool:
        if not self._are_kinds_apart(decoding):
            return False
        is_due = is_decoding_due(decoding, self._n_prompts_turn)
        if not is_due or self._cost.goes_on(self._kv_cache.n_held):
            return True
        n_rows_max = min(n_rows, self._n_prefill_chunk or n_rows)
        return self._short is not None and self._short.goes_on(first, decoding, n_rows_max)

    def _first_of_several_tenants(
        self, running: list[Sequence], decoding: list[Sequence], now: float
    ) -> Sequence | None:
        """Return the prompt that is computed first; None if there is one tenant, or prompts have no ticks of their own."""
        if not (self.tenants.are_several and self._are_kinds_apart(decoding)):
            return None
        return next(iter(scheduler.prompts_by_turn(running, now)), None)

    def _n_prompt_rows(
        self, turn: list[Sequence], n_sets: int, *, is_apart: bool = False
    ) -> int | None:
        """Return the limit of prompt rows that `target_itl_ms` or `max_tick_s` sets; None without one.

        With `n_sets` sets of adapters in turn, a stream gets its next token after `n_sets` ticks.
        `is_apart`: these rows have a decode of their own.
        """
        limit_s, aim = self._decoder.max_tick_s, 1.0
        decoding = [s.n_computed for s in turn if s.is_decoding]
        if (
            limit_s is not None
        ):  # where a tick takes long anyway, few rows would not make it shorter
            limit_s = max(limit_s, 2 * self._cost.ticks.seconds(len(decoding), sum(decoding)))
        if self._target_s is not None and (decoding or n_sets > 1):
            if self._owner in (MEDIA, ENCODER) and decoding and not is_apart:
                return 0
            limit_s, aim = self._target_s / n_sets, self._aim.share
        if limit_s is None:
            return None
        # Any prompt will do: what a chunk attends to costs less than its rows.
        n_computed = max((s.n_computed for s in turn if s.is_ready and s.n_pending > 1), default=0)
        return self._cost.ticks.n_prompt_rows(
            decoding,
            n_computed,
            limit_s,
            aim=aim,
            is_apart=is_apart,
            is_gradual=self._target_s is not None,
        )


def prompts_of(running: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences of a prompt-only tick, including those that are not ready."""
    return [s for s in running if not s.is_ready or s.n_pending > 1]


def decoding_of(running: Iterable[Sequence], last_id: int) -> tuple[list[Sequence], int]:
    """Return the sequences of a tick that only decodes, and the seq_id of the last of them.

    They are fewer than a tile of attention: 64 rows have taken twice the time of 63.  The others take
    turns with them: of sequences that have waited as long, those after `last_id` come first.
    """
    decoding = [s for s in running if s.is_decoding]
    if len(decoding) < ATTENTION_TILE:
        return decoding, last_id
    decoding.sort(key=lambda s: (s.n_turn, seq_id_of(s) <= last_id, seq_id_of(s)))
    chosen = decoding[: ATTENTION_TILE - 1]
    return chosen, seq_id_of(chosen[-1])


def with_same_loras(sequences: Iterable[Sequence], now: float) -> list[Sequence]:
    """Return the sequences of one decode: llama.cpp computes it with one set of adapters.

    The sets of decoding sequences take turns, and with them the set of the most urgent prompt.
    """
    turns: dict[LoraSet, int] = {}
    several = list(sequences)
    ready = [s for s in several if s.is_ready]
    first = most_urgent((s for s in ready if not s.is_decoding), now)
    for sequence in ready:
        if sequence.is_decoding or sequence is first:
            turns[sequence.loras] = 0
    for sequence in ready:
        if (loras := sequence.loras) in turns:
            turns[loras] = max(turns[loras], sequence.n_turn)
    if not turns:
        return several
    chosen = min(turns, key=turns.__getitem__)
    return [s for s in several if s.loras == chosen]


def is_decoding_due(running: Iterable[Sequence], n_turn: int) -> bool:
    """Return whether some set of adapters decodes and had no turn since turn number `n_turn`."""
    last: dict[LoraSet, int] = {}
    for s in running:
        if s.is_decoding:
            last[s.loras] = max(last.get(s.loras, 0), s.n_turn)
    return any(turn <= n_turn for turn in last.values())
