"""Backends whose process ends at the wrong moment; run by the child of an engine with `process=True`."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.decoder import Decoder
from cllm.engine.llama.backend import LlamaBackend
from cllm.engine.thread.backend import Loaded


class PoisonousBackend(LlamaBackend):
    """Aborts, as a GGML_ASSERT does, in the decode of one token."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        loaded = super().load(owned)
        (poison,) = loaded.vocabulary.tokenize("~", add_special=False)
        _watch(loaded.decoder, poison)
        return loaded


def _watch(decoder: Decoder, poison: int) -> None:
    add, decode, batch = decoder.add, decoder.decode, list[int]()

    def watched_add(seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        batch.extend(tokens)
        return add(seq_id, tokens, p0, n_outputs=n_outputs)

    def watched_decode() -> NDArray[np.float32]:
        if poison in batch:
            os.write(2, b"GGML_ASSERT(token != poison) failed\n")
            os.abort()
        batch.clear()
        return decode()

    decoder.add, decoder.decode = watched_add, watched_decode  # type: ignore[method-assign]


class AbortsAtLoad(LlamaBackend):
    """As a damaged file does."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        os.write(2, b"GGML_ASSERT(file is whole) failed\n")
        os.abort()


class AbortsAlways(LlamaBackend):
    """Loads, and ends with the first decode, whosever it is."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        loaded = super().load(owned)

        def dies() -> NDArray[np.float32]:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive")

        loaded.decoder.decode = dies  # type: ignore[method-assign]
        return loaded
