"""Measure the gain of speculation: tokens per second with it over without, by turns in one process.

    python -m benchmarks.speculation [MODEL/TYPE | FILE.gguf ...] [--llama-server PROGRAM]

SmolLM2, or the model in a file, copies a text, edits one, writes JSON of a schema, and tells stories.  A model
of random weights computes as usual, but its answers are drawn beforehand, and a known share of the drafts is
right (`SHARES`).  With `--llama-server`, the model copies texts for clients over HTTP, in both servers, each
without and with its own speculation.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import httpx

from benchmarks.measure import machine
from benchmarks.side_by_side.peers import Peers
from benchmarks.side_by_side.records import LLAMA_SERVER
from benchmarks.side_by_side.servers import (
    ServerPeer,
    cllm_serve,
    free_port,
    llama_server,
    running,
)
from benchmarks.side_by_side.workload import Setup
from cllm import Completion, Engine
from cllm.engine.constraint import Mask
from cllm.engine.core.sequence import Sequence
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.row_scan import RowScan
from cllm.processors import usable_processors
from cllm.testing.fake_engine import AskedSampler
from tests.simulation.oracle_drafter import OracleDrafter, OracleEngine
from tools import make_model, real_model

SMOLLM2, GGUF = "SmolLM2", ".gguf"
MODELS = (SMOLLM2, "qwen3-0.6b/Q4_K_M")
WIDTHS = (1, 4, 8, 16)
SHARES = (0.0, 0.5, 1.0)
N_TURNS, N_TOKENS, N_TOKENS_DRAWN = 4, 120, 64
N_CTX_SEQ = 1024
SPEC_TYPES = ("ngram-mod", "ngram-simple", "ngram-map-k")
WORDS = [
    "harbour",
    "master",
    "counts",
    "seven",
    "red",
    "boats",
    "four",
    "blue",
    "ones",
    "and",
    "grey",
    "one",
    "morning",
    "before",
    "tide",
    "turns",
    "because",
    "council",
    "wants",
    "number",
    "every",
    "week",
    "nobody",
    "has",
    "told",
    "him",
    "why",
    "paper",
    "yellow",
    "ink",
    "old",
    "pier",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_harbour": {"type": "string", "maxLength": 20},
        "number_of_red_boats": {"type": "integer", "minimum": 0, "maximum": 99},
        "number_of_blue_boats": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_open_in_winter": {"type": "boolean"},
        "remarks_of_the_harbour_master": {"type": "string", "maxLength": 20},
    },
    "required": [
        "name_of_the_harbour", "number_of_red_boats", "number_of_blue_boats", "is_open_in_winter",
        "remarks_of_the_harbour_master",
    ],
    "additionalProperties": False,
}  # fmt: skip

Ask = Callable[[Engine, int], Any]


def text_of(client: int) -> str:
    """Return sentences that are different for each client."""
    draw = random.Random(client)
    return " ".join(" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(14))


def chat_of(instruction: str, *, with_text: bool = True, **sampling: Any) -> Ask:
    """Return a function that sends the request of one client."""

    def ask(engine: Engine, client: int) -> Any:
        said = instruction.format(client) + (f"\n\n{text_of(client)}" if with_text else "")
        options = {"temperature": 0, "max_tokens": N_TOKENS, **sampling}
        return engine.chat([{"role": "user", "content": said}], **options)

    return ask


WORK: dict[str, Ask] = {
    "copy": chat_of("Repeat this text word for word:"),
    "edit": chat_of("Write this text again, with every 'red' replaced by 'green':"),
    "json": chat_of("Describe what this text tells as JSON:", json_schema=SCHEMA),
    "story": chat_of(
        "Tell a story of {} foxes.", with_text=False, temperature=0.8, seed=1, ignore_eos=True
    ),
}


def drawn(seed: str, n_tokens: int) -> list[int]:
    """Return random token ids that all vocabularies in use have."""
    return random.Random(seed).choices(range(5, 250), k=n_tokens)


def tokens_of(engine: Engine, client: int) -> Any:
    """Send the request of one client to a model of random weights."""
    prompt = drawn(f"prompt {client}", 40)
    return engine.generate(prompt, temperature=0, ignore_eos=True, max_tokens=N_TOKENS_DRAWN)


def answer_to(prompt: tuple[int, ...]) -> list[int]:
    """Return the answer to a prompt, independent of its logits."""
    return drawn(f"answer {prompt}", N_TOKENS_DRAWN)


class DrawnSampler(AskedSampler):
    """Sampler that chooses the tokens of the drawn answer, independent of the logits."""

    def __init__(self, request: GenerationRequest) -> None:
        self._answer = iter(answer_to(request.prompt_token_ids))

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        return next(self._answer)


def next_token(sequence: Sequence, tokens: list[int]) -> int | None:
    """Return the token that the sampler will choose."""
    left = answer_to(sequence.request.prompt_token_ids)[len(tokens) - sequence.n_prompt :]
    return left[0] if left else None


async def run(engine: Engine, ask: Ask, n_clients: int) -> tuple[float, list[Completion]]:
    """Return the tokens per second of `n_clients` at once, and their completions."""
    completions: list[Completion] = []

    async def one(client: int) -> None:
        completions.append(await ask(engine, client))

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for client in range(n_clients):
            tasks.start_soon(one, client)
    seconds = time.perf_counter() - started
    return sum(c.usage.n_output for c in completions) / seconds, completions


async def compare(name: str, plain: Engine, fast: Engine, ask: Ask, n_clients: int) -> None:
    """Compare two engines by turns, and print the ratios; the first turn only fills the prefix cache.

    A ratio of times may be lost in the noise.  So the share of the rows that were wrong drafts is printed, and
    how much longer the plan of a tick takes.
    """
    ratios, ticks = [], []
    n_output = n_drafted = n_accepted = 0
    plan_ms: dict[Engine, list[float]] = {plain: [], fast: []}
    for turn in range(N_TURNS + 1):
        rates: dict[Engine, float] = {}
        n_ticks: dict[Engine, int] = {}
        for engine in (plain, fast) if turn % 2 else (fast, plain):
            before = engine.statistics()
            rates[engine], completions = await run(engine, ask, n_clients)
            after = engine.statistics()
            n_ticks[engine] = after.n_ticks - before.n_ticks
            if turn:
                plan_s = after.tick_times.plan_s - before.tick_times.plan_s
                plan_ms[engine].append(1e3 * plan_s / n_ticks[engine])
            if engine is fast and turn:
                usages = [completion.usage for completion in completions]
                n_output += sum(u.n_output for u in usages)
                n_drafted += sum(u.n_drafted for u in usages)
                n_accepted += sum(u.n_accepted for u in usages)
        if turn:
            ratios.append(rates[fast] / rates[plain])
            ticks.append(n_ticks[plain] / n_ticks[fast])
    ratios.sort()
    n_wrong = n_drafted - n_accepted
    more_ms = median(plan_ms[fast]) - median(plan_ms[plain])
    print(
        f"  {name}, {n_clients} clients: {median(ratios):.2f} x ({ratios[0]:.2f}, {ratios[-1]:.2f}), "
        f"{median(ticks):.2f} x fewer ticks, {n_accepted} of {n_drafted} guesses right, "
        f"{n_wrong / (n_output + n_wrong):.2%} of the rows wrong, plan {more_ms:+.2f} ms",
        flush=True,
    )


def options_for(n_clients: int, given: SequenceOf[str]) -> dict[str, Any]:
    """Return engine options for a measurement of decoding."""
    return {
        "n_ctx": N_CTX_SEQ * n_clients,
        "n_seq_max": n_clients,
        "deterministic": "deterministic" in given,
        **({"kv_unified": False} if "per-sequence" in given else {}),
    }


def chat_model(name: str) -> Path:
    """Return the path of a chat model: the given GGUF file, or SmolLM2."""
    return Path(name) if name.endswith(GGUF) else real_model.fetch()


async def measure(
    name: str, widths: SequenceOf[int], works: SequenceOf[str], given: SequenceOf[str]
) -> None:
    """Run all measurements of one model."""
    print(f"{name} {' '.join(given)}", flush=True)
    if name == SMOLLM2 or name.endswith(GGUF):
        path = chat_model(name)
        for n_clients in widths:
            options = options_for(n_clients, given)
            async with (
                Engine(path, speculation=None, **options) as plain,
                Engine(path, speculation="ngram", **options) as fast,
            ):
                for work in works:
                    await compare(work, plain, fast, WORK[work], n_clients)
        return
    model, _, file_type = name.partition("/")
    path = make_model.ensure(model, file_type)  # type: ignore[arg-type]
    for n_clients in widths:
        options = options_for(n_clients, given)
        options["make_sampler"] = DrawnSampler
        async with OracleEngine(path, drafter=None, **options) as plain:
            for share in SHARES:
                drafter = OracleDrafter(next_token, share, is_honest=True)
                async with OracleEngine(path, drafter=drafter, **options) as fast:
                    await compare(f"{share:.0%} right", plain, fast, tokens_of, n_clients)


# --- Over HTTP ------------------------------------------------------------------------------------
def servers(program: Path, path: Path, n_clients: int) -> dict[str, ServerPeer]:
    """Return `cllm serve` and llama-server, each without and with its own speculation, by address and name."""
    n_threads = usable_processors().n_threads
    setup = Setup(path, n_threads, N_CTX_SEQ * n_clients, n_clients)
    peers = Peers(program.parent, None, {LLAMA_SERVER: ""})
    found = {}
    for name, options in (
        ("cllm", ("--speculation", "")), ("cllm auto", ()), ("cllm ngram", ("--speculation", "ngram")),
        ("llama-server", ()),
        *((f"llama-server {t}", ("--spec-type", t)) for t in SPEC_TYPES),
    ):  # fmt: skip
        port = free_port()
        is_own = name.startswith("cllm")
        peer = cllm_serve(setup, port) if is_own else llama_server(setup, port, peers)
        found[f"http://127.0.0.1:{port} {name}"] = replace(peer, command=(*peer.command, *options))
    return found


async def copied_per_s(url: str, n_clients: int) -> float:
    """Return the tokens per second of `n_clients` at once that each have a text copied."""
    n_tokens = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal n_tokens
        said = f"Repeat this text word for word:\n\n{text_of(number)}"
        body = {
            "messages": [{"role": "user", "content": said}],
            "temperature": 0, "max_tokens": N_TOKENS, "cache_prompt": True,
        }  # fmt: skip
        answer = await client.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        n_tokens += answer.raise_for_status().json()["usage"]["completion_tokens"]

    async with httpx.AsyncClient() as client:
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for number in range(n_clients):
                tasks.start_soon(one, client, number)
        return n_tokens / (time.perf_counter() - started)


def compare_servers(program: Path, path: Path, widths: SequenceOf[int]) -> None:
    """Compare servers by turns, with all of them running."""
    for n_clients in widths:
        with ExitStack() as stack:
            peers = servers(program, path, n_clients)
            rates: dict[str, list[float]] = {named: [] for named in peers}
            broken: dict[str, str] = {}
            for named, peer in peers.items():
                stack.enter_context(running(peer, int(named.split()[0].rpartition(":")[2])))
            for turn in range(N_TURNS + 1):
                for named in peers if turn % 2 else reversed(peers):
                    if named in broken:
                        continue
                    try:
                        rate = anyio.run(copied_per_s, named.split()[0], n_clients)
                    except* httpx.HTTPError as group:
                        broken[named] = repr(group.exceptions[0])
                    if turn and named not in broken:  # the first turn only fills the cache
                        rates[named].append(rate)
        for named, found in rates.items():
            if named in broken:
                print(
                    f"  {n_clients} clients, {named.partition(' ')[2]}: {broken[named]}", flush=True
                )
                continue
            own = rates[next(n for n in peers if n.endswith(" cllm ngram"))]
            ratios = sorted(a / b for a, b in zip(own, found, strict=True))
            print(
                f"  {n_clients} clients, {named.partition(' ')[2]}: {median(found):.0f} tokens/s, "
                f"cllm ngram is {median(ratios):.2f} x ({ratios[0]:.2f}, {ratios[-1]:.2f})",
                flush=True,
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL/TYPE")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--work", nargs="+", default=[*WORK], choices=[*WORK])
    parser.add_argument("--with", nargs="*", dest="given", default=[], metavar="SETTING",
                        choices=["deterministic", "per-sequence"])  # fmt: skip
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM")
    given = parser.parse_args()
    print(f"{machine()}; with speculation / without, median of {N_TURNS} turns (least, most)")
    if given.llama_server:
        compare_servers(given.llama_server, chat_model(given.models[0]), given.widths)
        return
    for name in given.models:
        anyio.run(measure, name, given.widths, given.work, given.given)


if __name__ == "__main__":
    main()
