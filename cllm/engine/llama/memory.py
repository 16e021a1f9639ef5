"""Whether another model fits into memory beside the present one: an estimate, before anything is loaded."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from cllm.bindings import Model
from cllm.engine.config import EngineConfig
from cllm.engine.llama.preflight import model_files
from cllm.errors import ModelLoadError
from cllm.memory import available_bytes

MIB = 1 << 20
# Of a number in the KV cache; quantized ones with their scales.
KV_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip


def check_fits(config: EngineConfig, loaded: EngineConfig) -> None:
    """Before a model is loaded beside another.

    Weights that are mapped twice are there once.  Weights on a GPU count too: nobody says how much
    room there is.

    Raises
    ------
    ModelLoadError
        It needs more memory than there is, or its file cannot be read.
    """
    available = available_bytes()
    if available is None:
        return
    shared = (
        set(map(_identity, model_files(loaded))) if config.use_mmap and loaded.use_mmap else set()
    )
    path = str(config.model_path)
    try:
        sizes = {_identity(file): file.stat().st_size for file in model_files(config)}
    except OSError as error:
        raise ModelLoadError(path, error.strerror or str(error)) from error
    n_weights = sum(size for file, size in sizes.items() if file not in shared)
    n_kv = kv_bytes(config)
    if n_weights + n_kv > available:
        raise ModelLoadError(
            path,
            f"it needs {n_weights / MIB:,.0f} MiB for weights and {n_kv / MIB:,.0f} MiB for the KV cache "
            f"beside the present model, and {available / MIB:,.0f} MiB are available",
        )


def kv_bytes(config: EngineConfig) -> int:
    """Bytes of the KV cache, if all layers have plain attention; the file's metadata is read."""
    with ExitStack() as owned:
        known = owned.enter_context(Model(config.model_path, vocab_only=True)).metadata
    prefix = known.get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        value = known.get(f"{prefix}.{name}", "")
        return (
            int(value) if value.isdecimal() else default
        )  # an array, one for each layer, is no scalar

    n_head = number("attention.head_count")
    n_head_kv = number("attention.head_count_kv", n_head)
    head = number("embedding_length") // n_head if n_head else 0
    n_key, n_value = number("attention.key_length", head), number("attention.value_length", head)
    type_k, type_v = config.kv_types
    each = n_key * KV_BYTES.get(type_k, 2.0) + n_value * KV_BYTES.get(type_v, 2.0)
    n_cells = config.n_ctx or number("context_length")
    return int(number("block_count") * n_head_kv * each * n_cells)


def _identity(file: Path) -> tuple[int, int] | Path:
    """The same for two names of one file."""
    try:
        status = file.stat()
    except OSError:
        return file
    return status.st_dev, status.st_ino
