"""The phases of a soak: each makes some requests of one kind.

Every answer is compared with that of the same request alone, before the soak.  A phase knows in advance how
many requests are refused, are cancelled or expire.  Other results are recorded as wrong.
"""

from __future__ import annotations

import math
import random
import warnings
from array import array
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from cllm import (
    DeadlineError,
    Engine,
    FinishReason,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from cllm.bindings import Batch, Context
from cllm.bindings.context import Logits
from cllm.engine.core.recovery import Recovery, Verdict
from cllm.engine.core.scheduler import Chunk
from cllm.errors import DecodeFailedError
from cllm.testing.load import burst, cancel_storm, poisson, sequential, slow_readers
from cllm.testing.records import Records, assert_as_alone, assert_books_agree
from tests.reliability.answers import LOGPROB_NOISE
from tests.reliability.soak_answers import (
    CHATS,
    CONSTRAINED,
    FIRST_TOKEN,
    GREEDY,
    LONG,
    N_IMAGES,
    PROMPTS,
    SCORED,
    Answers,
    about_image,
    logprobs_of,
)

N_SHOWN = 20
LIKENESS = 0.9999  # the last digits of a vector depend on its company


def _no_times() -> array[float]:
    """Return an empty array; this is not a lambda, which could not be pickled with a ledger."""
    return array("f")


def _times() -> defaultdict[tuple[str, int], array[float]]:
    """Return an empty mapping of times by phase and third."""
    return defaultdict(_no_times)


@dataclass
class Ledger:
    """Counts and faults of a soak, in memory that does not grow with its length.

    Attributes
    ----------
    n_whole, n_begun : int
        Answers that were compared to their ends, and beginnings of answers.
    ends : Counter
        Requests by how they ended: a finish reason, or the name of an error.
    faults : Counter
        Injected faults by kind.
    n_contexts_due : int
        New contexts that the faults required.  A second fault of the same rows needs none: it is bisected.
    wrong : list of str
        The first faults found; `n_wrong` counts all.
    ttft_s, total_s : mapping
        Times in seconds by (phase, third of the soak), as arrays of float32.
    third : int
        Third of the soak: 0, 1 or 2.
    is_timed : bool
        True: times are kept.  This is so on one engine only, so that times can be compared.
    """

    n_tokens: int = 0
    n_wrong: int = 0
    n_whole: int = 0
    n_begun: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    n_contexts_due: int = 0
    wrong: list[str] = field(default_factory=list)
    ttft_s: dict[tuple[str, int], array[float]] = field(default_factory=_times)
    total_s: dict[tuple[str, int], array[float]] = field(default_factory=_times)
    third: int = 0
    is_timed: bool = True
    where: str = ""

    def note(self, what: str) -> None:
        """Add a fault; only the first `N_SHOWN` texts are kept."""
        self.n_wrong += 1
        if len(self.wrong) < N_SHOWN:
            self.wrong.append(f"{self.where}: {what}")

    def expect(self, what: str, got: object, expected: object) -> None:
        """Add a fault if two values differ."""
        if got != expected:
            self.note(f"{what}: {got!r}, not {expected!r}")

    def count(self, end: str, n_tokens: int = 0, *, is_whole: bool = False) -> None:
        """Count a request that has ended and whose answer, if any, was compared."""
        self.ends[end] += 1
        self.n_tokens += n_tokens
        self.n_whole += is_whole
        self.n_begun += n_tokens > 0 and not is_whole


@dataclass
class Soak:
    """An engine, with the expected answers, the ledger and the random numbers for its phases.

    Attributes
    ----------
    n : int
        Number of requests of a load.
    """

    engine: Engine
    answers: Answers
    ledger: Ledger
    draw: random.Random
    n: int

    def some(self, prompts: Sequence[str] = PROMPTS) -> list[str]:
        """Draw as many prompts as a load has."""
        return self.draw.choices(prompts, k=self.n)

    def seed(self) -> int:
        """Draw a seed."""
        return self.draw.randrange(2**31)

    def take(
        self,
        phase: str,
        records: Records,
        allowed: Sequence[FinishReason] = (FinishReason.STOP,),
        errors: tuple[type[Exception], ...] = (),
    ) -> None:
        """Compare the answers of a load, and count them."""
        ledger, at = self.ledger, (phase, self.ledger.third)
        for record in records:
            try:
                assert_as_alone(record, self.answers.plain, errors=errors)
            except AssertionError as error:
                ledger.note(str(error))
            end = type(record.error).__name__ if record.error else str(record.finish_reason)
            ledger.count(end, len(record.token_ids), is_whole=record.is_by_itself)
            if record.finish_reason is not None and record.finish_reason not in allowed:
                ledger.note(f"{record.prompt!r} ended with {end}")
            if ledger.is_timed and record.is_by_itself and record.ttft_s is not None:
                ledger.ttft_s[at].append(record.ttft_s)
                ledger.total_s[at].append(record.total_s)

    def compare(self, what: str, got: Sequence[float], expected: Sequence[float]) -> None:
        """Add a fault if log probabilities differ by more than another batch makes them."""
        pairs = zip(got, expected, strict=False)
        is_near = all(abs(a - b) <= LOGPROB_NOISE * max(1.0, abs(b)) for a, b in pairs)
        if not is_near or len(got) != len(expected):
            self.ledger.note(f"{what}: log probabilities {got}, not {expected}")


# --- Loads ----------------------------------------------------------------------------------------
async def one_after_another(soak: Soak) -> None:
    soak.take("one after another", await sequential(soak.engine, soak.some(), **GREEDY))


async def at_once(soak: Soak) -> None:
    soak.take("at once", await burst(soak.engine, soak.some(), **GREEDY))


async def at_random_times(soak: Soak) -> None:
    records = await poisson(soak.engine, soak.some(), rate=150.0, load_seed=soak.seed(), **GREEDY)
    soak.take("at random times", records)


async def cut_short(soak: Soak) -> None:
    limit = soak.draw.randint(1, 16)
    records = await burst(soak.engine, soak.some(LONG), max_tokens=limit, **GREEDY)
    soak.take("cut short", records, (FinishReason.LENGTH,))


async def cancelled(soak: Soak) -> None:
    prompts = soak.some(LONG)
    records = await cancel_storm(soak.engine, prompts, load_seed=soak.seed(), **GREEDY)
    soak.take("cancelled", records, (FinishReason.STOP, FinishReason.CANCELLED))
    # The answers are longer than a stream's buffer, so none ends before it is cancelled.
    n_cancelled = records.summary().n_finished[FinishReason.CANCELLED]
    soak.ledger.expect("cancelled", n_cancelled, math.ceil(0.5 * len(prompts)))


async def read_slowly(soak: Soak) -> None:
    records = await slow_readers(soak.engine, soak.some(), load_seed=soak.seed(), **GREEDY)
    soak.take("read slowly", records)


async def expired(soak: Soak) -> None:
    """Make a few requests with a timeout of 0, and a load that may or may not end in time."""
    late = await burst(soak.engine, soak.some()[:3], timeout=0.0, **GREEDY)
    soak.take("expired", late, (FinishReason.DEADLINE,))
    timeout = soak.draw.uniform(0.0, 0.05)
    either = await burst(soak.engine, soak.some(), timeout=timeout, **GREEDY)
    soak.take("expired", either, (FinishReason.STOP, FinishReason.DEADLINE))


async def urgent_and_not(soak: Soak) -> None:
    async def load(priority: int) -> None:
        prompts = soak.some()[: max(1, soak.n // 3)]
        records = await burst(soak.engine, prompts, priority=priority, **GREEDY)
        soak.take("urgent and not", records)

    async with anyio.create_task_group() as tasks:
        for priority in (-5, 0, 5):
            tasks.start_soon(load, priority)


async def dropped(soak: Soak) -> None:
    """Close streams early, and drop others without closing them."""
    before = soak.engine.statistics().n_finished[FinishReason.CANCELLED]
    prompts = soak.some(LONG)
    for number, prompt in enumerate(prompts):
        stream, token_ids = soak.engine.stream(prompt, **GREEDY), list[int]()
        for _ in range(soak.draw.randint(1, 3)):
            token_ids += (await anext(stream)).token_ids
        expected = soak.answers.plain[prompt][: len(token_ids)]
        soak.ledger.expect(prompt, tuple(token_ids), expected)
        if number % 2:
            await stream.aclose()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # caused on purpose
                del stream
        soak.ledger.count("dropped", len(token_ids))
    await soak.engine.audit()  # runs after the cancellations
    n_cancelled = soak.engine.statistics().n_finished[FinishReason.CANCELLED] - before
    soak.ledger.expect("streams that were dropped and cancelled", n_cancelled, len(prompts))


# --- Refusals -------------------------------------------------------------------------------------
async def refused(soak: Soak) -> None:
    """Make requests with invalid prompts and arguments among valid ones."""
    prompts: list[Any] = [*soak.some(), "x" * 9000, [10**6], [-1], "\ud800"]
    soak.draw.shuffle(prompts)
    errors = (PromptTooLongError, InvalidRequestError)
    records = await burst(soak.engine, prompts, **GREEDY)
    soak.take("refused", records, errors=errors)
    soak.ledger.expect("refused", records.summary().n_refused, 4)
    wrong: list[dict[str, Any]] = [
        {"regex": "("}, {"grammar": "root ::= nothing"}, {"timeout": -1.0}, {"top_p": 2},
    ]  # fmt: skip
    for bad in wrong:
        try:
            await soak.engine.generate("1+1=", max_tokens=1, **bad)
            soak.ledger.note(f"{bad} was not refused")
        except InvalidRequestError:
            soak.ledger.count("InvalidRequestError")


async def queue_full(soak: Soak) -> None:
    """Make 7 requests too many at once: exactly 7 must be refused."""
    config, n_beyond = soak.engine.config, 7
    n_taken = config.n_seq_max + config.max_queue
    prompts = soak.draw.choices(LONG, k=n_taken + n_beyond)
    records = await burst(soak.engine, prompts, max_tokens=8, **GREEDY)
    soak.take("queue full", records, (FinishReason.LENGTH,), (QueueFullError,))
    soak.ledger.expect("refused by a full queue", records.summary().n_refused, n_beyond)


# --- Other requests -------------------------------------------------------------------------------
T = TypeVar("T")


async def _each(ask: Callable[[T], Awaitable[None]], asked: Sequence[T]) -> None:
    """Call `ask` with each value, all at once."""

    async def run(one: T) -> None:
        await ask(one)

    async with anyio.create_task_group() as tasks:
        for one in asked:
            tasks.start_soon(run, one)


async def constrained(soak: Soak) -> None:
    async def ask(index: int) -> None:
        completion = await soak.engine.generate(*CONSTRAINED[index])
        expected = soak.answers.constrained[index]
        soak.ledger.expect(f"constrained {index}", completion.token_ids, expected)
        soak.ledger.count(completion.finish_reason, completion.usage.n_output, is_whole=True)

    chosen = soak.draw.choices(range(len(CONSTRAINED)), k=soak.n)
    await _each(ask, chosen)


async def chats(soak: Soak) -> None:
    async def ask(index: int) -> None:
        completion = await soak.engine.chat(CHATS[index], **GREEDY)
        soak.ledger.expect(f"chat {index}", completion.text, soak.answers.chats[index])
        soak.ledger.count(completion.finish_reason, completion.usage.n_output, is_whole=True)

    chosen = soak.draw.choices(range(len(CHATS)), k=soak.n)
    await _each(ask, chosen)


async def logprobs_and_scores(soak: Soak) -> None:
    async def with_logprobs(prompt: str) -> None:
        completion = await soak.engine.generate(prompt, logprobs=2, **GREEDY)
        soak.compare(prompt, logprobs_of(completion), soak.answers.logprobs[prompt])
        soak.ledger.expect(prompt, completion.token_ids, soak.answers.plain[prompt])
        soak.ledger.count(completion.finish_reason, completion.usage.n_output, is_whole=True)

    async def score(index: int) -> None:
        score = await soak.engine.score(*SCORED[index])
        soak.compare(f"score {index}", [score.total], [soak.answers.scores[index]])
        soak.ledger.count("scored", is_whole=True)

    prompts = soak.draw.choices(list(soak.answers.logprobs), k=soak.n)
    chosen = soak.draw.choices(range(len(SCORED)), k=max(1, soak.n // 3))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_each, with_logprobs, prompts)
        tasks.start_soon(_each, score, chosen)


async def images(soak: Soak) -> None:
    """Ask about images while streams run; some calls are cancelled while their image is encoded or decoded."""

    async def look(seed: int) -> None:
        found = await soak.engine.generate(about_image(seed), **FIRST_TOKEN)
        soak.compare(f"image {seed}", logprobs_of(found), soak.answers.images[seed])
        soak.ledger.expect("finish_reason", found.finish_reason, FinishReason.LENGTH)
        soak.ledger.count("seen", is_whole=True)

    async def leave(seed: int) -> None:
        with anyio.move_on_after(0.02 * soak.draw.random()):
            await soak.engine.generate(about_image(seed), **FIRST_TOKEN)
        soak.ledger.count("left")

    async with anyio.create_task_group() as tasks:
        for seed in soak.draw.choices(range(N_IMAGES), k=min(soak.n, 6)):
            tasks.start_soon(soak.draw.choice((look, look, leave)), seed)
        await at_once(soak)


async def texts_to_vectors(soak: Soak) -> None:
    """Embed texts while streams run; some calls are cancelled, some have a timeout of 0."""

    async def embed(texts: Sequence[str]) -> None:
        found = await soak.engine.embed(texts)
        for text, vector in zip(texts, found, strict=True):
            likeness = float(vector @ soak.answers.vectors[text])
            if likeness < LIKENESS:
                soak.ledger.note(f"the vector of {text!r} has a cosine of {likeness} to its own")
        soak.ledger.count("embedded", is_whole=True)

    async def leave(texts: Sequence[str]) -> None:
        with anyio.move_on_after(0.001 * soak.draw.random()):
            await soak.engine.embed(texts)
        soak.ledger.count("left")

    async def expire(texts: Sequence[str]) -> None:
        try:
            await soak.engine.embed(texts, timeout=0)
            soak.ledger.note("texts without time have become vectors")
        except DeadlineError:
            soak.ledger.count("DeadlineError")

    known = list(soak.answers.vectors)
    async with anyio.create_task_group() as tasks:
        for _ in range(min(soak.n, 8)):  # beside a load, in a queue of 32
            call = soak.draw.choice((embed, embed, embed, leave, expire))
            tasks.start_soon(call, soak.draw.choices(known, k=soak.draw.randint(1, 12)))
        await at_once(soak)
    await soak.engine.audit()  # runs after the cancellations
    soak.ledger.expect("texts that wait", soak.engine.statistics().n_waiting_texts, 0)


# --- Faults ---------------------------------------------------------------------------------------
N_BETWEEN_FAULTS = (60, 140)


@contextmanager
def faults(ledger: Ledger, draw: random.Random) -> Iterator[None]:
    """Let about every hundredth decode fail: with a fatal code, as aborted, or with a `RuntimeError`."""
    decode, on_failure = Context.decode, Recovery.on_failure
    n_left = draw.randint(*N_BETWEEN_FAULTS) // 4

    def fail_now_and_then(context: Context, batch: Batch) -> Logits:
        nonlocal n_left
        n_left -= 1
        if n_left > 0:
            return decode(context, batch)
        n_left = draw.randint(*N_BETWEEN_FAULTS)
        kind = draw.choice(("fatal", "aborted", "raises"))
        ledger.faults[kind] += 1
        if kind == "raises":
            raise RuntimeError("injected")
        raise DecodeFailedError("llama_decode", -3 if kind == "fatal" else 2, "injected")

    def count(recovery: Recovery, chunks: Sequence[Chunk], *, is_fatal: bool) -> Verdict:
        verdict = on_failure(recovery, chunks, is_fatal=is_fatal)
        ledger.n_contexts_due += verdict is Verdict.REBUILD
        return verdict

    Context.decode = fail_now_and_then  # type: ignore[method-assign, assignment]  # the injection
    Recovery.on_failure = count  # type: ignore[method-assign, assignment]  # and what it leads to
    try:
        yield
    finally:
        Context.decode = decode  # type: ignore[method-assign]  # as it was
        Recovery.on_failure = on_failure  # type: ignore[method-assign]  # as it was


async def with_faults(soak: Soak) -> None:
    """Run loads on an engine whose decodes fail now and then; no request may fail."""
    before = soak.engine.statistics().n_rebuilds - soak.ledger.n_contexts_due
    # The faults are drawn in the inference thread, so they have their own random generator.
    draw = random.Random(soak.draw.randrange(2**31))
    soak.ledger.is_timed = False  # times would include those of new contexts
    with faults(soak.ledger, draw):
        for phase in (at_once, cancelled, read_slowly, one_after_another, images, expired):
            await phase(soak)
            await assert_books_agree(soak.engine)
    n_rebuilds = soak.engine.statistics().n_rebuilds - before
    soak.ledger.expect("new contexts after fatal faults", n_rebuilds, soak.ledger.n_contexts_due)


PHASES: tuple[Callable[[Soak], Awaitable[None]], ...] = (
    one_after_another, at_once, at_random_times, cut_short, cancelled, read_slowly, expired,
    urgent_and_not, dropped, refused, queue_full, constrained, chats, logprobs_and_scores,
    texts_to_vectors, images, with_faults,
)  # fmt: skip
