"""A row cut to its candidates gives what the whole row gives: the same tokens for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.bindings import Candidates, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.llama_sampler import LlamaChain, SamplerFactory
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling import NotFiniteError, RowSampler, n_below, n_largest, sample
from cllm.engine.sampling_params import SAMPLERS, SamplingParams

N_VOCAB = 260
PROMPT = (256, 72, 101, 108, 108, 111, 32, 72, 101, 108)
N_CTX = 64


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(EMBEDDED_MODEL) as model:
        yield model


def request_of(params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> GenerationRequest:
    return GenerationRequest("r", 0, prompt, params, 0, 0.0, None)


class WholeRow:
    """The definition: every token a candidate that is not banned."""

    def __init__(self, model: Model, params: SamplingParams) -> None:
        self._params = params
        self._chain = LlamaChain(
            model, params, seed=params.seed or 0, prompt=PROMPT, n_ctx=N_CTX
        )  # fmt: skip
        self._vocab = model.vocab
        self.close = self._chain.close
        self.n_sampled = 0

    def sample(self, logits: NDArray[np.float32], largest: float) -> int:
        ends = [t for t in range(N_VOCAB) if self._vocab.is_eog(t)]
        banned = {*self._vocab.suppressed, *(ends if self._params.ignore_eos else ())}
        if self.n_sampled < self._params.min_tokens:
            banned |= {*ends, *self._params.stop_token_ids}
        ids = np.array([t for t in range(N_VOCAB) if t not in banned], np.int32)
        token = self._chain.choose(ids, logits[ids])
        self._chain.accept(token)
        self.n_sampled += 1
        return token


# No two logits are equal: where they are, llama.cpp's partial sort may keep either.
ROWS = st.builds(
    lambda seed, scale, n_banned: _row(seed, scale, n_banned),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 1.0, 3.0, 20.0]),
    st.sampled_from([0, 0, 5, 200]),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 10, 40, 1000]),
    top_p=st.sampled_from([0.1, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    typical_p=st.sampled_from([1.0, 1.0, 0.7]),
    top_n_sigma=st.sampled_from([-1.0, -1.0, 1.5]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5]),
    dynatemp_range=st.sampled_from([0.0, 0.0, 0.3]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    repeat_last_n=st.sampled_from([-1, 0, 3, 64]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    dry_multiplier=st.sampled_from([0.0, 0.0, 0.8]),
    mirostat=st.sampled_from([0, 0, 0, 1, 2]),
    logit_bias=st.dictionaries(
        st.integers(0, N_VOCAB - 1),
        st.sampled_from([-np.inf, -5.0, 3.0, 50.0]),
        max_size=6,
    ),
    samplers=st.one_of(st.just(SAMPLERS), st.permutations(SAMPLERS)),
    min_keep=st.sampled_from([0, 1, 4]),
    min_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (65, 66)]),
    seed=st.integers(0, 1000),
)


def _row(seed: int, scale: float, n_banned: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(N_VOCAB) * scale).astype(np.float32)
    logits[rng.choice(N_VOCAB, n_banned, replace=False)] = -np.inf
    return logits


@settings(max_examples=1500)
@given(params=PARAMS, rows=st.lists(ROWS, min_size=6, max_size=6))
def test_the_cut_row_gives_the_tokens_of_the_whole_row(
    model: Model, params: SamplingParams, rows: list[NDArray[np.float32]]
) -> None:
    factory = SamplerFactory(model, N_CTX)
    cut = factory(request_of(params))
    if cut is None:
        assert params.is_greedy
        assert [sample(row[None], [None]) for row in rows] == [[int(row.argmax())] for row in rows]
        return
    whole = WholeRow(model, params)
    try:
        for row in rows:
            expected, before = outcome(whole, row), row.copy()
            assert outcome(cut, row) == expected
            assert np.array_equal(row, before), "the row is as it was"
            if expected is None:
                return  # what was to be chosen from is over: the request ends
    finally:
        cut.close()
        whole.close()


def outcome(sampler: Any, row: NDArray[np.float32]) -> int | None:
    """A token, or None if there was nothing to choose from."""
    try:
        return int(sampler.sample(row, float(row.max())))
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("params", "n_candidates"),
    [
        ({}, 40), ({"temperature": 0, "repeat_penalty": 1.1}, 1), ({"top_k": 0}, 0),
        ({"top_n_sigma": 1.0}, 0), ({"mirostat": 2}, 0),
        ({"samplers": ("temperature", "top_k")}, 0), ({"samplers": ("top_k", "temperature")}, 40),
        ({"samplers": ("penalties", "dry", "top_k", "top_p")}, 40),
    ],
)  # fmt: skip
def test_what_can_matter_follows_from_the_order_of_the_samplers(
    params: dict[str, Any], n_candidates: int
) -> None:
    assert n_largest(SamplingParams(**params)) == n_candidates


def test_min_p_alone_says_how_far_below_the_largest_a_token_matters() -> None:
    only = SamplingParams(top_k=0, top_p=1.0, min_p=0.05)
    assert n_below(only) == pytest.approx(-np.log(0.05), abs=0.01)
    for other in ({"min_keep": 5}, {"min_p": 0.0}, {"top_p": 0.9}, {"mirostat": 1}):
        values: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.05, **other}
        assert n_below(SamplingParams(**values)) == np.inf


class Watched:
    """A chain that counts its candidates and takes the best."""

    def __init__(self) -> None:
        self.n_candidates: list[int] = []

    def choose(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int:
        assert (np.diff(ids) > 0).all(), "ascending"
        self.n_candidates.append(len(ids))
        return int(ids[logits.argmax()])

    def accept(self, token: int) -> None:
        """Nothing to remember."""

    def close(self) -> None:
        """Nothing to free."""


def test_a_large_row_is_cut_to_a_handful() -> None:
    chain, n_vocab = Watched(), 150_000
    sampler = RowSampler(
        chain,
        SamplingParams(repeat_penalty=1.1, logit_bias=dict.fromkeys(range(64), 1.0)),
        prompt=range(1000),
        banned=(7,),
        ends=(),
        n_ctx=4096,
        scratch=np.empty(n_vocab, np.bool_),
    )
    rng = np.random.default_rng(1)
    for _ in range(30):
        row = rng.standard_normal(n_vocab).astype(np.float32) * 3
        sampler.sample(row, float(row.max()))
    n_wanted = 40 + 64 + 64 + 1
    assert np.median(chain.n_candidates[15:]) < 4 * n_wanted * 1.5
    assert max(chain.n_candidates[15:]) < n_vocab / 30


class CannotHappen:
    """A sampler that is never asked."""

    def sample(self, logits: NDArray[np.float32], largest: float) -> int:
        raise AssertionError("a row without a finite maximum")

    def close(self) -> None:
        """Nothing to free."""


def test_a_row_without_a_finite_maximum_fails_alone() -> None:
    rows = np.zeros((3, 10), np.float32)
    rows[0, 3] = np.nan
    rows[1, 4] = 1.0
    rows[2, 5] = np.inf
    for samplers in ([None, None, None], [None, None, CannotHappen()]):
        first, second, third = sample(rows, samplers)
        assert isinstance(first, NotFiniteError)
        assert second == 4
        assert isinstance(third, NotFiniteError)


def test_candidates_of_the_whole_row_and_of_a_part_are_one_kind(model: Model) -> None:
    chain = LlamaChain(model, SamplingParams(seed=1), seed=1, prompt=(), n_ctx=N_CTX)
    ids = np.array([3, 70, 200], np.int32)
    assert chain.choose(ids, np.array([0.0, 50.0, 1.0], np.float32)) == 70
    assert len(Candidates(ids, np.zeros(3, np.float32))) == 3
    chain.close()
