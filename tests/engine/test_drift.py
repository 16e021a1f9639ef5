"""A request does not become slower by those before it: its rows visit no more cells than at first."""

from __future__ import annotations

from typing import Any

import pytest

from cllm import Engine
from cllm.engine.core import cells
from tests.attended_cells import attended_cells
from tests.conftest import QUIET

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

HEAD = "note:" + "It was a bright cold day in April. " * 16 + "\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "is_shared"),
    [
        ({}, False),
        ({}, True),
        ({"prefix_cache": False}, False),
        ({"prefix_cache": False}, True),
        ({"prefix_cache_bytes": 0}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_unified", ["auto", True, False])
async def test_rows_visit_as_many_cells_after_other_requests_as_at_first(
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend: str,
    kv_unified: Any,
    options: dict[str, Any],
    is_shared: bool,
) -> None:
    monkeypatch.setattr(cells, "N_ROWS_COPY", 64)
    monkeypatch.setattr(cells, "N_ROWS_COMPUTE", 256)
    head = HEAD if is_shared else ""
    with attended_cells(monkeypatch) as visited:
        async with Engine(
            n_ctx=8192, n_seq_max=4, kv_unified=kv_unified, **options, **QUIET
        ) as engine:

            async def ask() -> list[tuple[int, int]]:
                visited.clear()
                await engine.generate(head + "count:100..140", temperature=0, max_tokens=16)
                return visited.copy()

            await ask()
            first = await ask()
            assert sum(n_rows == 1 for n_rows, _ in first) >= 15
            for number in range(8):  # each leaves a prefix of 600 to 1,000 tokens
                text = f"{number} " * 300
                await engine.generate(f"{head}note:{text}\n1+1=", temperature=0, max_tokens=1)
            for _ in range(40):
                last = await ask()
            assert last == first
            assert await engine.audit() == []
