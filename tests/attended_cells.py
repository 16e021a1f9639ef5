"""Count the KV cells that llama.cpp's attention visits, by its callback for each node of a graph."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cllm.bindings import library

# Of the first layer, as the graph of attention names them: a permuted view of keys, and one of queries.
KEYS, QUERIES = b"cache_k_l0 (view) (permuted)", b"Qcur-0 (view) (permuted)"
NE_OFFSET = 16  # of `ggml_tensor.ne`: behind its type and its buffer
ON_NODE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


@contextmanager
def attended_cells(monkeypatch: Any) -> Iterator[list[tuple[int, int]]]:
    """Yield a list that gets (rows, cells visited by each) for each decode of contexts made in the block."""
    lib, found, n_rows = library(), list[tuple[int, int]](), [0]
    (base,) = Path(lib.path).resolve().parent.glob("libggml-base.*")
    get_name = ctypes.CDLL(str(base)).ggml_get_name
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    def visit(tensor: int, is_question: bool, _data: int | None) -> bool:
        if is_question and (name := get_name(tensor)) in (KEYS, QUERIES):
            _, n, _, n_streams = (ctypes.c_int64 * 4).from_address(tensor + NE_OFFSET)
            if name == QUERIES:
                n_rows[0] = n * n_streams
            else:
                found.append((n_rows[0], n))
        return False

    on_node = ON_NODE(visit)
    make_params = lib.llama_context_default_params

    def with_callback() -> Any:
        params = make_params()
        # In llama.h `cb_eval` and its argument stand before `type_k`.
        place = (
            ctypes.addressof(params)
            + type(params).type_k.offset
            - 2 * ctypes.sizeof(ctypes.c_void_p)
        )
        ctypes.c_void_p.from_address(place).value = ctypes.cast(on_node, ctypes.c_void_p).value
        return params

    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_context_default_params", with_callback)
        yield found
