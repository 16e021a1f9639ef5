"""Tuner: settings of an engine that were measured to be faster on this machine."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cllm.engine.child_process import EndedError, JsonChild, TooSlowError
from cllm.engine.config import AUTO, EngineConfig
from cllm.engine.llama.devices import gpus_of
from cllm.engine.llama.gguf_header import has_tiled_matrix, model_parts
from cllm.engine.llama.tuning import (
    Candidate,
    MeasurementError,
    NotTunedError,
    Reading,
    Settings,
    Tuning,
    stages,
    tune,
)
from cllm.engine.llama.tuning_cache import (
    load_shares,
    load_tuning,
    save_tuning,
    tuning_key,
)
from cllm.errors import CllmError, ClosedError, InvalidArgumentError
from cllm.memory import available_bytes

logger: logging.Logger = logging.getLogger("cllm.engine")

AT_LOAD_S = 20.0  # with "auto"
TURN_S = 600.0  # for one turn of a process, and for loading the model
# Settings that a measurement has in common with the engine.
OF_MEASUREMENT = (
    "model", "n_threads", "n_threads_batch", "n_ubatch", "cpu_mask", "numa", "poll", "flash_attn", "type_k",
    "type_v", "repack", "tiled_matmul", "override_tensor", "n_cpu_moe", "load_mode", "use_mmap", "use_mlock",
)  # fmt: skip


class Tuner:
    """Finds the settings of one engine; see `EngineConfig.tune`.

    Parameters
    ----------
    config : EngineConfig
        With the layers on GPUs that were chosen.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._children: list[JsonChild] = []
        self._is_stopped = False

    def settings(self) -> Settings:
        """Return the fields that change; empty if nothing is known, or if the defaults are best.

        Raises
        ------
        ClosedError
            `stop` was called.
        """
        config = self._config
        if config.tune is None or self.obstacle is not None:
            return {}
        try:
            known = load_tuning(tuning_key(config))
            if known is None and config.tune == AUTO:
                tuning = self.measure(AT_LOAD_S)
                known = tuning.chosen
                try:
                    self.save(tuning)
                except (OSError, RuntimeError) as error:
                    logger.warning("cannot store the result of tuning: %s", error)
            usable = _usable(known or {}, config)
            config.tuned(usable)
        except ClosedError:
            raise
        except (CllmError, OSError, ValueError) as error:
            # A ValueError is a path that no file can have.  The engine loads without tuning, or says what is wrong.
            logger.warning("not tuned: %s", error)
            return {}
        return usable

    @property
    def obstacle(self) -> str | None:
        """Reason for which an engine with these settings is not tuned; None if it is."""
        config = self._config
        if config.deterministic:
            return "deterministic chooses these settings itself"
        if config.rpc:
            return "an RPC server has one client"
        if config.n_gpu_layers and gpus_of(config):
            return "layers on a GPU: there may be no room for the model twice"
        return None

    def measure(
        self,
        limit_s: float,
        on_stage: Callable[[Sequence[Candidate]], None] = lambda stage: None,
    ) -> Tuning:
        """Compare candidates in processes of their own.

        Parameters
        ----------
        limit_s : float
            Seconds for all measurements.
        on_stage : callable
            Called with the candidates of each stage before they are measured.

        Raises
        ------
        InvalidArgumentError
            The engine cannot be tuned; says why.
        NotTunedError
            Nothing was compared in this time, the model cannot be loaded, or memory is too small.
        OSError
            The model's file cannot be read.
        ClosedError
            `stop` was called.
        """
        config = self._config
        if (obstacle := self.obstacle) is not None:
            raise InvalidArgumentError("tune", config.tune, f"None here ({obstacle})")
        parts = model_parts(config.model_path)
        processors = config.processors
        quota = processors.n_allowed if processors.quota is None else math.floor(processors.quota)
        candidates = stages(
            config,
            n_processors=max(1, min(processors.n_allowed, quota)),
            has_tiles=any(map(has_tiled_matrix, parts)),
        )
        n_bytes = sum(part.stat().st_size for part in parts)
        most = 1 + max(map(len, candidates), default=0)
        # Each process may have a repacked copy of the weights; the mapped file is shared.
        if (
            (free := available_bytes()) is not None
            and most * n_bytes > free
            and not config.allow_overcommit
        ):
            needed, has = most * n_bytes >> 20, free >> 20
            raise NotTunedError(
                f"{most} processes with the model need {needed:,} MiB, and {has:,} MiB are available"
            )
        deadline = time.monotonic() + limit_s
        return tune(
            candidates,
            load_shares(config),
            lambda settings: self._child(settings, deadline),
            limit_s=limit_s,
            clock=time.monotonic,
            on_stage=on_stage,
        )

    def save(self, tuning: Tuning) -> None:
        """Store a result for the next engines.

        Raises
        ------
        OSError, RuntimeError
            The file cannot be written, or the home directory is unknown.
        """
        config, name = self._config, self._config.model_path.name
        save_tuning(tuning_key(config), tuning.chosen, name)
        if config.process and "tiled_matmul" not in tuning.chosen:
            # No setting is for processes alone: the result holds for an engine without one.
            save_tuning(tuning_key(replace(config, process=False, rpc=())), tuning.chosen, name)

    def stop(self) -> None:
        """End the processes; `measure` raises `ClosedError`.  Any thread; returns at once."""
        self._is_stopped = True
        for child in list(self._children):
            child.stop()

    @contextmanager
    def _child(self, settings: Settings, deadline: float) -> Iterator[_Child]:
        child = JsonChild("cllm.engine.llama.tuning_child")
        self._children.append(child)
        try:
            if self._is_stopped:  # checked last: `stop` may have been called meanwhile
                child.stop()
            n_spin = max(self._config.compute_threads)
            yield _Child(child, measured_config(self._config, settings), n_spin, deadline)
        finally:
            child.close()
            self._children.remove(child)


class _Child:
    """A `Measurer` in a child process; the first turn loads the model."""

    def __init__(
        self, child: JsonChild, config: EngineConfig, n_spin: int, deadline: float
    ) -> None:
        self._child = child
        self._n_spin = n_spin
        self._deadline = deadline
        self._opening: EngineConfig | None = config

    def turn(self, shapes: Sequence[str]) -> Mapping[str, Reading]:
        """See `Measurer`.

        Raises
        ------
        MeasurementError
            The model cannot be loaded or computed, or the process did not answer in time.
        ClosedError
            `stop` was called.
        """
        request: dict[str, Any] = {"shapes": list(shapes)}
        if self._opening is not None:
            request |= {"config": json.loads(self._opening.to_json()), "n_spin": self._n_spin}
        limit_s = min(TURN_S, self._deadline - time.monotonic())
        if limit_s <= 0:
            raise MeasurementError("the time is over")
        try:
            answer = self._child.ask(request, limit_s)
        except TooSlowError:
            raise MeasurementError("a measurement took too long") from None
        except EndedError:
            raise MeasurementError("the process that measures has ended") from None
        except OSError as error:  # its message says that the process does not start
            raise MeasurementError(str(error)) from None
        if "error" in answer:
            raise MeasurementError(answer["error"])
        self._opening = None
        return {shape: Reading(*found) for shape, found in answer["readings"].items()}


def _usable(settings: Settings, config: EngineConfig) -> Settings:
    """Return the settings that an engine may change: those that have their default; tiles only in its own process."""
    default = EngineConfig()
    usable = {
        name: value
        for name, value in settings.items()
        if getattr(config, name) == getattr(default, name)
    }
    if not config.process:
        usable.pop("tiled_matmul", None)
    return usable


def measured_config(config: EngineConfig, settings: Settings) -> EngineConfig:
    """Return the settings of one measurement: those that speed depends on, without GPUs."""
    own = {name: getattr(config, name) for name in OF_MEASUREMENT}
    return EngineConfig(**{**own, "n_gpu_layers": 0, "devices": (), "tune": None, **settings})
