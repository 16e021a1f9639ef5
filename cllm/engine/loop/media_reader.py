"""Images and audio of a request: from a file to pixels or samples, and to rows of a prompt.  Event loop only."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import IO, Any, NamedTuple

import anyio.to_thread
import numpy as np

from cllm.engine.audio import Audio
from cllm.engine.chat.readable import WORDS
from cllm.engine.child_process import OWN_GROUP, child_command, child_environment
from cllm.engine.core.commands import LayoutMedia, MediaLayout
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.media import (
    PIXEL_BYTES,
    SAMPLE_BYTES,
    MediaInput,
    Shape,
    kind_of,
    left_out,
    n_bytes_of,
)
from cllm.engine.media_limits import MAX_PIXELS, MAX_SAMPLES
from cllm.engine.media_rows import Spans, chunk_content, row_ids
from cllm.engine.media_source import MediaSource, NamedMedia
from cllm.engine.request import ModelInfo
from cllm.errors import InvalidRequestError, MissingExtraError, RequestError

DECODE_S = 20.0
N_LAYOUTS = 1024  # shapes that are remembered
N_AT_ONCE = 2  # requests whose media are decoded at the same time
MAX_PROMPT_BYTES = 1 << 29  # of pixels and samples, in one prompt
# Bytes of pixels and samples of open requests, beyond which the next request waits to read its media.
MAX_OPEN_BYTES = 1 << 30
MAX_BYTES = max(MAX_PIXELS * PIXEL_BYTES, MAX_SAMPLES * SAMPLE_BYTES)  # of one image or recording
MAX_ANSWER = 1 << 16  # bytes of a line of JSON


class Decoded(NamedTuple):
    """Pixels or samples as in a `MediaInput`, and their hash."""

    shape: Shape
    data: bytes
    digest: bytes

    @classmethod
    def of(cls, shape: Shape, data: bytes) -> Decoded:
        """Return pixels or samples with their hash: a tenth of a second for a large image."""
        digest = hashlib.sha256(b"".join(b"%d " % length for length in shape))
        digest.update(data)
        return cls(shape, data, digest.digest())


class PromptMedia(NamedTuple):
    """An image or audio in a prompt: its tokens with the rows of its chunks, and what a request carries of it."""

    tokens: tuple[int, ...]
    media: MediaInput


class MediaReader:
    """Turns images and audio into rows of a prompt.

    Parameters
    ----------
    ask : callable
        Asks the inference thread a question.
    model : callable
        Returns the loaded model.
    gate : QueueGate
        Counts the pixels and samples of open requests.
    """

    def __init__(
        self,
        ask: Callable[[LayoutMedia], Awaitable[MediaLayout]],
        model: Callable[[], ModelInfo],
        gate: QueueGate,
    ) -> None:
        self._ask = ask
        self._model = model
        self._gate = gate
        self._layouts: dict[LayoutMedia, MediaLayout] = {}
        self._turns: anyio.CapacityLimiter | None = None
        self._threads: anyio.CapacityLimiter | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Decoder]:
        """Wait until a request may read its media, which `N_AT_ONCE` requests do at the same time."""
        if self._turns is None:
            self._turns = anyio.CapacityLimiter(N_AT_ONCE)
        async with self._turns:
            while self._gate.n_media_bytes >= MAX_OPEN_BYTES:
                await self._gate.wait_left()
            decoder = Decoder()
            try:
                yield decoder
            finally:
                await decoder.close()

    async def read(self, named: NamedMedia, decoder: Decoder) -> PromptMedia:
        """Return the rows of an image or audio that `decoder` decodes.

        Raises
        ------
        InvalidRequestError
            The file cannot be read or decoded, or the engine takes no such media; the error names its field.
        PromptTooLongError
            Audio alone has more rows than a sequence can have.
        """
        try:
            return await self._read(named.media, decoder)
        except InvalidRequestError as error:
            raise named.with_field(error) from None

    async def _read(self, source: MediaSource, decoder: Decoder) -> PromptMedia:
        model = self._model()
        if source.kind not in model.modalities:
            limit = left_out(source.kind, model.modalities)
            raise InvalidRequestError(source.kind, source.shown, limit)
        if self._threads is None:  # a cancelled request leaves its turn before its thread has ended
            self._threads = anyio.CapacityLimiter(N_AT_ONCE)
        shape, data, digest = await anyio.to_thread.run_sync(
            partial(decoder.run, source, model.audio_sample_rate),
            limiter=self._threads,
            abandon_on_cancel=True,
        )
        layout = await self._layout(LayoutMedia(shape))
        tokens: list[int] = []
        chunks = [piece for piece in layout.pieces if piece.n_rows]
        ordinal = 0
        for piece in layout.pieces:
            tokens += piece.tokens
            if piece.n_rows:
                content = chunk_content(digest, ordinal)
                tokens += row_ids(
                    content, piece.n_rows, piece.n_positions, has_one_time=piece.has_one_time
                )
                ordinal += 1
        is_causal = all(chunk.is_causal for chunk in chunks)
        rate = model.audio_sample_rate if source.kind == "audio" else 0
        media = MediaInput(digest, data, shape, len(chunks), is_causal, rate)
        return PromptMedia(tuple(tokens), media)

    async def check(self, media: tuple[MediaInput, ...], tokens: tuple[int, ...]) -> None:
        """Check that this engine cuts the media of a saved prompt into the same chunks.

        Raises
        ------
        InvalidRequestError
            It has no projector, another one, or other limits of rows.
        """
        chunks = []
        for each in media:
            layout = await self._layout(LayoutMedia(each.shape))
            chunks += [
                (piece.n_rows, piece.n_positions, piece.has_one_time)
                for piece in layout.pieces
                if piece.n_rows
            ]
        spans = Spans.of(tokens)
        shapes = [(span.end - span.start, span.n_positions, span.has_one_time) for span in spans]
        if shapes != chunks:
            found = [shape[:2] for shape in shapes]
            kind = media[0].kind if media else "image"
            limit = "the rows of this engine's projector"
            limit += " (image_min_tokens, image_max_tokens)" if kind == "image" else ""
            raise InvalidRequestError(kind, f"chunks of {found} rows and positions", limit)

    async def _layout(self, question: LayoutMedia) -> MediaLayout:
        layout = self._layouts.pop(question, None)
        if layout is None:
            layout = await self._ask(question)
        self._layouts[question] = layout
        while len(self._layouts) > N_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout


class Decoder:
    """Decoder of the files of one prompt, in a process that the first file starts.

    The files of another prompt may come from another client: they get another process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._running = threading.Lock()

    def stop(self) -> None:
        """Kill the process.  Any thread; returns at once."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.kill()

    async def close(self) -> None:
        """Stop, and wait for the end of the process."""
        self.stop()
        if self._process is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        with self._running:
            self._end()

    def _end(self) -> int | None:
        """Kill the process if there is one, and return its exit status."""
        if (process := self._process) is None:
            return None
        self._process = None
        process.kill()
        process.communicate()  # closes the pipes, and waits
        return process.returncode

    def run(self, media: MediaSource, sample_rate: int) -> Decoded:
        """Return pixels or samples.  Any thread; may take seconds.

        Parameters
        ----------
        sample_rate : int
            Samples a second of audio that the model takes.

        Raises
        ------
        InvalidRequestError
            The file cannot be read or decoded.
        RequestError
            No process can be started now.
        MissingExtraError
            The extra `media` is not installed.
        """
        source = media.read()
        if isinstance(source, np.ndarray) and isinstance(media, Audio):
            # The process changes the rate.
            source = source if media.sample_rate == sample_rate else media.file()
        if not isinstance(source, bytes):
            return Decoded.of(source.shape[:2], source.tobytes())
        wanted = "image" if media.kind == "image" else str(sample_rate)
        with self._running:
            try:
                decoded = self._decoded(source, media, wanted)
            finally:
                if self._is_stopped:  # and perhaps closed
                    self._end()
        return Decoded.of(*decoded)

    def _decoded(self, source: bytes, media: MediaSource, wanted: str) -> tuple[Shape, bytes]:
        name, kind = media.shown, media.kind
        had_process = self._process is not None
        answer, data, is_late = self._ask(source, media, wanted)
        if not answer and had_process and not (is_late or self._is_stopped):
            self._end()  # perhaps by an earlier file
            answer, data, is_late = self._ask(source, media, wanted)
        if data:
            return tuple(answer["shape"]), data
        if (missing := answer.get("missing")) is not None:
            raise MissingExtraError(missing, name="PIL" if kind == "image" else "soundfile")
        if (reason := answer.get("error")) is not None:
            raise InvalidRequestError(kind, answer.get("value", name), reason)
        status = self._end()
        limit = f"an intact file (the process that decodes it ended with {status})"
        if is_late:
            limit = f"{WORDS[kind]} that is decoded within {DECODE_S:.0f} s"
        raise InvalidRequestError(kind, name, limit)

    def _ask(
        self, source: bytes, media: MediaSource, wanted: str
    ) -> tuple[dict[str, Any], bytes, bool]:
        """Return the answer of the process, the pixels or samples, and True if its time was over."""
        process = self._started(media.shown)
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = threading.Event()

        def end_late() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(DECODE_S, end_late)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # it has ended: so has its output
                process.stdin.write(b"%s %d\n" % (wanted.encode(), len(source)))
                process.stdin.write(source)
                process.stdin.flush()
            answer, data = _answer(process.stdout, media.kind)
        finally:
            timer.cancel()
            timer.join()
        return answer, data, is_late.is_set()

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        command = child_command("cllm.engine.media_child", str(math.ceil(DECODE_S)))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                **OWN_GROUP,
            )
        except OSError as error:  # not the file's fault: too many open files, too little memory
            reason = error.strerror or str(error)
            raise RequestError(
                f"the process that decodes {name} cannot be started: {reason}"
            ) from None
        if self._is_stopped:  # checked last: `stop` may have been called meanwhile
            self._process.kill()
        return self._process


def _answer(output: IO[bytes], kind: str) -> tuple[dict[str, Any], bytes]:
    """Return the answer of a process and the pixels or samples; both empty if it has ended.

    A damaged file may make it write anything.
    """
    try:
        answer = dict(json.loads(output.readline(MAX_ANSWER)))
        if (shape := answer.get("shape")) is None:
            return answer, b""
        n_bytes = n_bytes_of(shape)
        is_possible = kind_of(shape) == kind and min(shape) > 0 and n_bytes <= MAX_BYTES
        data = output.read(n_bytes) if is_possible else b""
    except (ValueError, TypeError, RecursionError):
        return {}, b""
    return (answer, data) if data and len(data) == n_bytes else ({}, b"")
