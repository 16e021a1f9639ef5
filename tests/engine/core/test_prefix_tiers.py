"""Prefixes that have left the KV cells: found to the token, bounded in bytes, restored and never wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.prefix_tiers import BLOCK, PrefixTiers, Tokens
from cllm.engine.lora import NO_LORA, LoraUse
from cllm.engine.request import SequenceState
from cllm.errors import LlamaCallError
from tests.conftest import some_in_fast
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator

MIB = 1 << 20
MEMORY = pytest.mark.parametrize(
    "memory",
    [{}, {"kv_unified": False}, {"has_pos_min": False}, {"is_windowed": True}],
    ids=["unified", "per-sequence", "recurrent", "windowed"],
)


def tokens_of(*parts: Iterable[int]) -> Tokens:
    return np.array([token for part in parts for token in part], np.int32)


def state_of(tokens: Tokens, n_bytes: int | None = None) -> SequenceState:
    return SequenceState(bytes(len(tokens) if n_bytes is None else n_bytes), len(tokens))


def n_common(a: Tokens, b: Tokens) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


PARTS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def sequence_of(parts: list[int]) -> Tokens:
    """Parts of unequal length, of which many begin alike."""
    return tokens_of(*(range(part * 100, part * 100 + 20 + 13 * part) for part in parts))


def is_used(tiers: PrefixTiers, tokens: Tokens) -> bool:
    """Use these tokens, if they are there."""
    if (covering := tiers.covering(tokens, NO_LORA)) is None:
        return False
    tiers.touch(covering)
    return True


def test_a_question_changes_nothing() -> None:
    tiers = PrefixTiers(n_bytes_max=300)
    first, second, third = (tokens_of(range(n * 1000, n * 1000 + 64)) for n in range(3))
    for tokens in (first, second):
        tiers.add(tokens, NO_LORA, state_of(tokens, 150))
    assert tiers.covering(first, NO_LORA) is not None
    tiers.add(third, NO_LORA, state_of(third, 150))
    assert tiers.covering(first, NO_LORA) is None, "it was asked for, not used"


@given(st.lists(PARTS, max_size=10), PARTS, st.booleans())
def test_what_is_found_is_the_longest_to_the_token(
    kept: list[list[int]], wanted_parts: list[int], whole_only: bool
) -> None:
    tiers, wanted = PrefixTiers(n_bytes_max=MIB, whole_only=whole_only), sequence_of(wanted_parts)
    for parts in kept:
        tokens = sequence_of(parts)
        if not is_used(tiers, tokens):
            tiers.add(tokens, NO_LORA, state_of(tokens))
    found, n_found = tiers.match(wanted, NO_LORA)
    best = 0
    for parts in kept:
        tokens = sequence_of(parts)
        n_tokens = n_common(tokens, wanted)
        if n_tokens >= BLOCK and not (whole_only and n_tokens < len(tokens)):
            best = max(best, n_tokens)
    assert n_found == best
    assert (found is None) == (best == 0)
    if found is not None:
        assert n_common(found.tokens, wanted) >= n_found


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), max_size=60))
def test_it_never_has_more_bytes_than_it_may_and_counts_them(
    steps: list[tuple[int, int]],
) -> None:
    tiers = PrefixTiers(n_bytes_max=1000)
    for number, n_bytes in steps:
        tokens = tokens_of(range(number * 1000, number * 1000 + BLOCK + number))
        if not is_used(tiers, tokens):
            tiers.add(tokens, NO_LORA, state_of(tokens, n_bytes))
        assert tiers.n_bytes <= 1000
        assert tiers.n_bytes == sum(p.n_bytes for p in tiers._all if p.state is not None)
    tiers.clear()
    assert (len(tiers), tiers.n_bytes, tiers._by_block) == (0, 0, {})


def test_what_gives_least_for_its_bytes_and_was_not_used_for_long_goes_first() -> None:
    tiers = PrefixTiers(n_bytes_max=300)
    small, large, new = (tokens_of(range(n * 1000, n * 1000 + 64)) for n in range(3))
    tiers.add(small, NO_LORA, state_of(small, 50))
    tiers.add(large, NO_LORA, state_of(large, 200))
    tiers.add(new, NO_LORA, state_of(new, 100))
    assert [is_used(tiers, tokens) for tokens in (small, large, new)] == [True, False, True]
    used, other, last = (tokens_of(range(n * 1000, n * 1000 + 64)) for n in range(3, 6))
    tiers.clear()
    for tokens in (used, other):
        tiers.add(tokens, NO_LORA, state_of(tokens, 150))
    tiers.add(last, NO_LORA, state_of(last, 150))  # `used` goes: equal, and the oldest
    assert is_used(tiers, other)
    tiers.add(used, NO_LORA, state_of(used, 150))
    assert [is_used(tiers, tokens) for tokens in (used, other, last)] == [True, True, False]


def test_a_longer_one_makes_its_beginnings_needless_but_where_only_all_can_be_used() -> None:
    whole = tokens_of(range(200))
    for whole_only in (False, True):
        tiers = PrefixTiers(n_bytes_max=MIB, whole_only=whole_only)
        for n_tokens in (70, 128, 200):
            tiers.add(whole[:n_tokens], NO_LORA, state_of(whole[:n_tokens]))
        assert len(tiers) == (3 if whole_only else 1)


def test_what_adapters_have_computed_is_nobody_elses() -> None:
    tiers, tokens = PrefixTiers(n_bytes_max=MIB), tokens_of(range(100))
    lora = LoraUse((("style", 1.0),))
    tiers.add(tokens, lora, state_of(tokens))
    assert tiers.match(tokens, NO_LORA) == (None, 0)
    assert tiers.match(tokens, lora)[1] == 100
    tiers.forget_lora("style")
    assert len(tiers) == 0


class _Slow:
    """A store that never answers."""

    stored = ((tokens_of(range(100)), "file", 100),)
    n_bytes, has_room, is_clearing = 100, True, False

    def write(self, tokens: Tokens, state: SequenceState) -> str | None:
        return None

    def load(self, file: str) -> None:
        pass

    touch = remove = load

    def clear(self) -> None:
        pass


@pytest.mark.parametrize("goes", ["clear", "a longer one", "forget"])
def test_who_waits_for_a_file_that_is_forgotten_waits_no_more(goes: str) -> None:
    tiers = PrefixTiers(n_bytes_max=MIB, store=_Slow())
    prefix, _ = tiers.match(tokens_of(range(100)), NO_LORA)
    assert prefix is not None
    tiers.load(prefix)
    assert prefix.is_loading
    if goes == "clear":
        tiers.clear()
    elif goes == "forget":
        tiers.forget(prefix)
    else:
        longer = tokens_of(range(200))
        tiers.add(longer, NO_LORA, state_of(longer))
    assert not prefix.is_loading
    tiers.on_loaded("file", state_of(prefix.tokens))
    assert tiers.match(tokens_of(range(100)), NO_LORA)[1] in (0, 100)


def test_a_prefix_whose_file_is_gone_is_forgotten_unless_it_is_in_memory_too() -> None:
    for is_in_memory in (False, True):
        tiers = PrefixTiers(n_bytes_max=MIB, store=_Slow())
        prefix, _ = tiers.match(tokens_of(range(100)), NO_LORA)
        assert prefix is not None
        if is_in_memory:
            tiers.on_loaded("file", state_of(prefix.tokens))
        tiers.on_loaded("file", None)
        assert len(tiers) == is_in_memory
        assert tiers.match(tokens_of(range(100)), NO_LORA)[1] == 100 * is_in_memory


# --- With the core ------------------------------------------------------------------------------
def served(sim: Simulator, prompt: bytes, *, max_tokens: int = 2) -> int:
    """How many tokens of a prompt were computed for its answer."""
    n_before = sim.core.statistics().n_prefill_tokens
    sim.submit(prompt, max_tokens=max_tokens)
    sim.run()
    return sim.core.statistics().n_prefill_tokens - n_before


def small(memory: dict[str, Any], **options: Any) -> Simulator:
    """A cache that the second of two prompts fills."""
    return Simulator(
        **{"n_ctx": 256, "n_seq_max": 1, "n_batch": 64, "answer": endless, **memory, **options}
    )


@MEMORY
@pytest.mark.parametrize("n_bytes", [0, MIB])
def test_a_prefix_that_has_left_the_cells_comes_back_and_the_answer_is_the_same(
    memory: dict[str, Any], n_bytes: int
) -> None:
    sim = small(memory, prefix_cache_bytes=n_bytes)
    first, other = bytes(range(200)), b"o" * 230
    served(sim, first + b"1")
    served(sim, other)
    n_computed = served(sim, first + b"2")
    statistics = sim.core.statistics()
    if n_bytes:
        assert n_computed <= 1 + 64
        assert statistics.n_restored_prefixes == 1
        assert 0 < statistics.n_prefix_bytes_host <= MIB
    else:
        assert n_computed > 150
        assert statistics.n_prefix_bytes_host == 0
    sim.check_outcomes()
    sim.check_idle()


@MEMORY
def test_what_cannot_be_restored_is_computed_again_and_forgotten(memory: dict[str, Any]) -> None:
    refused = LlamaCallError("llama_state_seq_set_data", 0, "refused")
    sim = small(memory, prefix_cache_bytes=MIB)
    first, other = bytes(range(200)), b"o" * 230
    served(sim, first + b"1")
    served(sim, other)
    sim.decoder.call_faults["state_seq_set_data", 1] = refused
    assert served(sim, first + b"2") == 201
    assert sim.core.statistics().n_restored_prefixes == 0
    sim.check_outcomes()
    sim.check_idle()


@MEMORY
@pytest.mark.parametrize("fault", [False, RuntimeError("no memory")])
def test_what_cannot_be_saved_is_lost_and_nothing_else(
    memory: dict[str, Any], fault: bool | Exception
) -> None:
    sim = small(memory, prefix_cache_bytes=MIB)
    for n_call in range(1, 20):
        sim.decoder.call_faults["state_seq_get_data", n_call] = fault
    for letter in b"abcd":
        served(sim, bytes([letter]) * 200)
    assert sim.core.statistics().n_prefix_bytes_host == 0
    sim.check_outcomes()
    sim.check_idle()


def test_what_others_share_in_cells_is_not_restored_beside_them() -> None:
    sim = Simulator(n_ctx=1024, n_seq_max=4, answer=endless, prefix_cache_bytes=MIB)
    prompt = bytes(range(200))
    served(sim, prompt + b"1")
    for entry in list(sim.core.manager.cells.prefixes.entries):
        sim.core.manager.cells.save(entry.slot, entry.tokens, entry.lora)
    assert served(sim, prompt + b"2") == 1
    assert sim.core.statistics().n_restored_prefixes == 0


def test_it_is_not_restored_where_that_takes_longer_than_computing_it() -> None:
    sim = small({}, prefix_cache_bytes=MIB)
    first, other = bytes(range(200)), b"o" * 230
    served(sim, first + b"1")
    served(sim, other)
    sim.core.manager.saved._recompute_s = lambda n_tokens: 0.001 * n_tokens
    sim.core.manager.saved._learn_restoring(200, 200.0)
    assert served(sim, first + b"2") > 150
    sim.check_outcomes()


def test_what_is_learned_of_small_copies_says_nothing_about_large_ones() -> None:
    sim = small({}, prefix_cache_bytes=MIB)
    swap = sim.core.manager.saved
    swap._learn_restoring(10, 1.0)
    assert (swap.restore_s(20), swap.restore_s(200)) == (2.0, 0.0)
    swap._learn_restoring(200, 2.0)
    swap._learn_restoring(10, 1.0)
    assert swap.restore_s(200) == 2.0


def test_who_asks_for_a_prefix_that_is_there_goes_before_who_is_as_long() -> None:
    sim = Simulator(n_ctx=2048, n_seq_max=1, n_batch=64, answer=endless, prefix_cache_bytes=4 * MIB)
    known = b"k" * 600
    served(sim, known)
    for letter in b"xyz":
        served(sim, bytes([letter]) * 600)
    sim.submit(b"r" * 600, max_tokens=4)
    sim.tick()
    fresh = sim.submit(b"n" * 600, max_tokens=2)
    back = sim.submit(known + b"!", max_tokens=2)
    sim.run()
    order = [request_id for request_id in sim.finished if request_id in (fresh, back)]
    assert order == [back, fresh]
    sim.check_outcomes()


def test_who_is_suspended_while_it_waits_takes_nothing_of_others_along() -> None:
    sim = Simulator(n_ctx=512, n_seq_max=2, n_batch=64, answer=endless, prefix_cache_bytes=MIB)
    head = bytes(range(100))
    served(sim, head + b"o" * 50)
    served(sim, b"x" * 500)  # which sends it to host memory
    sim.submit(b"r" * 320, max_tokens=60)
    sim.tick(8)
    waiting = sim.submit(head + b"w" * 95, max_tokens=4)
    sim.tick()
    (sequence,) = sim.core.queue.waiting
    placement = sequence.placement
    assert placement.n_shareable == 100, "there is what it could go on from"
    assert (placement.restores, placement.swapped) == (None, None), "and it holds nothing of it"
    sim.core.queue.cancel(waiting, saves_state=True)
    sim.hear()
    ended = sim.finished[waiting]
    assert ended.state is None
    sim.run()
    sim.submit(head + b"w" * 95, max_tokens=4, state=ended.state)
    sim.run()
    sim.check_outcomes()


def test_a_prefix_that_is_longer_than_what_there_is_room_for_stays_where_it_is() -> None:
    sim = Simulator(n_ctx=512, n_seq_max=2, n_batch=64, answer=endless, prefix_cache_bytes=MIB)
    head = bytes(range(100))
    served(sim, head + b"o" * 380)
    served(sim, b"x" * 500)
    sim.submit(b"r" * 200, max_tokens=200)
    sim.tick(8)
    n_saved = len(sim.core.manager.saved.tiers or ())
    request_id = sim.submit(head + b"w", max_tokens=4)
    sim.run()
    assert sim.finished[request_id].completion.usage.n_cached == 0
    assert len(sim.core.manager.saved.tiers or ()) >= n_saved
    sim.check_outcomes()


def test_forgetting_the_prefix_cache_forgets_what_has_left_it() -> None:
    sim = small({}, prefix_cache_bytes=MIB)
    served(sim, bytes(range(200)))
    served(sim, b"o" * 230)
    sim.core.manager.cells.forget_prefixes()
    assert served(sim, bytes(range(200))) == 200


@MEMORY
@pytest.mark.parametrize("seed", some_in_fast(range(40)))
def test_whatever_comes_and_fails_answers_are_as_alone(seed: int, memory: dict[str, Any]) -> None:
    """Long heads, few cells, little memory, faults of every copy; audited after each tick."""
    choose = random.Random(seed)
    sim = Simulator(
        n_ctx=512,
        n_seq_max=2,
        n_batch=64,
        answer=endless,
        prefix_cache_bytes=choose.choice((600, 3000, MIB)),
        **memory,
    )
    heads = [bytes(range(n, n + choose.randint(60, 200))) for n in (0, 20, 40)]
    for _ in range(25):
        prompt = choose.choice(heads)[: choose.randint(40, 200)] + choose.randbytes(3)
        request_id = sim.submit(
            prompt[: sim.decoder.n_ctx_seq - 20], max_tokens=choose.choice((1, 4, 12))
        )
        if choose.random() < 0.3:
            method = choose.choice(("state_seq_get_data", "state_seq_set_data"))
            fault = choose.choice((False, RuntimeError("scripted")))
            sim.decoder.call_faults[method, sim.decoder.n_calls[method] + 1] = fault
        sim.tick(choose.randint(0, 6))
        if choose.random() < 0.3 and request_id not in sim.finished:
            request = sim.requests[request_id]
            sim.core.queue.cancel(request_id, saves_state=True)
            sim.hear()
            ended = sim.finished[request_id]
            sim.submit(
                request.prompt_token_ids,
                params=request.params,
                generated=request.generated_token_ids + ended.completion.token_ids,
                state=ended.state,
            )
    sim.run(at_most=2000)
    sim.decoder.call_faults.clear()
    sim.check_outcomes()
    sim.check_idle()
    assert not sim.failed()


@pytest.mark.parametrize("target_ms", [None, 100.0])
def test_a_copy_that_would_break_the_pace_of_streams_is_not_made(target_ms: float | None) -> None:
    sim = small({}, n_seq_max=2, prefix_cache_bytes=MIB, target_itl_ms=target_ms)
    served(sim, b"a" * 100)
    sim.core.manager.saved._s_per_token = 0.002
    sim.submit(b"s", max_tokens=60)
    sim.tick(3)
    sim.submit(b"o" * 150, max_tokens=1)
    sim.tick(40)
    assert any(sequence.is_decoding for sequence in sim.core.queue.running)
    assert (sim.core.statistics().n_prefix_bytes_host > 0) == (target_ms is None)
    sim.run()
    sim.check_outcomes()
    sim.check_idle()


def test_what_a_request_that_fails_has_saved_or_gone_on_from_is_used_no_more() -> None:
    """A copy that is made while a prompt is computed may hold what makes the request fail later."""
    sim = Simulator(
        n_ctx=4096, n_seq_max=2, n_batch=64, kv_unified=False, has_pos_min=False, answer=endless,
        prefix_cache_bytes=MIB, faults={4: "nan"},
    )  # fmt: skip
    prompt = bytes(range(200))
    failing = sim.submit(prompt, max_tokens=2)
    sim.run()
    assert sim.finished[failing].completion.finish_reason == "error"
    assert sim.core.statistics().n_checkpoints > 0
    assert sim.core.statistics().n_prefix_bytes_host == 0
    assert served(sim, prompt) == len(prompt)
    assert sim.core.statistics().n_prefix_bytes_host > 0


class Files:
    """Files of prefixes whose contents come when a test says so."""

    has_room = is_clearing = False
    n_bytes = 0

    def __init__(self, several: Iterable[Tokens]) -> None:
        self.stored = [(tokens, f"f{i}", len(tokens)) for i, tokens in enumerate(several)]

    def write(self, tokens: Tokens, state: SequenceState) -> str | None:
        return None

    def load(self, file: str) -> None:
        pass

    def touch(self, file: str) -> None:
        pass

    def remove(self, file: str) -> None:
        pass

    def clear(self) -> None:
        pass


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["wait", "leave", "arrive"])), max_size=40
    ),
    st.sampled_from([0, 70, 150]),
)
def test_a_prefix_stays_while_a_sequence_waits_for_it_and_no_longer(
    steps: list[tuple[int, str]], n_bytes_max: int
) -> None:
    several = [tokens_of(range(i * 100, i * 100 + 64)) for i in range(5)]
    tiers = PrefixTiers(n_bytes_max=n_bytes_max, store=Files(several))
    prefixes = [tiers.covering(tokens, NO_LORA) for tokens in several]
    n_waiting = [0] * 5
    for i, step in steps:
        prefix = prefixes[i]
        assert prefix is not None
        if step == "wait":
            tiers.load(prefix)
            n_waiting[i] += 1
        elif step == "leave" and n_waiting[i]:
            tiers.stop_awaiting(prefix)
            n_waiting[i] -= 1
        elif step == "arrive" and prefix.is_loading:
            tiers.on_loaded(f"f{i}", state_of(several[i]))
            assert prefix.state is not None or not n_waiting[i]
        assert all(
            p.state or p.is_loading for p, n in zip(prefixes, n_waiting, strict=True) if p and n
        )
        assert tiers.n_bytes <= max(n_bytes_max, 64 * sum(map(bool, n_waiting)))
