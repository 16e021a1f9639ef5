"""Connections to public addresses alone.  Imported at the first use: httpcore takes a tenth of a second."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from socket import SOCK_STREAM

import anyio
import httpcore

from cllm.server.http.fetching import Answer, RefusedError

ADDRESS_S = 2.0  # seconds for an address of a host, before the next one is tried
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
# Networks of IPv6 addresses that contain an IPv4 address in their last 32 bits.
EMBEDDING = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "::/96")))
# Networks that Python counts as public, in some versions: of protocols, 6to4's relays, Teredo, a local NAT64,
# documentation, and a site.
SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24", "192.88.99.0/24", "2001::/32", "64:ff9b:1::/48", "3fff::/20", "fec0::/10",
        ),
    )
)  # fmt: skip


def is_public(address: str) -> bool:
    """Return True if an IP address is one of the public internet, also the IPv4 address that one of IPv6 contains."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is None and any(ip in network for network in EMBEDDING):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    is_special = ip.is_multicast or ip.is_reserved or any(ip in network for network in SPECIAL)
    return ip.is_global and not is_special


async def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = await anyio.getaddrinfo(host, port, type=SOCK_STREAM)
    return [str(where[0]) for *_, where in found]


class PublicBackend(httpcore.AsyncNetworkBackend):
    """Network that connects to public addresses alone, each time after it has resolved the name itself."""

    def __init__(
        self,
        resolve: Resolve,
        network: httpcore.AsyncNetworkBackend,
    ) -> None:
        self._resolve = resolve
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """See httpcore.

        Raises
        ------
        RefusedError
            The name has an address that is not public.
        """
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise RefusedError("an address of a host that has only public IP addresses")
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(
                    address, port, ADDRESS_S, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(
            addresses[-1], port, timeout, local_address, socket_options
        )


class PublicNetwork:
    """Fetches URLs of hosts with public addresses.  Event loop only.

    Parameters
    ----------
    resolve : callable
        Returns the IP addresses of a host.
    network : AsyncNetworkBackend, optional
        Connects to an address.
    """

    def __init__(
        self, resolve: Resolve = resolved, network: httpcore.AsyncNetworkBackend | None = None
    ) -> None:
        self._network = PublicBackend(resolve, network or httpcore.AnyIOBackend())
        self._ssl = ssl.create_default_context()  # takes 50 ms

    async def get(self, url: str, n_bytes_max: int) -> Answer:
        """Return the response to a GET request; redirects are not followed.

        Raises
        ------
        RefusedError
            The host has an address that is not public, cannot be reached, or sends more than `n_bytes_max`.
        """
        content = bytearray()
        headers = [("User-Agent", "cllm"), ("Accept", "image/*")]
        try:
            async with (
                httpcore.AsyncConnectionPool(
                    ssl_context=self._ssl, network_backend=self._network
                ) as pool,
                pool.stream("GET", url, headers=headers) as answer,
            ):
                async for data in answer.aiter_stream():
                    content += data
                    if len(content) > n_bytes_max:
                        raise RefusedError(f"an address of at most {n_bytes_max} bytes")
                location = dict(answer.headers).get(b"location", b"").decode("latin-1")
                return Answer(answer.status, location, bytes(content))
        except (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
            raise RefusedError("an address that can be reached") from None
