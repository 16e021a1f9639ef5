"""`cllm pull`, `cllm models`, and names in place of files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cllm.engine.config import EMBEDDED_MODEL
from tests.cli.children import CTRL_C, Terminal, run_cllm_apart
from tests.hub.fake_hub import REPO, FakeHub, running_hub

CHUNK = 10 << 20  # what huggingface_hub writes at once
NAME = f"hf:{REPO}:Q4_K_M"


@pytest.fixture(scope="module")
def model() -> bytes:
    return EMBEDDED_MODEL.read_bytes()


@pytest.fixture
def hub(model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one model, for programs that are started in the test."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with running_hub({"tiny-Q4_K_M.gguf": model, "tiny-Q8_0.gguf": model + b"\0"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_name_stands_for_its_file_and_needs_no_hub_the_second_time(hub: FakeHub) -> None:
    for _ in range(2):
        done = run_cllm_apart("generate", "-m", NAME, "1+1=", "--temperature", "0")
        assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
        n_asked = len(hub.asked)
        hub.statuses = [(500, "")] * 9
    assert len(hub.asked) == n_asked
    done = run_cllm_apart("generate", "-hf", f"{REPO}:q4_k_m", "1+1=", "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.full
def test_what_was_pulled_is_listed_with_its_size_and_can_be_removed(
    hub: FakeHub, model: bytes
) -> None:
    done = run_cllm_apart("pull", NAME)
    path = Path(done.stdout.strip())
    assert path.read_bytes() == model
    assert run_cllm_apart("pull", f"{REPO}:Q8_0").returncode == 0
    done = run_cllm_apart("models")
    names = re.findall(r"^(hf:\S+) +[\d.]+ MB +(\S+)$", done.stdout, re.MULTILINE)
    assert names[0] == (NAME, str(path))
    assert [name for name, _ in names] == [NAME, f"hf:{REPO}:Q8_0"]
    assert done.stderr.startswith("2 models, ")
    done = run_cllm_apart("models", "--remove", NAME)
    assert done.returncode == 0
    assert not path.exists()
    assert NAME not in run_cllm_apart("models").stdout
    done = run_cllm_apart("models", "--remove", NAME)
    assert done.returncode == 1
    assert f"hf:{REPO}:Q8_0" in done.stderr


@pytest.mark.full
def test_an_interrupted_pull_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    name, path = f"hf:{REPO}:Q5_0", "big-Q5_0.gguf"
    hub.files[path] = bytes(12 * CHUNK // 5)
    hub.stops_after = 2 * CHUNK + 1
    with Terminal("pull", name) as terminal:
        while sum(part.stat().st_size for part in tmp_path.rglob("*.incomplete")) < 2 * CHUNK:
            os.sched_yield()
        terminal.send(CTRL_C)
        assert "Traceback" not in terminal.rest()
        assert terminal.exit_code() == 130
    hub.goes_on.set()
    done = run_cllm_apart("models")
    assert (done.returncode, done.stdout) == (0, "")
    assert "; 21.0 MB of interrupted downloads" in done.stderr
    hub.stops_after = None
    done = run_cllm_apart("pull", name)
    assert Path(done.stdout.strip()).read_bytes() == hub.files[path]
    ranges = [headers.get("Range") for method, _, headers in hub.asked if method == "GET"]
    assert f"bytes={2 * CHUNK}-" in ranges


def test_what_is_left_of_interrupted_pulls_can_be_given_up(hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{'0123' * 16}.incomplete").write_bytes(bytes(2000))
    done = run_cllm_apart("models", "--prune")
    assert (done.returncode, done.stderr) == (0, "removed a part of 2.0 kB\n")
    assert list(blobs.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf:user", "must be hf:USER/REPO"),
        (f"hf:{REPO}:Q2_K", "has no Q2_K, but Q4_K_M, Q8_0"),
    ],
)
def test_a_name_that_means_nothing_is_one_line_on_stderr(
    hub: FakeHub, name: str, reason: str
) -> None:
    for arguments in (("pull", name), ("generate", "-m", name, "x")):
        done = run_cllm_apart(*arguments)
        assert done.returncode in (1, 2)
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert reason in done.stderr


def test_a_file_and_a_name_are_one_too_many(hub: FakeHub) -> None:
    done = run_cllm_apart("generate", "-m", str(EMBEDDED_MODEL), "-hf", REPO, "x")
    assert done.returncode == 2
    assert done.stderr.endswith("give -m or -hf, not both\n")


def test_the_projector_of_a_repository_is_downloaded_with_the_model(hub: FakeHub) -> None:
    hub.files["mmproj-F16.gguf"] = b"no projector"
    done = run_cllm_apart("generate", "-m", NAME, "--mmproj", "auto", "1+1=")
    assert done.returncode == 1
    assert "mmproj-F16.gguf" in done.stderr
    assert hub.n_sent["mmproj-F16.gguf"] == len(b"no projector")
