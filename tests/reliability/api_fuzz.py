"""`python -m tests.reliability.api_fuzz [--examples N] [--save]`: any call with any argument.

Hypothesis draws valid and invalid calls of the public API for one engine in a child process.  Each call
must end, with a result or with an error that is documented for it.  Another exception or a signal is a
finding.  After every 100 calls the bookkeeping must agree, and a known request must be answered correctly.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import Any

import anyio

from cllm import Engine, EngineStatistics, TokenStream
from cllm.errors import (
    GenerationError,
    InvalidArgumentError,
    InvalidRequestError,
    PromptTooLongError,
)
from tests.reliability.api_fuzz_calls import Call, calls
from tests.reliability.fuzzing import CHECK_EVERY, Findings, draw, main

CLAIM = (
    "Every call of a method of an engine that serves, whatever its arguments are, ends in a result "
    "or in an error that is documented for it, and leaves the engine as it was."
)
ENGINE: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 4, "n_threads": 1, "n_threads_batch": 1}
TIME_LIMIT_S = 30.0
QUESTION, ANSWER = "20+22=", "42"

OF_REQUESTS: tuple[type[Exception], ...] = (InvalidRequestError, PromptTooLongError)
OF_TOKENS: tuple[type[Exception], ...] = (InvalidArgumentError,)
DOCUMENTED = {
    **dict.fromkeys(
        ("generate", "stream", "generate_all", "chat", "stream_chat", "score"), OF_REQUESTS
    ),
    **dict.fromkeys(("tokenize", "detokenize", "pieces"), OF_TOKENS),
    **dict.fromkeys(("slots", "reset_prefix_cache"), ()),
}
# With a constraint, the sampling options may forbid all allowed tokens: a `GenerationError` while it runs.
CONSTRAINTS = {"grammar", "regex", "json_schema"}


async def run_call(engine: Engine, call: Call) -> object:
    """Make a drawn call, and return its result."""
    method = getattr(engine, call.method)
    if call.method in ("stream", "stream_chat"):
        return await read(method(*call.arguments, **call.options), call.n_deltas)
    return await method(*call.arguments, **call.options)


async def read(stream: TokenStream, n_deltas: int | None) -> object:
    """Read a stream to its end and return its completion, or close it after `n_deltas` deltas."""
    if n_deltas is None:
        async with stream:
            return await stream.completion()
    async with aclosing(stream):
        for _ in range(n_deltas):
            if await anext(stream, None) is None:
                break
    return None


def is_documented(error: Exception, call: Call) -> bool:
    """Return True if the documentation of a call names this error."""
    if isinstance(error, GenerationError):
        return not CONSTRAINTS.isdisjoint(call.options)
    return isinstance(error, DOCUMENTED[call.method])


class Fuzz:
    """Engine under test, and the findings."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found = Findings()

    async def example(self, call: Call) -> None:
        """Make one call, count its end, and run `check` after every `CHECK_EVERY` calls."""
        result: object
        try:
            with anyio.fail_after(TIME_LIMIT_S):
                result = await run_call(self.engine, call)
        except Exception as error:
            result = [error]
        # `generate_all` may return the errors of its prompts as results.
        results = result if isinstance(result, list) else [result]
        errors = [found for found in results if isinstance(found, Exception)]
        self.found.wrong += [
            f"{call!r:.400} gave {error!r:.300}"
            for error in errors
            if not is_documented(error, call)
        ]
        self.found.count(call.method, errors[0] if errors and len(errors) == len(results) else None)
        if self.found.n_examples % CHECK_EVERY == 0:
            await self.check()

    async def check(self) -> None:
        """Check that the bookkeeping agrees and that a known request is answered correctly."""
        self.found.n_checks += 1
        with anyio.fail_after(TIME_LIMIT_S):
            found = await self.engine.audit()
            text = (await self.engine.generate(QUESTION, temperature=0)).text
        if found or text != ANSWER:
            self.found.wrong.append(f"after {self.found.n_examples} examples: {found}, {text!r}")

    async def settled(self) -> EngineStatistics:
        """Return the statistics after the engine has handled all cancellations."""
        for _ in range(3):
            await self.engine.audit()
        return self.engine.statistics()


def fuzz(n_examples: int) -> Findings:
    """Draw and make `n_examples` calls, in this process, which a finding may end by a signal."""
    with asyncio.Runner() as runner:
        engine = runner.run(Engine(**ENGINE).__aenter__())
        state = Fuzz(engine)

        def example(call: Call) -> None:
            runner.run(state.example(call))

        draw(calls(), n_examples, example, state.found)
        left = runner.run(state.settled())
        if left.n_running or left.n_waiting or left.n_kv_cells_used or left.n_rebuilds:
            state.found.wrong.append(f"in the end: {left}")
        runner.run(engine.aclose())
    return state.found


if __name__ == "__main__":
    sys.exit(main("api_fuzz", CLAIM, tuple(DOCUMENTED), fuzz))
