"""Images in the core: encoded once, decoded in a second decode, shared to the row, never cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cllm.engine.core.commands import MediaEncoded
from cllm.engine.output import FinishReason
from tests.simulation.images import IMAGES, media_of, tokens_of
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator

A_ROWS = len(media_of("A")[0])


def submit(sim: Simulator, prompt: str, **options: Any) -> str:
    tokens, media = tokens_of(prompt, sim.decoder.n_ctx_seq)
    return sim.submit(tokens, media=media, **options)


def test_a_request_waits_until_its_image_is_encoded_and_others_go_on() -> None:
    sim = Simulator(n_ctx=64)
    other = submit(sim, "abc", max_tokens=8)
    sim.core.tick()
    image = submit(sim, "xAy", max_tokens=2)
    for _ in range(3):
        sim.core.tick()
        sim.hear()
    assert [s.request_id for s in sim.core.queue.waiting] == [image]
    assert len(sim.tokens[other]) == 4
    sim.run()
    assert sim.outcome(image) == sim.alone(image)


def test_an_engine_with_nothing_but_encodes_has_no_work() -> None:
    sim = Simulator()
    submit(sim, "A", max_tokens=1)
    assert sim.core.has_work
    sim.core.tick()
    assert not sim.core.has_work
    sim.core.handle(sim.encoder.next())
    assert sim.core.has_work
    sim.run()


def test_an_image_is_encoded_once_and_computed_once_for_requests_that_share_it() -> None:
    sim = Simulator(n_ctx=64, n_batch=16)
    first = submit(sim, "xAy", max_tokens=2)
    second = submit(sim, "xAz", max_tokens=2)
    sim.run()
    third = submit(sim, "xAw", max_tokens=2)
    sim.run()
    assert sim.encoder.n_encoded == 1
    shared = {r: sim.finished[r].completion.usage.n_cached for r in (first, second, third)}
    assert sorted(shared.values()) == [0, 1 + A_ROWS, 1 + A_ROWS]
    for request_id in shared:
        assert sim.outcome(request_id) == sim.alone(request_id)


def test_an_evicted_embedding_is_encoded_again_for_a_request_that_needs_it() -> None:
    sim = Simulator(n_ctx=64, media_cache_bytes=0, prefix_cache=False)
    for n_encoded in (1, 2):
        submit(sim, "A", max_tokens=1)
        sim.run()
        assert sim.encoder.n_encoded == n_encoded
    assert sim.core._media is not None
    assert sim.core._media.n_bytes == 0


@pytest.mark.parametrize("letter", IMAGES)
@pytest.mark.parametrize("n_batch", [4, 6, 16])
def test_an_image_that_can_be_cut_is_cut_and_another_is_decoded_whole(
    letter: str, n_batch: int
) -> None:
    rows, media = media_of(letter)
    if not media.is_causal and n_batch < len(rows):
        return  # rejected at the door
    sim = Simulator(n_ctx=64, n_batch=n_batch)
    request_id = submit(sim, f"x{letter}y", max_tokens=3)
    sim.run()
    assert sim.outcome(request_id) == sim.alone(request_id)
    n_decoded = [n_rows for batch in sim.decoder.batches for _, n_rows, _ in batch]
    if not media.is_causal:
        assert len(rows) in n_decoded


def test_a_prompt_may_end_with_an_image() -> None:
    sim = Simulator(n_ctx=64, n_batch=4)
    request_id = submit(sim, "xC", max_tokens=3)
    sim.run()
    assert sim.outcome(request_id) == sim.alone(request_id)


def test_streams_are_served_while_a_large_image_is_decoded_in_pieces() -> None:
    sim = Simulator(n_ctx=128, n_batch=4, n_prefill_chunk=2)
    stream = submit(sim, "abc", max_tokens=20)
    sim.tick(2)
    submit(sim, "DDD", max_tokens=1)
    n_before = len(sim.tokens[stream])
    sim.tick(6)
    assert len(sim.tokens[stream]) == n_before + 6


def test_with_a_target_prompts_images_and_encodes_take_gaps_of_the_streams_by_turns() -> None:
    """Each alone takes all that the target leaves; two in one gap would be late."""
    sim = Simulator(
        n_ctx=512, n_batch=64, n_seq_max=4, target_itl_ms=50, latency_s=0.001, answer=endless
    )
    submit(sim, "abc", max_tokens=100)
    sim.tick(2)
    submit(sim, "DDDDDD", max_tokens=1)
    sim.core.tick()
    sim.hear()
    while sim.encoder.jobs:
        sim.core.handle(sim.encoder.next())
    prompt = sim.submit(b"p" * 300, max_tokens=1)
    submit(sim, "B", max_tokens=1)  # its encode does not end
    kinds: list[tuple[bool, bool]] = []
    batches = sim.decoder.batches = []
    while prompt not in sim.finished and len(kinds) < 40:
        sim.core.tick()
        sim.hear()
        has_prompt = any(n_tokens > 1 for _, n_tokens, _ in batches[0])
        kinds.append((has_prompt, len(batches) > 1))
        batches.clear()
    # No gap has both: rows of an image behind a tick, then rows of a prompt in the next one.
    assert not any(
        had_image and has_prompt for (_, had_image), (has_prompt, _) in itertools.pairwise(kinds)
    )
    assert any(has_prompt for has_prompt, _ in kinds)
    assert any(has_media for _, has_media in kinds)
    gaps = [
        had_image or has_prompt for (_, had_image), (has_prompt, _) in itertools.pairwise(kinds)
    ]
    assert not all(gaps[2:])  # the encoder has gaps of its own


def test_an_image_that_cannot_be_encoded_ends_the_requests_with_it_alone() -> None:
    sim = Simulator(n_ctx=64)
    broken = [submit(sim, "A", max_tokens=1), submit(sim, "xA", max_tokens=1)]
    well = submit(sim, "B", max_tokens=1)
    sim.core.tick()
    sim.encoder.cancel(b"A")
    sim.core.handle(MediaEncoded(b"A", 0, None, RuntimeError("scripted")))
    sim.run()
    assert sim.failed() == set(broken)
    assert sim.outcome(well) == sim.alone(well)
    again = submit(sim, "A", max_tokens=1)  # a failure is not remembered
    sim.run()
    assert sim.outcome(again) == sim.alone(again)


def test_an_image_that_cannot_be_encoded_again_ends_no_request_that_has_computed_it() -> None:
    sim = Simulator(n_ctx=64, media_cache_bytes=0)
    well = submit(sim, "xA", max_tokens=20)
    while not sim.tokens[well]:
        sim.tick()
    other = submit(sim, "b", max_tokens=1)
    while other not in sim.finished:  # at its end the embeddings are dropped
        sim.tick()
    broken = submit(sim, "yA", max_tokens=1)
    sim.core.tick()
    sim.encoder.cancel(b"A")
    sim.core.handle(MediaEncoded(b"A", 0, None, RuntimeError("scripted")))
    sim.run()
    assert sim.failed() == {broken}
    assert sim.outcome(well) == sim.alone(well)


def test_a_cancelled_request_ends_the_encode_that_no_other_needs() -> None:
    sim = Simulator(n_ctx=64)
    first, second = (submit(sim, "D", max_tokens=1) for _ in range(2))
    sim.core.tick()
    assert len(sim.encoder.jobs) == 2
    sim.core.queue.cancel(first)
    assert len(sim.encoder.jobs) == 2
    sim.core.queue.cancel(second)
    assert not sim.encoder.jobs
    sim.hear()
    third = submit(sim, "D", max_tokens=1)
    sim.run()
    assert sim.outcome(third) == sim.alone(third)


def test_a_preempted_request_computes_its_image_again() -> None:
    sim = Simulator(n_ctx=24, n_seq_max=2, prefix_cache=False, media_cache_bytes=0)
    first = submit(sim, "xAyz", max_tokens=12)
    second = submit(sim, "vBw", max_tokens=12, priority=1)
    sim.run()
    assert sim.core.statistics().n_preemptions > 0
    n_rows = sum(len(request.prompt_token_ids) for request in sim.requests.values())
    assert sim.core.statistics().n_prefill_tokens > n_rows
    for request_id in (first, second):
        assert sim.outcome(request_id) == sim.alone(request_id)


def test_the_deadline_of_a_request_that_waits_for_its_image_holds() -> None:
    sim = Simulator(n_ctx=64)
    request_id = submit(sim, "A", max_tokens=1, timeout=1.0)
    sim.core.tick()
    sim.now += 2.0
    sim.core.tick()
    sim.hear()
    assert sim.finished[request_id].completion.finish_reason is FinishReason.DEADLINE
    assert not sim.encoder.jobs


def test_states_are_saved_behind_an_image_so_that_the_next_question_starts_there() -> None:
    sim = Simulator(n_ctx=256, n_batch=32, has_pos_min=False)
    submit(sim, "x" * 40 + "A" + "y" * 20, max_tokens=1)
    sim.run()
    second = submit(sim, "x" * 40 + "A" + "z" * 20, max_tokens=1)
    sim.run()
    assert sim.finished[second].completion.usage.n_cached == 40 + A_ROWS
    assert sim.outcome(second) == sim.alone(second)


def test_a_running_request_whose_embeddings_are_gone_gives_up_its_seat_until_they_are_back() -> (
    None
):
    sim = Simulator(n_ctx=64, n_batch=2, n_seq_max=2)
    request_id = submit(sim, "xyzA", max_tokens=2)
    sim.tick()  # encodes
    sim.tick()  # admits, and computes two tokens
    assert [s.n_computed for s in sim.core.queue.running] == [2]
    assert sim.core._media is not None
    sim.core._media._chunks.clear()
    sim.core.tick()
    assert not sim.core.queue.running
    assert not sim.core.has_work  # it does not spin
    sim.run()
    assert sim.outcome(request_id) == sim.alone(request_id)


def test_drafts_end_where_an_image_began() -> None:
    sim = Simulator(n_ctx=128, n_batch=64, speculation="ngram")
    request_id = submit(sim, "abcdefghijklAabcdefghijkl", max_tokens=8)
    sim.run()
    assert sim.core._speculation is not None
    assert sim.outcome(request_id) == sim.alone(request_id)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_request_that_is_suspended_inside_an_image_continues_before_it(
    can_truncate: bool,
) -> None:
    sim = Simulator(n_ctx=64, n_batch=4, has_pos_min=can_truncate)
    tokens, media = tokens_of("xC", 64)
    first = sim.submit(tokens, media=media, max_tokens=2)
    sim.tick(2)
    (sequence,) = sim.core.queue.running
    assert sequence.spans[0].start < sequence.n_computed < sequence.spans[0].end
    sim.core.queue.cancel(first, saves_state=True)
    sim.hear()
    state = sim.finished[first].state
    assert (state is None) or state.n_tokens == sequence.spans[0].start
    second = sim.submit(tokens, media=media, state=state, max_tokens=2)
    sim.run()
    assert sim.outcome(second) == sim.alone(second)
