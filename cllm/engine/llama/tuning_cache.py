"""Cache of what tuning has found, and of the shapes of past ticks, for each machine and model."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from cllm.bindings import find_library, system_info
from cllm.engine.cache_directory import keep_cached, read_cached
from cllm.engine.config import EngineConfig
from cllm.engine.core.tick_shares import SHAPES, shares_of
from cllm.engine.device_settings import processors_of
from cllm.engine.llama.gguf_header import model_parts, read_header
from cllm.engine.llama.tuning import Settings
from cllm.errors import InvalidArgumentError
from cllm.processors import cpu_name

logger: logging.Logger = logging.getLogger("cllm.engine")

FILE, SHARES_FILE = "tuning.json", "tick_shares.json"
MAX_MODELS = 256
TUNABLE = ("tiled_matmul", "repack", "n_threads", "n_threads_batch")
# Settings under which others were measured.
MEASURED_WITH = (
    "process", "n_ubatch", "numa", "poll", "flash_attn", "type_k", "type_v", "repack", "tiled_matmul",
    "override_tensor", "n_cpu_moe", "used_load_mode",
)  # fmt: skip
MAX_S = 1e12
# Seconds of ticks below which an engine's shares say little, and what older seconds count for.
LEAST_S, OLDER = 60.0, 0.5


def tuning_key(config: EngineConfig) -> str:
    """Return the key of a result: shape and quantization of the model, machine, library, settings.

    Raises
    ------
    OSError
        The model's file cannot be read.
    LibraryError
        No libllama was found.
    """
    _, build = find_library()
    settings = {name: getattr(config, name) for name in MEASURED_WITH}
    has_own_threads = config.n_threads is not None or config.n_threads_batch is not None
    mask = () if config.cpu_mask is None else sorted(processors_of(config.cpu_mask))
    threads = (config.compute_threads, has_own_threads, mask)
    machine = (cpu_name(), system_info(), config.processors)
    return _digest((_shape_of(config), settings, threads, machine, build))


def load_tuning(key: str) -> Settings | None:
    """Return the settings that tuning has chosen; None if nothing is known."""
    known = read_cached(FILE).get(key)
    chosen = known.get("chosen") if isinstance(known, dict) else None
    if not isinstance(chosen, dict):
        return None
    found = {name: value for name, value in chosen.items() if name in TUNABLE}
    try:
        EngineConfig(**found)
    except (InvalidArgumentError, TypeError):
        return None
    return found


def save_tuning(key: str, chosen: Settings, model: str) -> None:
    """Store what was chosen.

    Raises
    ------
    OSError, RuntimeError
        The file cannot be written, or the home directory is unknown.
    """
    entry = {"model": model, "cpu": cpu_name(), "chosen": chosen}
    keep_cached(FILE, {key: entry}, MAX_MODELS)


def load_shares(config: EngineConfig) -> dict[str, float]:
    """Return the share of each shape of ticks in the time of past engines; equal shares if nothing is known.

    Raises
    ------
    OSError
        The model's file cannot be read.
    """
    return shares_of(_load_seconds(_shares_key(config)))


def save_shares(config: EngineConfig, seconds: Mapping[str, float]) -> None:
    """Add the seconds of an engine's ticks, by shape; older ones count half."""
    if sum(seconds.values()) < LEAST_S:
        return
    try:
        key = _shares_key(config)
        older = _load_seconds(key)
        total = {shape: seconds[shape] + OLDER * older.get(shape, 0.0) for shape in SHAPES}
        keep_cached(SHARES_FILE, {key: total}, MAX_MODELS)
    except (OSError, RuntimeError) as error:  # the model's file may be gone by now
        logger.info("cannot store the shapes of ticks: %s", error)


def _load_seconds(key: str) -> dict[str, float]:
    known = read_cached(SHARES_FILE).get(key)
    if not isinstance(known, dict):
        return {}
    return {
        shape: float(value)
        for shape, value in known.items()
        if type(value) in (int, float) and 0 <= value < MAX_S
    }


def _shares_key(config: EngineConfig) -> str:
    """Return the key of the shapes of past ticks: shape and quantization of the model."""
    return _digest(_shape_of(config))


def _shape_of(config: EngineConfig) -> Any:
    """Return the numbers of a model's header, and its size to about 7 %: the sizes of other quantizations differ."""
    header = read_header(config.model_path)
    numbers = {
        name: value
        for name, value in header.items()
        if name in ("general.architecture", "general.file_type")
        or (not name.startswith("general.") and isinstance(value, int | float))
    }
    n_bytes = sum(part.stat().st_size for part in model_parts(config.model_path))
    return numbers, round(math.log2(max(1, n_bytes)), 1)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
