"""llguidance over real vocabularies: what a mask allows is allowed, and is the text that was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cllm.bindings import Model
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.tool_schema import parameters_of
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.constraints.llguidance import Guidance
from tests.engine.chat.test_tool_schema import SYNTAXES, grammar_of, tool_of
from tests.engine.chat.tool_schemas import written

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


def follow(model: Model, guidance: Guidance, compiled: tuple[str, str], text: str) -> str | None:
    """The error of a constraint that an output of this text goes through, if there is one."""
    matcher = guidance.compile(*compiled).start()
    for token in model.vocab.tokenize(text, add_special=False, parse_special=True):
        (mask,) = guidance.masks([matcher])
        if isinstance(mask, Exception):
            return str(mask)
        assert mask[token]
        matcher.accept(token)
    return None


LIMITED: list[dict[str, Any]] = [
    {"maxLength": 200}, {"minLength": 1, "maxLength": 100}, {"pattern": "^.{1,255}$"},
]  # fmt: skip


@pytest.mark.parametrize("limit", LIMITED, ids=str)
@pytest.mark.parametrize("name", ["tags", "elements", "types in tags", "text or not in tags"])
def test_an_argument_of_limited_length_is_written_to_its_end(
    name: str, limit: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"v": {"type": "string", **limit}}, "required": ["v"]}
    (tool,) = parameters_of([tool_of(schema)])
    compiled = ("tools", grammar_of(SYNTAXES[name], tool))
    with Model(EMBEDDED_MODEL, vocab_only=True) as model:
        guidance = Guidance(model.vocab, 1)
        for value in ("a", "hello </b> " * 6, "x" * 100):
            text = written(OutputFormat(calls=SYNTAXES[name]), tool, {"v": value})
            assert follow(model, guidance, compiled, text) is None


def test_a_constraint_that_costs_too_much_fails_one_request_and_not_the_next() -> None:
    # The lexer, which all that comes of one compilation share, answers nothing after its error.
    schema = {"type": "object", "properties": {"v": {"type": "string", "maxLength": 4000}}}
    (tool,) = parameters_of([tool_of({**schema, "required": ["v"]})])
    syntax = SYNTAXES["elements"]
    compiled = ("lark", grammar_of(syntax, tool))  # with the limits of a grammar of a request
    costly, cheap = written(OutputFormat(calls=syntax), tool, {"v": "a"}), syntax.triggers[0]
    with Model(EMBEDDED_MODEL, vocab_only=True) as model:
        guidance = Guidance(model.vocab, 1)
        assert follow(model, guidance, compiled, cheap) is None
        assert "too many expressions" in str(follow(model, guidance, compiled, costly))
        assert follow(model, guidance, compiled, cheap) is None
