"""AbortFlag: abort the computation of a context from any thread."""

from __future__ import annotations

import ctypes
from typing import Any

from cllm.bindings._library import library


class AbortFlag:
    """Flag that a C function reads after every graph node, without the GIL (see `Library`).  CPU only.

    Parameters
    ----------
    params : struct llama_context_params
        Parameters of the context; they get the callback.  The context must not outlive this object.
    """

    def __init__(self, params: Any) -> None:
        self._bytes = ctypes.create_string_buffer(b"\0\0", 2)
        lib = library()
        if lib.can_abort:
            params.abort_callback = lib.read_flag
            params.abort_callback_data = ctypes.addressof(self._bytes)

    def set(self, abort: bool) -> None:
        """Set or clear the flag.  Any thread."""
        self._bytes[0] = b"\1" if abort else b"\0"
