"""ModelPool: several models, each with an engine of its own, loaded at their first request.

Each model has an application of `create_app`.  A model without requests is freed after
`model_keep_alive_s`, or to make room for another model.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import anyio
from anyio.abc import TaskGroup
from fastapi import FastAPI

from cllm import CllmError, Engine, EngineConfig, ModelLoadError
from cllm.server.app import create_app
from cllm.server.config import ServerConfig
from cllm.server.engine_task import EngineTask
from cllm.server.http.problems import Problem, shutting_down, unavailable
from cllm.server.operation.metrics import Metrics
from cllm.server.operation.pulls import Pulls
from cllm.server.state import settings_of_another

logger: logging.Logger = logging.getLogger("cllm.server")

ALL_LAYERS = 1000  # more than any model has


class Attempts:
    """Attempts at one thing, in turn; the error of one is that of all requests that waited for it.

    Parameters
    ----------
    turn : Lock
        Held during an attempt; it may be that of several things.
    """

    def __init__(self, turn: anyio.Lock) -> None:
        self._turn = turn
        self._n_failures = 0
        self._reason = ""  # of the last failure; its error would keep the body of its request

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which is the block.

        Raises
        ------
        Problem
            503: another attempt has failed meanwhile; the message is that of its error.
        """
        n_before = self._n_failures
        async with self._turn:
            if self._n_failures != n_before:
                raise unavailable(self._reason)
            yield

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Note a `Problem` that the block raises, for the requests that wait for their turn."""
        try:
            yield
        except Problem as error:
            self._n_failures += 1
            self._reason = str(error)
            raise


class PooledModel:
    """One model.

    Attributes
    ----------
    app : FastAPI
        The application of the model; it answers 503 while the model is not loaded.
    loads : Attempts
        Attempts to load the model.
    n_users : int
        Number of requests that use the model or wait for it.
    used_at : float
        End of the latest request, as `anyio.current_time` in seconds.
    freed : Event or None
        Set when the engine has ended; None while there is no engine.
    """

    def __init__(
        self,
        name: str,
        engine: EngineConfig,
        config: ServerConfig,
        make_engine: Callable[[EngineConfig], Engine],
        loading: anyio.Lock,
    ) -> None:
        self.name = name
        self._engine = engine
        self._make_engine = make_engine
        self.app: FastAPI = create_app(engine, config, make_engine=make_engine, is_guarded=False)
        self.app.state.server.is_pooled = True
        self.task: EngineTask = self.app.state.engine_task
        self.task.has_begun = True  # only the pool starts it
        self._is_leaving = False
        # From the beginning of a load to the end of its engine.
        self._life: anyio.CancelScope | None = None
        self._fetches = Attempts(anyio.Lock())
        self.loads: Attempts = Attempts(loading)
        self.n_users = 0
        self.used_at: float = 0.0
        self.freed: anyio.Event | None = None

    @property
    def is_loaded(self) -> bool:
        """True if the model answers."""
        return not self._is_leaving and self.app.state.server.engine is not None

    @property
    def status(self) -> str:
        """Status as llama-server names it: "unloaded", "loaded", or "loading" (also while it is freed)."""
        return "loaded" if self.is_loaded else "unloaded" if self.freed is None else "loading"

    @property
    def is_idle(self) -> bool:
        """True if the model may be freed."""
        return self.freed is not None and self.n_users == 0

    @property
    def rpc(self) -> frozenset[str]:
        """Addresses of the RPC servers that the model uses."""
        return frozenset(self._engine.rpc)

    async def check_memory(self, *, needs_gpus: bool) -> None:
        """Raise a `CllmError` if the model does not fit.

        Parameters
        ----------
        needs_gpus : bool
            True: also if not all layers fit on the GPUs, unless `n_gpu_layers` says how many do.
        """
        engine = self._engine
        if needs_gpus and engine.n_gpu_layers == -1:
            engine = replace(engine, n_gpu_layers=ALL_LAYERS)
        await self._make_engine(engine).check_memory()

    async def fetch(self) -> None:
        """Download the files of the model that are not on this machine; other models can be loaded meanwhile.

        Raises
        ------
        Problem
            503: a file cannot be downloaded.
        """
        async with self._fetches.turn():
            with self._fetches.attempt():
                try:
                    await self._make_engine(self._engine).fetch()
                except CllmError as error:
                    reason = f"the model {self.name!r} cannot be loaded: {error}"
                    raise unavailable(reason) from None

    async def load(self, tasks: TaskGroup) -> None:
        """Start the engine as a task of `tasks`, and wait until the model is loaded.

        Raises
        ------
        Problem
            503: the model cannot be loaded; the message has the reason.
        """
        self.task.renew()
        self.task.has_begun, self._is_leaving = True, False
        freed = self.freed = anyio.Event()
        tasks.start_soon(self._run, freed)
        await self.task.load_ended.wait()
        if (failure := self.app.state.server.failure) is not None:
            await freed.wait()
            raise unavailable(f"the model {self.name!r} cannot be loaded: {failure}")

    async def _run(self, freed: anyio.Event) -> None:
        try:
            with anyio.CancelScope() as self._life:
                await self.task.run()
        finally:
            self.app.state.server.engine = None
            self.app.state.server.metrics.watch(None)
            self.freed = None
            freed.set()

    async def free(self) -> None:
        """Free the model after its running requests, and wait until it is freed; cancel its load."""
        if (freed := self.freed) is not None:
            self._is_leaving = True
            if self._life is not None and not self.task.load_ended.is_set():
                self._life.cancel()
            self.app.state.server.stop()
            await freed.wait()


class ModelPool:
    """The models of one server, by name.  Event loop only.

    Parameters
    ----------
    models : mapping
        Engine settings by model name; at least one.  See `default` for their order.
    config : ServerConfig
    make_engine : callable
        Returns an engine for the settings, not entered.
    """

    def __init__(
        self,
        models: Mapping[str, EngineConfig],
        config: ServerConfig,
        make_engine: Callable[[EngineConfig], Engine],
    ) -> None:
        self._config = config
        self._make_engine = make_engine
        self._settings = next(iter(models.values()))
        self._loading = anyio.Lock()
        self.models: dict[str, PooledModel] = {
            name: PooledModel(name, engine, config.of_model(name), make_engine, self._loading)
            for name, engine in models.items()
        }
        self.pulls: Pulls = Pulls(self.add)
        self.metrics: Metrics = Metrics()  # of requests that reach no model
        self.failure: BaseException | None = None  # always None: one model's failure is its own
        self._tasks: TaskGroup | None = None
        self._is_stopping = False
        self._used = anyio.Event()

    def add(self, name: str) -> None:
        """Add a model under its name, with the settings of the first one, if the name is new.

        Creating its application takes some 70 ms, in which the event loop does nothing else.
        """
        if name not in self.models and self._tasks is not None:
            changed = settings_of_another(self._settings)
            engine = replace(self._settings, model=name, **changed)
            config = self._config.of_model(name)
            self.models[name] = PooledModel(name, engine, config, self._make_engine, self._loading)

    def stop(self) -> None:
        """Reject new requests, and let the present ones finish."""
        self._tasks, self._is_stopping = None, True
        self.pulls.stop()
        for model in self.models.values():
            model.app.state.server.stop()

    async def reload(self) -> None:
        """Read all loaded models again, one after the other.

        Raises
        ------
        CllmError, anyio.BusyResourceError
            See `ServerState.reload`; models that have not been read again go on.
        """
        for model in list(self.models.values()):
            if model.is_loaded:
                async with self.using(model) as app:
                    await app.state.server.reload()

    @property
    def is_draining(self) -> bool:
        """True if the server is shutting down: running requests may finish."""
        return self._is_stopping

    @property
    def default(self) -> PooledModel:
        """The first loaded model; the first of all if none is loaded."""
        models = list(self.models.values())
        return next((model for model in models if model.is_loaded), models[0])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load and free models during the block; free all models at its end."""
        self.pulls.renew()
        async with anyio.create_task_group() as tasks:
            self._tasks, self._is_stopping = tasks, False
            tasks.start_soon(self._free_unused)
            try:
                yield
            finally:
                self.stop()
                with anyio.CancelScope(shield=True):
                    for model in list(self.models.values()):
                        await model.free()
                        await model.app.state.server.tracing.aclose()
                tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def using(self, model: PooledModel) -> AsyncIterator[FastAPI]:
        """Yield the application of a model, loaded first if needed; it stays loaded during the block.

        Raises
        ------
        Problem
            503: the model cannot be loaded, or does not fit beside the models that are in use.
        """
        model.n_users += 1  # from now on it is not freed
        try:
            if not model.is_loaded:
                self._check_running()
                await model.fetch()
                async with (
                    model.loads.turn()
                ):  # one request loads the model; the others wait for it
                    await self._load(model)
            yield model.app
        finally:
            model.n_users -= 1
            model.used_at = anyio.current_time()
            self._used.set()

    async def _load(self, model: PooledModel) -> None:
        if model.is_loaded:
            return
        if model.freed is not None:  # its last engine is still being freed
            await model.freed.wait()
        while (reason := await self._refusal(model)) is not None:
            idle = [other for other in self.models.values() if other.is_idle]
            if not idle:
                raise unavailable(f"there is no room for the model {model.name!r}: {reason}")
            oldest = min(idle, key=lambda other: other.used_at)
            logger.info("freeing the model %s to load %s", oldest.name, model.name)
            await oldest.free()
        tasks = self._check_running()
        # A request that is cancelled meanwhile would leave a model that is neither loaded nor free.
        with model.loads.attempt(), anyio.CancelScope(shield=True):
            await model.load(tasks)

    def _check_running(self) -> TaskGroup:
        """Return the tasks of the pool; raise `Problem` (503) if the server is shutting down."""
        if self._tasks is None:
            raise shutting_down()
        return self._tasks

    async def _refusal(self, model: PooledModel) -> str | None:
        """Return why a model cannot be loaded beside the loaded ones; None if it can."""
        n_loaded = sum(other.freed is not None for other in self.models.values())
        limit = self._config.max_models
        if limit is not None and n_loaded >= limit:
            return f"{limit} are loaded, and in use"
        if not n_loaded:
            return None  # loading reports an error if it does not fit
        for other in self.models.values():
            if other is not model and other.freed is not None and other.rpc & model.rpc:
                return f"{other.name} is the one client that its RPC servers have"
        try:
            # Models that are not in use make room for all layers on the GPUs.
            has_idle = any(other.is_idle for other in self.models.values())
            await model.check_memory(needs_gpus=has_idle)
        except ModelLoadError as error:
            return error.reason
        except CllmError as error:
            raise unavailable(str(error)) from None
        return None

    async def _free_unused(self) -> None:
        """Free the models that were not used for `model_keep_alive_s`."""
        keep_s = self._config.model_keep_alive_s
        while keep_s is not None:
            idle = [model for model in self.models.values() if model.is_idle and model.is_loaded]
            oldest = min(idle, key=lambda model: model.used_at, default=None)
            due_at = float("inf") if oldest is None else oldest.used_at + keep_s
            if oldest is not None and anyio.current_time() >= due_at:
                logger.info("freeing the model %s, unused for %g s", oldest.name, keep_s)
                await oldest.free()  # meanwhile another one may be used again
                continue
            with anyio.move_on_at(due_at):
                await self._used.wait()
                self._used = anyio.Event()
