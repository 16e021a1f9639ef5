"""Requests of every kind on one small engine, and readings of what the process holds between them.

The engine has fewer cells and seq_ids than the requests need: sequences wait, are preempted, are swapped
out, and share cached prefixes.  The host memory for prefixes is full before the first reading.
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from benchmarks.measure import malloc_mib
from cllm import Engine, FinishReason, Image
from cllm.errors import InvalidRequestError
from tests.conftest import QUIET, n_threads

OPTIONS: dict[str, Any] = {
    "n_ctx": 256, "n_seq_max": 4, "prefix_cache_bytes": 2**20, **QUIET
}  # fmt: skip
N_TOGETHER = 10
HEAD = "The river runs down to the sea, and an old man watches it: "
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_tokens": 8, "ignore_eos": True}
CANCELLED, REFUSED, SAMPLED_IMAGE = "cancelled", "refused", "sampled"
# Requests are made in this order.  Seeds and prompts change from round to round.  Constraints do not change,
# since each new one is compiled and kept.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("count:1..", GREEDY | {"stop": ["3 4"], "max_tokens": 20}),
    SAMPLED_IMAGE: (HEAD, SAMPLED | {
        "dynatemp_range": 0.2, "top_n_sigma": 3.0, "typical_p": 0.9, "xtc_probability": 0.3,
    }),
    "penalized": (HEAD, SAMPLED | {
        "repeat_penalty": 1.2, "presence_penalty": 0.5, "dry_multiplier": 0.5, "logit_bias": {65: -1.0},
    }),
    "mirostat": ("Anna has ", SAMPLED | {"mirostat": 2}),
    "grammar": ("count:", GREEDY | {"grammar": "root ::= [0-9] [0-9] [0-9] [0-9]"}),
    "regex": ("count:", GREEDY | {"regex": "[0-9]{1,4}"}),
    "schema": ("Answer: ", GREEDY | {"json_schema": {"type": "integer", "maximum": 500}}),
    "logprobs": ("Anna has ", GREEDY | {"logprobs": 4, "prompt_logprobs": 1, "ignore_eos": True}),
    CANCELLED: (HEAD, GREEDY | {"ignore_eos": True, "max_tokens": 100}),
    REFUSED: ("count:", GREEDY | {"grammar": 'root ::= "unended'}),
}  # fmt: skip
N_PROMPTS = 10  # of each kind
ROUND = len(KINDS) * N_PROMPTS  # number of different requests, which are then repeated


@dataclass(frozen=True)
class Reading:
    """Memory, descriptors and threads of the process after `n_requests` requests and a garbage collection.

    Attributes
    ----------
    malloc_bytes : int
        Bytes allocated by malloc and not freed; 0 if the C library does not report them.  Prefixes in
        host memory are left out, since they are kept by design and differ in size.
    live_bytes : int
        The same bytes as AddressSanitizer counts them; 0 without it.
    python_blocks, objects : int
        Blocks of Python's allocator, and objects that the garbage collector tracks.
    """

    n_requests: int
    malloc_bytes: int
    live_bytes: int
    python_blocks: int
    objects: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls, n_requests: int, n_prefix_bytes: int = 0) -> Reading:
        """Take a reading; `n_prefix_bytes` is the size of the prefixes in host memory."""
        gc.collect()
        in_mib = malloc_mib()
        live = getattr(ctypes.CDLL(None), "__sanitizer_get_current_allocated_bytes", None)
        if live is not None:
            live.restype = ctypes.c_size_t
        return cls(
            n_requests,
            0 if math.isnan(in_mib) else int(in_mib * 2**20) - n_prefix_bytes,
            0 if live is None else live() - n_prefix_bytes,
            sys.getallocatedblocks(),
            len(gc.get_objects()),
            len([*Path("/proc/self/fd").iterdir()]),
            n_threads(),
        )


def image(number: int) -> Image:
    """Return the image of this number: one of random pixels."""
    return Image(np.random.default_rng(number).integers(0, 256, (48, 48, 3), np.uint8))


async def one(engine: Engine, number: int, ends: Counter[str]) -> None:
    """Ask for one request, and count how it ended."""
    turn, index = divmod(number, len(KINDS))
    kind = [*KINDS][index]
    prompt, params = KINDS[kind]
    text = f"{prompt}{turn % N_PROMPTS}"
    asked: tuple[Any, dict[str, Any]] = (
        [image(turn % N_PROMPTS), text] if kind == SAMPLED_IMAGE else text,
        params | {"seed": number % ROUND},
    )
    if kind == REFUSED:
        try:
            await engine.generate(asked[0], **asked[1])
        except InvalidRequestError:
            ends[f"{kind}: InvalidRequestError"] += 1
        return
    async with engine.stream(asked[0], **asked[1]) as stream:
        if kind == CANCELLED:
            await anext(stream)
        else:
            completion = await stream.completion()
            ends[f"{kind}: {completion.finish_reason.name}"] += 1
    if kind == CANCELLED:
        assert (await stream.completion()).finish_reason is FinishReason.CANCELLED
        ends[f"{kind}: CANCELLED"] += 1


async def serve(engine: Engine, first: int, last: int, ends: Counter[str]) -> None:
    """Make the requests from number `first` to before `last`, `N_TOGETHER` at a time."""
    for start in range(first, last, N_TOGETHER):
        async with anyio.create_task_group() as group:
            for number in range(start, min(start + N_TOGETHER, last)):
                group.start_soon(one, engine, number, ends)
    # The cells of the last request are freed in the tick after its end.
    while (statistics := engine.statistics()).n_running or statistics.n_waiting:
        await anyio.sleep(0)
