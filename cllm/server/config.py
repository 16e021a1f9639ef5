"""ServerConfig: everything about the server that is set before it starts."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from cllm.checks import INT32_MAX, ErrorType
from cllm.sampling_limits import MAX_LOGPROBS
from cllm.settings import (
    boolean,
    check_settings,
    file_path,
    integer,
    nonblank,
    number,
    secret,
    setting,
    texts,
)

MIN_S, MAX_S = 0.001, 1e6  # of timeouts, in seconds


def _host_names(name: str, given: object, error: ErrorType) -> tuple[str, ...]:
    return tuple(each.lower() for each in texts(name, given, error))


def _root_path(name: str, given: object, error: ErrorType) -> str:
    if not isinstance(given, str) or not re.fullmatch(r"(/[\w.~-]+)+/?", given, re.ASCII):
        raise error(name, given, "a path that begins with /, of letters, digits and . _ ~ -")
    return given.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of a server; those of its engine are an `EngineConfig`.

    The first sentence about a field is the help of its option.

    Parameters
    ----------
    host : str
        Address to listen on.  On a loopback address, only requests whose Host is a loopback host are answered.
        On others without a key, it must be an address, a local name, or this machine's name.  A local name has
        no dot, or ends in `.local` or the like.  A web page thus cannot use a name of its own (DNS rebinding).
    port : int
        Port to listen on; 0 takes a free one.
    uds : str, optional
        Unix socket to listen on, in place of host and port.  Its permissions follow the umask.
    ssl_certfile, ssl_keyfile : str, optional
        PEM files of a certificate and of its key: the server speaks HTTPS.  The certificate's file may hold the key.
    root_path : str, optional
        Path under which a proxy serves this server, such as /llm; the proxy removes it from requests.
    api_key : str, optional
        Key that clients send as a bearer token.  `/health`, the other probes and `/docs` need none.
    api_keys : str, optional
        TOML file with a table of `key` and limits for each client; read again when it changes.
    admin_key : str, optional
        Key of `POST /admin/reload` and `POST /api/pull`; without one, there are no such routes.
    model_name : str, optional
        Name of the model for clients; by default that of the file.
    image_hosts : tuple of str
        A host from which images at http: and https: addresses are fetched, as HOST or HOST:PORT; "*": any
        public one.  By default none: images are taken as data: URLs alone.
    allowed_hosts : tuple of str
        A host name that requests may be for besides this machine's own; "*": any.
    cors_origins : tuple of str
        A web page that may use the server, as https://host; "*": any.
    page : bool
        Serve a page at / with a chat and a view of the engine.  The page needs no key, as `/docs`; its
        requests do.
    log_prompts : bool
        Put the prompts, or the messages, of requests into the log.
    otlp_traces_endpoint : str, optional
        URL that takes a span for each request, as OTLP over HTTP (extra tracing).
    ping_interval_s : float
        Seconds without output after which a stream sends a keep-alive; 0: never.  The keep-alive is a comment
        or an event without effect.
    max_connections : int, optional
        Connections at once; by default 4096, or fewer if the limit of file descriptors requires it.  One more
        closes the connection that has waited longest for headers; if none waits for them, the new one gets 503.
    max_messages : int, optional
        Messages of one chat; by default 1024, or one for each 16 tokens of context if that is more.
    max_body_bytes : int, optional
        Bytes of the body of one request; by default 4 MiB (32 MiB if the model takes images or audio), or 64 for
        each token of context if that is more.
    max_header_bytes : int
        Bytes of the request line and the headers of one request.
    max_n : int
        Outputs of one prompt that a request may ask for (`n`).
    max_prompts : int
        Outputs of one request: prompts times `n`.
    max_logprobs : int
        Most likely tokens that one request may ask for at each position.
    header_timeout_s : float
        Seconds for a client to send all of its headers.
    body_timeout_s : float
        Seconds for a client to send all of its body.
    write_timeout_s : float
        Seconds without progress after which a client that does not read its answer is disconnected.
    keep_alive_s : float
        Seconds until an idle connection is closed.
    drain_timeout_s : float
        Seconds for running requests to finish after SIGTERM.
    model_keep_alive_s : float, optional
        With several models: seconds until an unused one is freed.  None: never.
    max_models : int, optional
        With several models: how many are loaded at once; by default as many as memory allows.

    Raises
    ------
    InvalidArgumentError
        Names the field, the value and the limit.
    """

    host: str = setting("127.0.0.1", nonblank)
    port: int = setting(18081, integer(0, 65535))
    uds: str | None = setting(None, file_path, is_optional=True)
    ssl_certfile: str | None = setting(None, file_path, is_optional=True)
    ssl_keyfile: str | None = setting(None, file_path, is_optional=True)
    root_path: str | None = setting(None, _root_path)
    api_key: str | None = setting(None, secret, is_secret=True)
    api_keys: str | None = setting(None, file_path, is_optional=True)
    admin_key: str | None = setting(None, secret, is_secret=True)
    model_name: str | None = setting(None, nonblank, "--model-name -a --alias")
    image_hosts: tuple[str, ...] = setting((), _host_names, "--image-host")
    allowed_hosts: tuple[str, ...] = setting((), _host_names, "--allowed-host")
    cors_origins: tuple[str, ...] = setting((), texts, "--cors-origin")
    page: bool = setting(True, boolean)
    log_prompts: bool = setting(False, boolean)
    otlp_traces_endpoint: str | None = setting(
        None, nonblank, variable="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    )
    ping_interval_s: float = setting(15.0, number(0, MAX_S), "--ping-interval")
    max_connections: int | None = setting(None, integer(1, INT32_MAX))
    max_messages: int | None = setting(None, integer(1, INT32_MAX))
    max_body_bytes: int | None = setting(None, integer(1, 1 << 40))
    max_header_bytes: int = setting(32 << 10, integer(256, 1 << 30))
    max_n: int = setting(16, integer(1, 1 << 20))
    max_prompts: int = setting(64, integer(1, 1 << 20))
    max_logprobs: int = setting(20, integer(0, MAX_LOGPROBS))
    header_timeout_s: float = setting(10.0, number(MIN_S, MAX_S), "--header-timeout")
    body_timeout_s: float = setting(30.0, number(MIN_S, MAX_S), "--body-timeout")
    write_timeout_s: float = setting(30.0, number(MIN_S, MAX_S), "--write-timeout")
    keep_alive_s: float = setting(30.0, number(0, MAX_S), "--connection-keep-alive")
    drain_timeout_s: float = setting(30.0, number(0, MAX_S), "--drain-timeout")
    model_keep_alive_s: float | None = setting(
        300.0, number(0, MAX_S), "--keep-alive", is_optional=True
    )
    max_models: int | None = setting(None, integer(1, INT32_MAX), "--max-models --models-max")

    def __post_init__(self) -> None:
        check_settings(self)

    def n_messages_max(self, n_ctx: int) -> int:
        """Return how many messages a chat may have."""
        return max(1024, n_ctx // 16) if self.max_messages is None else self.max_messages

    def n_body_bytes_max(self, n_ctx: int, *, takes_media: bool = False) -> int:
        """Return how many bytes a body may have."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return max(32 << 20 if takes_media else 4 << 20, 64 * n_ctx)

    def of_model(self, name: str) -> ServerConfig:
        """Return a copy of the settings for one of several models, with its name as `model_name`."""
        return replace(self, model_name=name)

    @property
    def shown_host(self) -> str:
        """The `host` as part of a URL: an IPv6 address is in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def is_open_to_the_network(self) -> bool:
        """True if machines other than this one may use the server without a key."""
        return not self.needs_key and self.uds is None and not is_loopback(self.host)

    @property
    def needs_key(self) -> bool:
        """True if requests need a key."""
        return self.api_key is not None or self.api_keys is not None


def is_loopback(name: str) -> bool:
    """Return True if a name or an address is this machine's own loopback."""
    if name.lower() in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
