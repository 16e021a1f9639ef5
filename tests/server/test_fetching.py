"""Images at addresses: only of allowed hosts, only from the public internet, whatever a name or a redirect says."""

from __future__ import annotations

import base64
import gc
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import anyio
import httpcore
import httpx
import pytest

from cllm import InvalidRequestError
from cllm.server import ServerConfig, create_app
from cllm.server.http import fetching
from cllm.server.http.fetching import Answer, ImageFetcher
from cllm.server.http.problems import Problem
from cllm.server.http.public_network import PublicNetwork, is_public
from cllm.testing import FakeEngine
from tests.server.test_images import PATHS, asking, png, with_result

pytestmark = pytest.mark.anyio
PUBLIC = "93.184.215.14"
NAMES = {
    "images.example.com": [PUBLIC],
    "inside.example.com": ["10.0.0.7"],
    "both.example.com": [PUBLIC, "127.0.0.1"],
    "six.example.com": ["::1"],
    "nothing.example.com": [],
}


def answer(status: str, content: bytes = b"", **headers: str) -> list[bytes]:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *lines, "", ""])
    return [head.encode(), content]


class Wire(httpcore.AsyncMockBackend):
    """A network that answers with these bytes, and notes where it connected to."""

    def __init__(self, *answers: list[bytes]) -> None:
        self.answers = [*answers]
        self.connected: list[tuple[str, int]] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        return httpcore.AsyncMockStream(self.answers.pop(0))


async def resolve(host: str, port: int) -> Sequence[str]:
    """Names of this test; an address is its own, however it is written: as `getaddrinfo` reads it."""
    if host in NAMES:
        return NAMES[host]
    found = await anyio.getaddrinfo(host, port, type=1)
    return [str(where[0]) for *_, where in found]


def fetcher(wire: Wire, *hosts: str) -> ImageFetcher:
    return ImageFetcher(hosts or ("*",), lambda: PublicNetwork(resolve, wire))


PRIVATE = (
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.1.", "127.255.255.254",
    "localhost", "LOCALHOST", "localhost.", "0.0.0.0", "0", "10.0.0.1", "10.255.255.255", "172.16.0.1",
    "172.31.255.255", "192.168.0.1", "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9",
    "169.254.169.254", "0xa9fea9fe", "2852039166", "100.64.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]",
    "[64:ff9b::7f00:1]", "[64:ff9b:1::a00:1]", "[2002:7f00:1::]", "[2002:a9fe:a9fe::1]", "[fe80::1]",
    "[fc00::1]", "[fd12:3456::1]", "[ff02::1]", "[fec0::1]", "[3fff::1]", "192.88.99.1", "[64:ff9b:1:a00:0:100:808:808]", "[2001:0:7f00:1::f7f7:f7f7]", "[2001:db8::1]", "[2001:0:7f00:1::]",
    "inside.example.com", "both.example.com", "six.example.com", "nothing.example.com",
)  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE)
async def test_a_host_that_is_not_of_the_public_internet_is_not_asked(host: str) -> None:
    for url in (f"http://{host}/a.png", f"https://{host}:443/a.png"):
        wire = Wire()
        with pytest.raises(InvalidRequestError, match=r"public|can be reached") as caught:
            await fetcher(wire).fetch(url, "messages[0].content[1].image_url.url")
        assert caught.value.field == "messages[0].content[1].image_url.url"
        assert wire.connected == []


@pytest.mark.parametrize("host", PRIVATE)
async def test_a_redirect_to_such_a_host_is_not_followed(host: str) -> None:
    wire = Wire(answer("302 Found", location=f"http://{host}/latest/meta-data"))
    with pytest.raises(InvalidRequestError, match=r"public|can be reached"):
        await fetcher(wire).fetch("http://images.example.com/a.png")
    assert wire.connected == [(PUBLIC, 80)]


WRONG_URLS = (
    "ftp://images.example.com/a", "file:///etc/passwd", "http:///etc/passwd", "http://", "https:",
    "http://user@images.example.com/a", "http://user:pw@images.example.com/a",
    "http://images.example.com@10.0.0.1/", "http://other.example.com/a", "http://images.example.com.evil.com/",
    "http://images.example.com:8080/a", "http://images.example.com:99999/", "http://[::1/a",
    "http://images.example.com\\@10.0.0.1/", "http://images.example.com/\r\nHost: x", "http://im\u00e4ges.example.com/",
    "http://images.example.com:80:80/", "gopher://images.example.com/", "http://evilimages.example.com/",
    "http://10.0.0.1#@images.example.com/", "http://10.0.0.1/@images.example.com",
)  # fmt: skip


@pytest.mark.parametrize("url", WRONG_URLS)
async def test_an_address_that_is_not_plainly_one_of_an_allowed_host_is_not_asked(url: str) -> None:
    wire = Wire()
    with pytest.raises(InvalidRequestError):
        await fetcher(wire, "images.example.com").fetch(url)
    assert wire.connected == []


async def test_an_image_of_an_allowed_host_is_fetched_also_over_redirects() -> None:
    wire = Wire(
        answer("301 Moved", location="/b.png"),
        answer("302 Found", location="//images.example.com/c.png"),
        answer("200 OK", png()),
    )
    fetched = await fetcher(wire, "images.example.com").fetch("http://images.example.com/a.png#x")
    assert fetched.source == png()
    assert wire.connected == [(PUBLIC, 80)] * 3


async def test_the_network_is_opened_once_and_not_in_the_thread_of_the_event_loop() -> None:
    """Importing httpcore and reading the certificates takes 0.1 s."""
    threads: list[threading.Thread] = []

    class Images:
        async def get(self, url: str, n_bytes_max: int) -> Answer:
            return Answer(200, "", png())

    def open_network() -> Images:
        threads.append(threading.current_thread())
        return Images()

    images = ImageFetcher(("images.example.com",), open_network)
    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(images.fetch, f"http://images.example.com/{name}.png")
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_port_is_allowed_by_name() -> None:
    wire = Wire(answer("200 OK", b"x"))
    allowed = fetcher(wire, "images.example.com:8080")
    assert (await allowed.fetch("http://images.example.com:8080/a")).source == b"x"
    with pytest.raises(InvalidRequestError, match="--image-host"):
        await allowed.fetch("http://images.example.com/a")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([answer("404 Not Found", b"no")], "answers with 404"),
        ([answer("200 OK")], "200 and 0 bytes"),
        ([answer("302 Found") for _ in range(9)], "redirects"),
        ([answer("302 Found", location="/") for _ in range(9)], "at most 3 redirects"),
        ([answer("302 Found", location="http://[::1")], "an http: or https: address"),
        ([answer("302 Found", location="http://other.example.com/")], "--image-host"),
        ([answer("307 Temporary", location="ftp://images.example.com/")], "http: or https:"),
        ([[b"HTTP/1.1 2"]], "can be reached"),
        ([[b"SSH-2.0-OpenSSH_9.2\r\n"]], "can be reached"),
        ([answer("200 OK", b"x" * 2000)], "at most 1000 bytes"),
    ],
)
async def test_a_wrong_answer_of_a_host_is_rejected_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, answers: list[list[bytes]], words: str
) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match=words):
        await fetcher(Wire(*answers), "images.example.com").fetch("http://images.example.com/a.png")


def shown(*urls: str, role: str = "user") -> list[dict[str, Any]]:
    """A message with the addresses of images, and another one."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": role, "content": parts}, {"role": "user", "content": "a"}]


class Silent(Wire):
    """A network on which no host answers."""

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        await anyio.sleep_forever()
        raise AssertionError


async def test_images_that_are_late_are_rejected_by_name_or_left_in_results_of_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    urls = [f"http://images.example.com/{n}.png" for n in range(9)]
    for image_s, request_s in ((0.01, 100.0), (100.0, 0.01)):
        monkeypatch.setattr(fetching, "IMAGE_S", image_s)
        monkeypatch.setattr(fetching, "REQUEST_S", request_s)
        with pytest.raises(InvalidRequestError, match="answers within") as caught:
            await fetcher(Silent()).with_images(shown(*urls))
        assert caught.value.field == "messages[0].content[0].image_url.url"
        messages = shown(*urls, role="tool")
        assert await fetcher(Silent()).with_images(messages) == messages


async def test_each_address_of_a_request_is_fetched_once_and_not_for_roles_without_images() -> None:
    url = "http://images.example.com/a.png"
    wire = Wire(answer("200 OK", png()))
    messages = [*shown(url, url), *shown(url, role="tool")]
    seen = await fetcher(wire).with_images(messages)
    assert wire.connected == [(PUBLIC, 80)]
    images = [part["image"] for message in seen[::2] for part in message["content"]]
    assert len(images) == 3
    assert len({id(image) for image in images}) == 1
    for role in ("system", "assistant"):
        messages = shown(url, role=role)
        assert await fetcher(wire).with_images(messages) == messages
    whole = {"role": "tool", "content": {"type": "input_image", "image_url": url}}
    (seen_whole,) = await fetcher(Wire(answer("200 OK", png()))).with_images([whole])
    assert seen_whole["content"]["image"].source == png()


async def test_the_images_of_a_request_and_of_open_requests_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    urls = [f"http://images.example.com/{n}.png" for n in range(3)]

    def three() -> Wire:
        return Wire(*[answer("200 OK", b"x" * 100) for _ in urls])

    monkeypatch.setattr(fetching, "MAX_REQUEST_BYTES", 250)
    with pytest.raises(InvalidRequestError, match="at most 250 bytes in all"):
        await fetcher(three()).with_images(shown(*urls))
    monkeypatch.setattr(fetching, "MAX_REQUEST_BYTES", 1000)
    monkeypatch.setattr(fetching, "MAX_ADDRESSES", 2)
    with pytest.raises(InvalidRequestError, match="at most 2 addresses"):
        await fetcher(three()).with_images(shown(*urls))
    monkeypatch.setattr(fetching, "MAX_ADDRESSES", 3)
    monkeypatch.setattr(fetching, "MAX_OPEN_BYTES", 400)
    wire = Wire(*[answer("200 OK", b"x" * 100) for _ in range(9)])
    shared = fetcher(wire)
    open_request = await shared.with_images(shown(*urls))
    with pytest.raises(Problem) as caught:
        await shared.with_images(shown(*urls))
    assert caught.value.status == 429
    del open_request, caught
    gc.collect()  # an error keeps what its frames have
    assert len(await shared.with_images(shown(*urls))) == 2


async def test_an_address_of_a_host_that_does_not_answer_is_followed_by_the_next_one() -> None:
    class FirstIsDown(Wire):
        async def connect_tcp(
            self, host: str, port: int, *args: Any, **options: Any
        ) -> httpcore.AsyncNetworkStream:
            if host != PUBLIC:
                raise httpcore.ConnectError("no route")
            return await super().connect_tcp(host, port)

    NAMES["dual.example.com"] = ["2606:4700::1111", PUBLIC]
    wire = FirstIsDown(answer("200 OK", b"x"))
    assert (await fetcher(wire).fetch("http://dual.example.com/a")).source == b"x"


def test_public_addresses_are_public_inside_ipv6_too() -> None:
    public = (
        PUBLIC,
        "8.8.8.8",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2002:808:808::1",
    )
    assert all(map(is_public, public))


@pytest.mark.parametrize("path", PATHS)
async def test_a_server_fetches_images_of_users_and_of_tools_from_allowed_hosts_alone(
    path: str,
) -> None:
    url = "http://images.example.com/a.png"
    parts = [
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "url", "url": url}},
    ]
    wire = Wire(*[answer("200 OK", png()) for _ in range(2)])
    other = [{"type": "image_url", "image_url": {"url": "http://other.example.com/a"}}]
    prompts: list[str] = []

    def answering(prompt: str) -> str:
        prompts.append(prompt)
        return "I see."

    async with FakeEngine(answering, n_ctx=4096) as engine:
        app = create_app(engine, ServerConfig(image_hosts=("images.example.com",)))
        app.state.server.fetcher = fetcher(wire, "images.example.com")
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for body in (asking(path, parts), with_result(path, parts)):
                assert (await http.post(path, json=body)).status_code == 200
            response = await http.post(path, json=asking(path, other))
            assert response.status_code == 400
            assert response.json()["error"]["param"].endswith(".content[0].image_url.url")
            assert "--image-host" in response.json()["error"]["message"]
            assert (await http.post(path, json=with_result(path, other))).status_code == 200
    assert wire.connected == [(PUBLIC, 80)] * 2
    assert "<image><image>" in prompts[0]
    assert prompts[1].count("<image>") == 2
    assert "an image, which this model cannot read" in prompts[2]
    assert base64.b64encode(png()).decode()[:40] not in "".join(prompts)
