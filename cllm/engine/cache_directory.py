"""Small JSON files in the cache directory, whose content can be computed again, and files that must last.

A file that cannot be read counts as empty.  If a file cannot be written, the old one is kept.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def cache_file(name: str) -> Path:
    """Return the path of a file in the cache directory of cllm.  The file may not exist yet.

    `build_llama.sh` uses the same directory.

    Raises
    ------
    RuntimeError
        The home directory is unknown.
    """
    return _base("XDG_CACHE_HOME", ".cache") / "cllm" / name


def state_file(name: str) -> Path:
    """Return the path of a file that must outlast the program, such as a log.  It may not exist yet.

    Raises
    ------
    RuntimeError
        The home directory is unknown.
    """
    return _base("XDG_STATE_HOME", ".local/state") / "cllm" / name


def _base(variable: str, otherwise: str) -> Path:
    # An empty or relative path counts as unset (XDG base directory specification).
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else Path.home() / otherwise


def read_cached(name: str) -> dict[str, object]:
    """Return the JSON object in a file; empty if the file cannot be read or has no JSON object."""
    try:
        known = json.loads(cache_file(name).read_bytes())
    except (OSError, ValueError, RuntimeError):  # also RecursionError, for deeply nested JSON
        return {}
    return known if isinstance(known, dict) else {}


def keep_cached(name: str, entries: Mapping[str, object], n_max: int) -> None:
    """Add entries to a file, and keep only the `n_max` entries that were added last.

    Raises
    ------
    OSError, RuntimeError
        The file cannot be written, or the home directory is unknown.  The file is unchanged.
    """
    known = read_cached(name)
    for key, value in entries.items():
        known.pop(key, None)  # so that the key moves to the end
        known[key] = value
    write_cached(name, dict(list(known.items())[-n_max:]))


def write_cached(name: str, values: Mapping[str, object]) -> None:
    """Replace the entries of a file.

    Raises
    ------
    OSError, RuntimeError
        The file cannot be written, or the home directory is unknown.  The file is unchanged.
    """
    replace_json(cache_file(name), values)


def replace_json(file: Path, values: Mapping[str, object]) -> None:
    """Replace a JSON file atomically; create its directory if there is none.

    Raises
    ------
    OSError
        The disk is full, for example.  The file is unchanged, and no temporary file is left.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as written:
        written.write_text(json.dumps(values, indent=1))


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to; at the end of the block, the new file replaces `file`.

    The file that a link leads to is replaced, not the link.  A path that is no regular file, such as
    /dev/stdout, is yielded itself.

    Raises
    ------
    OSError
        The directory cannot be written, for example.  The file is unchanged, and no temporary file is left.
    """
    if file.exists() and not file.is_file():
        yield file
        return
    file = file.resolve()
    # Another process may read meanwhile: it finds the old file, or the new one.
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".cllm-") as directory:
        written = Path(directory) / file.name
        yield written
        written.replace(file)
