"""v: clients in a closed loop, each of which requests the vectors of texts, one after another."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from benchmarks.side_by_side.http_client import Answer, Connection
from benchmarks.side_by_side.http_load import (
    Outcome,
    connected,
    failures_of,
    in_ms,
    run_clients,
    total_s,
)
from benchmarks.side_by_side.workload import ClosedLoopSizes

PATH = "/v1/embeddings"
N_WORDS = (14, 254)  # each word is one token; the tokenizer adds one before and one after
WORDS = (
    "river", "lamp", "winter", "orange", "morning", "glass", "music", "letter", "garden", "bridge",
    "yellow", "quiet", "engine", "island", "paper", "coffee", "window", "mountain", "silver",
    "button", "forest", "candle", "market", "thunder", "village", "harbour",
)  # fmt: skip


@dataclass(frozen=True)
class TextSizes(ClosedLoopSizes):
    """Number of clients, and the texts that each sends."""

    @property
    def n_ctx(self) -> int:
        """Context in which all requests fit at once."""
        return 512 * self.n_clients

    def text(self, client: int, index: int, seed: str = "") -> str:
        """Return the text that a client sends in one of its requests."""
        return text_of(f"{seed} {self.n_clients} {client} {index}")


FULL = (TextSizes(1, 96), TextSizes(8, 48), TextSizes(64, 16))
QUICK = (TextSizes(1, 16), TextSizes(8, 8), TextSizes(64, 2))


def text_of(seed: str) -> str:
    """Return a random text, which depends only on the seed."""
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=draw.randint(*N_WORDS)))


async def measure(port: int, peer: str, sizes: TextSizes, seed: str = "") -> Outcome:
    """Measure tokens per second, from the first send to the last end, and latencies, without the warm-up."""
    answers: list[Answer] = []

    def body(text: str) -> dict[str, str]:
        return {"model": "model", "input": text}

    async def client(number: int, connection: Connection) -> None:
        for index in range(sizes.n_each):
            asked = body(sizes.text(number, index, seed))
            answers.append(await connection.fetch(asked, path=PATH))

    async with connected(port, 1) as (connection,):
        for index in range(4):
            await connection.fetch(body(text_of(f"{seed} warm-up {index}")), path=PATH)
    await run_clients(port, sizes.n_clients, client)
    done = [answer for answer in answers if answer.is_complete]
    metrics = {
        "tokens_per_s": sum(map(_n_tokens, done)) / total_s(answers),
        **in_ms("request", [answer.took_s for answer in done]),
        "n_failed": len(answers) - len(done),
    }
    return Outcome(metrics, failures_of(answers))


def _n_tokens(answer: Answer) -> int:
    """Number of tokens of the text, as the server reports it."""
    told = json.loads(bytes(answer.received or b""))
    (row,) = told["data"]
    assert len(row["embedding"]) > 1
    return int(told["usage"]["prompt_tokens"])
