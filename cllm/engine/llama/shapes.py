"""Batches of different shapes with the same tokens: in pieces, beside other sequences, with more output rows.

The logits of the last token must agree: to the bit for `deterministic`, otherwise up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Model
from cllm.engine.config import AUTO, EngineConfig
from cllm.engine.llama.decoder import LlamaDecoder, make_context
from cllm.engine.llama.devices import placement_of

N_TOKENS, N_LAST = 24, 3
N_TEXTS = 4  # one text might agree by chance
N_COMPANY = 8  # other sequences: enough rows for kernels that compute several rows at once
_AT_THE_END = (N_TOKENS - N_LAST, *[1] * N_LAST)
MAX_DIFFERENCE = 0.5  # between log probabilities of a likely token
MIN_MARGIN = 0.1  # by which the most likely token has to lead, to be the same everywhere
N_LIKELY = 10
N_CTX, N_BATCH = 1024, 128  # of a context that tries them
N_CTX_SEQ = 64  # at least, of each sequence
N_LONG = 80  # more tokens than any kernel takes at once
N_UNLIKE_MAX = 1  # texts that may differ: rounding may choose other experts of a mixture

Logits = NDArray[np.float32]


class BatchShape(NamedTuple):
    """Way in which a text is computed: its tokens in each batch (`cut`), other sequences, its output rows.

    In each batch, up to `n_outputs` last rows of the text are output rows, and the last row of each other
    sequence.  With `is_even`, each other sequence has as many rows as the text, otherwise one.  With `one_waits`, the
    first other sequence has rows in the first batch only.
    """

    cut: tuple[int, ...]
    n_others: int = 0
    n_outputs: int = 1
    is_even: bool = False
    one_waits: bool = False


# In an engine of one sequence, the shapes with others are computed without them.
SHAPES: dict[str, BatchShape] = {
    "at once": BatchShape((N_TOKENS,)),
    "with more output rows": BatchShape((N_TOKENS,), n_outputs=N_COMPANY),
    "one by one at the end": BatchShape(_AT_THE_END),
    "in pieces": BatchShape((7, 2, N_TOKENS - N_LAST - 9, *[1] * N_LAST)),
    "beside one other": BatchShape(_AT_THE_END, n_others=1),
    "beside many others": BatchShape(_AT_THE_END, n_others=N_COMPANY),
    "beside the prompts of others": BatchShape(_AT_THE_END, n_others=2, is_even=True),
    "around one that waits": BatchShape(_AT_THE_END, n_others=2, one_waits=True),
}
# Shapes of one longer text, for the test to the bit only.
LONG_SHAPES: dict[str, BatchShape] = {
    "at once": BatchShape((N_LONG,)),
    "in pieces of a long text": BatchShape((30, N_LONG - 31, 1)),
}


def shapes_that_differ(
    decoder: LlamaDecoder,
    agree: Callable[[Logits, Logits], bool],
    n_most: int = 0,
    *,
    is_long: bool = False,
) -> list[str]:
    """Return the names of the shapes whose last logits do not agree with those of the first shape.

    Parameters
    ----------
    agree : callable
        Returns True if two rows of logits agree.
    n_most : int
        Number of texts in which a shape may differ.
    is_long : bool
        Try a longer text, too, if sequences may have one.
    """
    n_company = min(decoder.context.n_seq_max - 1, decoder.n_batch // 2)
    texts = [SHAPES] * N_TEXTS
    if is_long and decoder.n_ctx_seq > N_LONG:
        texts.append(LONG_SHAPES)
    n_differing = dict.fromkeys([*SHAPES, *LONG_SHAPES], 0)
    for text, shapes in enumerate(texts):
        reference = None
        for name, shape in shapes.items():
            logits = _last_logits(decoder, text, shape, min(shape.n_others, n_company))
            if reference is None:
                reference = logits
            elif not agree(logits, reference):
                n_differing[name] += 1
    return [name for name, n in n_differing.items() if n > n_most]


def are_equal(logits: Logits, other: Logits) -> bool:
    """Return True if two rows of logits are the same to the bit."""
    return np.array_equal(logits, other, equal_nan=True)


def are_alike(logits: Logits, other: Logits) -> bool:
    """Return True if rounding may explain the difference of two rows (`MAX_DIFFERENCE`, `MIN_MARGIN`)."""
    if are_equal(logits, other):
        return True
    one, two = _log_probabilities(logits), _log_probabilities(other)
    likely = np.argsort(two)[-N_LIKELY:]
    if not np.all(np.abs(one[likely] - two[likely]) <= MAX_DIFFERENCE):  # or NaN
        return False
    margin = two[likely[-1]] - two[likely[-2]]
    return bool(margin <= MIN_MARGIN or np.argmax(one) == likely[-1])


def _log_probabilities(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    probabilities: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return probabilities


def _last_logits(
    decoder: LlamaDecoder, text: int, shape: BatchShape, n_others: int
) -> NDArray[np.float32]:
    """Return the logits of the last token of a text; the KV cache is empty before and after."""
    n_vocab = decoder.n_vocab
    tokens = [(7919 * i * (text + 1) + 31 + 977 * text) % n_vocab for i in range(sum(shape.cut))]
    logits = np.empty(0, np.float32)
    n_max = decoder.n_batch - n_others
    if shape.is_even:
        n_max = max(1, decoder.n_batch // (1 + n_others))
    for tick, (start, end) in enumerate(_ranges(shape.cut, n_max)):
        decoder.clear()
        n_outputs = min(shape.n_outputs, end - start, decoder.n_outputs_max - n_others)
        last = decoder.add(0, tokens[start:end], start, n_outputs=n_outputs)[-1]
        first, n_rows = (start, end - start) if shape.is_even else (tick, 1)
        for seq_id in range(2 if shape.one_waits and tick else 1, n_others + 1):
            others = [(104729 * seq_id + first + i) % n_vocab for i in range(n_rows)]
            decoder.add(seq_id, others, first, n_outputs=1)
        logits = decoder.decode()[last].copy()
    for seq_id in range(n_others + 1):
        decoder.seq_rm(seq_id)
    return logits


def _ranges(cut: tuple[int, ...], n_max: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each piece; a piece of more than `n_max` tokens is cut."""
    for n_tokens, end in zip(cut, accumulate(cut), strict=True):
        for start in range(end - n_tokens, end, n_max):
            yield start, min(start + n_max, end)


def misfit(config: EngineConfig) -> str | None:
    """Load the model, and return why its answers would be wrong; None if all shapes agree."""
    layouts = (False, True) if config.kv_unified == AUTO else (config.kv_unified,)
    if config.deterministic:
        layouts = (False,)
    wrong: dict[bool, list[str]] = {}
    with Model(
        config.model_path,
        n_gpu_layers=config.n_gpu_layers,
        placement=placement_of(config),
        load_mode=config.used_load_mode,
    ) as model:
        for layout in layouts:
            assert isinstance(layout, bool)
            # With all sequences of the engine: llama.cpp reserves memory for them, which may fail.
            n_ctx = N_CTX if layout else max(N_CTX, N_CTX_SEQ * config.n_seq_max)
            small = replace(config, n_ctx=n_ctx, n_batch=N_BATCH, kv_unified=layout)
            with closing(LlamaDecoder(partial(make_context, model, small), N_BATCH)) as decoder:
                if found := shapes_that_differ(decoder, are_alike, N_UNLIKE_MAX):
                    wrong[layout] = found
    if not wrong:
        return None
    layout, found = next(iter(wrong.items()))
    reason = f"llama.cpp computes other tokens with it than at once: {', '.join(found)}"
    works = [other for other in layouts if other not in wrong]
    return f"{reason} (kv_unified={layout}; kv_unified={works[0]} works)" if works else reason
