"""Images at http: and https: addresses, from the hosts that the operator allows.

A client could make a server read what the client itself cannot reach: a service of the server's own network, or
the metadata of a cloud (SSRF).  So images are fetched from hosts of a list alone.  Every connection goes to an
address that was checked to be public, whatever a name resolves to at another time, and each redirect is checked
in the same way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

import anyio
import anyio.to_thread

from cllm import Image, InvalidRequestError
from cllm.engine.media_parts import Address, address_of
from cllm.server.http.problems import RETRY_AFTER_S, Problem

MAX_BYTES = 20 << 20  # of one image
MAX_REQUEST_BYTES = 64 << 20  # of the images of one request
MAX_OPEN_BYTES = 1 << 29  # of the images of open requests
MAX_ADDRESSES = 64  # different ones in one request
IMAGE_S, REQUEST_S = 10.0, 30.0  # seconds for one image, and for those of one request
MAX_REDIRECTS = 3
N_AT_ONCE = 64  # images that are fetched at the same time
N_OF_REQUEST = 4  # those of one request among them
MAX_DEPTH = 4  # lists inside each other in a content
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
USER, RESULTS = "user", ("tool", "function")  # roles of messages that have images


class RefusedError(Exception):
    """Raised for an address that is not fetched; the text becomes the limit of the error."""


class Answer(NamedTuple):
    """HTTP response: its status, its header Location, and its body."""

    status: int
    location: str
    content: bytes


class Network(Protocol):
    """A network that fetches URLs; see `PublicNetwork`."""

    async def get(self, url: str, n_bytes_max: int) -> Answer:
        """Return the response to a GET request; redirects are not followed."""


class ImageFetcher:
    """Fetches images at addresses.  Event loop only.

    Parameters
    ----------
    hosts : sequence of str
        Hosts that are allowed, in lower case, each perhaps with a port; "*": all of the public internet.
    open_network : callable
        Returns the network; called in a worker thread before the first image is fetched.
    """

    def __init__(self, hosts: Sequence[str], open_network: Callable[[], Network]) -> None:
        self._hosts = frozenset(hosts)
        self._open_network = open_network
        self._network: Network | None = None
        self._opening = anyio.Lock()
        self._limiter = anyio.CapacityLimiter(N_AT_ONCE)
        self._lock = threading.Lock()  # an image may be freed in any thread
        self._n_bytes_open = 0

    async def with_images(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return messages with the images at addresses that they name; unchanged if no host is allowed.

        Raises
        ------
        InvalidRequestError
            An image in a message of the user is not allowed, or cannot be fetched.  One in a result of a tool
            is left as it is.
        Problem
            429: the images of open requests have too many bytes.
        """
        if not self._hosts:
            return messages
        addresses: set[str] = set()
        for i, message in enumerate(messages):
            _mapped(message, i, lambda found: addresses.add(found.url))
        fetched = await self._fetch_all(sorted(addresses)) if addresses else {}

        def replacement(found: Address, is_needed: bool) -> Any:
            image = fetched[found.url]
            if isinstance(image, Image):
                return {"type": "image", "image": image}
            if is_needed:
                raise InvalidRequestError(found.field, found.url[:200], image)
            return None

        return [
            _mapped(message, i, partial(replacement, is_needed=_is_of_user(message)))
            for i, message in enumerate(messages)
        ]

    async def fetch(self, url: str, field: str = "url") -> Image:
        """Return the image at an address.

        Raises
        ------
        InvalidRequestError
            The address is not allowed, cannot be reached, takes more than 10 s, or has more than 20 MiB.
        """
        found = (await self._fetch_all([url]))[url]
        if isinstance(found, Image):
            return found
        raise InvalidRequestError(field, url[:200], found)

    async def _fetch_all(self, urls: Sequence[str]) -> dict[str, Image | str]:
        """Return the image at each address, or the limit that the address does not keep."""
        found: dict[str, Image | str] = {}
        own = anyio.CapacityLimiter(N_OF_REQUEST)
        deadline = anyio.current_time() + REQUEST_S
        n_bytes = 0

        async def fetch(url: str) -> None:
            nonlocal n_bytes
            late = (
                f"an address that answers within {IMAGE_S:g} s, and {REQUEST_S:g} s with all others"
            )
            found[url] = late
            with anyio.move_on_at(deadline):
                async with own, self._limiter:
                    with anyio.move_on_after(IMAGE_S):
                        try:
                            content = await self._content(url)
                            n_bytes += len(content)
                            if n_bytes > MAX_REQUEST_BYTES:
                                limit = f"addresses with at most {MAX_REQUEST_BYTES} bytes in all"
                                raise RefusedError(limit)
                            found[url] = self._counted(content)
                        except RefusedError as error:
                            found[url] = str(error)

        async with anyio.create_task_group() as tasks:
            for url in urls[:MAX_ADDRESSES]:
                tasks.start_soon(fetch, url)
        many = f"at most {MAX_ADDRESSES} addresses in a request"
        found |= dict.fromkeys(urls[MAX_ADDRESSES:], many)
        if self._n_bytes_open > MAX_OPEN_BYTES:
            limit = f"the images of open requests have more than {MAX_OPEN_BYTES} bytes"
            raise Problem(429, limit, headers={"Retry-After": str(RETRY_AFTER_S)})
        return found

    def _counted(self, content: bytes) -> Image:
        """Return an image whose bytes count until it is freed."""
        image = Image(content)
        self._count(len(content))
        weakref.finalize(image, self._count, -len(content))
        return image

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes_open += n_bytes

    async def _content(self, url: str) -> bytes:
        async with self._opening:
            if self._network is None:
                self._network = await anyio.to_thread.run_sync(self._open_network)
        base = ""
        for _ in range(MAX_REDIRECTS + 1):
            url = self._checked(base, url)
            answer = await self._network.get(url, MAX_BYTES)
            if answer.status == 200 and answer.content:
                return answer.content
            if answer.status not in REDIRECTS:
                told = f"{answer.status} and {len(answer.content)} bytes"
                raise RefusedError(f"an address of an image (its host answers with {told})")
            base, url = url, answer.location
        raise RefusedError(f"an address with at most {MAX_REDIRECTS} redirects")

    def _checked(self, base: str, url: str) -> str:
        """Return an address that is allowed, relative to `base`, without its fragment."""
        try:
            where = urlsplit(urljoin(base, url.strip()))
            host, port = (where.hostname or "").rstrip("."), where.port
        except ValueError:
            raise RefusedError("an http: or https: address") from None
        if where.scheme not in PORTS or not host or not url.isascii() or not url.isprintable():
            raise RefusedError("an http: or https: address, of printable ASCII characters")
        if where.username is not None or where.password is not None:
            raise RefusedError("an address without a user")
        is_usual = port in (None, PORTS[where.scheme])
        names = {host, "*"} if is_usual else set()
        if not ({*names, f"{host}:{port or PORTS[where.scheme]}"} & self._hosts):
            raise RefusedError("an address of a host that --image-host allows")
        return where._replace(fragment="").geturl()


# --- Messages ------------------------------------------------------------------------------------
def _is_of_user(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == USER


def _mapped(message: Any, i: int, replacement: Callable[[Address], Any]) -> Any:
    """Return a message with the parts that `replacement` returns for addresses of images; None keeps a part."""
    if not isinstance(message, Mapping) or message.get("role") not in (USER, *RESULTS):
        return message

    def mapped(part: Any, field: str, depth: int) -> Any:
        if isinstance(part, list):
            if depth == MAX_DEPTH:
                return part
            return [mapped(item, f"{field}[{k}]", depth + 1) for k, item in enumerate(part)]
        found = address_of(part, field)
        other = None if found is None else replacement(found)
        return part if other is None else other

    content = message.get("content")
    if not isinstance(content, list | Mapping):
        return message
    return {**message, "content": mapped(content, f"messages[{i}].content", 0)}
