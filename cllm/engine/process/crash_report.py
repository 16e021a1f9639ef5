"""The last crash of an engine's process on this machine, as `cllm doctor` shows it.

The report is one small JSON file in the state directory.  If it cannot be written, no crash is recorded.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cllm.engine.cache_directory import replace_json, state_file


@dataclass(frozen=True, slots=True)
class CrashReport:
    """Facts about a crash.

    Attributes
    ----------
    at : str
        Time in ISO 8601, UTC.
    model : str
        File of the model.
    cause : str
        Signal or exit status of the process, and its last words on standard error.
    n_requests : int
        Number of open requests.
    """

    at: str
    model: str
    cause: str
    n_requests: int

    @classmethod
    def of(cls, model: Path, cause: str, n_requests: int) -> Self:
        """Return the report of a crash that happened now."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(now, str(model), cause, n_requests)


def crash_file() -> Path:
    """Return the file that describes the last crash.

    Raises
    ------
    RuntimeError
        The home directory is unknown.
    """
    return state_file("last_crash.json")


def save_crash(report: CrashReport) -> None:
    """Save a report in place of the previous one; a file error is ignored."""
    with contextlib.suppress(OSError, RuntimeError):
        replace_json(crash_file(), asdict(report))


def last_crash() -> CrashReport | None:
    """Return the last crash; None if there was none, or its file cannot be read."""
    try:
        return CrashReport(**json.loads(crash_file().read_bytes()))
    except (OSError, ValueError, TypeError, RuntimeError):
        return None
