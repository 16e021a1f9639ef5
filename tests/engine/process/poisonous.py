"""Backends whose process ends at the wrong moment; run by the child of an engine with `process=True`."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import library
from cllm.bindings.projector import MediaChunk, Projector
from cllm.engine.constraint import CompiledConstraint, NamedConstraint
from cllm.engine.core.decoder import Decoder, MediaRows
from cllm.engine.core.text_encoder import TextEncoder
from cllm.engine.llama.backend import LlamaBackend
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.engine.llama.media_encoder import LlamaMediaEncoder
from cllm.engine.media import MediaInput
from cllm.engine.thread.backend import Loaded
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import ContextError


class PoisonousBackend(LlamaBackend):
    """Backend that aborts, as a GGML_ASSERT does, at the token "~" and at an image that begins with magenta."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        loaded = super().load(owned)
        (poison,) = loaded.vocabulary.tokenize("~", add_special=False)
        _watch(loaded.decoder, poison)
        if loaded.encoder is not None:
            _watch_texts(loaded.encoder, poison)
        if isinstance(loaded.media, LlamaMediaEncoder):
            _watch_images(loaded.media)
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


def _watch_texts(encoder: TextEncoder, poison: int) -> None:
    compute = encoder.compute

    def watched(texts: Sequence[Sequence[int]], n_computed: int = 0) -> NDArray[np.float32]:
        if any(poison in text for text in texts):
            os.write(2, b"GGML_ASSERT(text != poison) failed\n")
            os.abort()
        return compute(texts, n_computed)

    encoder.compute = watched  # type: ignore[method-assign]


def _watch_images(images: LlamaMediaEncoder) -> None:
    encode, encoded = images._encode, images._encoded
    poisonous = False

    def watched_encode(projector: Projector, media: MediaInput, ordinals: tuple[int, ...]) -> None:
        nonlocal poisonous
        poisonous = media.data.startswith(b"\xff\0\xff")
        encode(projector, media, ordinals)

    def watched(projector: Projector, chunk: MediaChunk) -> NDArray[np.float32]:
        if poisonous:
            os.write(2, b"GGML_ASSERT(pixel != poison) failed\n")
            os.abort()
        return encoded(projector, chunk)

    images._encode, images._encoded = watched_encode, watched  # type: ignore[method-assign]


class KilledOnceAtAnImage(LlamaBackend):
    """Backend that kills its process at the first image, at the point that `CLLM_TEST_POINT` names.

    The point is "encode", "decode" of the image's rows, or "after" it, in the next decode.
    """

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        loaded = super().load(owned)
        decoder, images = loaded.decoder, loaded.media
        assert isinstance(images, LlamaMediaEncoder)
        point, seen = os.environ["CLLM_TEST_POINT"], list[str]()
        encoded, add_media, decode = images._encoded, decoder.add_media, decoder.decode

        def watched_encode(projector: Projector, chunk: MediaChunk) -> NDArray[np.float32]:
            if point == "encode":
                _kill_once()
            return encoded(projector, chunk)

        def watched_add(media: MediaRows) -> None:
            seen.append("decode")
            add_media(media)

        def watched_decode() -> NDArray[np.float32]:
            if point in seen:
                _kill_once()
            done = decode()
            seen[:] = ["after"] if "decode" in seen else []
            return done

        images._encoded = watched_encode  # type: ignore[method-assign]
        decoder.add_media, decoder.decode = watched_add, watched_decode  # type: ignore[method-assign]
        return loaded


def _kill_once() -> None:
    marks = Path(os.environ["CLLM_TEST_MARKS"])
    if not marks.exists():
        marks.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class AbortsAtLoad(LlamaBackend):
    """Backend that aborts while it loads, as with a damaged file."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        os.write(2, b"GGML_ASSERT(file is whole) failed\n")
        os.abort()


class AbortsAlways(LlamaBackend):
    """Backend that loads, and kills its process in the first decode."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        loaded = super().load(owned)

        def dies() -> NDArray[np.float32]:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive")

        loaded.decoder.decode = dies  # type: ignore[method-assign]
        return loaded


class SegfaultsInDecode(LlamaBackend):
    """Backend that crashes inside `llama_decode`, at random in 1 of 50 decodes of several sequences.

    A decode of one sequence never crashes: the engine would take that request for the cause.
    """

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        loaded = super().load(owned)
        decoder = loaded.decoder
        assert isinstance(decoder, LlamaDecoder)
        libllama = ctypes.CDLL(str(library().path))
        set_callback = libllama.llama_set_abort_callback
        set_callback.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        add, decode, draw = decoder.add, decoder.decode, random.Random()
        seq_ids = set[int]()

        def watched_add(seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
            seq_ids.add(seq_id)
            return add(seq_id, tokens, p0, n_outputs=n_outputs)

        def may_crash() -> NDArray[np.float32]:
            is_alone = len(seq_ids) == 1
            seq_ids.clear()
            if not is_alone and draw.random() < 1 / 50:
                # The abort callback runs after every node of the graph.  `strlen` reads at address 8.
                strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
                set_callback(decoder.context._pointer, strlen, 8)
            return decode()

        decoder.add, decoder.decode = watched_add, may_crash  # type: ignore[method-assign]
        return loaded


class LoadsNotAtOnce(LlamaBackend):
    """Backend whose second process aborts while it loads, and whose third finds no memory for a context."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        marks = Path(os.environ["CLLM_TEST_MARKS"])
        n_before = marks.stat().st_size if marks.exists() else 0
        with marks.open("a") as file:
            file.write("x")
        if n_before == 1:
            os.abort()
        if n_before == 2:
            raise ContextError("no memory for the context")
        return super().load(owned)


class CompilesForEver(LlamaBackend):
    """Backend that never returns a compiled constraint."""

    def compile(
        self, vocabulary: EngineVocabulary, constraint: NamedConstraint
    ) -> CompiledConstraint:
        """See `LlamaBackend`."""
        threading.Event().wait()
        raise AssertionError("compiled")


class LoadsAgainWhenLet(LlamaBackend):
    """Backend that loads at once, or when the other side closes the FIFO at `CLLM_TEST_MARKS`."""

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        if (gate := Path(os.environ["CLLM_TEST_MARKS"])).exists():
            gate.read_bytes()
        return super().load(owned)
