"""What a server takes, how much of it, how fast and from whom."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import ENDLESS, TIMEOUT_S, Server, ask, hasty, refusal_of, wait_until

HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = b'{"prompt": "1+1=", "temperature": 0}'
MIB = 1 << 20
# Far more than any of these costs on a busy machine; what each costs, `test_bodies.py` holds.
HANGS_S = 5.0


class Wire:
    """A connection of bytes, for what no client library would send."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10.0)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> Wire:
        """Send what the other side still takes."""
        with contextlib.suppress(ConnectionError):  # it may have answered and left: see `read`
            self._socket.sendall(data)
        return self

    def read(self) -> bytes:
        """Everything until the other side closes the connection."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while more := self._socket.recv(1 << 16):
                data += more
        return data

    def read_until(self, sign: bytes) -> None:
        """Everything up to these bytes."""
        data = b""
        while sign not in data:
            data += (more := self._socket.recv(1 << 16))
            assert more, data

    def read_status(self) -> int:
        """The status of the only answer; the connection is closed after it."""
        return status_of(self.read())

    def drip(self, data: bytes, every_s: float) -> bytes:
        """Send byte after byte until something comes back, and read that."""
        self._socket.settimeout(every_s)  # the wait for an answer is the pause between two bytes
        for byte in data:
            self._socket.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                return self._socket.recv(1 << 16)
        raise AssertionError("all of it was taken")


def status_of(answer: bytes) -> int:
    """The status of an answer on the wire."""
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer[9:12])


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two seconds for headers, half a second for bodies, four for idle connections."""
    path = tmp_path_factory.mktemp("impatient") / "log"
    with hasty(path, header_timeout_s=2, body_timeout_s=0.5, keep_alive_s=4) as server:
        yield server


@pytest.fixture(autouse=True)
def still_serving(server: Server) -> Iterator[None]:
    """Whatever was sent, the next one is served."""
    yield
    assert server.generate("1+1=").json()["text"] == "2"


@pytest.mark.parametrize("n_bytes", [4 * MIB + 1, 6 * MIB])
def test_a_body_that_says_that_it_is_too_large_is_413(server: Server, n_bytes: int) -> None:
    response = httpx.post(server.url + "/generate", content=b" " * n_bytes, timeout=TIMEOUT_S)
    assert str(4 * MIB) in refusal_of(response, 413)["message"]


def test_who_is_still_sending_hears_why_nobody_listens(server: Server) -> None:
    """Closed with bytes that nobody has read, a connection would be reset, the answer with it."""
    body = b" " * (4 * MIB + 1)
    with server.client() as client:
        statuses = {client.post("/generate", content=body).status_code for _ in range(20)}
    assert statuses == {413}


@pytest.mark.parametrize("said", [b"4194305", b"9" * 20])
def test_a_length_that_is_too_large_is_413_before_any_body(server: Server, said: bytes) -> None:
    with Wire(server) as wire:
        wire.send(HEAD + b"Content-Length: " + said + b"\r\n\r\n")
        assert wire.read_status() == 413


def test_a_chunked_body_is_413_while_it_streams_in(server: Server) -> None:
    """The end is never sent."""
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with Wire(server) as wire:
        wire.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        wire.send(chunk * (4 * MIB // 0x10000 + 1))
        assert wire.read_status() == 413


def test_a_body_longer_than_it_says_is_cut_there(server: Server) -> None:
    with Wire(server) as wire:
        wire.send(HEAD + b"Content-Length: 10\r\n\r\n" + b" " * (8 * MIB))
        answers = wire.read().split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers[1:]] == [b"400", b"400"]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(b"X-Long: " + b"x" * (40 << 10) + b"\r\n", id="long"),
        pytest.param(b"X-Longer: " + b"x" * MIB + b"\r\n", id="longer"),
        pytest.param(b"X: y\r\n" * (8 << 10), id="many"),
    ],
)
def test_headers_past_the_limit_are_431(server: Server, lines: bytes) -> None:
    with Wire(server) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
        assert wire.read_status() == 431


def test_a_query_counts_as_a_header(client: httpx.Client) -> None:
    refusal_of(client.get("/health?" + "x" * (40 << 10)), 431)


@pytest.mark.full
def test_a_body_that_goes_on_after_its_answer_ends_the_connection(impatient: Server) -> None:
    with Wire(impatient) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        wire.read_until(b"}")
        wire.send(b" ")  # uvicorn stops its own clock here
        assert wire.read() == b""


def test_nonsense_after_an_answer_ends_the_connection(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Wire(server) as wire:
        wire.send(head)
        wire.read_until(b"}")
        assert wire.send(b"zz\r\n").read() == b""
    assert "Traceback" not in server.log


def test_headers_that_never_end_are_431(server: Server) -> None:
    with Wire(server) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * (33 << 10))
        assert wire.read_status() == 431


@pytest.mark.parametrize("n_sends", [1, 2])
def test_trailers_that_never_end_are_431_however_they_come(server: Server, n_sends: int) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n \r\n0\r\n"
    trailers = b"X: y\r\n" * (8 << 10)
    with Wire(server) as wire:
        for part in [head + trailers] if n_sends == 1 else [head, trailers]:
            wire.send(part)
        assert wire.read_status() == 431


def test_trailers_are_no_headers(server: Server) -> None:
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"%x\r\n%b\r\n0\r\nX-Request-ID: theirs\r\nHost: evil\r\n\r\n" % (len(BODY), BODY)
    with Wire(server) as wire:
        answer = wire.send(head + body).read()
    assert status_of(answer) == 200
    assert b"theirs" not in answer


GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "early", [GET_HEALTH, GET_HEALTH * 5000, b"GET /he", b"nonsense\r\n\r\n", b"x" * (1 << 20)]
)
def test_what_does_not_wait_for_an_answer_is_refused_after_it(server: Server, early: bytes) -> None:
    length = b"Content-Length: %d\r\n\r\n" % len(BODY)
    with Wire(server) as wire:
        answers = wire.send(HEAD + length + BODY + early).read().split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers] == [b"", b"200", b"400"]
    assert b'"n_preemptions"' in answers[1]


def test_many_requests_for_http_2_at_once_are_one_and_a_refusal(server: Server) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with Wire(server) as wire:
        many = GET_HEALTH.replace(b"\r\n\r\n", b"\r\n" + upgrade) * 500
        answers = wire.send(many).read().split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers] == [b"", b"200", b"400"]


def test_a_client_that_leaves_is_heard_though_it_has_sent_more(server: Server) -> None:
    body = json.dumps({**ENDLESS, "stream": True, "max_tokens": 4000}).encode()

    def n_cancelled() -> float:
        return server.metrics()["cllm_requests_finished_total{reason=cancelled}"]

    before = n_cancelled()
    with Wire(server) as wire:
        wire.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + GET_HEALTH)
        wire.read_until(b"data: ")
    wait_until(lambda: n_cancelled() > before, "it is cancelled")


@pytest.mark.parametrize("cut", [0, 1, 60, 150])
def test_a_request_that_would_rather_be_http_2_is_served_with_its_body(
    server: Server, cut: int
) -> None:
    """What Java's client sends: the body follows before anybody has agreed to anything."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    request = HEAD + upgrade + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with Wire(server) as wire:
        for _ in range(2):
            wire.send(request[:cut]).send(request[cut:]).read_until(b'"n_preemptions":0}}')
    assert "upgrade" not in server.log.lower()


def test_slow_headers_are_408(impatient: Server) -> None:
    with Wire(impatient) as wire:
        assert status_of(wire.drip(b"GET /health HTTP/1.1\r\nX: " + b"y" * 999, 0.05)) == 408
    with Wire(impatient) as wire:
        assert wire.read_status() == 408  # not a byte


def test_slow_headers_after_a_request_are_408(impatient: Server) -> None:
    with Wire(impatient) as wire:
        wire.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        wire.read_until(b'"n_preemptions":0}}')
        assert wire.send(b"GET /he").read_status() == 408


def test_a_slow_body_is_408(impatient: Server) -> None:
    with Wire(impatient) as wire:
        wire.send(HEAD + b"Content-Length: 999\r\n\r\n")
        assert status_of(wire.drip(b" " * 999, 0.05)) == 408
    with Wire(impatient) as wire:
        wire.send(HEAD + b"Content-Length: 999\r\n\r\n")
        assert wire.read_status() == 408


def test_an_idle_connection_is_closed(impatient: Server) -> None:
    with Wire(impatient) as wire:
        answer = wire.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").read()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status_of(answer) == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "identity, gzip"])
def test_compressed_bodies_are_not_taken(client: httpx.Client, encoding: str) -> None:
    headers = {"Content-Encoding": encoding}
    response = client.post("/generate", content=b"\x1f\x8b", headers=headers)
    assert "content-encoding" in refusal_of(response)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"nope", b"\xff\xfe", b'{"prompt": "1+1="', b"1+1=", b'{"prompt": "\xff"}', b"{]", b"NaN",
        b'{"prompt": "\\ud800"}', b"{'prompt': 1}", b'{"prompt": "1", "min_p": NaN}',
        b'{"prompt": "1", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_what_is_not_json_is_400_and_says_so(client: httpx.Client, body: bytes) -> None:
    assert "JSON" in refusal_of(client.post("/generate", content=body))["message"]


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"3", b'"text"', b"true"])
def test_what_is_no_object_is_400(client: httpx.Client, body: bytes) -> None:
    refusal_of(client.post("/generate", content=body))


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"prompt":[', b'{"json_schema":{"a":'])
def test_deep_json_is_400(client: httpx.Client, path: str, opening: bytes) -> None:
    refusal_of(client.post(path, content=opening * 100_000))


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"GET /h\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nnot a chunk\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: localhost\r\nHost: evil\r\n\r\n",
    ],
)
def test_what_is_not_http_is_400(server: Server, head: bytes) -> None:
    with Wire(server) as wire:
        assert wire.send(head).read_status() == 400


USER = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"n": 17}, "n"),
        ("/v1/completions", {"n": 2**40}, "n"),
        ("/v1/chat/completions", {"n": 17}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 65}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 5, "n": 13}, "prompt"),
        ("/generate", {"logprobs": 21}, "logprobs"),
        ("/generate", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/generate", {"stop": [str(n) for n in range(65)]}, "stop"),
        ("/generate", {"stop": "x" * 1025}, "stop"),
        ("/generate", {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ("/generate", {"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers"),
        ("/generate", {"regex": "x" * (17 << 10)}, "regex"),
        ("/generate", {"json_schema": {"enum": ["x" * (300 << 10)]}}, "json_schema"),
        ("/v1/chat/completions", {"messages": [USER] * 1025}, "messages"),
        ("/generate", {"prompt": "x" * 5000}, "prompt"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "tokens"),
    ],
)
def test_a_request_that_asks_for_too_much_is_told_the_field(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    basis: dict[str, Any] = {"prompt": "1+1="}
    if "chat" in path:
        basis = {"messages": [USER]}
    if "detokenize" in path:
        basis = {}
    assert refusal_of(client.post(path, json={**basis, **fields}))["param"] == param


def test_other_methods_and_paths_have_their_own_errors(client: httpx.Client) -> None:
    response = client.get("/generate")
    refusal_of(response, 405)
    assert response.headers["Allow"] == "POST"
    refusal_of(client.post("/health"), 405)
    assert refusal_of(client.get("/nowhere"), 404)["type"] == "not_found_error"
    for path in ("/v1/audio/speech", "/%2e%2e/etc/passwd", "/%00", "/%ff"):
        refusal_of(client.get(path), 404)
    # As it stands: given as text, it would be a host.
    refusal_of(client.get(client.base_url.copy_with(raw_path=b"//generate")), 404)


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a" * MIB, "with_pieces": True}),
        ("/generate", {"prompt": ["x"] * 800_000}),
        ("/generate", {"prompt": "a", "logit_bias": {str(n): "x" for n in range(200_000)}}),
        ("/generate", {f"k{n}": 1 for n in range(250_000)}),
    ],
    ids=["pieces", "many wrong tokens", "many wrong biases", "many unknown fields"],
)
def test_no_request_keeps_the_others_waiting(server: Server, path: str, body: Any) -> None:
    """What one request costs in the event loop, all others wait for."""
    is_done = threading.Event()
    statuses: list[int] = []

    def send() -> None:
        try:
            statuses.append(httpx.post(server.url + path, json=body, timeout=60).status_code)
        finally:
            is_done.set()

    sender = threading.Thread(target=send)
    with server.client() as other:
        sender.start()
        longest_s = 0.0
        while not is_done.is_set():
            begun_at = time.monotonic()
            ask(other, max_tokens=1)
            longest_s = max(longest_s, time.monotonic() - begun_at)
    sender.join()
    assert statuses[0] in (200, 400)
    assert longest_s < HANGS_S


@pytest.mark.parametrize(
    "path",
    ["/", "/health", "/live", "/docs", "/static/swagger-ui.css", "/page/main.js", "/nowhere"],
)
def test_a_head_request_ends_with_its_headers_and_the_connection_is_of_use(
    server: Server, path: str
) -> None:
    head = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    last = GET_HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with Wire(server) as wire:
        for _ in range(3):
            wire.send(head).read_until(b"\r\n\r\n")
        answer = wire.send(last).read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"status":"ok"' in answer
