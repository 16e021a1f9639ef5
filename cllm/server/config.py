"""ServerConfig: everything about the server that is settled before it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from cllm import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of a server; those of its engine are an `EngineConfig`.

    Parameters
    ----------
    host : str
        On a loopback address only requests that name a loopback host are answered; on others,
        without a key, those for an address, for a name without a dot or of the local network, and
        for this machine's own name: a web page cannot reach the server under a name of its own
        (DNS rebinding).
    allowed_hosts : tuple of str
        More host names that requests may be for; `*` is all.
    port : int
        0 takes a free one.
    api_key : str, optional
        Asked for as `Authorization: Bearer …`, except by `/health` and `/docs`.
    model_name : str, optional
        What `/v1/models` says; by default the name of the file.
    cors_origins : tuple of str
        Web pages of other hosts that may use the server, as `https://host`; `*` is all, none is the
        default.
    page : bool
        Serve a page at `/`: to chat, and to look at the engine.  Without a key, as `/docs` is: what it
        asks for needs one.
    log_prompts : bool
        Put prompts and answers into the log.
    otlp_traces_endpoint : str, optional
        Sends a span for each request there, as OTLP over HTTP; needs the extra `tracing`.
    max_connections : int, optional
        By default 4,096.  Fewer where the process may have fewer descriptors.
    max_body_bytes : int, optional
        By default 4 MiB, or 64 bytes for each token of the context.
    max_header_bytes : int
    header_timeout_s, body_timeout_s : float
        For a client to send all of its headers, all of its body.
    write_timeout_s : float
        For a client to take what was sent to it; then it is cut off.
    keep_alive_s : float
        An idle connection is closed after it.
    ping_interval_s : float
        A stream that has nothing to say says so after each so many seconds, by a comment, or by an
        event that changes nothing; 0: never.
    drain_timeout_s : float
        After SIGTERM, for what runs to finish.
    model_keep_alive_s : float, optional
        Of several models: one that nobody uses is freed after it.  None: never.
    max_models : int, optional
        Of several models: so many are loaded at once, at the most; by default as many as memory allows.
    max_n, max_prompts, max_logprobs : int
        Caps for one request.
    max_messages : int, optional
        Of one chat; by default 1,024, or one for each 16 tokens of the context.
    """

    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    port: int = 18081
    api_key: str | None = None
    model_name: str | None = None
    cors_origins: tuple[str, ...] = ()
    page: bool = True
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None
    max_connections: int | None = None
    max_body_bytes: int | None = None
    max_header_bytes: int = 32 << 10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    keep_alive_s: float = 30.0
    ping_interval_s: float = 15.0
    drain_timeout_s: float = 30.0
    model_keep_alive_s: float | None = 300.0
    max_models: int | None = None
    max_n: int = 16
    max_prompts: int = 64
    max_logprobs: int = 20
    max_messages: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "allowed_hosts", tuple(name.lower() for name in self.allowed_hosts)
        )
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidArgumentError("api_key", self.api_key, "text that is not blank")

    def n_messages_max(self, n_ctx: int) -> int:
        """Return how many messages a chat may have."""
        return max(1024, n_ctx // 16) if self.max_messages is None else self.max_messages

    def n_body_bytes_max(self, n_ctx: int) -> int:
        """Return how many bytes a body may have."""
        return max(4 << 20, 64 * n_ctx) if self.max_body_bytes is None else self.max_body_bytes

    def of_model(self, name: str) -> ServerConfig:
        """The same for one of several models."""
        return replace(self, model_name=name)

    @property
    def is_open_to_the_network(self) -> bool:
        """Whether machines other than this one may use the server without a key."""
        return self.api_key is None and not is_loopback(self.host)


def is_loopback(name: str) -> bool:
    """Whether a name or an address is this machine's own, seen from itself."""
    if name.lower() in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
