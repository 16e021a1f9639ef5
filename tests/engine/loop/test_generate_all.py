"""generate_all: the order of the prompts, one error or all of them, and never a group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from cllm import Engine, InvalidRequestError, PromptTooLongError
from cllm.engine.sampling_params import SamplingOptions
from cllm.testing import FakeEngine
from tests.conftest import QUIET, type_name

pytestmark = pytest.mark.anyio

GREEDY: SamplingOptions = {"temperature": 0.0}


async def test_generate_all_keeps_the_order_and_never_overfills_its_own_queue(
    anyio_backend: str,
) -> None:
    seen: list[tuple[int, int]] = []
    async with Engine(n_ctx=1024, n_seq_max=2, max_queue=1, **QUIET) as engine:
        results = await engine.generate_all(
            [f"{n}+1=" for n in range(20)], on_progress=lambda *at: seen.append(at), **GREEDY
        )
    assert [c.text for c in results] == [str(n + 1) for n in range(20)]
    assert seen == [(n, 20) for n in range(1, 21)]


async def test_generate_all_raises_the_first_error_or_returns_them(engine: Engine) -> None:
    prompts = ["1+1=", "x" * 100_000, "2+2="]
    with pytest.raises(PromptTooLongError):
        await engine.generate_all(prompts, **GREEDY)
    results = await engine.generate_all(prompts, return_exceptions=True, **GREEDY)
    assert [getattr(r, "text", type(r).__name__) for r in results] == [
        "2",
        "PromptTooLongError",
        "4",
    ]


class Odd(Sequence[str]):
    """A caller's own sequence, one of whose items cannot be had."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            raise ZeroDivisionError("the caller's own")
        return "abc"[index]


@pytest.mark.parametrize("return_exceptions", [False, True])
async def test_an_error_of_the_sequence_itself_is_raised_before_a_request_is_made(
    anyio_backend: str, return_exceptions: bool
) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(ZeroDivisionError, match="the caller's own"):
            await engine.generate_all(Odd(), return_exceptions=return_exceptions)
        assert engine.statistics().n_ticks == 0


class Labelled:
    """A column of a table: iterated by position, indexed by label."""

    def __init__(self, values: dict[int, str]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, label: int) -> str:
        return self._values[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values.values())


@pytest.mark.parametrize("values", [{1: "a", 0: "b"}, {5: "a", 7: "b"}])
async def test_prompts_have_the_order_of_iteration(
    anyio_backend: str, values: dict[int, str]
) -> None:
    async with FakeEngine() as engine:
        results = await engine.generate_all(cast(Any, Labelled(values)))
        assert [result.text for result in results] == ["a", "b"]


async def test_a_list_that_changes_meanwhile_is_read_as_it_was(anyio_backend: str) -> None:
    prompts = list("abcdef")
    async with FakeEngine(n_seq_max=1) as engine:
        results = await engine.generate_all(prompts, on_progress=lambda *_: prompts.clear())
    assert [result.text for result in results] == list("abcdef")


@pytest.mark.parametrize(("name", "value"), [("on_progress", 3), ("return_exceptions", "yes")])
async def test_other_arguments_are_rejected_before_a_request_is_made(
    anyio_backend: str, name: str, value: Any
) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(InvalidRequestError, match=name):
            await engine.generate_all(["a"], **{name: value})
        assert engine.statistics().n_ticks == 0


@pytest.mark.parametrize("return_exceptions", [False, True])
async def test_an_error_of_on_progress_is_raised_and_cancels_the_rest(
    anyio_backend: str, return_exceptions: bool
) -> None:
    seen = []

    def progress(n_done: int, n_total: int) -> None:
        seen.append(n_done)
        raise ZeroDivisionError(f"{n_done} of {n_total}")

    async with FakeEngine(n_seq_max=1) as engine:
        with pytest.raises(ZeroDivisionError, match="1 of 50"):
            await engine.generate_all(
                ["hello"] * 50, on_progress=progress, return_exceptions=return_exceptions
            )
        assert len(seen) < 50
        assert (await engine.generate("next")).text == "next"
        assert await engine.audit() == []


@pytest.mark.parametrize(
    "prompts",
    ["a text", b"bytes", {"a": 1}, {"a"}, iter("ab"), 5, None, np.array(5)],
    ids=type_name,
)
async def test_prompts_that_are_no_sequence_are_refused_by_name(
    anyio_backend: str, prompts: Any
) -> None:
    """A single text would otherwise be taken for as many prompts as it has characters."""
    async with FakeEngine() as engine:
        with pytest.raises(InvalidRequestError, match=r"^prompts is .* a sequence of prompts"):
            await engine.generate_all(prompts)
        assert engine.statistics().n_ticks == 0


async def test_any_sequence_will_do(anyio_backend: str) -> None:
    async with FakeEngine() as engine:
        several: list[Any] = [
            ["a", "b"],
            ("a", "b"),
            deque("ab"),
            [[97], [98]],
            np.array(["a", "b"]),
        ]
        for prompts in several:
            assert [c.text for c in await engine.generate_all(prompts)] == ["a", "b"]
        assert await engine.generate_all([]) == []
