"""Write random-weight projectors (mmproj files): encoders of images and audio for tests and benchmarks.

A file is written to the directory of `make_model`'s models.  Writing it again gives the same bytes.

    python -m tools.make_projector gemma3        # prints the path
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools import make_model

GENERATOR = 1
SEED = 20261126
N_EMBD_TEXT = 64  # of every tiny model
Tensors = dict[str, NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Sizes of an image encoder; `side` and `patch` are the sides of an image and of a patch, in pixels.

    Attributes
    ----------
    ff_factor : int
        Length of the feed-forward layer's rows, in `n_embd`.
    dtype : type of float
        Type of the matrices.  Everything that is added to F32 values stays F32, as llama.cpp needs it.
    """

    n_embd: int = 32
    n_head: int = 2
    n_layer: int = 2
    side: int = 64
    patch: int = 8
    ff_factor: int = 3
    dtype: type[np.floating[Any]] = np.float32


@dataclass(frozen=True, slots=True, eq=False)
class Projector:
    """Projector that `ensure` can make.

    `projection` returns the tensors after the encoder, given the lengths of the encoder's and of the text
    model's rows.  The keys of `metadata` have no prefix "clip.vision.".
    """

    summary: str
    kind: str
    text_model: str
    projection: Callable[[Draw, int, int], Tensors]
    metadata: Mapping[str, int] = field(default_factory=dict)
    encoder: Encoder = Encoder()
    n_embd_text: int = N_EMBD_TEXT


class Draw:
    """Random matrices from a frozen stream."""

    def __init__(self) -> None:
        self._random = np.random.RandomState(SEED)

    def __call__(self, *shape: int) -> NDArray[np.float32]:
        """Return normal values whose standard deviation is the inverse root of the row length."""
        normal: NDArray[np.float64] = self._random.standard_normal(shape)
        scaled: NDArray[np.float32] = (normal / shape[-1] ** 0.5).astype(np.float32)
        return scaled


def _gemma3(draw: Draw, n: int, n_text: int) -> Tensors:
    return {
        "mm.input_projection.weight": draw(n, n_text),
        "mm.soft_emb_norm.weight": np.ones(n, np.float32),
    }


def _qwen2vl(draw: Draw, n: int, n_text: int) -> Tensors:
    return {
        "mm.0.weight": draw(4 * n, 4 * n),
        "mm.0.bias": np.zeros(4 * n, np.float32),
        "mm.2.weight": draw(n_text, 4 * n),
        "mm.2.bias": np.zeros(n_text, np.float32),
    }


def _qwen3vl(draw: Draw, n: int, n_text: int) -> Tensors:
    """Return a second projection of the first layer's output, too."""
    weight, bias = _norm(4 * n)
    first, second = _qwen2vl(draw, n, n_text), _qwen2vl(draw, n, n_text)
    place = "v.deepstack.0."
    return first | {
        f"{place}norm.weight": weight,
        f"{place}norm.bias": bias,
        **{
            name.replace("mm.0", f"{place}fc1").replace("mm.2", f"{place}fc2"): values
            for name, values in second.items()
        },
    }


def _idefics3(draw: Draw, n: int, n_text: int) -> Tensors:
    return {"mm.model.fc.weight": draw(n_text, 4 * n)}


def _llava(draw: Draw, n: int, n_text: int) -> Tensors:
    return {
        "mm.0.weight": draw(n_text, n),
        "mm.0.bias": np.zeros(n_text, np.float32),
        "mm.2.weight": draw(n_text, n_text),
        "mm.2.bias": np.zeros(n_text, np.float32),
    }


PROJECTORS: dict[str, Projector] = {
    "gemma3": Projector(
        "16 rows, whatever the image; they attend to each other",
        "gemma3", "tiny-swa", _gemma3, {"projector.scale_factor": 2}),
    "qwen2vl": Projector(
        "rows follow the size of the image; M-RoPE", "qwen2vl_merger", "tiny-qwen2vl", _qwen2vl),
    "qwen3vl": Projector(
        "rows of twice the length, whose second half enters after the text model's first layer; M-RoPE",
        "qwen3vl_merger", "tiny-qwen3vl", _qwen3vl),
    "idefics3": Projector(
        "an overview and tiles of one image", "idefics3", "tiny-tiles", _idefics3,
        {"projector.scale_factor": 2, "preproc_image_size": 128}),
    "llava": Projector("64 rows, whatever the image; causal", "mlp", "tiny-llama", _llava),
}  # fmt: skip

STACK = 30  # frames that become a row


def _ultravox(draw: Draw, n: int, n_text: int) -> Tensors:
    n_hidden = 2 * n_text
    return {
        "mm.a.norm_pre.weight": np.ones(STACK * n, np.float32),
        "mm.a.mlp.1.weight": draw(2 * n_hidden, STACK * n),
        "mm.a.norm_mid.weight": np.ones(n_hidden, np.float32),
        "mm.a.mlp.2.weight": draw(n_text, n_hidden),
    }


# Of audio: 50 rows for each 30 s, at 16 kHz.
AUDIO: dict[str, Projector] = {
    "ultravox": Projector(
        "50 rows for each 30 s of audio; causal", "ultravox", "tiny-llama", _ultravox,
        {"num_mel_bins": 16, "projector.stack_factor": STACK}),
    "ultravox-mrope": Projector(
        "the same, for a model with M-RoPE", "ultravox", "tiny-qwen2vl", _ultravox,
        {"num_mel_bins": 16, "projector.stack_factor": STACK}),
}  # fmt: skip

# An encoder of the size of SigLIP-base.
_SIGLIP_BASE = Encoder(768, 12, 12, 224, 16, 4, np.float16)
# For other text models than the tiny ones.
OTHERS: dict[str, Projector] = {
    "embedded": Projector(
        "64 rows, whatever the image; for the embedded model", "mlp", "", _llava, n_embd_text=128),
    "embedded-audio": Projector(
        "50 rows for each 30 s of audio; for the embedded model", "ultravox", "", _ultravox,
        {"num_mel_bins": 16, "projector.stack_factor": STACK}, n_embd_text=128),
    "base-llava": Projector(
        "196 rows, whatever the image; for SmolLM2-135M", "mlp", "", _llava,
        encoder=_SIGLIP_BASE, n_embd_text=576),
    "base-qwen2vl": Projector(
        "rows follow the size of the image; for qwen3.5-wide", "qwen2vl_merger", "qwen3.5-wide", _qwen2vl,
        encoder=_SIGLIP_BASE, n_embd_text=2048),
}  # fmt: skip


N_FRAMES = 3000  # of 30 s


def _layers(
    prefix: str, e: Encoder, draw: Draw, *, without_bias: str = "", is_joined: bool = False
) -> Tensors:
    """Return the tensors of all layers, and of the norm after them; `is_joined`: of one matrix for attention."""
    n, n_ff, tensors = e.n_embd, e.ff_factor * e.n_embd, Tensors()
    shapes = {
        "attn_q": (n, n), "attn_k": (n, n), "attn_v": (n, n), "attn_out": (n, n),
        "ffn_up": (n_ff, n), "ffn_down": (n, n_ff),
    }  # fmt: skip
    if is_joined:
        del shapes["attn_q"], shapes["attn_k"], shapes["attn_v"]
        shapes["attn_qkv"] = 3 * n, n
    for i in range(e.n_layer):
        place = f"{prefix}.blk.{i}"
        for name, shape in shapes.items():
            tensors[f"{place}.{name}.weight"] = draw(*shape)
            if name != without_bias:
                tensors[f"{place}.{name}.bias"] = np.zeros(shape[0], np.float32)
        for name in ("ln1", "ln2"):
            tensors[f"{place}.{name}.weight"], tensors[f"{place}.{name}.bias"] = _norm(n)
    tensors[f"{prefix}.post_ln.weight"], tensors[f"{prefix}.post_ln.bias"] = _norm(n)
    return tensors


def _audio_tensors(projector: Projector, draw: Draw) -> Tensors:
    """Return every tensor of an encoder of audio, in the order of the file."""
    e, n_mel = projector.encoder, projector.metadata["num_mel_bins"]
    n, tensors = e.n_embd, Tensors()
    for i, n_in in enumerate((n_mel, n), start=1):
        tensors[f"a.conv1d.{i}.weight"] = draw(n, n_in, 3).astype(np.float16)
        tensors[f"a.conv1d.{i}.bias"] = np.zeros((n, 1), np.float32)
    tensors["a.position_embd.weight"] = draw(N_FRAMES // 2, n)
    tensors |= _layers("a", e, draw, without_bias="attn_k")  # as in Whisper
    return tensors | projector.projection(draw, n, projector.n_embd_text)


def _tensors(projector: Projector, draw: Draw) -> Tensors:
    """Return every tensor, in the order of the file."""
    e = projector.encoder
    n = e.n_embd
    tensors: Tensors = {"v.patch_embd.weight": draw(n, 3, e.patch, e.patch)}
    if projector.kind in ("qwen2vl_merger", "qwen3vl_merger"):
        tensors["v.patch_embd.weight.1"] = draw(n, 3, e.patch, e.patch)
    if projector.kind != "qwen2vl_merger":
        tensors["v.patch_embd.bias"] = np.zeros(n, np.float32)
        is_llava = projector.kind == "mlp"
        tensors["v.position_embd.weight"] = draw((e.side // e.patch) ** 2 + is_llava, n)
        if is_llava:
            tensors["v.class_embd"] = draw(n)
            tensors["v.pre_ln.weight"], tensors["v.pre_ln.bias"] = _norm(n)
    tensors |= _layers("v", e, draw, is_joined=projector.kind == "qwen3vl_merger")
    tensors |= projector.projection(draw, n, projector.n_embd_text)
    return {
        name: values.astype(e.dtype) if values.ndim > 1 and "position" not in name else values
        for name, values in tensors.items()
    }


def _norm(n: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return np.ones(n, np.float32), np.zeros(n, np.float32)


def _write(path: Path, projector: Projector) -> None:
    e, is_audio = projector.encoder, projector.kind == "ultravox"
    kind = "audio" if is_audio else "vision"
    keys = {
        "embedding_length": e.n_embd, "attention.head_count": e.n_head,
        "feed_forward_length": e.ff_factor * e.n_embd, "block_count": e.n_layer,
        "projection_dim": projector.n_embd_text, **projector.metadata,
    }  # fmt: skip
    if not is_audio:
        keys |= {"image_size": e.side, "patch_size": e.patch}
    with contextlib.closing(gguf.GGUFWriter(path, "clip")) as writer:
        writer.add_bool(f"clip.has_{kind}_encoder", True)
        writer.add_string("clip.projector_type", projector.kind)
        writer.add_bool("clip.use_gelu", True)
        for key, value in keys.items():
            writer.add_uint32(f"clip.{kind}.{key}", value)
        writer.add_float32(f"clip.{kind}.attention.layer_norm_epsilon", 1e-6)
        for key in () if is_audio else ("image_mean", "image_std"):
            writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
        tensors = (_audio_tensors if is_audio else _tensors)(projector, Draw())
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def ensure(name: str, directory: Path | None = None) -> Path:
    """Return the path of a projector; the file is written first if it does not exist."""
    directory = directory or make_model.models_directory()
    path = directory / f"mmproj-{name}-g{GENERATOR}.gguf"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as scratch:
        draft = Path(scratch) / path.name
        _write(draft, {**PROJECTORS, **AUDIO, **OTHERS}[name])
        os.replace(draft, path)
    return path


if __name__ == "__main__":
    for given in sys.argv[1:] or PROJECTORS:
        print(ensure(given))
