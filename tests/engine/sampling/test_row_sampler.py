"""A row cut to its candidates gives what the whole row gives: the same tokens for the same seed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.bindings import Candidates, DrySampler, Model, Vocabulary
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.constraint import Mask
from cllm.engine.llama.sampler import LlamaChain, SamplerFactory
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.batch_sampler import N_HANDOVERS_OF_A_SCAN, BatchSampler, NotFiniteError
from cllm.engine.sampling.row_sampler import RowSampler, n_below, n_largest, without
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.sampling_params import SAMPLERS, SamplingParams
from tests.conftest import examples

N_VOCAB = 260
PROMPT = (256, 72, 101, 108, 108, 111, 32, 72, 101, 108)
N_CTX = 64


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(EMBEDDED_MODEL) as model:
        yield model


@pytest.fixture(scope="module")
def factory(model: Model) -> Iterator[SamplerFactory]:
    with closing(SamplerFactory(model, N_CTX)) as factory:
        yield factory


def request_of(params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> GenerationRequest:
    return GenerationRequest("r", 0, prompt, params, 0, 0.0, None)


class WholeRow:
    """The definition: every token a candidate that is not banned."""

    def __init__(self, model: Model, params: SamplingParams, mask_seed: int | None) -> None:
        self._params = params
        self._chain = LlamaChain(
            model, params, seed=params.seed or 0, prompt=PROMPT, n_ctx=N_CTX
        )  # fmt: skip
        vocab = model.vocab
        self._suppressed = set(vocab.suppressed)
        self._eog = {t for t in range(N_VOCAB) if vocab.is_eog(t)}
        self.close = self._chain.close
        self.n_sampled = 0
        self._mask_seed = mask_seed

    def sample(self, logits: NDArray[np.float32]) -> int:
        token = self._choose(logits)
        self._chain.accept(token)
        self.n_sampled += 1
        return token

    def _choose(self, logits: NDArray[np.float32]) -> int:
        banned = {*self._suppressed, *(self._eog if self._params.ignore_eos else ())}
        if self.n_sampled < self._params.min_tokens:
            banned |= {*self._eog, *self._params.stop_token_ids}
        everything = set(range(N_VOCAB))
        if self._mask_seed is None:
            return self._of(everything - banned, logits)
        allowed = set(np.flatnonzero(mask_of(self._mask_seed, self.n_sampled)).tolist())
        try:
            token = self._of(everything - banned, logits)
            if token in allowed:
                return token
        except ValueError:
            pass
        return self._of(allowed - banned or allowed - self._suppressed, logits)

    def _of(self, tokens: set[int], logits: NDArray[np.float32]) -> int:
        ids = np.array(sorted(tokens), np.int32)
        return self._chain.choose(ids, logits[ids])


def mask_of(seed: int, n_sampled: int) -> NDArray[np.bool_]:
    """Few tokens or many, or only such as end the output."""
    rng = np.random.default_rng([seed, n_sampled])
    mask: NDArray[np.bool_] = rng.random(N_VOCAB) < rng.choice([0.02, 0.3, 0.9])
    mask[rng.integers(N_VOCAB)] = True
    if rng.random() < 0.2:
        mask[: N_VOCAB - 3] = False
        mask[N_VOCAB - 3 :] = True
    return mask


class RandomConstraint:
    """Allows other tokens at every step.  Its own family."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._n_accepted = 0
        self.family = self

    def allows(self, token: int) -> bool:
        return bool(mask_of(self._seed, self._n_accepted)[token])

    def accept(self, token: int) -> None:
        assert self.allows(token)
        self._n_accepted += 1

    def masks(self, constraints: Sequence[RandomConstraint]) -> list[Mask]:
        return [mask_of(c._seed, c._n_accepted) for c in constraints]

    def start(self) -> RandomConstraint:
        return self

    def forced(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        """Nothing to free."""


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


@examples(1500)
@given(
    params=PARAMS,
    rows=st.lists(ROWS, min_size=6, max_size=6),
    mask_seed=st.none() | st.integers(0, 1000),
)
def test_the_cut_row_gives_the_tokens_of_the_whole_row(
    model: Model,
    factory: SamplerFactory,
    params: SamplingParams,
    rows: list[NDArray[np.float32]],
    mask_seed: int | None,
) -> None:
    batch, constraint = BatchSampler(N_VOCAB), None
    if mask_seed is not None:
        constraint = RandomConstraint(mask_seed)
    cut = factory(replace(request_of(params), constraint=constraint))
    if cut is None:
        assert params.is_greedy
        best = [int(row.argmax()) for row in rows]
        assert batch.sample(np.stack(rows), range(len(rows)), [None] * len(rows)) == best
        return
    whole = WholeRow(model, params, mask_seed)
    try:
        for row in rows:
            before = row.copy()
            (token,) = batch.sample(row[None], [0], [cut])
            try:
                assert token == whole.sample(row)
            except ValueError:  # there is nothing to choose from: the request ends
                assert isinstance(token, ValueError)
                return
            finally:
                assert np.array_equal(row, before), "the row is as it was"
    finally:
        cut.close()
        whole.close()


def test_rows_that_are_not_sampled_from_are_passed_over(model: Model) -> None:
    factory = SamplerFactory(model, N_CTX)
    logits = np.stack([_row(seed, 3.0, 0) for seed in range(6)])
    biased = factory(request_of(SamplingParams(temperature=0, logit_bias={7: 99.0})))
    assert biased is not None
    tokens = BatchSampler(N_VOCAB).sample(logits, [0, 3, 5], [None, biased, None])
    biased.close()
    assert tokens == [int(logits[0].argmax()), 7, int(logits[5].argmax())]


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_no_sampler_asks_for_each_token_of_the_vocabulary(
    model: Model, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams would wait for it: half a second with 150,000 tokens."""
    factory, asked = SamplerFactory(model, N_CTX), list[int]()
    monkeypatch.setattr(Vocabulary, "is_eog", lambda _, token: asked.append(token))
    monkeypatch.setattr(Vocabulary, "_of_all", lambda _, function: asked.append(function))
    sampler = factory(request_of(SamplingParams(temperature=0, **params)))
    assert sampler is not None
    sampler.close()
    assert not asked


def test_the_sequence_breakers_of_requests_are_read_once_and_of_four_kinds_at_most(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams would wait for each reading: 75 ms with four breakers and 150,000 tokens."""
    made: list[DrySampler] = []

    def make(*values: Any) -> DrySampler:
        made.append(DrySampler(*values))
        return made[-1]

    monkeypatch.setattr("cllm.engine.llama.sampler.DrySampler", make)

    def sampled(breakers: Sequence[str]) -> list[int]:
        sampler = factory(
            request_of(
                SamplingParams(
                    seed=3, dry_multiplier=5.0, dry_base=4.0, dry_sequence_breakers=breakers
                )
            )
        )
        assert sampler is not None
        tokens = []
        for seed in range(30):
            [token] = BatchSampler(N_VOCAB).sample(_row(seed % 3, 3.0, 0)[None], [0], [sampler])
            assert isinstance(token, int)
            sampler.accept(token)
            tokens.append(token)
        sampler.close()
        return tokens

    with closing(SamplerFactory(model, N_CTX)) as factory:
        first = sampled(["e"])
        assert sampled(["e"]) == first, "no sampler remembers what another request accepted"
        assert len(made) == 1
        for letter in "abcd":
            sampled([letter])
        assert len(made) == 5
        assert sum(not dry.closed for dry in made) == 4
        assert sampled(["e"]) == first
        assert len(made) == 6
    assert all(dry.closed for dry in made)


def test_sampling_allocates_nothing_of_the_size_of_the_vocabulary(llama_cpp_source: Path) -> None:
    path = llama_cpp_source / "models" / "ggml-vocab-qwen2.gguf"
    with Model(path, vocab_only=True) as model:
        n_vocab = model.vocab.n_tokens
        assert n_vocab > 150_000
        logits = 4 * np.random.default_rng(1).standard_normal((4, n_vocab)).astype(np.float32)
        factory, batch = SamplerFactory(model, N_CTX), BatchSampler(n_vocab)
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(repeat_penalty=1.2, logit_bias=dict.fromkeys(range(64), 1.0)),
            SamplingParams(top_k=0, top_p=1.0, min_p=0.05, ignore_eos=True),
            SamplingParams(top_k=0, top_p=0.9, ignore_eos=True),
        ):
            samplers = [factory(request_of(params)) for _ in logits]
            batch.sample(logits, range(4), samplers)  # memory that is kept
            tracemalloc.start()
            try:
                batch.sample(logits, range(4), samplers)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < n_vocab, params
            for sampler in samplers:
                if sampler is not None:
                    sampler.close()


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
        self.accepted: list[int] = []

    def choose(self, ids: NDArray[np.integer], logits: NDArray[np.float32]) -> int:
        assert (np.diff(ids) > 0).all(), "ascending"
        self.n_candidates.append(len(ids))
        return int(ids[logits.argmax()])

    def choose_from_row(self, row: NDArray[np.float32], banned: NDArray[np.integer]) -> int:
        raise AssertionError("a large row is cut")

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def draw(self) -> None:
        raise AssertionError("nothing was chosen elsewhere")

    def close(self) -> None:
        """Nothing to free."""


def test_a_large_row_is_cut_to_little_more_than_what_is_wanted() -> None:
    chain, n_vocab = Watched(), 150_000
    sampler = RowSampler(
        chain,
        SamplingParams(repeat_penalty=1.1, logit_bias=dict.fromkeys(range(64), 1.0)),
        prompt=range(1000),
        banned=(7,),
        ends=(),
        n_ctx=4096,
    )
    rng, scan = np.random.default_rng(1), RowScan(n_vocab)
    for _ in range(30):
        scan.read(rng.standard_normal(n_vocab).astype(np.float32) * 3)
        sampler.accept(sampler.choose(scan))
    n_wanted = 40 + 64 + 64 + 1
    assert max(chain.n_candidates) < 2 * n_wanted + 64 + 64


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_greedy_row_is_scanned_only_where_its_largest_token_is_banned(min_tokens: int) -> None:
    batch, row = BatchSampler(8192), np.full((1, 8192), -1.0, np.float32)
    params = SamplingParams(temperature=0, ignore_eos=True, min_tokens=min_tokens)
    sampler = RowSampler(Watched(), params, prompt=(1,), banned=(7,), ends=(9,), n_ctx=64)
    row[0, [5, 7, 9]] = 1.0, 0.0, 0.5
    assert batch.sample(row, [0], [sampler]) == [5]
    assert batch._scan.largest == -np.inf  # nothing was read yet
    row[0, [7, 9]] = 3.0, 2.0  # both of which are banned
    assert batch.sample(row, [0], [sampler]) == [5]
    assert batch._scan.largest == 3.0


def test_greedy_rows_are_decided_by_one_call_but_for_those_whose_largest_is_banned() -> None:
    batch, rows = BatchSampler(8192), np.full((5, 8192), -1.0, np.float32)
    params = SamplingParams(temperature=0, ignore_eos=True)
    watched = [Watched() for _ in range(4)]
    samplers = [
        RowSampler(chain, params, prompt=(1,), banned=(7,), ends=(9,), n_ctx=64)
        for chain in watched
    ]
    for row, token in enumerate((5, 9, 5, 5, 9)):
        rows[row, [3, token]] = 1.0, 2.0
    rows[3, 8] = np.nan
    first, second, third, fourth, fifth = batch.sample(rows, range(5), [*samplers, None])
    assert [first, second, third, fifth] == [5, 3, 5, 9]
    assert isinstance(fourth, NotFiniteError)
    assert [chain.accepted for chain in watched] == [[5], [3], [5], []]
    # One for all rows, and for the second its own and those of the scan.
    assert batch.n_gil_handovers == 2 + N_HANDOVERS_OF_A_SCAN


def test_candidates_of_the_whole_row_and_of_a_part_are_one_kind(model: Model) -> None:
    chain = LlamaChain(model, SamplingParams(seed=1), seed=1, prompt=(), n_ctx=N_CTX)
    ids = np.array([3, 70, 200], np.int32)
    assert chain.choose(ids, np.array([0.0, 50.0, 1.0], np.float32)) == 70
    assert len(Candidates(ids, np.zeros(3, np.float32))) == 3
    chain.close()


@pytest.mark.parametrize("dry_multiplier", [0.0, 0.8])
@pytest.mark.parametrize("penalize_prompt", [True, False])
def test_penalties_count_the_prompt_as_the_request_says_whatever_dry_does(
    factory: SamplerFactory, penalize_prompt: bool, dry_multiplier: float
) -> None:
    params = SamplingParams(
        temperature=0, presence_penalty=2, penalize_prompt=penalize_prompt,
        dry_multiplier=dry_multiplier,
    )  # fmt: skip
    row = np.zeros(N_VOCAB, np.float32)
    row[[97, 98]] = 2.0, 1.0
    sampler = factory(request_of(params, (97,)))
    assert sampler is not None
    with closing(sampler):
        (token,) = BatchSampler(N_VOCAB).sample(row[None], [0], [sampler])
    assert token == (98 if penalize_prompt else 97)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_ids_without_others_are_the_difference_of_the_sets(
    ids: set[int], excluded: set[int]
) -> None:
    left = without(np.array(sorted(ids), np.intp), np.array(sorted(excluded), np.int32))
    assert left.tolist() == sorted(ids - excluded)
