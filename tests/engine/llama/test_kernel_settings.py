"""`repack` and `tiled_matmul` reach llama.cpp: each in a process of its own, which computes one batch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from cllm import Engine, EngineConfig, InvalidArgumentError
from cllm.engine.llama.determinism import TILED_PRODUCTS
from tests.conftest import QUIET
from tools import make_model

PROGRAM = """
import json, sys
import anyio
from cllm import Engine
async def main():
    async with Engine(sys.argv[1], n_ctx=256, n_seq_max=1, n_threads=1, tune=None, **json.loads(sys.argv[2])) as engine:
        done = await engine.generate(list(range(5, 37)), max_tokens=2, temperature=0, logprobs=3)
        told = [[t.logprob for t in token.top] for token in done.logprobs]
        print(json.dumps([told, engine.model.fingerprint]))
anyio.run(main)
"""


def answer_with(options: dict[str, object], **environment: str) -> tuple[list[list[float]], str]:
    path = make_model.ensure("qwen3-wide", "Q4_K_M")
    known = {name: value for name, value in os.environ.items() if name != TILED_PRODUCTS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), json.dumps(options)],
        env=known | environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    logprobs, fingerprint = json.loads(done.stdout)
    return logprobs, fingerprint


@pytest.mark.full
def test_without_tiles_the_process_computes_as_with_llama_cpps_own_variable() -> None:
    with_tiles, plain = answer_with({"repack": False})
    by_variable, same = answer_with({"repack": False}, **{TILED_PRODUCTS: "0"})
    by_setting, own = answer_with({"repack": False, "tiled_matmul": False})
    in_process, again = answer_with({"repack": False, "tiled_matmul": False, "process": True})
    assert by_setting == by_variable == in_process
    assert own == again != plain == same
    if with_tiles == by_variable:
        pytest.skip("this processor rounds alike with and without tiles, or has none")


@pytest.mark.full
def test_repacked_weights_give_the_same_answer_but_another_fingerprint() -> None:
    packed, as_packed = answer_with({})
    plain, as_plain = answer_with({"repack": False})
    assert as_packed != as_plain
    assert np.asarray(packed) == pytest.approx(np.asarray(plain), abs=0.1)


@pytest.mark.same_process("what this process has read is not read there")
@pytest.mark.anyio
async def test_tiles_are_refused_by_name_after_another_engine_has_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cllm.engine.llama.determinism._are_tiles_off", False)
    path = make_model.ensure("qwen3-wide", "Q4_K_M")
    config = EngineConfig(model=path, n_ctx=256, tiled_matmul=False, **QUIET)
    with pytest.raises(InvalidArgumentError, match="must be True with K-quants") as caught:
        async with Engine(config=config):
            pass
    assert caught.value.field == "tiled_matmul"
