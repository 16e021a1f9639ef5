"""Cache of the files that have passed a preflight.

An entry has the path, size and modification time of a file, and the build of libllama that it passed
with.  If the cache is lost, the preflight is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cllm.engine.cache_directory import keep_cached, read_cached

logger: logging.Logger = logging.getLogger("cllm.engine")

FILE = "seen_models.json"
MAX_FILES = 256


class Fingerprint(NamedTuple):
    """Properties that change with the file, or with the library that reads it."""

    n_bytes: int
    mtime_ns: int
    build: str


Fingerprints = Mapping[str, Fingerprint]


def fingerprints(files: Iterable[Path], build: str) -> dict[str, Fingerprint]:
    """Return the fingerprint of each file, by its absolute path.

    Raises
    ------
    OSError
        A file does not exist, or its status cannot be read.
    ValueError
        A path is not valid, for example with a NUL character.
    """
    found = {}
    for file in files:
        status = file.stat()
        found[str(file.absolute())] = Fingerprint(status.st_size, status.st_mtime_ns, build)
    return found


def are_seen(files: Fingerprints) -> bool:
    """Return True if all of these files have passed."""
    known = read_cached(FILE)
    return all(known.get(path) == list(fingerprint) for path, fingerprint in files.items())


def remember(files: Fingerprints) -> None:
    """Remember that these files have passed; the oldest entries are dropped when there are many."""
    try:
        keep_cached(FILE, {path: list(files[path]) for path in files}, MAX_FILES)
    except (OSError, RuntimeError) as error:
        logger.info("cannot store which models have passed the preflight: %s", error)
