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
    for path, limit in (
        (tmp_path / "no" / "folder.gguf", "in a directory that exists"),
        (tmp_path, "regular file"),
        ("/dev/null", "regular file"),
        (f"{target}\0", "NUL"),
        (tmp_path / ("x" * 300), "regular file"),
        ("/proc/target.gguf", "in a directory that can be written"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"target is .*{limit}"):
            quantize(source, path, "Q8_0")
    assert not target.exists()


@pytest.mark.parametrize("name", ["model.gguf", "symbolic.gguf", "hard.gguf"])
def test_a_model_is_not_written_to_the_file_that_is_read(name: str, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(Path(make_model.ensure("tiny-llama")).read_bytes())
    (tmp_path / "symbolic.gguf").symlink_to(source)
    (tmp_path / "hard.gguf").hardlink_to(source)
    before = source.read_bytes()
    with pytest.raises(InvalidArgumentError, match=r"target is .*another file than the source"):
        quantize(source, tmp_path / name, "Q8_0")
    assert source.read_bytes() == before


def test_a_failure_leaves_the_file_of_before_and_no_other(tmp_path: Path) -> None:
    source, target = tmp_path / "q8.gguf", tmp_path / "target.gguf"
    quantize(make_model.ensure("tiny-llama"), source, "Q8_0")
    target.write_bytes(b"of before")
    with pytest.raises(LlamaCallError, match="llama_model_quantize"):
        quantize(source, target, "Q4_K_M")
    assert target.read_bytes() == b"of before"
    assert {path.name for path in tmp_path.iterdir()} == {"q8.gguf", "target.gguf"}
