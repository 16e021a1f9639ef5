"""SamplerChain, Candidates: they select as they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.bindings import (
    Batch,
    Candidates,
    Context,
    DrySampler,
    Model,
    SamplerChain,
    Vocabulary,
)

Build = Callable[[SamplerChain], SamplerChain]
N_VOCAB = 260

SAMPLERS: dict[str, tuple[str, Build]] = {
    "add_greedy": ("greedy", lambda c: c.add_greedy()),
    "add_dist": ("dist", lambda c: c.add_dist(1)),
    "add_mirostat": ("mirostat", lambda c: c.add_mirostat(1, 5.0, 0.1)),
    "add_mirostat_v2": ("mirostat-v2", lambda c: c.add_mirostat_v2(1, 5.0, 0.1)),
    "add_adaptive_p": ("adaptive-p", lambda c: c.add_adaptive_p(0.5, 0.9, 1)),
    "add_top_k": ("top-k", lambda c: c.add_top_k(40)),
    "add_top_p": ("top-p", lambda c: c.add_top_p(0.9)),
    "add_min_p": ("min-p", lambda c: c.add_min_p(0.1)),
    "add_typical": ("typical", lambda c: c.add_typical(0.9)),
    "add_temp": ("temp", lambda c: c.add_temp(0.8)),
    "add_temp_ext": ("temp-ext", lambda c: c.add_temp_ext(0.8, 0.3, 1.0)),
    "add_xtc": ("xtc", lambda c: c.add_xtc(0.5, 0.1, 1, 1)),
    "add_top_n_sigma": ("top-n-sigma", lambda c: c.add_top_n_sigma(1.0)),
    "add_penalties": ("penalties", lambda c: c.add_penalties(64, 1.1, 0.1, 0.1)),
    "add_dry": ("dry", lambda c: c.add_dry(0.8, 1.75, 2, 64)),
    "add_copy": ("dry", lambda c: add_copy(c)),
    "add_logit_bias": ("logit-bias", lambda c: c.add_logit_bias({97: 1.0, 98: -np.inf})),
}


def add_copy(chain: SamplerChain) -> SamplerChain:
    """The copy outlives what it is copied from."""
    with DrySampler(chain._vocab, 0.8, 1.75, 2, 64) as dry:
        return chain.add_copy(dry)


SELECTING = {"add_greedy", "add_dist", "add_mirostat", "add_mirostat_v2", "add_adaptive_p"}


@pytest.fixture
def chain(vocab: Vocabulary) -> Iterator[SamplerChain]:
    with SamplerChain(vocab) as chain:
        yield chain


@pytest.fixture(scope="module")
def context(model: Model) -> Iterator[Context]:
    """One row of logits, in row 2 of the last batch."""
    with Context(model, n_ctx=256, n_threads=1, n_threads_batch=1) as context:
        batch = Batch(8)
        batch.add(0, [97, 98, 99], 0, n_outputs=1)
        context.decode(batch)
        yield context


class CountedLibrary:
    """A library that counts the tokens that are reported to samplers."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.accepted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def llama_sampler_accept(self, sampler: Any, token: int) -> None:
        self.accepted.append(token)
        self._library.llama_sampler_accept(sampler, token)


@pytest.mark.parametrize("n_prompt", [0, 3, 500])
def test_of_a_prompt_a_sampler_is_given_the_tokens_that_it_looks_at(
    chain: SamplerChain, vocab: Vocabulary, n_prompt: int
) -> None:
    """Each call takes 0.4 µs, and all streams wait for it."""
    prompt = [n % 100 for n in range(n_prompt)]
    counted = CountedLibrary(chain._lib)
    chain.add_penalties(8, presence=9.0).add_dry(0.8, 1.75, 2, 5).add_greedy()
    chain._lib = cast(Any, counted)
    chain.accept_prompt(prompt, ("penalties", "dry"))
    assert counted.accepted == prompt[-8:] + prompt[-5:]
    with SamplerChain(vocab) as whole:
        whole.add_penalties(8, presence=9.0).add_dry(0.8, 1.75, 2, 5).add_greedy()
        for token in prompt:
            whole.accept(token)
        assert chain.apply(random_candidates()) == whole.apply(random_candidates())


def random_candidates(seed: int = 0) -> Candidates:
    logits = np.random.default_rng(seed).normal(0, 3, N_VOCAB).astype(np.float32)
    return Candidates(np.arange(N_VOCAB, dtype=np.int32), logits)


def some(**logits: float) -> Candidates:
    """Candidates by their letter."""
    ids = np.array([ord(letter) for letter in logits], np.int32)
    return Candidates(ids, np.array(list(logits.values()), np.float32))


def test_every_method_that_adds_a_sampler_is_tested() -> None:
    assert {name for name in dir(SamplerChain) if name.startswith("add_")} == set(SAMPLERS)


@pytest.mark.parametrize("method", SAMPLERS)
def test_sampler_has_llamas_name_and_selects_a_candidate(chain: SamplerChain, method: str) -> None:
    name, build = SAMPLERS[method]
    assert build(chain) is chain
    assert chain.names == (name,)
    if method not in SELECTING:
        chain.add_greedy()
    token = chain.apply(random_candidates())
    assert 0 <= token < N_VOCAB
    chain.accept(token)
    chain.reset()
    assert name in repr(chain)


@pytest.mark.parametrize("method", SAMPLERS)
def test_a_chain_says_whether_what_was_accepted_matters(vocab: Vocabulary, method: str) -> None:
    """The same three rows again and again, so that DRY sees a repetition."""
    with SamplerChain(vocab) as told, SamplerChain(vocab) as untold:
        for chain in (told, untold):
            SAMPLERS[method][1](chain)
            if method not in SELECTING:
                chain.add_greedy()
        differs = False
        for step in range(60):
            token = told.apply(random_candidates(step % 3))
            differs |= untold.apply(random_candidates(step % 3)) != token
            told.accept(token)
        assert differs == told.remembers


def test_greedy_selects_the_largest_logit(chain: SamplerChain) -> None:
    chain.add_greedy()

    @given(logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=64))
    @settings(deadline=None)
    def check(logits: list[float]) -> None:
        values = np.array(logits, np.float32)
        token = chain.apply(Candidates(np.arange(len(values), dtype=np.int32), values))
        assert values[token] == values.max()

    check()


def test_sampling_from_the_context_is_sampling_from_its_logits(
    vocab: Vocabulary, context: Context
) -> None:
    with SamplerChain(vocab).add_greedy() as chain:
        token = chain.sample(context, 2)
    context.seq_rm(0)
    batch = Batch(8)
    batch.add(0, [97, 98, 99], 0, n_outputs=1)
    assert token == int(context.decode(batch).rows[0].argmax())


@pytest.mark.parametrize("method", sorted(SELECTING - {"add_greedy"}))
def test_a_seed_reproduces(vocab: Vocabulary, method: str) -> None:
    def draw() -> list[int]:
        with SamplerChain(vocab) as chain:
            SAMPLERS[method][1](chain)
            return [chain.apply(random_candidates(step)) for step in range(32)]

    assert draw() == draw()


def test_other_seeds_draw_other_tokens(vocab: Vocabulary) -> None:
    draws = set()
    for seed in (0, 1, 2**32 - 2):
        with SamplerChain(vocab).add_dist(seed) as chain:
            draws.add(tuple(chain.apply(random_candidates(step)) for step in range(32)))
    assert len(draws) == 3


def test_dist_draws_by_probability(vocab: Vocabulary) -> None:
    with SamplerChain(vocab).add_dist(3) as chain:
        drawn = [chain.apply(some(a=float(np.log(3)), b=0.0)) for _ in range(2000)]
    assert 0.7 < drawn.count(ord("a")) / len(drawn) < 0.8


@pytest.mark.parametrize(
    ("build", "n_left"),
    [
        (lambda c: c.add_top_k(2), 2), (lambda c: c.add_top_k(0), 4), (lambda c: c.add_top_k(-1), 4),
        (lambda c: c.add_top_p(0.0), 1), (lambda c: c.add_top_p(1.0), 4),
        (lambda c: c.add_top_p(0.0, 3), 3), (lambda c: c.add_min_p(1.0), 1),
        (lambda c: c.add_min_p(0.0), 4),
    ],
)  # fmt: skip
def test_samplers_narrow_the_candidates(chain: SamplerChain, build: Build, n_left: int) -> None:
    candidates = some(a=1.0, b=4.0, c=2.0, d=3.0)
    assert build(chain).add_greedy().apply(candidates) == ord("b")
    assert len(candidates) == n_left
    assert candidates.selected == ord("b")
    assert ord("b") in candidates.ids
    assert candidates.logits.max() == 4.0


def test_temperature_0_leaves_only_the_largest(chain: SamplerChain) -> None:
    chain.add_temp(0.0).add_dist(1)
    assert {chain.apply(some(a=1.0, b=1.01)) for _ in range(50)} == {ord("b")}


def test_bias_adds_and_bans(chain: SamplerChain) -> None:
    chain.add_logit_bias({ord("a"): 5.0, ord("c"): -np.inf}).add_greedy()
    assert chain.apply(some(a=0.0, b=1.0, c=9.0)) == ord("a")
    assert chain.apply(some(b=1.0, c=9.0)) == ord("b")


def test_penalties_forget_on_reset(chain: SamplerChain) -> None:
    chain.add_penalties(4, 1.0, 0.0, 5.0).add_greedy()
    chain.accept(ord("a"))
    assert chain.apply(some(a=2.0, b=1.0)) == ord("b")
    chain.reset()
    assert chain.apply(some(a=2.0, b=1.0)) == ord("a")


def test_nothing_is_selected_before_a_chain_runs() -> None:
    candidates = some(a=1.0)
    assert candidates.selected is None
    assert len(candidates) == 1
