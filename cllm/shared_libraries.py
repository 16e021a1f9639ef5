"""Shared libraries of this process: their files, and the C library."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any


def c_library() -> ctypes.CDLL:
    """Return the C library of this process."""
    return ctypes.CDLL(None if os.name == "posix" else "ucrtbase")


def library_file(name: str) -> str:
    """Return the name of the file of a shared library."""
    pattern = {"darwin": "lib{}.dylib", "win32": "{}.dll"}.get(sys.platform, "lib{}.so")
    return pattern.format(name)


def file_of(address: int) -> Path:
    """Return the file from which the code at this address was loaded."""
    if os.name == "posix":
        found = _DlInfo()
        c_library().dladdr(ctypes.c_void_p(address), ctypes.byref(found))
        return Path(os.fsdecode(found.dli_fname))
    kernel: Any = ctypes.windll.kernel32  # type: ignore[attr-defined, unused-ignore]
    module, path = ctypes.c_void_p(), ctypes.create_unicode_buffer(32768)
    of_address = 0x4 | 0x2  # GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, and without a reference
    kernel.GetModuleHandleExW(of_address, ctypes.c_void_p(address), ctypes.byref(module))
    kernel.GetModuleFileNameW(module, path, len(path))
    return Path(path.value)


class _DlInfo(ctypes.Structure):
    """`Dl_info` of dlfcn.h: the file from which an address was loaded."""

    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]
