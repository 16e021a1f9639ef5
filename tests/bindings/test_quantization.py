"""Writing a model in another data type."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.bindings import Model, quantize
from cllm.errors import InvalidArgumentError, LlamaCallError, ModelLoadError
from tools import make_model


def test_a_quantized_model_loads_and_is_smaller(tmp_path: Path) -> None:
    source, target = make_model.ensure("tiny-llama"), tmp_path / "q8.gguf"
    quantize(source, target, "Q8_0")
    with Model(source) as whole, Model(target) as quantized:
        assert quantized.n_params == whole.n_params
        assert quantized.size_bytes < 0.7 * whole.size_bytes


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path) -> None:
    source, target = make_model.ensure("tiny-llama"), tmp_path / "target.gguf"
    with pytest.raises(InvalidArgumentError, match="file_type"):
        quantize(source, target, "Q9")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        quantize(__file__, target, "Q8_0")
    with pytest.raises(LlamaCallError, match="llama_model_quantize"):
        quantize(source, tmp_path / "no" / "folder.gguf", "Q8_0")
    assert not target.exists()
