"""Assertion that answers depend on the request alone: the same requests run alone, and beside others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import anyio
import anyio.lowlevel

from cllm import Completion, Engine, SamplingOptions, SamplingParams
from cllm.engine.loop.request_call import Prompt
from cllm.testing.load_calls import Call, make_calls

ARRIVALS = (0, 0, 0, 1, 5, 20)  # a request starts after this number of deltas of all requests
CANCELS = (None, None, None, 0, 2, 9)  # it is cancelled after this number of its own deltas
STALLS = (None, None, 1, 4)  # its reader pauses after this number of its own deltas
N_STALLED = 30  # deltas of the other requests during such a pause


async def assert_reproducible(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    n_rounds: int = 3,
    load_seed: int = 0,
    **sampling: Unpack[SamplingOptions],
) -> list[Completion]:
    """Assert that every request gives the same tokens and log probabilities, to the bit, beside any others.

    Each request runs alone first, with an empty prefix cache.  In every round, all of them run together, in a
    random order and from random moments on.  Some are cancelled, and some are read late.  Of a cancelled
    request the beginning is compared.  An engine that is not `deterministic` fails with most models.

    Parameters
    ----------
    prompts, params, **sampling
        As for `sequential`.  Requests that draw tokens need a `seed`.
    n_rounds : int
        Number of rounds after the runs alone.
    load_seed : int
        Seed of the order, the moments, the cancellations and the pauses of readers.

    Returns
    -------
    list of Completion
        Completion of each prompt alone, with log probabilities.  It may be stored, and is valid as long as
        `Completion.fingerprint` is the same.

    Raises
    ------
    AssertionError
        Names the prompt, the round, and the first token or the number of tokens that differs.
    ValueError
        A request that draws tokens without a seed.
    """
    calls = make_calls(engine, prompts, params, sampling)
    for call in calls:
        if not call.params.is_greedy and call.params.seed is None:
            raise ValueError("answers that are drawn need a seed to be the same twice")
        call.params = replace(call.params, logprobs=call.params.logprobs or 0)
    alone = []
    for call in calls:
        await engine.reset_prefix_cache()
        alone.append(await engine.generate(call.prompt, call.params))
    for number in range(n_rounds):
        found = await Round(engine, calls, random.Random(f"{load_seed} {number}")).run()
        for index, completion in found.items():
            said = difference(completion, alone[index])
            name = f"round {number}, prompt {index} ({_shown(calls[index].prompt)})"
            if said:
                raise AssertionError(f"{name}: {said}")
    return alone


def difference(completion: Completion, alone: Completion) -> str:
    """Return where an answer, or its beginning, differs from the one computed alone; "" if nowhere."""
    ended_early = completion.finish_reason not in ("stop", "length")
    n_expected = len(completion.token_ids) if ended_early else len(alone.token_ids)
    pairs = zip(_tokens(completion), _tokens(alone), strict=False)
    for position, (token, expected) in enumerate(pairs):
        if token != expected:
            return f"token {position} and its log probability are {token}, alone {expected}"
    if len(completion.token_ids) != n_expected:
        return f"{len(completion.token_ids)} tokens, alone {n_expected}"
    return ""


def _shown(prompt: Prompt) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _tokens(completion: Completion) -> list[tuple[int, float]]:
    logprobs = completion.logprobs or ()
    return [
        (token, logprob.logprob)
        for token, logprob in zip(completion.token_ids, logprobs, strict=True)
    ]


class DeltaClock:
    """Clock that counts the deltas of all requests, for schedules that can be repeated; real time cannot."""

    def __init__(self) -> None:
        self.n_deltas: int = 0
        self._n_streaming: int = 0
        self._changed = anyio.Event()

    async def wait(self, n_deltas: int) -> None:
        """Wait until all requests together have had `n_deltas` deltas, or no stream is being read."""
        await anyio.lowlevel.checkpoint()
        # No polling: the inference thread would wait for the GIL at every call.
        while self.n_deltas < n_deltas and self._n_streaming:
            await self._changed.wait()

    def count(self, *, n_deltas: int = 0, n_streaming: int = 0) -> None:
        """Add to the number of deltas, and to the number of streams that are being read."""
        self.n_deltas += n_deltas
        self._n_streaming += n_streaming
        self._changed.set()
        self._changed = anyio.Event()


class Round:
    """Run of all requests, each once and in its own task, from random moments on."""

    def __init__(self, engine: Engine, calls: Sequence[Call], draw: random.Random) -> None:
        self._engine = engine
        self._calls = calls
        self._order = draw.sample(range(len(calls)), len(calls))
        self._plans = [
            (draw.choice(ARRIVALS), draw.choice(CANCELS), draw.choice(STALLS)) for _ in calls
        ]
        self._clock = DeltaClock()
        self._completions: dict[int, Completion] = {}

    async def run(self) -> dict[int, Completion]:
        """Run all requests, and return their completions by the index of the call."""
        async with anyio.create_task_group() as tasks:
            for index in self._order:
                tasks.start_soon(self._run_one, index)
        return self._completions

    async def _run_one(self, index: int) -> None:
        call, clock = self._calls[index], self._clock
        arrives_after, cancelled_after, stalls_after = self._plans[index]
        await clock.wait(arrives_after)
        clock.count(n_streaming=1)
        async with self._engine.stream(call.prompt, call.params) as stream:
            n_read = 0
            while n_read != cancelled_after:
                if n_read == stalls_after:
                    clock.count(n_streaming=-1)
                    await clock.wait(clock.n_deltas + N_STALLED)
                    clock.count(n_streaming=1)
                try:
                    await stream.__anext__()
                except StopAsyncIteration:
                    break
                n_read += 1
                clock.count(n_deltas=1)
            await stream.cancel()
            self._completions[index] = await stream.completion()
        clock.count(n_streaming=-1)
