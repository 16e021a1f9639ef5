"""Projector: the encoder of images and audio of one text model, and the pieces that it cuts them into."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.bindings import _mtmd_h as m
from cllm.bindings._handle import NativeHandle
from cllm.bindings._library import forward_log, library
from cllm.bindings._media_library import media_library
from cllm.bindings.context import check_flash_attn
from cllm.bindings.model import Model, check_model_file
from cllm.checks import INT32_MAX, MAX_THREADS, check_int
from cllm.errors import (
    EncodeCancelledError,
    InUseError,
    InvalidArgumentError,
    LlamaCallError,
    ModelLoadError,
)

# Largest side of an image, in pixels.  Some preprocessors count bytes in an int.
MAX_SIDE = 1 << 14
MAX_PIXELS = 1 << 26
# One sample aborts libmtmd.  The upper limit is 35 minutes at 16 kHz.
MIN_SAMPLES, MAX_SAMPLES = 2, 1 << 25
# libmtmd multiplies the number of rows by the area of a patch, in an int.
MAX_TOKENS = 1 << 16
_TRIAL_SIZE = 64, 64


class ChunkShape(NamedTuple):
    """Size of one media chunk: see `MediaChunk`.

    Attributes
    ----------
    has_one_time : bool
        True if all its rows have the same position in the sequence, as with M-RoPE.
    """

    n_tokens: int
    n_positions: int
    is_causal: bool
    has_one_time: bool = False


class RowPositions(NamedTuple):
    """Positions of the rows of a chunk, without the chunk.  Any thread.

    Attributes
    ----------
    first, steps : ndarray
        int32, shape `(n_tokens,)` or `(4, n_tokens)`: positions after 0 others, and by how much each grows
        with every other one.
    """

    first: NDArray[np.int32]
    steps: NDArray[np.int32]

    def after(self, p0: int) -> NDArray[np.int32]:
        """Return the positions for a sequence that has `p0` positions before them."""
        p0 = check_int("p0", p0, 0, INT32_MAX - self.first.shape[-1])
        return np.ascontiguousarray(self.first + p0 * self.steps, np.int32)


class MediaChunk(NativeHandle):
    """One image, one tile of an image, or one piece of a recording, as a `Projector` prepares it; not yet encoded.

    Attributes
    ----------
    n_tokens : int
        Rows of its embeddings, and cells that they take in the KV cache.
    n_positions : int
        Positions by which a sequence grows: `n_tokens`, or fewer with M-RoPE.
    is_causal : bool
        False if each row attends to all rows of the chunk: they are decoded in one piece.
    rows_at : RowPositions
        Positions of its rows.
    """

    def __init__(self, projector: Projector, pointer: Any) -> None:
        lib = media_library()
        super().__init__(pointer, lib.mtmd_input_chunk_free, parent=projector)
        with self._closed_on_error():
            shape = _shape_of(projector._pointer, pointer)
            self.n_tokens: int = shape.n_tokens
            self.n_positions: int = shape.n_positions
            self.is_causal: bool = shape.is_causal
            self._has_mrope = projector.has_mrope
            self.rows_at: RowPositions = self._measure_positions(pointer)

    def _measure_positions(self, pointer: Any) -> RowPositions:
        lib = media_library()
        first = np.arange(self.n_tokens, dtype=np.int32)
        if not self._has_mrope:
            return RowPositions(first, np.ones_like(first))
        if lib.mtmd_input_chunk_get_type(pointer) == m.ChunkType.AUDIO:  # as tokens have them
            first = np.tile(first, (4, 1))
            return RowPositions(first, np.ones_like(first))
        tokens = lib.mtmd_input_chunk_get_tokens_image(pointer)
        of = [
            [lib.mtmd_image_tokens_get_decoder_pos(tokens, p0, i) for i in range(self.n_tokens)]
            for p0 in (0, 1)
        ]
        first, second = (
            np.array([[each.t, each.y, each.x, each.z] for each in row], np.int32).T for row in of
        )
        return RowPositions(first, second - first)

    def positions(self, p0: int) -> NDArray[np.int32]:
        """Return the positions of its rows, for a sequence that has `p0` positions before it.

        Returns
        -------
        ndarray
            int32, shape `(n_tokens,)`; with M-RoPE `(4, n_tokens)`: time, row, column, and one for
            models with a fourth part.
        """
        self._pointer  # noqa: B018  # the thread and lifetime check
        return self.rows_at.after(p0)


class Projector(NativeHandle):
    """A projector file (mmproj): libmtmd's encoder for one text model.

    Used by one thread, which may be another one than the model's.  An encode may run beside a decode.

    Parameters
    ----------
    model : Model
        The text model; kept alive, and refuses to close while the projector is open.
    path : str or Path
        A regular GGUF file of architecture "clip".
    n_threads : int
    use_gpu : bool
        Encode on a GPU, if there is one.
    image_min_tokens, image_max_tokens : int, optional
        Limits of the rows of an image, 1 to 65,536, for projectors that take any size; None takes the file's.
    flash_attn : bool, optional
        None lets libmtmd decide.
    slice_nodes : int
        Nodes of the graph between two calls of `between` (see `encode`).  0: it is never called, and
        the graph is computed in one piece.

    Attributes
    ----------
    path : str
    has_vision, has_audio : bool
        Kinds of media that it encodes.
    audio_sample_rate : int
        Samples a second of the audio that it takes; 0 if it takes none.
    has_mrope : bool
        True if rows have positions in four parts.
    n_embd : int
        Length of a row of embeddings.

    Raises
    ------
    ModelLoadError
        The file is missing, is not a projector, or is one of another model; the model has no weights, or no
        token that the projector needs; or the rows of an image depend on what stands before it (HunyuanVL,
        DeepSeek-V4).
    LibraryError
        The library has no libmtmd.

    Notes
    -----
    See `mtmd_init_from_file` in mtmd.h.  A damaged file can abort the process when it is loaded, or at
    the first encode: check files from unknown sources in a child process first.  libmtmd leaks the buffers
    of a projector of another width than the model's.
    """

    def __init__(
        self,
        model: Model,
        path: str | Path,
        *,
        n_threads: int = 2,
        use_gpu: bool = True,
        image_min_tokens: int | None = None,
        image_max_tokens: int | None = None,
        flash_attn: bool | None = None,
        slice_nodes: int = 0,
    ) -> None:
        path = str(path)
        check_model_file(path)
        lib = media_library()
        self._slicer = _Slicer(check_int("slice_nodes", slice_nodes, 0, INT32_MAX))
        params = lib.mtmd_context_params_default()
        params.n_threads = check_int("n_threads", n_threads, 1, MAX_THREADS)
        params.use_gpu = bool(use_gpu)
        params.print_timings = False
        # It would reserve the buffers of the largest image; the first encode reserves those that it needs.
        params.warmup = False
        params.flash_attn_type = check_flash_attn(flash_attn)
        if image_min_tokens is not None:
            params.image_min_tokens = check_int("image_min_tokens", image_min_tokens, 1, MAX_TOKENS)
        if image_max_tokens is not None:
            params.image_max_tokens = check_int(
                "image_max_tokens", image_max_tokens, image_min_tokens or 1, MAX_TOKENS
            )
        if slice_nodes:
            params.cb_eval = self._slicer.callback
        forward_log()
        if model.vocab_only:
            raise ModelLoadError(path, "the model was loaded with vocab_only: it has no weights")
        with model._kept_open():
            # It reads the vocabulary and the sizes of the model, which never change: any thread may.
            pointer = lib.mtmd_init_from_file(os.fsencode(path), model._shared_pointer, params)
            reason = forward_log()
            if not pointer:
                raise ModelLoadError(path, reason or "not a projector for this model")
            super().__init__(pointer, lib.mtmd_free, parent=model)
        self.path = path
        with self._closed_on_error():
            self.has_vision: bool = bool(lib.mtmd_support_vision(pointer))
            self.has_audio: bool = bool(lib.mtmd_support_audio(pointer))
            rate = int(lib.mtmd_get_audio_sample_rate(pointer))
            self.audio_sample_rate: int = rate if self.has_audio else 0
            self.has_mrope: bool = bool(lib.mtmd_decode_use_mrope(pointer))
            self.n_embd: int = model.n_embd_inp
            if self.has_vision and self._depends_on_prompt():
                raise ModelLoadError(path, "rows of an image depend on what stands before it")

    def _depends_on_prompt(self) -> bool:
        """True if an image gets other rows or positions as the second one of a prompt."""
        with self._bitmap(_Media(_TRIAL_SIZE, _BYTES)) as bitmap:
            shapes = [self._shapes([bitmap]), self._shapes([b"a", bitmap, bitmap])]
        n_chunks = len(shapes[0])
        return len(shapes[1]) != 2 * n_chunks or shapes[1][n_chunks:] != shapes[0]

    def _shapes(self, parts: Sequence[Any]) -> list[tuple[int, bytes]]:
        """Return the number of rows and the positions of each chunk of a prompt."""
        found = []
        with self._chunks(parts) as chunks:
            for copy in map(self._copy, chunks):
                if isinstance(copy, MediaChunk):
                    found.append((copy.n_tokens, copy.positions(0).tobytes()))
                    copy.close()
        return found

    def split(self, pixels: NDArray[np.uint8] | tuple[int, int]) -> list[MediaChunk | list[int]]:
        """Return the chunks and tokens that represent an image in a prompt, in order.

        Parameters
        ----------
        pixels : ndarray or (int, int)
            uint8, shape `(height, width, 3)`: red, green, blue.  A `(height, width)` alone gives chunks
            that can be counted and not encoded.

        Returns
        -------
        list of MediaChunk or list of int
            Chunks to encode, and the tokens around them.  Close each chunk.

        Raises
        ------
        InvalidArgumentError
            `pixels` has another type or shape, a side above 16,384, or more than 67,108,864 pixels.
        LlamaCallError
            The projector takes no images, or this image is too narrow for it.

        Notes
        -----
        See `mtmd_bitmap_init` and `mtmd_tokenize_from_parts` in mtmd.h.
        """
        return self._split(_check_pixels(pixels))

    def split_audio(self, samples: NDArray[np.float32] | int) -> list[MediaChunk | list[int]]:
        """Return the chunks and tokens that represent a recording in a prompt, in order.

        Parameters
        ----------
        samples : ndarray or int
            float32, shape `(n_samples,)`: one channel, `audio_sample_rate` samples a second, -1 to 1.  A number
            of samples alone gives chunks that can be counted; it costs as much as silence of this length.

        Returns
        -------
        list of MediaChunk or list of int
            As for `split`.

        Raises
        ------
        InvalidArgumentError
            `samples` has another type or shape, is not finite, or has fewer than 2 or more than 33,554,432.
        LlamaCallError
            The projector takes no audio.

        Notes
        -----
        See `mtmd_bitmap_init_from_audio` and `mtmd_tokenize_from_parts` in mtmd.h.
        """
        return self._split(_check_samples(samples))

    def _split(self, media: _Media) -> list[MediaChunk | list[int]]:
        self._pointer  # noqa: B018  # the thread and lifetime check
        with self._bitmap(media) as bitmap, self._chunks([bitmap]) as chunks:
            return self._copied(chunks)

    def layout(self, height: int, width: int) -> list[ChunkShape | list[int]]:
        """Return the sizes of the chunks, and the tokens, that `split` makes of an image of this size.

        Any thread may call it, also beside an encode.

        Raises
        ------
        InvalidArgumentError, LlamaCallError
            As for `split`.
        """
        return self._layout(_check_pixels((height, width)))

    def layout_audio(self, n_samples: int) -> list[ChunkShape | list[int]]:
        """Return the sizes of the chunks, and the tokens, that `split_audio` makes of so many samples.

        Any thread may call it, also beside an encode.

        Raises
        ------
        InvalidArgumentError, LlamaCallError
            As for `split_audio`.
        """
        return self._layout(_check_samples(n_samples))

    def _layout(self, media: _Media) -> list[ChunkShape | list[int]]:
        lib, found = media_library(), list[ChunkShape | list[int]]()
        with self._kept_open(), self._bitmap(media) as bitmap, self._chunks([bitmap]) as chunks:
            for chunk in chunks:
                if lib.mtmd_input_chunk_get_type(chunk) == m.ChunkType.TEXT:
                    found.append(self._tokens(chunk))
                else:
                    found.append(_shape_of(self._shared_pointer, chunk))
        return found

    def encode(
        self, chunk: MediaChunk, between: Callable[[], bool | None] | None = None
    ) -> NDArray[np.float32]:
        """Return the embeddings of a chunk.  Releases the GIL while computing.

        Parameters
        ----------
        chunk : MediaChunk
            Of this projector.
        between : callable, optional
            Called in this thread after every `slice_nodes` nodes of the graph; the encode waits for it.
            Returning False cancels the encode.  An exception cancels it too, and is raised again.
            It cannot close or use the projector or the chunk.

        Returns
        -------
        ndarray
            float32, shape `(chunk.n_tokens, n_embd)`: a copy.

        Raises
        ------
        EncodeCancelledError
            `between` returned False, or a signal interrupted it.
        InUseError
            An encode of this projector is running: `between` called this method.
        LlamaCallError
            The chunk has no pixels, or libmtmd failed.
        InvalidArgumentError
            The chunk belongs to another projector.

        Notes
        -----
        See `mtmd_batch_encode` in mtmd.h, which returns 0 for a cancelled encode as well.
        """
        lib, pointer = media_library(), self._pointer
        if not isinstance(chunk, MediaChunk) or chunk._parent is not self:
            raise InvalidArgumentError("chunk", chunk, "a chunk of this projector")
        if self._slicer.is_running:
            raise InUseError("an encode of this projector is running")
        source = chunk._pointer
        # A child of the chunk: neither it nor the projector can be closed meanwhile.
        with NativeHandle(lib.mtmd_batch_init(pointer), lib.mtmd_batch_free, chunk) as batch:
            _check("mtmd_batch_add_chunk", lib.mtmd_batch_add_chunk(batch._pointer, source))
            library().n_computed += 1
            with self._slicer.running(between):
                code = lib.mtmd_batch_encode(batch._pointer)
            _check("mtmd_batch_encode", code)
            data = lib.mtmd_batch_get_output_embd(batch._pointer, source)
            return np.ctypeslib.as_array(data, shape=(chunk.n_tokens, self.n_embd)).copy()

    @contextmanager
    def _bitmap(self, media: _Media) -> Iterator[Any]:
        lib = media_library()
        data = None if media.data is None else media.data.ctypes.data_as(media.pointer)
        if media.pointer is _FLOATS:
            bitmap = lib.mtmd_bitmap_init_from_audio(*media.size, data)
        else:
            height, width = media.size
            bitmap = lib.mtmd_bitmap_init(width, height, data)
        try:
            yield bitmap
        finally:
            lib.mtmd_bitmap_free(bitmap)

    @contextmanager
    def _chunks(self, parts: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield pointers to the chunks that libmtmd makes of texts and bitmaps; they are valid inside."""
        lib, structs = media_library(), m.DECLARATIONS.structs
        made = [
            structs["mtmd_input_part"](
                text=ctypes.pointer(structs["mtmd_input_text"](part, len(part), False, False))
            )
            if isinstance(part, bytes)
            else structs["mtmd_input_part"](bitmap=part)
            for part in parts
        ]
        pointers = (ctypes.POINTER(structs["mtmd_input_part"]) * len(made))(
            *map(ctypes.pointer, made)
        )
        chunks = lib.mtmd_input_chunks_init()
        try:
            forward_log()
            # Only preprocessing: llama-server calls it in other threads than the encode, too.
            code = lib.mtmd_tokenize_from_parts(
                self._shared_pointer, chunks, pointers, len(made), False
            )
            _check("mtmd_tokenize_from_parts", code)
            n_chunks = lib.mtmd_input_chunks_size(chunks)
            yield [lib.mtmd_input_chunks_get(chunks, i) for i in range(n_chunks)]
        finally:
            lib.mtmd_input_chunks_free(chunks)

    def _copied(self, chunks: Sequence[Any]) -> list[MediaChunk | list[int]]:
        copies: list[MediaChunk | list[int]] = []
        try:
            for chunk in chunks:
                copies.append(self._copy(chunk))
        except BaseException:
            for copy in copies:
                if isinstance(copy, MediaChunk):
                    copy.close()
            raise
        return copies

    def _copy(self, chunk: Any) -> MediaChunk | list[int]:
        lib = media_library()
        if lib.mtmd_input_chunk_get_type(chunk) != m.ChunkType.TEXT:
            return MediaChunk(self, lib.mtmd_input_chunk_copy(chunk))
        return self._tokens(chunk)

    def _tokens(self, chunk: Any) -> list[int]:
        n_tokens = ctypes.c_size_t()
        tokens = media_library().mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n_tokens))
        found: list[int] = tokens[: n_tokens.value]
        if h.LLAMA_TOKEN_NULL in found:
            raise ModelLoadError(
                self.path, "the model's vocabulary lacks a token that the projector needs"
            )
        return found


def _shape_of(projector: Any, chunk: Any) -> ChunkShape:
    lib = media_library()
    n_tokens = int(lib.mtmd_input_chunk_get_n_tokens(chunk))
    has_one_time = False
    is_image = lib.mtmd_input_chunk_get_type(chunk) == m.ChunkType.IMAGE
    if is_image and lib.mtmd_decode_use_mrope(projector) and n_tokens:
        image = lib.mtmd_input_chunk_get_tokens_image(chunk)
        first, last = (
            lib.mtmd_image_tokens_get_decoder_pos(image, 0, i).t for i in (0, n_tokens - 1)
        )
        has_one_time = first == last
    return ChunkShape(
        n_tokens,
        int(lib.mtmd_input_chunk_get_n_pos(chunk)),
        not lib.mtmd_decode_use_non_causal(projector, chunk),
        has_one_time,
    )


class _Slicer:
    """The callback that cuts a graph into slices, and what happens between them."""

    def __init__(self, slice_nodes: int) -> None:
        self._slice_nodes = slice_nodes
        self._n_nodes = 0
        self._between: Callable[[], bool | None] | None = None
        self._is_cancelled = self._is_asked = False
        self._error: BaseException | None = None
        self.is_running = False
        # libmtmd keeps the pointer for the life of its context.
        callback_type = m.DECLARATIONS.callbacks["ggml_backend_sched_eval_callback"]
        self.callback: Any = callback_type(self._call)

    @contextmanager
    def running(self, between: Callable[[], bool | None] | None) -> Iterator[None]:
        """Call `between` in the encode inside; raise its exception, or that it cancelled the encode."""
        self._n_nodes, self._between, self._error = 0, between, None
        self._is_cancelled = self._is_asked = False
        self.is_running = True
        try:
            yield
        finally:
            self.is_running, self._between = False, None
            error, self._error = self._error, None
        if error is not None:
            raise error
        # A signal's exception at the beginning of `_call` is lost in C, and ends a graph.
        if self._is_cancelled or self._is_asked:
            raise EncodeCancelledError("the encode was cancelled")

    def _call(self, _node: Any, asks: bool, _user_data: Any) -> bool:
        """Say whether to stop after a node, and there whether to continue.

        A graph in several parts is ended part by part: each stops after one node.
        """
        if asks and self._is_asked:
            self._is_cancelled = True
        if self._is_cancelled or self._error is not None:
            return asks
        if asks:
            self._n_nodes += 1
            self._is_asked = self._between is not None and not self._n_nodes % self._slice_nodes
            return self._is_asked
        self._is_asked = False
        try:
            self._is_cancelled = self._between is not None and self._between() is False
        except BaseException as error:  # a callback of C cannot raise
            self._error = error
        return not self._is_cancelled and self._error is None


_BYTES, _FLOATS = ctypes.POINTER(ctypes.c_uint8), ctypes.POINTER(ctypes.c_float)


class _Media(NamedTuple):
    """An image or a recording.

    Attributes
    ----------
    size : tuple of int
        Height and width, or number of samples.
    pointer : type
        Type of the pointer to its data, which tells the two kinds apart.
    data : ndarray or None
        None: it is only counted.
    """

    size: tuple[int, ...]
    pointer: Any
    data: NDArray[Any] | None = None


def _check_pixels(pixels: object) -> _Media:
    """Return an image, or its size alone."""
    data = None
    if isinstance(pixels, np.ndarray):
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            kind = f"{pixels.dtype} {pixels.shape}"
            raise InvalidArgumentError("pixels", kind, "uint8, shape (height, width, 3)")
        data = np.ascontiguousarray(pixels)
        height, width = pixels.shape[:2]
    elif isinstance(pixels, tuple) and len(pixels) == 2:
        height, width = pixels
    else:
        raise InvalidArgumentError("pixels", pixels, "an array, or (height, width)")
    height = check_int("height", height, 1, MAX_SIDE)
    width = check_int("width", width, 1, MAX_SIDE)
    check_int("pixels", height * width, 1, MAX_PIXELS)
    return _Media((height, width), _BYTES, data)


def _check_samples(samples: object) -> _Media:
    """Return a recording, or its number of samples alone."""
    data, n_samples = None, samples
    if isinstance(samples, np.ndarray):
        if samples.dtype != np.float32 or samples.ndim != 1:
            kind = f"{samples.dtype} {samples.shape}"
            raise InvalidArgumentError("samples", kind, "float32, shape (n_samples,)")
        n_samples = len(samples)
    n_samples = check_int("samples", n_samples, MIN_SAMPLES, MAX_SAMPLES)
    if isinstance(samples, np.ndarray):
        data = np.ascontiguousarray(samples)
        if not np.isfinite(data).all():
            raise InvalidArgumentError("samples", "an array with infinity or NaN", "finite")
    return _Media((n_samples,), _FLOATS, data)


def _check(function: str, code: int) -> None:
    if reason := forward_log():
        reason = f": {reason}"
    if code != 0:
        raise LlamaCallError(function, code, f"failed{reason}")
