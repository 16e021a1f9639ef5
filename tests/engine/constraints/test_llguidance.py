"""llguidance over real vocabularies: what a mask allows is allowed, and is the text that was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from cllm.bindings import Model
from cllm.engine.constraints.llguidance import Guidance

with Model(sys.argv[1], vocab_only=True) as model:
    guidance = Guidance(model.vocab, 2)
    for field, text in [
        ("regex", "a"), ("regex", "[0-9]{3}x"), ("json_schema", '{"type": "string", "maxLength": 3}'),
        ("regex", "[0-9]" + "a" * 12000),
    ]:
        outputs = [guidance.compile(field, text).start() for _ in range(3)]
        tokens = []
        for _ in range(8):
            masks = guidance.masks(outputs)
            allowed = [t for t in masks[0].nonzero()[0].tolist() if t not in guidance.ends]
            if not allowed:
                break
            assert all(outputs[0].allows(token) for token in allowed[:50])
            tokens.append(allowed[len(allowed) // 2])
            for output in outputs:
                output.accept(tokens[-1])
        text = b"".join(map(model.vocab.piece, tokens))
        assert not text.startswith(b" "), (field, text)
    print("fine")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["llama-spm", "phi-3", "baichuan", "deepseek-llm", "gpt-neox", "aquila", "qwen2", "llama-bpe"],
)
def test_a_constraint_is_followed_on_a_real_vocabulary(llama_cpp_source: Path, name: str) -> None:
    path = llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf"
    command = [sys.executable, "-c", SCRIPT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "fine\n"
