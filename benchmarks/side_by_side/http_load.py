"""Helpers of the measurements over HTTP: bodies, connections, and figures from answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import percentile
from benchmarks.side_by_side.http_client import Answer, Connection
from benchmarks.side_by_side.records import PYTHON_SERVER
from benchmarks.side_by_side.workload import prompt_of

# Tokens of Qwen2's vocabulary that end a generation in llama.cpp.  All models of `body_for` have it.
END_TOKENS = (128247, 151643, 151645)
BANNED = -100.0  # the lowest bias of OpenAI's API


@dataclass(frozen=True)
class Outcome:
    """Result of one measurement.

    Attributes
    ----------
    metrics : mapping
        Value by name (with its unit); unknown values are left out.
    failures : tuple of str
        Error texts of failed requests, each text once.
    """

    metrics: Mapping[str, float]
    failures: tuple[str, ...]


def body_for(peer: str, prompt: Sequence[int], n_output: int) -> dict[str, Any]:
    """Return a greedy, streamed request for exactly `n_output` tokens.

    cllm and llama-server have `ignore_eos`.  The example server has not: the request bans the tokens that
    end a generation with a logit bias.
    """
    body = greedy_body(peer, n_output, prompt=list(prompt))
    if peer == PYTHON_SERVER:
        return body | {"logit_bias": {str(token): BANNED for token in END_TOKENS}}
    return body | {"ignore_eos": True}


def greedy_body(peer: str, n_output: int, **asked: Any) -> dict[str, Any]:
    """Return a greedy, streamed request for at most `n_output` tokens; it asks for usage if the peer has it."""
    body = {"model": "model", **asked, "max_tokens": n_output, "temperature": 0, "stream": True}
    return body if peer == PYTHON_SERVER else body | {"stream_options": {"include_usage": True}}


def n_tokens_of(answer: Answer, n_output: int) -> int:
    """Return the number of generated tokens, as the server reports it.

    An event may carry several tokens, or text that waited for the rest of a character.  The example
    server does not count in streams; one of its answers that ended by length has its full length.
    """
    if answer.n_tokens is not None:
        return answer.n_tokens
    return n_output if answer.finish_reason == "length" else answer.n_events


@asynccontextmanager
async def connected(port: int, n: int) -> AsyncIterator[list[Connection]]:
    """Yield `n` open connections, and close them afterwards."""
    connections = [Connection(port) for _ in range(n)]
    try:
        for connection in connections:
            await connection.open()
        yield connections
    finally:
        for connection in connections:
            connection.close()


async def run_clients(
    port: int, n: int, client: Callable[[int, Connection], Coroutine[Any, Any, None]]
) -> None:
    """Run the given number of clients side by side, each with its number and a connection of its own."""
    async with connected(port, n) as connections, asyncio.TaskGroup() as tasks:
        for number, connection in enumerate(connections):
            tasks.create_task(client(number, connection))


async def ask_together(port: int, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Send all requests at once, each on a connection of its own, and return the answers."""
    async with connected(port, len(bodies)) as connections:
        pairs = zip(connections, bodies, strict=True)
        return await asyncio.gather(*(connection.stream(body) for connection, body in pairs))


async def warm_up(port: int, peer: str, seed: str) -> None:
    """Send two short requests, so that a server's one-time work is done before the measurement."""
    bodies = [body_for(peer, prompt_of(f"{seed} warm-up {i}", 8), 2) for i in range(2)]
    await ask_together(port, bodies)


def total_s(answers: Iterable[Answer]) -> float:
    """Return the seconds from the first send to the last end."""
    known = list(answers)
    return max(a.ended_at for a in known) - min(a.sent_at for a in known)


def ttfts_s(answers: Iterable[Answer]) -> list[float]:
    """Return the seconds to the first token of each complete answer."""
    return [a.ttft_s for a in answers if a.is_complete]


def in_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds as metrics; none if there are no values."""
    if not seconds:
        return {}
    return {f"{name}_p{percent}_ms": 1e3 * percentile(seconds, percent) for percent in (50, 99)}


def failures_of(answers: Iterable[Answer]) -> tuple[str, ...]:
    """Return the error texts, each once."""
    return tuple(dict.fromkeys(a.failure for a in answers if a.failure))
