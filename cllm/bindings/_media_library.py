"""Find and load libmtmd, which turns images and audio into embeddings, once per process, on first use."""

from __future__ import annotations

import atexit
import ctypes
import functools

from cllm.bindings import _mtmd_h as m
from cllm.bindings._functions import Functions
from cllm.bindings._library import library
from cllm.errors import LibraryError


class MediaLibrary(Functions):
    """The functions of libmtmd as attributes, with the signatures of `_mtmd_h`."""

    declared = m.DECLARATIONS


@functools.cache
def media_library() -> MediaLibrary:
    """Return libmtmd: the file beside libllama, or libllama itself where it contains libmtmd.

    Log lines of libmtmd are forwarded like those of llama.cpp.

    Raises
    ------
    LibraryError
        The library was built without libmtmd.
    AbiMismatchError
        The library was not compared with the declarations in `_mtmd_h`, or does not fit them.
    """
    lib = library()
    path = lib.path.with_name(lib.path.name.replace("libllama", "libmtmd"))
    if not path.is_file():
        path = lib.path
    if not hasattr(ctypes.PyDLL(str(path)), "mtmd_init_from_file"):
        raise LibraryError(
            f"{lib.path} has no libmtmd, which images need: run ./build_llama.sh, without CLLM_LIBRARY"
        )
    loaded = MediaLibrary(path, lib.path)
    loaded.mtmd_log_set(lib._log_callback, None)
    atexit.register(loaded.mtmd_log_set, lib._no_log, None)
    return loaded
