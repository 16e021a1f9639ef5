"""Run a command in a network namespace of its own, with a loopback device and nothing else.

    python -m tools.loopback_only COMMAND [ARGUMENT …]

Ports that the command opens on all interfaces cannot be reached from outside the namespace.  If the system
allows no namespace, the command runs without one, and a message is printed to stderr.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWNET = 0x40000000  # linux/sched.h
SIOCSIFFLAGS = 0x8914  # linux/sockios.h
IFF_UP, IFF_RUNNING = 0x1, 0x40  # linux/if.h


def leave_network() -> bool:
    """Move this process into an empty network namespace; False if that is not allowed, or not on Linux."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "unshare") and libc.unshare(CLONE_NEWNET) == 0


def start_loopback() -> None:
    """Bring up the loopback device of the network namespace.

    Raises
    ------
    OSError
        The kernel refuses.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))


def main() -> None:
    """Run the command, in a network namespace if that is allowed."""
    if leave_network():
        start_loopback()
    else:
        print("running without a network namespace, which is not allowed here", file=sys.stderr)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
