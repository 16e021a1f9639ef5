"""w: the first chat after a server reports that it is ready, compared with the next ones."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.side_by_side.http_client import CHAT_PATH
from benchmarks.side_by_side.http_load import Outcome, connected, failures_of
from benchmarks.side_by_side.real_chats import QUESTIONS, chat_body
from benchmarks.side_by_side.workload import cells_for


@dataclass(frozen=True)
class FirstChatSizes:
    """Number of chats, one after another, and the most tokens of each answer."""

    n_chats: int = 9
    n_output: int = 16
    n_seq_max: int = 4

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        return f"the first of {self.n_chats} chats after ready"

    @property
    def n_ctx(self) -> int:
        """Context in which no chat is evicted."""
        return cells_for(self.n_seq_max, 256)


# Words of one or two tokens: system prompts of about the same length with different first words.
WORDS = ("Bread", "Glass", "Honey", "Chess", "Paper", "Rice", "Salt", "Trains", "Clocks")
FULL = (FirstChatSizes(),)
QUICK = (FirstChatSizes(5),)


async def measure(port: int, peer: str, sizes: FirstChatSizes) -> Outcome:
    """Measure the time to the first token of the first chat, divided by the median of the others.

    The system prompts of the chats begin with different words.
    """
    answers = []
    for word in WORDS[: sizes.n_chats]:
        messages = [
            {"role": "system", "content": f"{word}: that is what you know most about. " * 4},
            {"role": "user", "content": QUESTIONS[0].format("it")},
        ]
        async with connected(port, 1) as (connection,):
            body = chat_body(peer, messages, sizes.n_output)
            answers.append(await connection.stream(body, path=CHAT_PATH))
    done = [answer for answer in answers if answer.is_complete]
    metrics: dict[str, float] = {"n_failed": len(answers) - len(done)}
    if len(done) == len(answers):
        first, *later = (1e3 * answer.ttft_s for answer in done)
        metrics |= {
            "first_ttft_ms": first,
            "later_ttft_ms": median(later),
            "first_over_later": first / median(later),
        }
    return Outcome(metrics, failures_of(answers))
