"""`cllm info`: facts from a model's file, or its header alone if llama.cpp does not load the file."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.filesize import decimal

from cllm import EngineConfig, LibraryError, ModelLoadError
from cllm.cli.options import model_file
from cllm.cli.texts import visible
from cllm.doctor.model_facts import FileFacts, ModelFacts, file_facts, model_facts

MAX_VALUE = 60  # characters of a value of the metadata


def info(
    model: Annotated[
        str | None,
        typer.Argument(help="A GGUF file or hf:USER/REPO[:QUANT]; by default the embedded model."),
    ] = None,
    n_ctx: Annotated[
        list[int] | None,
        typer.Option(
            "-c", "--n-ctx", min=1, max=1 << 26, help="Show the memory of so many KV cells."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> int:
    """Show the architecture of a model, the abilities of its chat template, and the memory it needs."""
    path = EngineConfig(model=model_file(model)).model_path
    facts: ModelFacts | FileFacts
    try:
        facts = model_facts(path, n_ctx or ())
    except (ModelLoadError, LibraryError) as error:
        found = file_facts(path, str(error)) if path.is_file() else None
        if found is None:
            raise
        facts = found
    if as_json:
        typer.echo(json.dumps(facts.as_dict(), allow_nan=False))
    else:
        _show(_lines(facts) if isinstance(facts, ModelFacts) else _lines_of_file(facts))
    return 0


def _lines_of_file(facts: FileFacts) -> list[tuple[str, str]]:
    return [
        ("name", facts.name),
        ("file", f"{facts.path}, {decimal(facts.n_bytes)}"),
        ("kind", f"{facts.kind}, {facts.architecture}"),
        ("parameters", f"{facts.n_params:,} in {facts.n_tensors:,} tensors"),
        *((key, _short(value)) for key, value in facts.metadata.items()),
        ("not loaded", facts.reason),
    ]


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + " …"


def _lines(facts: ModelFacts) -> list[tuple[str, str]]:
    heads = f"{facts.n_head} heads ({facts.n_head_kv} of keys and values)"
    lines = [
        ("name", facts.name),
        ("file", f"{facts.path}, {decimal(facts.n_bytes)}"),
        ("architecture", f"{facts.architecture}; {facts.description}"),
        ("parameters", f"{facts.n_params:,}"),
        ("shape", f"{facts.n_layer} layers of {facts.n_embd:,}, {heads}"),
        ("trained for", f"{facts.n_ctx_train:,} tokens"),
        ("vocabulary", facts.vocabulary),
        ("chat template", facts.chat),
        ("prefixes", facts.prefixes),
        *([("drafts", "has a layer for them: --speculation mtp")] if facts.has_mtp else []),
        *(
            (f"-c {n_ctx}", f"{decimal(facts.n_bytes + n_bytes)}, {decimal(n_bytes)} of them KV")
            for n_ctx, n_bytes in facts.kv_bytes.items()
        ),
    ]
    if facts.available_bytes is not None:
        lines.append(("memory", f"{decimal(facts.available_bytes)} available now"))
    return lines


def _show(lines: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(visible(f"{name:{width}}  {value}".replace("\n", " ")))
