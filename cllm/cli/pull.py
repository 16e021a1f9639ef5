"""`cllm pull` and `cllm models`: download, list and remove models."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.filesize import decimal

from cllm import InvalidArgumentError
from cllm.hub.cache import (
    CachedModel,
    cache_directory,
    cached_models,
    incomplete_files,
    remove_incomplete,
    remove_model,
)
from cllm.hub.download import check_library, pull_model
from cllm.hub.names import parse_name


def pull(
    name: Annotated[
        str, typer.Argument(help="hf:USER/REPO, hf:USER/REPO:QUANT or hf:USER/REPO/FILE.gguf.")
    ],
) -> int:
    """Download a model, or its new version; an interrupted download is resumed."""
    check_library(name)
    paths = pull_model(parse_name(name))
    print(paths[0])
    return 0


def models(
    remove: Annotated[
        list[str] | None, typer.Option(help="Remove this model; may be repeated.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what is left of interrupted downloads of cllm.")
    ] = False,
) -> int:
    """List the downloaded models and the disk space that they use, or remove some."""
    known = cached_models()
    if remove:
        chosen = [_find(name, known) for name in remove]
        for model in chosen:
            print(f"removed {model.name}: {decimal(remove_model(model))}", file=sys.stderr)
    for path in incomplete_files() if prune else []:
        n_bytes = remove_incomplete(path)
        told = "kept a part that is being downloaded"
        if n_bytes is not None:
            told = f"removed a part of {decimal(n_bytes)}"
        print(told, file=sys.stderr)
    if not (remove or prune):
        _show(known)
    return 0


def _find(name: str, known: list[CachedModel]) -> CachedModel:
    wanted = str(parse_name(name)).lower()
    for model in known:
        if str(model.name).lower() == wanted:
            return model
    names = ", ".join(str(model.name) for model in known) or "none"
    raise InvalidArgumentError("remove", name, f"one of the models that are here: {names}")


def _show(known: list[CachedModel]) -> None:
    width = max((len(str(model.name)) for model in known), default=0)
    for model in known:
        print(f"{model.name!s:{width}}  {decimal(model.n_bytes):>8}  {model.paths[0]}")
    parts = incomplete_files()
    n_bytes = sum(model.n_bytes for model in known)
    told = f"{len(known)} models, {decimal(n_bytes)}, in {cache_directory()}"
    if parts:
        n_left = sum(path.stat().st_size for path in parts)
        told += f"; {decimal(n_left)} of interrupted downloads (--prune removes them)"
    print(told, file=sys.stderr)
