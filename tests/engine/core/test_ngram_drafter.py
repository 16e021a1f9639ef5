"""NgramDrafter: what is found is really there, and is trusted as far as it has been right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.ngram_drafter import N_MATCH_MIN, NgramDrafter, NgramMatch, _Hits
from cllm.engine.core.sequence import Sequence
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams

# Few tokens, so that much repeats; among them such that share bytes with others at other offsets.
TOKENS = st.sampled_from([0, 1, 256, 65536, 1 << 24])


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence(
        GenerationRequest(
            request_id="r",
            serial=0,
            prompt_token_ids=tuple(tokens),
            params=SamplingParams(),
            priority=0,
            submitted_at=0.0,
            deadline=None,
        )
    )


def says(sequence: Sequence, tokens: list[int]) -> None:
    for token in tokens:
        sequence.tokens.append(token)


@given(st.lists(TOKENS, max_size=30), st.lists(st.lists(TOKENS, max_size=4), max_size=10))
def test_a_match_is_a_place_where_the_same_tokens_stand(
    prompt: list[int], said: list[list[int]]
) -> None:
    match, tokens = NgramMatch(_Hits(0.9, 1.0)), list(prompt)
    for more in [[], *said]:
        tokens += more
        match.update(tokens)
        end = tokens[-N_MATCH_MIN:]
        places = [
            place
            for place in range(N_MATCH_MIN, len(tokens))
            if tokens[place - N_MATCH_MIN : place] == end
        ]
        if match.at is None:
            # Only where the last tokens came all at once is it looked for again.
            assert not places or not more
            continue
        assert match.at < len(tokens)
        assert match.n_match >= N_MATCH_MIN
        n = min(match.n_match, match.at)
        assert tokens[match.at - n : match.at] == tokens[-n:]


def test_what_followed_the_same_tokens_is_the_draft_and_a_period_goes_on() -> None:
    drafter, sequence = NgramDrafter(), sequence_of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert drafter.expect(sequence, 4)
    assert drafter.draft([(sequence, 4)]) == [(4, 5, 6, 9)]
    period = sequence_of([7, 8, 7, 8, 7, 8])
    assert drafter.expect(period, 5)
    assert drafter.draft([(period, 5)]) == [(7, 8, 7, 8, 7)]


def test_the_longer_match_is_preferred_to_the_later_one() -> None:
    start = [1, 2, 3, 4, 5, 6]
    sequence = sequence_of([*start, 70, 8, 4, 5, 6, 71, 9, *start])
    drafter = NgramDrafter()
    assert drafter.expect(sequence, 1)
    assert drafter.draft([(sequence, 1)]) == [(70,)]


def test_nothing_is_expected_of_text_that_never_came_before() -> None:
    drafter, sequence = NgramDrafter(), sequence_of(list(range(50)))
    assert drafter.expect(sequence, 8) == []
    says(sequence, [100])
    assert drafter.expect(sequence, 8) == []


def test_guesses_that_come_true_are_expected_more_and_others_less() -> None:
    text = list(range(100, 160))
    drafter, sequence = NgramDrafter(), sequence_of([*text, *text[:3]])
    before = drafter.expect(sequence, 1)[0]
    for token in text[3:40]:
        says(sequence, [token])
        after = drafter.expect(sequence, 1)[0]
    assert after > before
    assert after > 0.8
    # Three tokens that are the same, and then never what followed them: text in another order.
    drafter, sequence = NgramDrafter(), sequence_of([*text, *text[:3]])
    expected = [drafter.expect(sequence, 1)[0]]
    for place in range(10, 50, 4):
        says(sequence, text[place : place + 3])
        expected += drafter.expect(sequence, 1)
    assert expected[-1] < 0.5 * expected[0]


@given(st.lists(TOKENS, min_size=1, max_size=60), st.integers(1, 20))
def test_expectations_never_rise_from_one_draft_to_the_next(tokens: list[int], n: int) -> None:
    expected = NgramDrafter().expect(sequence_of(tokens), n)
    assert expected == sorted(expected, reverse=True)
    assert all(0 < p <= 1 for p in expected)
    assert len(expected) <= n


def test_a_match_that_goes_on_being_right_is_kept_though_another_place_fits_as_well() -> None:
    first, later = [1, 2, 3, 4, 5, 6, 7, 8], [90, 4, 5, 6, 70, 80]
    match, tokens = NgramMatch(_Hits(0.9, 1.0)), [*first, *later, 1, 2, 3]
    match.update(tokens)
    for token in (4, 5, 6):  # the later place fits from here on
        tokens.append(token)
        match.update(tokens)
    assert match.drafts(tokens, 2) == (7, 8)
