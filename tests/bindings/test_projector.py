"""Projector: an image becomes rows of embeddings, which a context decodes like the helper of libmtmd does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, EmbeddingBatch, MediaChunk, Model, Projector, library
from cllm.bindings import _llama_h as h
from cllm.bindings import _mtmd_h as m
from cllm.bindings._media_library import media_library
from cllm.errors import (
    EncodeCancelledError,
    InUseError,
    InvalidArgumentError,
    LlamaCallError,
    ModelLoadError,
    PositionError,
    WrongThreadError,
)
from tests.bindings.conftest import NewContext, error_in_another_thread
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

TOLERANCE = 1e-2
BEFORE, AFTER = list(b"look: "), list(b" what?")
Pixels = NDArray[np.uint8]


def image(seed: int, height: int = 64, width: int = 96) -> Pixels:
    """Random pixels."""
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8)


@dataclass
class Vision:
    """A text model, its projector, and what it makes of one image."""

    name: str
    model: Model
    projector: Projector
    parts: list[MediaChunk | list[int]]

    @property
    def chunks(self) -> list[MediaChunk]:
        return [part for part in self.parts if isinstance(part, MediaChunk)]

    def split(self, pixels: Pixels) -> list[MediaChunk | list[int]]:
        """The parts of another image; they are closed with the others."""
        parts = self.projector.split(pixels)
        self.others += [part for part in parts if isinstance(part, MediaChunk)]
        return parts

    def __post_init__(self) -> None:
        self.others: list[MediaChunk] = []


@pytest.fixture(scope="module", params=PROJECTORS)
def vision(request: pytest.FixtureRequest) -> Iterator[Vision]:
    name = request.param
    with Model(make_model.ensure(PROJECTORS[name].text_model, "F16")) as model:
        path = make_projector.ensure(name)
        with Projector(model, path, use_gpu=False, slice_nodes=8) as projector:
            found = Vision(name, model, projector, projector.split(image(1)))
            yield found
            for chunk in found.chunks + found.others:
                chunk.close()


@pytest.fixture(params=[True, False], ids=["unified", "per sequence"])
def context(request: pytest.FixtureRequest, new_context: NewContext, vision: Vision) -> Context:
    return new_context(
        model=vision.model, n_ctx=2048, n_batch=256, n_ubatch=256, kv_unified=request.param
    )


def decode(
    context: Context,
    projector: Projector,
    parts: list[MediaChunk | list[int]],
    seq_id: int = 0,
    p0: int = 0,
    piece: int = 256,
) -> tuple[NDArray[np.float32], int]:
    """The logits after tokens and chunks, and the position after them; causal chunks in pieces."""
    rows = np.empty(0, np.float32)
    for part in parts:
        if not isinstance(part, MediaChunk):
            batch = Batch(256)
            batch.add(seq_id, part, p0, n_outputs=1)
            rows, p0 = context.decode(batch).rows[0].copy(), p0 + len(part)
            continue
        embeddings, positions = projector.encode(part), part.positions(p0)
        step = piece if part.is_causal else part.n_tokens
        for start in range(0, part.n_tokens, step):
            some = slice(start, min(start + step, part.n_tokens))
            rows = context.decode(
                EmbeddingBatch(
                    seq_id, embeddings[some], positions[..., some],
                    is_causal=part.is_causal, n_outputs=1,
                )
            ).rows[0].copy()  # fmt: skip
        p0 += part.n_positions
    return rows, p0


def joined(parts: list[MediaChunk | list[int]]) -> list[MediaChunk | list[int]]:
    """The parts with tokens that follow each other in one batch, as libmtmd has them."""
    found: list[MediaChunk | list[int]] = []
    for part in parts:
        if found and isinstance(part, list) and isinstance(found[-1], list):
            found[-1] = found[-1] + part
        else:
            found.append(part)
    return found


def by_the_helper(context: Context, projector: Projector, pixels: Pixels) -> NDArray[np.float32]:
    """The logits after the same prompt by `mtmd_helper_eval_chunks`, which cllm does not use."""
    lib = media_library()
    evaluate = ctypes.CDLL(str(lib.path)).mtmd_helper_eval_chunks
    types = m.DECLARATIONS.types
    p = ctypes.POINTER
    evaluate.argtypes = [
        p(types["struct mtmd_context"]), p(types["struct llama_context"]),
        p(types["struct mtmd_input_chunks"]), ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
        ctypes.c_bool, p(ctypes.c_int32),
    ]  # fmt: skip
    text, part = (m.DECLARATIONS.structs[f"mtmd_input_{name}"] for name in ("text", "part"))
    bitmap = lib.mtmd_bitmap_init(
        pixels.shape[1], pixels.shape[0], pixels.ctypes.data_as(p(ctypes.c_uint8))
    )
    sides = [text(bytes(tokens), len(tokens), False, False) for tokens in (BEFORE, AFTER)]
    parts = [
        part(text=ctypes.pointer(sides[0])), part(bitmap=bitmap), part(text=ctypes.pointer(sides[1]))
    ]  # fmt: skip
    chunks = lib.mtmd_input_chunks_init()
    pointers = (p(part) * 3)(*map(ctypes.pointer, parts))
    assert lib.mtmd_tokenize_from_parts(projector._pointer, chunks, pointers, 3, False) == 0
    end = ctypes.c_int32()
    code = evaluate(
        projector._pointer, context._pointer, chunks, 0, 0, 256, True, ctypes.byref(end)
    )
    assert code == 0
    data = context._lib.llama_get_logits_ith(context._pointer, -1)
    found = np.ctypeslib.as_array(data, (context.n_vocab,)).copy()
    lib.mtmd_input_chunks_free(chunks)
    lib.mtmd_bitmap_free(bitmap)
    return found


@pytest.fixture
def logits_ith(context: Context) -> None:
    """A function that cllm does not call, for the helper."""
    function = ctypes.PyDLL(str(context._lib.path)).llama_get_logits_ith
    function.argtypes = [
        ctypes.POINTER(h.DECLARATIONS.types["struct llama_context"]),
        ctypes.c_int32,
    ]
    function.restype = ctypes.POINTER(ctypes.c_float)
    context._lib.__dict__.setdefault("llama_get_logits_ith", function)


# --- What an image becomes -----------------------------------------------------------------------
CHUNKS = {
    "gemma3": [(16, 16, False)],
    "qwen2vl": [(24, 6, True)],
    "idefics3": [(16, 16, True)] * 5,
    "llava": [(64, 64, True)],
}


def test_an_image_has_as_many_rows_and_positions_as_its_projector_gives_it(vision: Vision) -> None:
    found = [(chunk.n_tokens, chunk.n_positions, chunk.is_causal) for chunk in vision.chunks]
    assert found == CHUNKS[vision.name]
    assert vision.projector.has_vision
    assert not vision.projector.has_audio
    assert vision.projector.has_mrope == (vision.name == "qwen2vl")


def test_chunks_can_be_counted_without_pixels(vision: Vision) -> None:
    parts = vision.projector.split((64, 96))
    counted = [part for part in parts if isinstance(part, MediaChunk)]
    assert [each.n_tokens for each in counted] == [each.n_tokens for each in vision.chunks]
    with pytest.raises(LlamaCallError, match=r"mtmd_batch_encode returned 1.*placeholder"):
        vision.projector.encode(counted[0])
    for each in counted:
        each.close()


def test_positions_follow_what_stands_before_the_image(vision: Vision) -> None:
    chunk = vision.chunks[0]
    found = chunk.positions(7)
    if vision.name != "qwen2vl":
        assert found.tolist() == list(range(7, 7 + chunk.n_tokens))
        return
    time, row, column, fourth = found.tolist()
    assert time == [7] * 24
    assert row == [7 + i // 6 for i in range(24)]
    assert column == [7 + i % 6 for i in range(24)]
    assert fourth == [0] * 24


# --- Decoding ------------------------------------------------------------------------------------
@pytest.mark.usefixtures("logits_ith")
def test_logits_are_those_of_libmtmds_helper(vision: Vision, context: Context) -> None:
    ours, _ = decode(context, vision.projector, joined([BEFORE, *vision.parts, AFTER]))
    context.memory_clear()
    theirs = by_the_helper(context, vision.projector, image(1))
    assert (ours == theirs).all()


def test_the_same_image_gives_the_same_logits_and_another_gives_others(
    vision: Vision, context: Context
) -> None:
    first, _ = decode(context, vision.projector, [BEFORE, *vision.parts, AFTER])
    again, _ = decode(context, vision.projector, [BEFORE, *vision.parts, AFTER], 1)
    other, _ = decode(context, vision.projector, [BEFORE, *vision.split(image(2)), AFTER], 2)
    assert np.abs(first - again).max() < TOLERANCE
    assert np.abs(first - other).max() > 0.1


def test_a_prefix_with_an_image_is_shared_and_only_the_text_after_it_computed(
    vision: Vision, context: Context
) -> None:
    whole, _ = decode(context, vision.projector, [BEFORE, *vision.parts, AFTER])
    _, end = decode(context, vision.projector, [BEFORE, *vision.parts], 1)
    context.seq_cp(1, 2)
    shared, _ = decode(context, vision.projector, [AFTER], 2, end)
    assert np.abs(whole - shared).max() < TOLERANCE


def test_a_causal_image_may_be_decoded_in_pieces(vision: Vision, context: Context) -> None:
    whole, end = decode(context, vision.projector, [BEFORE, *vision.parts, AFTER])
    pieces, same_end = decode(context, vision.projector, [BEFORE, *vision.parts, AFTER], 1, piece=5)
    assert np.abs(whole - pieces).max() < TOLERANCE
    assert end == same_end


def test_attention_is_causal_again_after_an_image(vision: Vision, context: Context) -> None:
    """Of text, each row sees the rows before it: the first logits do not change with the last token."""
    decode(context, vision.projector, [BEFORE, *vision.parts])
    rows = []
    for seq_id, last in enumerate(b"ab", start=1):
        batch = Batch(64)
        batch.add(seq_id, [*AFTER, last], 0, n_outputs=2)
        rows.append(context.decode(batch).rows[0].copy())
    assert np.abs(rows[0] - rows[1]).max() < TOLERANCE


def test_a_failed_decode_of_an_image_leaves_attention_causal(
    vision: Vision, context: Context
) -> None:
    chunk = vision.chunks[0]
    context.set_abort(True)
    rows = np.zeros((chunk.n_tokens, context.n_embd_inp), np.float32)
    batch = EmbeddingBatch(0, rows, chunk.positions(0), is_causal=chunk.is_causal)
    with pytest.raises(LlamaCallError, match="aborted"):
        context.decode(batch)
    context.set_abort(False)
    context.memory_clear()
    test_attention_is_causal_again_after_an_image(vision, context)


# --- Encoding --------------------------------------------------------------------------------------
def test_an_encode_that_is_cut_into_slices_gives_the_same_bits(vision: Vision) -> None:
    chunk, n_slices = vision.chunks[0], 0

    def between() -> bool:
        nonlocal n_slices
        n_slices += 1
        return True

    n_computed = library().n_computed
    whole = vision.projector.encode(chunk)
    assert (vision.projector.encode(chunk, between) == whole).all()
    assert library().n_computed == n_computed + 2
    assert whole.shape == (chunk.n_tokens, vision.model.n_embd_inp)
    assert n_slices >= 5


def test_an_encode_is_cancelled_between_two_slices(vision: Vision) -> None:
    chunk, n_slices = vision.chunks[0], 0

    def between() -> bool:
        nonlocal n_slices
        n_slices += 1
        return n_slices < 3

    whole = vision.projector.encode(chunk)
    with pytest.raises(EncodeCancelledError):
        vision.projector.encode(chunk, between)
    assert n_slices == 3
    assert (vision.projector.encode(chunk) == whole).all()


def test_an_exception_between_two_slices_is_raised_and_ends_the_encode(vision: Vision) -> None:
    def between() -> bool:
        raise ZeroDivisionError("between")

    with pytest.raises(ZeroDivisionError, match="between"):
        vision.projector.encode(vision.chunks[0], between)
    assert np.isfinite(vision.projector.encode(vision.chunks[0])).all()


def test_images_are_encoded_in_another_thread_while_text_is_decoded(
    vision: Vision, context: Context
) -> None:
    """A projector belongs to the thread that made it; the model belongs to this one."""
    expected = vision.projector.encode(vision.chunks[0])
    differences: list[float] = []

    def encode_often() -> None:
        path = make_projector.ensure(vision.name)
        with Projector(vision.model, path, use_gpu=False) as projector:
            parts = projector.split(image(1))
            chunks = [part for part in parts if isinstance(part, MediaChunk)]
            for _ in range(10):
                rows = projector.encode(chunks[0])
                differences.append(float(np.abs(rows - expected).max()))
            for chunk in chunks:
                chunk.close()

    thread = threading.Thread(target=encode_often)
    thread.start()
    n_decodes = 0
    while thread.is_alive() and n_decodes < 1000:
        decode(context, vision.projector, [AFTER], 3, 0)
        context.seq_rm(3)
        n_decodes += 1
    thread.join()
    assert differences == [0.0] * 10


# --- What is rejected --------------------------------------------------------------------------------
def test_a_projector_of_another_model_is_rejected_with_both_sizes(vision: Vision) -> None:
    with Model(make_model.ensure("qwen3-wide", "F16")) as model, pytest.raises(
        ModelLoadError, match=r"mismatch between text model \(n_embd = 1024\) and mmproj"
    ):  # fmt: skip
        Projector(model, vision.projector.path)


@pytest.mark.parametrize("vision", ["idefics3"], indirect=True)
def test_a_model_without_the_tokens_around_an_image_is_rejected(vision: Vision) -> None:
    with (
        Model(make_model.ensure("tiny-llama", "F16")) as model,
        Projector(model, vision.projector.path, use_gpu=False) as projector,
        pytest.raises(ModelLoadError, match="vocabulary lacks a token that the projector needs"),
    ):
        projector.split(image(1))


@pytest.mark.parametrize("vision", ["gemma3"], indirect=True)
def test_an_image_whose_rows_attend_to_each_other_needs_a_batch_that_holds_it(
    vision: Vision, new_context: NewContext
) -> None:
    small = new_context(model=vision.model, n_ubatch=8)
    with pytest.raises(InvalidArgumentError, match=r"\(n_ubatch\) is 16, must be 1 to 8"):
        decode(small, vision.projector, vision.parts[1:2])
    logits, _ = decode(small, vision.projector, [AFTER])
    assert np.isfinite(logits).all()


BAD_PIXELS: dict[str, tuple[Any, str]] = {
    "floats": (np.zeros((8, 8, 3), np.float32), "float32"),
    "grey": (np.zeros((8, 8), np.uint8), r"\(8, 8\)"),
    "four channels": (np.zeros((8, 8, 4), np.uint8), r"\(8, 8, 4\)"),
    "no rows": (np.zeros((0, 8, 3), np.uint8), "height is 0"),
    "too wide": ((8, 16385), "width is 16385, must be 1 to 16384"),
    "too many": ((16384, 4097), "pixels is 67125248, must be 1 to 67108864"),
    "bytes": (b"\x89PNG", "must be an array"),
    "negative": ((-1, 8), "height is -1"),
}


@pytest.mark.parametrize("vision", ["gemma3"], indirect=True)
@pytest.mark.parametrize("kind", BAD_PIXELS)
def test_pixels_of_another_kind_are_rejected(vision: Vision, kind: str) -> None:
    pixels, told = BAD_PIXELS[kind]
    with pytest.raises(InvalidArgumentError, match=told):
        vision.projector.split(pixels)


ROWS = np.zeros((4, 64), np.float32)
POSITIONS = np.arange(4, dtype=np.int32)
BAD_ROWS: dict[str, tuple[Callable[[], EmbeddingBatch], str]] = {
    "doubles": (lambda: EmbeddingBatch(0, ROWS.astype(float), POSITIONS), "float64"),
    "none": (lambda: EmbeddingBatch(0, ROWS[:0], POSITIONS[:0]), "at least one row"),
    "not finite": (lambda: EmbeddingBatch(0, ROWS * np.nan, POSITIONS), "rows is 'NaN or infinite'"),
    "fewer positions": (lambda: EmbeddingBatch(0, ROWS, POSITIONS[:3]), r"\(4,\) or \(4, 4\)"),
    "negative": (lambda: EmbeddingBatch(0, ROWS, POSITIONS - 1), "position is -1"),
    "backwards": (lambda: EmbeddingBatch(0, ROWS, POSITIONS[::-1].copy()), "position is 0, must be 3"),
    "another sequence": (lambda: EmbeddingBatch(256, ROWS, POSITIONS), "seq_id is 256"),
    "two outputs": (lambda: EmbeddingBatch(0, ROWS, POSITIONS, n_outputs=2), "n_outputs is 2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_rows_of_another_kind_are_rejected(kind: str) -> None:
    make, told = BAD_ROWS[kind]
    with pytest.raises(InvalidArgumentError, match=told):
        make()


def test_rows_of_another_width_or_kind_of_positions_are_rejected(
    vision: Vision, context: Context
) -> None:
    chunk = vision.chunks[0]
    rows = np.zeros((chunk.n_tokens, 32), np.float32)
    with pytest.raises(InvalidArgumentError, match="n_embd of rows is 32, must be 64"):
        context.decode(EmbeddingBatch(0, rows, chunk.positions(0)))
    other = np.zeros((4, 4) if not context.has_mrope else 4, np.int32)
    with pytest.raises(InvalidArgumentError, match="shape of positions"):
        context.decode(EmbeddingBatch(0, ROWS, other))


def test_an_image_continues_the_sequence(vision: Vision, context: Context) -> None:
    decode(context, vision.projector, [BEFORE])
    chunk = vision.chunks[0]
    rows = np.zeros((chunk.n_tokens, 64), np.float32)
    with pytest.raises(PositionError):
        context.decode(EmbeddingBatch(0, rows, chunk.positions(2), is_causal=chunk.is_causal))


def test_a_chunk_is_encoded_by_its_own_projector(vision: Vision) -> None:
    with (
        Projector(vision.model, vision.projector.path, use_gpu=False) as other,
        pytest.raises(InvalidArgumentError, match="a chunk of this projector"),
    ):
        other.encode(vision.chunks[0])


def test_a_projector_belongs_to_its_thread_and_outlives_its_chunks(vision: Vision) -> None:
    error = error_in_another_thread(lambda: vision.projector.encode(vision.chunks[0]))
    assert isinstance(error, WrongThreadError)
    with pytest.raises(InUseError, match="MediaChunk"):
        vision.projector.close()
    with pytest.raises(InUseError, match="Projector"):
        vision.model.close()


@pytest.mark.parametrize("vision", ["gemma3"], indirect=True)
def test_a_file_that_is_no_projector_is_rejected(vision: Vision) -> None:
    with pytest.raises(ModelLoadError, match="cannot load"):
        Projector(vision.model, vision.model.path)
    with pytest.raises(ModelLoadError, match="CLIP cannot be used as main model"):
        Model(vision.projector.path)
