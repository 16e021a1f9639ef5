"""What a server writes to its log, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from cllm.server.operation.logs import JsonFormatter, _is_fault, configure_logging
from tests.server.conftest import running


@pytest.mark.full
def test_every_line_is_an_object_where_programs_read_them(tmp_path: Path) -> None:
    with running(tmp_path / "log", environment={"CLLM_LOG_FORMAT": "json"}) as server:
        assert server.generate("1+1=").json()["text"] == "2"
        assert server.stop() == 0
        said = [json.loads(line) for line in server.log.splitlines()]
    assert {"time", "level", "logger", "message"} == set(said[0])
    assert " at http://127.0.0.1:" in said[0]["message"]
    (access,) = [
        line for line in said if line["logger"] == "cllm.access" and line["level"] == "info"
    ]
    assert (access["path"], access["status"], access["model"]) == ("/generate", 200, "cllm-tiny")
    assert access["output_tokens"] > 0
    assert access["total_ms"] >= access["first_ms"] >= access["queued_ms"] >= 0
    assert any(line["message"] == "serving cllm-tiny.gguf" for line in said)
    assert any(": cleared KV cache" in line["message"] for line in said)


def test_an_unknown_format_of_the_log_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    monkeypatch.setenv("CLLM_LOG_FORMAT", "jsn")
    try:
        configure_logging()
        assert "CLLM_LOG_FORMAT is 'jsn', must be console or json" in capsys.readouterr().err
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]


def record_of(error: BaseException) -> logging.LogRecord:
    """The record of an exception that was caught."""
    try:
        raise error
    except BaseException:
        return logging.LogRecord("n", logging.ERROR, "f", 1, "a\n%s", ("b",), sys.exc_info())


def test_an_exception_is_a_part_of_its_line() -> None:
    line = JsonFormatter().format(record_of(ValueError("é")))
    assert "\n" not in line
    said = json.loads(line)
    assert said["message"] == "a\nb"
    assert said["exception"].endswith("ValueError: é")


@pytest.mark.parametrize(
    ("record", "is_fault"),
    [
        (record_of(ValueError()), True),
        (record_of(asyncio.CancelledError()), False),
        (
            logging.LogRecord("n", 40, "f", 1, "Traceback\nasyncio.CancelledError\n", (), None),
            False,
        ),
        (logging.LogRecord("n", 40, "f", 1, "Traceback\nValueError\n", (), None), True),
    ],
)
def test_what_is_given_up_when_the_server_ends_is_no_fault(
    record: logging.LogRecord, is_fault: bool
) -> None:
    assert _is_fault(record) is is_fault
