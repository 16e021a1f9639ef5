"""One engine behind HTTP: OpenAI's endpoints, `/generate`, health, metrics.  Extra `server`.

`create_app` gives an ASGI application; `cllm serve` runs it, with the engine in a process of its own.
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
