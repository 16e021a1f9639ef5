"""A stream that one task reads and another one cancels or closes."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from cllm import ClosedError, FinishReason, InvalidRequestError, SamplingParams, TokenStream
from cllm.engine.loop.prompt_tokenizer import PromptTokenizer
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio

ENDINGS = pytest.mark.parametrize("end", [TokenStream.cancel, TokenStream.aclose])
BANS = pytest.mark.parametrize("banned", [(), ("zz",)], ids=["free", "banned"])
Ending = Callable[[TokenStream], Awaitable[None]]


class Preparation:
    """Holds the next request back while it is prepared: in this method of `PromptTokenizer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str = "with_stop_tokens") -> None:
        self.begun, self.may_end = anyio.Event(), anyio.Event()
        prepare = getattr(PromptTokenizer, method)

        async def held(*args: Any, **kwargs: Any) -> Any:
            self.begun.set()
            await self.may_end.wait()
            return await prepare(*args, **kwargs)

        monkeypatch.setattr(PromptTokenizer, method, held)

    async def end_meanwhile(self, stream: TokenStream, end: Ending) -> None:
        await self.begun.wait()
        await end(stream)
        self.may_end.set()


async def ends(stream: TokenStream, end: Ending) -> None:
    """Check that the stream ends as requested, before its text does."""
    if end is TokenStream.cancel:
        assert [d.finish_reason async for d in stream][-1] is FinishReason.CANCELLED
        return
    for _ in range(2):
        with pytest.raises(ClosedError, match="closed before its end"):
            await anext(stream)


@ENDINGS
@BANS
async def test_a_stream_ends_that_was_told_to_while_its_request_was_prepared(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, end: Ending, banned: tuple[str, ...]
) -> None:
    with anyio.fail_after(30):
        async with FakeEngine(lambda _: "a" * 1000) as engine, anyio.create_task_group() as tasks:
            preparation = Preparation(monkeypatch)
            stream = engine.stream("p", banned_strings=banned)
            tasks.start_soon(preparation.end_meanwhile, stream, end)
            await ends(stream, end)
            await engine.audit()
            assert engine.statistics().n_running == 0
            del stream
            gc.collect()  # no warning


@ENDINGS
@BANS
async def test_a_stream_ends_that_was_told_to_before_it_was_entered(
    anyio_backend: str, end: Ending, banned: tuple[str, ...]
) -> None:
    async with FakeEngine(lambda _: "a" * 1000) as engine:
        stream = engine.stream("p", banned_strings=banned)
        await end(stream)
        await ends(stream, end)
        n_finished = sum(engine.statistics().n_finished.values())
        assert n_finished == (end is TokenStream.cancel)


@ENDINGS
@BANS
@pytest.mark.parametrize("has_ended", [False, True], ids=["running", "ended"])
async def test_a_stream_ends_that_was_told_to_while_it_went_back(
    anyio_backend: str,
    monkeypatch: pytest.MonkeyPatch,
    end: Ending,
    banned: tuple[str, ...],
    has_ended: bool,
) -> None:
    with anyio.fail_after(30):
        async with FakeEngine(lambda _: "a" * 1000) as engine:
            stream = engine.stream("p", banned_strings=banned, max_tokens=2 if has_ended else None)
            async with stream:
                await anext(stream)
                if has_ended:
                    await stream.completion()
                preparation = Preparation(monkeypatch)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(preparation.end_meanwhile, stream, end)
                    await stream.rewind(1)
                await ends(stream, end)
                await engine.audit()
                assert engine.statistics().n_running == 0


@ENDINGS
@BANS
@pytest.mark.parametrize("is_first", [False, True], ids=["entered", "first"])
@pytest.mark.parametrize("step", ["inject", "rewind"])
async def test_a_stream_ends_that_is_ended_while_a_step_of_it_prepares(
    anyio_backend: str,
    monkeypatch: pytest.MonkeyPatch,
    end: Ending,
    banned: tuple[str, ...],
    is_first: bool,
    step: str,
) -> None:
    with anyio.fail_after(30):
        async with FakeEngine(lambda _: "a" * 1000) as engine:
            stream = engine.stream("p", banned_strings=banned, generated=(98, 99))
            if not is_first:
                await anext(stream)
            is_tokenizing = step == "inject" and not is_first
            preparation = Preparation(
                monkeypatch, "tokenize" if is_tokenizing else "with_stop_tokens"
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(preparation.end_meanwhile, stream, end)
                await (stream.inject("zx") if step == "inject" else stream.rewind(1))
            await ends(stream, end)
            await engine.audit()
            assert engine.statistics().n_running == 0


async def test_a_stream_that_has_ended_stays_so_if_it_cannot_go_back(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(texts: PromptTokenizer, params: SamplingParams) -> SamplingParams:
        raise InvalidRequestError("stop", "x", "another")

    async with FakeEngine(lambda _: "abc") as engine, engine.stream("p") as stream:
        assert (await stream.completion()).text == "abc"
        monkeypatch.setattr(PromptTokenizer, "with_stop_tokens", refuse)
        with pytest.raises(InvalidRequestError):
            await stream.rewind(1)
        assert [delta async for delta in stream] == []
        assert (await stream.completion()).text == "abc"
