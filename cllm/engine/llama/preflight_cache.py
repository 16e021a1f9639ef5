"""Which files have passed a preflight, remembered in the cache directory.

A file is known by its path, size and time of change, together with the build of libllama that it
passed with.  A registry that cannot be read is empty, and one that cannot be written stays as it
is: then a preflight is made once more, which is never wrong.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("cllm.engine")

MAX_FILES = 256


class Fingerprint(NamedTuple):
    """What changes when a file does, or the library that reads it."""

    n_bytes: int
    mtime_ns: int
    build: str


Fingerprints = Mapping[str, Fingerprint]


def fingerprints(files: Iterable[Path], build: str) -> dict[str, Fingerprint]:
    """The fingerprint of each file, by its absolute path.

    Raises
    ------
    OSError
        One of them cannot be looked at.
    ValueError
        A path that no file can have.
    """
    found = {}
    for file in files:
        status = file.stat()
        found[str(file.absolute())] = Fingerprint(status.st_size, status.st_mtime_ns, build)
    return found


def are_seen(files: Fingerprints) -> bool:
    """Whether all of these files have passed."""
    known = _read()
    return all(known.get(path) == list(fingerprint) for path, fingerprint in files.items())


def remember(files: Fingerprints) -> None:
    """These files have passed.  Of very many, those that did so last are kept."""
    known = _read()
    for path, fingerprint in files.items():
        known.pop(path, None)  # to its place at the end
        known[path] = list(fingerprint)
    text = json.dumps(dict(list(known.items())[-MAX_FILES:]), indent=1)
    try:
        registry = registry_path()
        registry.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read meanwhile: it finds the old file, or the new one.
        with tempfile.TemporaryDirectory(dir=registry.parent, prefix=".seen-") as directory:
            written = Path(directory) / registry.name
            written.write_text(text)
            written.replace(registry)
    except (OSError, RuntimeError) as error:
        logger.info("it is not remembered which models have passed: %s", error)


def registry_path() -> Path:
    """The registry, in the directory that `build_llama.sh` uses too.  It may not exist yet.

    Raises
    ------
    RuntimeError
        Nobody says where the home directory is.
    """
    # An empty or relative XDG_CACHE_HOME counts as unset (XDG base directory specification).
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path.home() / ".cache"
    return base / "cllm" / "seen_models.json"


def _read() -> dict[str, object]:
    try:
        known = json.loads(registry_path().read_bytes())
    except (OSError, ValueError, RuntimeError):  # RecursionError, of what is nested, is the last
        return {}
    return known if isinstance(known, dict) else {}
