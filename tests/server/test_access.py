"""Who may use a server: keys, hosts, and the pages of other hosts."""

from __future__ import annotations

import hmac
import re
import socket
from typing import Any

import httpx
import pytest

from cllm import EngineConfig, InvalidArgumentError
from cllm.server.app import create_app
from cllm.server.config import ServerConfig
from tests.conftest import QUIET
from tests.server.conftest import refusal_of


async def asgi(config: ServerConfig, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to an application, which loads the embedded model only for requests that it needs."""
    transport = httpx.ASGITransport(create_app(EngineConfig(**QUIET), config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request(method, path, **options)


AUTHORIZATION = [
    None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Bearer right!", b"Basic right", b"right",
    b"Bearer \xe9", b"Bearer \xff\xfe", b"Bearer " + b"x" * 10_000,
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("given", AUTHORIZATION)
@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/nowhere", "/static", "/docs/"])
async def test_without_the_key_what_matters_is_401(path: str, given: bytes | None) -> None:
    headers = {} if given is None else {b"Authorization": given}
    config = ServerConfig(api_key="right")
    response = await asgi(config, "GET", path, headers=headers)
    assert refusal_of(response, 401)["type"] == "authentication_error"
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (await asgi(config, "GET", "/health", headers=headers)).status_code == 503


@pytest.mark.anyio
async def test_the_documentation_is_open_and_asks_for_the_key() -> None:
    config = ServerConfig(api_key="right")
    page = await asgi(config, "GET", "/docs")
    assert page.status_code == 200
    for source in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert source.startswith("/static/"), source  # nothing comes from another host
        assert (await asgi(config, "GET", source)).status_code == 200
    document = (await asgi(config, "GET", "/openapi.json")).json()
    assert document["paths"]["/generate"]["post"]["security"] == [{"HTTPBearer": []}]


@pytest.mark.anyio
async def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest

    def compare(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    config = ServerConfig(api_key="right")
    headers = {"Authorization": "bearer right"}
    assert (await asgi(config, "GET", "/metrics", headers=headers)).status_code == 200
    assert (await asgi(config, "GET", "/metrics")).status_code == 401
    assert compared == [(b"right", b"right"), (b"", b"right")]


@pytest.mark.parametrize("key", ["", " "])
def test_a_key_that_is_blank_is_none(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="api_key"):
        ServerConfig(api_key=key)


@pytest.mark.anyio
@pytest.mark.parametrize("key", ["clé", "voilà", "Å", " voilà\n", "key\r\n"])
async def test_a_key_is_compared_as_the_bytes_that_come(key: str) -> None:
    """Without the white space around it: files and secrets of Kubernetes end with a line break."""
    headers = {b"Authorization": f"Bearer {key.strip()}".encode()}
    response = await asgi(ServerConfig(api_key=key), "GET", "/metrics", headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil", "", "::1",
     "[::1", "192.168.0.1", "xn--localhost", "127.0.0.1:80:80"],
)  # fmt: skip
def test_on_loopback_only_loopback_hosts_are_answered(client: httpx.Client, host: str) -> None:
    response = client.get("/health", headers={"Host": host})
    if host in ("::1", "127.0.0.1:80:80"):
        assert response.status_code in (200, 400)
    else:
        assert refusal_of(response)["param"] == "host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:18081", "[::1]:8080"])
def test_loopback_hosts_are_answered_by_any_name(client: httpx.Client, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.2", "127.1.2.3", "::1", "LOCALHOST"])
@pytest.mark.anyio
async def test_every_loopback_address_is_one(host: str) -> None:
    config = ServerConfig(host=host)
    for name in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1"):
        refused = await asgi(config, "GET", "/metrics", headers={"Host": name})
        assert refusal_of(refused)["param"] == "host"
    for name in ("127.0.0.2:80", "[::1]:80", "localhost"):
        answered = await asgi(config, "GET", "/metrics", headers={"Host": name})
        assert answered.status_code == 200


OWN_NAMES = [
    "10.0.0.7:18081", "[fe80::1]:80", "localhost", "cllm", "cllm-0:80", "box.local", "llm.internal.",
    socket.gethostname(),
]  # fmt: skip


@pytest.mark.parametrize("host", OWN_NAMES)
@pytest.mark.anyio
async def test_elsewhere_addresses_and_names_that_nobody_can_register_are_answered(
    host: str,
) -> None:
    config = ServerConfig(host="0.0.0.0")
    assert (await asgi(config, "GET", "/metrics", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}])
@pytest.mark.anyio
async def test_a_page_whose_name_is_made_to_resolve_here_is_refused(
    headers: dict[str, str],
) -> None:
    """DNS rebinding: to its browser, the page and the server are of the same origin."""
    rebound = {"Host": "evil.example", **headers}
    config = ServerConfig(host="0.0.0.0")
    for method, path in (("GET", "/metrics"), ("GET", "/slots"), ("POST", "/generate")):
        refused = await asgi(config, method, path, headers=rebound)
        assert refusal_of(refused)["param"] == "host"
    for config in (
        ServerConfig(host="0.0.0.0", allowed_hosts=("Evil.Example",)),
        ServerConfig(host="0.0.0.0", allowed_hosts=("*",)),
        ServerConfig(allowed_hosts=("evil.example",)),
    ):
        assert (await asgi(config, "GET", "/metrics", headers=rebound)).status_code == 200
    with_key = ServerConfig(host="0.0.0.0", api_key="right")
    assert (await asgi(with_key, "GET", "/metrics", headers=rebound)).status_code == 401


ORIGIN = {"Origin": "http://page.example"}


PREFLIGHT = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def cors_of(response: httpx.Response) -> dict[str, str]:
    """The headers that speak to browsers."""
    return {k: v for k, v in response.headers.items() if k.startswith("access-control-")}


@pytest.mark.anyio
async def test_no_web_page_may_use_the_server_by_default() -> None:
    config = ServerConfig()
    assert cors_of(await asgi(config, "GET", "/metrics", headers=ORIGIN)) == {}
    response = await asgi(config, "OPTIONS", "/generate", headers=PREFLIGHT)
    assert refusal_of(response, 403)["param"] == "origin"
    assert cors_of(response) == {}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://localhost:1234", 403),  # another server's page
        ("http://localhost.evil", 403),
        ("http://localhost", 200),
        ("https://localhost", 200),
        (None, 200),
    ],
)
@pytest.mark.anyio
async def test_pages_of_other_hosts_cannot_even_send(origin: str | None, status: int) -> None:
    """A browser sends a `text/plain` of any page, and only keeps the answer from it."""
    headers = {"Content-Type": "text/plain"} | ({} if origin is None else {"Origin": origin})
    response = await asgi(
        ServerConfig(), "POST", "/generate", headers=headers, content='{"prompt": "1"}'
    )
    assert response.status_code == status


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({"allowed_hosts": ("chat.example",)}, "chat.example", 200),
        ({"cors_origins": ("https://chat.example",)}, "localhost", 200),
        ({}, "localhost", 403),
    ],
)
@pytest.mark.anyio
async def test_the_page_behind_a_proxy_may_ask_with_the_settings_that_the_documentation_names(
    settings: dict[str, Any], host: str, status: int
) -> None:
    headers = {"Host": host, "Origin": "https://chat.example", "Content-Type": "text/plain"}
    config = ServerConfig(**settings)
    response = await asgi(config, "POST", "/generate", headers=headers, content='{"prompt": "1"}')
    assert response.status_code == status


@pytest.mark.anyio
async def test_every_page_may_use_the_server_if_asked() -> None:
    config = ServerConfig(cors_origins=("*",))
    response = await asgi(config, "GET", "/metrics", headers={"Origin": "null"})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.anyio
async def test_a_web_page_that_is_named_may_use_the_server() -> None:
    config = ServerConfig(cors_origins=("http://page.example",))
    found = cors_of(await asgi(config, "GET", "/metrics", headers=ORIGIN))
    assert found["access-control-allow-origin"] == "http://page.example"
    assert "access-control-allow-credentials" not in found
    assert (await asgi(config, "OPTIONS", "/generate", headers=PREFLIGHT)).status_code == 200
    other = {**PREFLIGHT, "Origin": "http://other.example"}
    response = await asgi(config, "OPTIONS", "/generate", headers=other)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.anyio
async def test_a_web_page_that_is_named_can_send_a_key_and_read_errors() -> None:
    config = ServerConfig(cors_origins=("http://page.example",), api_key="right")
    preflight = await asgi(config, "OPTIONS", "/generate", headers=PREFLIGHT)
    assert preflight.status_code == 200
    refused = await asgi(config, "GET", "/metrics", headers=ORIGIN)
    assert refused.status_code == 401
    assert "access-control-allow-origin" in refused.headers
