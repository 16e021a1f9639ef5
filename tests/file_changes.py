"""Files of an engine, and the changes that can happen to them while it runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cllm.engine.config import EMBEDDED_MODEL
from tests.lora_files import make_lora

FILE_KINDS = ("model", "adapter", "draft model", "embedding model")  # files that change the answers


def file_of(kind: str, model: Path) -> tuple[Path, dict[str, Any]]:
    """Return a file that an engine of this model uses, and the options that name it."""
    file = model.with_name("file.gguf")
    if kind == "model":
        return model, {}
    if kind == "adapter":
        return make_lora(file, model, seed=1), {"lora": [(str(file), 1.0)]}
    if kind == "template":
        file.write_text("{{ messages[0].content }}")
        return file, {"chat_template": file}
    shutil.copyfile(EMBEDDED_MODEL, file)
    if kind == "draft model":
        return file, {"speculation": file}
    return file, {"embedding_model": file, "pooling": "mean"}


def with_other_weights(data: bytes) -> bytes:
    """Return the model with other weights: the signs in the second half of the file are flipped."""
    changed = bytearray(data)
    for i in range(len(changed) // 2 // 4 * 4 + 3, len(changed), 4):
        changed[i] ^= 0x80
    return bytes(changed)


def replace(path: Path) -> None:
    """Replace the file by one with other weights, as an update does."""
    beside = path.with_suffix(".new")
    beside.write_bytes(with_other_weights(path.read_bytes()))
    beside.replace(path)


def overwrite(path: Path) -> None:
    """Write other weights into the file."""
    changed = with_other_weights(path.read_bytes())
    with path.open("r+b") as file:
        file.write(changed)


def overwrite_unseen(path: Path) -> None:
    """Write other weights into the file, and restore its times."""
    status = path.stat()
    overwrite(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove(path: Path) -> None:
    """Remove the file."""
    path.unlink()


def truncate(path: Path) -> None:
    """Keep the first third of the file."""
    os.truncate(path, path.stat().st_size // 3)


def touch(path: Path) -> None:
    """Change the times of the file, not its content."""
    os.utime(path, ns=(0, 0))


def install_again(path: Path) -> None:
    """Replace the file by a copy of itself."""
    beside = path.with_suffix(".new")
    shutil.copyfile(path, beside)
    beside.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": replace, "overwritten": overwrite, "overwritten, with its old times": overwrite_unseen,
    "removed": remove, "cut off": truncate,
}  # fmt: skip
NO_CHANGES: dict[str, Callable[[Path], None]] = {"touched": touch, "installed again": install_again}
