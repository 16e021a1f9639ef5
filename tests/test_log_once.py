"""`log_once` escapes and shortens the text of callers, and limits how often it is logged."""

from __future__ import annotations

import logging

import pytest

from cllm.log_once import N_CHARACTERS_MAX, N_LINES_MAX, log_once

logger = logging.getLogger("cllm.server")


@pytest.mark.parametrize(
    "word", ["a\nb", "a\r\x1b[31mb", "a\x9b31mb", "a\u2028b", "a\u202eb", "a\x00b", "\ud800"]
)
def test_no_control_character_reaches_the_log(word: str, caplog: pytest.LogCaptureFixture) -> None:
    log_once(logger, "%s is left out", word)
    assert caplog.messages[0].isprintable()


def test_what_is_long_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    log_once(logger, "%s is left out", "x" * 10_000)
    assert len(caplog.messages[0]) < N_CHARACTERS_MAX + 20


def test_each_thing_is_logged_once_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for n in range(15_000):
            log_once(logger, "%s is left out", n)
    assert len(caplog.messages) == N_LINES_MAX + 1
    assert "no more are logged" in caplog.messages[-1]
    log_once(logger, "%s is ignored", 1)
    assert caplog.messages[-1] == "1 is ignored"
