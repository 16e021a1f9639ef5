"""MediaSource: an image or a recording in a prompt, before it is read."""

from __future__ import annotations

import binascii
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from cllm.checks import check_int
from cllm.engine.file_content import open_regular
from cllm.engine.media_limits import check_n_bytes
from cllm.errors import InvalidArgumentError, InvalidRequestError
from cllm.settings import new_path

N_AT_ONCE = 1 << 20  # characters of base64 text
ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "=", "%0A": "\n", "%0D": "\r", "%20": " "}
OF_URLS, WHITE_SPACE = bytes.maketrans(b"-_", b"+/"), b" \t\r\n\v\f"


class Base64Text(NamedTuple):
    """A file as base64 text, as in a `data:` URL, without a copy of the text.

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

    def decoded(self, kind: str) -> bytes:
        """Return the file of an image or of audio.

        Raises
        ------
        InvalidRequestError
            The text is not base64, or the file has too few bytes.
        """
        try:
            data = b"".join(_decoded(self.text, self.start))
        except ValueError as error:  # also letters beyond ASCII
            limit = f"a file as base64 text ({error})"
            raise InvalidRequestError(kind, f"{self.n_bytes} bytes", limit) from None
        check_n_bytes(kind, len(data), InvalidRequestError)
        return data


def _decoded(text: str, start: int) -> Iterator[bytes]:
    """Yield the bytes of base64 text from `start`, in pieces: the decoder holds the GIL.

    White space may be between the characters, and "=" at the end is often missing.  The alphabet may be that
    of URLs, and a URL may have escapes.
    """
    if text.find("%", start) >= 0:
        text, start = text[start:], 0
        for escape, character in ESCAPES.items():
            text = text.replace(escape, character).replace(escape.lower(), character)
    rest = b""
    for at in range(start, len(text), N_AT_ONCE):
        rest += text[at : at + N_AT_ONCE].encode("ascii").translate(OF_URLS, WHITE_SPACE)
        if at + N_AT_ONCE < len(text):
            # The padding of the whole text is decoded with its last characters.
            n_whole = max(0, len(rest) - 8) // 4 * 4
            yield binascii.a2b_base64(rest[:n_whole], strict_mode=True)
            rest = rest[n_whole:]
    rest = rest.rstrip(b"=")
    yield binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)


class MediaSource:
    """The path of a file, the bytes of one, base64 text of one, or an array: see `Image` and `Audio`.

    Attributes
    ----------
    kind : str
        "image" or "audio": its modality, and its field in errors.
    """

    __slots__ = ("__weakref__", "source")

    kind: ClassVar[str]

    def __init__(self, source: object) -> None:
        self.source: Path | bytes | NDArray[Any] | Base64Text
        if isinstance(source, np.ndarray):
            self.source = self._checked(np.asarray(source))  # without a subclass, such as a matrix
        elif isinstance(source, bytes | bytearray | memoryview):
            try:
                check_n_bytes(self.kind, memoryview(source).nbytes, InvalidArgumentError)
                self.source = bytes(source)
            except ValueError as error:
                if isinstance(error, InvalidArgumentError):
                    raise
                raise InvalidArgumentError(self.kind, "a buffer", f"readable ({error})") from None
        elif isinstance(source, Base64Text):
            check_n_bytes(self.kind, source.n_bytes, InvalidRequestError)
            self.source = source
        elif isinstance(source, str | os.PathLike):
            self.source = Path(cast(str, new_path(self.kind, source, InvalidArgumentError)))
        else:
            limit = "a path, the bytes of a file, or an array"
            raise InvalidArgumentError(self.kind, source, limit)

    @staticmethod
    def _checked(array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of the array, as it is kept; raise `InvalidArgumentError` for another type or shape."""
        raise NotImplementedError

    @property
    def _size(self) -> str:
        """The size of an array, in an error."""
        raise NotImplementedError

    @classmethod
    def of_base64(cls, text: str, start: int = 0) -> Self:
        """Return the image or audio of a file as base64 text, which begins at `start`; `read` decodes it.

        Raises
        ------
        InvalidRequestError
            The text is empty or too long, or no text.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(cls.kind, text, "base64 text")
        start = check_int("start", start, 0, len(text), InvalidRequestError)
        return cls(Base64Text(text, start))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shown!r}>"

    @property
    def shown(self) -> str:
        """The image or audio in an error: its path, or its size."""
        source = self.source
        if isinstance(source, Path):
            return str(source)
        if isinstance(source, bytes):
            return f"{len(source)} bytes"
        if isinstance(source, Base64Text):
            return f"{source.n_bytes} bytes"
        return self._size

    def read(self) -> bytes | NDArray[Any]:
        """Return the content of the file, or the array.  Any thread; reads a file.

        Raises
        ------
        InvalidRequestError
            The file cannot be read, or is too large.
        """
        if isinstance(self.source, Base64Text):
            return self.source.decoded(self.kind)
        if not isinstance(self.source, Path):
            return self.source
        try:
            check_n_bytes(self.kind, self.source.stat().st_size, InvalidRequestError)
            with open_regular(self.source) as file:
                return file.read()
        except OSError as error:
            reason = f"a file that can be read: {error.strerror or error}"
            raise InvalidRequestError(self.kind, self.shown, reason) from None


class NamedMedia(NamedTuple):
    """An image or audio of a prompt, and the field of it for errors: `messages[3].content[1]`.

    Attributes
    ----------
    is_optional : bool
        True: a model that does not take it reads words in its place.  False: the request is rejected.
    """

    media: MediaSource
    field: str
    is_optional: bool = False

    def with_field(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error of the image or audio with the name of its field."""
        field = self.field if error.field == self.media.kind else error.field
        return InvalidRequestError(field, error.value, error.limit)
