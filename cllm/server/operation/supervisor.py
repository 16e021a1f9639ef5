"""Messages to systemd about the state of the server (sd_notify)."""

from __future__ import annotations

import logging
import os
import socket

logger: logging.Logger = logging.getLogger("cllm.server")


def notify(state: str) -> None:
    """Send a state, such as "READY=1", to the supervisor that `NOTIFY_SOCKET` names; do nothing without one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A name that begins with @ is in the abstract namespace.
    path = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(path)
            channel.sendall(state.encode())
    except OSError as error:
        logger.warning("cannot notify %s: %s", address, error)
