"""make_model.py writes the same, loadable GGUF every time, and says in one line why it cannot."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

gguf = pytest.importorskip("gguf")

if TYPE_CHECKING:
    from tools import make_model
else:  # pytest does not put the project's root on the path
    _path = Path(__file__).parents[2] / "tools" / "make_model.py"
    _spec = importlib.util.spec_from_file_location("make_model", _path)
    make_model = sys.modules["make_model"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(make_model)

TINY = [name for name in make_model.MODELS if name.startswith("tiny-")]


@pytest.fixture
def small_vocabulary(tmp_path: Path) -> Path:
    """A file such as ggml-vocab-qwen2.gguf, but of three tokens, the last one padding."""
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "<|im_end|>", "[PAD2]"])
    writer.add_token_types([1, 3, 4])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("file_type", make_model.SIMPLE_TYPES)
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_is_small_and_the_same_every_time(
    tmp_path: Path, name: str, file_type: make_model.FileType
) -> None:
    first = make_model.ensure(name, file_type, tmp_path / "first")
    again = make_model.ensure(name, file_type, tmp_path / "again")
    assert first.read_bytes() == again.read_bytes()
    assert first.stat().st_size < (2_000_000 if "qwen35" in name else 1_000_000)
    assert list(first.parent.iterdir()) == [first]


@pytest.mark.parametrize("file_type", make_model.SIMPLE_TYPES)
def test_the_file_type_holds_for_matrices_only(
    tmp_path: Path, file_type: make_model.FileType
) -> None:
    reader = gguf.GGUFReader(make_model.ensure("tiny-recurrent", file_type, tmp_path))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == kinds["blk.1.ssm_out.weight"] == file_type
    for name in ("output_norm.weight", "blk.0.ssm_conv1d.weight", "blk.0.ssm_a"):
        assert kinds[name] == "F32"


def test_no_two_tokens_have_the_same_embedding(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(make_model.ensure("tiny-llama", "F16", tmp_path))
    rows = next(t.data for t in reader.tensors if t.name == "token_embd.weight")
    assert len({row.tobytes() for row in rows}) == len(rows) == 260
    assert abs(float(rows.astype("f4").std()) - 64**-0.5) < 0.01


def test_a_file_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    path = make_model.ensure("tiny-llama", "Q8_0", tmp_path)
    path.write_bytes(b"kept")
    assert make_model.ensure("tiny-llama", "Q8_0", tmp_path) == path
    assert path.read_bytes() == b"kept"


def test_a_raised_generator_makes_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_model.ensure("tiny-llama", "Q4_0", tmp_path)
    monkeypatch.setattr(make_model, "GENERATOR", make_model.GENERATOR + 1)
    assert make_model.ensure("tiny-llama", "Q4_0", tmp_path) != old


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(make_model.Noise, "data", fail)
    with pytest.raises(OSError, match="disk full"):
        make_model.ensure("tiny-llama", "F16", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_real_vocabulary_is_copied_and_padded(tmp_path: Path, small_vocabulary: Path) -> None:
    path = tmp_path / "padded.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    make_model._add_qwen2_vocabulary(writer, 5, small_vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(path).fields
    tokens = ["a", "<|im_end|>", "[PAD2]", "[PAD3]", "[PAD4]"]
    assert fields["tokenizer.ggml.tokens"].contents() == tokens
    assert fields["tokenizer.ggml.token_type"].contents() == [1, 3, 5, 5, 5]
    assert fields["tokenizer.ggml.merges"].contents() == ["a b"]


def test_the_command_line_prints_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert make_model.main(["tiny-swa", "--type", "Q8_0"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.parent == tmp_path / "cllm" / "models"
    assert path.is_file()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-model"], "no model 'no-such-model'"),
        (["tiny-llama", "--type", "Q4_K_M"], "not made as Q4_K_M, only as F16, Q8_0, Q4_0"),
        (["two-layer"], "run ./build_llama.sh"),
        (["two-layer", "--vocab", "/no/such/file"], "/no/such/file"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert make_model.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("make_model: ")
    assert captured.err.count("\n") == 1
    assert reason in captured.err


def test_k_quants_are_written_from_f16(tmp_path: Path) -> None:
    path = make_model.ensure("qwen3-wide", "Q6_K", tmp_path)
    sizes = {file.name.split("-")[2]: file.stat().st_size for file in tmp_path.iterdir()}
    assert 0.4 < sizes["Q6_K"] / sizes["F16"] < 0.5
    reader = gguf.GGUFReader(path)
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert types["blk.0.ffn_up.weight"] == "Q6_K"


def test_what_cannot_be_quantized_is_reported(tmp_path: Path) -> None:
    (tmp_path / f"qwen3-0.6b-F16-g{make_model.GENERATOR}.gguf").write_bytes(b"F16")
    with pytest.raises(make_model.MakeModelError, match="not a GGUF file"):
        make_model.ensure("qwen3-0.6b", "Q4_K_M", tmp_path)
