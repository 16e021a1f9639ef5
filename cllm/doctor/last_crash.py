"""The last crash of an engine's process that this machine remembers."""

from __future__ import annotations

from collections.abc import Iterator

from cllm.doctor.findings import Check, Status
from cllm.engine.process.crash_report import crash_file, last_crash

N_CAUSE = 300  # characters of it, from its end


def last_crash_check() -> Iterator[Check]:
    """Yield the check of the last crash, if there was one."""
    if (crash := last_crash()) is None:
        return
    how, _, words = crash.cause.partition(":")
    said = " ".join(words.split())[-N_CAUSE:]
    text = f"{crash.at}, {crash.model} with {crash.n_requests} requests: {how}"
    yield Check("last crash", Status.WARNING, f"{text}{said and f': {said}'} (in {crash_file()})")
