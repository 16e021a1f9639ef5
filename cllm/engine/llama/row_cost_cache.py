"""Cache of the measured costs of rows, for each machine and model."""

from __future__ import annotations

import hashlib
import json
import logging

from cllm.engine.cache_directory import keep_cached, read_cached
from cllm.engine.config import MTP, EngineConfig
from cllm.engine.core.row_cost import N_ROWS_MAX
from cllm.processors import cpu_name

logger: logging.Logger = logging.getLogger("cllm.engine")

FILE = "row_cost.json"
MAX_TABLES = 64
MAX_S = 3600.0


def table_key(fingerprint: str, config: EngineConfig) -> str:
    """Return the key of a table: the model with its settings, and the machine."""
    # With multi-token prediction, a decode computes rows of its layer too.
    kind = MTP if config.uses_mtp else ""
    values = (fingerprint, cpu_name(), config.compute_threads, config.n_gpu_layers, kind)
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def load_table(key: str) -> dict[int, float]:
    """Return the saved seconds of a decode by its number of rows; empty if no table is saved."""
    table = read_cached(FILE).get(key)
    if not isinstance(table, dict):
        return {}
    try:
        found = {int(rows): float(seconds) for rows, seconds in table.items()}
    except (TypeError, ValueError, OverflowError):
        return {}
    return {r: s for r, s in found.items() if 0 < r <= N_ROWS_MAX and 0.0 < s < MAX_S}


def save_table(key: str, table: dict[int, float]) -> None:
    """Store a table for the next engine; the oldest tables are dropped when there are many."""
    if not table:
        return
    try:
        keep_cached(FILE, {key: table}, MAX_TABLES)
    except (OSError, RuntimeError) as error:
        logger.info("cannot store the measured costs of rows: %s", error)
