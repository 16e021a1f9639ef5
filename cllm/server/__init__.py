"""One engine behind HTTP: OpenAI's endpoints, `/generate`, health, metrics.  Extra `server`.

`create_app` gives an ASGI application; `cllm serve` runs it, with the engine in a process of its own.
"""

from cllm.errors import extra

with extra("server"):
    from cllm.server.app import create_app
    from cllm.server.config import ServerConfig

__all__ = ("ServerConfig", "create_app")
