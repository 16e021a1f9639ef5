"""The process that serves: uvicorn, the application, the engine.

`python -m cllm.server.worker FD` reads its settings as one JSON line from standard input (an API
key on the command line could be read by everybody) and serves on the listening socket FD.  When
standard input ends, so does the process: nobody supervises it any more.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from cllm import CllmError, EngineConfig
from cllm.server.app import create_app
from cllm.server.config import ServerConfig
from cllm.server.logs import configure_logging
from cllm.server.protocol import protocol_with

STDIN = 0


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A drain ends what does not end in time; uvicorn's own limit, which tears answers, is for the rest.
MARGIN_S = 5


class _Server(uvicorn.Server):
    heard: list[int]
    on_shutdown: Callable[[], None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            for number in self.heard:  # before there was anybody to act on them
                self.handle_exit(number, None)
            # The supervisor has blocked them until there is somebody who listens.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_shutdown()
        await super().shutdown(sockets)


def serve(
    engine: EngineConfig,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code.

    SIGTERM and the first SIGINT let what runs finish; the second SIGINT is at once.

    Parameters
    ----------
    announce : callable
        Called when signals are heard.
    """
    heard: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: heard.append(number))
    announce()

    def on_failed() -> None:
        server.should_exit = True

    app = create_app(engine, config, on_failed=on_failed)
    server = _Server(
        uvicorn.Config(
            app,
            http=protocol_with(
                max_header_bytes=config.max_header_bytes,
                header_timeout_s=config.header_timeout_s,
                write_timeout_s=config.write_timeout_s,
                on_refused=partial(app.state.server.metrics.answered, "none"),
            ),
            timeout_keep_alive=int(config.keep_alive_s),
            timeout_graceful_shutdown=int(config.drain_timeout_s) + MARGIN_S,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
        )
    )
    server.heard, server.on_shutdown = heard, app.state.server.stop
    server.run(sockets=[listener])
    if app.state.server.failure is not None:
        return 1
    # uvicorn raises the signals that ended it once more.
    return 130 if signal.SIGINT in heard else 0


def settings_line(engine: EngineConfig, config: ServerConfig) -> bytes:
    """The settings as the worker reads them."""
    values = {"engine": json.loads(engine.to_json()), "server": dataclasses.asdict(config)}
    return json.dumps(values).encode() + b"\n"


def read_settings(line: bytes) -> tuple[EngineConfig, ServerConfig]:
    """What `settings_line` wrote."""
    values: dict[str, dict[str, Any]] = json.loads(line)
    server = values["server"]
    for name in ("allowed_hosts", "cors_origins"):
        server[name] = tuple(server[name])
    return EngineConfig(**values["engine"]), ServerConfig(**server)


def _stop_with_the_supervisor() -> None:
    """Ask this process to stop when nobody holds the other end of standard input."""
    while os.read(STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _read_line() -> bytes:
    """The first line of standard input.  Unbuffered: Python ends badly while a thread reads."""
    line = b""
    while not line.endswith(b"\n"):
        if not (data := os.read(STDIN, 1 << 16)):
            raise EOFError("no settings")
        line += data
    return line


def main() -> int:
    """The worker's main function."""
    configure_logging()
    engine, config = read_settings(_read_line())
    threading.Thread(target=_stop_with_the_supervisor, name="cllm-supervised", daemon=True).start()
    logging.getLogger("cllm.server").debug("worker %d", os.getpid())
    try:
        return serve(engine, config, socket.socket(fileno=int(sys.argv[1])))
    except CllmError as error:
        logging.getLogger("cllm.server").error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
