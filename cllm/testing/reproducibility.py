"""Test if answers depend on the request alone: the same requests alone, and beside random others."""

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

ARRIVALS = (0, 0, 0, 1, 5, 20)  # after so many deltas of all requests together
CANCELS = (None, None, None, 0, 2, 9)  # after so many deltas of its own
STALLS = (None, None, 1, 4)  # its reader stops after so many, until others have had some more
N_STALLED = 30


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

    Each is asked alone first, with an empty prefix cache; then, in every round, all of them at random
    moments and in a random order, of which some are cancelled and some are read late.  An engine that is not
    `deterministic` fails with most models.

    Parameters
    ----------
    prompts, params, **sampling
        As for `sequential`.  Requests that draw tokens need a `seed`.
    n_rounds : int
    load_seed : int
        Of what is random in the rounds.

    Returns
    -------
    list of Completion
        What each prompt gives alone, with log probabilities: it may be stored, and holds as long as
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
    """Deltas of all requests together as the time of a schedule: real time would not repeat."""

    def __init__(self) -> None:
        self.n_deltas: int = 0
        self._n_streaming: int = 0
        self._changed = anyio.Event()

    async def wait(self, n_deltas: int) -> None:
        """Wait for a number of deltas, or until no stream is left."""
        await anyio.lowlevel.checkpoint()
        # Without asking again and again: the inference thread would wait for the GIL at every call.
        while self.n_deltas < n_deltas and self._n_streaming:
            await self._changed.wait()

    def count(self, *, n_deltas: int = 0, n_streaming: int = 0) -> None:
        """Count the deltas and the streams that are being read."""
        self.n_deltas += n_deltas
        self._n_streaming += n_streaming
        self._changed.set()
        self._changed = anyio.Event()


class Round:
    """All requests once, each in a task of its own, at moments that are drawn."""

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
        """The completions, by the places of their calls."""
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
