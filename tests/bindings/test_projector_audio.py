"""Projector for audio: a recording becomes rows of embeddings, which a context decodes like libmtmd's helper."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Context, MediaChunk, Model, Projector
from cllm.bindings._media_library import media_library
from cllm.bindings.projector import MAX_SAMPLES, ChunkShape
from cllm.errors import EncodeCancelledError, InvalidArgumentError, LlamaCallError
from tests.bindings.conftest import NewContext
from tests.bindings.test_projector import (
    AFTER,
    BEFORE,
    decode,
    evaluated_by_the_helper,
    joined,
    logits_ith,
)
from tools import make_model, make_projector
from tools.make_projector import AUDIO

__all__ = ["logits_ith"]  # a fixture
RATE = 16_000
Samples = NDArray[np.float32]


def recording(seed: int, n_samples: int = RATE) -> Samples:
    """A tone of a second, or of another number of samples: another one for each seed."""
    time = np.arange(n_samples) / RATE
    return (0.5 * np.sin(2 * np.pi * 300 * seed**2 * time)).astype(np.float32)


@pytest.fixture(scope="module", params=AUDIO)
def projector(request: pytest.FixtureRequest) -> Iterator[Projector]:
    name = request.param
    with (
        Model(make_model.ensure(AUDIO[name].text_model, "F16")) as model,
        Projector(model, make_projector.ensure(name), use_gpu=False, slice_nodes=8) as projector,
    ):
        yield projector


@pytest.fixture
def context(new_context: NewContext, projector: Projector) -> Context:
    model = projector._parent
    assert isinstance(model, Model)
    return new_context(model=model, n_ctx=1024, n_batch=256, n_ubatch=256)


def chunks_of(projector: Projector, samples: Samples | int) -> list[MediaChunk]:
    return [part for part in projector.split_audio(samples) if isinstance(part, MediaChunk)]


@pytest.fixture
def chunk(projector: Projector) -> Iterator[MediaChunk]:
    """A second of a recording."""
    (chunk,) = chunks_of(projector, recording(1))
    yield chunk
    chunk.close()


# --- What a recording becomes --------------------------------------------------------------------
def test_a_projector_of_audio_has_a_sample_rate_and_takes_no_images(projector: Projector) -> None:
    assert projector.has_audio
    assert not projector.has_vision
    assert projector.audio_sample_rate == RATE
    with pytest.raises(LlamaCallError, match="does not support vision"):
        projector.split(np.zeros((8, 8, 3), np.uint8))


def test_a_projector_of_images_takes_no_audio() -> None:
    with (
        Model(make_model.ensure("tiny-llama", "F16")) as model,
        Projector(model, make_projector.ensure("llava"), use_gpu=False) as projector,
    ):
        assert (projector.has_audio, projector.audio_sample_rate) == (False, 0)
        with pytest.raises(LlamaCallError, match="does not support audio"):
            projector.split_audio(recording(1))


@pytest.mark.parametrize(
    ("n_samples", "n_chunks"),
    [(2, 1), (100, 1), (29 * RATE, 1), (30 * RATE, 2), (35 * RATE, 2), (65 * RATE, 3)],
)
def test_each_30_seconds_become_a_chunk(
    projector: Projector, n_samples: int, n_chunks: int
) -> None:
    assert projector.layout_audio(n_samples) == [ChunkShape(50, 50, True)] * n_chunks
    chunks = chunks_of(projector, recording(1, n_samples))
    assert [(each.n_tokens, each.n_positions, each.is_causal) for each in chunks] == [
        (50, 50, True)
    ] * n_chunks
    for each in chunks:
        each.close()


def test_rows_of_audio_have_positions_as_tokens_have_them(
    projector: Projector, chunk: MediaChunk
) -> None:
    expected = np.arange(7, 57)
    found = chunk.positions(7)
    assert found.shape == ((4, 50) if projector.has_mrope else (50,))
    assert (found == expected).all()


# --- Decoding and encoding -----------------------------------------------------------------------
@pytest.mark.usefixtures("logits_ith")
def test_logits_are_those_of_libmtmds_helper(projector: Projector, context: Context) -> None:
    samples = recording(1)
    parts = projector.split_audio(samples)
    ours, _ = decode(context, projector, joined([BEFORE, *parts, AFTER]))
    context.memory_clear()
    floats = ctypes.POINTER(ctypes.c_float)
    bitmap = media_library().mtmd_bitmap_init_from_audio(
        len(samples), samples.ctypes.data_as(floats)
    )
    theirs = evaluated_by_the_helper(context, projector, bitmap)
    assert (ours == theirs).all()
    for part in parts:
        if isinstance(part, MediaChunk):
            part.close()


def test_another_recording_gives_other_logits(projector: Projector, context: Context) -> None:
    rows = []
    for seq_id, seed in enumerate((1, 1, 4)):
        (chunk,) = chunks_of(projector, recording(seed))
        rows.append(decode(context, projector, [BEFORE, chunk, AFTER], seq_id)[0])
        chunk.close()
    first, again, other = rows
    assert np.abs(first - other).max() > 10 * np.abs(first - again).max()
    assert np.abs(first - other).max() > 0.05


def test_an_encode_of_audio_is_cut_into_slices_and_cancelled(
    projector: Projector, chunk: MediaChunk
) -> None:
    n_slices = 0

    def between() -> bool:
        nonlocal n_slices
        n_slices += 1
        return True

    whole = projector.encode(chunk)
    assert whole.shape == (50, projector.n_embd)
    assert np.isfinite(whole).all()
    assert (projector.encode(chunk, between) == whole).all()
    assert n_slices >= 5
    with pytest.raises(EncodeCancelledError):
        projector.encode(chunk, lambda: False)
    assert (projector.encode(chunk) == whole).all()


def test_a_recording_that_is_only_counted_is_not_encoded(projector: Projector) -> None:
    """Unlike an image, libmtmd computes it as silence, and does not say so."""
    (counted,) = chunks_of(projector, RATE)
    (silent,) = chunks_of(projector, np.zeros(RATE, np.float32))
    assert (projector.encode(counted) == projector.encode(silent)).all()
    counted.close()
    silent.close()


# --- What is rejected ----------------------------------------------------------------------------
BAD_SAMPLES: dict[str, tuple[Any, str]] = {
    "doubles": (np.zeros(9), r"float64 \(9,\)', must be float32"),
    "two channels": (np.zeros((9, 2), np.float32), r"\(9, 2\)"),
    "integers": (np.zeros(9, np.int16), "int16"),
    "no samples": (np.zeros(0, np.float32), "samples is 0, must be 2 to"),
    "one sample": (np.zeros(1, np.float32), "samples is 1, must be 2 to"),
    "NaN": (np.array([0, np.nan], np.float32), "infinity or NaN"),
    "infinity": (np.array([0, -np.inf], np.float32), "infinity or NaN"),
    "too many": (MAX_SAMPLES + 1, f"samples is {MAX_SAMPLES + 1}, must be 2 to {MAX_SAMPLES}"),
    "a negative number": (-1, "samples is -1"),
    "bytes": (b"RIFF", "must be an integer"),
    "None": (None, "must be an integer"),
}


@pytest.mark.parametrize("kind", BAD_SAMPLES)
def test_samples_of_another_kind_are_rejected(projector: Projector, kind: str) -> None:
    samples, told = BAD_SAMPLES[kind]
    with pytest.raises(InvalidArgumentError, match=told):
        projector.split_audio(samples)
