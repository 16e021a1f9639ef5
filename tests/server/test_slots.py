"""`POST /slots/{id}?action=…`: erasing, and the two actions of llama-server that are not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from cllm import SlotInfo, SlotState
from cllm.server.state import visible_slots
from cllm.testing import FakeEngine
from tests.server.conftest import Server, client_of, refusal_of, running

HEAD = "The river runs down to the sea, and an old man watches it go by: "
GREEDY: dict[str, Any] = {"prompt": HEAD, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def test_cached_prefixes_are_erased(tmp_path: Path) -> None:
    # In a server of many requests, this prefix may have left the cells for host memory already.
    with running(tmp_path / "log") as server, server.client() as client:
        client.post("/generate", json=GREEDY)
        cached = [s for s in client.get("/slots").json() if s["state"] == "cached"]
        assert cached
        for slot in cached:
            url = f"/slots/{slot['seq_id']}?action=erase"
            erased = {"id_slot": slot["seq_id"], "n_erased": slot["n_computed"]}
            assert client.post(url).json() == erased
            assert client.post(url).json()["n_erased"] == 0
        assert client.post("/generate", json=GREEDY).json()["usage"]["cached_tokens"] == 0


def test_a_client_with_a_key_sees_no_tenants_and_requests_of_others() -> None:
    tenants = "alice", "bob", ""
    slots = [
        SlotInfo(n, SlotState.DECODE, tenant=tenant, request_id=f"of {tenant}")
        for n, tenant in enumerate(tenants)
    ]
    alice = Request({"type": "http", "state": {"key": SimpleNamespace(name="alice")}})
    seen = [(slot.tenant, slot.request_id) for slot in visible_slots(alice, slots)]
    assert seen == [("alice", "of alice"), ("", None), ("", "of ")]
    operator = Request({"type": "http", "state": {}})
    assert [slot.tenant for slot in visible_slots(operator, slots)] == list(tenants)


@pytest.mark.anyio
async def test_a_client_with_a_key_erases_no_prefix_of_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\n')
    async with FakeEngine() as engine, client_of(engine, api_keys=str(keys), api_key="b") as client:
        statuses = [
            (
                await client.post(
                    "/slots/0?action=erase", headers={"Authorization": f"Bearer {key}"}
                )
            ).status_code
            for key in "ab"
        ]
    assert statuses == [403, 200]


@pytest.mark.parametrize("action", ["save", "restore"])
def test_saving_and_restoring_name_what_replaces_them(server: Server, action: str) -> None:
    with server.client() as client:
        answer = client.post(f"/slots/0?action={action}", json={"filename": "a"})
        assert "prefix_cache_dir" in refusal_of(answer, 501)["message"]


@pytest.mark.parametrize(
    ("path", "param"), [("0?action=burn", "action"), ("0", "action"), ("-1?action=erase", "seq_id")]
)
def test_a_wrong_action_or_slot_is_rejected_by_name(server: Server, path: str, param: str) -> None:
    with server.client() as client:
        assert refusal_of(client.post(f"/slots/{path}"), 400)["param"] == param
