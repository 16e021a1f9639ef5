"""Whether the logits of a row are the same to the bit whatever is computed with it: tried, not assumed.

`deterministic` chooses settings under which every product of llama.cpp's CPU backend is computed row
by row in one order (docs/determinism.md).  Which kernels a model meets depends on its types, its
architecture and the CPU; so a few decodes in different shapes are compared before a promise is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Context, Model
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.engine.llama.loras import LlamaLoras
from cllm.engine.llama.padded_decoder import PaddedDecoder
from cllm.errors import InvalidArgumentError

# llama.cpp takes K-quants by tiles from 8 rows on, unless this says 0 before its first product.
TILED_PRODUCTS = "GGML_CPU_TILED_MM"
N_TOKENS, N_LAST = 24, 3
N_TEXTS = 4  # one alone may be lucky
N_COMPANY = 8  # with it, more rows than any kernel takes one by one
_AT_THE_END = (N_TOKENS - N_LAST, *[1] * N_LAST)


class Shape(NamedTuple):
    """How the tokens are cut, how many sequences are beside them, how many of the rows are outputs."""

    cut: tuple[int, ...]
    n_others: int = 0
    n_outputs: int = 1


# An engine whose one sequence never has company gives the same answers as one of many.
SHAPES: dict[str, Shape] = {
    "at once": Shape((N_TOKENS,)),
    "with more output rows": Shape((N_TOKENS,), n_outputs=N_COMPANY),
    "one by one at the end": Shape(_AT_THE_END),
    "in pieces": Shape((7, 2, N_TOKENS - N_LAST - 9, *[1] * N_LAST)),
    "beside one other": Shape(_AT_THE_END, n_others=1),
    "beside many others": Shape(_AT_THE_END, n_others=N_COMPANY),
}


def deterministic_decoder(
    model: Model,
    make_context: Callable[[], Context],
    n_batch: int,
    loras: LlamaLoras,
    *,
    needs_padding: bool,
) -> LlamaDecoder:
    """A decoder whose logits have been the same in every shape.

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
    # llama.cpp reads it once, before its first product; nobody else is to see it.
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
            differing = shapes_that_differ(decoder)
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


def shapes_that_differ(decoder: LlamaDecoder) -> list[str]:
    """The names of the shapes in which the last logits of a text are not those of the first shape."""
    n_company = min(decoder.context.n_seq_max - 1, decoder.n_batch // 2)
    differing: dict[str, None] = {}
    for text in range(N_TEXTS):
        reference = None
        for name, shape in SHAPES.items():
            logits = _last_logits(decoder, text, shape, min(shape.n_others, n_company))
            if reference is None:
                reference = logits
            elif not np.array_equal(logits, reference, equal_nan=True):
                differing.setdefault(name)
    return list(differing)


def _last_logits(
    decoder: LlamaDecoder, text: int, shape: Shape, n_others: int
) -> NDArray[np.float32]:
    """Logits of the last of some tokens; the memory is empty before and after."""
    n_vocab = decoder.n_vocab
    tokens = [(7919 * i * (text + 1) + 31 + 977 * text) % n_vocab for i in range(N_TOKENS)]
    logits = np.empty(0, np.float32)
    for tick, (start, end) in enumerate(_ranges(shape.cut, decoder.n_batch - n_others)):
        decoder.clear()
        n_outputs = min(shape.n_outputs, end - start, decoder.n_outputs_max - n_others)
        last = decoder.add(0, tokens[start:end], start, n_outputs=n_outputs)[-1]
        for seq_id in range(1, n_others + 1):
            decoder.add(seq_id, [(104729 * seq_id + tick) % n_vocab], tick, n_outputs=1)
        logits = decoder.decode()[last].copy()
    for seq_id in range(n_others + 1):
        decoder.seq_rm(seq_id)
    return logits


def _ranges(cut: tuple[int, ...], n_max: int) -> Iterator[tuple[int, int]]:
    """The pieces, none of more than `n_max` tokens."""
    for n_tokens, end in zip(cut, accumulate(cut), strict=True):
        for start in range(end - n_tokens, end, n_max):
            yield start, min(start + n_max, end)
