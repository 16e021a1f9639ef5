"""`cllm info`: what it says is what the model is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from cllm.bindings import Model
from cllm.bindings._llama_h import LLAMA_CPP_COMMIT, LLAMA_CPP_VERSION
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import ModelLoadError
from tests.cli.children import run_cllm


def test_it_tells_the_embedded_model_in_lines() -> None:
    done = run_cllm("info")
    assert (done.returncode, done.stderr) == (0, "")
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert told["file"].startswith(str(EMBEDDED_MODEL))
    assert told["prefixes"].strip() == "shared"
    assert "takes" in told["chat"]


def test_the_numbers_are_those_of_the_loaded_model() -> None:
    done = run_cllm("info", str(EMBEDDED_MODEL), "--json", "-c", "512")
    facts = json.loads(done.stdout)
    with Model(EMBEDDED_MODEL) as model:
        for name in ("n_params", "n_ctx_train", "n_layer", "n_embd", "n_head", "n_head_kv"):
            assert facts[name] == getattr(model, name), name
        # K and V of F16 for each layer and each head of them.
        n_bytes = 512 * model.n_layer * 2 * 2 * model.n_embd * model.n_head_kv // model.n_head
    assert facts["kv_bytes"]["512"] == n_bytes
    assert facts["n_bytes"] == EMBEDDED_MODEL.stat().st_size


def test_what_is_no_model_is_one_line_on_stderr() -> None:
    done = run_cllm("info", __file__)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cllm: cannot load")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("form", ["lines", "json"])
@pytest.mark.parametrize(
    ("architecture", "kind", "environment", "told"),
    [
        ("qwen5next", None, {}, "unknown model architecture: 'qwen5next'"),
        ("clip", "projector", {}, "a projector: load it beside its text model, as --mmproj"),
        ("llama", None, {"CLLM_LIBRARY": "/nowhere"}, "no libllama found"),
    ],
)
def test_the_header_of_any_file_is_shown_without_llama_cpp(
    architecture: str,
    kind: str | None,
    environment: dict[str, str],
    told: str,
    form: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.gguf"
    writer = GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type("mmproj")  # as llama.cpp's converter names it
    writer.add_name("A name")
    writer.add_uint32(f"{architecture}.context_length", 4096)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = run_cllm("info", str(path), *(["--json"] if form == "json" else []), **environment)
    assert (done.returncode, done.stderr) == (0, "")
    if form == "json":
        facts = json.loads(done.stdout)
        assert (facts["name"], facts["architecture"], facts["n_params"]) == (
            "A name",
            architecture,
            320,
        )
        assert facts["kind"] == (kind or "model")
        assert facts["metadata"][f"{architecture}.context_length"] == 4096
        assert told in facts["reason"]
    else:
        lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
        assert lines["kind"] == f"{kind or 'model'}, {architecture}"
        assert lines[f"{architecture}.context_length"] == "4096"
        assert told in lines["not"]


def test_control_characters_of_a_file_are_symbols_and_json_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    writer = GGUFWriter(path, "qwen5next")
    writer.add_name("A\x1b[2Jname\nfile  /etc")
    writer.add_float32("a.number", float("nan"))
    writer.add_array("a.numbers", [1.0, float("inf")])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    done = run_cllm("info", str(path))
    assert "A␛[2Jname file  /etc\n" in done.stdout
    assert "\x1b" not in done.stdout
    metadata = json.loads(run_cllm("info", str(path), "--json").stdout)["metadata"]
    assert (metadata["a.number"], metadata["a.numbers"]) == (None, [1.0, None])


def test_a_model_of_an_unknown_architecture_names_the_version_and_the_way_to_a_newer_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.gguf"
    writer = GGUFWriter(path, "qwen5next")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError) as raised:
        Model(path)
    assert "unknown model architecture: 'qwen5next'" in raised.value.reason
    assert f"this llama.cpp is {LLAMA_CPP_COMMIT} ({LLAMA_CPP_VERSION}" in raised.value.reason
    assert "./build_llama.sh --source DIR, or a newer cllm" in raised.value.reason
