"""Logging of a server, for people or for programs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

LEVELS = ("critical", "error", "warning", "info", "debug")


N_CHARACTERS_MAX = 8000  # of a message
# Control characters but tabulators and line breaks, C1 and line separators too: a terminal obeys them.
_CONTROLS = {
    n: f"\\x{n:02x}" for n in (*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029)
}


def contained(message: str) -> str:
    """Return a message of limited length, without control characters except line breaks."""
    if len(message) > N_CHARACTERS_MAX:
        message = f"{message[:N_CHARACTERS_MAX]}… ({len(message):,} characters)"
    return message.translate(_CONTROLS)


class ConsoleFormatter(logging.Formatter):
    """Formats a record as one line; further lines of a message are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See `logging.Formatter`."""
        record.message = contained(record.message).replace("\n", "\n    ")
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": contained(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _is_fault(record: logging.LogRecord) -> bool:
    """Requests that are given up when the server ends are none, and no reason for a traceback."""
    if record.exc_info is not None:
        return not isinstance(record.exc_info[1], asyncio.CancelledError)
    return not record.getMessage().rstrip().endswith("CancelledError")  # of the lifespan, as text


def configure_logging() -> None:
    """Log to stderr, by `CLLM_LOG_LEVEL` and `CLLM_LOG_FORMAT` (`console` or `json`)."""
    level = os.environ.get("CLLM_LOG_LEVEL", "info").lower()
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("CLLM_LOG_FORMAT") == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(ConsoleFormatter())
    logging.basicConfig(
        level=level.upper() if level in LEVELS else "INFO", handlers=[handler], force=True
    )
    # What llama.cpp, the loop and connections say at these levels would bury the requests.
    for name in ("asyncio", "cllm.llama", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It warns of every request that is not HTTP: any client could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.error").addFilter(_is_fault)
