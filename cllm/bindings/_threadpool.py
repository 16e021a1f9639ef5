"""ThreadPool: ggml's threads with another polling level, for one context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cllm.bindings import _llama_h as h
from cllm.bindings._library import Library, library
from cllm.errors import InvalidArgumentError


class ThreadPool:
    """Compute threads of one context, on this thread's processors.

    Parameters
    ----------
    n_threads : int
    poll : int
        Polling level of idle threads: 0 (sleep) to 100 (busy-wait).

    Raises
    ------
    InvalidArgumentError
        The library's compute threads are those of OpenMP, which has no such number.

    Notes
    -----
    See `ggml_threadpool_params` in ggml.h and `llama_attach_threadpool` in llama.h.
    """

    def __init__(self, n_threads: int, poll: int) -> None:
        lib = library()
        if b"OPENMP = 1" in lib.llama_print_system_info():
            limit = "None with this library: it uses OpenMP; set GOMP_SPINCOUNT instead"
            raise InvalidArgumentError("poll", poll, limit)
        kind = h.DECLARATIONS.structs["ggml_threadpool_params"]
        params = kind()
        lib.ggml_threadpool_params_init(ctypes.byref(params), n_threads)
        params.poll = poll
        new = _cpu_function(lib, b"ggml_threadpool_new")
        self._lib = lib
        self._pointer: Any = new(ctypes.byref(params))

    def of(self, make: Callable[[], Any]) -> tuple[Any, Callable[[Any], None]]:
        """Return a new context that computes with these threads, and the function that frees both."""
        try:
            context = make()
        except BaseException:
            self._free()
            raise
        pool = ctypes.cast(self._pointer, self._lib.llama_attach_threadpool.argtypes[1])
        self._lib.llama_attach_threadpool(context, pool, pool)
        return context, self._free_both

    def _free_both(self, context: Any) -> None:
        self._lib.llama_free(context)
        self._free()

    def _free(self) -> None:
        _cpu_function(self._lib, b"ggml_threadpool_free")(self._pointer)


def _cpu_function(lib: Library, name: bytes) -> Any:
    """Return a function of the CPU backend, which may be in a file of its own."""
    address = lib.ggml_backend_reg_get_proc_address(lib.ggml_backend_reg_by_name(b"CPU"), name)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
