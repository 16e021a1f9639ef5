"""Devices of other machines: llama.cpp's RPC servers, checked in Python before llama.cpp uses them.

A server has one client at a time; a second client would wait inside llama.cpp without a limit.  A server that
is absent, or has another version, would make llama.cpp end the process.  A server that dies during a decode
still ends the process.  Therefore, RPC servers are used in an engine's child process only.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from cllm.bindings import library
from cllm.engine.rpc_address import RpcAddress, is_private, rpc_address
from cllm.errors import ClosedError, RpcServerError

# The handshake of ggml-rpc.cpp, packed.  Request: command, size, 24 bytes of the client's abilities.  Answer:
# size, version, 24 bytes of the server's abilities.
HELLO = struct.Struct("<BQ24x").pack(14, 24)
ANSWER = struct.Struct("<QBBBx24x")
N_ANSWER = ANSWER.size - 8
VERSION = (8, 0)  # of the pin: RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION
CONNECT_S = 2.0
# Seconds for which a server may be absent or busy: it may be restarting, or still have a client that has ended.
PATIENCE_S = 5.0
PAUSE_S = 0.1
REGISTER_S = 10.0
BUSY = "it does not answer: it has another client, or hangs"


class _NotYetError(Exception):
    """A server does not answer yet."""


def find_servers(addresses: Sequence[str], is_stopping: Callable[[], bool]) -> list[str]:
    """Check that RPC servers are reachable and free, and return their addresses as llama.cpp needs them: IP:PORT.

    Parameters
    ----------
    addresses : sequence of str
        See `EngineConfig.rpc`.
    is_stopping : callable
        Called before each attempt to connect; returns True to end the wait.

    Raises
    ------
    RpcServerError
        A server is absent, busy, of another version, not in a private network, or is no RPC server.
    LibraryError
        The library was built without RPC.
    ClosedError
        `is_stopping` has returned True.
    """
    if addresses:
        library().check_rpc()
    return [find_server(address, is_stopping) for address in map(rpc_address, addresses)]


def find_server(address: RpcAddress, is_stopping: Callable[[], bool]) -> str:
    """Check one server and return its address; see `find_servers`."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        if is_stopping():
            raise ClosedError("the engine was closed")
        try:
            return f"{_greet(address, deadline)}:{address.port}"
        except _NotYetError as error:
            if time.monotonic() + PAUSE_S >= deadline:
                raise RpcServerError(str(address), str(error)) from error.__cause__
        time.sleep(PAUSE_S)


def use_servers(addresses: Sequence[str], endpoints: Sequence[str]) -> None:
    """Add the devices of servers to this process, permanently; models loaded later may use them.

    Parameters
    ----------
    addresses, endpoints : sequence of str
        Addresses from the settings, and the result of `find_servers` for them, in the same order.

    Raises
    ------
    RpcServerError
        Another client came first, or a server has no device.
    """
    for address, endpoint in zip(addresses, endpoints, strict=True):
        found: list[bool] = []
        # A daemon thread: only the server can end this call, so the thread may hang in it.
        thread = threading.Thread(target=_add, args=(endpoint, found), daemon=True)
        thread.start()
        thread.join(REGISTER_S)
        if not found:
            raise RpcServerError(address, BUSY)
        if not found[0]:
            raise RpcServerError(address, "it has no device")


def _add(endpoint: str, found: list[bool]) -> None:
    found.append(library().add_rpc_server(endpoint))


def _greet(address: RpcAddress, deadline: float) -> str:
    """Connect as llama.cpp does, check the version, disconnect, and return the server's IP address."""
    try:
        ip = socket.gethostbyname(address.host)
    except (OSError, UnicodeError) as error:
        raise _NotYetError(f"its host name cannot be resolved: {error}") from error
    if not is_private(ip):
        raise RpcServerError(str(address), f"{ip} is not in a private network")
    try:
        connection = socket.create_connection((ip, address.port), CONNECT_S)
    except TimeoutError as error:  # its backlog is full, or no machine is there
        raise _NotYetError(BUSY) from error
    except OSError as error:
        raise _NotYetError(f"no server listens there: {error}") from error
    with connection:
        # Close with a reset.  Otherwise a busy server would later read this greeting and answer in two parts,
        # and the second part would end it by SIGPIPE.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            connection.sendall(HELLO)
            answer = _read(connection, deadline)
        except TimeoutError as error:
            raise _NotYetError(BUSY) from error
        except OSError as error:
            raise _NotYetError(f"it ends the connection: {error}") from error
    _check(address, answer)
    return ip


def _read(connection: socket.socket, deadline: float) -> bytes:
    """Return the bytes of an answer, fewer if the connection ends."""
    answer = b""
    while len(answer) < ANSWER.size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(ANSWER.size - len(answer))
        if not data:
            break
        answer += data
    return answer


def _check(address: RpcAddress, answer: bytes) -> None:
    if len(answer) < ANSWER.size:
        raise RpcServerError(str(address), "it ends the connection instead of telling its version")
    size, major, minor, patch = ANSWER.unpack(answer)
    if size != N_ANSWER:
        raise RpcServerError(str(address), "it is no RPC server of llama.cpp")
    spoken = protocol_version()
    if major != spoken[0] or minor > spoken[1]:
        found, wanted = f"{major}.{minor}.{patch}", ".".join(map(str, spoken))
        raise RpcServerError(str(address), f"it speaks version {found}, this library {wanted}")


def protocol_version() -> tuple[int, int]:
    """Return the library's protocol version (major, highest minor) from its header; without one, `VERSION`."""
    header = library().path.parents[1] / "include" / "ggml-rpc.h"
    text = header.read_text(encoding="utf-8") if header.is_file() else ""
    numbers = re.findall(r"#define RPC_PROTO_(?:MAJOR|MINOR)_VERSION +(\d+)", text)
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else VERSION
