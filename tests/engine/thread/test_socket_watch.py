"""A socket that the event loop reads: from where on, and until when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial

import anyio
import pytest
from anyio import to_thread

from cllm.engine.thread.socket_watch import SocketWatch

pytestmark = pytest.mark.anyio


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


class Reader:
    """What has been read of a socket, until an `x`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.data = b""
        self._changed = anyio.Event()

    def on_readable(self) -> bool:
        self.data += self._connection.recv(1)
        self._changed.set()
        return not self.data.endswith(b"x")

    async def until(self, data: bytes) -> None:
        with anyio.fail_after(30):
            while self.data != data:
                self._changed = anyio.Event()
                await self._changed.wait()


async def test_what_comes_is_read_until_the_reader_says_no_and_again_when_it_is_watched_again(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    watch, reader = SocketWatch(), Reader(ours)
    watch.start(ours, reader.on_readable)
    watch.start(ours, reader.on_readable)  # it is
    theirs.send(b"ab")
    await reader.until(b"ab")
    theirs.send(b"cxd")
    await reader.until(b"abcx")
    await anyio.wait_all_tasks_blocked()
    assert reader.data == b"abcx"
    start = partial(watch.start, ours, reader.on_readable)
    await to_thread.run_sync(watch.call_soon, start)
    await reader.until(b"abcxd")
    watch.close(ours)
    await wait_closed(ours)


async def wait_closed(connection: socket.socket) -> None:
    with anyio.fail_after(30):
        while connection.fileno() != -1:
            await anyio.sleep(0)


async def test_a_socket_is_closed_while_it_is_watched_and_the_next_may_have_its_number(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    watch = SocketWatch()
    watch.start(ours, Reader(ours).on_readable)
    await anyio.wait_all_tasks_blocked()
    number = ours.fileno()
    await to_thread.run_sync(watch.close, ours)
    await wait_closed(ours)
    again, theirs = socket.socketpair()
    with again, theirs:
        assert number in (again.fileno(), theirs.fileno())
        reader = Reader(again)
        watch.start(again, reader.on_readable)
        theirs.send(b"a")
        await reader.until(b"a")
        watch.close(again)
        await wait_closed(again)


def test_without_its_loop_nothing_is_called_and_a_socket_is_closed_at_once(
    pair: tuple[socket.socket, socket.socket], anyio_backend_name: str
) -> None:
    ours, _ = pair

    async def make() -> SocketWatch:
        watch = SocketWatch()
        watch.start(ours, lambda: True)
        return watch

    watch = anyio.run(make, backend=anyio_backend_name)
    assert not watch.call_soon(asyncio.Event().set)
    watch.close(ours)
    assert ours.fileno() == -1
