"""Join the embedded model and a layer for multi-token prediction (MTP) to one GGUF file.

The file is of the architecture `glm4moe`, which has such a layer.  Its first layers compute what the embedded
model computes: they have no experts, and rotary embeddings of halves instead of neighbouring pairs only change
the order of rows.  `train_mtp` trains the layer.

    python -m tools.mtp_model PATH
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from cllm.engine.config import EMBEDDED_MODEL

ROOT = Path(__file__).resolve().parents[1]
LAYER = ROOT / "tests" / "models" / "mtp_layer.npz"
ARCHITECTURE = "glm4moe"
Array = NDArray[np.float16] | NDArray[np.float32]
# Names of the layer's weights in the file.
NAMES = {
    "enorm.weight": "nextn.enorm", "hnorm.weight": "nextn.hnorm", "eh_proj.weight": "nextn.eh_proj",
    "shared_head_norm.weight": "nextn.shared_head_norm", "block.attn_norm.weight": "attn_norm",
    "block.attn_q.weight": "attn_q", "block.attn_k.weight": "attn_k", "block.attn_v.weight": "attn_v",
    "block.attn_output.weight": "attn_output", "block.ffn_norm.weight": "post_attention_norm",
    "block.ffn_gate.weight": "ffn_gate_shexp", "block.ffn_up.weight": "ffn_up_shexp",
    "block.ffn_down.weight": "ffn_down_shexp",
}  # fmt: skip


def halves(weight: Array, n_head: int) -> Array:
    """Return a matrix of queries or keys, of neighbouring pairs, for rotary embeddings of halves."""
    heads = weight.reshape(n_head, -1, 2, weight.shape[1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, layer: Path = LAYER, model: Path = EMBEDDED_MODEL) -> None:
    """Write the file."""
    reader = gguf.GGUFReader(model)
    known = {key: field.contents() for key, field in reader.fields.items()}
    n_layer, n_head = known["llama.block_count"], known["llama.attention.head_count"]
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    weights = dict(_weights(layer, reader, n_layer, n_head))
    writer.add_block_count(n_layer + 1)
    writer.add_leading_dense_block_count(n_layer)
    writer.add_nextn_predict_layers(1)
    writer.add_expert_count(1)
    writer.add_expert_used_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(len(weights[f"blk.{n_layer}.ffn_up_shexp.weight"]))
    for key, field in reader.fields.items():
        kind, name = field.types[0], key.replace("llama.", f"{ARCHITECTURE}.")
        if not key.startswith(("GGUF.", "cllm.")) and name not in (
            "general.architecture", f"{ARCHITECTURE}.block_count",
        ):  # fmt: skip
            of = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, known[key], kind, of)
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(
    layer: Path, reader: gguf.GGUFReader, n_layer: int, n_head: int
) -> Iterator[tuple[str, Array]]:
    """Yield the names and the weights of all tensors."""
    for tensor in reader.tensors:
        is_rotated = tensor.name.endswith(("attn_q.weight", "attn_k.weight"))
        name = tensor.name.replace("ffn_norm", "post_attention_norm")
        yield name, halves(tensor.data, n_head) if is_rotated else tensor.data
    place = f"blk.{n_layer}"
    with np.load(layer) as found:
        for name, weight in found.items():
            is_rotated = name.endswith(("attn_q.weight", "attn_k.weight"))
            yield f"{place}.{NAMES[name]}.weight", halves(weight, n_head) if is_rotated else weight
        up = found["block.ffn_up.weight"]
    n_ff, n_embd = up.shape
    # One routed expert, which adds nothing.
    yield f"{place}.ffn_gate_inp.weight", np.zeros((1, n_embd), np.float32)
    yield f"{place}.exp_probs_b.bias", np.zeros(1, np.float32)
    for name, shape in (("gate", (n_ff, n_embd)), ("up", (n_ff, n_embd)), ("down", (n_embd, n_ff))):
        yield f"{place}.ffn_{name}_exps.weight", np.zeros((1, *shape), np.float16)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
