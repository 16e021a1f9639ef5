"""What is asked of an RPC server before llama.cpp is given its address: by servers that are none, or not now."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from cllm.bindings import library
from cllm.engine.llama import rpc
from cllm.engine.llama.rpc import (
    ANSWER,
    HELLO,
    N_ANSWER,
    VERSION,
    find_server,
    find_servers,
    protocol_version,
    use_servers,
)
from cllm.engine.rpc_address import N_SERVERS_MAX, RpcAddress
from cllm.errors import ClosedError, LibraryError, RpcServerError

Answer = Callable[[socket.socket], None]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is: who is to answer does."""
    for name, value in (("CONNECT_S", 30.0), ("PATIENCE_S", 30.0), ("PAUSE_S", 0.01)):
        monkeypatch.setattr(rpc, name, value)


@pytest.fixture
def impatience(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those who never do."""
    monkeypatch.setattr(rpc, "PATIENCE_S", 0.2)


@contextmanager
def server(answer: Answer) -> Iterator[RpcAddress]:
    """Something that listens, and treats whoever comes like this."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                with connection, suppress(ConnectionResetError):  # it leaves like that
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield RpcAddress("127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def speaking(*version: int, size: int = N_ANSWER) -> Answer:
    def answer(connection: socket.socket) -> None:
        assert connection.recv(len(HELLO), socket.MSG_WAITALL) == HELLO
        connection.sendall(ANSWER.pack(size, *version))
        connection.recv(1)

    return answer


def never() -> bool:
    return False


def test_a_server_of_this_version_is_found_by_name() -> None:
    with server(speaking(*VERSION, 9)) as address:
        named = RpcAddress("localhost", address.port)
        assert find_server(named, never) == f"127.0.0.1:{address.port}"


def test_greeting_and_limits_are_those_of_the_header_of_this_build() -> None:
    assert bytes([14]) + struct.pack("<Q", 24) + bytes(24) == HELLO
    assert N_ANSWER == 28
    header = (library().path.parents[1] / "include" / "ggml-rpc.h").read_text()
    known = dict(re.findall(r"#define (\w+) +(\d+)", header))
    version = known["RPC_PROTO_MAJOR_VERSION"], known["RPC_PROTO_MINOR_VERSION"]
    assert tuple(map(int, version)) == VERSION == protocol_version()
    assert int(known["GGML_RPC_MAX_SERVERS"]) == N_SERVERS_MAX


@pytest.mark.parametrize("version", [(7, 9, 9), (9, 0, 0), (8, 1, 0)])
def test_another_version_is_named_and_not_waited_for(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "PATIENCE_S", 1e9)
    with server(speaking(*version)) as address, pytest.raises(RpcServerError) as caught:
        find_server(address, never)
    assert caught.value.address == str(address)
    found = ".".join(map(str, version))
    assert caught.value.reason == f"it speaks version {found}, this library 8.0"


def test_what_is_no_rpc_server_is_said_to_be_none() -> None:
    def http(connection: socket.socket) -> None:
        connection.recv(len(HELLO), socket.MSG_WAITALL)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        connection.recv(1)

    with (
        server(http) as address,
        pytest.raises(RpcServerError, match=r"it is no RPC server of llama\.cpp"),
    ):
        find_server(address, never)


def test_a_server_that_is_older_than_the_greeting_is_not_waited_for() -> None:
    def leave(connection: socket.socket) -> None:
        connection.recv(len(HELLO), socket.MSG_WAITALL)

    with (
        server(leave) as address,
        pytest.raises(RpcServerError, match="instead of telling its version"),
    ):
        find_server(address, never)


@pytest.mark.usefixtures("impatience")
def test_a_server_that_is_absent_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RpcAddress("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(RpcServerError, match=f"RPC server {address}: no server listens there"):
        find_server(address, never)


@pytest.mark.usefixtures("impatience")
def test_a_name_that_nobody_knows_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(
        RpcServerError, match=r"its host name cannot be resolved: .*Name or service"
    ):
        find_server(RpcAddress("nowhere.lan", 50052), never)


def test_a_name_of_an_open_network_is_refused_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "8.8.8.8")
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("was asked"))
    with pytest.raises(RpcServerError, match=r"8\.8\.8\.8 is not in a private network"):
        find_server(RpcAddress("gpu.lan", 50052), never)


@pytest.mark.usefixtures("impatience")
def test_a_server_with_another_client_is_left_with_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RpcAddress("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(RpcServerError, match="it has another client, or hangs"):
            find_server(address, never)
        connection, _ = listener.accept()  # as the server does, once the other client has left
        with connection:
            assert connection.recv(len(HELLO), socket.MSG_WAITALL) == HELLO
            with pytest.raises(ConnectionResetError):  # where a closed connection takes this part
                connection.sendall(bytes(8))


def test_a_server_that_comes_back_is_waited_for() -> None:
    n_asked = 0

    def second_time(connection: socket.socket) -> None:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        speaking(*VERSION, 0)(connection)

    with server(second_time) as address:
        assert find_server(address, never) == str(address)
    assert n_asked == 2


def test_an_engine_that_is_closed_waits_no_longer() -> None:
    with pytest.raises(ClosedError):
        find_server(RpcAddress("127.0.0.1", 1), lambda: True)


@pytest.mark.usefixtures("impatience")
def test_a_full_queue_of_those_who_wait_is_told_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", full)
    with pytest.raises(RpcServerError, match="it has another client, or hangs"):
        find_server(RpcAddress("127.0.0.1", 1), never)


def test_a_library_without_rpc_is_said_to_be_one_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library(), "ggml_backend_reg_by_name", lambda _: None)
    with pytest.raises(LibraryError, match=r"build_llama.sh --rpc"):
        find_servers(["127.0.0.1:1"], never)


@pytest.mark.parametrize(
    ("answer", "reason"), [(None, "has another client"), (False, "it has no device")]
)
def test_a_server_that_is_lost_between_greeting_and_use_is_named(
    answer: bool | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def add(endpoint: str) -> bool:
        if answer is None:  # as long as the other client stays
            released.wait()
        return bool(answer)

    monkeypatch.setattr(rpc, "REGISTER_S", 0.1 if answer is None else 30.0)
    monkeypatch.setattr(library(), "add_rpc_server", add, raising=False)
    with pytest.raises(RpcServerError, match=reason) as caught:
        use_servers(["gpu:1"], ["10.0.0.1:1"])
    released.set()
    assert caught.value.address == "gpu:1"
