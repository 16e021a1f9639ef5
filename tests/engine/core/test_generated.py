"""Requests that go on after tokens that were sampled before, in the real core over a fake model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.commands import Finished
from cllm.engine.output import FinishReason
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_engine import AskedSampler
from tests.conftest import examples
from tests.simulation.reference import alone, babble, endless
from tests.simulation.simulator import Simulator

PROPERTY = examples(150)
PROMPT = (*b"prompt",)


def told_after(params: SamplingParams, prompt: tuple[int, ...], n_tokens: int) -> str:
    """What a reader has heard of the output after so many tokens of it."""
    sim = Simulator(n_ctx=256)
    request_id = sim.submit(prompt, params=params)
    while len(sim.tokens[request_id]) < n_tokens:
        sim.tick()
    return sim.texts[request_id]


@PROPERTY
@given(data=st.data())
def test_a_request_goes_on_as_if_it_had_never_been_cut(data: st.DataObject) -> None:
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 1.0])),
        max_tokens=data.draw(st.integers(2, 40)),
        stop=tuple(data.draw(st.lists(st.sampled_from(["ab", "bba", "é€", "c"]), max_size=2))),
    )
    prompt = tuple(data.draw(st.binary(min_size=1, max_size=20)))
    whole = alone(prompt, params, 256, babble)
    n_cut = data.draw(st.integers(0, len(whole.token_ids) - 1))
    cut = whole.token_ids[:n_cut]
    sim = Simulator(n_ctx=256, n_batch=data.draw(st.sampled_from([4, 8, 64])))
    beside = sim.submit(b"beside", max_tokens=30)
    request_id = sim.submit(prompt, params=params, generated=cut)
    sim.run()
    ended = sim.finished[request_id].completion
    assert ended.token_ids == tuple(sim.tokens[request_id]) == whole.token_ids[n_cut:]
    assert told_after(params, prompt, n_cut) + ended.text == whole.text
    assert (ended.finish_reason, ended.stop_reason) == (whole.reason, whole.stop_reason)
    assert ended.usage.n_prompt == len(prompt)
    assert ended.usage.n_output == len(ended.token_ids)
    assert sim.finished[beside].completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    sim.check_idle()


class Listener(AskedSampler):
    """Its choice depends on all rows that it has seen, as mirostat's does."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.n_closed = 0

    def choose(self, scan: RowScan, allowed: object = None) -> int:
        self.seen.append(int(scan.row.argmax()))
        return 97 + sum(self.seen) % 26

    def close(self) -> None:
        self.n_closed += 1


@pytest.mark.parametrize("n_batch", [4, 8, 64])
@pytest.mark.parametrize("n_cut", [1, 2, 7, 19])
def test_a_sampler_that_has_to_see_the_rows_sees_each_once(n_batch: int, n_cut: int) -> None:
    samplers: list[Listener] = []

    def simulator() -> Simulator:
        def make_sampler(_: object) -> Listener:
            samplers.append(Listener())
            return samplers[-1]

        sim = Simulator(n_ctx=256, n_batch=n_batch, answer=endless)
        sim.core.queue._make_sampler = make_sampler
        return sim

    sim = simulator()
    sim.submit(PROMPT, max_tokens=20, temperature=1.0)
    sim.run()
    whole = sim.finished["r0"].completion
    sim = simulator()
    sim.submit(
        PROMPT,
        max_tokens=20,
        temperature=1.0,
        generated=whole.token_ids[:n_cut],
        resamples=True,
    )
    sim.run()
    assert sim.finished["r0"].completion.token_ids == whole.token_ids[n_cut:]
    assert samplers[0].seen == samplers[1].seen


def test_a_preempted_request_goes_on_after_the_same_tokens() -> None:
    sim = Simulator(n_ctx=48, n_seq_max=4, n_batch=16, answer=endless)
    prompts = [bytes([97 + i]) * 6 for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    wholes = [alone(tuple(p), params, 48, endless) for p in prompts]
    for prompt, whole in zip(prompts, wholes, strict=True):
        sim.submit(prompt, params=params, generated=whole.token_ids[:3])
    sim.run()
    for i, whole in enumerate(wholes):
        assert sim.finished[f"r{i}"].completion.token_ids == whole.token_ids[3:]
    assert sim.core.statistics().n_preemptions > 0


def test_what_no_sampler_recalls_ends_that_request_alone() -> None:
    class Forgetful(Listener):
        def recall(self, token: int) -> None:
            raise ValueError(token)

    sim = Simulator(n_ctx=64)
    sim.core.queue._make_sampler = lambda request: (
        Forgetful() if request.generated_token_ids else None
    )
    good = sim.submit(b"good", max_tokens=5)
    bad = sim.submit(b"bad", max_tokens=5, generated=(97,))
    sim.run()
    failed: Finished = sim.finished[bad]
    assert failed.completion.finish_reason is FinishReason.ERROR
    assert isinstance(failed.error and failed.error.__cause__, ValueError)
    assert sim.finished[good].error is None
