"""Names of models on a hub: which repository, and which of its files.  Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeGuard

from cllm.errors import InvalidArgumentError

PREFIX = "hf:"
DEFAULT_QUANT = "Q4_K_M"  # as llama.cpp's -hf
_REPO = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_REPO})(?::([\w.-]+)|/([^\0-\x1f\x7f\\]+\.gguf))?", re.ASCII)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Quantizations in the names of files, as llama.cpp and publishers of models write them.
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d(?:_\w+)?|TQ\d_\d|BF16|F16|F32|MXFP4(?:_\w+)?)(?![A-Za-z0-9])",
    re.ASCII | re.IGNORECASE,
)
N_TOLD = 20  # names in a message
PROJECTOR = "mmproj"
# What the names of other files than models have in them, as in llama.cpp's `gguf_filename_is_model`.
_NO_MODELS = re.compile(rf"{PROJECTOR}|imatrix", re.I)
_DRAFTERS = re.compile("mtp-|eagle3-|dflash-|dspark-")
# The preferred types of projectors: all CPUs and GPUs compute F16 fast.
_PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")


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


# Returns the files that belong to a name, among those of its repository.
Choose = Callable[[ModelName, Iterable[str]], list[str]]


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
    if found is None or ".." in text.split("/"):
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
    files = list(files)
    models = models_of(files)
    if name.file is not None:
        chosen = [parts for parts in _complete(files).values() if name.file in parts]
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


def choose_projector(name: ModelName, files: Iterable[str]) -> list[str]:
    """Return the projector of a model among the files of its repository, in a list; an empty list without one.

    It is in the folder of the model or in one above it.  Of several, F16 is preferred to BF16, Q8_0, F32 and
    others, and the shortest name to longer ones.
    """
    files = list(files)
    folders = PurePosixPath(choose_files(name, files)[0]).parents
    found = [file for file in files if is_projector(file) and PurePosixPath(file).parent in folders]
    return sorted(found, key=_projector_rank)[:1]


def is_projector(file: str) -> bool:
    """Return True if a file is a projector by its name."""
    path = PurePosixPath(file)
    return path.suffix == ".gguf" and PROJECTOR in path.name.lower()


def one_projector(files: Iterable[str]) -> str | None:
    """Return the preferred one of a projector's files that differ in their type; None for other files."""
    found = sorted(filter(is_projector, files), key=_projector_rank)
    plain = {_QUANT.sub("", PurePosixPath(file).name).lower() for file in found}
    return found[0] if len(plain) == 1 else None


def _projector_rank(file: str) -> tuple[int, int, str]:
    """Return a key that sorts the preferred projector first."""
    quant = "".join(_QUANT.findall(PurePosixPath(file).name)[-1:]).upper()
    order = (*_PROJECTOR_TYPES, quant)
    return order.index(quant), len(file), file


def name_of(repo: str, model: Sequence[str], files: Iterable[str]) -> ModelName:
    """Return the name of a model: with its quantization if that selects it among `files`, or with its file."""
    files = list(files)
    for quant in _QUANT.findall(model[0])[-1:]:
        by_quant = ModelName(repo, quant)
        with suppress(FileNotFoundError):
            if choose_files(by_quant, files) == model:
                return by_quant
    return ModelName(repo, file=model[0])


def models_of(files: Iterable[str], *, drafters: bool = False) -> dict[str, list[str]]:
    """Return the files of each complete model, in the order of its parts, by name without a part number.

    With `drafters`, models that only draft for others are among them.
    """
    return _complete(
        file
        for file in files
        for name in (PurePosixPath(file).name,)
        if not _NO_MODELS.search(name) and (drafters or not _DRAFTERS.search(name))
    )


def _complete(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the parts of each GGUF file that has all of them, by name without a part number."""
    whole: dict[str, list[str]] = {}
    parts: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for file in sorted(files):
        if PurePosixPath(file).suffix != ".gguf":
            continue
        if (found := _PART.search(file)) is None:
            whole[file] = [file]
        else:
            parts[_PART.sub(".gguf", file), int(found[2])][int(found[1])] = file
    for (model, n_parts), found_parts in sorted(parts.items()):
        if list(found_parts) == [*range(1, n_parts + 1)]:
            chosen = [*found_parts.values()]
            # Beside a whole file, or beside other parts, of this name.
            whole[chosen[0] if model in whole else model] = chosen
    return whole


def _has_quant(path: str, quant: str) -> bool:
    if quant.upper() in (found.upper() for found in _QUANT.findall(path)):
        return True  # an underscore may be before it
    return (
        re.search(rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])", path, re.I) is not None
    )


def _described(models: dict[str, list[str]]) -> str:
    if not models:
        return "and no other GGUF model"
    quants = sorted({quant for path in models for quant in _QUANT.findall(path)[-1:]})
    names = quants or [name if name.isprintable() else repr(name) for name in models]
    more = f" and {len(names) - N_TOLD} others" if len(names) > N_TOLD else ""
    return f"but {', '.join(names[:N_TOLD])}{more}"
