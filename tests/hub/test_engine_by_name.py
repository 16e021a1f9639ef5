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
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

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


@pytest.fixture
def with_projector(hub: FakeHub) -> None:
    """A model that takes images, and two files of its projector."""
    projector = make_projector.ensure("llava").read_bytes()
    model = make_model.ensure(PROJECTORS["llava"].text_model)
    hub.files = {
        FILE: model.read_bytes(), "mmproj-F16.gguf": projector, "mmproj-F32.gguf": projector,
    }  # fmt: skip


@pytest.mark.anyio
@pytest.mark.usefixtures("with_projector")
@pytest.mark.parametrize("mmproj", ["auto", f"hf:{REPO}/mmproj-F16.gguf"])
async def test_the_projector_is_downloaded_with_the_model_and_found_without_the_hub(
    hub: FakeHub, mmproj: str
) -> None:
    for _ in range(2):
        async with Engine(NAME, mmproj=mmproj, n_ctx=512, **QUIET) as engine:
            assert engine.model.modalities == ("text", "image")
            assert Path(str(engine.config.mmproj)).name == "mmproj-F16.gguf"
        assert "mmproj-F32.gguf" not in hub.n_sent
        hub.asked.clear()
        hub.statuses = [(500, "")] * 20
    assert not hub.asked


@pytest.mark.anyio
async def test_a_repository_without_a_projector_gives_a_model_without_images() -> None:
    async with Engine(NAME, mmproj="auto", **QUIET) as engine:
        assert engine.model.modalities == ("text",)


@pytest.mark.anyio
async def test_a_cached_model_works_if_the_hub_does_not_answer_about_a_projector(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(NAME, **QUIET):
        pass
    hub.statuses = [(404, "RepoNotFound")]
    async with Engine(NAME, mmproj="auto", **QUIET) as engine:
        assert engine.model.modalities == ("text",)
    assert "no projector is used" in caplog.text


@pytest.mark.anyio
@pytest.mark.usefixtures("with_projector")
async def test_a_damaged_projector_is_an_error_and_not_left_out(hub: FakeHub) -> None:
    hub.sent["mmproj-F16.gguf"] = b"x" * len(hub.files["mmproj-F16.gguf"])
    with pytest.raises(DownloadError, match=r"checksum of mmproj-F16\.gguf"):
        async with Engine(NAME, mmproj="auto", **QUIET):
            pass


@pytest.mark.anyio
async def test_without_the_extra_it_says_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidArgumentError, match=r"model is 'hf:.*cllm\[hub\]"):
        async with Engine(NAME, **QUIET):
            pass
