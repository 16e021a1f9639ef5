"""Cases of hazard tables 1.1 to 1.3 and 1.9 for the engine: its settings, model files and adapters."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cllm import Completion, Engine, EngineConfig
from cllm.errors import (
    InvalidArgumentError,
    ModelLoadError,
    NotGenerativeError,
)
from tests.reliability.engine_hazard_case import INF, NAN, Scene, Topic, WrongAnswerError, short
from tools import make_model

TOPIC = Topic()
build: Any  # these two are loop variables of this file
options: dict[str, Any]
N_SEQ_MAX, N_CTX = "1.2 n_seq_max", "1.2 n_ctx too large"
TOO_FEW = "1.1 n_batch, n_ctx or n_outputs_max below n_seq_max"
TYPES, THREADS = "1.2 types of the cache", "1.2 n_threads"
ROPE, ENUMS = "1.2 RoPE of NaN", "1.2 unknown enums"
PATHS, DAMAGE = "1.2 model paths", "1.3 structural damage"
SEMANTIC = "1.3 semantic damage"
LORA = "1.9 LoRA files and scales"


async def make(_: Scene, *args: Any, **options: Any) -> Engine:
    """Make an engine, and do not enter it: these settings are wrong for every model."""
    return Engine(*args, **options)


async def start(scene: Scene, *args: Any, **options: Any) -> Completion:
    return await scene.start(*args, **options)


# --- Settings that are refused without a model -----------------------------------------------
def refuse_setting(row: str, limit: str, **options: Any) -> None:
    """Add a case of an engine with a wrong setting; `limit` is the beginning of the limit in the message."""
    ((field, value),) = options.items()
    TOPIC.refuse(
        f"{field} {short(value)}", make, f"{field} is {value!r}, must be {limit}", row=row,
        error=InvalidArgumentError, **options,
    )  # fmt: skip


for n in (0, -1, 256, 257, 2**32 - 1):
    refuse_setting(N_SEQ_MAX, "1 to 255", n_seq_max=n)
for wrong in (4.0, "4", None, True, NAN):
    refuse_setting(N_SEQ_MAX, "an integer", n_seq_max=wrong)
for n in (-1, 10**9, 2**32 - 256, 2**32 - 1, 2**32, 2**63):
    refuse_setting(N_CTX, f"0 to {1 << 26}", n_ctx=n)
for wrong in (256.0, "256", None, INF):
    refuse_setting(N_CTX, "an integer", n_ctx=wrong)
refuse_setting(TOO_FEW, "0 or at least n_seq_max (16)", n_ctx=15)
for n in (0, -1, 15, 2**31):
    refuse_setting(TOO_FEW, f"16 to {1 << 20}", n_batch=n)
for n in (0, -1, 2**31):
    refuse_setting(TOO_FEW, f"1 to {1 << 20}", n_ubatch=n)
for name in ("n_threads", "n_threads_batch"):
    for n in (0, -1, 513, 100_000, 2**32):
        refuse_setting(THREADS, "1 to 512", **{name: n})
    refuse_setting(THREADS, "an integer", **{name: "1"})
for name, low, high in (
    ("n_gpu_layers", -1, 2**31 - 1), ("max_queue", 0, 1 << 20), ("stream_buffer", 1, 1 << 20),
    ("prefix_cache_tokens", 1, 1 << 26), ("prefix_cache_bytes", 0, 1 << 50),
    ("n_prefill_chunk", 1, 1 << 20),
):  # fmt: skip
    for n in (low - 1, high + 1):
        refuse_setting("1.2 other integers", f"{low} to {high}", **{name: n})
    refuse_setting("1.2 other integers", "an integer", **{name: 1.5})
for name in (
    "use_mmap", "use_mlock", "check_tensors", "prefix_cache", "flash_attn", "deterministic",
):  # fmt: skip
    refuse_setting("1.2 other integers", "True or False", **{name: "yes"})
refuse_setting("1.2 other integers", "True, False or 'auto'", kv_unified="yes")
for name in ("target_itl_ms", "stall_timeout_s"):
    refuse_setting(ROPE, "finite", **{name: NAN})
    refuse_setting(ROPE, "a number", **{name: "1"})
refuse_setting(ENUMS, "True, False or 'unseen'", preflight="sometimes")
refuse_setting("1.2 model paths", "a path", trace=5)
for unknown in ("pooling_type", "embeddings", "n_outputs_max", "ctx_type", "vocab_only"):
    options = {unknown: 1}
    TOPIC.refuse(
        f"the option {unknown}", make, f"unknown engine option '{unknown}'", error=TypeError,
        row=ENUMS, **options,
    )  # fmt: skip
TOPIC.refuse(
    "a configuration and options", make, "cannot be combined", error=TypeError, row=ENUMS,
    config=EngineConfig(), n_ctx=512,
)  # fmt: skip

# --- Settings that the model decides about ---------------------------------------------------
for name in ("type_k", "type_v"):
    for kind in ("q9", "i8", "q4_2", "q4_3", "F16", "", 99, 4, None):
        TOPIC.refuse(
            f"{name} {kind!r}", start, f"{name} is {kind!r}, must be one of f32, f16, bf16",
            error=InvalidArgumentError, row=TYPES, in_full_only=name == "type_v", **{name: kind},
        )  # fmt: skip
TOPIC.refuse(
    "a quantized V cache without flash attention", start, "flash_attn", error=InvalidArgumentError,
    row="1.2 quantized caches that cannot be", type_v="q8_0", flash_attn=False,
)  # fmt: skip
for name in (
    "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast",
    "yarn_beta_slow",
):  # fmt: skip
    for value in (NAN, INF, -2.0, 1e39):
        TOPIC.refuse(
            f"{name} {value}", start, f"{name} is {value}, must be", error=InvalidArgumentError,
            row=ROPE, in_full_only=value in (INF, 1e39), **{name: value},
        )  # fmt: skip
TOPIC.refuse(
    "rope_freq_base 1e-40", start, "rope_freq_base is 1e-40, must be", error=InvalidArgumentError,
    row=ROPE, rope_freq_base=1e-40,
)  # fmt: skip
for scaling in ("q", 99, -2, ""):
    TOPIC.refuse(
        f"rope_scaling {scaling!r}", start, f"rope_scaling is {scaling!r}, must be one of",
        error=InvalidArgumentError, row=ENUMS, rope_scaling=scaling,
    )  # fmt: skip
for n in (-1, 2**31):
    TOPIC.refuse(
        f"yarn_orig_ctx {n}", start, f"yarn_orig_ctx is {n}, must be 0 to",
        error=InvalidArgumentError, row="1.2 other integers", yarn_orig_ctx=n,
    )  # fmt: skip
for encoder in ("tiny-encoder", "tiny-t5-encoder"):
    TOPIC.refuse(
        f"an engine of {encoder}", lambda s, name: s.start(make_model.ensure(name, "F16")),
        "cannot generate text", error=NotGenerativeError, row="1.1 encoders", name=encoder,
    )  # fmt: skip


async def read_back(_: Scene) -> None:
    """Check that `n_ctx` of the model is the number to which llama.cpp has rounded it."""
    async with Engine(n_ctx=1001, n_seq_max=3, kv_unified=False, n_threads=1) as engine:
        n_ctx = engine.model.n_ctx
        if not 3 * n_ctx >= 1001 or n_ctx % 256:
            raise WrongAnswerError(f"n_ctx is {n_ctx}")
        completion = await engine.generate([97] * (n_ctx - 1), ignore_eos=True)
        if completion.usage.n_output != 2:
            raise WrongAnswerError(f"{completion.usage.n_output} tokens in the last two places")


TOPIC.accept("n_ctx that is no multiple", read_back, row="1.2 n_ctx that is padded")
for options in (
    {"n_seq_max": 255, "n_batch": 255, "n_ctx": 255},
    {"n_seq_max": 256, "n_batch": 256, "n_ctx": 512, "prefix_cache": False},
    {"n_seq_max": 1, "n_batch": 1, "n_ubatch": 1}, {"n_ctx": 0},
    {"type_k": "q8_0"}, {"kv_unified": False, "n_seq_max": 2}, {"max_queue": 0},
):  # fmt: skip
    TOPIC.accept(f"the settings {options}", start, row=N_SEQ_MAX, **options)

# --- Model files -----------------------------------------------------------------------------
Build = Callable[[Scene], Path | str]


async def load(scene: Scene, build: Build, **options: Any) -> Completion:
    return await scene.start(build(scene), **options)


def refuse_model(claim: str, build: Build, *says: str, row: str = DAMAGE, **options: Any) -> None:
    """Add a case of an engine whose model path or file is wrong."""
    TOPIC.refuse(
        f"a model path that is {claim}", load, "cannot load ", *says, error=ModelLoadError, row=row,
        build=build, **options,
    )  # fmt: skip


def named(path: str) -> Build:
    return lambda _: path


def fifo(scene: Scene) -> Path:
    path = scene.directory / "fifo.gguf"
    os.mkfifo(path)
    return path


def cut(scene: Scene, fraction: float) -> Path:
    whole = scene.tiny_model().read_bytes()
    return scene.file("cut.gguf", whole[: int(fraction * len(whole))])


refuse_model("missing", lambda s: s.directory / "none.gguf", "No such file", row=PATHS)
for no_path in ("", "a\0b"):
    TOPIC.refuse(
        f"a model path that is {no_path!r}", load, f"model is {no_path!r}, must be a path",
        error=InvalidArgumentError, row=PATHS, build=named(no_path),
    )  # fmt: skip
refuse_model("a directory", lambda s: s.directory, "not a regular file", row=PATHS)
refuse_model("a FIFO", fifo, "not a regular file", row=PATHS)
for device in ("/dev/null", "/dev/zero"):
    refuse_model(device, named(device), f"'{device}'", "not a regular", row=PATHS)
refuse_model("a lone surrogate", lambda _: "\ud800.gguf", "'\\ud800.gguf'", row=PATHS)
refuse_model("longer than the system allows", lambda _: "x" * 5000, "too long", row=PATHS)
refuse_model("an empty file", lambda s: s.file("e.gguf", b""), "not a GGUF file")
refuse_model("a text file", lambda s: s.file("t.gguf", b"once upon"), "b'once'")
refuse_model("only a magic", lambda s: s.file("m.gguf", b"GGUF"), "/m.gguf")
refuse_model(
    "a header of 2**64-1 tensors",
    lambda s: s.file("h.gguf", b"GGUF" + b"\3\0\0\0" + b"\xff" * 16), "/h.gguf",
)  # fmt: skip
for fraction in (0.0001, 0.01, 0.05, 0.2, 0.5, 0.99):
    refuse_model(f"cut at {fraction:%}", partial(cut, fraction=fraction), "/cut.gguf")


def changed(scene: Scene, old: bytes, new: bytes) -> Path:
    """Write the tiny model with some bytes replaced."""
    data = scene.tiny_model().read_bytes()
    if data.count(old) != 1:
        raise WrongAnswerError(f"{old!r} is {data.count(old)} times in the model")
    return scene.file("changed.gguf", data.replace(old, new))


def with_number(scene: Scene, key: str, kind: str, number: float) -> Path:
    """Write the tiny model with another number in its metadata."""
    data = bytearray(scene.tiny_model().read_bytes())
    place = data.index(key.encode()) + len(key) + 4  # behind the type
    value = struct.pack(kind, number)
    data[place : place + len(value)] = value
    return scene.file("changed.gguf", bytes(data))


def with_nan(scene: Scene) -> Path:
    """Write the tiny model with NaN as its last weight."""
    return scene.file("nan.gguf", scene.tiny_model().read_bytes()[:-2] + b"\xff\x7f")


ONE, OTHER = b"\x01\0\0\0\0\0\0\0a", b"\x01\0\0\0\0\0\0\0b"
for claim, build in (
    ("a model with a token twice", lambda s: changed(s, ONE + OTHER, ONE + ONE)),
    ("a model of no layers", lambda s: with_number(s, "llama.block_count", "<I", 0)),
    ("a model of 600 layers", lambda s: with_number(s, "llama.block_count", "<I", 600)),
    ("a model of 2**32-1 layers", lambda s: with_number(s, "llama.block_count", "<I", 2**32 - 1)),
    ("a model of no attention heads",
     lambda s: with_number(s, "llama.attention.head_count", "<I", 0)),
    ("a model of epsilon -1",
     lambda s: with_number(s, "llama.attention.layer_norm_rms_epsilon", "<f", -1.0)),
    ("a model of epsilon NaN",
     lambda s: with_number(s, "llama.attention.layer_norm_rms_epsilon", "<f", NAN)),
    ("a model of an unknown architecture",
     lambda s: changed(s, b"\x05\0\0\0\0\0\0\0llama\x0c", b"\x05\0\0\0\0\0\0\0lamma\x0c")),
):  # fmt: skip
    TOPIC.refuse(
        f"{claim}, tried first", load, "cannot load ", "changed.gguf", error=ModelLoadError,
        row=SEMANTIC, build=build, preflight=True, in_full_only=True,
    )  # fmt: skip
TOPIC.refuse(
    "weights of NaN, looked for", load, "nan.gguf", error=ModelLoadError,
    row="1.3 weights of NaN", build=with_nan, check_tensors=True,
)  # fmt: skip

# --- Adapters --------------------------------------------------------------------------------
TOPIC.row = LORA


async def adapt(scene: Scene, build: Build, scale: Any = 1.0) -> Completion:
    return await scene.start(lora=[(build(scene), scale)])


for claim, build, text in (
    ("missing", lambda s: s.directory / "none.gguf", "No such file"),
    ("garbage", lambda s: s.file("l.gguf", b"GGUF" + b"\7" * 999), "/l.gguf"),
    ("an empty file", lambda s: s.file("l.gguf", b""), "/l.gguf"),
    ("a model", lambda s: s.tiny_model(), "tiny-llama"),
    ("a directory", lambda s: s.directory, "not a regular file"),
    ("a FIFO", fifo, "not a regular file"),
    ("/dev/zero", lambda _: "/dev/zero", "not a regular file"),
):
    TOPIC.refuse(
        f"a LoRA file that is {claim}", adapt, "cannot load ", text, error=ModelLoadError,
        build=build,
    )  # fmt: skip
for scale, limit in (
    (NAN, "finite"), (INF, "finite"), (1e39, "-10000 to 10000"), ("1", "a number"),
    (None, "a number"), (True, "a number"),
):  # fmt: skip
    TOPIC.refuse(
        f"a LoRA scale of {scale!r}", adapt, f"scale of x is {scale!r}, must be {limit}",
        error=InvalidArgumentError, build=lambda _: "x", scale=scale,
    )  # fmt: skip

CASES = TOPIC.cases
