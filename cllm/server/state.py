"""State that the routes of one server share."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import anyio
from starlette.requests import Request

from cllm import DeadlineError, Engine, EngineConfig, SamplingParams, SlotInfo
from cllm.server.answers.running import Observation
from cllm.server.config import ServerConfig
from cllm.server.http.fetching import ImageFetcher, Network
from cllm.server.http.problems import shutting_down, too_many, too_many_messages, unavailable
from cllm.server.operation.latest_frame import LatestFrame
from cllm.server.operation.metrics import Metrics
from cllm.server.operation.pulls import Pulls, is_same_model
from cllm.server.operation.tracing import Tracing
from cllm.server.operation.usage import Access

logger: logging.Logger = logging.getLogger("cllm.server")

MAX_WAITING = 64  # for the tokenizer
N_BYTES_TOKEN = 4  # of text, about


class Served(NamedTuple):
    """Identity of the model in replies: the name that clients know, and `Completion.fingerprint`."""

    name: str
    fingerprint: str


class ServerState:
    """State of one server: its engine, settings, metrics and traces.

    Attributes
    ----------
    engine : Engine or None
        None until the model is loaded, and after a failure.
    failure : BaseException or None
        Error that ended the load of the model, or the engine later.
    settings : EngineConfig
        Settings that the application was made with.
    is_pooled : bool
        True if the server has several models.
    stopping : Event
        Set when the server is to stop.
    started_at : int
        Unix time in seconds.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics: Metrics = Metrics()
        self.tracing: Tracing = Tracing(config.otlp_traces_endpoint)
        self.settings: EngineConfig = EngineConfig()
        self.is_pooled: bool = False
        self.pulls: Pulls = Pulls()
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.started_at: int = int(time.time())
        self._ids: set[str] = set()
        self.renew()

    def renew(self) -> None:
        """Forget the engine, and create the objects that belong to one event loop anew."""
        self.engine, self.failure = None, None
        self.stopping: anyio.Event = anyio.Event()
        self.pulls.renew()
        self.live: LatestFrame = LatestFrame()
        self.fetcher: ImageFetcher = ImageFetcher(self.config.image_hosts, _public_network)
        self._tokenizing = anyio.CapacityLimiter(2)

    @asynccontextmanager
    async def tokenizer_turn(self) -> AsyncIterator[None]:
        """Wait for one of two turns at the tokenizer, so that prompts do not wait for texts that are only counted.

        Raises
        ------
        Problem
            429: `MAX_WAITING` requests wait.
        """
        n_waiting = self._tokenizing.statistics().tasks_waiting
        if n_waiting >= MAX_WAITING:
            raise too_many(f"{n_waiting} requests wait for the tokenizer")
        async with self._tokenizing:
            yield

    @contextmanager
    def unique(self, request_id: str) -> Iterator[str]:
        """Yield a request id for the engine: the given one, with a random suffix if that is in use.

        A gateway may send several requests with one id.
        """
        unique = request_id
        while unique in self._ids or (self.engine is not None and self.engine.is_open(unique)):
            unique = f"{request_id}.{secrets.token_hex(4)}"
        self._ids.add(unique)
        try:
            yield unique
        finally:
            self._ids.discard(unique)

    async def reload(self, model: str | None = None) -> float:
        """Load a model beside the present one, and return the seconds that it took; None: the present one again.

        Requests that run finish with the old model; new ones use the new one.  Settings that belong to one model,
        such as adapters, are those of `settings` for the model that it names, and the defaults for others.

        Raises
        ------
        Problem
            As `serving` raises it.
        CllmError, anyio.BusyResourceError
            As `Engine.reload` raises them; the present model goes on.
        """
        started_at = time.monotonic()
        engine, changed = self.serving, dict[str, Any]()
        if model is not None:
            first = self.settings
            is_first = is_same_model(model, first.model)
            changed = settings_of_one_model(first) if is_first else settings_of_another(first)
        await engine.reload(model, **changed)
        seconds = time.monotonic() - started_at
        logger.info("reloaded %s in %.1f s", self.serving.config.model_path.name, seconds)
        return seconds

    def stop(self) -> None:
        """Reject new requests, and let the engine finish the present ones."""
        self.stopping.set()
        self.pulls.stop()

    @property
    def is_draining(self) -> bool:
        """True if the server is shutting down: running requests may finish."""
        return self.stopping.is_set()

    @property
    def serving(self) -> Engine:
        """The engine, which accepts requests.

        Raises
        ------
        Problem
            503: the model is being loaded, the server is shutting down, or the engine has failed.
        """
        if self.engine is not None and not self.is_draining and self.failure is None:
            return self.engine
        if self.failure is not None:
            raise unavailable(f"no request can be served since an earlier failure: {self.failure}")
        raise shutting_down() if self.is_draining else unavailable("the model is being loaded")

    @property
    def n_ctx(self) -> int:
        """Context length in tokens; 0 until the model is loaded."""
        return 0 if self.engine is None else self.engine.model.n_ctx

    def n_body_bytes_max(self) -> int:
        """Return how many bytes a body may have."""
        takes_media = self.engine is None or len(self.engine.model.modalities) > 1
        return self.config.n_body_bytes_max(self.n_ctx, takes_media=takes_media)

    def check_messages(self, n: int, field: str = "messages") -> None:
        """Raise an error if a chat has too many messages.

        Raises
        ------
        Problem
            400: `n` is more than `ServerConfig.n_messages_max`; names `field`.
        """
        limit = self.config.n_messages_max(self.n_ctx)
        if n > limit:
            raise too_many_messages(n, limit, field)

    @property
    def model_name(self) -> str:
        """Name of the model for clients: the configured one, or that of its file without suffix.

        Without a configured name, raise `Problem` (503) while the model is loaded.
        """
        if self.config.model_name is not None:
            return self.config.model_name
        return self._present.config.model_path.stem

    @property
    def _present(self) -> Engine:
        """The engine, also while it finishes its requests; raises the errors of `serving` without one."""
        return self.serving if self.engine is None else self.engine

    @property
    def served(self) -> Served:
        """Identity of the model in replies."""
        return Served(self.model_name, self._present.model.fingerprint)

    def observation(self, request: Request, operation: str, params: SamplingParams) -> Observation:
        """Return the metrics and the trace for a request with these sampling parameters."""
        access: Access | None = request.scope["state"].get("access")
        if access is not None:
            access.model = self.model_name
        return Observation(
            metrics=self.metrics,
            tracing=self.tracing,
            headers=request.headers,
            operation=operation,
            model=self.model_name,
            params=params,
            access=access,
        )


def state_of(request: Request) -> ServerState:
    """Return the state of the server that received a request."""
    state: ServerState = request.app.state.server
    return state


def request_id_of(request: Request) -> str:
    """Return the id of a request: the client's `X-Request-ID` if that is valid, otherwise a random one."""
    request_id: str = request.state.request_id
    return request_id


def note_tokens(request: Request, n_tokens: int) -> None:
    """Count the tokens of texts whose vectors were computed as tokens of the request."""
    access: Access | None = request.scope["state"].get("access")
    if access is not None:
        access.model, access.n_prompt = state_of(request).model_name, access.n_prompt + n_tokens


@contextmanager
def counting_if_given_up(request: Request, texts: Iterable[str | Sequence[int]]) -> Iterator[None]:
    """Count tokens of the request if its client leaves, or its deadline passes, while its texts are computed.

    How many of them were computed is unknown: four bytes of text count as one token, also in the queue.
    """
    try:
        yield
    except (DeadlineError, anyio.get_cancelled_exc_class()):
        n_most = state_of(request).n_ctx
        sizes = (
            len(t.encode(errors="replace")) // N_BYTES_TOKEN if isinstance(t, str) else len(t)
            for t in texts
        )
        note_tokens(request, sum(min(size, n_most) for size in sizes))
        raise


def visible_slots(request: Request, slots: Iterable[SlotInfo]) -> list[SlotInfo]:
    """Return slots without the tenants and requests that a client with a key of its own must not see."""
    key = request.scope["state"].get("key")
    if key is None:
        return list(slots)
    return [
        s if s.tenant in ("", key.name) else replace(s, tenant="", request_id=None) for s in slots
    ]


def log_request(state: ServerState, request_id: str, prompt: object) -> None:
    """Log a prompt with the id of its request, if `log_prompts` is set."""
    if state.config.log_prompts:
        logger.info("request %s: %r", request_id, prompt)


def _public_network() -> Network:
    from cllm.server.http.public_network import PublicNetwork  # takes a tenth of a second

    return PublicNetwork()


def settings_of_another(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that belong to the model of a configuration, with their defaults, for another model."""
    names = settings_of_one_model(config)
    return {field.name: field.default for field in fields(EngineConfig) if field.name in names}


def settings_of_one_model(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that belong to the model of a configuration, such as its adapters."""
    names = ["lora", "embedding_model", "pooling", "chat_template", *config.rope]
    if config.mmproj != "auto":
        names.append("mmproj")
    if config.draft_model is not None or config.uses_mtp:
        names.append("speculation")
    return {name: getattr(config, name) for name in names}
