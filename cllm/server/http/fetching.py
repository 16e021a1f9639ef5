"""Images at http: and https: addresses, from the hosts that the operator allows.

A client could make a server read what the client itself cannot reach: a service of the server's own network, or
the metadata of a cloud (SSRF).  So only hosts of a list are asked.  Every connection goes to an address that was
checked to be public, whatever a name resolves to at another time, and each redirect is checked in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

import anyio

from cllm import Image, InvalidRequestError
from cllm.engine.image_parts import address_of

MAX_BYTES = 20 << 20
IMAGE_S, REQUEST_S = 10.0, 30.0  # seconds for one image, and for those of one request
MAX_REDIRECTS = 3
N_AT_ONCE = 4  # images that are fetched at the same time
MAX_DEPTH = 4  # lists inside each other in a content
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)


class RefusedError(Exception):
    """An address that may not be asked; the text is the limit."""


class Answer(NamedTuple):
    """Answer of a host: its status, where it redirects to, and its content."""

    status: int
    location: str
    content: bytes


class Network(Protocol):
    """A network that asks hosts; see `PublicNetwork`."""

    async def get(self, url: str, n_bytes_max: int) -> Answer: ...


class ImageFetcher:
    """Fetches images at addresses.  Event loop only.

    Parameters
    ----------
    hosts : sequence of str
        Hosts that may be asked, in lower case, each perhaps with a port; "*": all of the public internet.
    open_network : callable
        Returns the network; called before the first image is fetched.
    """

    def __init__(self, hosts: Sequence[str], open_network: Callable[[], Network]) -> None:
        self._hosts = frozenset(hosts)
        self._open_network = open_network
        self._network: Network | None = None
        self._limiter = anyio.CapacityLimiter(N_AT_ONCE)

    async def with_images(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return messages with the images at addresses that they name; unchanged if no host is allowed.

        Raises
        ------
        InvalidRequestError
            An image in a message of the user may not be fetched, or cannot be.  One in a result of a tool is
            left as it is.
        """
        if not self._hosts:
            return messages
        told = []
        with anyio.CancelScope(deadline=anyio.current_time() + REQUEST_S) as scope:
            for i, message in enumerate(messages):
                if isinstance(message, Mapping) and isinstance(message.get("content"), list):
                    is_kept = message.get("role") != "user"
                    field = f"messages[{i}].content"
                    content = await self._seen(message["content"], field, is_kept, 0)
                    message = {**message, "content": content}
                told.append(message)
        if scope.cancelled_caught:
            limit = f"addresses whose images come within {REQUEST_S:.0f} s"
            raise InvalidRequestError("messages", "images", limit)
        return told

    async def _seen(self, part: Any, field: str, is_kept: bool, depth: int) -> Any:
        """Return a part with the image that it names the address of; the same part for another."""
        if isinstance(part, list) and depth < MAX_DEPTH:
            return [
                await self._seen(item, f"{field}[{k}]", is_kept, depth + 1)
                for k, item in enumerate(part)
            ]
        found = address_of(part, field)
        if found is None:
            return part
        try:
            return {"type": "image", "image": Image(await self.fetch(found.url, found.field))}
        except InvalidRequestError:
            if is_kept:
                return part
            raise

    async def fetch(self, url: str, field: str = "url") -> bytes:
        """Return the content at an address.

        Raises
        ------
        InvalidRequestError
            It may not be asked, fails, takes too long, or has too much.
        """
        try:
            async with self._limiter:
                with anyio.fail_after(IMAGE_S):
                    return await self._fetch(url)
        except RefusedError as error:
            limit = str(error)
        except TimeoutError:
            limit = f"an address that answers within {IMAGE_S:.0f} s"
        raise InvalidRequestError(field, url[:200], limit)

    async def _fetch(self, url: str) -> bytes:
        if self._network is None:
            self._network = self._open_network()
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._network.get(self._checked(url), MAX_BYTES)
            if answer.status == 200 and answer.content:
                return answer.content
            if answer.status not in REDIRECTS:
                told = f"{answer.status} and {len(answer.content)} bytes"
                raise RefusedError(f"an address of an image (its host answers with {told})")
            url = urljoin(url, answer.location)
        raise RefusedError(f"an address with at most {MAX_REDIRECTS} redirects")

    def _checked(self, url: str) -> str:
        """Return an address that may be asked, without its fragment."""
        try:
            where = urlsplit(url)
            host, port = (where.hostname or "").rstrip("."), where.port
        except ValueError:
            raise RefusedError("an http: or https: address") from None
        if where.scheme not in PORTS or not host or not url.isascii() or not url.isprintable():
            raise RefusedError("an http: or https: address, of printable ASCII characters")
        if where.username is not None or where.password is not None:
            raise RefusedError("an address without a user")
        is_usual = port in (None, PORTS[where.scheme])
        names = {host, "*"} if is_usual else {f"{host}:{port}"}
        if not names & self._hosts:
            raise RefusedError("an address of a host that the server asks (--image-host)")
        return where._replace(fragment="").geturl()
