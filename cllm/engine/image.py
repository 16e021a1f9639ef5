"""Image: an image in a prompt."""

from __future__ import annotations

import binascii
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.engine.image_limits import check_n_bytes, check_size
from cllm.errors import InvalidArgumentError, InvalidRequestError

# First bytes of a file of each media type.
HEADS = {"jpeg": b"\xff\xd8", "gif": b"GIF8", "webp": b"RIFF", "bmp": b"BM"}


class Base64Text(NamedTuple):
    """The file of an image as base64 text, as in a `data:` URL, without a copy of the text.

    Attributes
    ----------
    start : int
        Index in `text` at which the base64 text begins.
    """

    text: str
    start: int = 0

    @property
    def n_bytes(self) -> int:
        """Largest number of bytes of the file."""
        return 3 * (len(self.text) - self.start) // 4

    def decoded(self) -> bytes:
        """Return the file.

        Raises
        ------
        InvalidRequestError
            The text is not base64, or the file has too few bytes.
        """
        try:
            # Spaces and line breaks may be between the characters, and "=" at the end is often missing.
            data = binascii.a2b_base64(f"{self.text[self.start :]}==")
        except ValueError as error:
            limit = f"a file as base64 text ({error})"
            raise InvalidRequestError("image", f"{self.n_bytes} bytes", limit) from None
        check_n_bytes(len(data), InvalidRequestError)
        return data


class Image:
    """An image for a prompt: the path of a file, the bytes of one, or pixels.

    Parameters
    ----------
    source : str, Path, bytes or ndarray
        A path or the content of a PNG, JPEG, WebP, BMP or GIF file (first frame), of at most 64 MiB; or pixels:
        uint8, shape `(height, width, 3)`, red, green, blue.  At most 16,384 pixels on a side and 33,554,432
        in all; the images of one prompt have at most 178,956,970 together.  Pixels are copied.

    Raises
    ------
    InvalidArgumentError
        `source` has another type or shape, or is too large.  Files are read and decoded when a request with
        the image is submitted, in a process of their own: `InvalidRequestError` then names what is wrong.
        Decoding needs the extra `media`.
    """

    __slots__ = ("__weakref__", "source")

    def __init__(self, source: str | os.PathLike[str] | bytes | NDArray[np.uint8]) -> None:
        self.source: Path | bytes | NDArray[np.uint8] | Base64Text
        if isinstance(source, np.ndarray):
            _check_pixels(source)
            self.source = source.copy()
        elif isinstance(source, bytes | bytearray | memoryview):
            check_n_bytes(len(source), InvalidArgumentError)
            self.source = bytes(source)
        elif isinstance(source, str | os.PathLike) and str(source) and "\0" not in str(source):
            self.source = Path(source)
        else:
            raise InvalidArgumentError("image", source, "a path, the bytes of a file, or an array")

    @classmethod
    def of_base64(cls, text: str, start: int = 0) -> Image:
        """Return the image of a file as base64 text, which begins at `start`; `read` decodes it.

        Raises
        ------
        InvalidRequestError
            The text is empty or too long.
        """
        image = cls.__new__(cls)
        image.source = Base64Text(text, start)
        check_n_bytes(image.source.n_bytes, InvalidRequestError)
        return image

    def __repr__(self) -> str:
        return f"<Image {self.shown!r}>"

    @property
    def shown(self) -> str:
        """The image in an error: its path, or its size."""
        source = self.source
        if isinstance(source, Path):
            return str(source)
        if isinstance(source, bytes):
            return f"{len(source)} bytes"
        if isinstance(source, Base64Text):
            return f"{source.n_bytes} bytes"
        return f"{source.shape[1]}×{source.shape[0]} pixels"

    def data_url(self) -> str:
        """Return the file as a `data:` URL, pixels as a PNG file.  Any thread; reads a file.

        Raises
        ------
        InvalidRequestError
            As for `read`.
        """
        content = self.read()
        data = content if isinstance(content, bytes) else _png(content)
        kind = next((kind for kind, head in HEADS.items() if data.startswith(head)), "png")
        return f"data:image/{kind};base64,{binascii.b2a_base64(data, newline=False).decode()}"

    def read(self) -> bytes | NDArray[np.uint8]:
        """Return the content of the file, or the pixels.  Any thread; reads a file.

        Raises
        ------
        InvalidRequestError
            The file cannot be read, or is too large.
        """
        if isinstance(self.source, Base64Text):
            return self.source.decoded()
        if not isinstance(self.source, Path):
            return self.source
        try:
            check_n_bytes(self.source.stat().st_size, InvalidRequestError)
            return self.source.read_bytes()
        except OSError as error:
            reason = f"a file that can be read: {error.strerror}"
            raise InvalidRequestError("image", self.shown, reason) from None


class NamedImage(NamedTuple):
    """An image of a prompt, and the field of it for errors: `messages[3].content[1]`.

    Attributes
    ----------
    is_optional : bool
        True: a model that takes no images reads words in its place.  False: the request is rejected.
    """

    image: Image
    field: str
    is_optional: bool = False

    def with_field(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error of the image with the name of its field."""
        field = self.field if error.field == "image" else error.field
        return InvalidRequestError(field, error.value, error.limit)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels as a PNG file, which a server decodes to the same pixels."""
    height, width = pixels.shape[:2]

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red, green, blue
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row after its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 1))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def _check_pixels(pixels: NDArray[Any]) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        kind = f"{pixels.dtype} {pixels.shape}"
        raise InvalidArgumentError("image", kind, "uint8, shape (height, width, 3)")
    try:
        check_size(*pixels.shape[:2])
    except InvalidRequestError as error:
        raise InvalidArgumentError(error.field, error.value, error.limit) from None
