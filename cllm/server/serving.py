"""The server process: uvicorn and the application.  The engine's process, if it has one, is its child."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from cllm import EngineConfig, InvalidArgumentError
from cllm.server.app import create_app
from cllm.server.config import ServerConfig
from cllm.server.engine_task import EngineTask
from cllm.server.http.connections import (
    N_AT_ONCE,
    N_DESCRIPTORS,
    Connections,
    n_connections_max,
)
from cllm.server.http.protocol import WireLimits, protocol_with
from cllm.server.operation.supervisor import notify
from cllm.shared_libraries import c_library
from cllm.system import raise_descriptor_limit

logger: logging.Logger = logging.getLogger("cllm.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not on Windows
# After `drain_timeout_s`, the drain cancels the running requests.  uvicorn's limit comes so many
# seconds later, as it cuts answers off.
MARGIN_S = 5
BACKLOG = 1024
M_MMAP_THRESHOLD = -3  # of malloc.h


class Server(uvicorn.Server):
    """A server of one application, with the limits of its settings.

    Attributes
    ----------
    heard : list of int
        Signals that arrived before uvicorn handled signals; handled when it starts to.
    """

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        n_max = n_connections_max(raise_descriptor_limit(N_DESCRIPTORS), config.max_connections)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_with(
                    WireLimits(
                        max_header_bytes=config.max_header_bytes,
                        header_timeout_s=config.header_timeout_s,
                        write_timeout_s=config.write_timeout_s,
                        on_refused=partial(app.state.server.metrics.answered, "none"),
                        connections=Connections(n_max),
                    )
                ),
                backlog=N_AT_ONCE,
                timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]  # a fraction too
                timeout_graceful_shutdown=math.ceil(config.drain_timeout_s) + MARGIN_S,
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                root_path=config.root_path or "",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        self.heard: list[int] = []
        self._reloading: asyncio.Task[None] | None = None
        self._is_reload_due = False
        self._has_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._state = app.state.server
        self._engine_task: EngineTask | None = getattr(app.state, "engine_task", None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            for number in self.heard:
                self.handle_exit(number, None)
            if HANGUP is not None and threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(HANGUP, self._on_hangup)
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # again: asyncio has set the backlog to `N_AT_ONCE`
        self._readiness = asyncio.get_running_loop().create_task(self._notify_ready())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._readiness.cancel()
        notify("STOPPING=1")
        self._state.stop()
        await super().shutdown(sockets)

    async def _notify_ready(self) -> None:
        """Notify the supervisor once the model is loaded; at once if requests load several models."""
        if self._engine_task is not None:
            await self._engine_task.load_ended.wait()
            if self._state.failure is not None:
                return
        notify("READY=1")

    def _on_hangup(self) -> None:
        """Read the model again, after a reload that has begun; end if the terminal was closed."""
        if self._has_terminal:
            self.handle_exit(signal.SIGTERM, None)
            return
        self._is_reload_due = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.get_running_loop().create_task(self._reload_quietly())
        else:
            logger.info("another reload follows the present one")

    async def _reload_quietly(self) -> None:
        while self._is_reload_due:
            self._is_reload_due = False
            try:
                await self._state.reload()
            except Exception as error:  # the present model goes on
                logger.error("the model is not reloaded: %s", error)


def listen(config: ServerConfig) -> socket.socket:
    """Return a listening socket: of `uds`, or of `host` and `port` with connections that send without delay.

    Raises
    ------
    OSError
        The address is in use or invalid, or the host name cannot be resolved.
    """
    if config.uds is not None:
        return _listen_on_path(config.uds)
    host, port = config.host, config.port
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # asyncio sets this only on sockets that it has made.  Otherwise an event waits for the client's
    # acknowledgement of the event before, up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def check_certificate(config: ServerConfig) -> None:
    """Raise `InvalidArgumentError` if the certificate and its key cannot be used."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise InvalidArgumentError("ssl_keyfile", config.ssl_keyfile, "given with ssl_certfile")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile
        )
    except OSError as error:  # also ssl.SSLError
        limit = f"a PEM file of a certificate that fits its key ({error.strerror or error})"
        raise InvalidArgumentError("ssl_certfile", config.ssl_certfile, limit) from None


def _listen_on_path(path: str) -> socket.socket:
    """Return a listening Unix socket; the file of a server that has ended is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).exists() and not Path(path).is_socket():
            raise FileExistsError(errno.EEXIST, "it is no socket")
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(path) == errno.ECONNREFUSED:
                    Path(path).unlink()
        listener.bind(path)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def return_large_blocks() -> None:
    """Make glibc return each freed block of 1 MiB or more to the system; do nothing with another C library.

    Otherwise it keeps such blocks after the first has been freed: bodies with images, and their pixels.
    """
    if (mallopt := getattr(c_library(), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def serve(
    engine: EngineConfig,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[], None] = lambda: None,
    make_app: Callable[..., FastAPI] = create_app,
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code.  Main thread only.

    The first signal lets running requests finish, for at most `drain_timeout_s`.  A SIGINT after it ends the
    server at once.  The exit code is 1 if the engine has failed, 130 after SIGINT, otherwise 0.

    Parameters
    ----------
    announce : callable
        Called once the signal handlers are installed.
    make_app : callable
        Returns the application: `create_app`, or a function with the same parameters.
    """
    heard: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: heard.append(number))
    if HANGUP is not None:  # until there is a model that can be read again
        signal.signal(HANGUP, signal.SIG_IGN)
    announce()

    def on_failed() -> None:
        server.should_exit = True

    app = make_app(engine, config, on_failed=on_failed)
    server = Server(app, config)
    server.heard = heard
    return_large_blocks()
    # Imported objects live to the end; collecting garbage among them would stop streams for 0.06 s.
    gc.freeze()
    server.run(sockets=[listener])
    if app.state.server.failure is not None:
        return 1
    # At its end, uvicorn raises the signals that it has handled again: they are in `heard`.
    return 130 if signal.SIGINT in heard else 0
