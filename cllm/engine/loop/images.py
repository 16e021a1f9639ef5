"""Images of a request: from a file to pixels, and to rows of a prompt.  Event loop only."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio.to_thread

from cllm.engine.child_process import child_command, child_environment
from cllm.engine.core.commands import ImageLayout, LayoutImage
from cllm.engine.image import Image, NamedImage
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.media import MediaInput
from cllm.engine.media_rows import Spans, chunk_content, row_ids
from cllm.errors import InvalidRequestError, MissingExtraError

DECODE_S = 20.0
N_LAYOUTS = 1024  # sizes of images that are remembered
N_AT_ONCE = 2  # requests whose images are decoded at the same time
MAX_PROMPT_BYTES = 1 << 29  # of pixels, in one prompt
# Bytes of pixels of open requests, beyond which the next request waits to read its images.
MAX_OPEN_BYTES = 1 << 30


class Pixels(NamedTuple):
    """A decoded image: uint8, `height * width * 3`; and the hash of its size and its pixels."""

    height: int
    width: int
    data: bytes
    digest: bytes

    @classmethod
    def of(cls, height: int, width: int, data: bytes) -> Pixels:
        """Return an image with its hash: a tenth of a second for a large one."""
        digest = hashlib.sha256(b"%d %d " % (height, width))
        digest.update(data)
        return cls(height, width, data, digest.digest())


class PromptImage(NamedTuple):
    """An image in a prompt: its tokens with the rows of its chunks, and what a request carries of it."""

    tokens: tuple[int, ...]
    media: MediaInput


class ImageReader:
    """Turns images into rows of a prompt.

    Parameters
    ----------
    ask : callable
        Asks the inference thread a question.
    gate : QueueGate
        Counts the pixels of open requests.
    """

    def __init__(
        self, ask: Callable[[LayoutImage], Awaitable[ImageLayout]], gate: QueueGate
    ) -> None:
        self._ask = ask
        self._gate = gate
        self._layouts: dict[LayoutImage, ImageLayout] = {}
        self._turns: anyio.CapacityLimiter | None = None
        self._threads: anyio.CapacityLimiter | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a request may read its images; `N_AT_ONCE` requests read at the same time."""
        if self._turns is None:
            self._turns = anyio.CapacityLimiter(N_AT_ONCE)
        async with self._turns:
            while self._gate.n_pixel_bytes >= MAX_OPEN_BYTES:
                await self._gate.wait_left()
            yield

    async def read(self, named: NamedImage) -> PromptImage:
        """Return the rows of an image.

        Raises
        ------
        InvalidRequestError
            The file cannot be read or decoded, or the engine takes no such images; the error names its field.
        """
        try:
            return await self._read(named.image)
        except InvalidRequestError as error:
            raise named.with_field(error) from None

    async def _read(self, image: Image) -> PromptImage:
        if self._threads is None:  # a cancelled request leaves its turn before its thread has ended
            self._threads = anyio.CapacityLimiter(N_AT_ONCE)
        decoding = Decoding()
        try:
            pixels = await anyio.to_thread.run_sync(
                decoding.pixels_of, image, limiter=self._threads, abandon_on_cancel=True
            )
        except BaseException:
            decoding.stop()
            raise
        layout = await self._layout(LayoutImage(pixels.height, pixels.width))
        digest = pixels.digest
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
        media = MediaInput(digest, pixels.data, pixels.height, pixels.width, len(chunks), is_causal)
        return PromptImage(tuple(tokens), media)

    async def check(self, media: tuple[MediaInput, ...], tokens: tuple[int, ...]) -> None:
        """Check that this engine cuts the images of a saved prompt into the same chunks.

        Raises
        ------
        InvalidRequestError
            It has no projector, another one, or other limits of rows.
        """
        chunks = []
        for image in media:
            layout = await self._layout(LayoutImage(image.height, image.width))
            chunks += [
                (piece.n_rows, piece.n_positions, piece.has_one_time)
                for piece in layout.pieces
                if piece.n_rows
            ]
        spans = Spans.of(tokens)
        shapes = [(span.end - span.start, span.n_positions, span.has_one_time) for span in spans]
        if shapes != chunks:
            found = [shape[:2] for shape in shapes]
            limit = "the rows of this engine's projector (image_min_tokens, image_max_tokens)"
            raise InvalidRequestError("image", f"chunks of {found} rows and positions", limit)

    async def _layout(self, question: LayoutImage) -> ImageLayout:
        layout = self._layouts.pop(question, None)
        if layout is None:
            layout = await self._ask(question)
        self._layouts[question] = layout
        while len(self._layouts) > N_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout


class Decoding:
    """Decoding of one image."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End the process that decodes.  Any thread."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.kill()

    def pixels_of(self, image: Image) -> Pixels:
        """Return the pixels of an image, decoded in a process of its own.  Any thread; may take seconds.

        Raises
        ------
        InvalidRequestError
            The file cannot be read or decoded.
        MissingExtraError
            Pillow is not installed.
        """
        source, name = image.read(), image.shown
        if not isinstance(source, bytes):
            height, width = source.shape[:2]
            return Pixels.of(height, width, source.tobytes())
        command = child_command("cllm.engine.image_child", str(math.ceil(DECODE_S)))
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            process_group=0,
        ) as process:
            self._process = process
            try:
                if self._is_stopped:  # checked last: `stop` may have been called meanwhile
                    process.kill()
                output, _ = process.communicate(source, timeout=DECODE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                limit = f"an image that is decoded within {DECODE_S:.0f} s"
                raise InvalidRequestError("image", name, limit) from None
            finally:
                self._process = None
        line, _, pixels = output.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            limit = f"an intact image (the process that decodes it ended with {process.returncode})"
            raise InvalidRequestError("image", name, limit) from None
        if (missing := answer.get("missing")) is not None:
            raise MissingExtraError(missing, name="PIL")
        if (reason := answer.get("error")) is not None:
            raise InvalidRequestError("image", answer.get("value", name), reason)
        height, width = answer["height"], answer["width"]
        if len(pixels) != height * width * 3:
            limit = f"an intact image (its process ended with {process.returncode})"
            raise InvalidRequestError("image", name, limit)
        return Pixels.of(height, width, pixels)
