"""A server with settings that the command line does not have: `python -m tests.server.hasty JSON`."""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

from cllm import EngineConfig
from cllm.server.config import ServerConfig
from cllm.server.operation.logs import configure_logging
from cllm.server.serving import listen, serve


def main() -> int:
    """Serve in this process, and print the address as `cllm serve` does."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    # Accepted connections inherit the size.  A small buffer soon blocks if the client does not read.
    n_send_buffer = settings.pop("send_buffer", None)
    engine: dict[str, Any] = settings.pop("engine", {})
    config = ServerConfig(port=0, **settings)
    configure_logging()
    with listen(config) as listener:
        if n_send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, n_send_buffer)
        url = f"http://{config.host}:{listener.getsockname()[1]}"

        def announce() -> None:
            sys.stderr.write(f"cllm: hasty at {url} \n")

        return serve(EngineConfig(n_threads=1, **engine), config, listener, announce)


if __name__ == "__main__":
    sys.exit(main())
