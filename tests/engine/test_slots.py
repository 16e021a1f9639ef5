"""`Engine.erase_slot` frees a cached prefix and disturbs no request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cllm import Engine, InvalidRequestError
from tests.conftest import QUIET

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 2, **QUIET}
HEAD = "The river runs down to the sea, and an old man watches it go by: "
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(**OPTIONS) as engine:
        yield engine


async def slot_of(engine: Engine, state: str) -> int:
    """Return the seq_id of the first slot in this state; "occupied": with a request, which may be paused."""
    slots = await engine.slots()
    return next(
        slot.seq_id
        for slot in slots
        if (slot.request_id is not None if state == "occupied" else slot.state == state)
    )


async def test_an_erased_slot_shares_nothing_any_more(engine: Engine) -> None:
    whole = await engine.generate(HEAD, **GREEDY)
    seq_id = await slot_of(engine, "cached")
    n_tokens = len(whole.prompt_token_ids) + len(whole.token_ids) - 1
    assert await engine.erase_slot(seq_id) == n_tokens
    assert await engine.erase_slot(seq_id) == 0
    assert engine.statistics().n_kv_cells_used == 0
    assert (await engine.generate(HEAD, **GREEDY)).usage.n_cached == 0
    assert await engine.audit() == []


async def test_the_slot_of_a_running_request_is_not_erased(engine: Engine) -> None:
    alone = await engine.generate(HEAD, **GREEDY | {"max_tokens": 200})
    async with engine.stream(HEAD, **GREEDY | {"max_tokens": 200}) as stream:
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="a slot without a running request"):
            await engine.erase_slot(await slot_of(engine, "occupied"))
        assert (await stream.completion()).token_ids == alone.token_ids


@pytest.mark.parametrize("seq_id", [-1, True, "0", 1 << 40])
async def test_what_is_no_slot_is_rejected_by_name(engine: Engine, seq_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="seq_id"):
        await engine.erase_slot(seq_id)
