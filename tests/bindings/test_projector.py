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
from cllm.bindings.projector import _Slicer
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
    data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    bitmap = media_library().mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], data)
    return evaluated_by_the_helper(context, projector, bitmap)


def evaluated_by_the_helper(
    context: Context, projector: Projector, bitmap: Any
) -> NDArray[np.float32]:
    """The logits after a bitmap between the two texts; frees the bitmap."""
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


WITH_MROPE = ("qwen2vl", "qwen3vl")


# --- What an image becomes -----------------------------------------------------------------------
CHUNKS = {
    "gemma3": [(16, 16, False)],
    "qwen2vl": [(24, 6, True)],
    "qwen3vl": [(24, 6, True)],
    "idefics3": [(16, 16, True)] * 5,
    "llava": [(64, 64, True)],
}


def test_an_image_has_as_many_rows_and_positions_as_its_projector_gives_it(vision: Vision) -> None:
    found = [(chunk.n_tokens, chunk.n_positions, chunk.is_causal) for chunk in vision.chunks]
    assert found == CHUNKS[vision.name]
    assert vision.projector.has_vision
    assert not vision.projector.has_audio
    assert vision.projector.has_mrope == (vision.name in WITH_MROPE)


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
    if vision.name not in WITH_MROPE:
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


def check_attention_is_causal(context: Context) -> None:
    """Decode two texts that differ in their last token; the logits before it must be the same."""
    rows = []
    for seq_id, last in enumerate(b"ab", start=1):
        batch = Batch(64)
        batch.add(seq_id, [*AFTER, last], 0, n_outputs=2)
        rows.append(context.decode(batch).rows[0].copy())
    assert np.abs(rows[0] - rows[1]).max() < TOLERANCE


def test_attention_is_causal_again_after_an_image(vision: Vision, context: Context) -> None:
    decode(context, vision.projector, [BEFORE, *vision.parts])
    check_attention_is_causal(context)


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
    check_attention_is_causal(context)


def test_a_copy_of_a_sequence_with_an_image_is_restored(vision: Vision, context: Context) -> None:
    whole, _ = decode(context, vision.projector, [BEFORE, *vision.parts, AFTER])
    _, end = decode(context, vision.projector, [BEFORE, *vision.parts], 1)
    last = context.seq_pos_max(1)
    assert last is not None
    context.state_seq_set_data(context.state_seq_get_data(1), 2, n_positions=last + 1)
    restored, _ = decode(context, vision.projector, [AFTER], 2, end)
    assert np.abs(whole - restored).max() < TOLERANCE


@pytest.mark.parametrize("vision", ["qwen2vl"], indirect=True)
def test_a_part_of_an_image_follows_the_part_before_it_and_nothing_else(
    vision: Vision, context: Context
) -> None:
    """All rows of the image have one time: the positions do not tell its parts apart."""
    _, p0 = decode(context, vision.projector, [BEFORE])
    (chunk,) = vision.chunks
    rows, positions = vision.projector.encode(chunk), chunk.positions(p0)
    halves = [
        EmbeddingBatch(0, rows[some], positions[:, some], is_causal=True)
        for some in (slice(0, 12), slice(12, 24))
    ]
    with pytest.raises(PositionError):
        context.decode(EmbeddingBatch(0, rows, chunk.positions(p0 - 1), is_causal=True))
    context.decode(halves[0])
    context.set_abort(True)
    with pytest.raises(LlamaCallError, match="aborted"):
        context.decode(halves[1])
    context.set_abort(False)
    if context.seq_pos_max(0) == p0:  # the first half is there, and its place is not known any more
        with pytest.raises(PositionError):
            context.decode(halves[1])


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
    has_decoded, is_enough = threading.Event(), threading.Event()

    def encode_often() -> None:
        path = make_projector.ensure(vision.name)
        with Projector(vision.model, path, use_gpu=False) as projector:
            parts = projector.split(image(1))
            chunks = [part for part in parts if isinstance(part, MediaChunk)]
            has_decoded.wait()
            while not is_enough.is_set():
                rows = projector.encode(chunks[0])
                differences.append(float(np.abs(rows - expected).max()))
            for chunk in chunks:
                chunk.close()

    thread = threading.Thread(target=encode_often)
    thread.start()
    while len(differences) < 5 and thread.is_alive():
        decode(context, vision.projector, [AFTER], 3, 0)
        context.seq_rm(3)
        has_decoded.set()
    is_enough.set()
    thread.join()
    assert set(differences) == {0.0}
    assert len(differences) >= 5


class Closing(Exception):
    """Exception that `between` raises."""


@pytest.mark.parametrize("what", ["chunk", "projector", "encode"])
def test_between_two_slices_neither_chunk_nor_projector_is_closed_or_used(
    vision: Vision, what: str
) -> None:
    chunk = vision.chunks[0]
    acts: dict[str, Callable[[], object]] = {
        "chunk": chunk.close,
        "projector": vision.projector.close,
        "encode": lambda: vision.projector.encode(chunk),
    }
    rejected: list[InUseError] = []

    def between() -> None:
        with pytest.raises(InUseError) as caught:
            acts[what]()
        rejected.append(caught.value)

    whole = vision.projector.encode(chunk)
    assert (vision.projector.encode(chunk, between) == whole).all()
    assert len(rejected) >= 5


def parts_of_a_graph(slicer: _Slicer, n_parts: int, n_nodes: int) -> list[int]:
    """The nodes that ggml computes of each part (`ggml_backend_sched_compute_splits`)."""
    n_computed = []
    for _ in range(n_parts):
        n_computed.append(0)
        j = 0
        while j < n_nodes:
            last, needs = j, slicer._call(None, True, None)
            while not needs and last < n_nodes - 1:
                last += 1
                needs = slicer._call(None, True, None)
            n_computed[-1] += last - j + 1
            if needs and not slicer._call(None, False, None):
                break
            j = last + 1
    return n_computed


@pytest.mark.parametrize("how", ["returns False", "raises"])
def test_a_graph_in_parts_ends_in_the_part_that_is_cancelled(how: str) -> None:
    """A GPU's graph has parts for the CPU; ggml would begin each of them."""
    n_asked = 0

    def between() -> bool:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 2 and how == "raises":
            raise Closing
        return n_asked != 2

    slicer = _Slicer(4)
    with (
        pytest.raises(Closing if how == "raises" else EncodeCancelledError),
        slicer.running(between),
    ):
        assert parts_of_a_graph(slicer, 3, 12) == [8, 1, 1]
    assert n_asked == 2


def test_a_signal_that_is_lost_in_a_callback_is_no_success() -> None:
    """ctypes prints an exception that comes at the beginning of a callback, and returns 0."""
    slicer = _Slicer(1)
    with pytest.raises(EncodeCancelledError), slicer.running(lambda: True):
        slicer._call(None, True, None)  # the call that follows it is lost


def test_a_model_stays_open_while_a_projector_is_made_of_it(vision: Vision) -> None:
    with Model(make_model.ensure(PROJECTORS[vision.name].text_model, "F16")) as model:
        with model._kept_open(), pytest.raises(InUseError):
            model.close()
        assert not model.closed


# --- What is rejected --------------------------------------------------------------------------------
@pytest.mark.parametrize("vision", ["gemma3"], indirect=True)
def test_a_projector_whose_rows_depend_on_the_prompt_is_rejected(
    vision: Vision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4's rows depend on the tokens before an image, HunyuanVL's positions on the images."""
    lengths = iter([16, 16, 17])
    shapes = Projector._shapes
    monkeypatch.setattr(
        Projector, "_shapes",
        lambda self, parts: [(next(lengths), each[1]) for each in shapes(self, parts)],
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match="depend on what stands before it"):
        Projector(vision.model, vision.projector.path, use_gpu=False)


@pytest.mark.parametrize("vision", ["idefics3"], indirect=True)
def test_a_model_without_the_tokens_around_an_image_is_rejected(vision: Vision) -> None:
    with (
        Model(make_model.ensure("tiny-llama", "F16")) as model,
        pytest.raises(ModelLoadError, match="vocabulary lacks a token that the projector needs"),
    ):
        Projector(model, vision.projector.path, use_gpu=False)


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
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "doubles": ({"rows": ROWS.astype(float)}, "float64"),
    "none": ({"rows": ROWS[:0], "positions": POSITIONS[:0]}, "at least one row"),
    "not finite": ({"rows": ROWS * np.nan}, "rows is 'NaN or infinite'"),
    "fewer positions": ({"positions": POSITIONS[:3]}, r"\(4,\) or \(4, 4\)"),
    "negative": ({"positions": POSITIONS - 1}, "0 or more"),
    "backwards": ({"positions": POSITIONS[::-1]}, "each after the last"),
    "the same twice": ({"positions": np.array([0, 0, 1, 1], np.int32)}, "each after the last"),
    "a gap": ({"positions": np.array([0, 1, 2, 9], np.int32)}, "each after the last"),
    "a negative column": ({"positions": np.full((4, 4), -1, np.int32)}, "0 or more"),
    "another sequence": ({"seq_id": 256}, "seq_id is 256"),
    "more outputs than rows": ({"n_outputs": 99}, "n_outputs is 99"),
    "no flag": ({"is_causal": None}, "is_causal is None"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_rows_of_another_kind_are_rejected(kind: str) -> None:
    given, told = BAD_ROWS[kind]
    good = {"seq_id": 0, "rows": ROWS, "positions": POSITIONS, "is_causal": True}
    with pytest.raises(InvalidArgumentError, match=told):
        EmbeddingBatch(**{**good, **given})


def test_a_batch_keeps_the_values_that_were_checked(new_context: NewContext) -> None:
    with Model(make_model.ensure("tiny-llama", "F16")) as model:
        context = new_context(model=model)
        rows, positions = ROWS.copy(), POSITIONS.copy()
        batch = EmbeddingBatch(0, rows, positions, is_causal=True, n_outputs=1)
        rows[:], positions[:] = np.nan, 100
        assert np.isfinite(context.decode(batch).rows).all()
        assert context.seq_pos_max(0) == 3
        context.close()


def test_rows_of_another_width_or_kind_of_positions_are_rejected(
    vision: Vision, context: Context
) -> None:
    chunk = vision.chunks[0]
    rows = np.zeros((chunk.n_tokens, 32), np.float32)
    with pytest.raises(
        InvalidArgumentError, match=f"n_embd of rows is 32, must be {vision.model.n_embd_inp}"
    ):
        context.decode(EmbeddingBatch(0, rows, chunk.positions(0), is_causal=True))
    other = POSITIONS if context.has_mrope else np.zeros((4, 4), np.int32)
    with pytest.raises(InvalidArgumentError, match="shape of positions"):
        context.decode(
            EmbeddingBatch(
                0, np.zeros((4, vision.model.n_embd_inp), np.float32), other, is_causal=True
            )
        )


def test_an_image_continues_the_sequence(vision: Vision, context: Context) -> None:
    decode(context, vision.projector, [BEFORE])
    chunk = vision.chunks[0]
    rows = np.zeros((chunk.n_tokens, vision.model.n_embd_inp), np.float32)
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
