"""tokenize, detokenize and pieces: what they take, and what they refuse by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cllm import Engine
from cllm.errors import InvalidArgumentError
from cllm.testing import FakeEngine
from tests.conftest import type_name

pytestmark = pytest.mark.anyio

NO_SEQUENCES: list[Any] = [5, None, 2.5, "97", b"a", {97: 1}, iter([97]), np.array(97)]


@pytest.mark.parametrize("token_ids", NO_SEQUENCES, ids=type_name)
async def test_token_ids_that_are_no_sequence_are_refused_by_name(
    anyio_backend: str, token_ids: Any
) -> None:
    async with FakeEngine() as engine:
        for call in (engine.detokenize, engine.pieces):
            with pytest.raises(InvalidArgumentError, match=r"^token_ids is .* a sequence of token"):
                await call(token_ids)


@pytest.mark.parametrize(
    "bad", [97.0, True, "a", None, [97], np.array([97, 98]), -1, 10**9], ids=repr
)
@pytest.mark.parametrize("n_before", [1, 2000])  # on the event loop, and on a thread
async def test_a_bad_token_is_refused_wherever_it_stands(
    engine: Engine, bad: Any, n_before: int
) -> None:
    token_ids = [97, *range(4)] * n_before
    assert await engine.detokenize(token_ids)  # every good one is remembered
    for call in (engine.detokenize, engine.pieces):
        with pytest.raises(InvalidArgumentError, match=r"^token is"):
            await call([*token_ids, bad])


async def test_an_array_of_token_ids_will_do(engine: Engine) -> None:
    token_ids = await engine.tokenize("hello", add_special=False)
    assert await engine.detokenize(np.array(token_ids)) == "hello"  # type: ignore[arg-type]
    assert await engine.pieces(tuple(token_ids)) == [b"h", b"e", b"l", b"l", b"o"]


@pytest.mark.parametrize("flag", ["add_special", "parse_special"])
async def test_the_flags_of_tokenize_are_true_or_false(anyio_backend: str, flag: str) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(InvalidArgumentError, match=f"{flag} is 1, must be True or False"):
            await engine.tokenize("hello", **{flag: 1})  # type: ignore[arg-type]
