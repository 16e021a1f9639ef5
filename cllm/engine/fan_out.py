"""Run one request for each of many prompts, a limited number at once, results in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from cllm.errors import CllmError

P = TypeVar("P")
R = TypeVar("R")


async def run_all(
    run: Callable[[P], Awaitable[R]],
    prompts: Sequence[P],
    *,
    n_at_once: int,
    return_exceptions: bool,
    on_progress: Callable[[int, int], None] | None,
) -> list[R]:
    """The results of `run` for every prompt, in the order of the prompts.

    The first error cancels the others and is raised as it is, not in a group; with
    `return_exceptions`, errors stand in the list instead.
    """
    results: list[Any] = [None] * len(prompts)
    n_done = 0
    failure: Exception | None = None
    limiter = anyio.CapacityLimiter(n_at_once)

    async def run_one(index: int) -> None:
        nonlocal n_done, failure
        try:
            results[index] = await run(prompts[index])
        except (CllmError, TypeError, ValueError) as error:
            results[index] = error
            if not return_exceptions:
                failure = failure or error
                tasks.cancel_scope.cancel()
                return
        finally:
            limiter.release_on_behalf_of(index)
        n_done += 1
        if on_progress is not None:
            on_progress(n_done, len(prompts))

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            await limiter.acquire_on_behalf_of(index)
            tasks.start_soon(run_one, index)
    if failure is not None:
        raise failure
    return results
