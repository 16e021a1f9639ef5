"""Thousands of requests more leave nothing behind, and what they could leave would be seen.

Without sanitizers; `python -m tests.reliability.leaks` is the same with them.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import pytest

from benchmarks.measure import malloc_mib
from tests.reliability.leak_workload import KINDS, ROUND, Reading
from tests.reliability.leaks import (
    MAX_LOST_BYTES,
    MAX_MALLOC_BYTES,
    N_WARM_UP,
    Outcome,
    Served,
    serve_in_child,
)
from tests.reliability.memory_faults import LEAK
from tests.reliability.sanitized import Findings, Report

pytestmark = pytest.mark.full

needs_mallinfo = pytest.mark.skipif(
    math.isnan(malloc_mib()), reason="only glibc says what malloc has given out"
)


@needs_mallinfo
def test_thousands_of_requests_more_leave_nothing_behind() -> None:
    # glibc's caches of the encoder's threads fill in the first two thousand.
    stops = [N_WARM_UP + 1000 * i for i in range(4)]
    n_requests = stops[-1]
    served = serve_in_child(stops)
    assert served.complaints() == []
    # Each kind is asked as often as each other, and none of them ended in another way.
    assert len(served.ends) == len(KINDS)
    assert set(served.ends.values()) == {n_requests // len(KINDS)}


@needs_mallinfo
def test_samplers_that_nobody_frees_are_seen() -> None:
    served = serve_in_child([ROUND, 2 * ROUND], loses_samplers=True)
    assert len(served.complaints()) == 1
    assert "bytes of malloc" in served.complaints()[0]


NOTHING = Reading(0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("growth", "said"),
    [
        (replace(NOTHING, malloc_bytes=MAX_MALLOC_BYTES + 1), "bytes of malloc"),
        (replace(NOTHING, live_bytes=MAX_MALLOC_BYTES + 1), "live bytes"),
        (replace(NOTHING, python_blocks=2_000), "blocks of Python"),
        (replace(NOTHING, objects=100), "objects"),
        (replace(NOTHING, descriptors=1), "descriptors"),
        (replace(NOTHING, threads=1), "threads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_of_growth_is_a_complaint(growth: Reading, said: str) -> None:
    assert Served([NOTHING, NOTHING], {}).complaints() == []
    (complaint,) = Served([NOTHING, growth], {}).complaints()
    assert said in complaint


def test_what_grows_once_is_no_leak() -> None:
    grown = replace(NOTHING, malloc_bytes=MAX_MALLOC_BYTES + 1)
    assert Served([NOTHING, grown, grown], {}).complaints() == []
    twice = replace(NOTHING, malloc_bytes=2 * (MAX_MALLOC_BYTES + 1))
    assert len(Served([NOTHING, grown, twice], {}).complaints()) == 1


def outcome(before: Findings, after: Findings) -> Outcome:
    readings = [NOTHING, replace(NOTHING, n_requests=1000)]
    looks = {"0": before, "1000": after}
    return Outcome(Served(readings, {}), looks, Findings([], {}, []), unseen_faults=[])


def test_what_the_requests_lose_is_a_complaint() -> None:
    python = Report(LEAK, "leak", "PyFloat_FromDouble", "", is_native=False, n_bytes=24)
    native = replace(python, place="llama_sampler_init", is_native=True)
    clean, once, often = (Findings([], {}, [python] * n) for n in (0, 1, MAX_LOST_BYTES // 24 + 1))
    assert outcome(clean, clean).complaints() == []
    assert outcome(clean, once).complaints() == [], "a local variable"
    assert outcome(often, often).complaints() == [], "Python's, and from before the requests"
    (complaint,) = outcome(clean, often).complaints()
    assert complaint == "1,008 bytes more are lost, not at most 1,000"
    assert any(
        "llama_sampler_init" in line
        for line in outcome(clean, Findings([native], {}, [])).complaints()
    )
    unseen = replace(outcome(clean, clean), unseen_faults=["lose: LeakSanitizer"])
    assert unseen.complaints() == ["made on purpose and not seen: lose: LeakSanitizer"]


def test_without_sanitizers_no_live_bytes_are_counted() -> None:
    has_them = hasattr(ctypes.CDLL(None), "__sanitizer_get_current_allocated_bytes")
    assert (Reading.now(0).live_bytes > 0) == has_them
