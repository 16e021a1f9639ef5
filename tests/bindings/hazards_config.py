"""Cases of hazard tables 1.2 and 1.3: parameters of contexts, and model files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cllm.bindings import Context, Model
from cllm.errors import ContextError, ModelLoadError, NotGenerativeError
from tests.bindings.hazard_case import INF, NAN, SMALL, Scene, Topic
from tools import make_model

TOPIC = Topic()
refuse = TOPIC.refuse
# Loop variable of this file; some of its values have a wrong type.
n_threads: Any


# --- Contexts --------------------------------------------------------------------------------
def make_context(scene: Scene, **parameters: Any) -> Context:
    scene.context  # noqa: B018
    return scene.new_context(**parameters)


BAD_CONTEXT: list[tuple[dict[str, Any], str]] = [
    *[({"n_seq_max": n}, f"n_seq_max is {n!r}, must be") for n in (0, -1, 257, 2**32 - 1, 4.0, "4")],
    *[({"n_ctx": n}, f"n_ctx is {n}, must be 0 to ") for n in (-1, 10**9, 2**32 - 1, 2**32)],
    ({"n_ctx": 3}, "n_ctx is 3, must be at least n_seq_max (4)"),
    ({"n_ctx": 256.0}, "n_ctx is 256.0, must be an integer"),
    *[({"n_batch": n}, f"n_batch is {n}, must be 4 to ") for n in (3, 0, -1, 2**31, 2**32)],
    *[({"n_ubatch": n}, f"n_ubatch is {n}, must be 1 to ") for n in (0, -1, 2**31, 2**32)],
    *[({"n_outputs_max": n}, f"n_outputs_max is {n}, must be 4 to 64") for n in (0, 3, 65, 2**32)],
    *[
        ({field_: bad}, f"{field_} is {bad!r}, must be one of f32, f16")
        for field_ in ("type_k", "type_v")
        for bad in ("q9", "i8", "q4_2", "F16", 99, 4, None)
    ],
    *[
        ({field_: n}, f"{field_} is {n}, must be 1 to 512")
        for field_ in ("n_threads", "n_threads_batch")
        for n in (0, -1, 100_000, 2**32)
    ],
    *[
        ({field_: bad}, f"{field_} is {bad!r}, must be")
        for field_ in (
            "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
            "yarn_beta_fast", "yarn_beta_slow",
        )
        for bad in (NAN, INF, -2.0, 1e39)
    ],
    ({"rope_freq_base": 1e-40}, "rope_freq_base is 1e-40, must be"),
    ({"rope_scaling": "yarn", "rope_freq_scale": 1e-40}, "rope_freq_scale is 1e-40, must be"),
    *[({"rope_scaling": bad}, f"rope_scaling is {bad!r}, must be one of") for bad in (99, -2, "q")],
    *[({"yarn_orig_ctx": n}, f"yarn_orig_ctx is {n}, must be 0 to ") for n in (-1, 2**31)],
    *[({"flash_attn": bad}, f"flash_attn is {bad!r}, must be") for bad in ("yes", 2)],
]  # fmt: skip
for bad_parameters, message in BAD_CONTEXT:
    shown = ", ".join(f"{name}={value!r}" for name, value in bad_parameters.items())
    refuse(f"a context with {shown}", make_context, message, **bad_parameters)
refuse(
    "a quantized V cache without flash attention", make_context, "flash_attn",
    error=ContextError, type_v="q8_0", flash_attn=False,
)  # fmt: skip
refuse(
    "a context of a model without weights",
    lambda s: Context(Model(s.path, vocab_only=True), **SMALL), "vocab_only", error=ContextError,
)  # fmt: skip
for encoder in ("tiny-encoder", "tiny-t5-encoder"):
    refuse(
        f"a context of {encoder}",
        lambda s, name: Context(Model(make_model.ensure(name, "F16")), **SMALL),
        "cannot generate text", error=NotGenerativeError, name=encoder,
    )  # fmt: skip


# --- Model files -----------------------------------------------------------------------------
def load(scene: Scene, name: str, content: bytes | None = None) -> Model:
    return Model(scene.file(name, content) if content is not None else scene.directory / name)


def load_fifo(scene: Scene) -> Model:
    os.mkfifo(scene.directory / "fifo.gguf")
    return load(scene, "fifo.gguf")


def load_truncated(scene: Scene, fraction: float) -> Model:
    whole = scene.path.read_bytes()
    return load(scene, "cut.gguf", whole[: int(fraction * len(whole))])


def refuse_model(claim: str, act: Callable[..., object], *says: str, **bound: Any) -> None:
    refuse(f"a model path that is {claim}", act, *says, error=ModelLoadError, **bound)


refuse_model("missing", load, "/none.gguf", "No such file", name="none.gguf")
refuse_model("empty", lambda _: Model(""), "cannot load ''")
refuse_model("a directory", load, "cannot load '/", "not a regular file", name=".")
refuse_model("a FIFO", load_fifo, "/fifo.gguf", "not a regular file")
refuse_model("/dev/null", lambda _: Model("/dev/null"), "'/dev/null'", "not a regular file")
refuse_model("/dev/zero", lambda _: Model("/dev/zero"), "'/dev/zero'", "not a regular file")
refuse_model("an empty file", load, "/e.gguf", "not a GGUF file", name="e.gguf", content=b"")
refuse_model("a text file", load, "/t.gguf", "b'once'", name="t.gguf", content=b"once upon a time")
refuse_model("text with NUL", lambda _: Model("a\0b"), "'a\\x00b'", "NUL")
refuse_model("text with a lone surrogate", lambda _: Model("\ud800.gguf"), "\\ud800")
refuse_model("longer than the system allows", lambda _: Model("x" * 5000), "too long")
refuse_model("only a magic", load, "/m.gguf", name="m.gguf", content=b"GGUF")
refuse_model(
    "a header of 2**64-1 tensors", load, "/h.gguf", name="h.gguf",
    content=b"GGUF" + b"\3\0\0\0" + b"\xff" * 16,
)  # fmt: skip
for fraction in (0.0001, 0.01, 0.05, 0.2, 0.5, 0.99):
    refuse_model(f"cut at {fraction:%}", load_truncated, "/cut.gguf", fraction=fraction)
refuse(
    "n_gpu_layers -2", lambda s: Model(s.path, n_gpu_layers=-2), "n_gpu_layers is -2, must be -1 to"
)

CASES = TOPIC.cases
