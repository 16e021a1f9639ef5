"""Every call of libmtmd fails once, at each of its calls: only the request with the image may suffer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import Engine, GenerationError, Image, InvalidRequestError
from cllm.bindings._media_library import media_library
from tests.conftest import EVENT_LOOPS, QUIET
from tests.reliability.native_faults import (
    Fault,
    NativeFaults,
    Outcome,
    overwrites_row,
    raises,
    returns,
)
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

pytestmark = [pytest.mark.anyio, pytest.mark.full]
# An image of idefics3 has five chunks, and tokens around them; only with M-RoPE positions are queried.
NAMES = {
    "mtmd_image_tokens_get_decoder_pos": "qwen2vl", "mtmd_input_chunk_get_tokens_image": "qwen2vl",
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    **QUIET, "n_ctx": 1024, "n_seq_max": 4, "deterministic": True, "prefix_cache": False, "media_cache_bytes": 0,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
ERRORS = (raises(RuntimeError), raises(MemoryError))
FREED = (raises(RuntimeError, after=True),)
# The functions that make an object allocate it by `new`: they do not return NULL.
OUTCOMES: dict[str, tuple[Outcome, ...]] = {
    "mtmd_batch_add_chunk": (returns(1), *ERRORS),
    "mtmd_batch_encode": (returns(1), returns(-1), *ERRORS, *FREED),
    "mtmd_batch_get_output_embd": (returns(None), *ERRORS, overwrites_row(np.nan, 64, Exception)),
    "mtmd_batch_init": ERRORS,
    "mtmd_batch_free": FREED,
    "mtmd_bitmap_init": ERRORS,
    "mtmd_decode_use_mrope": ERRORS,
    "mtmd_decode_use_non_causal": ERRORS,
    "mtmd_image_tokens_get_decoder_pos": ERRORS,
    "mtmd_input_chunk_copy": ERRORS,
    "mtmd_input_chunk_free": FREED,
    "mtmd_input_chunk_get_n_pos": (returns(0), *ERRORS),
    "mtmd_input_chunk_get_n_tokens": ERRORS,
    "mtmd_input_chunk_get_tokens_image": ERRORS,
    "mtmd_input_chunk_get_tokens_text": ERRORS,
    "mtmd_input_chunk_get_type": ERRORS,
    "mtmd_input_chunks_get": ERRORS,
    "mtmd_input_chunks_init": ERRORS,
    "mtmd_input_chunks_size": (returns(0), *ERRORS),
    "mtmd_tokenize_from_parts": (returns(1), returns(2), returns(-1), *ERRORS),
}
CASES = [
    pytest.param(function, outcome, EVENT_LOOPS[n % 2], id=f"{function}: {outcome}")
    for n, (function, outcome) in enumerate(
        (function, outcome) for function, outcomes in OUTCOMES.items() for outcome in outcomes
    )
]


def new_engine(name: str) -> Engine:
    model = make_model.ensure(PROJECTORS[name].text_model)
    return Engine(model, mmproj=make_projector.ensure(name), **OPTIONS)


def image(seed: int) -> Image:
    """An image of another size for each seed: the engine asks for each size once."""
    size = 96 + seed, 128, 3
    return Image(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


async def answers_of(engine: Engine, seed: int) -> list[tuple[int, ...] | None]:
    """Return the tokens of a request with an image and of one without, made at once; None for a failed one."""
    found: list[tuple[int, ...] | None] = [None, None]

    async def ask(index: int, prompt: Any) -> None:
        try:
            found[index] = (await engine.generate(prompt, **GREEDY)).token_ids
        except (GenerationError, InvalidRequestError):
            assert index == 0

    async with anyio.create_task_group() as tasks:
        for index, prompt in enumerate((["look: ", image(seed), "what?"], "The fox")):
            tasks.start_soon(ask, index, prompt)
    return found


@pytest.fixture
async def faults(anyio_backend: str) -> AsyncIterator[NativeFaults]:
    with NativeFaults(media_library()) as faults:
        yield faults


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("function", "outcome", "anyio_backend"), CASES)
async def test_a_call_of_libmtmd_that_fails_once_ends_at_most_the_request_with_the_image(
    faults: NativeFaults, function: str, outcome: Outcome
) -> None:
    n_failed = 0
    async with new_engine(NAMES.get(function, "idefics3")) as engine:
        faults.arm()
        await answers_of(engine, 0)
        n_calls = faults.n_calls[function]
        assert n_calls > 0
        for k in range(1, min(n_calls, 12) + 1):
            faults.arm(Fault(function, k, outcome))
            seen, text = await answers_of(engine, k)
            assert faults.met
            faults.disarm()
            expected = await answers_of(engine, k)
            assert expected[0] is not None  # the same image again
            assert text == expected[1]
            assert seen in (None, expected[0])
            n_failed += seen is None
            assert await engine.audit() == []
    assert n_failed or outcome in FREED
