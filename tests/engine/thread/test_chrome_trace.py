"""`Engine(trace=FILE)` writes what Perfetto shows, and changes nothing else."""

from __future__ import annotations

import itertools
import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, InvalidArgumentError
from cllm.engine.thread.chrome_trace import ChromeTrace
from cllm.testing import FakeEngine
from tests.conftest import QUIET, submitted_together
from tests.engine.test_process import send

pytestmark = pytest.mark.anyio

TICKS, REQUESTS = 1, 2
GREEDY: dict[str, Any] = {"temperature": 0.0}


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, each with what its kind has to have."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    for event in events:
        assert {"ph", "name", "pid"} <= set(event)
        if event["ph"] != "M":
            assert event["ts"] > 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    return events


def tracks_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The slices of each request, by its id."""
    names = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["pid"] == REQUESTS and e["name"] == "thread_name"
    }
    tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["pid"] == REQUESTS and event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
    return tracks


async def test_each_tick_has_its_parts_and_each_request_a_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with Engine(n_ctx=1024, n_seq_max=2, trace=path, **QUIET) as engine:
        results = [await engine.generate(f"{n}+1=", request_id=f"r{n}", **GREEDY) for n in range(3)]
        n_ticks = engine.statistics().n_ticks
    events = events_of(path)
    for part in ("plan", "decode", "sample and report"):
        slices = [e for e in events if e["pid"] == TICKS and e["ph"] == "X" and e["name"] == part]
        assert len(slices) == n_ticks
    tracks = tracks_of(events)
    assert set(tracks) == {"r0", "r1", "r2"}
    for result, slices in zip(results, tracks.values(), strict=True):
        assert [s["name"] for s in slices[:2]] == ["queued", "prefill"]
        assert {s["name"] for s in slices[2:]} <= {"decode"}
        n_rows = sum(s["args"]["rows"] for s in slices[1:])
        # The last token is sampled and never computed.
        n_tokens = len(result.prompt_token_ids) + len(result.token_ids)
        assert n_rows == n_tokens - 1 - result.usage.n_cached
    ends = [e for e in events if e["pid"] == REQUESTS and e["ph"] == "i"]
    assert [(e["name"], e["args"]["request"]) for e in ends] == [
        ("stop", f"r{n}") for n in range(3)
    ]


async def test_parts_of_a_tick_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with Engine(n_ctx=1024, n_seq_max=2, trace=path, **QUIET) as engine:
        await engine.generate("count:1..5", **GREEDY)
    slices = [e for e in events_of(path) if e["pid"] == TICKS and e["ph"] == "X"]
    for one, other in itertools.pairwise(slices):
        assert one["ts"] + one["dur"] <= other["ts"] + 0.2  # rounded


async def test_preemptions_and_the_fill_of_the_engine_are_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options: dict[str, Any] = {"n_ctx": 24, "n_seq_max": 4, "prefix_cache": False}
    async with FakeEngine(lambda prompt: "x" * 12, trace=path, **options) as engine:
        with submitted_together(engine, 4):
            await engine.generate_all(["abcd"] * 4)
        n_preemptions = engine.statistics().n_preemptions
    assert n_preemptions
    events = events_of(path)
    preempted = [e["args"]["n"] for e in events if e["name"] == "preemption"]
    assert sum(preempted) == n_preemptions
    counters = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "requests"]
    assert max(c["waiting"] + c["running"] for c in counters) >= 3
    cells = [e["args"]["used"] for e in events if e["ph"] == "C" and e["name"] == "KV cells"]
    assert max(cells) > 0
    assert cells[-1] == 0


async def test_a_trace_holds_no_prompt_and_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with Engine(n_ctx=1024, n_seq_max=2, trace=path, **QUIET) as engine:
        await engine.generate("repeat:secret words", **GREEDY)
    assert "secret" not in path.read_text()


async def test_answers_are_the_same_with_a_trace(tmp_path: Path) -> None:
    texts = []
    for trace in (None, tmp_path / "trace.json"):
        async with Engine(n_ctx=1024, n_seq_max=2, trace=trace, **QUIET) as engine:
            texts.append((await engine.generate("37+58=", seed=3)).token_ids)
    assert texts[0] == texts[1]


async def test_a_file_that_cannot_be_written_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="trace") as caught:
        async with FakeEngine(lambda prompt: "a", trace=tmp_path / "no" / "trace.json"):
            pass
    assert caught.value.field == "trace"


class FullDisk:
    """A file on a disk that is full after so many writes."""

    def __init__(self, path: Path, n_writes: int) -> None:
        self._file = path.open("w")
        self._n_left = n_writes

    def write(self, text: str) -> int:
        self._n_left -= 1
        if self._n_left < 0:
            raise OSError(28, "No space left on device")
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


async def test_a_full_disk_ends_the_trace_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    begin: Callable[[ChromeTrace, Path], None] = ChromeTrace.__init__

    def on_a_full_disk(trace: ChromeTrace, path: Path) -> None:
        begin(trace, path)
        trace._file.close()
        trace._file = FullDisk(path, 2)  # type: ignore[assignment]

    monkeypatch.setattr(ChromeTrace, "__init__", on_a_full_disk)
    with caplog.at_level(logging.WARNING, "cllm.engine"):
        async with FakeEngine(lambda prompt: "abcdef", trace=path) as engine:
            assert (await engine.generate("x")).text == "abcdef"
    assert [m for m in caplog.messages if "the trace ends here" in m] == [caplog.messages[-1]]


@pytest.mark.full
async def test_each_process_of_an_engine_has_a_trace_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with Engine(n_ctx=512, n_seq_max=2, process=True, trace=path, **QUIET) as engine:
        assert (await engine.generate("1+1=", **GREEDY)).text == "2"
        send(engine, signal.SIGKILL)
        assert (await engine.generate("2+2=", **GREEDY)).text == "4"
    killed = path.read_text()
    assert killed.endswith(",\n"), "whole lines, without an end"
    assert json.loads(f"{killed[:-2]}]")
    assert tracks_of(events_of(path.with_name("trace.json.1")))
