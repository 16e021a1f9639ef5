"""Test if the logits of a row are the same to the bit in any batch.

`deterministic` chooses settings under which every product of llama.cpp's CPU backend is computed row
by row in one order (docs/determinism.md).  The kernels depend on the model's types, its architecture and
the CPU.  Therefore, loading a model ends with a test: a few decodes in different shapes are compared.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cllm.bindings import Context, Model, library
from cllm.engine.llama.architecture_faults import UNSTEADY, architecture_of
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.engine.llama.loras import LlamaLoras
from cllm.engine.llama.padded_decoder import PaddedDecoder
from cllm.engine.llama.shapes import are_equal, shapes_that_differ
from cllm.errors import InvalidArgumentError

# An environment variable.  llama.cpp multiplies K-quants by tiles from 8 rows on (some from 24 on,
# see `tools/native/change_llama.py`), unless it is 0 at the first product.
TILED_PRODUCTS = "GGML_CPU_TILED_MM"
_lock = threading.Lock()
_n_users = 0  # running blocks of `without_tiles`
_before: str | None = None  # value of the variable before the first of them
_are_tiles_off: bool | None = None  # value that llama.cpp has read; None: not read yet


@contextmanager
def without_tiles(has_tiled_matrix: bool, setting: tuple[str, bool]) -> Iterator[None]:
    """Set `GGML_CPU_TILED_MM=0` in the block, so that llama.cpp multiplies no matrix by tiles.

    llama.cpp reads the variable once, in the first decode of the process that has such a matrix.

    Parameters
    ----------
    has_tiled_matrix : bool
        True if the model has matrices that llama.cpp would multiply by tiles.
    setting : (str, bool)
        Name and value of the setting that asks for this, for an error.

    Raises
    ------
    InvalidArgumentError
        The model has such matrices, and llama.cpp has read another value in this process before.
    """
    global _n_users, _before, _are_tiles_off
    with _lock:
        if not _n_users:
            _before = os.environ.get(TILED_PRODUCTS)
            if _are_tiles_off is None and library().n_computed:
                _are_tiles_off = _before == "0"
        if has_tiled_matrix and _are_tiles_off is False:
            name, value = setting
            raise InvalidArgumentError(
                name, value, f"{not value} with K-quants or IQ-quants after another engine of "
                f"this process has computed; set {TILED_PRODUCTS}=0 when it starts",
            )  # fmt: skip
        _n_users += 1
        os.environ[TILED_PRODUCTS] = "0"
    n_computed_before = library().n_computed
    try:
        yield
    finally:
        with _lock:
            if _are_tiles_off is None and library().n_computed > n_computed_before:
                _are_tiles_off = True
            _n_users -= 1
            if not _n_users:  # other code must not see the 0
                os.environ.pop(TILED_PRODUCTS)
                if _before is not None:
                    os.environ[TILED_PRODUCTS] = _before


def deterministic_decoder(
    model: Model,
    make_context: Callable[[], Context],
    n_batch: int,
    loras: LlamaLoras,
    *,
    needs_padding: bool,
) -> LlamaDecoder:
    """Return a decoder whose logits were equal, to the bit, in batches of every shape.

    Call it in a block of `without_tiles`.

    Parameters
    ----------
    needs_padding : bool
        True if the model or an adapter has matrices of F16 or F32.

    Raises
    ------
    InvalidArgumentError
        The model is on a GPU, its architecture is in `UNSTEADY`, or logits differ; names the shapes.
    """
    if model.is_on_gpu:
        raise InvalidArgumentError(
            "deterministic", True, "False where a GPU computes: it has been shown on CPUs only"
        )
    if (architecture := architecture_of(model)) in UNSTEADY:
        limit = f"False with {architecture}: llama.cpp gives one row different logits at times"
        raise InvalidArgumentError("deterministic", True, limit)
    differing: list[str] = []
    kinds = [PaddedDecoder] if needs_padding else [LlamaDecoder, PaddedDecoder]
    if model.has_state:  # a state cannot remove the padding rows
        kinds = [LlamaDecoder]
    for kind in kinds:
        decoder = kind(make_context, n_batch, loras)
        try:
            decoder.set_loras(tuple(sorted((i.name, i.scale or 1.0) for i in loras.infos)))
            differing = shapes_that_differ(decoder, are_equal, is_long=True)
        except BaseException:
            decoder.close()
            raise
        if not differing:
            return decoder
        decoder.close()
    raise InvalidArgumentError(
        "deterministic", True, f"False with this model on this machine: logits of a row differ "
        f"{', '.join(differing)}",
    )  # fmt: skip
