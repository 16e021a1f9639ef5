"""Measure what llama.cpp alone takes for the requests of a measurement: their decodes or encodes.

Nothing is received, sampled or reported.  All sequences are in step, so that none waits for another one.
`python -m benchmarks.side_by_side.bare_loop` reads the work as JSON, and prints the seconds.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.side_by_side.embedding import TextSizes
from benchmarks.side_by_side.http_loop import LoopSizes
from benchmarks.side_by_side.sequential import SequentialSizes
from benchmarks.side_by_side.workload import Setup
from cllm.bindings import Batch, Context, EmbeddingContext, Model
from cllm.engine.llama.encoder import N_BATCH_CPU

Sizes = LoopSizes | SequentialSizes | TextSizes
ANY_TOKEN = 5  # all tokens take the same time


@dataclass(frozen=True)
class Work:
    """Computation of one measurement.

    Attributes
    ----------
    rounds : list of list of int
        Number of tokens of each prompt or text; those of a round are computed together.
    n_output : int
        Tokens that follow each prompt.  0: the vectors of texts are computed.
    """

    setup: Setup
    rounds: list[list[int]]
    n_output: int

    @classmethod
    def of(cls, setup: Setup, sizes: Sizes) -> Work:
        """Return the computation of the requests of a measurement over HTTP."""
        if isinstance(sizes, SequentialSizes):
            return cls(setup, [[sizes.n_prompt]] * sizes.n_requests, sizes.n_output)
        if isinstance(sizes, LoopSizes):
            return cls(setup, [[sizes.n_prompt] * sizes.n_clients] * sizes.n_each, sizes.n_output)
        with Model(setup.model, vocab_only=True) as model:
            rounds = [
                [
                    len(model.vocab.tokenize(sizes.text(client, index)))
                    for client in range(sizes.n_clients)
                ]
                for index in range(sizes.n_each)
            ]
        return cls(setup, rounds, 0)

    @property
    def n_tokens(self) -> int:
        """Number of tokens that count as throughput: those of the outputs, or of the texts."""
        return self.n_output * sum(map(len, self.rounds)) or sum(map(sum, self.rounds))


def measure(work: Work) -> float:
    """Return the seconds of all rounds, in this process; the first round is computed once before."""
    compute = _decode if work.n_output else _encode
    with Model(work.setup.model) as model:
        rounds = compute(model, work, [work.rounds[0], *work.rounds])
        next(rounds)
        began = time.perf_counter()
        for _ in rounds:
            pass
        return time.perf_counter() - began


def _decode(model: Model, work: Work, rounds: list[list[int]]) -> Iterator[None]:
    setup, batch = work.setup, Batch(work.setup.n_batch)
    tokens = [ANY_TOKEN] * max(map(max, rounds))
    with Context(**setup.context_options | {"model": model}) as context:
        for lengths in rounds:
            for group in batches(lengths, setup.n_batch):
                batch.clear()
                for seq_id in group:
                    batch.add(seq_id, tokens[: lengths[seq_id]], 0, n_outputs=1)
                context.decode(batch)
            for index in range(work.n_output - 1):
                batch.clear()
                for seq_id, n_tokens in enumerate(lengths):
                    batch.add(seq_id, tokens[:1], n_tokens + index, n_outputs=1)
                context.decode(batch)
            for seq_id, n_tokens in enumerate(lengths):
                context.seq_rm(seq_id, 0, n_tokens + work.n_output - 1)
            yield


def _encode(model: Model, work: Work, rounds: list[list[int]]) -> Iterator[None]:
    setup, batch = work.setup, Batch(work.setup.n_batch)
    tokens = [ANY_TOKEN] * max(map(max, rounds))
    # The engine's own size of a batch, with which a token takes the least time.
    n_rows = min(N_BATCH_CPU, setup.n_batch)
    with EmbeddingContext(
        model,
        n_batch=setup.n_batch,
        n_seq_max=setup.n_seq_max,
        pooling="mean",
        n_threads=setup.n_threads,
    ) as context:
        for lengths in rounds:
            for group in batches(lengths, n_rows):
                batch.clear()
                for seq_id, text in enumerate(group):
                    batch.add(seq_id, tokens[: lengths[text]], 0)
                context.compute(batch)
            yield


def batches(lengths: list[int], n_rows: int) -> Iterator[list[int]]:
    """Yield the indices of prompts that have room in a batch together, in their order."""
    group: list[int] = []
    for index, n_tokens in enumerate(lengths):
        if group and sum(lengths[i] for i in group) + n_tokens > n_rows:
            yield group
            group = []
        group.append(index)
    yield group


def in_a_process(setup: Setup, sizes: Sizes) -> dict[str, float]:
    """Run `measure` in a process of its own, as each server has; return the metric of the measurement.

    Raises
    ------
    RuntimeError
        The process failed; the message has what it wrote last.
    """
    work = Work.of(setup, sizes)
    given = json.dumps(dataclasses.asdict(work), default=str)
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()[-200:]}")
    seconds = float(done.stdout)
    if isinstance(sizes, SequentialSizes):
        return {"total_s": seconds}
    return {"tokens_per_s": work.n_tokens / seconds}


if __name__ == "__main__":
    values = json.load(sys.stdin)
    values["setup"] = Setup.of_plain(values["setup"])
    print(measure(Work(**values)))
