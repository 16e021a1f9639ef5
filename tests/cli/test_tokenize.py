"""`cllm tokenize`: the tokens that the model is given."""

from __future__ import annotations

import json

from cllm.bindings import Model
from cllm.engine.config import EMBEDDED_MODEL
from tests.cli.children import run_cllm

TEXT = "1+1=你"


def expected(*, add_special: bool) -> list[int]:
    with Model(EMBEDDED_MODEL, vocab_only=True) as model:
        return model.vocab.tokenize(TEXT, add_special=add_special)


def test_the_tokens_are_those_of_the_vocabulary_one_a_line() -> None:
    done = run_cllm("tokenize", TEXT)
    tokens = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [int(token) for token, _ in tokens] == expected(add_special=True)
    assert [text for _, text in tokens][-7:-3] == ["'1'", "'+'", "'1'", "'='"]
    assert done.stderr == f"{len(tokens)} tokens\n"


def test_numbers_alone_and_standard_input() -> None:
    done = run_cllm("tokenize", "-", "--ids", "--no-special", "-m", str(EMBEDDED_MODEL), input=TEXT)
    assert [int(token) for token in done.stdout.split()] == expected(add_special=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_has_the_text_of_each_token() -> None:
    done = run_cllm("tokenize", "ab", "--json", "--no-special")
    told = json.loads(done.stdout)
    assert told == {"n_tokens": 2, "tokens": [{"id": 97, "text": "a"}, {"id": 98, "text": "b"}]}
