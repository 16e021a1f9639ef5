"""Speculation: the same answers in fewer ticks, and no row that is not worth its time."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from cllm.engine.core.kv_cache import KVCache, Slot
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import N_DRAFT_ROWS, BudgetedSpeculation, Drafts
from cllm.engine.output import FinishReason
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import FakeRun
from tests.simulation.reference import END, endless, says
from tests.simulation.simulation import simulate
from tests.simulation.simulator import Simulator

LINE = {n_rows: 0.01 * n_rows for n_rows in range(1, 65)}
FLAT = dict.fromkeys(range(1, 65), 0.01)


# --- The same answers -----------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_whatever_is_guessed_every_request_gets_its_answer_and_the_books_agree(
    share: float,
) -> None:
    report = simulate(150, seed=int(1000 * share), draft_share=share)
    assert report.n_tokens > 500


def test_right_guesses_save_ticks_and_wrong_ones_cost_none() -> None:
    n_ticks = {}
    for share in (None, 0.0, 1.0):
        sim = Simulator(answer=endless, n_ctx=256, draft_share=share)
        request_id = sim.submit(b"prompt", max_tokens=60)
        sim.run()
        assert sim.outcome(request_id) == sim.alone(request_id)
        n_ticks[share] = sim.core.statistics().n_ticks
    assert n_ticks[0.0] == n_ticks[None] == 60
    assert n_ticks[1.0] < 10


def test_copied_text_takes_fewer_ticks_with_its_own_tokens_as_drafts() -> None:
    text = b"the quick brown fox jumps over the lazy dog. " * 2
    n_ticks = {}
    for speculation in (None, "ngram"):
        sim = Simulator(
            # What follows a guess that is wrong does not matter.
            answer=lambda prefix: (*text, END)[min(len(prefix) - len(text), len(text))],
            n_ctx=512,
            n_batch=64,
            speculation=speculation,
            latency_s=0.01,
        )
        request_id = sim.submit(text)
        sim.run()
        assert sim.outcome(request_id) == sim.alone(request_id)
        n_ticks[speculation] = sim.core.statistics().n_ticks
        sim.check_idle()
    assert n_ticks["ngram"] < n_ticks[None] / 3


def test_what_was_drafted_and_accepted_is_told_by_request_and_in_all() -> None:
    sim = Simulator(answer=endless, n_ctx=256, draft_share=0.8)
    request_id = sim.submit(b"prompt", max_tokens=60)
    sim.run()
    usage, told = sim.finished[request_id].completion.usage, sim.core.statistics()
    assert 0 < usage.n_accepted < usage.n_drafted
    assert (told.n_drafted_tokens, told.n_accepted_tokens) == (usage.n_drafted, usage.n_accepted)
    assert told.n_decoding_rows == told.n_output_tokens == usage.n_output == 60
    # Each tick gives the token that is always given, and those that were guessed.
    assert told.n_decoding_ticks + usage.n_accepted >= 60
    assert told.n_decode_rows == 6 + 60 - 1 + (usage.n_drafted - usage.n_accepted)


def test_an_answer_that_ends_among_its_drafts_leaves_no_more_than_it_said_to_the_prefix_cache() -> (
    None
):
    # `Simulator.check` holds the cells of the prefix cache against the tokens they are said to be.
    sim = Simulator(answer=says(b"abcdefgh", n_prompt=6), n_ctx=128, draft_share=1.0, n_batch=16)
    request_id = sim.submit(b"prompt", stop=["de"])
    sim.run()
    assert sim.outcome(request_id).text == "abc"
    (entry,) = sim.core.manager.cells.prefixes.entries
    assert bytes(entry.tokens.tolist()) == b"promptabcd"


def test_a_request_may_have_none() -> None:
    sim = Simulator(answer=endless, n_ctx=256, draft_share=1.0)
    request_id = sim.submit(b"prompt", max_tokens=20, speculation=False)
    sim.run()
    assert sim.finished[request_id].completion.usage.n_drafted == 0


def test_no_drafts_where_memory_cannot_give_them_up() -> None:
    for has_pos_min, is_windowed in ((False, False), (True, True)):
        sim = Simulator(
            answer=endless,
            n_ctx=256,
            draft_share=1.0,
            has_pos_min=has_pos_min,
            is_windowed=is_windowed,
        )
        request_id = sim.submit(b"prompt", max_tokens=20)
        sim.run()
        assert sim.outcome(request_id) == sim.alone(request_id)
        assert sim.core.statistics().n_drafted_tokens == 0


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("is_windowed", [False, True], ids=["states", "window"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_memory_that_gives_up_the_rows_of_a_decode_takes_drafts(
    share: float, is_windowed: bool, kv_unified: bool
) -> None:
    sim = Simulator(
        answer=endless, n_ctx=4096, n_seq_max=4, n_batch=64, draft_share=share, has_pos_min=False,
        is_windowed=is_windowed, kv_unified=kv_unified, n_rollback=8,
    )  # fmt: skip
    requests = [sim.submit(b"prompt" * n, max_tokens=20 + 10 * n) for n in (1, 2, 3)]
    sim.run()
    for request_id in requests:
        assert sim.outcome(request_id) == sim.alone(request_id)
    statistics = sim.core.statistics()
    assert statistics.n_rebuilds == 0
    assert statistics.n_drafted_tokens > 0
    assert (statistics.n_accepted_tokens > 0) == (share > 0)
    sim.check_idle()


def test_with_states_all_sequences_of_a_batch_have_as_many_rows() -> None:
    states = memory(has_pos_min=False, n_rollback=4)
    speculation = BudgetedSpeculation(Guesses(0.9), RowCost(FLAT), states, stream_buffer=64)
    both = [decoding(0, max_tokens=4), decoding(1)]
    chunks = speculation.extend([Chunk(s, 1) for s in both], 100, 100, None)
    assert [chunk.drafts for chunk in chunks] == [(7, 7, 7), (7, 7, 7)]
    excluded = decoding(2, speculation=False)
    chunks = speculation.extend([Chunk(s, 1) for s in (*both, excluded)], 100, 100, None)
    assert [chunk.drafts for chunk in chunks] == [(), (), ()]


def test_a_sequence_without_drafts_fills_the_batch_and_nothing_is_learned_of_that() -> None:
    class Some(Guesses):
        def expect(self, sequence: Sequence, n_max: int) -> list[float]:
            return super().expect(sequence, n_max) if sequence is both[0] else []

    both, drafter = [decoding(0), decoding(1)], Some(0.9)
    states = memory(has_pos_min=False, n_rollback=4)
    speculation = BudgetedSpeculation(drafter, RowCost(FLAT), states, stream_buffer=64)
    chunks = speculation.extend([Chunk(s, 1) for s in both], 100, 100, None)
    assert [chunk.drafts for chunk in chunks] == [(7, 7, 7, 7), (both[1].tokens[-1],) * 4]
    for sequence in both:
        speculation.observe(sequence, 4, 1)
    assert drafter.observed == [(4, 1)]


def test_in_the_per_sequence_layout_only_neighbours_have_drafts() -> None:
    states = memory(has_pos_min=False, n_rollback=4, kv_unified=False)
    speculation = BudgetedSpeculation(Guesses(0.9), RowCost(FLAT), states, stream_buffer=64)
    for ids, expected in (((0, 1), 4), ((3, 2), 4), ((0, 2), 0)):
        chunks = [Chunk(decoding(seq_id), 1) for seq_id in ids]
        found = speculation.extend(chunks, 100, 100, None)
        assert [len(chunk.drafts) for chunk in found] == [expected, expected], ids


def test_a_decode_that_fails_with_drafts_in_it_disturbs_nobody() -> None:
    for fault in (2, -3):
        sim = Simulator(answer=endless, n_ctx=256, draft_share=1.0, faults={3: fault})
        request_id = sim.submit(b"prompt", max_tokens=60)
        sim.run()
        assert sim.outcome(request_id) == sim.alone(request_id)
        assert sim.decoder.batches[2][0] == (0, 8, 8)  # one token, and drafts
        assert sim.core.statistics().n_rebuilds == (fault == -3)


def test_a_slow_reader_never_has_more_deltas_than_it_may() -> None:
    sim = Simulator(answer=endless, n_ctx=256, draft_share=1.0, stream_buffer=3)
    request_id = sim.submit(b"prompt", max_tokens=30)
    sim.stopped.add(request_id)
    sim.tick(10)
    assert sim.unread[request_id] == 3
    sim.read_on(request_id)
    sim.run()
    assert sim.outcome(request_id) == sim.alone(request_id)


def test_drafts_take_no_cell_that_somebody_else_has() -> None:
    sim = Simulator(answer=endless, n_ctx=40, n_batch=40, draft_share=1.0)
    first = sim.submit(b"prompt", max_tokens=10)
    sim.run()
    n_evictions = sim.core.statistics().n_evictions
    second = sim.submit(b"another", max_tokens=20)
    sim.run()
    assert sim.outcome(second) == sim.alone(second)
    assert sim.outcome(first) == sim.alone(first)
    assert n_evictions == 0
    assert sim.core.statistics().n_preemptions == 0


# --- How many -------------------------------------------------------------------------------------
class Guesses:
    """A drafter that is right so often."""

    def __init__(self, share: float, step_s: float = 0.0) -> None:
        self.share = share
        self.step_s = step_s
        self.observed: list[tuple[int, int]] = []

    def expect(self, sequence: Sequence, n_max: int) -> list[float]:
        return [self.share ** (n + 1) for n in range(n_max)]

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        return [(7,) * n for _, n in wanted]

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        self.observed.append((n_drafted, n_accepted))


def memory(**options: Any) -> KVCache:
    """Bookkeeping of 8 sequences of 64 positions."""
    return KVCache(n_cells=512, n_seq_ids=8, n_ctx_seq=64, **options)


def decoding(serial: int, n_computed: int = 9, **sampling: Any) -> Sequence:
    """A sequence with one pending token."""
    request = GenerationRequest(
        request_id=f"r{serial}",
        serial=serial,
        prompt_token_ids=tuple(range(n_computed + 1)),
        params=SamplingParams(**sampling),
        priority=0,
        submitted_at=0.0,
        deadline=None,
    )
    sequence, slot = Sequence(request), Slot(serial, is_cached=False)
    slot.n_computed = n_computed
    sequence.start(slot, 0.0)
    return sequence


def n_drafted(
    sequences: SequenceOf[Sequence],
    cost: dict[int, float],
    *,
    share: float = 0.8,
    step_s: float = 0.0,
    n_rows: int = 100,
    n_outputs: int = 100,
    target_s: float | None = None,
    kv_unified: bool = True,
) -> list[int]:
    """How many drafts each sequence gets."""
    speculation = BudgetedSpeculation(
        Guesses(share, step_s),
        RowCost(cost),
        memory(kv_unified=kv_unified),
        stream_buffer=64,
    )
    chunks = speculation.extend([Chunk(s, 1) for s in sequences], n_rows, n_outputs, target_s)
    return [len(chunk.drafts) for chunk in chunks]


def test_rows_that_cost_as_much_as_a_tick_of_their_own_are_left_alone() -> None:
    assert n_drafted([decoding(0)], LINE, share=0.99) == [0]
    assert n_drafted([decoding(n) for n in range(8)], LINE, share=0.99) == [0] * 8


def test_rows_that_cost_nothing_are_used_as_far_as_there_is_hope() -> None:
    (n,) = n_drafted([decoding(0)], FLAT, share=0.8)
    assert 10 < n < N_DRAFT_ROWS  # 0.8**14 is less than one draft in twenty
    assert n_drafted([decoding(0)], FLAT, share=1.0) == [N_DRAFT_ROWS]
    assert sum(n_drafted([decoding(n) for n in range(3)], FLAT, share=1.0)) == N_DRAFT_ROWS


@pytest.mark.parametrize(
    ("n_sequences", "share", "expected"),
    [(1, 0.95, 16), (1, 0.5, 1), (3, 0.6, 4), (8, 0.95, 16), (8, 0.4, 8), (16, 0.99, 16)],
)
def test_kernels_that_take_rows_by_steps_get_whole_steps(
    n_sequences: int, share: float, expected: int
) -> None:
    # As measured on a CPU with AVX-512, ms: 9 to 12 rows cost nearly what 16 do.
    steps = {1: 31, 2: 50, 3: 56, 4: 57, 5: 75, 8: 101, 9: 130, 12: 140, 16: 145, 17: 170}
    cost = {n_rows: ms / 1000 for n_rows, ms in steps.items()}
    cost |= {n_rows: 0.0091 * n_rows for n_rows in (32, 48, 64)}
    counts = n_drafted([decoding(n) for n in range(n_sequences)], cost, share=share)
    assert n_sequences + sum(counts) == expected


def test_no_drafts_beside_a_prompt() -> None:
    prompt = decoding(1, n_computed=2)
    prompt.tokens += [1, 2, 3]
    speculation = BudgetedSpeculation(Guesses(1.0), RowCost(FLAT), memory(), stream_buffer=64)
    chunks = [Chunk(decoding(0), 1), Chunk(prompt, 4)]
    assert speculation.extend(chunks, 100, 100, None) == chunks


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"n_rows": 5}, 5),
        ({"n_outputs": 4}, 4),
        ({"n_rows": 0}, 0),
        ({"target_s": 0.005}, 0),
    ],
    ids=str,
)
def test_drafts_keep_to_what_is_left_of_the_batch_and_of_the_target(
    limit: dict[str, Any], expected: int
) -> None:
    assert n_drafted([decoding(0)], FLAT, share=1.0, **limit) == [expected]


def test_drafts_end_with_the_request_the_context_and_the_patience_of_the_reader() -> None:
    near_the_end = decoding(0, n_computed=60)  # 61 tokens of 64 are there
    unread = decoding(1)
    unread.n_unread = 58
    few = decoding(2, max_tokens=7)
    none = decoding(3, max_tokens=1)
    assert n_drafted([near_the_end, unread, few, none], FLAT, share=1.0) == [3, 5, 6, 0]


def test_in_the_per_sequence_layout_rows_beyond_those_of_others_cost_a_decode_of_their_own() -> (
    None
):
    # One of four with drafts: the decode of all, and another for its drafts.
    cost = {1: 0.010, 2: 0.011, 3: 0.012, 4: 0.013, 8: 0.015, 12: 0.016, 16: 0.017, 40: 0.03}
    one_of_four = [decoding(0), *(decoding(n, speculation=False) for n in range(1, 4))]
    assert sum(n_drafted(one_of_four, cost, share=0.5, kv_unified=True)) > 0
    assert sum(n_drafted(one_of_four, cost, share=0.5, kv_unified=False)) == 0
    counts = n_drafted([decoding(n) for n in range(4)], cost, share=0.9, kv_unified=False)
    assert len(set(counts)) == 1
    assert counts[0] > 0


def test_a_drafter_that_takes_time_is_asked_for_less() -> None:
    free = n_drafted([decoding(0)], FLAT, share=0.8)[0]
    dear = n_drafted([decoding(0)], FLAT, share=0.8, step_s=0.002)[0]
    assert 0 < dear < free
    assert n_drafted([decoding(0)], FLAT, share=0.8, step_s=0.02) == [0]


class Forcing:
    """A constraint that knows what comes."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def forced(self) -> SequenceOf[int]:
        return self.tokens


class Broken:
    """A constraint that cannot go on."""

    def forced(self) -> SequenceOf[int]:
        raise RuntimeError("broken")


def test_a_constraint_that_fails_forces_nothing() -> None:
    sequence = decoding(0)
    sequence.sampler = Forced()  # type: ignore[assignment]
    sequence.sampler.constraint = Broken()  # type: ignore[union-attr, misc]
    assert n_drafted([sequence], FLAT, share=1.0) == [N_DRAFT_ROWS]


def test_a_drafter_that_fails_is_not_asked_again_and_nobody_else_notices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sim = Simulator(answer=endless, n_ctx=256, draft_share=1.0)
    asked = []

    def fails(wanted: object) -> list[Drafts]:
        asked.append(wanted)
        raise RuntimeError("broken")

    assert sim._drafter is not None
    sim._drafter.draft = fails  # type: ignore[method-assign]
    request_id = sim.submit(b"prompt", max_tokens=20)
    sim.run()
    assert sim.outcome(request_id) == sim.alone(request_id)
    assert len(asked) == 1
    assert "nothing is guessed any more" in caplog.text


class Forced:
    """A sampler that has such a constraint."""

    def __init__(self, *tokens: int) -> None:
        self.constraint = Forcing(*tokens)


def test_what_a_constraint_forces_is_drafted_first_and_its_drafter_hears_nothing_of_it() -> None:
    sequence = decoding(0)
    sequence.sampler = Forced(3, 4, 5)  # type: ignore[assignment]
    drafter = Guesses(0.9)
    speculation = BudgetedSpeculation(drafter, RowCost(FLAT), memory(), stream_buffer=64)
    (chunk,) = speculation.extend([Chunk(sequence, 1)], 100, 100, None)
    assert chunk.drafts == (3, 4, 5)
    assert (chunk.n_rows, chunk.n_outputs) == (4, 4)
    speculation.observe(sequence, 3, 1)
    assert drafter.observed == []


def test_a_constraint_whose_words_are_cut_otherwise_is_believed_less() -> None:
    sequence = decoding(0)
    sequence.sampler = Forced(3, 4, 5)  # type: ignore[assignment]
    speculation = BudgetedSpeculation(Guesses(0.9), RowCost(dict(LINE)), memory(), stream_buffer=64)
    cheap = RowCost({1: 0.010, 2: 0.013, 3: 0.016, 4: 0.019, 64: 0.2})
    speculation._row_cost = cheap
    assert len(speculation.extend([Chunk(sequence, 1)], 100, 100, None)[0].drafts) == 3
    for _ in range(60):
        speculation.observe(sequence, 3, 0)
    # The drafter is asked in its place.
    assert set(speculation.extend([Chunk(sequence, 1)], 100, 100, None)[0].drafts) == {7}


def test_the_time_in_which_drafts_are_made_is_no_cost_of_rows() -> None:
    sim = Simulator(answer=endless, n_ctx=256, draft_share=1.0, latency_s=0.01)
    drafter = sim._drafter
    assert drafter is not None
    draft = drafter.draft

    def slow(wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        sim.now += 1.0
        return draft(wanted)

    drafter.draft = slow  # type: ignore[method-assign]
    sim.submit(b"prompt", max_tokens=60)
    sim.run()
    assert sim.now > 3.0
    assert max(sim.core.cost.rows.table.values()) == pytest.approx(0.01)


def test_what_rows_cost_is_learned_from_ticks_that_only_decode() -> None:
    def latency(runs: SequenceOf[FakeRun]) -> float:
        return 0.001 * sum(len(run.tokens) for run in runs)

    sim = Simulator(answer=endless, n_ctx=256, draft_share=1.0, latency_s=latency)
    request_id = sim.submit(b"a longer prompt that takes some ticks", max_tokens=60)
    sim.run()
    assert sim.finished[request_id].completion.finish_reason is FinishReason.LENGTH
    table = sim.core.cost.rows.table
    assert table  # of what was met often enough
    assert all(seconds == pytest.approx(0.001 * n_rows) for n_rows, seconds in table.items())
