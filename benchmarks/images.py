"""Measure images beside llama-server, on the same files and by turns.

    python -m benchmarks.images [streams] [questions] [chat]

Streams: SmolLM2-135M-Instruct with an encoder of the size of SigLIP-base.  One client sends different images,
one after another, while four clients read streams; cllm has `target_itl_ms`.  Chat: `qwen3.5-wide`, with the
same encoder and M-RoPE; every turn repeats the image and the chat up to then.  Questions: the same, but each
behind the image alone.  The weights of the encoders are random.  cllm runs in the process of the clients;
llama-server is asked over HTTP.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import anyio
import httpx
import numpy as np
from PIL import Image as PillowImage

from benchmarks.measure import machine, percentile
from benchmarks.side_by_side import peers
from benchmarks.side_by_side.records import LLAMA_SERVER
from benchmarks.side_by_side.servers import free_port, llama_server, running
from benchmarks.side_by_side.workload import REAL_MODEL, Setup, model_path
from cllm import Engine, Image
from cllm.processors import usable_processors
from tools import make_model, make_projector

N_STREAMS, N_TURNS = 4, 10
TARGET_ITL_MS = 100.0
N_STREAM_TOKENS = 256  # then a client begins another stream
N_CTX = 4096
N_ANSWER = 8
STREAM_PROMPT = "Tell me a long story about a lighthouse and the sea."
QUESTION = (
    " What can be seen there? Describe every part of it, from left to right, and say how it is lit."
)


class Peer(Protocol):
    """A server of one model, with images."""

    async def answer(self, before: str, image: bytes, after: str) -> None:
        """Let it write `N_ANSWER` tokens after a text, a PNG file and another text."""

    def tokens(self, prompt: str) -> AsyncIterator[object]:
        """Yield whenever tokens of a long answer arrive."""


MakePeer = Callable[[Setup, Path], AbstractAsyncContextManager[Peer]]


@dataclass
class Cllm:
    """An engine in this process."""

    engine: Engine

    async def answer(self, before: str, image: bytes, after: str) -> None:
        """See `Peer`."""
        prompt: list[int | str | Image] = [before, Image(image), after]
        await self.engine.generate(prompt, max_tokens=N_ANSWER, temperature=0, ignore_eos=True)

    async def tokens(self, prompt: str) -> AsyncIterator[object]:
        """See `Peer`."""
        options: dict[str, Any] = {
            "max_tokens": N_STREAM_TOKENS,
            "temperature": 0.8,
            "ignore_eos": True,
        }
        async with self.engine.stream(prompt, **options) as stream:
            async for delta in stream:
                yield delta


@asynccontextmanager
async def cllm(
    setup: Setup, mmproj: Path, target_itl_ms: float | None = None
) -> AsyncIterator[Peer]:
    """Run an engine."""
    options: dict[str, Any] = {**setup.engine_options, "target_itl_ms": target_itl_ms}
    async with Engine(mmproj=mmproj, preflight=False, **options) as engine:
        yield Cllm(engine)


@dataclass
class LlamaServer:
    """A running llama-server."""

    client: httpx.AsyncClient
    mark: str  # its place of an image in a text

    async def answer(self, before: str, image: bytes, after: str) -> None:
        """See `Peer`."""
        prompt = {
            "prompt_string": before + self.mark + after,
            "multimodal_data": [base64.b64encode(image).decode()],
        }
        body = {"prompt": prompt, "n_predict": N_ANSWER, "temperature": 0, "ignore_eos": True}
        answered = await self.client.post("/completion", json={**body, "cache_prompt": True})
        if answered.raise_for_status().json()["tokens_predicted"] != N_ANSWER:
            raise RuntimeError(f"llama-server wrote another number of tokens: {answered.text}")

    async def tokens(self, prompt: str) -> AsyncIterator[object]:
        """See `Peer`."""
        body = {
            "prompt": prompt, "n_predict": N_STREAM_TOKENS, "temperature": 0.8, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        async with self.client.stream("POST", "/completion", json=body) as answered:
            async for line in answered.raise_for_status().aiter_lines():
                if line.startswith("data: ") and json.loads(line[6:])["content"]:
                    yield line


@asynccontextmanager
async def server(setup: Setup, mmproj: Path) -> AsyncIterator[Peer]:
    """Run llama-server."""
    port = free_port()
    peer = llama_server(setup, port, peers.find())
    if peer.missing:
        raise SystemExit(f"{LLAMA_SERVER}: {peer.missing}")
    peer = replace(peer, command=(*peer.command, "--mmproj", str(mmproj)))
    with running(peer, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            props = (await client.get("/props")).raise_for_status().json()
            yield LlamaServer(client, props["media_marker"])


def picture(seed: int, width: int, height: int) -> bytes:
    """Return a PNG file of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 32, width // 32, 3), np.uint8)
    file = io.BytesIO()
    pixels = PillowImage.fromarray(blocks).resize((width, height), PillowImage.Resampling.BICUBIC)
    pixels.save(file, "PNG")
    return file.getvalue()


@dataclass
class Paced:
    """Gaps between the tokens of streams, and seconds of each image."""

    gaps_ms: list[float] = field(default_factory=list)
    images_s: list[float] = field(default_factory=list)


async def paced(peer: Peer, n_images: int) -> Paced:
    """Read four streams while one client sends images."""
    found = Paced()
    is_measuring = False
    images = [picture(seed, 640, 480) for seed in range(n_images + 1)]
    n_started = 0

    async def read(number: int) -> None:
        nonlocal n_started
        for turn in itertools.count():
            last = None
            async for _ in peer.tokens(f"{number}.{turn} {STREAM_PROMPT}"):
                now = time.perf_counter()
                if last is None:
                    n_started += turn == 0
                elif is_measuring:
                    found.gaps_ms.append((now - last) * 1e3)
                last = now

    async with anyio.create_task_group() as tasks:
        for number in range(N_STREAMS):
            tasks.start_soon(read, number)
        while n_started < N_STREAMS:
            await anyio.sleep(0.1)
        await peer.answer("", images.pop(), QUESTION)  # the first image makes the graph
        is_measuring = True
        for image in images:
            started = time.perf_counter()
            await peer.answer("", image, QUESTION)
            found.images_s.append(time.perf_counter() - started)
        is_measuring = False
        tasks.cancel_scope.cancel()
    return found


async def measure_streams(n_images: int, n_repeats: int) -> None:
    """Print the gaps of the streams, with each peer."""
    setup = Setup(model_path(REAL_MODEL), usable_processors().n_threads, N_CTX, N_STREAMS + 1)
    mmproj = make_projector.ensure("base-llava")
    with_target: MakePeer = partial(cllm, target_itl_ms=TARGET_ITL_MS)
    print(f"{N_STREAMS} streams of {REAL_MODEL}, {n_images} images of base-llava; gaps in ms")
    makers: dict[str, MakePeer] = {"cllm": with_target, LLAMA_SERVER: server}
    for _ in range(n_repeats):
        for name, make in makers.items():
            async with make(setup, mmproj) as peer:
                found = await paced(peer, n_images)
            p50, p99, worst = (percentile(found.gaps_ms, p) for p in (50, 99, 100))
            print(
                f"  {name:12}  p50 {p50:6.1f}  p99 {p99:7.1f} ({p99 / TARGET_ITL_MS:.2f} x the target)  "
                f"max {worst:7.1f}  {len(found.gaps_ms)} tokens; an image {median(found.images_s):.2f} s",
                flush=True,
            )


async def turns_s(peer: Peer, *, is_chat: bool) -> list[float]:
    """Return the seconds of each turn: of a chat that grows, or a question of its own."""
    image = picture(1, 448, 448)
    said, seconds = QUESTION, []
    for turn in range(N_TURNS):
        started = time.perf_counter()
        await peer.answer("You see this: ", image, said)
        seconds.append(time.perf_counter() - started)
        if is_chat:
            said += f" Answer {turn}: there is a lighthouse.{QUESTION}"
        else:
            said = f" Question {turn}:{QUESTION}"
    return seconds


async def measure_turns(n_repeats: int, *, is_chat: bool) -> None:
    """Print the seconds of all turns with each peer, and their ratio."""
    setup = Setup(make_model.ensure("qwen3.5-wide", "F16"), usable_processors().n_threads, N_CTX, 2)
    mmproj = make_projector.ensure("base-qwen2vl")
    kind = "turns of a chat" if is_chat else "questions"
    print(f"{N_TURNS} {kind} about one image, qwen3.5-wide F16 with base-qwen2vl; seconds")
    ratios = []
    for _ in range(n_repeats):
        totals = []
        makers: dict[str, MakePeer] = {"cllm": cllm, LLAMA_SERVER: server}
        for name, make in makers.items():
            async with make(setup, mmproj) as peer:
                turns = await turns_s(peer, is_chat=is_chat)
            totals.append(sum(turns))
            shown = " ".join(f"{seconds:.2f}" for seconds in turns)
            print(f"  {name:12} {sum(turns):6.2f}: {shown}", flush=True)
        ratios.append(totals[0] / totals[1])
    print(f"  cllm / {LLAMA_SERVER}: {median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=["streams", "questions", "chat"],
                        metavar="streams|questions|chat")  # fmt: skip
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(machine())
    if "streams" in given.what:
        anyio.run(measure_streams, given.images, given.repeats)
    for kind in ("questions", "chat"):
        if kind in given.what:
            anyio.run(partial(measure_turns, given.repeats, is_chat=kind == "chat"))


if __name__ == "__main__":
    main()
