"""The listening socket of `cllm serve`."""

from __future__ import annotations

import socket

from cllm.server import ServerConfig
from cllm.server.serving import listen


def test_what_is_written_to_a_client_does_not_wait_for_its_acknowledgements() -> None:
    with listen(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
