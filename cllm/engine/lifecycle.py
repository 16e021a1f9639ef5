"""Lifecycle: how an engine starts, what state it is in, and how it ends.

Everything here runs on the event loop and never blocks it.  The inbox takes commands to the inference
thread.  The dispatcher receives the events of that thread, once per tick.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, ParamSpec, Self, TypeVar, Unpack

import anyio

from cllm.bindings import fork_generation
from cllm.checks import check_timeout
from cllm.engine.config import AUTO, EngineConfig, EngineOptions, check_known, config_from
from cllm.engine.core.commands import ClearPrefixCache, LiveView, SlotInfo
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.health import EngineStatus, Health, Restart, check_serving, health_of
from cllm.engine.llama.backend import LlamaBackend
from cllm.engine.llama.fit import fitting_n_ctx
from cllm.engine.loop.loop_guard import LoopGuard
from cllm.engine.parts import Parts, start_parts
from cllm.engine.request import ModelInfo
from cllm.engine.sampling_params import SamplingOptions
from cllm.engine.thread.backend import Backend
from cllm.engine.thread.host import EngineHost
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import (
    ClosedError,
    EngineFailedError,
    InvalidArgumentError,
    InvalidRequestError,
    WrongProcessError,
)
from cllm.hub.download import find_model, find_projector
from cllm.hub.names import is_name, is_projector, one_projector

logger: logging.Logger = logging.getLogger("cllm.engine")

P = ParamSpec("P")
T = TypeVar("T")


class Lifecycle:
    """Base class of engines: start, reload, state and end, but no requests."""

    # Backend of the child process with `process=True`, as "module:class"; a `LlamaBackend`.  None: this
    # class has no child process, and `process` counts as False.
    _child_backend: ClassVar[str | None] = "cllm.engine.llama.backend:LlamaBackend"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        on_restart: Callable[[Restart], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if config is not None and (model is not None or options):
            raise TypeError("config cannot be combined with model or other options")
        if not isinstance(config, EngineConfig | None):
            raise InvalidArgumentError("config", config, "an EngineConfig")
        self.config: EngineConfig = self._possible(
            config_from(model, options) if config is None else config
        )
        self._on_restart = on_restart
        self._status: EngineStatus | None = None
        self._entered: Parts | None = None  # the parts that take new requests
        self._started: list[Parts] = []  # also the parts that are being loaded, or that end
        # Hosts of `_started`; they hold no reference to this engine.
        self._hosts: list[EngineHost] = []
        self._loop_guard: LoopGuard | None = None
        self._earlier = EngineStatistics()  # sum of the parts that have ended
        # Before "auto" and names were resolved.
        self.given_config: EngineConfig = self.config
        self._is_reloading = False
        self._finalizer: weakref.finalize[..., Lifecycle] | None = None
        self._generation = fork_generation()

    def _possible(self, config: EngineConfig) -> EngineConfig:
        has_process = config.process and self._child_backend is not None
        return config if config.process == has_process else replace(config, process=False, rpc=())

    # --- Lifecycle ---------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        return await self.start()

    async def start(self) -> Self:
        """Load the model and return this engine, as entering it with `async with` does.

        For notebooks, and for programs that start and end in different functions: call `aclose` at the end.

        Raises
        ------
        ClosedError
            The engine was started before.
        ModelLoadError, DownloadError
            The model cannot be loaded or downloaded.
        """
        if self._status is not None:
            self._check_process()
            raise ClosedError("an engine can be entered once")
        self._status, self._generation = EngineStatus.STARTING, fork_generation()
        try:
            self.given_config = self.config
            self.config = await _resolved(self.given_config)
            if self._is_closed:
                raise ClosedError("the engine was closed before its model was loaded")
            self._entered = self._start(self.config, self._make_backend(self.config))
        except BaseException:
            self._status = EngineStatus.CLOSED
            raise
        try:
            await self._loaded(self._entered)
        except BaseException:
            await self.aclose()
            raise
        self._status = EngineStatus.READY
        return self

    def _start(self, config: EngineConfig, backend: Backend) -> Parts:
        """Make the parts of a model, and begin to load it."""
        if self._loop_guard is None:
            self._loop_guard = LoopGuard()
        parts = start_parts(
            config,
            backend,
            self._child_backend,
            self._loop_guard,
            _weakly(self._check_host),
            self._on_restart,
        )
        self._started.append(parts)
        self._hosts.append(parts.thread)
        if self._finalizer is None:
            name = repr(config.model_path.name)
            self._finalizer = weakref.finalize(
                self, _stop_leaked, self._hosts, name, self._generation
            )
            self._finalizer.atexit = False  # the hosts have exit handlers of their own
        return parts

    async def fetch(self) -> None:
        """Download the files of the models that are given by name and are not on this machine.

        Raises
        ------
        DownloadError
            A file cannot be downloaded.
        """
        await _found(self.config)

    async def check_memory(self) -> None:
        """Check that the model would fit into available memory, before it is loaded.

        Raises
        ------
        ModelLoadError, DownloadError
            The model does not fit, or its file cannot be used.
        """
        config = await _resolved(self.config)
        await anyio.to_thread.run_sync(self._make_backend(config).check_memory, None)

    async def _loaded(self, parts: Parts) -> None:
        """Wait until the model is loaded.

        Raises
        ------
        CllmError
            The model cannot be loaded, or the engine was closed meanwhile.
        """
        await parts.dispatcher.answered.wait()
        if self._is_closed:
            raise ClosedError("the engine was closed while it was loading")
        if (failure := parts.thread.failure) is not None:
            raise failure

    @property
    def _parts(self) -> Parts:
        if self._entered is None:
            raise ClosedError(
                "the engine has not been entered: use it with `async with`, or await `start`"
            )
        return self._entered

    def _make_backend(self, config: EngineConfig) -> Backend:
        return LlamaBackend(config)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel all requests, free everything, join the threads.  Closing twice is allowed.

        If this call is interrupted, the engine ends all the same.  A forked child has no engine; there the
        call only marks it as closed.

        Raises
        ------
        WrongThreadError
            Called from another event loop; nothing has changed.
        """
        started = list(self._started) if self._generation == fork_generation() else []
        if not started or (self._is_closed and all(p.dispatcher.ended.is_set() for p in started)):
            self._status = EngineStatus.CLOSED
            return
        assert self._loop_guard is not None
        self._loop_guard.check()
        self._status = EngineStatus.CLOSED
        assert self._finalizer is not None
        self._finalizer.detach()
        for parts in started:
            parts.thread.request_stop()
        for parts in started:
            await parts.aclose()

    async def drain(self, timeout: float | None = None) -> None:
        """Reject new requests and wait until the present ones have ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds; requests that have not ended by then are cancelled.  None: no limit.

        Raises
        ------
        ClosedError, EngineFailedError
            The engine does not serve requests.
        InvalidRequestError
            `timeout` is not 0 to 1e9 seconds; nothing has changed.
        """
        self._check_serving()
        limit_s = check_timeout(timeout, InvalidRequestError)
        self._status = EngineStatus.DRAINING
        with anyio.move_on_after(limit_s):
            await self._wait_idle()
        for parts in self._started:
            parts.dispatcher.cancel_all()
        await self._wait_idle()

    async def _wait_idle(self) -> None:
        for parts in list(self._started):
            # Requests that are being tokenized or continued count too.
            while not parts.gate.is_empty:
                await parts.gate.wait_left()

    async def reload(
        self, model: str | Path | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        """Load a model beside the present one, which is freed when its requests have ended.

        New requests use the new model as soon as it is loaded.  The call returns when the old model is
        freed.  If the call is cancelled before the new model is loaded, nothing changes.  If it is cancelled
        later, the old model is still freed when its requests have ended.

        Parameters
        ----------
        model : path or str, optional
            A GGUF file, or a name (`hf:user/repo:quant`); None: the present one, read again.  For another
            model, `n_ctx="auto"` and `mmproj="auto"` are resolved again: `n_ctx` for the memory that is left
            beside the present model.
        **options
            The fields of `EngineConfig` that change.

        Raises
        ------
        TypeError, InvalidArgumentError
            An unknown option, or one with a value that cannot be used.
        ModelLoadError, DownloadError
            The file cannot be used, or both models do not fit into memory; nothing has changed.
        anyio.BusyResourceError
            The engine is being reloaded.
        """
        self._check_serving()
        check_known(options)
        # For another model, "auto" is resolved again.
        base = self.config if model is None else replace(self.given_config, model=model)
        config = self._possible(replace(base, **options))
        given = replace(self.given_config, **options) if model is None else config
        if self._is_reloading:
            raise anyio.BusyResourceError("reloading")
        self._is_reloading = True
        try:
            await self._replace(await _resolved(config), given)
        finally:
            self._is_reloading = False

    async def _replace(self, config: EngineConfig, given: EngineConfig) -> None:
        for parts in list(self._started):
            # An earlier `reload` was cancelled while these parts were ending.
            if parts is not self._entered and parts.dispatcher.stopped.is_set():
                await self._end(parts)
        old, backend = self._parts, self._make_backend(config)
        await anyio.to_thread.run_sync(backend.check_memory, self.config)
        self._check_serving()
        new = self._start(config, backend)
        try:
            await self._loaded(new)
            self._check_serving()
        except BaseException:
            await self._end(new)
            raise
        self._entered, self.config, self.given_config = new, config, given
        old.end_when_idle()
        await old.dispatcher.stopped.wait()
        await self._end(old)

    async def _end(self, parts: Parts) -> None:
        await parts.aclose()
        if parts in self._started:
            self._started.remove(parts)
            self._hosts.remove(parts.thread)
            self._earlier = parts.thread.statistics.plus(self._earlier)

    async def wait_stopped(self) -> None:
        """Wait until the engine serves no more requests: it was closed, or has failed (see `health`)."""
        while True:
            parts = self._parts
            await parts.dispatcher.stopped.wait()
            if parts is self._entered:
                return

    # --- Inspection --------------------------------------------------------------------------
    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        model = self._parts.dispatcher.model
        if model is None:
            raise ClosedError(
                "the engine has not been entered: use it with `async with`, or await `start`"
            )
        return model

    @property
    def sampling_defaults(self) -> SamplingOptions:
        """Sampling fields from the model's file, for requests that leave them out."""
        model = None if self._entered is None else self._entered.dispatcher.model
        return SamplingOptions() if model is None else model.sampling

    def statistics(self) -> EngineStatistics:
        """Return the counters after the last tick.  Any thread, at any time."""
        present = self._entered
        if present is None:
            return EngineStatistics()
        told = present.thread.statistics
        for parts in list(self._started):
            if parts is not present:
                told = told.plus(parts.thread.statistics, is_present=parts.thread.is_alive)
        return told.plus(self._earlier)

    def is_open(self, request_id: str) -> bool:
        """Return True if a request with this id is open.  Closing its stream ends it a moment later."""
        return self._entered is not None and self._parts.dispatcher.is_open(request_id)

    def health(self) -> Health:
        """Return the status of the engine, with the reason if it serves no requests.  Any thread."""
        return health_of(
            self._present_status,
            0.0 if self._entered is None else self._entered.thread.heartbeat_age_s,
            failure=self._failure,
            crash="" if self._entered is None else self._entered.thread.crash,
            stall_timeout_s=self.config.stall_timeout_s,
        )

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes of finished requests: in KV cells, host memory and files."""
        with self._serving(draining=True) as parts:
            await parts.dispatcher.ask(ClearPrefixCache())

    async def slots(self) -> tuple[SlotInfo, ...]:
        """Return the state of each seq_id, and the request that it serves; in ascending order."""
        with self._serving(draining=True) as parts:
            return (await parts.dispatcher.live_view()).slots

    async def live_view(self) -> LiveView:
        """Return the state of each seq_id, the content of the KV cache, and the ticks since the last call."""
        with self._serving(draining=True) as parts:
            return await parts.dispatcher.live_view()

    async def audit(self) -> list[str]:
        """Return a text for each difference between bookkeeping and llama.cpp; the next tick repairs them."""
        with self._serving(draining=True) as parts:
            return await parts.dispatcher.audit()

    # --- Helpers -----------------------------------------------------------------------------
    @contextmanager
    def _serving(self, *, draining: bool = False) -> Iterator[Parts]:
        """Yield the parts that take requests; they stay open until the end of the block, even after a reload."""
        self._check_serving(draining=draining)
        parts = self._parts
        with parts.gate.visit():
            yield parts

    def _check_serving(self, *, draining: bool = False) -> EngineVocabulary:
        """Return the vocabulary; raise an error if this engine serves no requests to this caller."""
        if self._entered is not None:
            return self._check_host(self._entered.thread, draining=draining)
        self._check_process()
        check_serving(self._status, None, draining=draining)
        raise ClosedError(
            "the engine has not been entered: use it with `async with`, or await `start`"
        )

    def _check_host(self, host: EngineHost, *, draining: bool = False) -> EngineVocabulary:
        """Return the vocabulary of a host as `_check_serving` does; a request stays with its host."""
        self._check_process()
        present = None if self._entered is None else self._entered.thread
        if not (host is present or host.is_alive or host.failure or self._is_closed):
            raise ClosedError("the model of this request was replaced by `reload`")
        check_serving(self._status_of(host), host.failure, draining=draining)
        assert self._loop_guard is not None
        self._loop_guard.check()
        vocabulary = host.vocabulary
        if vocabulary is None:  # the host has failed; its last event has not arrived yet
            raise EngineFailedError("the engine has failed")
        return vocabulary

    def _check_process(self) -> None:
        if self._generation != fork_generation():
            raise WrongProcessError(
                "the engine was made before a fork; make one in this process instead"
            )

    @property
    def _is_closed(self) -> bool:
        return self._status is EngineStatus.CLOSED

    @property
    def _present_status(self) -> EngineStatus | None:
        """Return the status, including an unexpected end of the thread."""
        return self._status if self._entered is None else self._status_of(self._entered.thread)

    def _status_of(self, host: EngineHost) -> EngineStatus | None:
        if self._is_closed:
            return self._status
        if host.failure is not None:
            return EngineStatus.FAILED
        # A host also ends if its event loop is gone.
        return self._status if host.is_alive else EngineStatus.CLOSED

    @property
    def _failure(self) -> BaseException | None:
        return None if self._entered is None else self._entered.thread.failure

    def __repr__(self) -> str:
        present = self._present_status
        status = "new" if present is None else present.value
        n_open = sum(parts.gate.n_open for parts in list(self._started))
        return f"<Engine {self.config.model_path.name} {status} open={n_open}>"


def _weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a callable for a method that holds no reference to the method's object.

    Streams hold the parts of an engine, which hold this callable; they must not keep the engine alive.
    """
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if (bound := found()) is None:
            raise ClosedError("the engine no longer exists: nothing in the program refers to it")
        return bound(*args, **kwargs)

    return call


def _stop_leaked(hosts: list[EngineHost], name: str, generation: int) -> None:
    """End the threads of an engine that was collected without being closed."""
    if generation == fork_generation():  # a forked child has no threads of the engine
        for host in hosts:
            host.request_stop()
        message = f"the engine of {name} was dropped without being closed: use `async with`"
        warnings.warn(message, ResourceWarning, stacklevel=2)


def _projector_beside(model: Path) -> Path | None:
    """Return the projector in the folder of a model; None without one, or with several."""
    found = sorted(path.name for path in model.parent.glob("*.gguf") if is_projector(path.name))
    chosen = one_projector(found)
    if found and chosen is None:
        logger.warning(
            "no projector is used: mmproj='auto' found several beside the model: %s",
            ", ".join(found),
        )
    return None if chosen is None else model.parent / chosen


async def _projector(given: str | Path | None, name: object, model: Path) -> str | Path | None:
    """Return the file of the projector that `mmproj` states, for a model that was given as `name`."""
    find: Callable[[], Path | None]
    if is_name(given):
        find = partial(find_model, given)
    elif given != AUTO:
        return given
    elif is_name(name):
        find = partial(find_projector, name)
    else:
        find = partial(_projector_beside, model)
    return await anyio.to_thread.run_sync(find, abandon_on_cancel=True)


async def _resolved(config: EngineConfig) -> EngineConfig:
    """Return the configuration with files instead of model names, and a number for `n_ctx="auto"`."""
    config = await _found(config)
    if config.n_ctx == AUTO:
        n_ctx, why = await anyio.to_thread.run_sync(fitting_n_ctx, config)
        logger.info("%s", why)
        config = replace(config, n_ctx=n_ctx)
    return config


async def _found(config: EngineConfig) -> EngineConfig:
    """Return the configuration with files instead of model names; those not on this machine are downloaded."""
    model, speculation, embedding_model = [
        await anyio.to_thread.run_sync(find_model, given, abandon_on_cancel=True)
        if is_name(given)
        else given
        for given in (config.model, config.speculation, config.embedding_model)
    ]
    name = config.model
    config = replace(config, model=model, speculation=speculation, embedding_model=embedding_model)
    mmproj = await _projector(config.mmproj, name, config.model_path)
    return replace(config, mmproj=mmproj)
