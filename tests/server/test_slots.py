"""`POST /slots/{id}?action=…`, as llama-server has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Server, refusal_of, running

HEAD = "The river runs down to the sea, and an old man watches it go by: "
GREEDY: dict[str, Any] = {"prompt": HEAD, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has a directory for slots."""
    path = tmp_path_factory.mktemp("saver")
    with running(path / "log", "--slot-save-path", str(path)) as server:
        yield server


def test_a_slot_is_saved_erased_and_restored(saver: Server) -> None:
    with saver.client() as client:
        whole = client.post("/generate", json=GREEDY).json()
        (slot,) = [s for s in client.get("/slots").json() if s["state"] == "cached"]
        url, body = f"/slots/{slot['seq_id']}", {"filename": "river.bin"}
        saved = client.post(url, params={"action": "save"}, json=body).json()
        assert saved["n_saved"] == slot["n_computed"]
        assert saved["n_written"] > 0
        assert saved["timings"]["save_ms"] > 0
        erased = client.post(url, params={"action": "erase"}).json()
        assert erased == {"id_slot": slot["seq_id"], "n_erased": slot["n_computed"]}
        restored = client.post(url, params={"action": "restore"}, json=body).json()
        assert (restored["n_restored"], restored["n_read"]) == (
            saved["n_saved"], saved["n_written"],
        )  # fmt: skip
        again = client.post("/generate", json=GREEDY).json()
        assert again["text"] == whole["text"]
        assert again["usage"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("query", "body", "status", "param"),
    [
        ("action=save", {"filename": "../river"}, 400, "filename"),
        ("action=save", {"filename": ".river"}, 400, "filename"),
        ("action=save", {"filename": "x" * 129}, 400, "filename"),
        ("action=save", {"filename": 1}, 400, "filename"),
        ("action=save", [], 400, "filename"),
        ("action=restore", {"filename": "nobody"}, 404, "filename"),
        ("action=save", {"filename": "empty"}, 400, "seq_id"),
        ("action=burn", {}, 400, "action"),
        ("", {}, 400, "action"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    saver: Server, query: str, body: Any, status: int, param: str
) -> None:
    with saver.client() as client:
        error = refusal_of(client.post(f"/slots/4096?{query}", json=body), status)
    assert error["param"] == param


def test_without_a_directory_only_erasing_is_served(server: Server) -> None:
    with server.client() as client:
        for action in ("save", "restore"):
            answer = client.post(f"/slots/0?action={action}", json={"filename": "a"})
            assert "--slot-save-path" in refusal_of(answer)["message"]
        free = [s["seq_id"] for s in client.get("/slots").json() if s["state"] == "free"]
        assert client.post(f"/slots/{free[0]}?action=erase").json()["n_erased"] == 0
