"""An engine whose model is given by name."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from cllm import Engine, EngineStatus, InvalidArgumentError
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import DownloadError
from tests.conftest import QUIET
from tests.hub.fake_hub import REPO, FakeHub

NAME = f"hf:{REPO}:Q8_0"
FILE = "tiny-Q8_0.gguf"


@pytest.fixture(autouse=True)
def model(hub: FakeHub) -> None:
    """The embedded one, under a name."""
    hub.files = {FILE: EMBEDDED_MODEL.read_bytes()}


@pytest.mark.anyio
async def test_it_is_downloaded_when_the_engine_is_entered_and_its_file_is_the_model() -> None:
    engine = Engine(NAME, **QUIET)
    async with engine:
        assert isinstance(engine.config.model, Path)
        assert engine.config.model.name == FILE
        assert (await engine.generate("1+1=", temperature=0.0)).text == "2"


@pytest.mark.anyio
async def test_a_reload_takes_a_name_and_a_failed_download_changes_nothing(hub: FakeHub) -> None:
    async with Engine(**QUIET) as engine:
        hub.statuses = [(404, "RepoNotFound")]
        with pytest.raises(DownloadError, match="no such repository"):
            await engine.reload(NAME)
        assert (await engine.generate("1+1=", temperature=0.0)).text == "2"
        await engine.reload(NAME)
        assert engine.config.model_path.name == FILE
        assert (await engine.generate("1+1=", temperature=0.0)).text == "2"


@pytest.mark.anyio
async def test_who_gives_up_while_it_is_downloaded_has_a_closed_engine(hub: FakeHub) -> None:
    hub.stops_after = 1000
    engine = Engine(NAME, **QUIET)
    async with anyio.create_task_group() as tasks:

        async def enter() -> None:
            async with engine:
                raise AssertionError("entered")

        tasks.start_soon(enter)
        await anyio.to_thread.run_sync(hub.has_stopped.wait)
        assert engine.health().status == EngineStatus.STARTING
        tasks.cancel_scope.cancel()
    assert engine.health().status == EngineStatus.CLOSED
    hub.goes_on.set()


@pytest.mark.anyio
async def test_without_the_extra_it_says_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidArgumentError, match=r"model is 'hf:.*cllm\[hub\]"):
        async with Engine(NAME, **QUIET):
            pass
