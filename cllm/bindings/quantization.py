"""Write a model in another data type."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

from cllm.bindings import _llama_h as h
from cllm.bindings._library import forward_log, library
from cllm.bindings.model import check_model_file
from cllm.checks import MAX_THREADS, check_int
from cllm.errors import InvalidArgumentError, LlamaCallError


def quantize(source: str | Path, target: str | Path, file_type: str, *, n_threads: int = 2) -> None:
    """Write a model of F32, F16 or BF16 weights in another data type.

    Parameters
    ----------
    source, target : str or Path
        GGUF files; `target` is replaced once it is complete.
    file_type : str
        F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_1, Q5_0, Q4_K_M, Q4_K_S, Q4_1, Q4_0, Q3_K_M or Q2_K.  Some
        tensors get more bits, as with llama-quantize.
    n_threads : int

    Raises
    ------
    InvalidArgumentError
        `file_type` is unknown, `n_threads` is not 1 to 512, or `target` is the source (llama.cpp would write to
        the file that it reads), or no path of a file.
    ModelLoadError
        `source` is missing or is not a GGUF file.
    LlamaCallError
        llama.cpp failed; the message has its reason.

    Notes
    -----
    See `llama_model_quantize` in llama.h.  Releases the GIL for as long as it takes.
    """
    if file_type not in h.FileType.__members__:
        raise InvalidArgumentError("file_type", file_type, ", ".join(h.FileType.__members__))
    check_model_file(str(source))
    replaced = _checked_target(source, target)
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = h.FileType[file_type]
    params.nthread = check_int("n_threads", n_threads, 1, MAX_THREADS)
    try:
        beside = tempfile.TemporaryDirectory(dir=replaced.parent, prefix=".cllm-")
    except OSError as error:
        limit = f"in a directory that can be written ({error.strerror})"
        raise InvalidArgumentError("target", str(target), limit) from None
    with beside as directory:
        written = Path(directory) / replaced.name
        forward_log()
        code = lib.llama_model_quantize(
            os.fsencode(source), os.fsencode(written), ctypes.byref(params)
        )
        reason = forward_log()
        if code == 0:
            written.replace(replaced)
    if code != 0:
        raise LlamaCallError("llama_model_quantize", int(code), reason or "no reason given")


def _checked_target(source: str | Path, target: str | Path) -> Path:
    """Return the file that is replaced, which a link may lead to."""
    if "\0" in str(target):
        raise InvalidArgumentError("target", str(target), "a path without a NUL character")
    try:
        replaced = Path(target).resolve()
        is_there = replaced.exists()
    except (OSError, RuntimeError) as error:  # too long a name, links that lead to each other
        limit = f"the path of a regular file ({error})"
        raise InvalidArgumentError("target", str(target), limit) from None
    if is_there and not replaced.is_file():
        raise InvalidArgumentError("target", str(target), "the path of a regular file")
    if not replaced.parent.is_dir():
        raise InvalidArgumentError("target", str(target), "in a directory that exists")
    if is_there and replaced.samefile(source):
        raise InvalidArgumentError("target", str(target), "another file than the source")
    return replaced
