"""LoRA adapters for any model, with random weights that depend on a seed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import DTypeLike

from cllm.engine.llama.gguf_header import read_header, read_shapes

MATRICES = re.compile(r"blk\.\d+\.(attn_[qv]|ffn_down)\.weight")


def make_lora(
    path: Path,
    model_path: Path,
    *,
    seed: int,
    rank: int = 4,
    strength: float = 0.3,
    invocation_tokens: Sequence[int] = (),
    dtype: DTypeLike = np.float32,
    pattern: re.Pattern[str] = MATRICES,
    n_experts: int | None = None,
) -> Path:
    """An adapter for some matrices of every layer, which changes what the model says.

    `n_experts` is a false number of experts, for matrices of experts.
    """
    draw = np.random.default_rng(seed)
    architecture = str(read_header(model_path)["general.architecture"])
    with contextlib.closing(gguf.GGUFWriter(path, architecture)) as writer:
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(rank))
        if invocation_tokens:
            writer.add_key_value(
                "adapter.alora.invocation_tokens",
                [*invocation_tokens],
                gguf.GGUFValueType.ARRAY,
                sub_type=gguf.GGUFValueType.UINT32,
            )
        for name, (n_in, n_out, *experts) in matrices(model_path, pattern).items():
            each = experts and [n_experts or experts[0]]
            a = draw.standard_normal((*each, rank, n_in)) / n_in**0.5
            b = draw.standard_normal((*each, n_out, rank)) * strength
            writer.add_tensor(f"{name}.lora_a", a.astype(dtype))
            writer.add_tensor(f"{name}.lora_b", b.astype(dtype))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


def matrices(model_path: Path, pattern: re.Pattern[str] = MATRICES) -> dict[str, tuple[int, ...]]:
    """Return the adapted matrices: name and shape, `(n_in, n_out)` or `(n_in, n_out, n_experts)`."""
    shapes = read_shapes(model_path)
    return {name: shape for name, shape in shapes.items() if pattern.fullmatch(name)}
