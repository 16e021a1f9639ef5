"""What a tick computes, who is next, who has room, and who is preempted, case by case."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core import scheduler
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.scheduler import (
    ATTENTION_TILE,
    N_AHEAD_AGAIN,
    Chunk,
    has_room,
    next_admitted,
    plan,
)
from cllm.engine.core.sequence import AGEING_S, N_ALIKE, Sequence
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from tests.conftest import examples

DETERMINISTIC = examples(150, stateful_step_count=40)
STREAM_BUFFER = 2


def sequence_of(
    n_prompt: int,
    serial: int = 0,
    *,
    priority: int = 0,
    submitted_at: float = 0.0,
    deadline: float | None = None,
    is_paused: bool = False,
) -> Sequence:
    sequence = Sequence(
        GenerationRequest(
            request_id=f"r{serial}",
            serial=serial,
            prompt_token_ids=tuple(range(n_prompt)),
            params=SamplingParams(),
            priority=priority,
            submitted_at=submitted_at,
            deadline=deadline,
        ),
        stream_buffer=STREAM_BUFFER,
    )
    sequence.n_unread = STREAM_BUFFER if is_paused else 0
    return sequence


def running(*sequences: Sequence) -> list[Sequence]:
    """The sequences with seq_ids from 0 on, each computing its own tokens."""
    kv_cache = KVCache(n_cells=1000, n_seq_ids=max(8, len(sequences)), n_ctx_seq=1000)
    for sequence in sequences:
        sequence.start(kv_cache.open(), 0.0)
        sequence.place(0)
    return list(sequences)


def follow(follower: Sequence, leader: Sequence, n_expected: int) -> None:
    follower.placement.follow(leader, n_expected)
    follower.placement.is_placed = False


# --- plan ------------------------------------------------------------------------------------
def test_a_long_prompt_never_delays_a_decoding_sequence() -> None:
    long, decoding = sequence_of(500, 1, priority=-5), sequence_of(1, 2, priority=5)
    present = running(long, decoding)
    for n_prompt_rows, n_long in ((None, 7), (100, 7), (4, 4)):
        chunks = plan(present, 8, n_prompt_rows, n_outputs_max=256, now=0.0)
        assert [(c.sequence, c.n_tokens) for c in chunks] == [(long, n_long), (decoding, 1)]
    for n_prompt_rows in (0, -1):
        assert plan(present, 8, n_prompt_rows, n_outputs_max=256, now=0.0) == [Chunk(decoding, 1)]


def prompt_rows(
    present: list[Sequence],
    *,
    n_rows: int = 512,
    n_prefill_chunk: int,
    n_together: float = math.inf,
) -> list[int]:
    """What each prompt gets, in the order of the seq_ids."""
    chunks = plan(
        present,
        n_rows,
        n_prefill_chunk=n_prefill_chunk,
        n_together=n_together,
        n_outputs_max=512,
        now=0.0,
    )
    return [c.n_tokens for c in chunks if c.sequence.n_prompt > 1]


def decoding(n: int) -> list[Sequence]:
    return [sequence_of(1, serial) for serial in range(1, n + 1)]


def test_alone_a_long_prompt_takes_the_whole_batch() -> None:
    assert prompt_rows(running(sequence_of(2000)), n_prefill_chunk=128) == [512]


@pytest.mark.parametrize(("n_decoding", "n_taken"), [(4, 124), (1, 127), (33, 95), (96, 32)])
def test_beside_streams_a_long_prompt_fills_a_chunk_with_them(
    n_decoding: int, n_taken: int
) -> None:
    present = running(sequence_of(2000), *decoding(n_decoding))
    assert prompt_rows(present, n_prefill_chunk=128) == [n_taken]


@DETERMINISTIC
@given(
    n_decoding=st.integers(1, 255),
    n_prompt=st.integers(2, 3000),
    n_prefill_chunk=st.integers(1, 600),
)
def test_a_prompt_goes_on_beside_any_number_of_streams_and_keeps_to_tiles(
    n_decoding: int, n_prompt: int, n_prefill_chunk: int
) -> None:
    present = running(sequence_of(n_prompt), *decoding(n_decoding))
    (n_taken,) = prompt_rows(present, n_rows=4096, n_prefill_chunk=n_prefill_chunk)
    assert n_taken >= min(n_prompt, ATTENTION_TILE // 2)
    n_rows = n_decoding + n_taken
    if n_prompt > 4 * n_prefill_chunk and n_taken < n_prompt:
        assert n_rows <= max(n_prefill_chunk, n_decoding + 1.5 * ATTENTION_TILE)
        assert n_rows == n_prefill_chunk or n_rows % ATTENTION_TILE == 0


def test_short_prompts_are_computed_together_and_whole() -> None:
    present = running(*(sequence_of(64, serial) for serial in range(8)))
    assert prompt_rows(present, n_prefill_chunk=256) == [64] * 8
    assert prompt_rows(present, n_prefill_chunk=32) == [64]


@pytest.mark.parametrize(
    ("n_together", "taken"),
    [(math.inf, [25] * 8), (120, [25] * 4 + [20]), (63, [25, 25, 13])],
)
def test_prompts_join_one_up_to_the_rows_that_are_worth_it(
    n_together: float, taken: list[int]
) -> None:
    present = running(*(sequence_of(25, serial) for serial in range(8)))
    assert prompt_rows(present, n_prefill_chunk=128, n_together=n_together) == taken


def test_a_prompt_alone_is_as_whole_where_few_rows_are_worth_it() -> None:
    assert prompt_rows(running(sequence_of(256)), n_prefill_chunk=128, n_together=64) == [256]
    beside = running(sequence_of(256), *decoding(4))
    assert prompt_rows(beside, n_prefill_chunk=128, n_together=64) == [256]


def test_a_short_prompt_is_whole_beside_any_number_of_streams() -> None:
    present = running(sequence_of(256), *decoding(40))
    assert prompt_rows(present, n_prefill_chunk=128) == [256]


def test_who_is_computed_with_a_long_prompt_waits_for_no_more_than_a_chunk_of_it() -> None:
    first, long = sequence_of(50, 1), sequence_of(2000, 2)
    assert prompt_rows(running(first, long), n_prefill_chunk=128) == [50, 78]


@pytest.mark.parametrize("n_rows", [0, -1])
def test_without_rows_nobody_runs(n_rows: int) -> None:
    assert (
        plan(
            running(sequence_of(1, 1), sequence_of(1, 2), sequence_of(9, 3)),
            n_rows,
            n_outputs_max=256,
            now=0.0,
        )
        == []
    )


@pytest.mark.parametrize(("is_paused", "is_first"), [(False, True), (True, False)])
def test_a_leader_is_as_urgent_as_the_most_urgent_that_waits_for_it(
    is_paused: bool, is_first: bool
) -> None:
    leader, other = sequence_of(9, 1, priority=5), sequence_of(9, 2)
    urgent, patient = sequence_of(9, 3, priority=-1, is_paused=is_paused), sequence_of(9, 4)
    present = running(leader, other, urgent, patient)
    follow(urgent, leader, 8)
    follow(patient, leader, 8)
    (chunk,) = plan(present, 9, n_outputs_max=256, now=0.0)
    assert chunk.sequence is (leader if is_first else other)


# --- Urgency ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "first",
    [
        sequence_of(9, 5, priority=-1),
        sequence_of(9, 5, deadline=1.0),
        sequence_of(9, 0),
        sequence_of(9, 5, priority=1, submitted_at=-2 * AGEING_S),
    ],
    ids=["lower priority number", "earlier deadline", "earlier arrival", "longer wait"],
)
def test_the_most_urgent_is_computed_and_admitted_first(first: Sequence) -> None:
    other = sequence_of(9, 1, deadline=2.0 if first.request.deadline else None)
    (chunk,) = plan(running(other, first), 9, n_outputs_max=256, now=0.0)
    assert chunk.sequence is first
    assert next_admitted([other, first], 0.0) is first


@pytest.mark.parametrize("priority", [1, 2, 7])
def test_one_level_of_priority_is_worth_so_many_seconds(priority: int) -> None:
    patient = sequence_of(9, 1, priority=priority)
    for now, is_first in ((priority * AGEING_S - 0.01, False), (priority * AGEING_S, True)):
        newcomer = sequence_of(9, 2, submitted_at=now)
        assert next_admitted([newcomer, patient], now) is (patient if is_first else newcomer)


# Eighths of seconds are exact.
EIGHTHS = st.integers(0, 10_000).map(lambda n: n / 8)


@DETERMINISTIC
@given(
    priority=st.integers(0, 10),
    newcomers=st.lists(st.tuples(EIGHTHS, st.none() | EIGHTHS), min_size=1, max_size=5),
    waited=EIGHTHS,
)
def test_nobody_that_came_a_level_more_later_goes_first_whatever_it_is(
    priority: int, newcomers: list[tuple[float, float | None]], waited: float
) -> None:
    patient, handicap = sequence_of(9, 99, priority=priority), (priority + 1) * AGEING_S
    others = [
        sequence_of(9, serial, submitted_at=handicap + later, deadline=due)
        for serial, (later, due) in enumerate(newcomers)
    ]
    now = max(s.request.submitted_at for s in others) + waited
    assert next_admitted([*others, patient], now) is patient


@pytest.mark.parametrize("priority", [0, 1, 4])
def test_nothing_starves_although_more_comes_than_can_be_served(priority: int) -> None:
    waiting, served = [sequence_of(9, 0, priority=priority)], []
    for second in range(1000):
        waiting += [
            sequence_of(9, 1 + 2 * second + i, submitted_at=second, deadline=1.0) for i in (0, 1)
        ]
        first = next_admitted(waiting, second)
        assert first is not None
        waiting.remove(first)
        served.append(first.request.serial)
    assert served.index(0) <= 2 * (priority + 1) * AGEING_S


def test_of_a_level_short_prompts_are_first_but_not_for_ever() -> None:
    long, short = sequence_of(1000, 1, deadline=1.0), sequence_of(2, 2)
    assert next_admitted([long, short], 0.0) is short
    later = sequence_of(2, 3, submitted_at=AGEING_S)
    assert next_admitted([long, later], AGEING_S) is long
    assert next_admitted([long, sequence_of(2, 4, priority=1)], 0.0) is long


def test_a_preempted_output_goes_on_before_new_prompts_are_begun() -> None:
    preempted, short = sequence_of(1000, 1), sequence_of(2, 2)
    preempted.tokens.append(7)
    assert next_admitted([short, preempted], 0.0) is preempted


def test_a_prompt_that_has_nearly_been_computed_is_a_short_one() -> None:
    nearly, new = sequence_of(1000, 1), sequence_of(300, 2)
    assert nearly.urgency(0.0) > new.urgency(0.0)
    kv_cache = KVCache(n_cells=1000, n_seq_ids=1, n_ctx_seq=1000)
    nearly.start(kv_cache.open(), 0.0)
    nearly.place(0)
    assert nearly.placement.slot is not None
    kv_cache.advance(nearly.placement.slot, 900)
    assert nearly.urgency(0.0) < new.urgency(0.0)


def test_a_prompt_that_others_have_nearly_computed_is_a_short_one() -> None:
    turn, new = sequence_of(1000, 1), sequence_of(300, 2)
    assert next_admitted([turn, new], 0.0) is new
    turn.placement.n_shareable = 990
    assert next_admitted([turn, new], 0.0) is turn


def test_nobody_overtakes_the_most_urgent_waiting_sequence() -> None:
    big, small = sequence_of(N_ALIKE, 1), sequence_of(2, 2)
    assert next_admitted([small, big], 0.0) is big
    big.n_unread = STREAM_BUFFER
    assert next_admitted([small, big], 0.0) is small, "unless its reader has stopped"
    small.n_unread = STREAM_BUFFER
    assert next_admitted([small, big], 0.0) is None
    assert next_admitted([], 0.0) is None


# --- Room ------------------------------------------------------------------------------------
def least_room(sequence: Sequence, n_new_cells: int, present: list[Sequence]) -> int:
    """The smallest number of available cells that suffices; more suffice as well."""
    answers = [has_room(sequence, n_new_cells, n, present) for n in range(200)]
    assert answers == sorted(answers)
    return answers.index(True)


def test_a_sequence_needs_room_to_go_on_for_itself_and_for_the_others() -> None:
    # 3 pending and 1 more, 1 pending and 1 more, and 5 of its own and 1 more.
    present = running(sequence_of(3, 0), sequence_of(1, 1))
    assert least_room(sequence_of(9, 2), 5, present) == 4 + 2 + 6


def test_a_sequence_that_was_preempted_needs_more_room_to_run_again() -> None:
    again = sequence_of(9, 2)
    again.n_preemptions = 1
    present = running(sequence_of(3, 0), sequence_of(1, 1))
    assert least_room(again, 5, present) == 3 + 1 + 5 + 3 * N_AHEAD_AGAIN
    assert least_room(again, 5, []) == 5


def test_a_follower_is_promised_only_what_its_leader_does_not_compute() -> None:
    leader, follower = running(sequence_of(20, 0), sequence_of(22, 1))
    follow(follower, leader, 19)
    assert least_room(sequence_of(9, 2), 5, [leader, follower]) == 21 + 4 + 6


def test_a_sequence_alone_or_in_paused_company_may_fill_every_cell() -> None:
    paused = running(sequence_of(3, 0, is_paused=True))
    for present in ([], paused):
        assert least_room(sequence_of(9, 1), 9, present) == 9
    active = running(sequence_of(3, 2))
    assert least_room(sequence_of(9, 1), 9, paused + active) == 4 + 10


# --- Preemption ------------------------------------------------------------------------------
def test_a_paused_sequence_is_preempted_first_then_the_least_urgent_then_the_newest() -> None:
    paused, least = sequence_of(1, 1, priority=-9, is_paused=True), sequence_of(1, 2, priority=3)
    oldest, newest = sequence_of(1, 0), sequence_of(1, 9)
    left = [oldest, newest, least, paused]
    for expected in (paused, least, newest, oldest):
        chosen = scheduler.choose_preempted(left)
        assert chosen is expected
        left.remove(chosen)


def test_a_tick_needs_a_cell_for_each_decoding_sequence_and_wants_all_that_is_pending() -> None:
    present = running(
        sequence_of(1, 0), sequence_of(1, 1, is_paused=True), sequence_of(4, 2), sequence_of(1, 3)
    )
    follow(present[3], present[2], 0)
    assert scheduler.n_rows_needed(present) == 1
    assert [scheduler.n_rows_wanted(present, n_rows) for n_rows in (3, 5, 9)] == [3, 5, 5]
