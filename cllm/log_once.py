"""The level of the log, and warnings that quote text of callers: each once, a limited number of each message."""

from __future__ import annotations

import logging
import os

N_CHARACTERS_MAX = 80  # of each quoted text
N_LINES_MAX = 64  # log lines with the same message

_said: dict[str, set[tuple[str, ...]]] = {}


def log_level() -> int | None:
    """Return the level that `CLLM_LOG_LEVEL` names; None if it is unset or names no level, which is logged."""
    name = os.environ.get("CLLM_LOG_LEVEL")
    level = logging.getLevelNamesMapping().get(name.upper()) if name else None
    if name and level is None:
        message = "CLLM_LOG_LEVEL is '%s', must be debug, info, warning or error"
        log_once(logging.getLogger("cllm"), message, name)
    return level


def log_once(logger: logging.Logger, message: str, *words: object) -> None:
    """Log a warning, unless it was logged before with the same words.  Any thread.

    After 64 lines with the same message, no more are logged.

    Parameters
    ----------
    message : str
        Format with a `%s` for each of the words.
    *words : object
        Texts to insert: their first 80 characters, with line breaks and control characters escaped.
    """
    shown = tuple(map(_shown, words))
    said = _said.setdefault(message, set())
    if shown in said or len(said) >= N_LINES_MAX:
        return
    said.add(shown)
    logger.warning(message, *shown)
    if len(said) == N_LINES_MAX:
        logger.warning("after %d of these lines, no more are logged", N_LINES_MAX)


def _shown(word: object) -> str:
    text = str(word)
    if len(text) > N_CHARACTERS_MAX:
        text = f"{text[:N_CHARACTERS_MAX]}…"
    return text if text.isprintable() else repr(text)[1:-1]
