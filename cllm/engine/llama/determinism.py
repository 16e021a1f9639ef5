"""Test if the logits of a row are the same to the bit in any batch.

`deterministic` chooses settings under which every product of llama.cpp's CPU backend is computed row
by row in one order (docs/determinism.md).  Which kernels a model meets depends on its types, its
architecture and the CPU; so a few decodes in different shapes are compared before a promise is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cllm.bindings import Context, Model
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.engine.llama.loras import LlamaLoras
from cllm.engine.llama.padded_decoder import PaddedDecoder
from cllm.engine.llama.shapes import are_equal, shapes_that_differ
from cllm.errors import InvalidArgumentError

# llama.cpp takes K-quants by tiles from 8 rows on, unless this says 0 before its first product.
TILED_PRODUCTS = "GGML_CPU_TILED_MM"


def deterministic_decoder(
    model: Model,
    make_context: Callable[[], Context],
    n_batch: int,
    loras: LlamaLoras,
    *,
    needs_padding: bool,
) -> LlamaDecoder:
    """Return a decoder whose logits were equal in every shape.

    Parameters
    ----------
    needs_padding : bool
        The model or an adapter has matrices of F16 or F32.

    Raises
    ------
    InvalidArgumentError
        Says in which they were not.
    """
    if model.is_on_gpu:
        raise InvalidArgumentError(
            "deterministic", True, "False where a GPU computes: it has been shown on CPUs only"
        )
    # llama.cpp reads it once, before its first product; other code must not see it.
    os.environ[TILED_PRODUCTS], before = "0", os.environ.get(TILED_PRODUCTS)
    try:
        return _tried_decoder(model, make_context, n_batch, loras, needs_padding)
    finally:
        del os.environ[TILED_PRODUCTS]
        if before is not None:
            os.environ[TILED_PRODUCTS] = before


def _tried_decoder(
    model: Model,
    make_context: Callable[[], Context],
    n_batch: int,
    loras: LlamaLoras,
    needs_padding: bool,
) -> LlamaDecoder:
    """See `deterministic_decoder`."""
    differing: list[str] = []
    kinds = [PaddedDecoder] if needs_padding else [LlamaDecoder, PaddedDecoder]
    if (
        model.has_state or model.n_swa
    ):  # what is padded must be removed again: not where memory forgets
        kinds = [LlamaDecoder]
    for kind in kinds:
        decoder = kind(make_context, n_batch, loras)
        try:
            decoder.set_loras(tuple(sorted((i.name, i.scale or 1.0) for i in loras.infos)))
            differing = shapes_that_differ(decoder, are_equal)
        except BaseException:
            decoder.close()
            raise
        if not differing:
            return decoder
        decoder.close()
    raise InvalidArgumentError(
        "deterministic", True, f"False with this model on this machine: logits of a row differ "
        f"{', '.join(differing)}; if another engine of this process has computed before, set "
        f"{TILED_PRODUCTS}=0 when it starts",
    )  # fmt: skip
