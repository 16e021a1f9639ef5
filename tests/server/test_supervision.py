"""`cllm serve` under a supervisor: sockets, certificates, proxies, reloads, drains and what the log says of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from cllm import EngineConfig, InvalidArgumentError
from cllm.server import ServerConfig, create_app
from cllm.server.operation.access import AccessLog
from cllm.server.operation.supervisor import notify
from cllm.server.serving import check_certificate, listen
from cllm.testing import FakeEngine
from tests.server.conftest import Server, running, wait_until


# --- Where it listens ------------------------------------------------------------------------
@pytest.mark.full
def test_a_unix_socket_serves_and_the_one_of_a_server_that_has_ended_is_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cllm.sock"
    for _ in range(2):
        with Server(tmp_path / "log", "--uds", str(path)) as server:
            assert server.url == f"unix:{path}"
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                wait_until(lambda: client.get("/readyz").status_code == 200, "the model")
                body = {"prompt": "1+1=", "temperature": 0}
                assert client.post("/generate", json=body).json()["text"] == "2"
        assert path.is_socket()  # nothing listens there any more


def test_a_socket_in_use_and_a_file_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cllm.sock"
    with listen(ServerConfig(uds=str(path))), pytest.raises(OSError, match="in use"):
        listen(ServerConfig(uds=str(path)))
    file = tmp_path / "file"
    file.write_text("mine")
    for taken in (file, tmp_path):
        with pytest.raises(OSError, match="no socket"):
            listen(ServerConfig(uds=str(taken)))
    assert file.read_text() == "mine"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own issuer, and its key."""
    directory = tmp_path_factory.mktemp("certificate")
    files = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(files[1]), "-out", str(files[0])],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


@pytest.mark.full
def test_a_certificate_makes_it_https(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    with Server(tmp_path / "log", "--ssl-certfile", cert, "--ssl-keyfile", key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.url, verify=context) as client:
            wait_until(lambda: client.get("/readyz").status_code == 200, "the model")
            with client.stream(
                "POST", "/generate", json={"prompt": "1+1=", "stream": True}
            ) as said:
                assert b"data: [DONE]" in said.read()


@pytest.mark.full
def test_a_client_that_keeps_its_connection_open_does_not_delay_the_end_of_a_server_with_tls(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = map(str, certificate)
    context = ssl.create_default_context(cafile=cert)
    with (
        Server(tmp_path / "log", "--ssl-certfile", cert, "--ssl-keyfile", key) as server,
        httpx.Client(base_url=server.url, verify=context) as client,
    ):
        wait_until(lambda: client.get("/readyz").status_code == 200, "the model")
        server.process.terminate()
        assert server.process.wait(25) == 0  # asyncio waits 30 s for the client's end of TLS


def test_a_certificate_that_cannot_be_used_is_rejected(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = map(str, certificate)
    check_certificate(ServerConfig())
    check_certificate(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    for wrong, field in (
        (ServerConfig(ssl_keyfile=key), "ssl_keyfile"),
        (ServerConfig(ssl_certfile=cert), "ssl_certfile"),
        (ServerConfig(ssl_certfile="/nowhere/cert.pem"), "ssl_certfile"),
    ):
        with pytest.raises(InvalidArgumentError, match=field):
            check_certificate(wrong)


@pytest.mark.parametrize(("given", "kept"), [(None, None), ("/llm/", "/llm"), ("/a/b", "/a/b")])
def test_a_root_path_has_no_slash_at_its_end(given: str | None, kept: str | None) -> None:
    assert ServerConfig(root_path=given).root_path == kept


@pytest.mark.parametrize("given", ["", "llm", "/?x", "/ä", "/a b", 3])
def test_what_is_no_root_path_is_rejected(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="root_path"):
        ServerConfig(root_path=given)


@pytest.mark.full
def test_a_proxy_serves_it_under_a_path(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "log", "--root-path", "/llm") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        wait_until(lambda: client.get("/readyz").status_code == 200, "the model")
        # The proxy has removed /llm from the path; the documentation has to ask for it.
        assert "/llm/openapi.json" in client.get("/docs").text
        said = client.post("/v1/completions", json={"prompt": "1+1=", "temperature": 0})
        assert said.json()["choices"][0]["text"] == "2"


# --- The supervisor --------------------------------------------------------------------------
def test_states_reach_a_supervisor_and_without_one_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1")
        assert supervisor.recv(100) == b"READY=1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        name = f"cllm-test-notify-{os.getpid()}"
        supervisor.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("STOPPING=1")
        assert supervisor.recv(100) == b"STOPPING=1"
    notify("STOPPING=1")
    assert f"cannot notify @{name}" in caplog.text


@pytest.mark.full
def test_an_operators_hour_loses_no_token(tmp_path: Path) -> None:
    """Start under supervision, reload the model twice under streams, and stop under streams."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "CLLM_ADMIN_KEY": "admin"}
        options = ("--n-seq-max", "64", "--n-ctx", "65536", "--drain-timeout", "200")
        with running(tmp_path / "log", *options, environment=environment) as server:
            assert supervisor.recv(100) == b"READY=1"
            answers: list[str] = []
            begun = threading.Semaphore(0)

            def ask() -> None:
                body = {
                    "prompt": "count:1..80",
                    "temperature": 0,
                    "stream": True,
                    "max_tokens": 400,
                }
                url, pieces = f"{server.url}/v1/completions", list[str]()
                with httpx.stream("POST", url, json=body, timeout=120) as stream:
                    for line in stream.iter_lines():
                        if line.startswith("data: {"):
                            pieces.append(json.loads(line[6:])["choices"][0]["text"])
                            if len(pieces) == 1:
                                begun.release()
                answers.append("".join(pieces))

            def asking(n: int) -> list[threading.Thread]:
                """Threads whose streams have all begun."""
                threads = [threading.Thread(target=ask) for _ in range(n)]
                for thread in threads:
                    thread.start()
                for _ in threads:
                    assert begun.acquire(timeout=60)
                return threads

            threads = asking(50)
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: server.log.count("reloaded cllm-tiny.gguf in") == 1, "a reload", 90)
            threads += asking(25)
            headers = {"Authorization": "Bearer admin"}
            said = httpx.post(f"{server.url}/admin/reload", headers=headers, timeout=120)
            assert said.status_code == 200, said.text
            assert said.json()["model"] == "cllm-tiny"
            threads += asking(25)
            server.process.send_signal(signal.SIGTERM)
            assert supervisor.recv(100) == b"STOPPING=1"
            for thread in threads:
                thread.join()
            assert server.process.wait(60) == 0
            assert answers == [" ".join(map(str, range(1, 81)))] * 100
            assert ", 0 requests were cancelled" in server.log


@pytest.mark.anyio
async def test_a_reload_over_http_needs_the_admin_key_and_not_the_api_key() -> None:
    async def status(config: ServerConfig, key: str) -> int:
        async with FakeEngine(lambda _: "x") as engine:
            transport = httpx.ASGITransport(create_app(engine, config))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                headers = {"Authorization": f"Bearer {key}"}
                return (await client.post("/admin/reload", headers=headers)).status_code

    assert await status(ServerConfig(), "x") == 404
    config = ServerConfig(api_key="api", admin_key="admin")
    assert await status(config, "api") == 401
    assert await status(config, "admin") == 200


@pytest.mark.full
def test_several_models_are_ready_at_once_and_all_loaded_ones_are_read_again(
    tmp_path: Path,
) -> None:
    model = EngineConfig().model_path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "CLLM_ADMIN_KEY": "admin"}
        options = ("-m", f"a={model}", "-m", f"b={model}", "-m", f"c={model}")
        with Server(tmp_path / "log", *options, environment=environment) as server:
            assert supervisor.recv(100) == b"READY=1"
            for name in ("a", "b"):
                assert server.generate("1+1=", model=name).json()["text"] == "2"
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: server.log.count("reloaded cllm-tiny.gguf in") == 2, "reloads", 60)
            headers = {"Authorization": "Bearer admin"}
            url = f"{server.url}/admin/reload"
            said = httpx.post(url, params={"model": "b"}, headers=headers, timeout=60)
            assert (said.status_code, said.json()["model"]) == (200, "b")
            assert httpx.post(url, params={"model": "b"}, timeout=60).status_code == 401
        assert supervisor.recv(100) == b"STOPPING=1"


@pytest.mark.full
def test_a_reload_that_fails_is_logged_and_the_model_goes_on(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(EngineConfig().model_path.read_bytes())
    quiet = {"CLLM_LOG_LEVEL": "info"}
    with running(tmp_path / "log", "-m", str(model), environment=quiet) as server:
        assert server.generate("1+1=").json()["text"] == "2"
        # A file that is mapped must be replaced, not written to.
        (tmp_path / "other").write_bytes(b"GGUF, but not really")
        (tmp_path / "other").replace(model)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the model is not reloaded: " in server.log, "the failure")
        assert server.generate("1+1=").json()["text"] == "2"


# --- The log ---------------------------------------------------------------------------------
@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with FakeEngine(lambda _: "abc") as engine:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig(model_name="m")))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


def fields_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Level and fields of each line about a request."""
    records = [record for record in caplog.records if record.name == "cllm.access"]
    return [(record.levelname, record.fields) for record in records]  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_each_request_is_a_line_with_what_it_took(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cllm.access")
    headers = {"X-Request-ID": "mine"}
    await http.post("/v1/completions", json={"prompt": "hi", "n": 2}, headers=headers)
    await http.post("/generate", json={"prompt": "hi", "stream": True}, headers=headers)
    await http.post("/generate", json={"prompt": 1})
    await http.get("/health")
    (first, second, third) = [fields for level, fields in fields_of(caplog) if level == "INFO"]
    assert (first["request_id"], first["status"], first["model"]) == ("mine", 200, "m")
    assert first["output_tokens"] == 2 * second["output_tokens"] > 0
    assert second["total_ms"] >= second["first_ms"] >= second["queued_ms"] >= 0
    assert (third["path"], third["status"], third["is_complete"]) == ("/generate", 400, True)
    assert "model" not in third
    assert "status=200" in caplog.text


@pytest.mark.anyio
async def test_probes_are_lines_for_debugging_alone(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cllm.access")
    for path in ("/health", "/livez", "/metrics", "/docs"):
        await http.get(path)
    assert [level for level, _ in fields_of(caplog)] == ["DEBUG"] * 4


@pytest.mark.anyio
async def test_text_of_a_client_cannot_look_like_a_field_of_the_line(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cllm.access")
    await http.get("/a%20status=200%0A")
    assert 'path="/a status=200\\n" status=404' in caplog.text


async def fields_of_broken(
    app: Any, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> dict[str, Any]:
    """Fields of the line about a request whose application raises an error."""
    caplog.set_level(logging.INFO, "cllm.access")

    async def send(message: Any) -> None:
        await anyio.lowlevel.checkpoint()

    async def receive() -> Any:
        await anyio.sleep_forever()

    scope = {"type": "http", "path": "/generate", "method": "POST"}
    with pytest.raises(error):
        await AccessLog(app)(scope, receive, send)
    ((_, fields),) = fields_of(caplog)
    return fields


@pytest.mark.anyio
async def test_an_error_of_the_server_is_a_line_with_its_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError

    assert (await fields_of_broken(broken, LookupError, caplog))["status"] == 500


@pytest.mark.anyio
async def test_an_answer_that_its_client_does_not_take_is_marked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def left(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        raise OSError("the client has left")

    fields = await fields_of_broken(left, OSError, caplog)
    assert (fields["status"], fields["is_complete"]) == (200, False)
