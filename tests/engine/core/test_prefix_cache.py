"""What a new sequence can share, against the definition of it on lists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.prefix_cache import CachedPrefix, Match, PrefixCache
from cllm.engine.core.sequence import Sequence
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from tests.conftest import examples

DETERMINISTIC = examples(600)


def n_common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by the definition."""
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


class World:
    """A prefix cache, and sequences that run, on one bookkeeping."""

    def __init__(self) -> None:
        self.kv_cache = KVCache(n_cells=1000, n_seq_ids=32, n_ctx_seq=1000)
        self.cache = PrefixCache()
        self.running: list[Sequence] = []

    def keep(self, tokens: list[int]) -> CachedPrefix:
        slot = self.kv_cache.open(is_cached=True)
        self.kv_cache.advance(slot, len(tokens))
        self.cache.entries.append(CachedPrefix(np.array(tokens, np.int32), slot))
        return self.cache.entries[-1]

    def sequence(self, tokens: list[int], *, n_output: int = 0) -> Sequence:
        """One that waits; the last `n_output` of its tokens are sampled."""
        n_prompt = len(tokens) - n_output
        request = GenerationRequest(
            "r", 0, tuple(tokens[:n_prompt]), SamplingParams(), 0, 0.0, None
        )
        sequence = Sequence(request, stream_buffer=1)
        for token in tokens[n_prompt:]:
            sequence.tokens.append(token)
        return sequence

    def run(
        self,
        tokens: list[int],
        n_computed: int,
        *,
        n_output: int = 0,
        is_paused: bool = False,
        is_placed: bool = True,
    ) -> Sequence:
        sequence = self.sequence(tokens, n_output=n_output)
        sequence.start(self.kv_cache.open(), 0.0)
        if is_placed:
            assert sequence.placement.slot is not None
            self.kv_cache.advance(sequence.placement.slot, n_computed)
            sequence.place(0)
        sequence.n_unread = int(is_paused)
        self.running.append(sequence)
        return sequence

    def match(self, tokens: list[int], *, n_min: int = 1, whole_only: bool = False) -> Match:
        wanting = self.sequence(tokens)
        return self.cache.match(wanting, self.running, n_min=n_min, whole_only=whole_only)


# Few tokens, so that much is common.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


@dataclass(frozen=True)
class Runner:
    tokens: list[int]
    n_computed: int
    n_output: int
    is_paused: bool
    is_placed: bool


@st.composite
def runners(draw: st.DrawFn) -> Runner:
    tokens = draw(TOKENS)
    n_most = len(tokens) - 1
    n_computed, n_output = draw(st.integers(0, n_most)), draw(st.integers(0, n_most))
    is_paused, is_placed = draw(st.integers(0, 3)) == 0, draw(st.integers(0, 3)) > 0
    return Runner(tokens, n_computed if is_placed else 0, n_output, is_paused, is_placed)


@DETERMINISTIC
@given(tokens=TOKENS, cached=st.lists(TOKENS, max_size=4), others=st.lists(runners(), max_size=4))
def test_a_match_is_the_longest_by_definition(
    tokens: list[int], cached: list[list[int]], others: list[Runner]
) -> None:
    world, wanted = World(), tokens[:-1]
    for entry_tokens in cached:
        world.keep(entry_tokens)
    for o in others:
        world.run(
            o.tokens,
            o.n_computed,
            n_output=o.n_output,
            is_paused=o.is_paused,
            is_placed=o.is_placed,
        )
    n_cached = [n_common(entry, wanted) for entry in cached]
    n_now = [min(n_common(o.tokens, wanted), o.n_computed) for o in others]
    n_best = max([0, *n_cached, *n_now])
    coming = [n_common(o.tokens, wanted) if o.is_placed and not o.is_paused else 0 for o in others]
    n_awaited = max([0, *coming])
    n_gained = n_awaited - n_best
    is_worth_it = n_gained > 1 or (n_gained == 1 and n_awaited == len(wanted))

    match = world.match(tokens)

    assert match.n_tokens == n_best
    if n_best == 0:
        assert (match.source, match.entry) == (None, None)
    elif n_best in n_cached:
        newest = max(i for i, n in enumerate(n_cached) if n == n_best)
        assert match.entry is world.cache.entries[newest]
        assert match.source is match.entry.slot
    else:
        assert match.entry is None
        assert match.source in [
            s.placement.slot for s, n in zip(world.running, n_now, strict=True) if n == n_best
        ]
    if is_worth_it:
        assert match.n_expected == n_awaited
        assert match.leader in [
            s for s, n in zip(world.running, coming, strict=True) if n == n_awaited
        ]
    else:
        assert (match.leader, match.n_expected) == (None, 0)


@DETERMINISTIC
@given(tokens=TOKENS, cached=st.lists(TOKENS, max_size=5))
def test_covering_begins_with_the_tokens_and_covered_by_is_what_they_begin_with(
    tokens: list[int], cached: list[list[int]]
) -> None:
    world, array = World(), np.array(tokens, np.int32)
    entries = [world.keep(entry_tokens) for entry_tokens in cached]
    n_tokens = len(tokens)
    longer = [e for e, held in zip(entries, cached, strict=True) if held[:n_tokens] == tokens]
    shorter = [e for e, held in zip(entries, cached, strict=True) if held == tokens[: len(held)]]
    covering = world.cache.covering(array)
    assert covering in longer if longer else covering is None
    assert world.cache.covered_by(array) == shorter


def test_the_last_token_is_left_to_be_computed() -> None:
    world = World()
    world.keep([1, 2, 3, 4])
    assert world.match([1, 2, 3]).n_tokens == 2
    assert world.match([1]) == Match()


def test_the_most_recent_of_equals_wins_and_one_that_was_touched_is_the_most_recent() -> None:
    world = World()
    first, second = world.keep([1, 2, 3, 4]), world.keep([1, 2, 3, 5])
    assert world.match([1, 2, 3, 9]).entry is second
    world.cache.touch(first)
    assert world.cache.entries == [second, first]
    assert world.match([1, 2, 3, 9]).entry is first
    assert world.match([1, 2, 3, 5, 9]).entry is second, "a longer one wins over a recent one"


def test_a_cached_prefix_wins_over_a_running_sequence_that_has_as_much() -> None:
    world = World()
    running = world.run([1, 2, 3, 4], 3)
    assert world.match([1, 2, 3, 9]).source is running.placement.slot
    entry = world.keep([1, 2, 3])
    assert world.match([1, 2, 3, 9]).entry is entry


def test_output_is_shared_like_a_prompt() -> None:
    world = World()
    world.run([1, 2, 3, 4], 3, n_output=2)
    assert world.match([1, 2, 3, 9]).n_tokens == 3


def test_a_sequence_neither_shares_with_itself_nor_waits_for_itself() -> None:
    world = World()
    sequence = world.run([1, 2, 3, 4], 2)
    assert world.cache.match(sequence, [sequence]) == Match()


@pytest.mark.parametrize(
    ("is_paused", "is_placed"), [(True, True), (False, False)], ids=["paused", "not placed"]
)
def test_nobody_waits_for_one_that_computes_nothing(is_paused: bool, is_placed: bool) -> None:
    world = World()
    world.run([1, 2, 3, 4, 5], 0, is_paused=is_paused, is_placed=is_placed)
    assert world.match([1, 2, 3, 4, 9]) == Match()
    leader = world.run([1, 2, 3, 4, 5], 0)
    match = world.match([1, 2, 3, 4, 9])
    assert (match.leader, match.n_expected) == (leader, 4)


def test_what_a_paused_sequence_has_computed_is_shared() -> None:
    world = World()
    paused = world.run([1, 2, 3, 4, 5], 3, is_paused=True)
    assert world.match([1, 2, 3, 4, 9]) == Match(source=paused.placement.slot, n_tokens=3)


@pytest.mark.parametrize(
    ("tokens", "is_awaited"),
    [([1, 8, 9], False), ([1, 2, 9], True), ([1, 9], True)],
    ids=["a lone first token", "two tokens", "all there is to share"],
)
def test_a_lone_first_token_is_not_waited_for_unless_it_is_all_there_is(
    tokens: list[int], is_awaited: bool
) -> None:
    world = World()
    leader = world.run([1, 2, 3], 0)
    match = world.match(tokens)
    assert match.leader is (leader if is_awaited else None)
    assert (match.source, match.n_tokens) == (None, 0)


def test_a_sequence_may_wait_for_more_than_it_could_have_now() -> None:
    world = World()
    entry, leader = world.keep([1, 2]), world.run([1, 2, 3, 4, 5], 1)
    assert world.match([1, 2, 3, 4, 9]) == Match(entry.slot, 2, entry, leader, 4)


@pytest.mark.parametrize(("n_min", "n_tokens"), [(3, 3), (4, 0)])
def test_less_than_n_min_is_not_shared(n_min: int, n_tokens: int) -> None:
    world = World()
    world.run([1, 2, 3, 4], 3)
    assert world.match([1, 2, 3, 9], n_min=n_min).n_tokens == n_tokens
    world.running.clear()
    world.run([1, 2, 3, 4], 0)
    assert world.match([1, 2, 3, 9], n_min=n_min).n_expected == n_tokens
    entry = world.keep([1, 2])
    assert world.match([1, 2, 9], n_min=n_min).entry is None
    assert world.match([1, 2, 9], n_min=2).entry is entry


def test_less_than_n_min_that_is_computed_now_is_not_shared() -> None:
    world = World()
    world.run([1, 2, 3, 4], 1, is_paused=True)
    assert world.match([1, 2, 3, 9], n_min=3).n_tokens == 0


def test_where_only_whole_sequences_can_be_shared_a_part_of_one_is_not() -> None:
    world = World()
    world.keep([1, 2, 3, 4])
    kept = world.keep([1, 2])
    match = world.match([1, 2, 3, 9], whole_only=True)
    assert (match.source, match.n_tokens, match.leader) == (kept.slot, 2, None)
    assert world.match([1, 9], whole_only=True).source is None
    running = world.run([1, 2, 3, 8], 3)
    match = world.match([1, 2, 3, 9], whole_only=True)
    assert (match.source, match.n_tokens, match.leader) == (running.placement.slot, 3, None)
    assert world.match([1, 2, 5], whole_only=True).source is kept.slot
