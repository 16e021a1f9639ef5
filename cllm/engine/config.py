"""EngineConfig: everything about an engine that is settled before it starts."""

from __future__ import annotations

import itertools
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypedDict

from cllm.checks import (
    MAX_TEMPLATE_BYTES,
    MAX_THREADS,
    ErrorType,
    check_float,
    check_int,
    check_tenant,
    closest,
)
from cllm.engine.device_settings import (
    N_DEVICES_MAX,
    device_names,
    overrides,
    processor_set,
    processors_of,
    proportions,
)
from cllm.engine.file_content import open_regular
from cllm.engine.lora import MAX_SCALE, LoraInfo, check_lora_name
from cllm.engine.media import MAX_ROWS
from cllm.engine.rpc_address import N_SERVERS_MAX, rpc_address
from cllm.errors import InvalidArgumentError
from cllm.processors import Processors, usable_processors
from cllm.removed import replacement
from cllm.settings import (
    Affects,
    boolean,
    boolean_or,
    check_settings,
    file_path,
    integer,
    new_path,
    number,
    one_of,
    or_word,
    setting,
    settings_of,
)
from cllm.system import can_pass_descriptors

N_SEQ_IDS = 256  # LLAMA_MAX_SEQ: the most sequence ids that libllama supports
AUTO: Final = "auto"
NGRAM: Final = "ngram"
MTP: Final = "mtp"
N_CTX = 4096
N_TEXTS_MAX = 64  # texts of one embedding batch
N_CACHED_IDS = 16  # largest number of seq_ids of the prefix cache
STATES_BYTES = 512 << 20  # limit of the states that recurrent models keep for the prefix cache
# Limits of the states that recurrent memory keeps for drafts: of each running sequence, and bytes in all.
N_DRAFT_STATES, DRAFT_STATES_BYTES = 4, 1 << 30

UNSEEN: Final = "unseen"
PLAIN_TYPES = ("f32", "f16", "bf16")  # types of the KV cache that are not quantized
BATCHES = Affects.BATCHES
ANSWERS = Affects.ANSWERS | Affects.STATE
EMBEDDED_MODEL = Path(__file__).parent.parent / "models" / "cllm-tiny.gguf"


LoraSetting = tuple[str | Path, float] | tuple[str, str | Path, float]


def is_jinja(template: object) -> bool:
    """Return True if the text is a template, and not the name of a file."""
    return isinstance(template, str) and ("{{" in template or "{%" in template)


def _template(name: str, given: object, error: ErrorType) -> object:
    return given if is_jinja(given) else file_path(name, given, error)


def _weights(name: str, given: object, error: ErrorType) -> tuple[tuple[str, float], ...] | None:
    """Return a checked copy that can be hashed: pairs of a name and a weight."""
    try:
        pairs = tuple(dict(given).items())  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise error(name, given, "a mapping of names to weights") from None
    checked = tuple(
        (
            check_tenant(name, tenant, error),
            check_float(f"{name}[{tenant!r}]", weight, 0.001, 1000.0, error),
        )
        for tenant, weight in pairs
    )
    return checked or None


def _rpc_addresses(name: str, given: object, error: ErrorType) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise error(name, given, "a sequence of HOST:PORT")
    if len(given) > N_SERVERS_MAX:
        raise error(name, given, f"at most {N_SERVERS_MAX} servers")
    if len(set(map(rpc_address, given))) < len(given):
        raise error(name, given, "each server once: a server has one client at a time")
    return tuple(given)


def _adapters(name: str, given: object, error: ErrorType) -> tuple[LoraSetting, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise error(name, given, "a sequence of (path, scale) or (name, path, scale)")
    names: set[str] = set()
    adapters: list[Any] = []
    for lora in given:
        if not isinstance(lora, list | tuple) or len(lora) not in (2, 3):
            raise error(name, lora, "(path, scale) or (name, path, scale)")
        *own, path, scale = lora
        path = file_path(name, path, error)
        scale = check_float(f"scale of {path}", scale, -MAX_SCALE, MAX_SCALE, error)
        if own and (check_lora_name(own[0], InvalidArgumentError) in names):
            raise error(name, own[0], "a name that no other adapter has")
        names.update(own)
        adapters.append((*own, path, scale))
    return tuple(adapters)


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`, except the model, as keyword arguments."""

    n_ctx: int | Literal["auto"]
    n_seq_max: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    n_gpu_layers: int
    devices: Sequence[str] | None
    split_mode: str
    tensor_split: Sequence[float]
    main_gpu: int
    override_tensor: Sequence[str]
    n_cpu_moe: int
    kv_offload: bool
    op_offload: bool | None
    cpu_mask: str | None
    poll: int | None
    numa: str | None
    kv_unified: bool | Literal["auto"]
    flash_attn: bool | None
    deterministic: bool
    speculation: str | Path | None
    type_k: str
    type_v: str
    use_mmap: bool
    use_mlock: bool
    load_mode: str | None
    allow_overcommit: bool
    check_tensors: bool
    repack: bool
    tiled_matmul: bool
    tune: Literal["cached", "auto"] | None
    max_queue: int
    prefix_cache: bool
    swa_full: bool | None
    prefix_cache_tokens: int | None
    prefix_cache_bytes: int | None
    prefix_cache_dir: str | Path | None
    prefix_cache_dir_bytes: int
    n_prefill_chunk: int | None
    target_itl_ms: float | None
    tenant_weights: Mapping[str, float] | None
    stream_buffer: int
    stall_timeout_s: float
    process: bool
    hang_timeout_s: float | None
    rpc: Sequence[str]
    trace: str | Path | None
    preflight: bool | Literal["unseen"]
    rope_scaling: str | None
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float | None
    yarn_attn_factor: float | None
    yarn_beta_fast: float | None
    yarn_beta_slow: float | None
    yarn_orig_ctx: int
    lora: Sequence[LoraSetting]
    chat_template: str | Path | None
    model_sampling: bool
    pooling: str | None
    embedding_model: str | Path | None
    mmproj: str | Path | None
    mmproj_offload: bool
    image_min_tokens: int | None
    image_max_tokens: int | None
    media_cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine.

    The first sentence of a field is also the help text of its command-line option.  It calls the effect of
    None "by default".

    Parameters
    ----------
    model : str or Path, optional
        A GGUF file, or hf:USER/REPO[:QUANT], which is downloaded once; by default the embedded model.
        An engine replaces a name by the file when it is entered.
    n_ctx : int or "auto"
        KV cells in all, shared by the sequences; 0: as many as the model was trained for; auto: as
        many of those as memory allows, at least 4096.  "auto" is the default of the command line.
    n_seq_max : int
        Sequences that run at once, 1 to 255.  256 without prefix cache.
    n_batch : int
        Rows (tokens) that one tick computes at most; at least `n_seq_max`.
    n_ubatch : int
        Rows that llama.cpp computes at once (physical batch) at most.
    n_threads : int, optional
        Compute threads at most; by default the physical cores that this process may use, and one for
        the embedded model.  The engine uses fewer while other programs keep the processors busy, unless
        it is `deterministic`.
    n_threads_batch : int, optional
        Compute threads for batches of several rows at most; by default as many as for one row.
    n_gpu_layers : int
        Layers on the GPU; -1: all that fit.
    devices : sequence of str, optional
        GPUs to use, in this order, by the names that `cllm doctor` prints; by default all, and "none" for no GPU.
        Integrated GPUs are used by default only if there are no others.  In Python, an empty sequence means no GPU.
    split_mode : str
        Division of a model between several GPUs: none, layer, row or tensor.  "layer": whole layers on each;
        "row": rows of each matrix; "tensor": rows and KV cells, which is experimental in llama.cpp; "none": all
        on `main_gpu`.
    tensor_split : sequence of float
        Shares of the model on each GPU, as proportions; by default in proportion to free memory.
    main_gpu : int
        Index of the GPU that holds the model with `split_mode` "none"; unused otherwise.
    override_tensor : sequence of str
        PATTERN=TYPE: put tensors whose names match the regular expression into this buffer type, "CPU" or the name
        of a device.  The first pattern that matches applies.  Only for the model that generates.
    n_cpu_moe : int
        Number of layers, counted from the first, whose expert weights stay in host memory.
    kv_offload : bool
        Keep the KV cache of a layer on the GPU of the layer.
    op_offload : bool, optional
        Compute batches of many rows on a GPU even if the weights are in host memory; by default if the model has
        layers on a GPU.
    cpu_mask : str, optional
        Processors that compute, as a hexadecimal mask ("0xff") or FIRST-LAST ("0-7"); Linux only.
    poll : int, optional
        Polling level of idle compute threads, from 0 (sleep) to 100 (busy-wait); only for libraries without OpenMP.
        With OpenMP, set GOMP_SPINCOUNT or OMP_WAIT_POLICY.
    numa : str, optional
        NUMA strategy: distribute, isolate or numactl.  It applies to the whole process; the first engine that sets
        it decides.
    kv_unified : bool or "auto"
        One KV buffer for all sequences, or an equal share of `n_ctx` for each; by default shares where
        each is as long as the model was trained for.  With shares, no request can be longer than one share.
        Earlier requests then do not change the answer of a request that runs alone, except by hits of the
        prefix cache.  "auto" is False if `deterministic`.  Otherwise it is True with recurrent memory, with
        scaled positions, or if `n_ctx` is too small.  `n_ctx` is large enough with room for `n_seq_max`
        sequences of the trained length, and for one more with the prefix cache.
    flash_attn : bool, optional
        Flash attention; by default llama.cpp decides.
    deterministic : bool
        Give the same tokens for the same request, to the bit, with any other requests beside it.  The same
        holds for log probabilities, and for any chunks, cached prefixes, preemptions and threads.  CPU only,
        and slower (docs/determinism.md).  Loading a model ends with a test of it, and fails if the test fails.
    speculation : "auto", "ngram", "mtp", str, Path or None
        Guess tokens, and compute the guesses with the token they follow: "auto" (the default), "ngram", "mtp", or the
        file of a smaller model.  The number of guesses adapts to the time that they save; the answers stay the same,
        to the bit with `deterministic`.  "ngram" guesses from the tokens of the request itself, "mtp" with the model's
        own layer for multi-token prediction.  A smaller model must have the same vocabulary.  All of them also guess the
        tokens that a JSON schema or an expression forces.  "auto" is "ngram" without the memory for it: it has only
        the output rows that no running sequence needs, and no guesses for a model with recurrent memory.
    type_k : str
        Data type of the keys: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl.  With
        `deterministic`, f16 becomes bf16.
    type_v : str
        Data type of the values, as `type_k`.
    use_mmap : bool
        Map the model's file into memory instead of reading it.
    use_mlock : bool
        Lock the model in memory.
    load_mode : str, optional
        How the model's file is read: none, mmap, mlock, mmap+mlock, dio (direct I/O) or auto.  It replaces
        `use_mmap` and `use_mlock`.  "auto" is mmap unless a device does not support it.
    allow_overcommit : bool
        Load a model that does not fit into the available memory, with a warning.
    check_tensors : bool
        Look for NaN in the weights.
    repack : bool
        Rearrange weights in memory for the processor's instructions.  Which is faster depends on the types of the
        weights and on the number of rows.  The rearranged weights are a copy.  Not used with `deterministic`.
    tiled_matmul : bool
        Multiply K-quants and IQ-quants by tiles in batches of 8 rows or more (Q6_K and rearranged Q4_K: 24).  This is
        decided once for a process: False needs `process=True`, or an engine that is the first of its process to
        compute.  Not used with `deterministic`.
    tune : "cached", "auto" or None
        Use settings that were measured to be faster: cached, those that are known; auto, also measure at load if
        none are.  `cllm tune` measures them, or an earlier engine with "auto", for 20 s at most.  Only settings that
        have their default are changed.  None: none is.  Not used with `deterministic`, `rpc` or layers on a GPU.
    max_queue : int
        Requests that may wait for a sequence.  One more raises a `QueueFullError`; a server answers 429.
    prefix_cache : bool
        Share the cells of common prefixes of prompts.  A prompt shares them with running sequences, and with
        prefixes of finished ones.
    swa_full : bool, optional
        Keep all cells of layers with a sliding window, so that prefixes of any length can be shared; by default on
        with `prefix_cache`.  False saves memory.
    prefix_cache_tokens : int, optional
        KV cells for the prefixes of finished requests; by default all that no request needs.  The least
        recently used prefix is evicted when a request needs its cells.  In the unified layout prefixes also leave
        when 512 rows have been computed since their last use; see `docs/internals/kv-cache.md`.
    prefix_cache_bytes : int, optional
        Bytes of host memory for preempted requests, and for prefixes that have left the KV cells; by default
        a quarter of what is free, 8 GiB at most.  A state is restored from there if that is faster than
        computing it.  Prefixes are dropped to make room for preempted requests.  0: none.
    prefix_cache_dir : str or Path, optional
        A directory where prefixes are kept as files too, for other engines and later ones.  It holds
        prompts and answers.
    prefix_cache_dir_bytes : int
        Bytes of all files in `prefix_cache_dir`.  The least recently used file is deleted first.
    n_prefill_chunk : int, optional
        Rows of a prompt in a tick that other requests wait for; by default 128 on a CPU, and `n_batch` on
        a GPU.  A prompt of up to twice as many tokens is not cut.  Several such prompts together take up to
        twice as many rows of a tick.  Not used with `target_itl_ms`.
    target_itl_ms : float, optional
        Milliseconds between two tokens of a stream while a prompt is computed.  Chunks of prompts are sized
        so that the median is near this, and few gaps are 1.2 times as long.
    tenant_weights : mapping of str to float, optional
        Shares of tenants beside others of the same priority, NAME=WEIGHT; 1 for a tenant that is not named.
    stream_buffer : int
        Deltas held for a reader that does not read, before its sequence pauses.
    stall_timeout_s : float
        Seconds in one tick after which the health is "stalled".
    process : bool
        Run llama.cpp in a process of its own: if it ends, a new one continues all requests.
    hang_timeout_s : float, optional
        With `process`: seconds without a sign of life after which llama.cpp's process is restarted.  The same
        limit holds for a tick that uses less than a tenth of one processor, such as a tick that waits for
        `rpc` servers.  Other ticks, and all ticks on a GPU, may take ten times as long.  None: never.
    rpc : sequence of str
        Experimental: HOST:PORT of llama.cpp's RPC servers, which take layers as GPUs do; with a process
        only.  In private networks only (docs/rpc.md).
    trace : str or Path, optional
        Write ticks and requests to this file in Chrome's trace format, for Perfetto.  It holds no prompts
        and no answers.  With `process`, each restart begins a file of its own: `FILE.1`, …
    preflight : bool or "unseen"
        Load the model in another process first.  A damaged file, which can end or hang the process that
        loads it, raises a `ModelLoadError` then.  "unseen" tries only files that have not passed before with
        this library, according to the cache directory, and not the embedded model.
    rope_scaling : str, optional
        RoPE scaling: none, linear, yarn or longrope; by default the model's.
    rope_freq_base : float
        RoPE base frequency; 0: the model's.
    rope_freq_scale : float
        RoPE frequency scale; 0: the model's.
    yarn_ext_factor : float, optional
        YaRN extrapolation mix; by default the model's.
    yarn_attn_factor : float, optional
        YaRN attention factor; by default the model's.
    yarn_beta_fast : float, optional
        YaRN low correction dimension; by default the model's.
    yarn_beta_slow : float, optional
        YaRN high correction dimension; by default the model's.
    yarn_orig_ctx : int
        YaRN: positions that the model was trained with; 0: the model's.
    lora : sequence of (path, scale) or (name, path, scale)
        A LoRA adapter, [NAME=]FILE[:SCALE]; with scale 0 only requests that name the adapter use it.  The scale
        holds for requests that name no adapter.  The default name is that of the file, without its suffix.
    chat_template : str or Path, optional
        Jinja, or a file with it, in place of the model's own template.  Text with `{{` or `{%` is Jinja.
    model_sampling : bool
        Take the sampling parameters of the model's file (`general.sampling.*`) for fields that a request
        leaves out.
    pooling : str, optional
        How a text becomes a vector: mean, cls, last or rank; by default as the model's file says.  "mean",
        "cls" and "last": the mean of its tokens' vectors, the first or the last; "rank": the scores of the
        model's classifier, for `rerank` and `classify`.  A text of more than `n_ubatch` tokens is rejected.
    embedding_model : str or Path, optional
        A model for texts beside the one that generates: a GGUF file, or hf:USER/REPO[:QUANT].  It computes
        `embed`, `rerank` and `classify` in the same thread: streams keep their pace.  None: the model that
        generates.
    mmproj : str or Path, optional
        The projector for images or audio: a file, hf:USER/REPO/FILE, or auto, the one of the
        model's folder or repository.  With "auto" there may be none: the file is `*mmproj*.gguf`.  Both are
        encoded in a thread of their own, in turns with the decodes.
    mmproj_offload : bool
        Encode images and audio on a GPU, if there is one.
    image_min_tokens : int, optional
        Smallest number of rows of an image, for projectors that take any size; by default that of the file.
    image_max_tokens : int, optional
        Largest number of rows of an image, for projectors that take any size; by default that of the file.
    media_cache_bytes : int
        Host memory for embeddings of images and audio that no request needs any more.

    Raises
    ------
    InvalidArgumentError
        Names the field, the value and the limit.
    """

    model: str | Path | None = setting(None, file_path, "-m --model --model-path")
    n_ctx: int | Literal["auto"] = setting(
        N_CTX, or_word(AUTO, integer(0, 1 << 26)), "-c --n-ctx --ctx-size"
    )
    # Limits that depend on another field are checked in `__post_init__`.
    n_seq_max: int = setting(16, None, "--n-seq-max -np --parallel", affects=BATCHES)
    n_batch: int = setting(512, None, "-b --n-batch --batch-size", affects=BATCHES)
    n_ubatch: int = setting(
        512, integer(1, 1 << 20), "-ub --n-ubatch --ubatch-size", affects=BATCHES
    )
    n_threads: int | None = setting(
        None, integer(1, MAX_THREADS), "-t --threads --n-threads", affects=BATCHES
    )
    n_threads_batch: int | None = setting(
        None, integer(1, MAX_THREADS), "-tb --threads-batch", affects=BATCHES
    )
    n_gpu_layers: int = setting(
        -1,
        integer(-1, 2**31 - 1),
        "-ngl --n-gpu-layers --gpu-layers",
        affects=BATCHES | Affects.STATE,
    )
    devices: Sequence[str] | None = setting(
        None, device_names, "-dev --device --devices", affects=BATCHES | Affects.STATE
    )
    split_mode: str = setting(
        "layer",
        one_of("none", "layer", "row", "tensor"),
        "-sm --split-mode",
        affects=BATCHES | Affects.STATE,
    )
    tensor_split: Sequence[float] = setting(
        (), proportions, "-ts --tensor-split", affects=BATCHES | Affects.STATE
    )
    main_gpu: int = setting(
        0, integer(0, N_DEVICES_MAX - 1), "-mg --main-gpu", affects=BATCHES | Affects.STATE
    )
    override_tensor: Sequence[str] = setting(
        (), overrides, "-ot --override-tensor", affects=BATCHES
    )
    n_cpu_moe: int = setting(0, integer(0, 512), "-ncmoe --n-cpu-moe", affects=BATCHES)
    kv_offload: bool = setting(
        True, boolean, "--kv-offload/--no-kv-offload -kvo/-nkvo", affects=BATCHES | Affects.STATE
    )
    op_offload: bool | None = setting(None, boolean, affects=BATCHES)
    cpu_mask: str | None = setting(None, processor_set, "-C --cpu-mask -Cr --cpu-range")
    poll: int | None = setting(None, integer(0, 100))
    numa: str | None = setting(None, one_of("distribute", "isolate", "numactl"))
    kv_unified: bool | Literal["auto"] = setting(
        AUTO, boolean_or(AUTO), "--kv-unified/--no-kv-unified -kvu/-no-kvu"
    )
    flash_attn: bool | None = setting(None, boolean, affects=BATCHES | Affects.STATE)
    deterministic: bool = setting(False, boolean, affects=ANSWERS)
    speculation: str | Path | None = setting(
        AUTO,
        or_word(AUTO, or_word(NGRAM, or_word(MTP, file_path))),
        "--speculation -md --model-draft",
        is_optional=True,
    )
    # The bindings check the types, and the values for RoPE.
    type_k: str = setting("f16", None, "--type-k -ctk --cache-type-k", affects=ANSWERS)
    type_v: str = setting("f16", None, "--type-v -ctv --cache-type-v", affects=ANSWERS)
    use_mmap: bool = setting(True, boolean, "--mmap/--no-mmap")
    use_mlock: bool = setting(False, boolean, "--mlock/--no-mlock")
    load_mode: str | None = setting(
        None, one_of("none", "mmap", "mlock", "mmap+mlock", "dio", "auto"), "-lm --load-mode"
    )
    allow_overcommit: bool = setting(False, boolean)
    check_tensors: bool = setting(False, boolean)
    repack: bool = setting(True, boolean, "--repack/--no-repack /-nr", affects=BATCHES)
    tiled_matmul: bool = setting(True, boolean, affects=BATCHES)
    tune: Literal["cached", "auto"] | None = setting(
        "cached", one_of("cached", AUTO), is_optional=True
    )
    max_queue: int = setting(256, integer(0, 1 << 20))
    prefix_cache: bool = setting(True, boolean, affects=BATCHES)
    swa_full: bool | None = setting(None, boolean, affects=BATCHES | Affects.STATE)
    prefix_cache_tokens: int | None = setting(None, integer(1, 1 << 26), affects=BATCHES)
    prefix_cache_bytes: int | None = setting(None, integer(0, 1 << 50), affects=BATCHES)
    prefix_cache_dir: str | Path | None = setting(None, new_path)
    prefix_cache_dir_bytes: int = setting(8 << 30, integer(1, 1 << 50))
    n_prefill_chunk: int | None = setting(None, integer(1, 1 << 20), affects=BATCHES)
    target_itl_ms: float | None = setting(None, number(0.1, 1e6), affects=BATCHES)
    tenant_weights: Mapping[str, float] | tuple[tuple[str, float], ...] | None = setting(
        None, _weights, "--tenant-weight"
    )
    stream_buffer: int = setting(64, integer(1, 1 << 20))
    stall_timeout_s: float = setting(30.0, number(0.001, 1e6))
    process: bool = setting(False, boolean, "--process/--no-process --supervise/--no-supervise")
    hang_timeout_s: float | None = setting(60.0, number(1.0, 1e6), is_optional=True)
    rpc: Sequence[str] = setting((), _rpc_addresses, affects=BATCHES | Affects.STATE)
    trace: str | Path | None = setting(None, new_path)
    preflight: bool | Literal["unseen"] = setting(False, boolean_or(UNSEEN))
    rope_scaling: str | None = setting(None, affects=ANSWERS)
    rope_freq_base: float = setting(0.0, affects=ANSWERS)
    rope_freq_scale: float = setting(0.0, affects=ANSWERS)
    yarn_ext_factor: float | None = setting(None, affects=ANSWERS)
    yarn_attn_factor: float | None = setting(None, affects=ANSWERS)
    yarn_beta_fast: float | None = setting(None, affects=ANSWERS)
    yarn_beta_slow: float | None = setting(None, affects=ANSWERS)
    yarn_orig_ctx: int = setting(0, affects=ANSWERS)
    lora: Sequence[LoraSetting] = setting((), _adapters)
    chat_template: str | Path | None = setting(None, _template)
    model_sampling: bool = setting(True, boolean)
    pooling: str | None = setting(None, one_of("mean", "cls", "last", "rank"))
    embedding_model: str | Path | None = setting(None, file_path)
    mmproj: str | Path | None = setting(None, file_path, "-mm --mmproj")
    mmproj_offload: bool = setting(True, boolean, affects=ANSWERS)
    image_min_tokens: int | None = setting(None, integer(1, MAX_ROWS), affects=ANSWERS)
    image_max_tokens: int | None = setting(None, integer(1, MAX_ROWS), affects=ANSWERS)
    media_cache_bytes: int = setting(256 << 20, integer(0, 1 << 50))

    def __post_init__(self) -> None:
        check_settings(self)
        n_seq_max = check_int("n_seq_max", self.n_seq_max, 1, N_SEQ_IDS - self.prefix_cache)
        object.__setattr__(self, "n_seq_max", n_seq_max)
        n_batch = check_int("n_batch", self.n_batch, n_seq_max, 1 << 20)
        object.__setattr__(self, "n_batch", n_batch)
        if 0 < self.n_cells < self.n_seq_max:
            raise InvalidArgumentError(
                "n_ctx", self.n_ctx, f"0 or at least n_seq_max ({self.n_seq_max})"
            )
        if self.deterministic:
            self._check_deterministic()
        if self.flash_attn is False and self.type_v not in PLAIN_TYPES:
            limit = (
                f"{', '.join(PLAIN_TYPES)} with flash_attn=False: only flash attention reads others"
            )
            raise InvalidArgumentError("type_v", self.type_v, limit)
        if self.cpu_mask is not None and self.numa in ("distribute", "isolate"):
            limit = f"left out with numa={self.numa!r}, which binds threads itself"
            raise InvalidArgumentError("cpu_mask", self.cpu_mask, limit)
        if self.process and not can_pass_descriptors():
            limit = "False on this system: process=True passes sockets to a child process"
            raise InvalidArgumentError("process", True, limit)
        if self.rpc and not self.process:
            limit = (
                "left out without process=True: a server that dies ends the process that uses it"
            )
            raise InvalidArgumentError("rpc", self.rpc, limit)
        if self.rpc and self.deterministic:
            limit = "left out with deterministic: it has been shown on this machine's CPU only"
            raise InvalidArgumentError("rpc", self.rpc, limit)

    def _check_deterministic(self) -> None:
        """Reject settings that conflict with `deterministic`."""
        n_rows = 2 * self.n_seq_max
        for field, is_wrong, limit in (
            ("kv_unified", self.kv_unified is True, f"False or {AUTO!r} with deterministic"),
            ("flash_attn", self.flash_attn is False, "True or None with deterministic"),
            ("op_offload", self.op_offload is True, "False or None with deterministic"),
            ("type_k", self.type_k == "f32", "bf16 or a quantized type with deterministic"),
            ("type_v", self.type_v == "f32", "bf16 or a quantized type with deterministic"),
            (
                "n_ubatch",
                self.n_ubatch < n_rows,
                f"at least 2 x n_seq_max ({n_rows}) with deterministic",
            ),
        ):
            if is_wrong:
                raise InvalidArgumentError(field, getattr(self, field), limit)

    def to_json(self) -> str:
        """Return all fields as JSON, for another process: `EngineConfig(**json.loads(text))`."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)}, default=_plain)

    def absolute(self) -> EngineConfig:
        """Return the same settings with absolute paths, for a process with another working directory.

        The text of a chat template replaces the path of its file.

        Raises
        ------
        InvalidArgumentError
            See `read_chat_template`.
        """
        paths: dict[str, Any] = {
            name: str(Path(given).absolute())
            for name, stated in settings_of(EngineConfig).items()
            if stated.check in (file_path, new_path) and (given := getattr(self, name)) is not None
        }
        if self.draft_model is not None:
            paths["speculation"] = str(self.draft_model.absolute())
        template = self.read_chat_template()
        return replace(
            self,
            lora=tuple(
                (lora.name, str(Path(lora.path).absolute()), lora.scale) for lora in self.loras
            ),
            chat_template=template if is_jinja(template) else self.chat_template,
            **paths,
        )

    @property
    def used_load_mode(self) -> str:
        """Value of `load_mode`, or the one that says the same as `use_mmap` and `use_mlock`."""
        named = ("mmap",) * self.use_mmap + ("mlock",) * self.use_mlock
        return self.load_mode or "+".join(named) or "none"

    @property
    def is_mapped(self) -> bool:
        """True if the model's file is mapped into memory."""
        return "mmap" in self.used_load_mode or self.used_load_mode == "auto"

    @property
    def n_cells(self) -> int:
        """Value of `n_ctx` as a number; 0 if the model decides."""
        return 0 if self.n_ctx == AUTO else self.n_ctx

    @property
    def loras(self) -> tuple[LoraInfo, ...]:
        """The adapters of `lora`, each with a name."""
        return _lora_infos(self.lora)

    @property
    def model_path(self) -> Path:
        """The file to load."""
        return EMBEDDED_MODEL if self.model is None else Path(self.model)

    @property
    def draft_model(self) -> Path | None:
        """File of the draft model for speculation; None without a draft model."""
        given = self.speculation
        return None if given is None or given in (AUTO, NGRAM, MTP) else Path(given)

    @property
    def uses_mtp(self) -> bool:
        """True if the model's own layer for multi-token prediction drafts."""
        return self.speculation == MTP

    @property
    def reserves_drafts(self) -> bool:
        """True if drafts have output rows, and states of recurrent memory, of their own."""
        return self.speculation not in (None, AUTO)

    def read_chat_template(self) -> str | None:
        """Return the text of the configured chat template; None if the model's own template is used.

        Raises
        ------
        InvalidArgumentError
            The file cannot be read, or is not UTF-8 text.
        """
        given = self.chat_template
        if given is None or is_jinja(given):
            return None if given is None else str(given)
        try:
            with open_regular(given) as file:
                text = file.read(MAX_TEMPLATE_BYTES + 1)
            if len(text) > MAX_TEMPLATE_BYTES:
                raise ValueError(f"it has more than {MAX_TEMPLATE_BYTES} bytes")
            return text.decode("utf-8-sig")
        except (OSError, ValueError) as error:
            limit = f"Jinja, or a file with it ({error})"
            raise InvalidArgumentError("chat_template", str(given), limit) from None

    @property
    def kv_types(self) -> tuple[str, str]:
        """Types of the KV cache's keys and values, `(type_k, type_v)`; bf16 for f16 if `deterministic`."""

        # With f16 and f32, llama.cpp's attention computes 64 rows or more in tiles, and splits a single row
        # between threads.  Results would then depend on the number of rows.
        def used(type_kv: str) -> str:
            return "bf16" if self.deterministic and type_kv == "f16" else type_kv

        return used(self.type_k), used(self.type_v)

    def resolved(self) -> EngineConfig:
        """Return the same settings, with the threads and the types of the KV cache that are used."""
        n_threads, n_threads_batch = self.compute_threads
        type_k, type_v = self.kv_types
        return replace(
            self, n_threads=n_threads, n_threads_batch=n_threads_batch, type_k=type_k, type_v=type_v
        )

    def tuned(self, settings: Mapping[str, bool | int]) -> EngineConfig:
        """Return the same settings with those that tuning has found; they are not tuned again."""
        changes: dict[str, Any] = {**settings, "tune": None}
        return replace(self, **changes)

    def kv_layout(
        self,
        n_ctx_train: int,
        *,
        state_bytes: int = 0,
        n_states: int = 1,
        is_windowed: bool = False,
        can_copy: bool = True,
    ) -> KVLayout:
        """Return `kv_unified` and the number of seq_ids for a model trained with `n_ctx_train` positions.

        With a unified KV buffer the prefix cache has seq_ids of its own.  In the per-sequence layout each
        seq_id costs a share of `n_ctx`.  The cache then uses those that no running sequence needs; "auto"
        chooses that layout only with room for one more.  Recurrent and sliding-window memory can share only
        whole sequences, so more prefixes of each are kept; recurrent memory has `n_states` states of
        `state_bytes` for each.  Without `can_copy`, prefixes stay in the seq_ids that computed them.
        """
        n_running, n_cached = self.n_seq_max, 0
        if self.prefix_cache:
            n_cached = min(n_running, N_CACHED_IDS)
            if state_bytes or is_windowed:
                n_cached = min(max(2 * n_running, N_CACHED_IDS // 4), N_CACHED_IDS)
            if state_bytes:
                n_cached = min(n_cached, max(1, STATES_BYTES // (state_bytes * n_states)))
            if not can_copy:
                n_cached = 0
        n_unified = min(n_running + n_cached, N_SEQ_IDS)
        if self.kv_unified != AUTO:
            return KVLayout(True, n_unified) if self.kv_unified else KVLayout(False, n_running)
        if self.deterministic:
            return KVLayout(False, n_running)
        n_whole = self.n_cells // n_ctx_train if n_ctx_train else 0
        # Scaled positions are for sequences longer than the model was trained for.
        if state_bytes or self._scales_positions or n_whole < n_running + bool(n_cached):
            return KVLayout(True, n_unified)
        return KVLayout(False, min(n_whole, n_unified))

    def n_draft_states(self, state_bytes: int) -> int:
        """Return the number of extra states that recurrent memory keeps of a sequence, to undo wrong drafts.

        `state_bytes` is the size of one state; 0 for a model without recurrent memory.
        """
        if not self.reserves_drafts or not state_bytes:
            return 0
        n_most = DRAFT_STATES_BYTES // (state_bytes * self.n_seq_max)
        return max(0, min(N_DRAFT_STATES, n_most, self.n_batch - 2, self.n_ubatch - 2))

    @property
    def rope(self) -> dict[str, Any]:
        """Settings of rotary embeddings, by name."""
        return {name: getattr(self, name) for name in _ROPE}

    @property
    def _scales_positions(self) -> bool:
        """True if positions differ from those that the model was trained with."""
        return any(getattr(self, name) != default for name, default in _ROPE.items())

    def n_prefix_cache_tokens(self, n_cells: int) -> int:
        """Return the largest number of KV cells, out of `n_cells`, for prefixes of finished requests."""
        if not self.prefix_cache:
            return 0
        n_tokens = self.prefix_cache_tokens
        return n_cells if n_tokens is None else min(n_tokens, n_cells)

    @property
    def compute_threads(self) -> tuple[int, int]:
        """Numbers of compute threads, `(n_threads, n_threads_batch)`, with the defaults for None."""
        # The embedded model is too small for several threads.
        n_threads = self.n_threads or 1
        if self.n_threads is None and self.model is not None:
            n_threads = self.processors.n_threads
        return n_threads, self.n_threads_batch or n_threads

    @property
    def processors(self) -> Processors:
        """Processors that the engine may use: those of `cpu_mask`, or all of this process."""
        return usable_processors(None if self.cpu_mask is None else processors_of(self.cpu_mask))


class KVLayout(NamedTuple):
    """Division of a context's KV cells."""

    kv_unified: bool
    n_seq_ids: int


def _lora_infos(loras: Sequence[LoraSetting]) -> tuple[LoraInfo, ...]:
    """Return the adapters; one without a name is named after its file, with `-2`, `-3`, … for duplicates."""
    infos: dict[str, LoraInfo] = {}
    given = {lora[0] for lora in loras if len(lora) == 3}
    for lora in loras:
        path = os.fspath(lora[-2])
        stem = Path(path).stem
        names = (f"{stem}-{n}" if n > 1 else stem for n in itertools.count(1))
        free = (name for name in names if name not in infos and name not in given)
        name = lora[0] if len(lora) == 3 else next(free)
        infos[name] = LoraInfo(name, path, float(lora[-1]))
    return tuple(infos.values())


def _plain(value: Any) -> str | int:
    """Return a path as a string, or an integer of another type (such as numpy's) as an `int`, for JSON."""
    return os.fspath(value) if isinstance(value, os.PathLike) else operator.index(value)


def config_from(model: str | Path | None, options: EngineOptions) -> EngineConfig:
    """Return the configuration of `Engine(model, **options)`; raise `TypeError` for an unknown option."""
    check_known(options)
    return EngineConfig(model=model, **options)


def check_known(options: EngineOptions, others: Iterable[str] = ()) -> None:
    """Raise `TypeError` for an unknown option; `others` are the caller's own, which it may mean."""
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        known.update(others)
        near = closest(unknown[0], known)
        hint = f"the options are {', '.join(sorted(known))}"
        if instead := replacement(unknown[0]):
            hint = f"instead: {instead}"
        elif near is not None:
            hint = f"did you mean {near!r}?"
        raise TypeError(f"unknown engine option {unknown[0]!r}; {hint}")


_ROPE = {
    field.name: field.default
    for field in fields(EngineConfig)
    if field.name.startswith(("rope_", "yarn_"))
}
