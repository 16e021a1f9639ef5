"""However the process of an engine ends, every stream goes on, with the same tokens."""

from __future__ import annotations

import pytest

from tests.reliability.kills import KINDS, Found, kill, kill_over_http, record_of

pytestmark = [pytest.mark.full, pytest.mark.one_loop, pytest.mark.anyio]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_stream_goes_on_however_its_process_ends(
    kind: str, anyio_backend_name: str
) -> None:
    """200 streams and 100 kills in `python -m tests.reliability.kills`."""
    found = await kill(kind, loop=anyio_backend_name, n_streams=24, n_kills=2)
    assert found.wrong == []
    assert found.n_restarts >= 2
    assert found.n_answers >= 24


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_no_client_of_openais_hears_of_a_kill() -> None:
    found = await kill_over_http(n_clients=4, n_kills=3)
    assert found.wrong == []
    assert found.n_restarts == 3


def test_what_is_wrong_is_counted() -> None:
    found = Found("SIGKILL", "trio", n_restarts=2, n_answers=5)
    found.note("x is 1, not 2")
    record = record_of([found], "python")
    assert record.figures == {"restarts": 2, "answers compared whole": 5, "wrong": 1}
    assert found.wrong == ["SIGKILL, trio: x is 1, not 2"]
