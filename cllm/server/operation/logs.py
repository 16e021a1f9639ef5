"""Logging of a server to stderr, as text or as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

from cllm.log_once import log_level

logger = logging.getLogger(__name__)
FORMATS = ("console", "json")


N_CHARACTERS_MAX = 8000  # of a message
# A terminal obeys these: C0 without tab and line feed, DEL, C1, and the Unicode line separators.
_CONTROLS = {
    n: f"\\x{n:02x}" for n in (*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029)
}


def contained(message: str) -> str:
    """Return a message cut to 8000 characters, with control characters escaped, except tabs and line feeds."""
    if len(message) > N_CHARACTERS_MAX:
        message = f"{message[:N_CHARACTERS_MAX]}… ({len(message):,} characters)"
    return message.translate(_CONTROLS)


class ConsoleFormatter(logging.Formatter):
    """Formatter for text: time, level and message; further lines of a message are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See `logging.Formatter`."""
        record.message = contained(record.message).replace("\n", "\n    ")
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Formatter for JSON: one object per record, on one line, with the `fields` of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": contained(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _is_fault(record: logging.LogRecord) -> bool:
    """Return False for a cancellation at the end of the server: it needs no traceback in the log."""
    if record.exc_info is not None:
        return not isinstance(record.exc_info[1], asyncio.CancelledError)
    # uvicorn logs the traceback of the lifespan as text.
    return not record.getMessage().rstrip().endswith("CancelledError")


def configure_logging() -> None:
    """Log to stderr; `CLLM_LOG_LEVEL` is `info` by default, `CLLM_LOG_FORMAT` is `console` (or `json`)."""
    handler = logging.StreamHandler(sys.stderr)
    form = os.environ.get("CLLM_LOG_FORMAT") or FORMATS[0]
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(ConsoleFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if (level := log_level()) is not None:
        logging.getLogger().setLevel(level)
    if form not in FORMATS:
        logger.warning("CLLM_LOG_FORMAT is %r, must be console or json", form)
    # Below warnings, llama.cpp, asyncio and urllib3 log so much that requests are hard to find.
    for name in ("asyncio", "cllm.llama", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # uvicorn warns of every request that is not HTTP: any client could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.error").addFilter(_is_fault)
