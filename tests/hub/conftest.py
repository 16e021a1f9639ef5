"""A local hub for tests, and a download cache for each test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from tests.hub.fake_hub import FakeHub, running_hub

FILES = {
    "model-Q4_K_M.gguf": bytes(range(256)) * 4000,
    "model-Q8_0-00001-of-00002.gguf": b"first part " * 1000,
    "model-Q8_0-00002-of-00002.gguf": b"second part " * 1000,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    directory = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return directory


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a model of one file, and one of two."""
    with running_hub(dict(FILES)) as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # A cut download keeps whole chunks.
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
        # huggingface_hub waits a second before it tries again.
        hasty = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        monkeypatch.setattr(file_download, "time", hasty)
        yield hub
        huggingface_hub.close_session()
