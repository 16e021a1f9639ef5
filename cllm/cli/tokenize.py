"""`cllm tokenize`: the tokens of a text."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from cllm import EngineConfig
from cllm.cli.options import ModelOption, model_file
from cllm.cli.texts import decoded, visible
from cllm.doctor.tokens import tokens_of

STANDARD_INPUT = "-"


def tokenize(
    text: Annotated[str, typer.Argument(help="Text; - is all of standard input.")],
    model: ModelOption = None,
    special: Annotated[
        bool,
        typer.Option(
            "--special/--no-special", help="Add the tokens that the model puts around a prompt."
        ),
    ] = True,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, on one line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> int:
    """Print the tokens of a text, one a line, and how many they are."""
    path = EngineConfig(model=model_file(model)).model_path
    if text == STANDARD_INPUT:
        text = decoded(sys.stdin.buffer.read(), "line {} of standard input".format)
    tokens = tokens_of(path, text, add_special=special)
    if as_json:
        pieces = [
            {"id": token, "text": piece.decode("utf-8", "replace")} for token, piece in tokens
        ]
        typer.echo(json.dumps({"n_tokens": len(tokens), "tokens": pieces}, ensure_ascii=False))
    elif ids:
        print(*(token for token, _ in tokens))
    else:
        for token, piece in tokens:
            print(f"{token:>7}  {visible(repr(piece.decode('utf-8', 'backslashreplace')))}")
        print(f"{len(tokens):,} tokens", file=sys.stderr)
    return 0
