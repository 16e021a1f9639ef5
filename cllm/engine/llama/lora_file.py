"""Check by the headers that a file is a LoRA adapter of a model, before llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path

from cllm.engine.llama.gguf_header import Shapes, read_header, read_shapes, read_types
from cllm.errors import ModelLoadError

_SUFFIXES = (".lora_a", ".lora_b")
# Numbers of `ggml_type`.  With a matrix of one of them llama.cpp loads the adapter, and the process ends at its first use.
UNUSABLE = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}


def check_lora_file(path: Path, model_path: Path) -> None:
    """Check that a file is a LoRA adapter of the model.

    Tensors that cannot be read are left to llama.cpp.

    Raises
    ------
    ModelLoadError
        The file cannot be opened, is no LoRA adapter, or is an adapter of another model.
    """
    try:
        lora, model = read_header(path), read_header(model_path)
        of_lora, of_model = read_shapes(path), read_shapes(model_path)
        types = read_types(path)
    except OSError as error:
        raise ModelLoadError(str(path), error.strerror or str(error)) from None
    if (kind := lora.get("general.type")) != "adapter":
        raise ModelLoadError(str(path), f"not an adapter (its general.type is {kind!r})")
    if (kind := lora.get("adapter.type")) != "lora":
        raise ModelLoadError(str(path), f"not a LoRA adapter (its adapter.type is {kind!r})")
    architectures = [header.get("general.architecture") for header in (lora, model)]
    if architectures[0] != architectures[1]:
        reason = f"an adapter of a {architectures[0]} model; this one is {architectures[1]}"
        raise ModelLoadError(str(path), reason)
    for name, number in types.items():
        if number in UNUSABLE and name.endswith(_SUFFIXES):
            reason = f"llama.cpp cannot multiply {name}, whose type is {UNUSABLE[number]}"
            raise ModelLoadError(str(path), reason)
    if of_model and (reason := _misfit(of_lora, of_model)):
        raise ModelLoadError(str(path), f"an adapter of another model: {reason}")


def _misfit(lora: Shapes, model: Shapes) -> str:
    """Describe the first tensor of an adapter that does not fit the model; empty if all tensors fit."""
    for name, shape in lora.items():
        base, _, suffix = name.rpartition(".")
        if f".{suffix}" not in _SUFFIXES:
            continue
        if base not in model:
            return f"{base} is not in this one"
        # The table of embeddings is looked up, not multiplied: `lora_a` and `lora_b` swap their roles.
        is_input = (suffix == "lora_a") != base.endswith("token_embd.weight")
        dimension = 0 if is_input else 1
        own = 1 if base.endswith("token_embd.weight") else dimension
        # A matrix, or one for each expert: llama.cpp does not compare the numbers of experts.
        n_dimensions = 3 if base.endswith("_exps.weight") else 2
        is_like = len(shape) == len(model[base]) == n_dimensions
        is_like &= shape[2:] == model[base][2:]
        if not is_like or shape[own] != model[base][dimension]:
            return f"{name} has the shape {shape}, {base} has {model[base]}"
    return ""
