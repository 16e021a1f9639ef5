"""Estimate the memory of a model before it is loaded, and the largest `n_ctx` that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from cllm.bindings import (
    Context,
    EmbeddingContext,
    MemoryNeeds,
    Model,
    MtpContext,
    memory_needs,
)
from cllm.checks import INT32_MAX
from cllm.engine.config import N_CTX, EngineConfig
from cllm.engine.llama.devices import gpus_of, placement_of
from cllm.engine.llama.gguf_header import read_header
from cllm.engine.llama.preflight import model_files, other_files
from cllm.errors import CllmError, ModelLoadError
from cllm.memory import available_bytes

MakeContext = Callable[[Model, EngineConfig], Context | EmbeddingContext | MtpContext]
logger: logging.Logger = logging.getLogger("cllm.engine")

MIB = 1 << 20
# llama.cpp is not queried if `AMPLE` times the sum of KV cache and `AMPLE_BYTES` fits beside the weights.
AMPLE, AMPLE_BYTES = 2, 512 << 20
# Bytes of an encode for each patch and each channel: measured, 63 to 81 with 196 to 7,056 patches of 768 channels.
ENCODER_BYTES = 80
N_FRAMES = 1500  # of 30 s of audio, with encoders like that of Whisper
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
N_STEP = 256  # cells of a share are a multiple of this
# Bytes of one number in the KV cache; quantized types include their scales.
KV_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip


class PlannedContext(NamedTuple):
    """A context that an engine will have.

    Attributes
    ----------
    path : Path
        File of its model.
    make : callable
        Returns the context, from the opened model and the configuration.
    generates : bool
        True if it is the context of the model that generates.
    """

    path: Path
    make: MakeContext
    generates: bool = False

    def needs(self, config: EngineConfig) -> MemoryNeeds | None:
        """Return the memory that it would take with a configuration; see `memory_needs`."""
        is_main = self.path == config.model_path
        return memory_needs(
            self.path,
            lambda model: self.make(model, config),
            n_gpu_layers=config.n_gpu_layers,
            placement=placement_of(config, is_main=is_main),
            load_mtp=is_main and config.uses_mtp,
        )


def check_fits(config: EngineConfig, loaded: EngineConfig | None) -> None:
    """Check that a model fits into memory before it is loaded, beside the model of `loaded` if there is one.

    Files that both models map count once.  The free memory of the GPUs in use counts as available.

    Raises
    ------
    ModelLoadError
        The model needs more memory than is available, its file cannot be read, or an RPC server is in use.
    """
    if loaded is not None and (in_use := set(config.rpc) & set(loaded.rpc)):
        raise ModelLoadError(
            str(config.model_path),
            f"RPC server {min(in_use)} has one client: the model that is loaded",
        )
    available = available_bytes()
    if available is None or (config.rpc and config.n_gpu_layers != 0):  # layers are elsewhere
        return
    # An integrated GPU uses the host's memory.
    available += sum(gpu.n_free_bytes for gpu in gpus_of(config) if gpu.kind == "gpu")
    is_shared = loaded is not None and config.is_mapped and loaded.is_mapped
    shared = set(map(_identity, model_files(loaded))) if loaded and is_shared else set()
    path = str(config.model_path)
    try:
        sizes = _sizes(config)
    except OSError as error:
        raise ModelLoadError(path, error.strerror or str(error)) from error
    n_weights = sum(size for file, size in sizes.items() if file not in shared)
    n_weights += encoder_bytes(config)
    n_kv = kv_bytes(config, is_windowed=True)
    if n_weights + n_kv > available:
        raise ModelLoadError(
            path,
            f"it needs at least {n_weights / MIB:,.0f} MiB for weights and {n_kv / MIB:,.0f} MiB for the KV cache "
            f"beside what runs, and {available / MIB:,.0f} MiB are available",
        )


def check_room(config: EngineConfig, contexts: Iterable[PlannedContext]) -> None:
    """Check that all contexts and weights fit into the memory that is available now.

    llama.cpp computes the memory of the contexts, unless twice a rough estimate fits.  Mapped weights count
    too.  Layers on a GPU or on RPC servers are not checked.

    Raises
    ------
    ModelLoadError
        They do not fit; the reason names the largest `n_ctx` that does.  Only logged with `allow_overcommit`.
    """
    available = None if _is_elsewhere(config) else available_bytes()
    if available is None:
        return
    try:
        n_weights = sum(_sizes(config).values()) + encoder_bytes(config)
        n_ample = AMPLE * (kv_bytes(config) + AMPLE_BYTES)
    except (OSError, ValueError):  # loading the model reports the reason
        return
    if n_weights + n_ample < available:
        return

    planned = list(contexts)

    def needs(n_ctx: int) -> MemoryNeeds | None:
        with_cells = replace(config, n_ctx=n_ctx)
        found = [each.needs(with_cells) for each in planned]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        return MemoryNeeds(sum(one.n_context for one in known), sum(one.n_compute for one in known))

    try:
        needed = needs(config.n_cells)
    except CllmError:
        return
    if needed is None or n_weights + needed.n_bytes <= available:
        return
    reason = (
        f"it needs {needed.n_context / MIB:,.0f} MiB for the KV cache, {needed.n_compute / MIB:,.0f} MiB to "
        f"compute and {n_weights / MIB:,.0f} MiB for weights, and {available / MIB:,.0f} MiB are available"
    )
    n_most = config.n_cells or n_trained(config)
    if n_fitting := largest_n_ctx(
        n_most, lambda n_ctx: n_weights + _bytes(needs(n_ctx)) <= available
    ):
        reason += f": n_ctx={n_fitting} fits"
    if not config.allow_overcommit:
        raise ModelLoadError(
            str(config.model_path), f"{reason}; allow_overcommit loads it all the same"
        )
    logger.warning("%s: %s; the system may end the process", config.model_path.name, reason)


def _bytes(needed: MemoryNeeds | None) -> int:
    return 0 if needed is None else needed.n_bytes


def largest_n_ctx(n_most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest `n_ctx` that fits, within 3 %; 0 if none fits."""
    low, high = N_STEP, n_most
    if low >= high or not fits(low):
        return 0
    while high - low > max(N_STEP, low // 32):  # memory is not linear in n_ctx: layouts differ
        middle = (low + high) // 2 // N_STEP * N_STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def kv_bytes(config: EngineConfig, *, is_windowed: bool = False) -> int:
    """Estimate the bytes of the KV cache; see `kv_layers`."""
    return sum(kv_layers(config, is_windowed=is_windowed))


def kv_layers(config: EngineConfig, *, is_windowed: bool = False) -> list[int]:
    """Estimate the bytes of the KV cache of each layer from the header of the model's file.

    Parameters
    ----------
    is_windowed : bool
        False: all layers count with all cells.  True: with the sliding window if the model has one, the least
        that any setting of `swa_full` takes.
    """
    known = read_header(config.model_path)
    prefix = known.get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        return _number(known.get(f"{prefix}.{name}"), default)

    n_layer, n_head = number("block_count"), number("attention.head_count")
    n_heads = known.get(f"{prefix}.attention.head_count_kv", n_head)
    # One number for all layers, or a list.
    if isinstance(n_heads, list):
        heads = [*map(_number, n_heads)]
    else:  # of a damaged file, all layers at once
        each_layer = _number(n_heads, n_head)
        heads = [each_layer] * n_layer if n_layer <= MAX_LAYERS else [n_layer * each_layer]
    head = number("embedding_length") // n_head if n_head else 0
    type_k, type_v = config.kv_types
    each = number("attention.key_length", head) * KV_BYTES.get(type_k, 1.0)
    each += number("attention.value_length", head) * KV_BYTES.get(type_v, 1.0)
    n_cells = config.n_cells or number("context_length")
    if is_windowed:
        n_cells = min(n_cells, number("attention.sliding_window", n_cells))
    return [int(n * each * n_cells) for n in heads]


def _number(value: object, default: int = 0) -> int:
    """Return a number of a header, which a damaged file may state as anything."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX
    return cast(int, value) if is_count else default


def encoder_bytes(config: EngineConfig) -> int:
    """Estimate the bytes that an encode takes, from the header of the projector's file; 0 without one.

    An image counts with the size that the file states, or with `image_max_tokens` rows of four patches.  Audio
    counts with the frames of a window of 30 s.
    """
    if config.mmproj is None:
        return 0
    try:
        known = read_header(Path(config.mmproj))
    except OSError:  # loading the projector reports the reason
        return 0

    def number(name: str) -> int:
        return _number(known.get(f"clip.{name}"))

    def taken(kind: str, n_rows: int) -> int:
        each = ENCODER_BYTES * number(f"{kind}.embedding_length")
        if config.flash_attn is False:  # a matrix for each head
            each += 4 * number(f"{kind}.attention.head_count") * n_rows
        return n_rows * each

    side = number("vision.image_size") // max(1, number("vision.patch_size"))
    n_patches = max(side**2, 4 * (config.image_max_tokens or 0))
    return max(taken("vision", n_patches), taken("audio", N_FRAMES))


def choose_n_ctx(config: EngineConfig) -> tuple[int, str]:
    """Return `n_ctx` for "auto": the model's training length, or less if memory does not allow it.

    If each sequence has cells of its own, the training length counts once per sequence.  Layers with a sliding
    window count with all cells, which the prefix cache needs.  The KV cache may take half of the memory that
    the weights leave.  The result is at least 4096.  It is 4096 if the training length or the free memory is
    unknown, as on RPC servers and on GPUs that do not report their memory.

    Returns
    -------
    (int, str)
        Value of `n_ctx`, and an explanation of it for users.
    """
    n_shares, n_wanted = wanted_n_ctx(config)
    available = None if _is_elsewhere(config) else available_bytes()
    if not n_wanted or available is None:
        return N_CTX, f"{N_CTX:,} tokens of context (-c takes more)"
    n_weights = sum(file.stat().st_size for file in _files(config) if file.exists())
    n_weights += encoder_bytes(config)
    n_bytes = kv_bytes(replace(config, n_ctx=n_wanted))
    n_allowed = (available - n_weights) // 2
    if n_bytes <= n_allowed:
        return n_wanted, f"{n_wanted:,} tokens of context, {n_bytes / MIB:,.0f} MiB"
    step = N_STEP * n_shares
    n_fitting = n_wanted * max(0, n_allowed) // max(1, n_bytes) // step * step
    n_ctx = min(n_wanted, max(N_CTX, n_fitting))
    return n_ctx, (
        f"{n_ctx:,} tokens of context: {n_wanted:,} would take {n_bytes / MIB:,.0f} MiB, "
        f"and {available / MIB:,.0f} are available (-c takes more)"
    )


def wanted_n_ctx(config: EngineConfig) -> tuple[int, int]:
    """Return the number of KV shares, and of cells wanted; 0 cells if the training length is unknown."""
    n_shares = config.n_seq_max if config.deterministic or config.kv_unified is False else 1
    n_cells = n_trained(config) * n_shares
    return n_shares, max(N_CTX, n_cells) if n_cells else 0


def n_trained(config: EngineConfig) -> int:
    """Return the training length that the model's file states; 0 if it states none or cannot be read."""
    path = config.model_path
    try:
        known = read_header(path) if path.is_file() else {}
    except OSError:
        return 0
    return _number(known.get(f"{known.get('general.architecture', '')}.context_length"))


def _is_elsewhere(config: EngineConfig) -> bool:
    """True if layers go to the memory of a GPU or of another machine."""
    return config.n_gpu_layers != 0 and (bool(config.rpc) or bool(gpus_of(config)))


def _sizes(config: EngineConfig) -> dict[tuple[int, int] | Path, int]:
    """Return the bytes of each file of weights; a file with several names is in it once."""
    return {_identity(file): file.stat().st_size for file in _files(config)}


def _files(config: EngineConfig) -> list[Path]:
    """Return all files of weights."""
    return [*model_files(config), *other_files(config)]


def _identity(file: Path) -> tuple[int, int] | Path:
    """Return a key that is equal for two names of one file."""
    try:
        status = file.stat()
    except OSError:
        return file
    return status.st_dev, status.st_ino
