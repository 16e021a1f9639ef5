"""Find where a library keeps the fields of llama.cpp's structures.

A build of `build_llama.sh` has a record for each version of the declarations that it was compared with
(`layouts/DIGEST.json`).  `known_libraries.json` has the records of libraries that others have built; a
library is known by the hash of its file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from cllm.bindings._declarations import Declarations
from cllm.errors import AbiMismatchError

KNOWN_LIBRARIES = Path(__file__).with_name("known_libraries.json")


def record_of(path: Path) -> dict[str, Any]:
    """Return the build record of a library: `build.json`, or its entry in `known_libraries.json`; else {}."""
    file = path.parent.parent / "build.json"
    if file.is_file():
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return record
    return known_library(path) or {}


def layouts_of(path: Path, declared: Declarations) -> dict[str, Any]:
    """Return the size and the offsets of each structure of parameters.

    Parameters
    ----------
    path : Path
        Path of the libllama file.
    declared : Declarations
        The declarations of the structures.

    Raises
    ------
    AbiMismatchError
        The library was not compared with these declarations.
    """
    build = path.parent.parent
    file = build / "layouts" / f"{declared.digest}.json"
    if file.is_file():
        structs: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["structs"]
        return structs
    if (build / "build.json").is_file():
        raise AbiMismatchError(
            f"{path} was not compared with the declarations of this cllm: run ./build_llama.sh again"
        )
    known = known_library(path)
    if known is None:
        names = ", ".join(library["name"] for library in _known()["libraries"])
        raise AbiMismatchError(
            f"{path} is not a library that cllm knows ({names}): build it with ./build_llama.sh, "
            "which takes any llama.cpp with --source"
        )
    return dict(known["structs"])


def known_library(path: Path) -> dict[str, Any] | None:
    """Return the entry of a library that others have built; None if its hash is not in the list."""
    status = path.stat()
    digest = _sha256(path, status.st_size, status.st_mtime_ns)
    libraries = _known()["libraries"]
    return next((library for library in libraries if library["sha256"] == digest), None)


@functools.cache
def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(KNOWN_LIBRARIES.read_text(encoding="utf-8"))
    return known


@functools.lru_cache(4)
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
