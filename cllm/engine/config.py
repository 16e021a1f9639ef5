"""EngineConfig: everything about an engine that is settled before it starts."""

from __future__ import annotations

import difflib
import itertools
import json
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypedDict

from cllm.checks import MAX_THREADS, check_bool, check_float, check_int, check_tenant
from cllm.engine.lora import MAX_SCALE, LoraInfo, check_lora_name
from cllm.engine.rpc_address import N_SERVERS_MAX, rpc_address
from cllm.errors import InvalidArgumentError
from cllm.processors import usable_processors
from cllm.removed import replacement

N_SEQ_IDS = 256  # LLAMA_MAX_SEQ: all that libllama has
AUTO: Final = "auto"
NGRAM: Final = "ngram"
POOLINGS = ("mean", "cls", "last", "rank")
N_CTX = 4096
N_TEXTS_MAX = 64  # that become vectors in one batch
N_CACHED_IDS = 16  # of the prefix cache, at the most
STATES_BYTES = 512 << 20  # of the states of recurrent models that are kept for others, at the most

UNSEEN: Final = "unseen"
PLAIN_TYPES = ("f32", "f16", "bf16")  # of the KV cache, not quantized
EMBEDDED_MODEL = Path(__file__).parent.parent / "models" / "cllm-tiny.gguf"


LoraSetting = tuple[str | Path, float] | tuple[str, str | Path, float]


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`, except the model, as keyword arguments."""

    n_ctx: int | Literal["auto"]
    n_seq_max: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    n_gpu_layers: int
    kv_unified: bool | Literal["auto"]
    flash_attn: bool | None
    deterministic: bool
    speculation: str | Path | None
    type_k: str
    type_v: str
    use_mmap: bool
    use_mlock: bool
    overcommit: bool
    check_tensors: bool
    max_queue: int
    prefix_cache: bool
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine.

    Parameters
    ----------
    model : str or Path, optional
        A GGUF file, or its name (`hf:user/repo:quant`), which an engine replaces by the file when it is
        entered; None is the embedded model.
    n_ctx : int
        KV cells in all, shared by the sequences; 0 takes the model's training length, "auto" that
        where memory allows it, and at least 4096, the default.
    n_seq_max : int
        Running sequences, 1 to 255; 256 without prefix cache.
    n_batch, n_ubatch : int
        Rows of a tick, and of a physical batch; `n_batch` at least `n_seq_max`.
    n_threads, n_threads_batch : int, optional
        Compute threads for one row and for many, at most; None: the physical cores this process may
        use.  The engine uses fewer while other programs keep the processors busy, unless it is
        `deterministic`.
    n_gpu_layers : int
        Layers on the GPU; -1 means all that fit.
    kv_unified : bool or "auto"
        One KV buffer for all sequences; False gives each its own share of `n_ctx`, and no request
        may be longer: what ran before does not change the answers of who runs alone, but for hits
        of the prefix cache.  "auto": False if `deterministic`, or if `n_ctx` has room for
        `n_seq_max` sequences, and one more for the prefix cache, as long as the model was trained
        for; not with recurrent memory or scaled positions.
    flash_attn : bool, optional
        None lets llama.cpp decide.
    deterministic : bool
        Tokens and log probabilities of a request depend on the request alone, to the bit: not on
        the others in its batch, on chunks, prefix cache, preemption or threads.  CPU only, and
        slower (docs/determinism.md).  Loading a model ends with a test of it, and is refused where
        that fails.
    speculation : "ngram", str or Path, optional
        Guess tokens and compute the guesses with the token they follow, as many as are worth their
        time: the answers stay what they were, and may come sooner.  "ngram": from the tokens of the
        request itself.  A path: by a smaller model with the same vocabulary, a GGUF file.  What a
        JSON schema or an expression forces is guessed with either.
    type_k, type_v : str
        Data type of the KV cache: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl.
        With `deterministic`, f16 becomes bf16.
    use_mmap, use_mlock, check_tensors : bool
        Map the file, lock it in memory, look for NaN in the weights.
    overcommit : bool
        Load the model where it does not fit into the memory that is available, with a warning.
    max_queue : int
        Requests that may wait for a seq_id; one more is a `QueueFullError`.
    prefix_cache : bool
        Share the cells of shared prefixes of prompts: with running sequences, and with what
        finished ones have left.
    prefix_cache_tokens : int, optional
        KV cells that finished sequences may leave occupied.  None: all that no request wants; they
        are evicted, least recently used first, when one does.
    prefix_cache_bytes : int, optional
        Bytes of host memory for what has left the KV cells: states of preempted sequences and prefixes.
        They come back from there where that is faster than computing them; prefixes leave to make room
        for sequences.  None: a quarter of what is available at start, 8 GiB at most; 0: none.
    prefix_cache_dir : str or Path, optional
        A directory where they are kept as files too, for engines that come later, or beside.  It holds
        prompts and answers.  None: none.
    prefix_cache_dir_bytes : int
        Of all its files; those that were used longest ago go first.
    n_prefill_chunk : int, optional
        Rows of a tick that a prompt may take while others wait for the tick to end; prompts of up
        to twice as many tokens are not cut, and together take up to twice as many.  None: 128
        where the CPU computes, `n_batch` where a GPU does.  Not used with `target_itl_ms`.
    target_itl_ms : float, optional
        Milliseconds between two tokens of a stream while a prompt comes in: its chunks are sized
        so that the median is near this and hardly a gap 1.2 times as long.
    tenant_weights : mapping of str to float, optional
        Share of each named tenant of requests beside others of the same priority; 1 for all others.
    stream_buffer : int
        Deltas held for a reader that does not read, before its sequence pauses.
    stall_timeout_s : float
        Seconds in one tick after which `health()` says "stalled".
    process : bool
        Run llama.cpp in a process of its own: if that ends, a new one goes on with every request.
    hang_timeout_s : float, optional
        With `process`: after so many seconds without a sign of life, or in one tick that computes
        nothing, it is killed and started anew; with `rpc`, in any tick.  None: never.
    rpc : sequence of str
        Experimental: `HOST:PORT` of llama.cpp's RPC servers, to whose memory layers go as to a GPU's.  With
        `process` only, and in private networks (docs/cluster.md).
    trace : str or Path, optional
        Write ticks and requests to this file in Chrome's trace format, which Perfetto shows.  It holds no
        prompts and no answers.  With `process`, each restart begins a file of its own: `FILE.1`, …
    preflight : bool or "unseen"
        Load the model and decode a few tokens in a child process first: a damaged file, which can
        end or hang the process that loads it, is a `ModelLoadError` then.  "unseen": not for files
        that have passed before with this library, as the cache directory remembers, nor for the
        embedded model.
    rope_scaling, rope_freq_base, rope_freq_scale, yarn_* :
        RoPE; None and 0 take the model's.
    lora : sequence of (path, scale) or (name, path, scale)
        Adapters: with this scale they compute what names none itself.  Without a name they have
        that of their file, less its end.
    chat_template : str or Path, optional
        Jinja, or a file with it, in place of the model's own: what has `{{` or `{%` in it is Jinja.
    model_sampling : bool
        Sampling fields that a request leaves out are what the model's file says
        (`general.sampling.*`), where it says so.
    pooling : str, optional
        For `embed`: a text's vector is the "mean" of its tokens' vectors, that of the first ("cls")
        or of the "last"; "rank": the scores of the model's classifier, for `rerank` and `classify`.
        None: as the model's file says.  A text of more than `n_ubatch` tokens is refused.
    embedding_model : str or Path, optional
        A model for `embed`, `rerank` and `classify` beside the one that generates, computed by the same
        thread: streams keep their pace.  None: that one.

    Raises
    ------
    InvalidArgumentError
        Names the field, the value and the limit.
    """

    model: str | Path | None = None
    n_ctx: int | Literal["auto"] = N_CTX
    n_seq_max: int = 16
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_gpu_layers: int = -1
    kv_unified: bool | Literal["auto"] = AUTO
    flash_attn: bool | None = None
    deterministic: bool = False
    speculation: str | Path | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    use_mmap: bool = True
    use_mlock: bool = False
    overcommit: bool = False
    check_tensors: bool = False
    max_queue: int = 256
    prefix_cache: bool = True
    prefix_cache_tokens: int | None = None
    prefix_cache_bytes: int | None = None
    prefix_cache_dir: str | Path | None = None
    prefix_cache_dir_bytes: int = 8 << 30
    n_prefill_chunk: int | None = None
    target_itl_ms: float | None = None
    tenant_weights: Mapping[str, float] | tuple[tuple[str, float], ...] | None = None
    stream_buffer: int = 64
    stall_timeout_s: float = 30.0
    process: bool = False
    hang_timeout_s: float | None = 60.0
    rpc: Sequence[str] = ()
    trace: str | Path | None = None
    preflight: bool | Literal["unseen"] = False
    rope_scaling: str | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int = 0
    lora: Sequence[LoraSetting] = ()
    chat_template: str | Path | None = None
    model_sampling: bool = True
    pooling: str | None = None
    embedding_model: str | Path | None = None

    def __post_init__(self) -> None:
        check_bool("prefix_cache", self.prefix_cache)
        check_int("n_seq_max", self.n_seq_max, 1, 255 if self.prefix_cache else 256)
        if self.n_ctx != AUTO:
            check_int("n_ctx", self.n_ctx, 0, 1 << 26)
        if 0 < self.n_cells < self.n_seq_max:
            raise InvalidArgumentError(
                "n_ctx", self.n_ctx, f"0 or at least n_seq_max ({self.n_seq_max})"
            )
        check_int("n_batch", self.n_batch, self.n_seq_max, 1 << 20)
        check_int("n_ubatch", self.n_ubatch, 1, 1 << 20)
        for field, low, high in (
            ("n_threads", 1, MAX_THREADS), ("n_threads_batch", 1, MAX_THREADS),
            ("prefix_cache_tokens", 1, 1 << 26), ("n_prefill_chunk", 1, 1 << 20),
            ("prefix_cache_bytes", 0, 1 << 50), ("prefix_cache_dir_bytes", 1, 1 << 50),
        ):  # fmt: skip
            value = getattr(self, field)
            if value is not None:
                check_int(field, value, low, high)
        if self.target_itl_ms is not None:
            check_float("target_itl_ms", self.target_itl_ms, 0.1, 1e6)
        check_int("n_gpu_layers", self.n_gpu_layers, -1, 2**31 - 1)
        for field in (
            "use_mmap", "use_mlock", "overcommit", "check_tensors", "model_sampling", "deterministic",
            "process",
        ):  # fmt: skip
            check_bool(field, getattr(self, field))
        if self.kv_unified != AUTO and not isinstance(self.kv_unified, bool):
            raise InvalidArgumentError("kv_unified", self.kv_unified, f"True, False or {AUTO!r}")
        if self.deterministic:
            self._check_deterministic()
        self._check_rpc()
        if self.flash_attn is not None:
            check_bool("flash_attn", self.flash_attn)
        if self.flash_attn is False and self.type_v not in PLAIN_TYPES:
            limit = (
                f"{', '.join(PLAIN_TYPES)} with flash_attn=False: only flash attention reads others"
            )
            raise InvalidArgumentError("type_v", self.type_v, limit)
        check_int("max_queue", self.max_queue, 0, 1 << 20)
        check_int("stream_buffer", self.stream_buffer, 1, 1 << 20)
        object.__setattr__(self, "tenant_weights", _checked_weights(self.tenant_weights))
        check_float("stall_timeout_s", self.stall_timeout_s, 0.001, 1e6)
        if self.hang_timeout_s is not None:
            check_float("hang_timeout_s", self.hang_timeout_s, 1.0, 1e6)
        for field in ("model", "trace", "speculation", "embedding_model", "prefix_cache_dir"):
            if (path := getattr(self, field)) is not None:
                _check_path(field, path)
        if self.preflight != UNSEEN and not isinstance(self.preflight, bool):
            raise InvalidArgumentError("preflight", self.preflight, f"True, False or {UNSEEN!r}")
        _check_loras(self.lora)
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise InvalidArgumentError("pooling", self.pooling, "one of " + ", ".join(POOLINGS))
        if self.chat_template is not None and not is_jinja(self.chat_template):
            _check_path("chat_template", self.chat_template)

    def _check_rpc(self) -> None:
        """Addresses, and what they cannot be had with."""
        if isinstance(self.rpc, str) or not isinstance(self.rpc, Sequence):
            raise InvalidArgumentError("rpc", self.rpc, "a sequence of HOST:PORT")
        if len(self.rpc) > N_SERVERS_MAX:
            raise InvalidArgumentError("rpc", self.rpc, f"at most {N_SERVERS_MAX} servers")
        if len(set(map(rpc_address, self.rpc))) < len(self.rpc):
            raise InvalidArgumentError(
                "rpc", self.rpc, "each server once: it has one client at a time"
            )
        if self.rpc and not self.process:
            limit = (
                "left out without process=True: a server that dies ends the process that uses it"
            )
            raise InvalidArgumentError("rpc", self.rpc, limit)
        if self.rpc and self.deterministic:
            limit = "left out with deterministic: it has been shown on this machine's CPU only"
            raise InvalidArgumentError("rpc", self.rpc, limit)
        object.__setattr__(self, "rpc", tuple(self.rpc))  # of JSON: a list

    def _check_deterministic(self) -> None:
        """What it cannot be had with."""
        n_rows = 2 * self.n_seq_max
        for field, is_wrong, limit in (
            ("kv_unified", self.kv_unified is True, f"False or {AUTO!r} with deterministic"),
            ("flash_attn", self.flash_attn is False, "True or None with deterministic"),
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
        """All fields, for another process: `EngineConfig(**json.loads(text))` takes them back."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)}, default=_plain)

    def absolute(self) -> EngineConfig:
        """Return the same settings for processes that start later, elsewhere: without relative paths.

        A chat template is in it instead of its file.

        Raises
        ------
        InvalidArgumentError
            See `read_chat_template`.
        """
        paths: dict[str, Any] = {
            name: str(Path(given).absolute())
            for name in ("trace", "embedding_model", "model")
            if (given := getattr(self, name)) is not None
        }
        if self.draft_model is not None:
            paths["speculation"] = str(self.draft_model.absolute())
        if self.prefix_cache_dir is not None:
            paths["prefix_cache_dir"] = str(Path(self.prefix_cache_dir).expanduser().absolute())
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
    def n_cells(self) -> int:
        """`n_ctx` as a number; 0 where the model decides."""
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
        """The file of the model that drafts."""
        given = self.speculation
        return None if given is None or given == NGRAM else Path(given)

    def read_chat_template(self) -> str | None:
        """The chat template that is used in place of the model's; None for the model's.

        Raises
        ------
        InvalidArgumentError
            There is no such file, or it is no text.
        """
        given = self.chat_template
        if given is None or is_jinja(given):
            return None if given is None else str(given)
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            limit = f"Jinja, or a file with it ({error})"
            raise InvalidArgumentError("chat_template", str(given), limit) from None

    @property
    def kv_types(self) -> tuple[str, str]:
        """`(type_k, type_v)` as they are used."""

        # Of f16 and f32, llama.cpp's attention takes rows by tiles from 64 on, and splits a single
        # one between threads.
        def used(type_kv: str) -> str:
            return "bf16" if self.deterministic and type_kv == "f16" else type_kv

        return used(self.type_k), used(self.type_v)

    def kv_layout(
        self, n_ctx_train: int, *, state_bytes: int = 0, is_windowed: bool = False
    ) -> KVLayout:
        """`kv_unified` and the number of seq_ids, for a model trained for so many positions.

        The prefix cache has seq_ids of its own.  In the per-sequence layout each costs a share of
        `n_ctx`: there it lives in those that no running sequence needs, and "auto" sees to one more.
        Where only all of a sequence can be shared, several beginnings of one are kept; recurrent memory
        has a state of `state_bytes` for each.
        """
        n_running, n_cached = self.n_seq_max, 0
        if self.prefix_cache:
            n_cached = min(n_running, N_CACHED_IDS)
            if state_bytes or is_windowed:
                n_cached = min(max(2 * n_running, N_CACHED_IDS // 4), N_CACHED_IDS)
            if state_bytes:
                n_cached = min(n_cached, max(1, STATES_BYTES // state_bytes))
        n_unified = min(n_running + n_cached, N_SEQ_IDS)
        if self.kv_unified != AUTO:
            return KVLayout(True, n_unified) if self.kv_unified else KVLayout(False, n_running)
        if self.deterministic:
            return KVLayout(False, n_running)
        n_whole = self.n_cells // n_ctx_train if n_ctx_train else 0
        # Who scales positions wants more of them than the model was trained for.
        if state_bytes or self._scales_positions or n_whole < n_running + bool(n_cached):
            return KVLayout(True, n_unified)
        return KVLayout(False, min(n_whole, n_unified))

    @property
    def _scales_positions(self) -> bool:
        """Whether positions are not those that the model was trained with."""
        return any(
            getattr(self, field.name) != field.default
            for field in fields(self)
            if field.name.startswith(("rope_", "yarn_"))
        )

    def n_prefix_cache_tokens(self, n_cells: int) -> int:
        """KV cells that finished sequences may leave occupied, of so many in all."""
        if not self.prefix_cache:
            return 0
        n_tokens = self.prefix_cache_tokens
        return n_cells if n_tokens is None else min(n_tokens, n_cells)

    @property
    def compute_threads(self) -> tuple[int, int]:
        """`(n_threads, n_threads_batch)` with None replaced."""
        # The embedded model is too small to share between threads.
        n_threads = self.n_threads or (1 if self.model is None else usable_processors().n_threads)
        return n_threads, self.n_threads_batch or n_threads


class KVLayout(NamedTuple):
    """How a context divides its KV cells."""

    kv_unified: bool
    n_seq_ids: int


def is_jinja(template: object) -> bool:
    """Whether this is a template, and not the name of a file."""
    return isinstance(template, str) and ("{{" in template or "{%" in template)


def _checked_weights(weights: object) -> tuple[tuple[str, float], ...] | None:
    """Return a checked copy that can be hashed: pairs of a name and a weight."""
    try:
        pairs = tuple(dict(weights or ()).items())  # type: ignore[call-overload]
    except (TypeError, ValueError):
        limit = "a mapping of names to weights"
        raise InvalidArgumentError("tenant_weights", weights, limit) from None
    for name, weight in pairs:
        check_tenant("tenant_weights", name)
        check_float(f"tenant_weights[{name!r}]", weight, 0.001, 1000.0)
    return pairs or None


def _check_path(field: str, path: object) -> None:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(field, path, "a path: not empty, without NUL characters")


def _check_loras(loras: object) -> None:
    if not isinstance(loras, Sequence) or isinstance(loras, str | bytes):
        raise InvalidArgumentError("lora", loras, "a sequence of (path, scale)")
    names: set[str] = set()
    for lora in loras:
        if not isinstance(lora, list | tuple) or len(lora) not in (2, 3):
            raise InvalidArgumentError("lora", lora, "(path, scale) or (name, path, scale)")
        *name, path, scale = lora
        _check_path("lora", path)
        check_float(f"scale of {path}", scale, -MAX_SCALE, MAX_SCALE)
        if name and (check_lora_name(name[0], InvalidArgumentError) in names):
            raise InvalidArgumentError("lora", name[0], "a name that no other adapter has")
        names.update(name)


def _lora_infos(loras: Sequence[LoraSetting]) -> tuple[LoraInfo, ...]:
    """With the names that their files give to those without one: the second of a name is `name-2`."""
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
    """A path, or an integer that is none of Python's, for JSON."""
    return os.fspath(value) if isinstance(value, os.PathLike) else operator.index(value)


def config_from(model: str | Path | None, options: EngineOptions) -> EngineConfig:
    """The configuration of `Engine(model, **options)`; an unknown option is a `TypeError`."""
    check_known(options)
    return EngineConfig(model=model, **options)


def check_known(options: EngineOptions) -> None:
    """An unknown option is a `TypeError`."""
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if instead := replacement(unknown[0]):
            hint = f"instead: {instead}. "
        raise TypeError(
            f"unknown engine option {unknown[0]!r}; {hint}The options are {', '.join(sorted(known))}"
        )
