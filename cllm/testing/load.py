"""Loads: many requests on one engine, in the patterns that real callers have.

For the tests of programs that embed cllm, on asyncio and on trio.  A load takes prompts and returns `Records`
in the order of the prompts.  The error of a request that is rejected or fails is in its record, and other
requests continue.  Wrong arguments of a load raise an error at once.  `seed` is the seed of the samplers,
`load_seed` that of the load.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Unpack

import anyio

from cllm import Engine, SamplingOptions, SamplingParams, TokenStream
from cllm.checks import INT32_MAX, check_int
from cllm.engine.loop.request_call import Prompt
from cllm.errors import InvalidArgumentError
from cllm.testing.load_calls import Between, Call, make_calls, run, run_at_once
from cllm.testing.records import PromptKey, Records


class Moment(StrEnum):
    """Moment at which `cancel_storm` cancels a request."""

    ENTERING = "entering"
    """The task is cancelled while the stream is entered, or just after."""
    QUEUE = "queue"
    """The stream is cancelled as soon as the request is submitted."""
    PROMPT = "prompt"
    """The stream is cancelled 1 to 8 ticks later, during the prompt or still in the queue."""
    OUTPUT = "output"
    """The stream is cancelled after 1 to 8 deltas."""
    TWICE = "twice"
    """The stream is cancelled after 1 to 8 deltas, twice in a row."""


async def sequential(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Records:
    """Run one request after another.

    Parameters
    ----------
    prompts : sequence of (str or sequence of int)
        Texts, or token ids.
    params : SamplingParams, optional
        Parameters of all requests; or their fields as keyword arguments.
    priority, timeout, **sampling
        Options of `Engine.stream` for all requests; `timeout` in seconds.

    Returns
    -------
    Records
        A record of each request, in the order of the prompts.

    Raises
    ------
    TypeError
        An unknown option, fields beside `params`, or one text in place of prompts.
    InvalidRequestError
        A sampling field that cannot be served.
    """
    calls = make_calls(engine, prompts, params, sampling, priority, timeout)
    return Records([await run(call) for call in calls])


async def burst(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Records:
    """Run all requests at once; those without room in the queue are rejected.

    Parameters
    ----------
    prompts, params, priority, timeout, **sampling
        As for `sequential`, and so are the records and the errors.
    """
    return await run_at_once(make_calls(engine, prompts, params, sampling, priority, timeout))


async def poisson(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    rate: float,
    load_seed: int = 0,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Records:
    """Run requests at random times, independent of the ends of earlier ones.

    The times of a record count from the moment its call was due, even if the event loop is late.

    Parameters
    ----------
    rate : float
        Requests per second, on average.
    load_seed : int
        Seed of the times between requests, which are exponentially distributed.
    prompts, params, priority, timeout, **sampling
        As for `sequential`, and so are the records and the errors.

    Raises
    ------
    ValueError
        The rate is not a positive number.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise InvalidArgumentError("rate", rate, "a positive number of requests per second")
    calls = make_calls(engine, prompts, params, sampling, priority, timeout)
    draw, due_s = random.Random(load_seed), anyio.current_time()
    for call in calls:
        due_s += draw.expovariate(rate)
        call.due_s = due_s
    return await run_at_once(calls)


async def cancel_storm(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    load_seed: int = 0,
    share: float = 0.5,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Records:
    """Run all requests at once, and cancel some of them at different moments.

    Parameters
    ----------
    load_seed : int
        Seed of the choice of requests and moments: see `Moment`.
    share : float
        Share of cancelled requests, 0 to 1, rounded up.  Some of them may end by themselves before.
    prompts, params, priority, timeout, **sampling
        As for `sequential`, and so are the records and the errors.

    Raises
    ------
    ValueError
        The share is not between 0 and 1.
    """
    calls = make_calls(engine, prompts, params, sampling, priority, timeout)
    draw, moments = random.Random(load_seed), [*Moment]
    victims = _chosen(calls, share, draw)
    draw.shuffle(moments)
    for number, call in enumerate(victims):
        # The moments take turns: five requests get all five moments; for fewer, the seed chooses.
        moment, n_before = moments[number % len(moments)], draw.randint(1, 8)
        call.is_cancelled_entering = moment is Moment.ENTERING
        call.between = _canceller(engine, moment, n_before)
    return await run_at_once(calls)


async def slow_readers(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    load_seed: int = 0,
    share: float = 0.5,
    n_deltas: int = 2,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Records:
    """Run all requests at once; some readers stop until all have stopped or ended, and then read on.

    An engine computes `stream_buffer` deltas ahead of a reader that has stopped, and then pauses its sequence.
    Outputs of at most `n_deltas + stream_buffer` deltas therefore pause no sequence.  With fewer than
    `n_deltas` deltas, the reader does not stop either.

    Parameters
    ----------
    load_seed : int
        Seed of the choice of slow readers.
    share : float
        Share of slow readers, 0 to 1, rounded up.  With 1 they read on when all have stopped.
    n_deltas : int
        Deltas that a slow reader reads before it stops; 0: it stops as soon as its request is submitted.
    prompts, params, priority, timeout, **sampling
        As for `sequential`, and so are the records and the errors.

    Raises
    ------
    ValueError
        The share is not between 0 and 1, or `n_deltas` is negative.
    """
    n_deltas = check_int("n_deltas", n_deltas, 0, INT32_MAX)
    calls = make_calls(engine, prompts, params, sampling, priority, timeout)
    is_turned = anyio.Event()  # every stream has stopped or ended
    busy = set(calls)

    def leave(call: Call) -> None:
        busy.discard(call)
        if not busy:
            is_turned.set()

    def stopper(call: Call) -> Between:
        async def stop(_stream: TokenStream, n_read: int) -> None:
            if n_read == n_deltas:
                leave(call)
                await is_turned.wait()

        return stop

    for call in calls:
        call.on_end = partial(leave, call)
    for call in _chosen(calls, share, random.Random(load_seed)):
        call.between = stopper(call)
    return await run_at_once(calls)


async def oracle(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    **sampling: Unpack[SamplingOptions],
) -> dict[PromptKey, tuple[int, ...]]:
    """Return the token ids of each prompt's output when it runs alone; for `assert_isolated`.

    Parameters
    ----------
    engine : Engine
        Engine with the same room for a sequence as that of the load: an output may end because it is full.
    prompts, params, **sampling
        The same as for the load.

    Returns
    -------
    dict
        Token ids of the whole output by prompt; prompts of token ids are tuples.

    Raises
    ------
    ValueError
        The output would differ each time: there is neither `temperature` 0 nor a `seed`.
    TypeError
        As in a load.
    RequestError
        A prompt that cannot be served, or whose request failed.
    """
    calls = make_calls(engine, prompts, params, sampling)
    alone: dict[PromptKey, tuple[int, ...]] = {}
    for call in calls:
        if not call.params.is_greedy and call.params.seed is None:
            raise ValueError("an oracle needs temperature 0 or a seed")
        if call.key not in alone:
            alone[call.key] = (await engine.generate(call.prompt, call.params)).token_ids
    return alone


def _chosen(calls: Sequence[Call], share: float, draw: random.Random) -> list[Call]:
    """Return a random share of the calls, in their order."""
    if not 0 <= share <= 1:
        raise InvalidArgumentError("share", share, "0 to 1")
    n_chosen = math.ceil(round(share * len(calls), 6))  # 0.7 * 10 is a little more than 7
    indices = draw.sample(range(len(calls)), n_chosen)
    return [calls[index] for index in sorted(indices)]


def _canceller(engine: Engine, moment: Moment, n_before: int) -> Between:
    """Return a function that cancels a stream at that moment; `n_before` counts deltas or ticks."""

    async def between(stream: TokenStream, n_read: int) -> None:
        if n_read == 0 and moment is Moment.PROMPT:
            for _ in range(n_before):
                # An audit is answered after a tick.  `n_discrepancies` counts its findings.
                await engine.audit()
        is_in_output = moment in (Moment.OUTPUT, Moment.TWICE)
        if n_read == (n_before if is_in_output else 0):
            await stream.cancel()
        if n_read == n_before and moment is Moment.TWICE:
            await stream.cancel()

    return between
