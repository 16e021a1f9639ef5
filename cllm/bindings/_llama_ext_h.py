"""Functions of llama.cpp's `src/llama-ext.h` for hidden states, which multi-token prediction needs.

llama.cpp does not install this header, and may change it.  Its functions have C++ names, which contain
the types of the parameters: a function with other parameters is not found.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from cllm.bindings._library import library
from cllm.errors import LibraryError

# Architectures that llama.cpp has a graph of an MTP layer for (`DECODER_MTP` in src/models), and whose other
# graphs give hidden states.  For any other it would compute its usual graph, without the weights.
ARCHITECTURES = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "glm5-next",
    "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "step35",
})  # fmt: skip
SET_EMBEDDINGS_NEXTN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
GET_EMBEDDINGS_NEXTN = "_Z26llama_get_embeddings_nextnP13llama_context"


class HiddenStates:
    """Getter and setter of hidden states.

    Raises
    ------
    LibraryError
        The library has no such functions.
    """

    def __init__(self, path: Path) -> None:
        view = ctypes.PyDLL(str(path))
        try:
            self._set: Any = view[SET_EMBEDDINGS_NEXTN]
            self._get: Any = view[GET_EMBEDDINGS_NEXTN]
        except AttributeError:
            raise LibraryError(
                f"{path} has no functions for hidden states, which multi-token prediction needs"
            ) from None
        self._set.restype, self._set.argtypes = None, (ctypes.c_void_p, *[ctypes.c_bool] * 2)
        self._get.restype = ctypes.POINTER(ctypes.c_float)
        self._get.argtypes = (ctypes.c_void_p,)

    def keep(self, context: Any, *, outputs_only: bool) -> None:
        """Let decodes of a context keep the hidden states of all rows, or of output rows only."""
        self._set(context, True, outputs_only)

    def rows(self, context: Any) -> Any:
        """Return a pointer to the kept hidden states of the last decode, in the order of the batch."""
        return self._get(context)


@functools.cache
def hidden_states() -> HiddenStates:
    """Return the functions of the loaded library."""
    return HiddenStates(library().path)
