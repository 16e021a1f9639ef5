"""Measure the share of each stage in a tick: 32 streams on a random-weight model with a 152k vocabulary.

The kinds of sampling take turns.  For each, the program prints the share of every stage in the time of all
stages, and that of sampling, detokenizing and delivering together.  Then it prints the CPU time per token on
the event loop's thread: of streams, of chats without tools, and of chats whose answers are split into channels.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from statistics import median
from typing import Any

import anyio

from benchmarks.measure import machine
from cllm import Engine, TokenStream
from tools import make_model

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {"seed": 1},
    "repeat penalty": {"seed": 1, "repeat_penalty": 1.1},
}
TOOL = {"type": "function", "function": {"name": "get_weather"}}
CHATS: dict[str, list[dict[str, Any]] | None] = {"chat": None, "chat with channels": [TOOL]}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
STAGES = ("plan", "decode", "sample", "detokenize", "deliver")


async def run(engine: Engine, streams: list[TokenStream]) -> dict[str, float]:
    """Read all streams to their ends; return the seconds of each stage, and the CPU seconds of the loop."""
    before, loop_before_s = asdict(engine.statistics().tick_times), time.thread_time()

    async def read(stream: TokenStream) -> None:
        async with stream:
            async for _ in stream:
                pass

    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(read, stream)
    loop_s = time.thread_time() - loop_before_s
    after = asdict(engine.statistics().tick_times)
    times = {stage: after[f"{stage}_s"] - before[f"{stage}_s"] for stage in STAGES}
    return times | {"loop": loop_s}


async def measure(options: argparse.Namespace) -> None:
    """Run all measurements and print them."""
    n_tokens = options.streams * options.tokens
    path = make_model.ensure(options.model, options.file_type)
    print(f"{options.model} {options.file_type}: {options.streams} streams, {machine()}")
    async with Engine(
        path, n_ctx=8192, n_seq_max=options.streams, prefix_cache=False, chat_template=TEMPLATE
    ) as engine:
        shares: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
        loop_us: dict[str, list[float]] = {name: [] for name in (*CASES, *CHATS)}
        for _ in range(options.turns):
            for name, sampling in CASES.items():
                prompts = [list(range(1000 + 8 * n, 1008 + 8 * n)) for n in range(options.streams)]
                given = {"max_tokens": options.tokens, **sampling}
                times = await run(engine, [engine.stream(prompt, **given) for prompt in prompts])
                loop_us[name].append(1e6 * times["loop"] / n_tokens)
                total = sum(times[stage] for stage in STAGES)
                shares[name].append({stage: 100 * times[stage] / total for stage in STAGES})
                shares[name][-1]["ms a tick"] = 1e3 * total / options.tokens
            for name, tools in CHATS.items():
                given = {"max_tokens": options.tokens, "tools": tools, **CASES["default"]}
                chats = [[{"role": "user", "content": f"{n}"}] for n in range(options.streams)]
                times = await run(engine, [engine.stream_chat(chat, **given) for chat in chats])
                loop_us[name].append(1e6 * times["loop"] / n_tokens)
    for name, turns in shares.items():
        middle = {stage: median(turn[stage] for turn in turns) for stage in (*STAGES, "ms a tick")}
        text = sum(middle[stage] for stage in STAGES[2:])
        shown = "  ".join(f"{stage} {middle[stage]:5.1f} %" for stage in STAGES)
        print(f"{name:15} {shown}   sample + detokenize + deliver {text:4.1f} %  "
              f"({middle['ms a tick']:.2f} ms a tick)")  # fmt: skip
    shown = ", ".join(f"{name} {median(turns):.1f}" for name, turns in loop_us.items())
    plain, split = (median(loop_us[name]) for name in CHATS)
    print(f"event loop, CPU µs a token: {shown}; channels add {split - plain:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="two-layer")
    parser.add_argument("--file-type", default="F16")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--turns", type=int, default=4)
    anyio.run(measure, parser.parse_args())
