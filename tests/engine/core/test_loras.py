"""Requests with different adapters side by side: each gets what it gets alone, and nobody starves."""

from __future__ import annotations

import math

import pytest

from cllm.engine.lora import NO_LORA, LoraInfo, LoraUse, check_lora, lora_use
from cllm.errors import InvalidRequestError
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator

A, B = LoraUse((("a", 1.0),)), LoraUse((("b", 0.5),))
LATE_A = LoraUse((("a", 1.0),), (), 3)


def loras_of(sim: Simulator, n_ticks: int) -> list[str]:
    """The names of the adapters of each tick."""
    found = []
    for _ in range(n_ticks):
        sim.tick()
        found.append("".join(name for name, _ in sim.decoder.loras))
    return found


def sim_with(*uses: LoraUse, separates_prompts: bool = False) -> Simulator:
    """A request that decodes with each of these."""
    sim = Simulator(
        n_ctx=2048,
        n_seq_max=8,
        n_batch=256,
        n_prefill_chunk=64,
        answer=endless,
        separates_prompts=separates_prompts,
    )
    for use in uses:
        sim.submit(b"ab", max_tokens=1000, lora=use)
    while len(sim.tokens) < len(uses):
        sim.tick()
    return sim


# --- What a request gets ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "other", "n_alike"),
    [
        (NO_LORA, NO_LORA, math.inf),
        (A, A, math.inf),
        (A, B, 0),
        (NO_LORA, A, 0),
        (NO_LORA, LATE_A, 3),
        (LATE_A, LoraUse((("a", 1.0),), (), 5), 3),
        (LATE_A, A, 0),
        (LATE_A, LoraUse((("a", 2.0),), (), 3), 3),
        (LoraUse((("a", 1.0),), (("a", 1.0),), 3), A, math.inf),
    ],
)
def test_two_requests_are_alike_as_far_as_the_same_adapters_compute_them(
    one: LoraUse, other: LoraUse, n_alike: float
) -> None:
    assert one.n_alike(other) == other.n_alike(one) == n_alike


LOADED = {
    info.name: info
    for info in (
        LoraInfo("a", "a.gguf", 0.5),
        LoraInfo("b", "b.gguf"),
        LoraInfo("late", "c.gguf", invocation_tokens=(7, 8)),
        LoraInfo("later", "d.gguf", invocation_tokens=(9,)),
    )
}


def test_who_names_none_gets_those_with_a_scale_of_their_own() -> None:
    assert lora_use(None, LOADED, [1, 2]) == LoraUse((("a", 0.5),))
    assert lora_use({}, LOADED, [1, 2]) == NO_LORA
    assert lora_use({"b": 2.0, "a": 0}, LOADED, [1, 2]) == LoraUse((("b", 2.0),))
    assert lora_use({"b": 2.0, "a": 1.0}, LOADED, []) == LoraUse((("a", 1.0), ("b", 2.0)))


def test_an_activated_one_computes_from_the_last_place_of_its_tokens_on() -> None:
    only = (("late", 1.0),)
    assert lora_use({"late": 1.0}, LOADED, [7, 8, 1, 7, 8, 2, 7]) == LoraUse(only, (), 3)
    assert lora_use({"late": 1.0}, LOADED, [7, 8]) == LoraUse(only, (), 0)
    assert lora_use({"late": 1.0}, LOADED, [8, 7]) == NO_LORA
    assert lora_use({"late": 1.0, "b": 2.0}, LOADED, [1, 7, 8]) == LoraUse(
        (("b", 2.0), ("late", 1.0)), (("b", 2.0),), 1
    )
    assert lora_use({"late": 1.0, "b": 2.0}, LOADED, [1]) == LoraUse((("b", 2.0),))


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"c": 1.0}, "a, b, late, later"),
        ({"late": 1.0, "later": 1.0}, "one activated"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(wanted: dict[str, float], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        lora_use(wanted, LOADED, [7, 8, 9])
    assert caught.value.field == "lora"


@pytest.mark.parametrize(
    "lora", ["a", [("a", 1.0)], {"": 1.0}, {5: 1.0}, {"a": "b"}, {"a": float("nan")}, {"a": 1e5}]
)
def test_what_is_no_mapping_of_names_to_scales_is_refused(lora: object) -> None:
    with pytest.raises(InvalidRequestError, match="lora"):
        check_lora(lora)


# --- In the core -----------------------------------------------------------------------------
@pytest.mark.parametrize("separates_prompts", [False, True])
@pytest.mark.parametrize("kv_unified", [False, True])
def test_eight_requests_with_three_sets_at_once_get_each_what_it_gets_alone(
    kv_unified: bool, separates_prompts: bool
) -> None:
    sim = Simulator(
        n_ctx=1024, n_seq_max=8, n_batch=16, kv_unified=kv_unified,
        separates_prompts=separates_prompts,
    )  # fmt: skip
    uses = [NO_LORA, A, B, LATE_A, A, NO_LORA, B, LATE_A]
    for round_ in range(3):  # the later ones share what the first have left
        for use in uses:
            sim.submit(b"the same beginning" + b"x" * round_, max_tokens=9, lora=use)
        sim.run()
    sim.check_outcomes()
    assert sim.core.statistics().n_cached_tokens > 0
    assert len({tuple(tokens) for tokens in sim.tokens.values()}) >= 9
    sim.check_idle()


def test_tokens_are_shared_as_far_as_the_same_adapters_have_computed_them() -> None:
    sim = Simulator(n_ctx=1024, n_batch=64)
    prompt = b"a long beginning"

    def n_cached(use: LoraUse) -> int:
        request_id = sim.submit(prompt, max_tokens=1, lora=use)
        sim.run()
        return sim.finished[request_id].completion.usage.n_cached

    assert n_cached(NO_LORA) == 0
    assert n_cached(A) == 0
    assert n_cached(LATE_A) == 3
    assert n_cached(A) == n_cached(LATE_A) == n_cached(NO_LORA) == len(prompt) - 1


def test_what_a_freed_adapter_has_computed_is_not_shared_with_the_next_of_its_name() -> None:
    sim = Simulator(n_ctx=1024, n_batch=64)
    for use in (A, B):
        sim.submit(b"a long beginning", max_tokens=1, lora=use)
    sim.run()
    sim.core.forget_lora("a")
    for use in (A, B):
        sim.submit(b"a long beginning", max_tokens=1, lora=use)
    sim.run()
    n_cached = [sim.finished[f"r{i}"].completion.usage.n_cached for i in (2, 3)]
    assert n_cached == [0, 15]


# --- Turns -----------------------------------------------------------------------------------
@pytest.mark.parametrize("separates_prompts", [False, True])
def test_the_sets_of_those_that_decode_take_turns(separates_prompts: bool) -> None:
    sim = sim_with(NO_LORA, A, A, B, separates_prompts=separates_prompts)
    turns = loras_of(sim, 9)
    assert all(sorted(turns[i : i + 3]) == ["", "a", "b"] for i in range(0, 9, 3))


def test_with_one_set_nobody_waits_for_a_turn() -> None:
    sim = sim_with(A, A)
    assert sim.tick() == sim.tick() == {"r0", "r1"}


@pytest.mark.parametrize("separates_prompts", [False, True])
def test_a_long_prompt_lets_the_streams_of_other_sets_have_their_turns(
    separates_prompts: bool,
) -> None:
    sim = sim_with(NO_LORA, A, separates_prompts=separates_prompts)
    late = sim.submit(b"p" * 1000, max_tokens=5, lora=B)
    heard: dict[str, int] = {"r0": 0, "r1": 0}
    for _ in range(120):
        for request_id in sim.tick() & heard.keys():
            heard[request_id] += 1
        if late in sim.finished:
            break
    assert late in sim.finished
    assert min(heard.values()) >= 16, "one for each chunk of the prompt"


@pytest.mark.parametrize("separates_prompts", [False, True])
def test_streams_of_one_set_do_not_keep_a_prompt_of_another_waiting(
    separates_prompts: bool,
) -> None:
    sim = sim_with(*[A] * 7, separates_prompts=separates_prompts)
    request_id = sim.submit(b"question", max_tokens=1, lora=B)
    sim.tick(3)
    assert request_id in sim.finished


def test_with_a_target_for_the_gap_each_set_has_its_share_of_it() -> None:
    def n_prompt_rows(*uses: LoraUse) -> int:
        sim = Simulator(
            n_ctx=4096, n_batch=512, target_itl_ms=50.0, answer=endless, latency_s=_latency
        )
        for use in uses:
            sim.submit(b"ab" * 20, max_tokens=1000, lora=use)
        sim.tick(60)
        sim.submit(b"p" * 1500, max_tokens=1, lora=NO_LORA)
        batches = sim.decoder.batches = []
        sim.tick(24)
        return max(n for runs in batches for _, n, _ in runs)

    assert n_prompt_rows(NO_LORA, A) < 0.7 * n_prompt_rows(NO_LORA)


def _latency(runs: object) -> float:
    assert isinstance(runs, list)
    return 0.002 + 0.0005 * sum(len(run.tokens) for run in runs)


def test_a_set_that_cannot_be_applied_ends_its_requests_and_no_others() -> None:
    sim = Simulator(n_ctx=1024, n_batch=64)
    apply = sim.decoder.set_loras

    def set_loras(loras: tuple[tuple[str, float], ...]) -> None:
        if loras == A.loras:
            raise RuntimeError("no such adapter")
        apply(loras)

    sim.decoder.set_loras = set_loras  # type: ignore[method-assign]
    bad = sim.submit(b"one", max_tokens=3, lora=A)
    good = sim.submit(b"two", max_tokens=3, lora=B)
    sim.run()
    assert sim.failed() == {bad}
    assert sim.outcome(good) == sim.alone(good)
