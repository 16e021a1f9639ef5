"""Run one request for each of many prompts, a limited number at once, results in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from cllm.checks import check_bool, check_several
from cllm.errors import InvalidRequestError

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
    """Return the results of `run` for every prompt, in the order of the prompts.

    The first error cancels the other calls and is raised as it is, not in a group.  With
    `return_exceptions`, the list contains the errors instead.  An error of `on_progress` is always raised.

    Raises
    ------
    InvalidRequestError
        The prompts are not a sequence, but a single text, a mapping or an iterator.
    """
    check_several("prompts", prompts, "a sequence of prompts", InvalidRequestError)
    check_bool("return_exceptions", return_exceptions, InvalidRequestError)
    if on_progress is not None and not callable(on_progress):
        raise InvalidRequestError("on_progress", on_progress, "a function of two numbers, or None")
    prompts = list(prompts)  # in the order of iteration; the caller's sequence may change meanwhile
    results: list[Any] = [None] * len(prompts)
    n_done = 0
    failure: Exception | None = None
    limiter = anyio.CapacityLimiter(n_at_once)

    def fail(error: Exception) -> None:
        nonlocal failure
        if failure is None:
            failure = error
        tasks.cancel_scope.cancel()

    async def run_one(index: int) -> None:
        nonlocal n_done
        try:
            results[index] = await run(prompts[index])
        except Exception as error:
            results[index] = error
            if not return_exceptions:
                fail(error)
                return
        finally:
            limiter.release_on_behalf_of(index)
        n_done += 1
        if on_progress is not None:
            try:
                on_progress(n_done, len(prompts))
            except Exception as error:
                fail(error)

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            await limiter.acquire_on_behalf_of(index)
            tasks.start_soon(run_one, index)
    if failure is not None:
        raise failure
    return results
