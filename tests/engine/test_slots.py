"""What a slot holds is a file, and comes back for whoever begins alike, in this engine or another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, InvalidRequestError
from tests.conftest import QUIET

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 2, "prefix_cache_bytes": 64 << 20, **QUIET}
HEAD = "The river runs down to the sea, and an old man watches it go by: "
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(**OPTIONS) as engine:
        yield engine


async def slot_of(engine: Engine, state: str) -> int:
    """The seq_id of the first slot in this state."""
    return next(slot.seq_id for slot in await engine.slots() if slot.state == state)


async def test_a_saved_slot_is_the_beginning_of_a_request_of_another_engine(
    engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "slot"
    whole = await engine.generate(HEAD + "one", **GREEDY)
    saved = await engine.save_slot(await slot_of(engine, "cached"), path)
    n_tokens = len(whole.prompt_token_ids) + len(whole.token_ids) - 1
    assert saved.n_tokens == n_tokens
    assert saved.n_bytes <= path.stat().st_size
    async with Engine(**OPTIONS) as other:
        restored = await other.restore_slot(path)
        assert restored == saved
        again = await other.generate(HEAD + "one", **GREEDY)
        assert again.token_ids == whole.token_ids
        assert again.usage.n_cached == len(whole.prompt_token_ids) - 1
        assert await other.audit() == []


async def test_a_running_slot_is_saved_as_far_as_it_is_and_runs_on(
    engine: Engine, tmp_path: Path
) -> None:
    alone = await engine.generate(HEAD, **GREEDY | {"max_tokens": 200})
    await engine.reset_prefix_cache()
    async with engine.stream(HEAD, **GREEDY | {"max_tokens": 200}) as stream:
        await anext(stream)
        saved = await engine.save_slot(await slot_of(engine, "decode"), tmp_path / "slot")
        assert len(alone.prompt_token_ids) <= saved.n_tokens
        assert (await stream.completion()).token_ids == alone.token_ids


async def test_an_erased_slot_shares_nothing_any_more(engine: Engine) -> None:
    whole = await engine.generate(HEAD, **GREEDY)
    seq_id = await slot_of(engine, "cached")
    n_tokens = len(whole.prompt_token_ids) + len(whole.token_ids) - 1
    assert await engine.erase_slot(seq_id) == n_tokens
    assert await engine.erase_slot(seq_id) == 0
    assert engine.statistics().n_kv_cells_used == 0
    assert (await engine.generate(HEAD, **GREEDY)).usage.n_cached == 0


async def test_what_cannot_be_is_refused_by_name(engine: Engine, tmp_path: Path) -> None:
    path, other_file = tmp_path / "slot", tmp_path / "other"
    with pytest.raises(InvalidRequestError, match="a slot that holds tokens"):
        await engine.save_slot(0, path)
    for seq_id in (-1, True, "0", 1 << 40):
        with pytest.raises(InvalidRequestError, match="the number of a slot"):
            await engine.erase_slot(seq_id)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="a file that can be read"):
        await engine.restore_slot(path)
    async with engine.stream(HEAD, **GREEDY | {"max_tokens": 500}) as stream:
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="no request runs"):
            await engine.erase_slot(await slot_of(engine, "decode"))
        await engine.save_slot(await slot_of(engine, "decode"), path)
    with pytest.raises(OSError, match="No such file"):
        await engine.save_slot(await slot_of(engine, "cached"), tmp_path / "nowhere" / "slot")
    data = path.read_bytes()
    for damaged in (data[:-1], data[:200], b"", data[:-1] + bytes([data[-1] ^ 1])):
        other_file.write_bytes(damaged)
        with pytest.raises(InvalidRequestError, match="unchanged"):
            await engine.restore_slot(other_file)
    assert await engine.audit() == []


async def test_a_file_of_other_settings_or_beyond_host_memory_is_refused(
    engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "slot"
    await engine.generate(HEAD, **GREEDY)
    await engine.save_slot(await slot_of(engine, "cached"), path)
    async with Engine(**OPTIONS | {"type_k": "q8_0"}) as other:
        with pytest.raises(InvalidRequestError, match="with these settings"):
            await other.restore_slot(path)
    for n_bytes in (0, 1000):
        async with Engine(**OPTIONS | {"prefix_cache_bytes": n_bytes}) as small:
            with pytest.raises(InvalidRequestError, match=f"prefix_cache_bytes, {n_bytes}"):
                await small.restore_slot(path)
