"""A command without a network but loopback, or, where that is not allowed, with a word about it."""

from __future__ import annotations

import subprocess
import sys

TRY = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print("loopback")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
    try:
        outside.connect(("192.0.2.1", 9))  # sends nothing
    except OSError:
        print("nothing else")
"""


def test_a_command_reaches_loopback_and_nothing_else_or_it_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.loopback_only", sys.executable, "-c", TRY],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = done.stdout.split("\n")[:-1]
    assert told[0] == "loopback"
    assert ("nothing else" in told) or ("without a network namespace" in done.stderr)
