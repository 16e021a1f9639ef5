"""Check of the last crash of an engine's process, from the report in the user's state directory."""

from __future__ import annotations

from collections.abc import Iterator

from cllm.doctor.findings import Check, Status
from cllm.engine.process.crash_report import crash_file, last_crash

N_CAUSE = 300  # characters of the last words of the process that are shown, from their end


def last_crash_check() -> Iterator[Check]:
    """Yield a warning with the time, model and cause of the last crash; nothing if there was none."""
    if (crash := last_crash()) is None:
        return
    how, _, words = crash.cause.partition(":")
    said = " ".join(words.split())[-N_CAUSE:]
    text = f"{crash.at}, {crash.model} with {crash.n_requests} requests: {how}"
    yield Check("last crash", Status.WARNING, f"{text}{said and f': {said}'} (in {crash_file()})")
