"""A short name for all that answers depend on besides the request: model, library, settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from cllm.bindings import find_library, system_info
from cllm.engine.config import EngineConfig
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.file_content import FileContent

SETTINGS = (
    "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
    "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "deterministic", "kv_types",
)  # fmt: skip
# What decides about batches, on which answers depend unless the engine is deterministic.
BATCH_SETTINGS = (
    "n_seq_max", "n_batch", "n_ubatch", "compute_threads", "n_gpu_layers", "rpc", "flash_attn",
    "prefix_cache", "prefix_cache_tokens", "prefix_cache_bytes", "n_prefill_chunk", "target_itl_ms",
)  # fmt: skip


def fingerprint(files: Sequence[FileContent], config: EngineConfig, kv_cache: KVCache) -> str:
    """The same wherever the same request gives the same answer on a deterministic engine.

    Parameters
    ----------
    files : sequence of FileContent
        Of the model and its adapters: what they contain counts, not their names.
    kv_cache : KVCache
        Its layout, and how many positions a sequence may have: an output may end there.
    """
    names = SETTINGS if config.deterministic else (*SETTINGS, *BATCH_SETTINGS)
    values = {
        **_values(config, kv_cache, names),
        "scales": [lora.scale for lora in config.loras],
        "n_ctx_seq": kv_cache.n_ctx_seq,
        "cllm": _version(),
    }
    return f"fp_{_digest(values, files)[:16]}"


def state_key(files: Sequence[FileContent], config: EngineConfig, kv_cache: KVCache) -> str:
    """The same wherever a copy of what a sequence without adapters holds in the KV cache can be put back.

    Numbers from another kind of CPU would do too, but not where answers are to be the same to the bit.
    """
    return _digest(
        _values(config, kv_cache, (*SETTINGS, "flash_attn", "n_gpu_layers", "rpc")), files
    )[:32]


def _values(config: EngineConfig, kv_cache: KVCache, names: tuple[str, ...]) -> dict[str, object]:
    _, build = find_library()
    return {
        "settings": {name: getattr(config, name) for name in names},
        "kv_unified": kv_cache.kv_unified,
        "build": build,
        "cpu": system_info(),
    }


def _digest(values: dict[str, object], files: Sequence[FileContent]) -> str:
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode())
    for file in files:
        digest.update(bytes.fromhex(file.sha256))
    return digest.hexdigest()


def _version() -> str:
    try:
        return version("cllm")
    except PackageNotFoundError:
        return ""
