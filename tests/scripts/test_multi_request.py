"""What scripts/multi_request.sh promises: the embedded model passes, and each thing that it looks for
makes it fail.

For that, a small program stands in for `cllm`.  It serves with one fault, or with none.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "multi_request.sh"
TIMEOUT_S = 120
REQUESTS = [
    f"{n}-{i}" for n, last in (("three", 3), ("ten", 10), ("five", 5)) for i in range(1, last + 1)
]

STAND_IN = r"""
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

fault = sys.argv[sys.argv.index("--fault") + 1] if "--fault" in sys.argv else None
assert sys.argv[1] == "serve" and sys.argv[-2:] == ["--port", "0"], sys.argv
assert os.environ["CLLM_LOG_LEVEL"] == "debug" and "CLLM_API_KEY" not in os.environ


def say(line, level="DEBUG"):
    sys.stderr.write(f"2026-01-31 12:00:00,000 {level:7} {line}\n")


def story_of(name):
    story = ["new, 5 prompt tokens", "prefill in <Slot>", "finished, stop", "cleared KV cache"]
    if name == "three-2":
        if fault == "is not cleared":
            story.pop()
        if fault == "is cleared before prefill":
            story.insert(1, story.pop())
        if fault == "is computed twice":
            story[2:2] = [story[3], story[1]]
    return story


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        assert self.path == "/health"
        self.answer(503 if fault == "is never healthy" else 200, {})

    def do_POST(self):
        name = self.headers["X-Request-ID"]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/generate" and body["max_tokens"] == 10 and body["prompt"] == "1+1="
        row, i = name.split("-")
        growth = 1 + 6 * (int(i) - 1) / 9 if row == "ten" else 1
        total_ms, text, status, reason = 1.0, "2", 200, "stop"
        if fault == "says that it gets slower":
            total_ms = 20 * growth
        if fault == "gets slower":
            time.sleep(0.2 * growth)
        if name == "three-3":
            if fault == "dies":
                os._exit(139)
            if fault == "is started again":
                say("the engine's process ended, and is started again: SIGSEGV", "ERROR")
                say("engine process 2")
        if name == "ten-4":
            if fault == "hangs":
                os.write(int(os.environ["HANGS"]), b"%d" % os.getpid())
                time.sleep(1000)
            if fault == "has inconsistent positions":
                say("init: the tokens have inconsistent sequence positions: X = 3, Y = 0")
            if fault == "has a traceback":
                say("Traceback (most recent call last):")
            if fault == "has an error":
                say("the KV cache bookkeeping disagrees", "ERROR")
            if fault == "answers with 500":
                status = 500
            if fault == "finishes with an error":
                reason = "error"
            if fault == "answers nothing":
                text = ""
        if name == "five-3" and fault == "answers differently":
            text = "\"3\""
        for line in story_of(name):
            say(f"request {name}: {line}")
        timings = {"queued_ms": 0.1, "total_ms": total_ms}
        self.answer(status, {"id": name, "text": text, "finish_reason": reason, "timings": timings})


if fault == "ends":
    sys.exit("cllm: cannot load it: " + " ".join(sys.argv[1:]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3 if fault == "ends with 3" else 0))
with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    address = "http://127.0.0.1:%d" % server.server_port
    print(f"cllm: stand-in.gguf at {address} (docs at {address}/docs)", file=sys.stderr)
    say(f"engine process {os.getpid()}")
    server.serve_forever()
"""


@contextmanager
def started(
    tmp_path: Path, *arguments: str, pass_fds: tuple[int, ...], **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """The script at work; its files are under `tmp_path`."""
    # No signal is ignored, even if pytest's own parent ignores some.
    command = ["env", "--default-signal", str(SCRIPT), *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        env={
            **os.environ, "TMPDIR": str(tmp_path), "CLLM_SERVE_OPTIONS": "",
            # Not for this server, and must not reach it.
            "CLLM_API_KEY": "secret", "http_proxy": "http://127.0.0.1:9", **environment,
        },
    ) as script:  # fmt: skip
        try:
            yield script
        finally:
            script.terminate()  # it stops its server


def run(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script from beginning to end."""
    with started(tmp_path, *arguments, pass_fds=(), **environment) as script:
        out, err = script.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(script.args, script.returncode, out, err)


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """The command that stands in for `cllm`."""
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return f"{sys.executable} -W error {path}"


# A machine that is busy now and then changes times: a test judges none, or only those that its fault changes.
ANY_TIMES = {"SERVER_NOISE_MS": "60000", "CURL_NOISE_MS": "60000"}
JUDGED_TIMES = {
    "gets slower": {"SERVER_NOISE_MS": "60000"},
    "says that it gets slower": {"CURL_NOISE_MS": "60000"},
}


def run_with(stand_in: str, tmp_path: Path, fault: str) -> subprocess.CompletedProcess[str]:
    """The script on a server with a fault."""
    times = JUDGED_TIMES.get(fault, ANY_TIMES)
    return run(tmp_path, "-", "0", "--", "--fault", fault, CLLM=stand_in, **times)


def table(out: str) -> list[list[str]]:
    """The rows of the table: request, status, both times, finish reason, text."""
    return [line.split() for line in out.splitlines() if re.match(r"(three|ten|five)-\d", line)]


def logs_in(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("multi_request.*"))


def test_the_embedded_model_passes(tmp_path: Path) -> None:
    cllm = f"{sys.executable} -m cllm"
    options = {"CLLM_SERVE_OPTIONS": "--n-threads 1", **ANY_TIMES}
    done = run(tmp_path, "embedded", "0", CLLM=cllm, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = table(done.stdout)
    assert [row[0] for row in rows] == REQUESTS
    for _, status, server_ms, curl_ms, reason, text in rows:
        assert (status, reason, text) == ("200", "stop", "2")
        assert 0 < float(server_ms) <= float(curl_ms)
    assert done.stdout.splitlines()[-1].startswith("PASS: 18 requests")


@pytest.mark.parametrize("fault", ["none", "is computed twice"])
def test_a_server_without_a_fault_passes_and_leaves_nothing(
    stand_in: str, tmp_path: Path, fault: str
) -> None:
    done = run_with(stand_in, tmp_path, fault)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [row[0] for row in table(done.stdout)] == REQUESTS
    assert not logs_in(tmp_path)


# What is said is compared from the beginning of each line.
FAULTS = [
    ("gets slower", ["by curl: times grow, the median from"]),
    (
        "says that it gets slower",
        ["by the server: times grow, the median from 46.7 ms to 113.3 ms"],
    ),
    ("has inconsistent positions", ["in the log: 2026.* inconsistent sequence positions: X = 3"]),
    ("has a traceback", ["in the log: .* Traceback"]),
    ("has an error", ["in the log: .* ERROR +the KV cache bookkeeping disagrees"]),
    ("is not cleared", ["in the log: the lines of three-2 are: new prefill finished$"]),
    ("is cleared before prefill", ["in the log: the lines of three-2 are: new cleared prefill"]),
    ("answers differently", [r"""five-3: answers '\\"3\\"', others before it '2'"""]),
    ("answers nothing", ['ten-4: not what was asked for: {"id"']),
    ("answers with 500", ['ten-4: HTTP 500 {"id"']),
    ("finishes with an error", ["ten-4: finish_reason is 'error'"]),
    ("ends with 3", ["the server's exit code is 3"]),
    (
        "is started again",
        [
            r"more than one engine process: \d+, 2$",
            "in the log: .* the engine's process ended, and is started again: SIGSEGV",
            "in the log: .* ERROR",
        ],
    ),
    (
        "dies",
        [
            "the server ended by itself",
            "the server's exit code is 139",
            "three-3: HTTP 000",
            r"curl: \(52\) Empty reply from server",
            "the server ended after 3 of 18 requests",
            "in the log: the lines of three-3 are:$",
        ],
    ),
]


@pytest.mark.parametrize(("fault", "reasons"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_a_fault_is_told_and_the_log_kept(
    stand_in: str, tmp_path: Path, fault: str, reasons: list[str]
) -> None:
    done = run_with(stand_in, tmp_path, fault)
    assert (done.returncode, done.stderr) == (1, "")
    told = re.findall("^wrong: (.*)", done.stdout, re.MULTILINE)
    assert len(told) == len(reasons), done.stdout
    for said, reason in zip(told, reasons, strict=True):
        assert re.match(reason, said)
    (directory,) = logs_in(tmp_path)
    verdict = f"FAIL: {len(told)} wrong, see above; the log is {directory}/log"
    assert done.stdout.splitlines()[-1] == verdict


def test_a_server_that_is_never_healthy_gets_no_request(stand_in: str, tmp_path: Path) -> None:
    arguments = ("-", "0", "--", "--fault", "is never healthy")
    done = run(tmp_path, *arguments, CLLM=stand_in, START_TIMEOUT_S="1")
    assert (done.returncode, done.stderr) == (1, "")
    assert not table(done.stdout)
    assert "\nwrong: the server: not healthy within 1 s\n" in done.stdout


def test_where_the_server_ends_at_once_its_last_words_are_shown(
    stand_in: str, tmp_path: Path
) -> None:
    model = tmp_path / "a model.gguf"
    model.touch()
    done = run(tmp_path, str(model), "0", "--", "--fault", "ends", CLLM=stand_in)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[:-1] == [
        "The last lines of its log:",
        f"cllm: cannot load it: serve --fault ends --model-path {model} --port 0",
        "wrong: the server: ended before it was healthy",
        "wrong: the server's exit code is 1",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_middle_of_a_request_stops_the_server(
    stand_in: str, tmp_path: Path, number: signal.Signals
) -> None:
    reading, writing = os.pipe()
    arguments = ("-", "0", "--", "--fault", "hangs")
    with (
        os.fdopen(reading, "rb", 0) as pipe,
        started(
            tmp_path, *arguments, pass_fds=(writing,), CLLM=stand_in, HANGS=str(writing)
        ) as script,
    ):
        os.close(writing)
        # Comes when the request is there; nothing comes if all who could write have ended.
        server = int(pipe.read(10))
        script.send_signal(number)
        _, err = script.communicate(timeout=TIMEOUT_S)
    assert script.returncode == 128 + number
    assert err == "multi_request.sh: interrupted; the server is stopped\n"
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
    assert not logs_in(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which MODEL?"),
        (["no/such.gguf"], "no such file: no/such.gguf"),
        (["-", "http"], "PORT is a number, not http"),
        (["-", "65536"], "PORT is 65536, must be at most 65535"),
        (["-", "0", "more"], "not understood: more"),
        (["--fast", "-"], "unknown option: --fast"),
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run(tmp_path, *arguments, CLLM="false")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"multi_request.sh: {message} (see -h)\n"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CLLM", "no-such-cllm", "no such command: no-such-cllm"),
        ("START_TIMEOUT_S", "soon", "START_TIMEOUT_S is a number of seconds, not soon"),
        ("CURL_NOISE_MS", "much", "CURL_NOISE_MS is a number of milliseconds, not much"),
    ],
)
def test_a_wrong_environment_is_wrong_usage(
    tmp_path: Path, name: str, value: str, message: str
) -> None:
    done = run(tmp_path, "-", **{"CLLM": "false", name: value})
    assert (done.returncode, done.stderr) == (2, f"multi_request.sh: {message} (see -h)\n")


def test_help_says_how_to_use_it(tmp_path: Path) -> None:
    done = run(tmp_path, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: scripts/multi_request.sh MODEL [PORT] [-- OPTION...]\n")
