"""Write random-weight GGUF models for tests and benchmarks.

The values of the weights change neither the speed of a model nor the way llama.cpp treats its architecture.
Tests and benchmarks therefore need no download.  A file is written to a temporary name in
`${XDG_CACHE_HOME:-~/.cache}/cllm/models` and then renamed.  Writing it again gives the same bytes.  Its name
contains `GENERATOR`, which must be raised with every change here that changes a file.

    python -m tools.make_model tiny-llama --type Q8_0        # prints the path
    python -m tools.make_model qwen3-0.6b --type Q4_K_M      # after ./build_llama.sh

The tiny and the wide models share one vocabulary (`tiny_vocabulary`).  The others have Qwen2's, read from
the llama.cpp source that ./build_llama.sh keeps.  Logits are finite, about normally distributed, and depend
on all earlier tokens.  The two largest are often close, so that a greedy continuation can change with the
rounding of another batch layout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from cllm.bindings._llama_h import LLAMA_CPP_COMMIT
from cllm.errors import CllmError
from tools.tiny_vocabulary import CHAT_TEMPLATE, N_VOCAB, add_vocabulary

__all__ = (
    "MODELS",
    "FileType",
    "MakeModelError",
    "Model",
    "ensure",
    "llama_cpp_source",
    "models_directory",
)

GENERATOR = 1
SEED = 20261120
UNIT = 32  # elements per block of Q8_0 and Q4_0; tensors take `Noise` in units of this size
N_WINDOW_TINY = 16
VOCABULARY_NAME = "ggml-vocab-qwen2.gguf"

Metadata = Mapping[str, int | float | list[int] | list[str]]
FileType = Literal["F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K"]
SIMPLE_TYPES: tuple[FileType, ...] = ("F16", "Q8_0", "Q4_0")

# Tensors and their dimensions in ggml's order, as in `load_arch_tensors` of llama.cpp/src/models.
_ATTENTION = (
    "attn_q.weight:n_embd,n_embd_q attn_k.weight:n_embd,n_embd_kv "
    "attn_v.weight:n_embd,n_embd_kv attn_output.weight:n_embd_q,n_embd "
)
_UP_DOWN = "ffn_up.weight:n_embd,n_ff ffn_down.weight:n_ff,n_embd "
_FFN = "ffn_norm.weight:n_embd ffn_gate.weight:n_embd,n_ff " + _UP_DOWN
_LLAMA = "attn_norm.weight:n_embd " + _ATTENTION + _FFN
_QWEN3 = _LLAMA + "attn_q_norm.weight:n_rot attn_k_norm.weight:n_rot "
_QWEN3_MOE = _QWEN3.replace(_FFN, "ffn_norm.weight:n_embd ffn_gate_inp.weight:n_embd,n_expert ") + (
    "ffn_gate_exps.weight:n_embd,n_ff,n_expert ffn_up_exps.weight:n_embd,n_ff,n_expert "
    "ffn_down_exps.weight:n_ff,n_embd,n_expert "
)
_GLM4 = "attn_norm.weight:n_embd post_attention_norm.weight:n_embd " + _ATTENTION
_GLM4_DENSE = _GLM4 + "ffn_gate.weight:n_embd,n_ff " + _UP_DOWN
# A layer that predicts one token more: the embedding and the hidden state become the input of a block.
_NEXTN = (
    "nextn.eh_proj.weight:n_embd2,n_embd nextn.enorm.weight:n_embd nextn.hnorm.weight:n_embd "
    "nextn.shared_head_norm.weight:n_embd "
)
_GLM4_NEXTN = (
    _GLM4
    + _NEXTN
    + (
        "ffn_gate_inp.weight:n_embd,n_one exp_probs_b.bias:n_one ffn_gate_exps.weight:n_embd,n_ff,n_one "
        "ffn_up_exps.weight:n_embd,n_ff,n_one ffn_down_exps.weight:n_ff,n_embd,n_one "
        "ffn_gate_shexp.weight:n_embd,n_ff ffn_up_shexp.weight:n_embd,n_ff ffn_down_shexp.weight:n_ff,n_embd "
    )
)
_STEP35 = (
    "attn_norm.weight:n_embd ffn_norm.weight:n_embd ffn_gate.weight:n_embd,n_ff "
    + _ATTENTION
    + _UP_DOWN
)
_QWEN2VL = _LLAMA + "attn_q.bias:n_embd_q attn_k.bias:n_embd_kv attn_v.bias:n_embd_kv "
_GEMMA3 = _QWEN3 + "post_attention_norm.weight:n_embd post_ffw_norm.weight:n_embd "
_MAMBA = (
    "attn_norm.weight:n_embd ssm_in.weight:n_embd,d_in ssm_conv1d.weight:d_conv,d_inner "
    "ssm_conv1d.bias:d_inner ssm_x.weight:d_inner,d_x ssm_dt.weight:dt_rank,d_inner "
    "ssm_dt.bias:d_inner ssm_a:d_state,d_inner ssm_d:d_inner ssm_out.weight:d_inner,n_embd "
)
_DELTA_NET = (
    "attn_norm.weight:n_embd post_attention_norm.weight:n_embd attn_qkv.weight:n_embd,d_conv_in "
    "attn_gate.weight:n_embd,d_value ssm_conv1d.weight:d_conv,d_conv_in ssm_dt.bias:n_value_head "
    "ssm_a:n_value_head ssm_beta.weight:n_embd,n_value_head ssm_alpha.weight:n_embd,n_value_head "
    "ssm_norm.weight:d_head ssm_out.weight:d_value,n_embd ffn_gate.weight:n_embd,n_ff "
) + _UP_DOWN
_GATED_ATTENTION = (
    _ATTENTION.replace("attn_q.weight:n_embd,n_embd_q", "attn_q.weight:n_embd,n_embd_q2")
    + "attn_norm.weight:n_embd post_attention_norm.weight:n_embd attn_q_norm.weight:n_rot "
    "attn_k_norm.weight:n_rot ffn_gate.weight:n_embd,n_ff "
) + _UP_DOWN
_JAMBA_NORMS = "ssm_dt_norm.weight:dt_rank ssm_b_norm.weight:d_state ssm_c_norm.weight:d_state "
_JAMBA_MAMBA = _MAMBA + _JAMBA_NORMS + _FFN
_BERT = (
    _ATTENTION + "attn_output_norm.weight:n_embd attn_output_norm.bias:n_embd "
    "layer_output_norm.weight:n_embd layer_output_norm.bias:n_embd " + _UP_DOWN
)
_T5 = _LLAMA.replace("attn_output", "attn_o") + "attn_rel_b.weight:n_head,n_bucket "
_EMBEDDING = "token_embd.weight:n_embd,n_vocab "
_TIED = _EMBEDDING + "output_norm.weight:n_embd "
# With tied embeddings a small random model repeats its last token, and tests would find no errors.
_UNTIED = _TIED + "output.weight:n_embd,n_vocab "
_BERT_ENDS = (
    _EMBEDDING + "position_embd.weight:n_embd,n_ctx "
    "token_embd_norm.weight:n_embd token_embd_norm.bias:n_embd "
)
_CLASSIFIER = "cls.weight:n_embd,n_embd cls.output.weight:n_embd,n_label cls.output.bias:n_label "
_RANKER = "cls.weight:n_embd,n_embd cls.output.weight:n_embd,n_score cls.output.bias:n_score "
_T5_ENDS = _EMBEDDING + "enc.output_norm.weight:n_embd "
_FIXED_SIZES = {
    "d_conv": 4,
    "d_state": 16,
    "dt_rank": 4,
    "d_x": 4 + 2 * 16,
    "n_bucket": 32,
    "n_label": 3,
    "n_expert": 4,
    "n_one": 1,
    "n_score": 1,
    # Sizes of Qwen3.5's delta nets: 16 heads of 128 for keys, and 16 of 128 for values.
    "n_value_head": 16,
    "d_head": 128,
    "d_value": 16 * 128,
    "d_conv_in": 3 * 16 * 128,
}
# Small steps and a slow, negative decay: the state of a mamba layer stays finite, and a token still
# affects the logits dozens of positions later.
_FILLS = {"ssm_a": -0.25, "ssm_d": 1.0, "ssm_dt.bias": -2.0}


class MakeModelError(RuntimeError):
    """The model cannot be made; the message says in one line what is missing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, named as in llama.cpp; `n_rot` is the size of an attention head."""

    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_rot: int
    n_vocab: int
    n_ctx: int

    def sizes(self) -> dict[str, int]:
        """Return every dimension that a tensor may have, by name."""
        return asdict(self) | _FIXED_SIZES | {
            "n_embd_q": self.n_head * self.n_rot,
            "n_embd_q2": 2 * self.n_head * self.n_rot,
            "n_embd2": 2 * self.n_embd,
            "n_embd_kv": self.n_head_kv * self.n_rot,
            "d_inner": 2 * self.n_embd,  # llama.cpp refuses any other expansion
            "d_in": 4 * self.n_embd,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model.

    `shape` is in numpy's order, the reverse of ggml's.  `fill` is the value of every element, or
    None for normal values whose standard deviation is the inverse root of the row length.
    """

    name: str
    shape: tuple[int, ...]
    fill: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Model that `ensure` can make.

    `ends` lists the tensors outside the layers, and `layers` those of each layer, from first to last.
    `metadata` maps keys, without the architecture's prefix, to values; it overrides the values from `shape`.
    `more_tokens` are control tokens to add to the tiny vocabulary.
    """

    summary: str
    architecture: str
    shape: Shape
    ends: str
    layers: tuple[str, ...]
    metadata: Metadata = field(default_factory=dict)
    file_types: tuple[FileType, ...] = SIMPLE_TYPES
    more_tokens: tuple[str, ...] = ()

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor, in the order of the file."""
        prefix = "enc.blk" if self.architecture == "t5encoder" else "blk"
        parts = [("", self.ends), *((f"{prefix}.{i}.", part) for i, part in enumerate(self.layers))]
        sizes = self.shape.sizes()
        for place, entries in parts:
            for name, _, dimensions in (entry.partition(":") for entry in entries.split()):
                shape = tuple(sizes[dimension] for dimension in reversed(dimensions.split(",")))
                by_rank = None if len(shape) > 1 else float(not name.endswith(".bias"))
                yield Tensor(place + name, shape, _FILLS.get(name, by_rank))


# Two heads of 64 on 64 channels: wider than the residual, as in Qwen3, one KV head for both, and a
# head size for which every backend has a flash-attention kernel.
_TINY = Shape(64, 192, 2, 1, 64, 260, 2048)
_TINY_ONE_HEAD = Shape(64, 192, 1, 1, 64, 260, 2048)
_TINY_NO_HEAD = Shape(64, 0, 0, 0, 0, 260, 2048)
_SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4}
_QWEN3_KEYS = {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6}
_QWEN35_KEYS: Metadata = {
    "rope.freq_base": 1e7, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
    "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.inner_size": 2048,
    "ssm.state_size": 128, "ssm.time_step_rank": 16, "ssm.group_count": 16,
}  # fmt: skip
# One expert, which every token gets: its gate does not matter.
_GLM4_KEYS: Metadata = {
    "rope.dimension_count": 64, "expert_count": 1, "expert_used_count": 1, "expert_shared_count": 1,
    "expert_feed_forward_length": 192, "leading_dense_block_count": 2,
    "expert_weights_scale": 1.0, "expert_gating_func": 2, "nextn_predict_layers": 1,
}  # fmt: skip
# The first layer has the window, the second sees everything; llama.cpp keeps a cache for each.
_SWA_KEYS = {"attention.sliding_window": N_WINDOW_TINY, "attention.sliding_window_pattern": 2}
# Around the tiles of an image, as SmolVLM has them.
_TILE_TOKENS = ("\n\n", "<fake_token_around_image>", "<global-img>")

MODELS: dict[str, Model] = {
    "tiny-llama": Model("llama, for most tests", "llama", _TINY, _UNTIED, (_LLAMA,) * 2),
    "tiny-qwen3": Model(
        "the architecture of qwen3-0.6b", "qwen3", _TINY, _UNTIED, (_QWEN3,) * 2, _QWEN3_KEYS),
    "tiny-moe": Model(
        "two of four experts for each token", "qwen3moe", _TINY, _UNTIED, (_QWEN3_MOE,) * 2,
        {**_QWEN3_KEYS, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 192}),
    "qwen3-wide": Model(
        "layers as wide as Qwen3-0.6B's, for K-quants and all their kernels",
        "qwen3", Shape(1024, 3072, 16, 8, 128, 260, 2048), _UNTIED, (_QWEN3,) * 2, _QWEN3_KEYS,
        (*SIMPLE_TYPES, "Q4_K_M", "Q6_K")),
    "tiny-swa": Model(
        f"gemma3: a window of {N_WINDOW_TINY} tokens in the first of two layers",
        "gemma3", _TINY, _UNTIED, (_GEMMA3,) * 2, _SWA_KEYS),
    "tiny-qwen2vl": Model(
        "positions of images in four parts (M-RoPE)", "qwen2vl", _TINY_ONE_HEAD, _UNTIED, (_QWEN2VL,) * 2,
        {"rope.dimension_sections": [8, 12, 12, 0], "attention.layer_norm_rms_epsilon": 1e-6}),
    "tiny-qwen3vl": Model(
        "rows of images that also enter after the first layer (deepstack)", "qwen3vl", _TINY, _UNTIED,
        (_QWEN3,) * 2,
        {**_QWEN3_KEYS, "rope.dimension_sections": [8, 12, 12, 0], "n_deepstack_layers": 1}),
    "tiny-tiles": Model(
        "the tokens around tiles of an image, as SmolVLM has them",
        "llama", Shape(64, 192, 2, 1, 64, 263, 2048), _UNTIED, (_LLAMA,) * 2,
        more_tokens=_TILE_TOKENS),
    "tiny-swa-tiles": Model(
        "tiny-swa with the tokens of tiny-tiles",
        "gemma3", Shape(64, 192, 2, 1, 64, 263, 2048), _UNTIED, (_GEMMA3,) * 2, _SWA_KEYS,
        more_tokens=_TILE_TOKENS),
    "tiny-recurrent": Model(
        "mamba: no KV cache, a state per sequence",
        "mamba", _TINY_NO_HEAD, _UNTIED, (_MAMBA,) * 2, _SSM),
    "tiny-hybrid": Model(
        "jamba: a mamba layer, then an attention layer",
        "jamba", _TINY_ONE_HEAD, _UNTIED, (_JAMBA_MAMBA, _LLAMA),
        {**_SSM, "attention.head_count_kv": [0, 1]}),
    "tiny-qwen35": Model(
        "a delta net, then a layer of attention with positions in four parts (M-RoPE)",
        "qwen35", Shape(64, 192, 1, 1, 64, 263, 2048), _UNTIED, (_DELTA_NET, _GATED_ATTENTION),
        {**_QWEN35_KEYS, "full_attention_interval": 2}, more_tokens=_TILE_TOKENS),
    "tiny-mtp": Model(
        "glm4moe: two layers, and one that predicts a token more (MTP)", "glm4moe", _TINY, _UNTIED,
        (_GLM4_DENSE, _GLM4_DENSE, _GLM4_NEXTN), _GLM4_KEYS),
    "tiny-qwen35-mtp": Model(
        "tiny-qwen35 with a layer that predicts a token more (MTP)",
        "qwen35", Shape(64, 192, 1, 1, 64, 263, 2048), _UNTIED,
        (_DELTA_NET, _GATED_ATTENTION, _GATED_ATTENTION + _NEXTN),
        {**_QWEN35_KEYS, "full_attention_interval": 2, "nextn_predict_layers": 1},
        more_tokens=_TILE_TOKENS),
    "tiny-step35-mtp": Model(
        "step35: a layer that predicts a token more (MTP), and gives hidden states of output rows only",
        "step35", _TINY, _UNTIED, (_STEP35, _STEP35, _STEP35 + _NEXTN),
        {"attention.sliding_window": N_WINDOW_TINY, "attention.sliding_window_pattern": [1, 0, 0],
         "expert_feed_forward_length": 64, "rope.dimension_count": 64, "nextn_predict_layers": 1}),
    "tiny-encoder": Model(
        "bert: has no memory, although llama_model_has_decoder() is true",
        "bert", _TINY_ONE_HEAD, _BERT_ENDS, (_BERT,) * 2, {"attention.layer_norm_epsilon": 1e-5}),
    "tiny-classifier": Model(
        "bert with rank pooling and a classifier of three labels",
        "bert", _TINY_ONE_HEAD, _BERT_ENDS + _CLASSIFIER, (_BERT,) * 2,
        {"attention.layer_norm_epsilon": 1e-5, "pooling_type": 4,
         "classifier.output_labels": ["sad", "glad", "mad"]}),
    "tiny-reranker": Model(
        "bert with a classifier of one score", "bert", _TINY_ONE_HEAD, _BERT_ENDS + _RANKER,
        (_BERT,) * 2, {"attention.layer_norm_epsilon": 1e-5, "pooling_type": 4}),
    "tiny-t5-encoder": Model(
        "t5encoder: llama_model_has_decoder() is false", "t5encoder", _TINY_ONE_HEAD, _T5_ENDS,
        (_T5,) * 2, {"attention.relative_buckets_count": 32}),
    "two-layer": Model(
        "Qwen2's vocabulary, and very little compute",
        "qwen3", Shape(64, 192, 2, 1, 64, 151_936, 40_960), _TIED, (_QWEN3,) * 2, _QWEN3_KEYS),
    "qwen3-0.6b": Model(
        "the shape of Qwen3-0.6B, 1.2 GB as F16",
        "qwen3", Shape(1024, 3072, 16, 8, 128, 151_936, 40_960), _TIED, (_QWEN3,) * 28,
        _QWEN3_KEYS, (*SIMPLE_TYPES, "Q4_K_M")),
    "qwen3.5-wide": Model(
        "layers as wide as Qwen3.5-2B's: three delta nets to a layer of attention",
        "qwen35", Shape(2048, 6144, 8, 2, 256, 260, 2048), _UNTIED,
        ((_DELTA_NET,) * 3 + (_GATED_ATTENTION,)) * 2, _QWEN35_KEYS, (*SIMPLE_TYPES, "Q4_K_M")),
}  # fmt: skip


class Noise:
    """Normally distributed values that every tensor repeats, from an offset of its own.

    Drawing, scaling and quantizing 600 million values would take minutes.  Here values are drawn once, and
    scaled and quantized once for each row length.  The bytes of a tensor are copied from the result.
    """

    def __init__(self, n_rows: int, matrix_type: gguf.GGMLQuantizationType) -> None:
        # Row lengths have only the prime factors 2 and 3, and the number of units has neither.  So up
        # to `n_rows` rows of a matrix start at different units: no two tokens have the same logit.
        self._n_units = next(n for n in range(max(n_rows, 4096), 2**31) if n % 2 and n % 3)
        # RandomState's stream is frozen; a Generator's may change with numpy's version (NEP 19).
        normal = np.random.RandomState(SEED).standard_normal(self._n_units * UNIT)
        self._values: NDArray[np.float32] = normal.astype(np.float32)
        self._matrix_type = matrix_type
        self._encoded: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def place(self, tensor: Tensor) -> tuple[int, gguf.GGMLQuantizationType]:
        """Size in bytes and type of the tensor in the file."""
        is_matrix = tensor.fill is None and tensor.shape[-1] % UNIT == 0
        # llama.cpp requires F32 of most of the rest: norms, biases, convolutions, decays.
        kind = self._matrix_type if is_matrix else gguf.GGMLQuantizationType.F32
        n_elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        return int(np.prod(tensor.shape)) // n_elements * n_bytes, kind

    def data(self, tensor: Tensor, seed: str) -> NDArray[np.uint8]:
        """Bytes of the tensor, uint8 of shape (n_bytes,)."""
        if tensor.fill is not None:
            return np.full(tensor.shape, tensor.fill, np.float32).reshape(-1).view(np.uint8)
        n_row, kind = tensor.shape[-1], self.place(tensor)[1]
        if (n_row, kind) not in self._encoded:
            encoded = gguf.quants.quantize(self._values / np.float32(n_row**0.5), kind)
            self._encoded[n_row, kind] = encoded.view(np.uint8).reshape(self._n_units, -1)
        first = zlib.crc32(f"{seed}/{tensor.name}".encode()) % self._n_units
        last = first + int(np.prod(tensor.shape)) // UNIT
        repeated = np.tile(self._encoded[n_row, kind], (-(-last // self._n_units), 1))
        return repeated[first:last].reshape(-1)


def _add_qwen2_vocabulary(writer: gguf.GGUFWriter, n_vocab: int, path: Path) -> None:
    """Copy the vocabulary of `path`, padded to `n_vocab` as llama.cpp's converter pads it."""
    fields = gguf.GGUFReader(path).fields
    values = {key: fields[key].contents() for key in fields if key.startswith("tokenizer.")}
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), n_vocab)]
    # The file's own padding has the type of an older converter, which matches "[PAD…]" in a text.
    types: list[int] = values["tokenizer.ggml.token_type"]
    values["tokenizer.ggml.token_type"] = [
        int(gguf.TokenType.UNUSED) if token == f"[PAD{i}]" else types[i]
        for i, token in enumerate(tokens)
    ]
    for key, value in values.items():
        writer.add_key_value(key, value, fields[key].types[0])


def llama_cpp_source() -> Path:
    """Return the directory of the llama.cpp source that ./build_llama.sh keeps."""
    src = models_directory().parent / "src"
    found = sorted(src.glob(f"llama.cpp-{LLAMA_CPP_COMMIT}-*/models/{VOCABULARY_NAME}"))
    if not found:
        raise MakeModelError(f"no {VOCABULARY_NAME} in {src}: run ./build_llama.sh or use --vocab")
    return found[-1].parent.parent


def models_directory() -> Path:
    """Return the default directory of the models; it may not exist yet."""
    # An empty or relative XDG_CACHE_HOME counts as unset (XDG base directory specification).
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "cllm" / "models"


def _add_metadata(writer: gguf.GGUFWriter, model: Model) -> None:
    s, kinds = model.shape, gguf.GGUFValueType
    value_types = {int: kinds.UINT32, float: kinds.FLOAT32, list: kinds.ARRAY}
    metadata: Metadata = {
        "context_length": s.n_ctx, "embedding_length": s.n_embd,
        "block_count": len(model.layers), "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head, "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.n_rot, "attention.value_length": s.n_rot,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for key, value in {**metadata, **model.metadata}.items():
        writer.add_key_value(f"{model.architecture}.{key}", value, value_types[type(value)])


def _write(path: Path, name: str, file_type: FileType, vocab: Path | None) -> None:
    """Write a model of one of `SIMPLE_TYPES`, holding one tensor in memory at a time."""
    model = MODELS[name]
    noise = Noise(model.shape.n_vocab, gguf.GGMLQuantizationType[file_type])
    with contextlib.closing(gguf.GGUFWriter(path, model.architecture)) as writer:
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{file_type}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_metadata(writer, model)
        if model.shape.n_vocab == N_VOCAB + len(model.more_tokens):
            add_vocabulary(writer, model.more_tokens)
            writer.add_token_type_count(1)  # BERT's token types: a BERT model needs them to load
            writer.add_chat_template(CHAT_TEMPLATE)
        else:
            _add_qwen2_vocabulary(
                writer,
                model.shape.n_vocab,
                vocab or llama_cpp_source() / "models" / VOCABULARY_NAME,
            )
        for tensor in model.tensors():
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("f4"), *noise.place(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in model.tensors():
            writer.write_tensor_data(noise.data(tensor, name))


def _quantize(source: Path, path: Path, file_type: FileType) -> None:
    """Write `path` from the F16 model `source`, as llama.cpp does it."""
    from cllm.bindings import quantize  # imported late: only this needs the library

    try:
        quantize(source, path, file_type)
    except CllmError as error:
        raise MakeModelError(str(error)) from error


def ensure(
    name: str,
    file_type: FileType = "F16",
    directory: Path | None = None,
    *,
    vocab: Path | None = None,
) -> Path:
    """Return the path of a model; the file is written first if it does not exist.

    The K-quants are written from F16, whose file is written and kept as well.  `vocab` is a GGUF file with
    Qwen2's vocabulary, by default the one of llama.cpp's source; the tiny and the wide models need none.

    Raises
    ------
    MakeModelError
        If there is no such model or type, or a source or tool for it is missing.
    """
    if name not in MODELS:
        raise MakeModelError(f"no model {name!r}; there are {', '.join(MODELS)}")
    if file_type not in MODELS[name].file_types:
        known = ", ".join(MODELS[name].file_types)
        raise MakeModelError(f"{name} is not made as {file_type}, only as {known}")
    directory = directory or models_directory()
    path = directory / f"{name}-{file_type}-g{GENERATOR}.gguf"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as scratch:
        draft = Path(scratch) / path.name
        if file_type in SIMPLE_TYPES:
            _write(draft, name, file_type, vocab)
        else:
            _quantize(ensure(name, "F16", directory, vocab=vocab), draft, file_type)
        os.replace(draft, path)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", help="name of the model; --list prints all names")
    parser.add_argument("--type", default="F16", help="F16 (default), Q8_0, Q4_0, Q4_K_M or Q6_K")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: the cache directory")
    parser.add_argument("--vocab", type=Path, metavar="PATH", help=f"path of {VOCABULARY_NAME}")
    parser.add_argument("--list", action="store_true", help="list the models and their types")
    given = parser.parse_args(arguments)
    if given.list:
        for name, model in MODELS.items():
            print(f"{name:16} {', '.join(model.file_types):26} {model.summary}")
        return 0
    if given.name is None:
        parser.error("give a name, or --list")
    try:
        print(ensure(given.name, given.type, given.output, vocab=given.vocab))
    except (MakeModelError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
