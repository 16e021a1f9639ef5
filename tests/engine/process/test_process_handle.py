"""Reading of the socket between an engine and its process."""

from __future__ import annotations

import socket

from cllm.engine.process.handle import ProcessHandle


def test_a_connection_has_something_unread_when_data_has_come_and_when_the_process_has_ended() -> (
    None
):
    """A process that ends with unread commands resets the connection."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    handle = ProcessHandle.__new__(ProcessHandle)  # without a process
    handle.socket = ours
    with ours:
        assert not handle.has_unread
        theirs.send(b"x")
        assert handle.has_unread
        assert ours.recv(1) == b"x"
        assert not handle.has_unread
        ours.send(b"x")
        theirs.close()
        assert handle.has_unread
