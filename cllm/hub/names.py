"""Names of models on a hub: which repository, and which of its files.  Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeGuard

from cllm.errors import InvalidArgumentError

PREFIX = "hf:"
DEFAULT_QUANT = "Q4_K_M"  # as llama.cpp's -hf
_REPO = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_REPO})(?::([\w.-]+)|/([\w./ -]+\.gguf))?", re.ASCII)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Quantizations in the names of files, as llama.cpp and publishers of models write them.
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d(?:_\w+)?|TQ\d_\d|BF16|F16|F32|MXFP4(?:_\w+)?)(?![A-Za-z0-9])",
    re.ASCII | re.IGNORECASE,
)
_NO_MODELS = ("mmproj", "imatrix")


@dataclass(frozen=True)
class ModelName:
    """A model on a hub.

    Attributes
    ----------
    repo : str
        `user/name`.
    quant : str or None
        Quantization, such as "Q4_K_M"; None takes Q4_K_M, else the model with the shortest name.
    file : str or None
        A file of the repository, in place of a quantization.
    """

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"{PREFIX}{self.repo}/{self.file}"
        return f"{PREFIX}{self.repo}" + (f":{self.quant}" if self.quant else "")


def is_name(model: object) -> TypeGuard[str]:
    """Return True if a model is given by name instead of by file."""
    return isinstance(model, str) and model.startswith(PREFIX)


def parse_name(text: str) -> ModelName:
    """Return the model of a name: `hf:USER/REPO`, `hf:USER/REPO:QUANT` or `hf:USER/REPO/FILE.gguf`.

    Raises
    ------
    InvalidArgumentError
        The text is not such a name.
    """
    found = _NAME.fullmatch(text.removeprefix(PREFIX))
    if found is None or ".." in text:
        limit = f"{PREFIX}USER/REPO, {PREFIX}USER/REPO:QUANT or {PREFIX}USER/REPO/FILE.gguf"
        raise InvalidArgumentError("model", text, limit)
    repo, quant, file = found.groups()
    return ModelName(repo, quant, file)


def choose_files(name: ModelName, files: Iterable[str]) -> list[str]:
    """Return the files of a model among those of its repository: one, or all parts of a split one.

    Returns
    -------
    list of str
        Paths in the repository, in the order of the parts; the first one is loaded.

    Raises
    ------
    FileNotFoundError
        No file fits; the message lists the quantizations or models of the repository.
    """
    models = models_of(files)
    if name.file is not None:
        chosen = [parts for parts in models.values() if name.file in parts]
    elif name.quant is not None:
        chosen = [parts for path, parts in models.items() if _has_quant(path, name.quant)]
    else:
        chosen = [parts for path, parts in models.items() if _has_quant(path, DEFAULT_QUANT)]
        chosen = chosen or list(models.values())
    if not chosen:
        wanted = name.file or name.quant or "model"
        raise FileNotFoundError(f"{name.repo} has no {wanted}, {_described(models)}")
    # Variants of a quantization have longer names than the plain one.
    return min(chosen, key=lambda parts: (len(parts[0]), parts[0]))


def name_of(repo: str, model: Sequence[str], files: Iterable[str]) -> ModelName:
    """Return the name of a model: with its quantization if that selects it among `files`, or with its file."""
    quants = _QUANT.findall(model[0])[-1:]
    if quants and choose_files(by_quant := ModelName(repo, quants[0]), files) == model:
        return by_quant
    return ModelName(repo, file=model[0])


def models_of(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each complete model, in the order of its parts, by name without a part number."""
    parts: dict[str, list[str]] = defaultdict(list)
    n_parts: dict[str, int] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix != ".gguf" or path.name.lower().startswith(_NO_MODELS):
            continue
        model = _PART.sub(".gguf", file)
        found = _PART.search(file)
        parts[model].append(file)
        n_parts[model] = int(found[2]) if found else 1
    return {model: found for model, found in parts.items() if len(found) == n_parts[model]}


def _has_quant(path: str, quant: str) -> bool:
    return (
        re.search(rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])", path, re.I) is not None
    )


def _described(models: dict[str, list[str]]) -> str:
    if not models:
        return "and no other GGUF model"
    quants = sorted({quant for path in models for quant in _QUANT.findall(path)[-1:]})
    return f"but {', '.join(quants or models)}"
