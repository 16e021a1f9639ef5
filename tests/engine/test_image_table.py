"""A table of what an engine does with an image: each feature, with each projector and each kind of memory.

Every cell has the answer that a fresh engine gives to the same request alone.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cllm import Completion, Engine, Image, InvalidArgumentError, SavedGeneration
from tests.conftest import EVENT_LOOPS, QUIET
from tests.engine.test_images import question
from tests.engine.test_process import send
from tests.lora_files import make_lora
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

pytestmark = [pytest.mark.anyio, pytest.mark.full]

N_TOKENS = 8
OPTIONS: dict[str, Any] = {
    "temperature": 0, "max_tokens": N_TOKENS, "ignore_eos": True, "logprobs": 2,
}  # fmt: skip
# Logits of equal rows differ by less between batches of other sizes; those of other images by more.
TOLERANCE = 0.02
MEMORIES = ("whole", "window", "hybrid")
MODELS: Mapping[tuple[str, str], str] = {
    ("gemma3", "whole"): "tiny-llama",
    ("idefics3", "window"): "tiny-swa-tiles",
    **{(name, "hybrid"): "tiny-qwen35" for name in PROJECTORS},
}


class Cell(NamedTuple):
    """One projector with a text model of one kind of memory."""

    projector: str
    memory: str

    @property
    def model(self) -> Path:
        """The text model."""
        own = PROJECTORS[self.projector].text_model if self.memory == "whole" else "tiny-swa"
        return make_model.ensure(MODELS.get(self, own))

    def engine(self, **options: Any) -> Engine:
        """An engine for one kind of use."""
        options = {"n_ctx": 1024, "n_seq_max": 4, "preflight": False, **QUIET, **options}
        return Engine(self.model, mmproj=make_projector.ensure(self.projector), **options)


def ask(seed: int) -> Sequence[str | Image]:
    """A prompt that is long enough for a copy in host memory."""
    return question(seed, " what is in this picture, and where in it? " * 2)


REFERENCES: dict[Cell, Completion] = {}


async def reference(cell: Cell) -> Completion:
    """The answer of an engine that has had no other request; the one about another image differs."""
    if cell not in REFERENCES:
        async with cell.engine(prefix_cache=False) as engine:
            REFERENCES[cell] = await engine.generate(ask(1), **OPTIONS)
            other = await engine.generate(ask(2), **OPTIONS)
        with pytest.raises(AssertionError):
            assert_same(other, REFERENCES[cell])
    return REFERENCES[cell]


def assert_same(found: Completion, expected: Completion) -> None:
    """Fail if two answers differ by more than the rounding of a tie."""
    assert found.logprobs is not None
    assert expected.logprobs is not None
    for one, other in zip(found.logprobs[:N_TOKENS], expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        if one.token_id != other.token_id:
            first, second = other.top
            assert first.logprob == pytest.approx(second.logprob, abs=TOLERANCE)
            return  # after a tie the answers part


# --- Features ----------------------------------------------------------------------------------
Feature = Callable[[Cell, Path], Awaitable[Completion]]


async def shared_with_a_running_request(cell: Cell, _: Path) -> Completion:
    """The rows of the image are computed once."""
    async with cell.engine(stream_buffer=2) as engine:
        async with engine.stream(ask(1), **{**OPTIONS, "max_tokens": 64}) as stream:
            await anext(stream)
            found: Completion = await engine.generate(ask(1), **OPTIONS)
        assert found.usage.n_cached >= found.usage.n_image_tokens
        assert await engine.audit() == []
    return found


async def shared_with_an_earlier_request(cell: Cell, _: Path) -> Completion:
    """The rows of the image are computed once."""
    async with cell.engine() as engine:
        await engine.generate(ask(1), **OPTIONS)
        found: Completion = await engine.generate(ask(1), **OPTIONS)
        assert found.usage.n_cached >= found.usage.n_image_tokens
        assert await engine.audit() == []
    return found


async def preempted(cell: Cell, _: Path) -> Completion:
    """Four requests that grow beyond the cells."""
    n_prompt = (await reference(cell)).usage.n_prompt
    async with cell.engine(n_ctx=256 * (1 + n_prompt // 128), n_seq_max=4) as engine:
        n_ctx = engine.model.n_ctx
        options = {**OPTIONS, "max_tokens": n_ctx // 2 - 8}
        others = [[f"{n}: ", *ask(n)] for n in (2, 3, 4)]
        found, *_others = await engine.generate_all([ask(1), *others], **options)
        assert engine.statistics().n_preemptions > 0
        assert await engine.audit() == []
    return found


async def restored_from_host_memory(cell: Cell, _: Path) -> Completion:
    """Other prompts take the cells, and then the image is wanted again."""
    async with cell.engine(n_ctx=512, n_seq_max=1, prefix_cache_bytes=1 << 26) as engine:
        await engine.generate(ask(1), **OPTIONS)
        for letter in "xyz":
            await engine.generate(letter * 400, **OPTIONS)
        found: Completion = await engine.generate(ask(1), **OPTIONS)
        assert found.usage.n_cached >= found.usage.n_image_tokens
        assert await engine.audit() == []
    return found


async def restored_from_a_file(cell: Cell, directory: Path) -> Completion:
    """A new engine finds the image in a file of the prefix cache."""
    async with cell.engine(prefix_cache_dir=directory) as engine:
        await engine.generate(ask(1), **OPTIONS)
    async with cell.engine(prefix_cache_dir=directory) as engine:
        found: Completion = await engine.generate(ask(1), **OPTIONS)
        assert found.usage.n_cached >= found.usage.n_image_tokens
    return found


async def suspended_to_a_file(cell: Cell, directory: Path) -> Completion:
    """A new engine continues the request."""
    async with (
        cell.engine(stream_buffer=2) as engine,
        engine.stream(ask(1), **OPTIONS) as stream,
    ):
        await anext(stream)
        (await stream.suspend()).save(directory / "saved")
    saved = SavedGeneration.load(directory / "saved")
    async with cell.engine() as engine, engine.resume(saved) as resumed:
        return await resumed.completion()


async def forked(cell: Cell, _: Path) -> Completion:
    """A fork has the cells of the image."""
    async with (
        cell.engine(stream_buffer=2) as engine,
        engine.stream(ask(1), **OPTIONS) as stream,
    ):
        await anext(stream)
        (fork,) = stream.fork(1)
        async with fork:
            found = await fork.completion()
        assert found.usage.n_cached >= found.usage.n_image_tokens
    return found


async def rewound(cell: Cell, _: Path) -> Completion:
    """The output continues before its last tokens."""
    async with cell.engine() as engine, engine.stream(ask(1), **OPTIONS) as stream:
        for _delta in range(5):
            await anext(stream)
        await stream.rewind(3)
        return await stream.completion()


async def in_pieces(cell: Cell, _: Path) -> Completion:
    """A batch has fewer rows than the image."""
    async with cell.engine(n_batch=16) as engine:
        return await engine.generate(ask(1), **OPTIONS)


async def with_drafts(cell: Cell, _: Path) -> Completion:
    """N-gram drafts between the tokens."""
    async with cell.engine(speculation="ngram") as engine:
        return await engine.generate(ask(1), **OPTIONS)


async def in_a_process_that_is_killed(cell: Cell, _: Path) -> Completion:
    """The next process computes the image again."""
    async with cell.engine(process=True, stream_buffer=2) as engine:
        async with engine.stream(ask(1), **OPTIONS) as stream:
            await anext(stream)
            send(engine, signal.SIGKILL)
            found = await stream.completion()
        assert engine.statistics().n_restarts == 1
    return found


async def deterministic(cell: Cell, _: Path) -> Completion:
    """The same bits beside other requests, where llama.cpp can do that."""
    try:
        async with cell.engine(deterministic=True, n_ctx=4096) as engine:
            prompts = [ask(2), ask(1), ask(3)]
            found: list[Completion] = await engine.generate_all(prompts, **OPTIONS)
            alone: Completion = await engine.generate(ask(1), **OPTIONS)
    except InvalidArgumentError as error:
        if cell.memory != "hybrid" or error.field != "deterministic":
            raise
        pytest.skip(
            str(error)
        )  # llama.cpp's kernels for the states are deterministic on some machines
    assert found[1].token_ids == alone.token_ids
    return alone


async def beside_an_adapter(cell: Cell, directory: Path) -> Completion:
    """An image behind an adapter is another prefix than the image without."""
    path = make_lora(directory / "a.gguf", cell.model, seed=1)
    async with cell.engine() as engine:
        await engine.load_lora("a", path)
        adapted: Completion = await engine.generate(ask(1), **OPTIONS, lora={"a": 1.0})
        found: Completion = await engine.generate(ask(1), **OPTIONS)
        assert found.usage.n_cached == 0
        again: Completion = await engine.generate(ask(1), **OPTIONS, lora={"a": 1.0})
        assert again.usage.n_cached >= again.usage.n_image_tokens
        assert_same(again, adapted)
    assert adapted.token_ids != found.token_ids
    return found


FEATURES: tuple[Feature, ...] = (
    shared_with_a_running_request, shared_with_an_earlier_request, preempted, restored_from_host_memory,
    restored_from_a_file, suspended_to_a_file, forked, rewound, in_pieces, with_drafts,
    in_a_process_that_is_killed, deterministic, beside_an_adapter,
)  # fmt: skip
CELLS = [
    Cell(name, memory)
    for name, memory in itertools.product(PROJECTORS, MEMORIES)
    if name != "qwen3vl"
    or memory == "whole"  # llama.cpp has no other text model for deepstack rows
]
TABLE = [
    pytest.param(feature, cell, EVENT_LOOPS[n % 2], id=f"{feature.__name__}-{cell.projector}-{cell.memory}")
    for n, (feature, cell) in enumerate(itertools.product(FEATURES, CELLS))
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("feature", "cell", "anyio_backend"), TABLE)
async def test_an_image_gives_its_answer(feature: Feature, cell: Cell, tmp_path: Path) -> None:
    expected = await reference(cell)
    found = await feature(cell, tmp_path)
    assert_same(found, expected)
    assert found.usage.n_image_tokens == expected.usage.n_image_tokens > 0
