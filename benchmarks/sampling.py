"""Measure the time to sample 16 rows of 151,936 logits: cllm's cut rows beside llama.cpp's whole rows.

Both sample the same logits, of one decode of the random-weight qwen3-0.6b, by turns (A B A B …).  llama.cpp
samples each row with `llama_sampler_sample`, and cllm all rows with
`cllm.engine.sampling.batch_sampler.BatchSampler`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from benchmarks.measure import machine
from cllm.bindings import Batch, Context, Model, SamplerChain
from cllm.engine.llama.sampler import SamplerFactory
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.batch_sampler import BatchSampler, TokenSampler
from cllm.engine.sampling_params import SamplingParams
from tools import make_model

N_ROWS = 16
BIASES = {1000 + 7 * n: 0.5 for n in range(64)}
CASES = {
    "greedy": SamplingParams(temperature=0, seed=1),
    "default": SamplingParams(seed=1),
    "repeat penalty, 64 biases": SamplingParams(repeat_penalty=1.1, logit_bias=BIASES, seed=1),
}


def whole_row_chain(model: Model, params: SamplingParams) -> SamplerChain:
    """Return the sampler chain that llama-server builds for these parameters."""
    chain = SamplerChain(model.vocab)
    if params.logit_bias:
        chain.add_logit_bias(params.logit_bias)
    if params.has_penalties:
        chain.add_penalties(64, params.repeat_penalty)
    if params.is_greedy:
        return chain.add_greedy()
    chain.add_top_k(params.top_k).add_top_p(params.top_p).add_min_p(params.min_p)
    return chain.add_temp(params.temperature).add_dist(1)


def timed(function: Callable[[], object], n_calls: int) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(n_calls):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def measure(options: argparse.Namespace) -> None:
    """Run all measurements and print them."""
    path = make_model.ensure(options.model, options.file_type)
    print(f"{options.model}: {N_ROWS} rows, {machine()}")
    with Model(path) as model, Context(model, n_ctx=512, n_seq_max=N_ROWS) as context:
        batch = Batch(N_ROWS)
        for seq_id in range(N_ROWS):
            batch.add(seq_id, [1000 + seq_id], 0, n_outputs=1)
        logits = context.decode(batch).rows
        factory, batch_sampler = SamplerFactory(model, 512), BatchSampler(context.n_vocab)
        prompt = tuple(range(2000, 2064))
        for name, params in CASES.items():
            request = GenerationRequest("r", 0, prompt, params, 0, 0.0, None)
            samplers = [factory(request) for _ in range(N_ROWS)]
            chains = [whole_row_chain(model, params) for _ in range(N_ROWS)]

            def whole(chains: list[SamplerChain] = chains) -> None:
                for row, chain in enumerate(chains):
                    chain.sample(context, row)

            def cut(samplers: Sequence[TokenSampler | None] = samplers) -> None:
                batch_sampler.sample(logits, range(N_ROWS), samplers)

            ratios = []
            for _ in range(options.turns):
                whole_s = timed(whole, options.calls)
                cut_s = timed(cut, options.calls)
                ratios.append(whole_s / cut_s)
            print(
                f"{name:26} whole {whole_s * 1e3:6.2f} ms  cut {cut_s * 1e3:6.2f} ms  "
                f"{median(ratios):5.1f} times faster ({min(ratios):.1f} to {max(ratios):.1f})"
            )
            for sampler in samplers:
                if sampler is not None:
                    sampler.close()
            for chain in chains:
                chain.close()
        assert np.isfinite(logits).all()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--file-type", default="Q4_0")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20)
    measure(parser.parse_args())
