"""Find and load libmtmd, which turns images and audio into embeddings, once per process, on first use."""

from __future__ import annotations

import atexit
import ctypes

from cllm.bindings import _library
from cllm.bindings import _mtmd_h as m
from cllm.bindings._functions import Functions
from cllm.errors import LibraryError


class MediaLibrary(Functions):
    """The functions of libmtmd as attributes, with the signatures of `_mtmd_h`."""

    declared = m.DECLARATIONS


_media_library: MediaLibrary | None = None


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
    global _media_library
    lib = _library.library()
    if _media_library is None:
        with _library._library_lock:
            _media_library = _media_library or _load(lib)
    return _media_library


def _load(lib: _library.Library) -> MediaLibrary:
    path = lib.path.with_name(lib.path.name.replace("llama", "mtmd"))
    if not path.is_file():
        path = lib.path
    is_left_out = lib.record.get("media") is False
    if is_left_out or not hasattr(ctypes.PyDLL(str(path)), "mtmd_init_from_file"):
        raise LibraryError(
            f"{lib.path} has no libmtmd, which images need: run ./build_llama.sh, without CLLM_LIBRARY"
        )
    loaded = MediaLibrary(path, lib.path)
    loaded.mtmd_log_set(lib._log_callback, None)
    atexit.register(loaded.mtmd_log_set, lib._no_log, None)
    return loaded
