"""Addresses of llama.cpp's RPC servers.  Pure.

The servers have no password and no encryption, so only loopback and private addresses are accepted.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from cllm.errors import InvalidArgumentError

N_SERVERS_MAX = 16  # GGML_RPC_MAX_SERVERS of ggml-rpc.h
LIMIT = "HOST:PORT of a loopback or private address (llama.cpp has no IPv6 there)"


class RpcAddress(NamedTuple):
    """Address on which a server listens.

    Attributes
    ----------
    host : str
        A name, or an IPv4 address.
    port : int
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def rpc_address(text: object) -> RpcAddress:
    """Return the address in a text `HOST:PORT`.  A host name is not looked up here.

    Raises
    ------
    InvalidArgumentError
        The text is no such address, or the IPv4 address is neither loopback nor private.
    """
    host, _, port = text.partition(":") if isinstance(text, str) else ("", "", "")
    labels = host.isascii() and all(0 < len(label) <= 63 for label in host.split("."))
    is_host = labels and host.isprintable() and not set(host) & set(" /@[]")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535
    if not (is_host and is_port):
        raise InvalidArgumentError("rpc", text, LIMIT)
    address = RpcAddress(host, int(port))
    try:
        ip = ipaddress.IPv4Address(host)
    except ValueError:  # a name, which is looked up when the engine starts
        return address
    if not is_private(str(ip)):
        raise InvalidArgumentError("rpc", text, LIMIT)
    return address


def is_private(ip: str) -> bool:
    """Return True for an IPv4 address of a range that the internet does not route, such as loopback or private.

    False for 0.0.0.0, multicast and 240.0.0.0/4.  The interfaces of this machine do not matter.
    """
    address = ipaddress.IPv4Address(ip)
    is_of_none = address.is_unspecified or address.is_multicast or address.is_reserved
    return not (address.is_global or is_of_none)
