"""`cllm info`: what a model's file says."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.filesize import decimal

from cllm import EngineConfig
from cllm.cli.options import model_file
from cllm.doctor.model_facts import ModelFacts, model_facts


def info(
    model: Annotated[
        str | None, typer.Argument(help="A GGUF file, or hf:USER/REPO[:QUANT]; the embedded model.")
    ] = None,
    n_ctx: Annotated[
        list[int] | None,
        typer.Option("-c", "--n-ctx", min=1, max=1 << 26, help="KV cells to tell the memory of."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> int:
    """Show the architecture of a model, the abilities of its chat template, and the memory it needs."""
    facts = model_facts(EngineConfig(model=model_file(model)).model_path, n_ctx or ())
    if as_json:
        typer.echo(json.dumps(facts.as_dict()))
    else:
        _show(facts)
    return 0


def _show(facts: ModelFacts) -> None:
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
        *(
            (f"-c {n_ctx}", f"{decimal(facts.n_bytes + n_bytes)}, {decimal(n_bytes)} of them KV")
            for n_ctx, n_bytes in facts.kv_bytes.items()
        ),
    ]
    if facts.available_bytes is not None:
        lines.append(("memory", f"{decimal(facts.available_bytes)} available now"))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:{width}}  {value}")
