"""`cllm info`: what it says is what the model is."""

from __future__ import annotations

import json

from cllm.bindings import Model
from cllm.engine.config import EMBEDDED_MODEL
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
