"""A model in several files: what is read of it without llama.cpp is read of all of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import gguf
import numpy as np
import pytest

from cllm import Engine, EngineConfig
from cllm.doctor.model_facts import file_facts
from cllm.engine.llama.gguf_header import model_parts, read_shapes
from cllm.engine.llama.preflight import model_files
from tests.lora_files import make_lora
from tools import make_model

N_TENSORS = 8  # of a part


@pytest.fixture(scope="module")
def whole() -> Path:
    return make_model.ensure("tiny-llama", "F16")


@pytest.fixture(scope="module")
def split(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first part of the same model in several."""
    reader = gguf.GGUFReader(whole)
    path = tmp_path_factory.mktemp("split") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=N_TENSORS)
    with contextlib.closing(writer):
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                kind, *of = field.types
                writer.add_key_value(key, field.contents(), kind, of[-1] if of else None)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return min(path.parent.glob("m-*.gguf"))


def test_all_parts_are_files_of_the_model_once(split: Path) -> None:
    parts = sorted(split.parent.glob("m-*.gguf"))
    assert len(parts) == 3
    assert model_parts(split) == model_files(EngineConfig(model=split)) == parts


def test_shapes_and_sizes_are_those_of_the_whole_model(split: Path, whole: Path) -> None:
    assert read_shapes(split) == read_shapes(whole)
    ours, expected = file_facts(split, ""), file_facts(whole, "")
    assert ours is not None
    assert expected is not None
    assert ours.n_tensors == expected.n_tensors
    assert ours.n_params == expected.n_params
    assert expected.n_bytes < ours.n_bytes < 1.2 * expected.n_bytes


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_adapter_for_tensors_of_a_later_part_is_loaded(
    split: Path, whole: Path, tmp_path: Path
) -> None:
    adapter = make_lora(tmp_path / "lora.gguf", whole, seed=1)
    texts = []
    for model in (split, whole):
        async with Engine(model, n_ctx=256, n_threads=1) as engine:
            await engine.load_lora("one", adapter, scale=1.0)
            texts.append((await engine.generate("ab", max_tokens=8, temperature=0)).token_ids)
    assert texts[0] == texts[1]
