"""HTTP server of one engine: OpenAI's endpoints, `/generate`, health, metrics.  Needs the extra `server`.

`create_app` returns an ASGI application.  `cllm serve` runs it, by default with the engine in a child process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cllm.server.config import ServerConfig

if TYPE_CHECKING:
    from cllm.server.app import create_app

__all__ = ("ServerConfig", "create_app")


def __getattr__(name: str) -> object:
    # The command line reads the settings without the packages of the extra.
    if name != "create_app":
        raise AttributeError(f"module 'cllm.server' has no attribute {name!r}")
    from cllm.errors import extra

    with extra("server"):
        from cllm.server.app import create_app
    return create_app
