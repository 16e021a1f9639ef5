"""Small JSON files in the cache directory: what was learned here, and may be lost.

A file that cannot be read is empty, and one that cannot be written stays as it is.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_file(name: str) -> Path:
    """A file of this name, in the directory that `build_llama.sh` uses too.  It may not exist yet.

    Raises
    ------
    RuntimeError
        The home directory is unknown.
    """
    # An empty or relative XDG_CACHE_HOME counts as unset (XDG base directory specification).
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path.home() / ".cache"
    return base / "cllm" / name


def read_cached(name: str) -> dict[str, object]:
    """Return the object in a file; empty if the file cannot be read."""
    try:
        known = json.loads(cache_file(name).read_bytes())
    except (OSError, ValueError, RuntimeError):  # RecursionError, of what is nested, is the last
        return {}
    return known if isinstance(known, dict) else {}


def keep_cached(name: str, entries: Mapping[str, object], n_max: int) -> None:
    """Add entries to a file.  Of more than `n_max`, the ones that were added last are kept.

    Raises
    ------
    OSError, RuntimeError
        The file stays as it was.
    """
    known = read_cached(name)
    for key, value in entries.items():
        known.pop(key, None)  # to its place at the end
        known[key] = value
    write_cached(name, dict(list(known.items())[-n_max:]))


def write_cached(name: str, values: Mapping[str, object]) -> None:
    """Replace a file.

    Raises
    ------
    OSError, RuntimeError
        It stays as it was.
    """
    replace_json(cache_file(name), values)


def replace_json(file: Path, values: Mapping[str, object]) -> None:
    """Replace a JSON file in one step, and make its directory.

    Raises
    ------
    OSError
        The disk is full, for example.  The file is unchanged, and no temporary file is left.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read meanwhile: it finds the old file, or the new one.
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}-") as directory:
        written = Path(directory) / file.name
        written.write_text(json.dumps(values, indent=1))
        written.replace(file)
