"""ChromeTrace: ticks and requests of generations as a file that Perfetto and chrome://tracing show.

The format is the JSON array of the Trace Event Format, one event a line; viewers accept an array
without an end, as a process that was killed leaves it.  Times are microseconds of `perf_counter`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cllm.engine.core.commands import Event, Finished
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.core.scheduler import Chunk, is_decoding
from cllm.errors import InvalidArgumentError

logger: logging.Logger = logging.getLogger("cllm.engine")

TICKS, REQUESTS = 1, 2  # process ids, by which viewers group tracks
# Counters of the recorder, and the event that is written if a counter has grown in a tick.
COUNTED = {
    "n_preemptions": "preemption",
    "n_swaps": "swap",
    "n_evictions": "eviction",
    "n_restored_prefixes": "restored prefix",
    "n_rebuilds": "rebuild",
}


class _Part(NamedTuple):
    """A chunk of the batch that is decoded."""

    request_id: str
    submitted_at: float
    n_rows: int
    is_decoding: bool


class ChromeTrace:
    """Writes the trace of one inference thread.  The state of the engine is not changed.

    One track shows the ticks, as slices "plan", "decode" and "sample and report".  Each request has a track
    with its time in the queue, and with each decode that computes rows of it.  The file grows without limit.
    Inference thread only.

    Parameters
    ----------
    path : Path
        File to write; an existing file is overwritten.

    Raises
    ------
    InvalidArgumentError
        The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            limit = f"a file that can be written ({error.strerror})"
            raise InvalidArgumentError("trace", str(path), limit) from None
        self._is_full = False
        self._tracks: dict[str, int] = {}
        self._n_tracks = 0
        self._counts = dict.fromkeys(COUNTED, 0)
        self._gauges: dict[str, dict[str, int]] = {}
        self._n_ticks = 0
        self._parts: list[_Part] = []
        self._begun_at = self._decoded_at = 0.0
        names = [_name("process_name", TICKS, 0, "ticks"), _name("thread_name", TICKS, 1, "tick")]
        self._write([*names, _name("process_name", REQUESTS, 0, "requests")], head="[\n")

    def on_batch(self, chunks: Sequence[Chunk]) -> None:
        """Note that a decode begins with these chunks, or has ended if there are none."""
        if not chunks:
            self._decoded_at = time.perf_counter()
            return
        self._parts = [
            _Part(c.sequence.request_id, c.sequence.request.submitted_at, c.n_rows, is_decoding(c))
            for c in chunks
        ]
        self._begun_at = time.perf_counter()

    def on_tick(self, core: EngineCore, events: Iterable[Event], started: float) -> None:
        """Write a tick with a decode that began at `started` (`time.perf_counter`), ends of requests, and gauges."""
        ended = time.perf_counter()
        written: list[dict[str, Any]] = []
        if self._parts:
            written += self._of_tick(core, started, ended)
        written += self._of_counts(core, ended)
        for event in events:
            if isinstance(event, Finished):
                written += self._of_end(event, ended)
        self._parts = []
        if written:
            self._write(written)

    def close(self) -> None:
        """End the file."""
        if not self._is_full:
            self._write([], head='{"ph": "M", "name": "end", "pid": 1}]\n')
        with suppress(OSError):  # on a full disk, buffered data cannot be written now either
            self._file.close()

    def _of_tick(self, core: EngineCore, started: float, ended: float) -> Iterable[dict[str, Any]]:
        n_rows = sum(part.n_rows for part in self._parts)
        has_failed = core.recorder.n_ticks == self._n_ticks
        self._n_ticks = core.recorder.n_ticks
        rows = {"rows": n_rows, "decoding": sum(part.is_decoding for part in self._parts)}
        name = "failed decode" if has_failed else "decode"
        yield _slice("plan", TICKS, 1, started, self._begun_at)
        yield _slice(name, TICKS, 1, self._begun_at, self._decoded_at, rows)
        yield _slice("sample and report", TICKS, 1, self._decoded_at, ended)
        for part in self._parts:
            if part.request_id not in self._tracks:
                yield from self._new_track(part.request_id, part.submitted_at, self._begun_at)
            name = "decode" if part.is_decoding else "prefill"
            args, track = {"rows": part.n_rows}, self._tracks[part.request_id]
            yield _slice(name, REQUESTS, track, self._begun_at, self._decoded_at, args)

    def _of_counts(self, core: EngineCore, now: float) -> Iterable[dict[str, Any]]:
        for counter, name in COUNTED.items():
            count = getattr(core.recorder, counter)
            if count != self._counts[counter]:
                args = {"n": count - self._counts[counter]}
                self._counts[counter] = count
                yield {**_at(name, "i", TICKS, 1, now), "s": "p", "args": args}
        queue, kv_cache = core.queue, core.kv_cache
        gauges = {
            "requests": {"waiting": len(queue.waiting), "running": len(queue.running)},
            "KV cells": {"used": kv_cache.n_used, "cached": kv_cache.n_cached},
        }
        for name, values in gauges.items():
            if values != self._gauges.get(name):
                self._gauges[name] = values
                yield {**_at(name, "C", TICKS, 0, now), "args": values}

    def _of_end(self, event: Finished, now: float) -> Iterable[dict[str, Any]]:
        if event.request_id not in self._tracks:
            total_s = event.completion.timings.total_s
            yield from self._new_track(event.request_id, now - total_s, now)
        args = {"request": event.request_id}
        track, reason = self._tracks.pop(event.request_id), event.completion.finish_reason
        yield {**_at(reason.value, "i", REQUESTS, track, now), "s": "t", "args": args}

    def _new_track(
        self, request_id: str, submitted_at: float, admitted_at: float
    ) -> Iterable[dict[str, Any]]:
        self._n_tracks += 1
        track = self._tracks[request_id] = self._n_tracks
        yield _name("thread_name", REQUESTS, track, request_id)
        yield _slice("queued", REQUESTS, track, submitted_at, admitted_at)

    def _write(self, events: Iterable[dict[str, Any]], head: str = "") -> None:
        if self._is_full:
            return
        try:
            self._file.write(head + "".join(f"{json.dumps(event)},\n" for event in events))
            self._file.flush()  # so that a crash loses the last tick at most
        except OSError as error:
            self._is_full = True
            logger.warning("the trace ends here: %s", error)


def _at(name: str, kind: str, pid: int, tid: int, at: float) -> dict[str, Any]:
    return {"name": name, "ph": kind, "pid": pid, "tid": tid, "ts": round(1e6 * at, 1)}


def _slice(
    name: str, pid: int, tid: int, start: float, end: float, args: dict[str, int] | None = None
) -> dict[str, Any]:
    event = {**_at(name, "X", pid, tid, start), "dur": round(1e6 * max(0.0, end - start), 1)}
    return event if args is None else {**event, "args": args}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
