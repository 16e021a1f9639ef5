"""Hashes of everything besides the request that answers and KV states depend on: model, library, settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from cllm.bindings import find_library, system_info
from cllm.engine.config import EngineConfig
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.file_content import FileContent
from cllm.engine.llama.devices import gpus_of
from cllm.settings import Affects, settings_of


def fingerprint(files: Sequence[FileContent], config: EngineConfig, kv_cache: KVCache) -> str:
    """Return a hash of everything besides the request that an answer depends on.

    Deterministic engines with the same hash give the same answer to the same request.

    Parameters
    ----------
    files : sequence of FileContent
        Files of the model and its adapters.  Their contents count, not their names.
    kv_cache : KVCache
        Its layout counts, and the number of positions of a sequence, because an output may end there.
    """
    # Answers depend on batches, unless the engine is deterministic.
    affects = Affects.ANSWERS if config.deterministic else Affects.ANSWERS | Affects.BATCHES
    values = {
        **_values(config, kv_cache, affects),
        "scales": [lora.scale for lora in config.loras],
        "n_ctx_seq": kv_cache.n_ctx_seq,
        "cllm": _version(),
    }
    return f"fp_{_digest(values, files)[:16]}"


def state_key(files: Sequence[FileContent], config: EngineConfig, kv_cache: KVCache) -> str:
    """Return a hash of everything that a KV state depends on.

    An engine with the same hash can restore the KV state of a sequence without adapters.  The CPU and the GPUs
    count: a state from another kind is usable, but not equal to the bit.
    """
    return _digest(_values(config, kv_cache, Affects.STATE), files)[:32]


def _values(config: EngineConfig, kv_cache: KVCache, affects: Affects) -> dict[str, object]:
    _, build = find_library()
    used = config.resolved()
    return {
        "settings": {
            name: getattr(used, name)
            for name, stated in settings_of(EngineConfig).items()
            if stated.affects & affects
        },
        "kv_unified": kv_cache.kv_unified,
        "build": build,
        "cpu": system_info(),
        "gpus": [gpu.description for gpu in gpus_of(config)],
    }


def _digest(values: dict[str, object], files: Sequence[FileContent]) -> str:
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode())
    for file in files:
        digest.update(bytes.fromhex(file.sha256))
    return digest.hexdigest()


def _version() -> str:
    """Return the version of cllm, and "" if it is not installed."""
    from importlib import metadata  # takes 18 ms, with its modules for mail and archives

    try:
        return metadata.version("cllm")
    except metadata.PackageNotFoundError:
        return ""
