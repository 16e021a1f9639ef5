"""LlamaMediaEncoder: encodes images and audio in a thread of its own, in turns with the decodes.

On a CPU both compute with the same cores, so they take turns.  An encode is cut into slices.  Before each
decode of tokens it has a turn, for which the decode waits: `GapBudget` keeps streams at their
`target_itl_ms`, and without a target both get equal shares.  Between two slices the encode waits until its
next turn, or until no decode has come for a while.  On a GPU nothing waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Model
from cllm.bindings.projector import ChunkShape, MediaChunk, Projector, RowPositions
from cllm.engine.config import EngineConfig
from cllm.engine.core.commands import MediaEncoded, MediaMeasured
from cllm.engine.core.gap_budget import GapBudget
from cllm.engine.llama.devices import uses_gpu
from cllm.engine.media import MAX_ROWS, MIN_ROWS, MediaInput, MediaPiece, Shape, kind_of, size_of
from cllm.engine.thread.backend import Work
from cllm.errors import (
    CllmError,
    ClosedError,
    EncodeCancelledError,
    GenerationError,
    InvalidArgumentError,
    InvalidRequestError,
    LlamaCallError,
    PromptTooLongError,
)

logger: logging.Logger = logging.getLogger("cllm.engine")

# Nodes of a graph between two checks whether a decode waits.  With a vision transformer of the size of
# SigLIP-base on two cores a node takes up to 40 ms, and the checks take nothing that can be measured.
SLICE_NODES = 1
# First aim of the turns, as a share of the target: the last slice of a turn ends after it.
FIRST_AIM = 0.75
# An encode resumes outside its turns if no decode has followed the last one for so long.
IDLE_S = 0.02
LARGE = 4096
# Images whose largest chunk is looked up at load: small ones, and large ones of many shapes.
TRIAL_SHAPES: tuple[Shape, ...] = (
    (64, 64),
    *((LARGE, LARGE * n // 32) for n in range(4, 33)),
    *((LARGE * n // 32, LARGE) for n in range(4, 32)),
)
WINDOW_S = 30  # audio is measured at load for one and for two windows of so many seconds
N_MEASURED = 256  # layouts of audio that are remembered


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRows:
    """A chunk that was encoded; see `EncodedChunk`."""

    rows: NDArray[np.float32]
    at: RowPositions

    def positions(self, p0: int) -> NDArray[np.int32]:
        """Return the positions of its rows after `p0` positions."""
        return self.at.after(p0)


class LlamaMediaEncoder:
    """The projector of a model, in a thread of its own.

    Parameters
    ----------
    model : Model
        The text model; stays open until `close`.
    path : str
        File of the projector.

    Attributes
    ----------
    n_whole_max : int
        Rows of the largest chunk that can be decoded at once: `n_ubatch`, or more if the projector needs more.
    modalities : tuple of str
        What it encodes: "image", "audio".
    audio_sample_rate : int
        Samples a second of audio; 0 if it encodes none.
    n_rows_max : int
        Rows that a sequence may have: audio with more is rejected before it is measured.

    Raises
    ------
    ModelLoadError
        The file is not a projector of this model.
    """

    def __init__(self, model: Model, path: str, config: EngineConfig) -> None:
        self._model = model
        self._path = path
        self._config = config
        self._on_gpu = model.is_on_gpu and config.mmproj_offload
        target_ms = config.target_itl_ms
        self._budget = GapBudget(None if target_ms is None else target_ms / 1000.0, FIRST_AIM)
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._has_more = threading.Condition(lock)  # there is audio to measure, or an end
        self._jobs: deque[tuple[MediaInput, tuple[int, ...]]] = deque()
        self._present: bytes | None = None  # the digest of the media under way
        self._cancelled: set[bytes] = set()
        self._is_stopping = self._is_decoding = self._is_in_slice = False
        self._is_held = False  # computes in its turns only: decodes follow one another
        self._work: Work = "tokens"  # of the last decode
        self._decoded_s = 0.0  # by all decodes since the last turn
        self._tokens_s = 0.0  # by the last decode of the next tokens alone
        self._is_cancelled = False  # the media under way
        self._wants_turn = False  # computes, and not only cuts and scales pixels
        self._decode_began = self._decode_ended = self._turn_until = 0.0
        self._post: Callable[[MediaEncoded | MediaMeasured], object] = lambda encoded: None
        self._note: Callable[[bytes], object] = lambda digest: None
        self._projector: Projector | None = None
        self._to_measure: deque[Shape] = deque()
        self._measured: dict[Shape, tuple[MediaPiece, ...] | CllmError] = {}
        self._measurer: threading.Thread | None = None
        self._rows_per_window = 0  # by which audio grows with each `WINDOW_S`; 0: unknown
        self.modalities: tuple[str, ...] = ()
        self.audio_sample_rate: int = 0
        self.n_rows_max: int = MAX_ROWS
        self._failure: BaseException | None = None  # of the load
        self._ended: Exception | None = None  # why the thread has ended early
        self._is_loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cllm-encoder", daemon=True)
        self._thread.start()
        self._is_loaded.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        self.n_whole_max: int = MAX_ROWS
        try:
            self.n_whole_max = max(config.n_ubatch, self._find_n_whole_max())
        except BaseException:
            self.close()
            raise

    def start(
        self,
        post: Callable[[MediaEncoded | MediaMeasured], object],
        note: Callable[[bytes], object],
    ) -> None:
        """See `MediaEncoderThread`."""
        self._post, self._note = post, note

    def close(self) -> None:
        """Cancel everything, free the projector and join the threads."""
        with self._changed:
            self._is_stopping = True
            self._to_measure.clear()
            self._changed.notify_all()
            self._has_more.notify_all()
        self._thread.join()

    # --- Sizes: inference thread --------------------------------------------------------------
    def layout(self, shape: Shape) -> tuple[MediaPiece, ...] | None:
        """See `MediaEncoderThread`: None until a worker thread has measured audio.

        libmtmd computes the spectrum of silence to count the rows of audio: 0.1 s for each window of 30 s.
        """
        if kind_of(shape) == "image":
            return self._layout(shape)
        self._check_length(shape[0])
        with self._changed:
            # An error is told once: the reason may be gone the next time.
            found = self._measured.get(shape)
            if isinstance(found, CllmError):
                del self._measured[shape]
            elif found is None and (self._ended is not None or self._is_stopping):
                raise ClosedError("the encoder has ended") from self._ended
            elif found is None and shape not in self._to_measure:
                self._start_measurer()
                self._to_measure.append(shape)
                self._has_more.notify()
        try:
            if isinstance(found, CllmError):
                raise found
            return found
        finally:
            del found  # the traceback of an error holds this frame

    def _check_length(self, n_samples: int) -> None:
        """Raise `PromptTooLongError` for audio that has more rows than a sequence, without measuring it."""
        if not self._rows_per_window:
            return
        n_rows = n_samples // (WINDOW_S * self.audio_sample_rate) * self._rows_per_window
        if n_rows > self.n_rows_max:
            raise PromptTooLongError(n_rows, self.n_rows_max)

    def _start_measurer(self) -> None:
        if self._measurer is None:
            measurer = threading.Thread(target=self._measure, name="cllm-layout", daemon=True)
            measurer.start()
            self._measurer = measurer  # not before: the system may allow no more threads

    def forget(self, shape: Shape) -> None:
        """See `MediaEncoderThread`."""
        with self._changed:
            if shape in self._to_measure:
                self._to_measure.remove(shape)

    def _measure(self) -> None:
        """Measure audio until the encoder ends; the first shape stays in the queue meanwhile."""
        while True:
            with self._changed:
                while not (self._to_measure or self._is_stopping or self._ended):
                    self._has_more.wait()
                if self._is_stopping or self._ended:
                    return
                shape = self._to_measure[0]
            try:
                found: tuple[MediaPiece, ...] | CllmError = self._layout(shape)
            except CllmError as error:
                found = error.with_traceback(None)
            except Exception as error:
                found = GenerationError(f"audio of {size_of(shape)} was not measured: {error!r}")
            with self._changed:
                if shape in self._to_measure:
                    self._to_measure.remove(shape)
                self._measured[shape] = found
                while len(self._measured) > N_MEASURED:
                    del self._measured[next(iter(self._measured))]
            del found  # the inference thread raises it, and its frames would live on here
            self._post(MediaMeasured())

    def _layout(self, shape: Shape) -> tuple[MediaPiece, ...]:
        """Return the chunks and tokens of an image or audio of this shape.  Any thread.

        Raises
        ------
        InvalidRequestError
            The projector cannot encode it, or not into a supported number of rows.
        """
        projector, kind = self._projector, kind_of(shape)
        if projector is None:
            raise ClosedError("the encoder has ended") from self._ended
        try:
            if kind == "image":
                pieces = projector.layout(shape[0], shape[1])
            else:
                pieces = projector.layout_audio(shape[0])
        except (InvalidArgumentError, LlamaCallError) as error:
            limit = f"another size: {error}"
            raise InvalidRequestError(kind, size_of(shape), limit) from None
        return tuple(_piece_of(piece, self.n_whole_max, kind) for piece in pieces)

    def _find_n_whole_max(self) -> int:
        found = 0
        n_rows = list[int]()
        for n_windows in (1, 2) if "audio" in self.modalities else ():
            try:
                pieces = self._layout((n_windows * WINDOW_S * self.audio_sample_rate,))
            except InvalidRequestError:
                break
            n_rows.append(sum(piece.n_rows for piece in pieces))
            found = max([found, *(piece.n_rows for piece in pieces if not piece.is_causal)])
        if len(n_rows) == 2:
            self._rows_per_window = max(0, n_rows[1] - n_rows[0])
        for shape in TRIAL_SHAPES if "image" in self.modalities else ():
            try:
                pieces = self._layout(shape)
            except InvalidRequestError:
                continue  # a size that no request can use
            if all(piece.is_causal for piece in pieces):  # of one projector all are alike
                break
            found = max([found, *(piece.n_rows for piece in pieces)])
        return found

    # --- Work: inference thread --------------------------------------------------------------
    @property
    def is_computing(self) -> bool:
        """True while media are encoded with the processors of the decodes."""
        return self._wants_turn and not self._on_gpu

    def encode(self, media: MediaInput, ordinals: tuple[int, ...]) -> None:
        """Encode these chunks; see `MediaEncoder`."""
        with self._changed:
            if (failure := self._ended) is None:
                self._cancelled.discard(media.digest)
                self._jobs.append((media, ordinals))
                self._changed.notify_all()
                return
        self._fail(media, ordinals, failure)

    def _fail(self, media: MediaInput, ordinals: Iterable[int], error: Exception) -> None:
        for ordinal in ordinals:
            self._post(MediaEncoded(media.digest, ordinal, error=error))

    def cancel(self, digest: bytes) -> None:
        """Encode no further chunk of this image or audio."""
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job[0].digest != digest)
            if self._present == digest:
                self._cancelled.add(digest)

    def pause(self, work: Work) -> None:
        """Give the encoder its turn, and wait until a decode may begin.  Nothing on a GPU."""
        if self._on_gpu:
            return
        with self._changed:
            if work != "media":  # these rows follow the tokens of a tick
                self._turn_until = (now := time.monotonic()) + self._turn_s(work, now)
                self._changed.notify_all()
                while self._wants_turn and (left := self._turn_until - time.monotonic()) > 0:
                    self._changed.wait(left)
            self._work = work
            self._is_held = self._is_decoding = True
            self._turn_until = 0.0
            while self._is_in_slice:
                self._changed.wait()
            self._decode_began = time.monotonic()

    def resume(self) -> None:
        """Note that the decode has ended."""
        if self._on_gpu:
            return
        with self._changed:
            if not self._is_decoding:
                return  # a decode that failed before it began
            self._is_decoding = False
            self._decode_ended = time.monotonic()
            seconds = self._decode_ended - self._decode_began
            self._decoded_s += seconds
            if self._work == "tokens":
                self._tokens_s = seconds
            self._changed.notify_all()

    def _turn_s(self, work: Work, now: float) -> float:
        """Return the seconds of the encoder's turn before a decode that could begin now."""
        decoded_s, self._decoded_s = self._decoded_s, 0.0
        # Rows of prompts and of media take what the target leaves: see `Turns.begin_gap`.
        is_full = self._config.target_itl_ms is not None and (
            work == "prompts" or self._work == "media"
        )
        if is_full or not (self._wants_turn and self._is_held):
            self._budget.pause()
            return 0.0
        return self._budget.seconds(now, decoded_s, self._tokens_s)

    # --- The thread --------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            projector = self._open()
        except BaseException as error:
            self._failure = error
            self._is_loaded.set()
            return
        with projector:
            self._projector = projector
            self._is_loaded.set()
            try:
                while (job := self._next()) is not None:
                    self._encode(projector, *job)
            except Exception as error:
                logger.exception("the encoder has ended")
                self._end(error)
            finally:
                self._projector = None
                if self._measurer is not None:  # it uses the projector
                    self._measurer.join()

    def _end(self, error: Exception) -> None:
        """Answer all waiting and later media with an error."""
        with self._changed:
            self._ended, self._projector = error, None
            self._to_measure.clear()
            self._has_more.notify_all()
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            self._fail(*job, error)
        self._post(MediaMeasured())  # questions about audio are answered with an error

    def _open(self) -> Projector:
        config = self._config
        projector = Projector(
            self._model,
            self._path,
            n_threads=config.compute_threads[1],
            use_gpu=config.mmproj_offload and uses_gpu(config),
            image_min_tokens=config.image_min_tokens,
            image_max_tokens=config.image_max_tokens,
            flash_attn=config.flash_attn,
            slice_nodes=0 if self._on_gpu else SLICE_NODES,
        )
        has = {"image": projector.has_vision, "audio": projector.has_audio}
        self.modalities = tuple(kind for kind, is_there in has.items() if is_there)
        self.audio_sample_rate = projector.audio_sample_rate
        return projector

    def _next(self) -> tuple[MediaInput, tuple[int, ...]] | None:
        """Return the next image or audio; None at the end."""
        with self._changed:
            while not (self._jobs or self._is_stopping):
                self._changed.wait()
            if self._is_stopping:
                return None
            job = self._jobs.popleft()
            self._present, self._is_cancelled = job[0].digest, False
            return job

    def _encode(self, projector: Projector, media: MediaInput, ordinals: tuple[int, ...]) -> None:
        left = list(ordinals)
        try:
            self._note(media.digest)
            with ExitStack() as opened:
                if media.kind == "image":
                    pixels = np.frombuffer(media.data, np.uint8).reshape(*media.shape, 3)
                    pieces = projector.split(pixels)
                else:
                    pieces = projector.split_audio(np.frombuffer(media.data, np.float32))
                chunks = [piece for piece in pieces if not isinstance(piece, list)]
                for chunk in chunks:
                    opened.callback(chunk.close)
                for ordinal in ordinals:
                    chunk = chunks[ordinal]
                    # Scaling the pixels above takes one core, beside the decodes; the spectrum of audio takes
                    # four threads for 0.1 s of each 30 s.
                    rows = EncodedRows(self._encoded(projector, chunk), chunk.rows_at)
                    if not np.isfinite(rows.rows).all():
                        raise LlamaCallError("mtmd_batch_encode", 0, "embeddings are not finite")
                    left.pop(0)
                    self._post(MediaEncoded(media.digest, ordinal, rows))
        except Exception as error:
            # A cancelled one may be wanted again: its next job is in the queue then.
            self._fail(media, () if self._is_cancelled else left, error)
        finally:
            self._note(b"")
            with self._changed:
                self._present = None
                self._cancelled.clear()
                self._changed.notify_all()

    def _encoded(self, projector: Projector, chunk: MediaChunk) -> NDArray[np.float32]:
        """Return the embeddings of a chunk, computed in slices.

        Raises
        ------
        EncodeCancelledError
            It is not needed any more.
        """
        try:
            self._wants_turn = True
            if not self._between():
                raise EncodeCancelledError("the encode was cancelled")
            return projector.encode(chunk, self._between)
        finally:
            with self._changed:
                self._is_in_slice = self._wants_turn = False
                self._changed.notify_all()

    def _between(self) -> bool:
        """End a slice, wait until the encoder may compute, and begin another slice.

        Return False if its image or audio is not needed any more.
        """
        with self._changed:
            self._is_in_slice = False
            self._changed.notify_all()
            while self._is_held and not self._is_stopping:
                now = time.monotonic()
                if now < self._turn_until:
                    break
                left = None if self._is_decoding else self._decode_ended + IDLE_S - now
                if left is not None and left <= 0.0:
                    self._is_held = False
                else:
                    self._changed.wait(left)
            self._is_in_slice = True
            self._is_cancelled = self._is_stopping or self._present in self._cancelled
            return not self._is_cancelled


def _piece_of(piece: ChunkShape | list[int], n_whole_max: int, kind: str) -> MediaPiece:
    if isinstance(piece, list):
        return MediaPiece(tokens=tuple(piece))
    n_rows, n_positions, is_causal, has_one_time = piece
    if not MIN_ROWS <= n_rows <= MAX_ROWS or not 1 <= n_positions <= n_rows:
        limit = f"one of {MIN_ROWS} to {MAX_ROWS} rows"
        if kind == "image":
            limit += " (image_min_tokens, image_max_tokens)"
        raise InvalidRequestError(kind, f"{n_rows} rows", limit)
    if not is_causal and n_rows > n_whole_max:
        limit = f"at most {n_whole_max} rows, which are decoded at once (n_ubatch)"
        raise InvalidRequestError(kind, f"{n_rows} rows", limit)
    return MediaPiece((), n_rows, n_positions, is_causal, has_one_time)
