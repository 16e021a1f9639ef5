"""Measure the engine through its public API, with every token read.

The engine runs in a process of its own, as the peers do.
`python -m benchmarks.side_by_side.engine_loop JSON` prints JSON.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from dataclasses import dataclass

import anyio

from benchmarks.side_by_side.workload import Setup, prompt_of
from cllm import Engine

BUSY_S = 0.002


@dataclass(frozen=True)
class Decoding:
    """Load of the engine: all sequences of the setup decode at once.

    Attributes
    ----------
    n_prompt, n_output : int
        Tokens of each sequence.
    is_busy : bool
        The event loop computes for 2 ms in every 4.
    process : bool
        The engine has a process of its own.
    switch_interval_s : float, optional
        See `sys.setswitchinterval`; None leaves Python's own, 5 ms.
    """

    setup: Setup
    n_prompt: int
    n_output: int
    is_busy: bool = False
    process: bool = False
    switch_interval_s: float | None = None


@dataclass(frozen=True)
class DecodingRate:
    """Decoding rate while all sequences decode: from the latest first token to the earliest end.

    Attributes
    ----------
    tokens_per_s : float
    outside_us : float
        Microseconds per token that the inference thread spent outside `llama_decode`.
    handovers_per_tick : float
        Number of GIL hand-overs per tick.
    """

    tokens_per_s: float
    outside_us: float
    handovers_per_tick: float


async def _compute_half_of_the_time() -> None:
    """Keep the event loop busy as callbacks of a program may: 2 ms of Python in every 4."""
    while True:
        until = time.perf_counter() + BUSY_S
        while time.perf_counter() < until:
            pass
        await anyio.sleep(BUSY_S)


async def measure(call: Decoding) -> DecodingRate:
    """Decode, in this process."""
    setup = call.setup
    n_streams = setup.n_seq_max
    begun_at, ended_at = [0.0] * n_streams, [0.0] * n_streams
    arrivals: list[tuple[float, int]] = []
    if call.switch_interval_s is not None:
        sys.setswitchinterval(call.switch_interval_s)
    # The peer has no prefix cache, and nothing here could be shared.
    options = setup.engine_options | {"process": call.process}
    async with Engine(**options, prefix_cache=False) as engine:

        async def read(number: int) -> None:
            tokens = prompt_of(f"{number}", call.n_prompt)
            async with engine.stream(
                tokens, max_tokens=call.n_output, temperature=0, ignore_eos=True
            ) as stream:
                async for delta in stream:
                    now = time.perf_counter()
                    begun_at[number] = begun_at[number] or now
                    ended_at[number] = now
                    arrivals.append((now, len(delta.token_ids)))

        async with anyio.create_task_group() as others:
            if call.is_busy:
                others.start_soon(_compute_half_of_the_time)
            async with anyio.create_task_group() as streams:
                for number in range(n_streams):
                    streams.start_soon(read, number)
            others.cancel_scope.cancel()
        statistics = engine.statistics()
    since, until = max(begun_at), min(ended_at)
    n_tokens = sum(n for at, n in arrivals if since < at <= until)
    times = statistics.tick_times
    outside_s = times.plan_s + times.sample_s + times.detokenize_s + times.deliver_s
    return DecodingRate(
        tokens_per_s=n_tokens / (until - since),
        outside_us=1e6 * outside_s / statistics.n_output_tokens,
        handovers_per_tick=statistics.n_gil_handovers / statistics.n_ticks,
    )


def command_of(call: Decoding) -> list[str]:
    """Return the command of a process that measures this load."""
    return [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(call), default=str)]


def in_a_process(call: Decoding) -> DecodingRate:
    """Run `measure` in a process of its own."""
    done = subprocess.run(command_of(call), stdout=subprocess.PIPE, text=True, check=True)
    return DecodingRate(**json.loads(done.stdout))


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    values["setup"] = Setup.of_plain(values["setup"])
    print(json.dumps(dataclasses.asdict(anyio.run(measure, Decoding(**values)))))
