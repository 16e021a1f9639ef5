"""r: chats of several turns on a real model; each answer is fed back, and the system prompt is shared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.side_by_side.http_client import CHAT_PATH, Answer, Connection
from benchmarks.side_by_side.http_load import (
    Outcome,
    connected,
    failures_of,
    greedy_body,
    in_ms,
    n_tokens_of,
    run_clients,
    total_s,
    ttfts_s,
)
from benchmarks.side_by_side.workload import cells_for, clients

SYSTEM = (
    "You are the assistant of a small library. Readers of all ages ask you about what they have read. "
    "Answer in plain English, in two or three short sentences, and never mention that you are a "
    "program. If you do not know something, say so, and name a kind of book in which it may be found. "
    "Do not use lists, headings or tables, and do not repeat the question."
)
TOPICS = (
    "the moon", "bread", "bridges", "whales", "glass", "the violin", "volcanoes", "honey",
    "windmills", "chess", "paper", "the heart", "rice", "lightning", "salt", "trains",
    "spiders", "the compass", "coffee", "rivers", "clocks", "wool", "owls", "maps",
)  # fmt: skip
QUESTIONS = (
    "What should a child of ten know about {}?",
    "Why is that so?",
    "Tell me something about it that few people know.",
    "Which of these things would you tell first to somebody in a hurry?",
)
N_CHAT = 640  # more than the tokens of a whole chat


@dataclass(frozen=True)
class ChatSizes:
    """Number of clients, and the pause of each between requests."""

    n_clients: int
    think_s: float
    n_output: int = 48

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        return f"{clients(self.n_clients)}, {self.think_s:g} s to think"

    @property
    def n_seq_max(self) -> int:
        """Number of sequences with which no client waits."""
        return self.n_clients

    @property
    def n_ctx(self) -> int:
        """Context in which all requests fit at once."""
        return cells_for(self.n_clients, N_CHAT)


FULL = tuple(ChatSizes(n, think_s) for think_s in (0.0, 1.0) for n in (1, 8, 24))
QUICK = (ChatSizes(1, 0.0, 24), ChatSizes(8, 0.0, 24))


def chat_body(peer: str, messages: Sequence[dict[str, str]], n_output: int) -> dict[str, Any]:
    """Return a greedy, streamed request that ends after `n_output` tokens, unless the model ends it earlier."""
    return greedy_body(peer, n_output, messages=list(messages))


async def measure(port: int, peer: str, sizes: ChatSizes) -> Outcome:
    """Measure throughput and latencies as the clients see them, with the TTFT of the first turn apart.

    Throughput is the number of tokens divided by the seconds from the first send to the last end, including
    the time to think.
    """
    turns: list[list[Answer]] = [[] for _ in QUESTIONS]

    async def client(number: int, connection: Connection) -> None:
        messages = [{"role": "system", "content": SYSTEM}]
        for turn, question in enumerate(QUESTIONS):
            if turn:
                await asyncio.sleep(sizes.think_s)
            asked = question.format(TOPICS[number % len(TOPICS)])
            messages.append({"role": "user", "content": asked})
            answer = Answer(received=bytearray())
            body = chat_body(peer, messages, sizes.n_output)
            turns[turn].append(await connection.stream(body, answer, path=CHAT_PATH))
            messages.append({"role": "assistant", "content": answer.text()})

    async with connected(port, 1) as (connection,):
        body = chat_body(peer, [{"role": "user", "content": "Hello"}], 2)
        await connection.stream(body, path=CHAT_PATH)
    await run_clients(port, sizes.n_clients, client)
    answers = [answer for turn in turns for answer in turn]
    done = [a for a in answers if a.is_complete]
    metrics = {
        "tokens_per_s": sum(n_tokens_of(a, sizes.n_output) for a in done) / total_s(answers),
        **in_ms("first_turn_ttft", ttfts_s(turns[0])),
        **in_ms("later_turns_ttft", ttfts_s(a for turn in turns[1:] for a in turn)),
        **in_ms("itl", [gap for a in done for gap in a.gaps_s()]),
        "n_failed": len(answers) - len(done),
    }
    return Outcome(metrics, failures_of(answers))
