"""What speculation gains: tokens a second with it over without, by turns in one process.

    python -m benchmarks.speculation [MODEL/TYPE ...]

SmolLM2 copies a text, edits one, writes JSON of a schema, and tells stories.  A model of random
weights has no text to copy: its own answers are guessed, so often right.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import anyio

from benchmarks.measure import machine
from cllm import Completion, Engine
from cllm.testing.oracle_drafter import OracleDrafter, OracleEngine, known_answers
from tools import make_model, real_model

MODELS = ("SmolLM2", "qwen3-0.6b/Q4_K_M")
WIDTHS = (1, 4, 8, 16)
SHARES = (0.0, 0.5, 1.0)
N_TURNS, N_TOKENS = 4, 120
N_CTX_SEQ = 1024
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
    """Some sentences that no other client has."""
    draw = random.Random(client)
    return " ".join(" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(14))


def chat_of(instruction: str, *, with_text: bool = True, **sampling: Any) -> Ask:
    """A request of one client."""

    def ask(engine: Engine, client: int) -> Any:
        said = instruction.format(client) + (f"\n\n{text_of(client)}" if with_text else "")
        options = {"temperature": 0, "max_tokens": N_TOKENS, **sampling}
        return engine.chat([{"role": "user", "content": said}], **options)

    return ask


WORK: dict[str, Ask] = {
    "copy": chat_of("Repeat this text word for word:"),
    "edit": chat_of("Write this text again, with every 'red' replaced by 'green':"),
    "json": chat_of("Describe what this text tells as JSON:", json_schema=SCHEMA),
    "story": chat_of("Tell a story of {} foxes.", with_text=False, temperature=0.8, seed=1),
}


def tokens_of(engine: Engine, client: int) -> Any:
    """A request to a model of random weights."""
    prompt = random.Random(client).choices(range(3, 200), k=40)
    return engine.generate(prompt, temperature=0, ignore_eos=True, max_tokens=N_TOKENS)


async def run(engine: Engine, ask: Ask, n_clients: int) -> tuple[float, list[Completion]]:
    """Tokens a second of so many clients at once, and what they got."""
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
    """Turns of both, of which the first is not counted: prompts are in the cache then."""
    ratios, ticks, drafted = [], [], []
    for turn in range(N_TURNS + 1):
        rates: dict[Engine, float] = {}
        n_ticks: dict[Engine, int] = {}
        for engine in (plain, fast) if turn % 2 else (fast, plain):
            before = engine.statistics().n_ticks
            rates[engine], completions = await run(engine, ask, n_clients)
            if engine is fast and turn:
                usages = [completion.usage for completion in completions]
                drafted.append(
                    (sum(u.n_drafted for u in usages), sum(u.n_accepted for u in usages))
                )
            n_ticks[engine] = engine.statistics().n_ticks - before
        if turn:
            ratios.append(rates[fast] / rates[plain])
            ticks.append(n_ticks[plain] / n_ticks[fast])
    ratios.sort()
    n_drafted, n_accepted = drafted[-1]
    print(
        f"  {name}, {n_clients} clients: {median(ratios):.2f} x ({ratios[0]:.2f}, {ratios[-1]:.2f}), "
        f"{median(ticks):.2f} x fewer ticks, {n_accepted} of {n_drafted} guesses right",
        flush=True,
    )


def options_for(n_clients: int, given: Sequence[str]) -> dict[str, Any]:
    """Of an engine: what is measured is decoding."""
    return {
        "n_ctx": N_CTX_SEQ * n_clients,
        "n_seq_max": n_clients,
        "deterministic": "deterministic" in given,
        **({"kv_unified": False} if "per-sequence" in given else {}),
    }


async def measure(name: str, widths: Sequence[int], given: Sequence[str]) -> None:
    """Everything about one model."""
    print(f"{name} {' '.join(given)}", flush=True)
    if name == "SmolLM2":
        path = real_model.fetch()
        for n_clients in widths:
            options = options_for(n_clients, given)
            async with (
                Engine(path, **options) as plain,
                Engine(path, speculation="ngram", **options) as fast,
            ):
                for work, ask in WORK.items():
                    await compare(work, plain, fast, ask, n_clients)
        return
    model, _, file_type = name.partition("/")
    path = make_model.ensure(model, file_type)  # type: ignore[arg-type]
    for n_clients in widths:
        options = options_for(n_clients, given)
        async with Engine(path, **options) as plain:
            _, answers = await run(plain, tokens_of, n_clients)
            for share in SHARES:
                drafter = OracleDrafter(known_answers(answers), share, is_honest=True)
                async with OracleEngine(path, drafter=drafter, **options) as fast:
                    await compare(f"{share:.0%} right", plain, fast, tokens_of, n_clients)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL/TYPE")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--with", nargs="*", dest="given", default=[], metavar="SETTING",
                        choices=["deterministic", "per-sequence"])  # fmt: skip
    given = parser.parse_args()
    print(f"{machine()}; with speculation / without, median of {N_TURNS} turns (least, most)")
    for name in given.models:
        anyio.run(measure, name, given.widths, given.given)


if __name__ == "__main__":
    main()
