"""Images in the content of messages: marks in the text that a template renders.  Pure.

A template gets text alone.  Each image becomes a mark in it, which contains a random number that no caller
can know.  After rendering, the text is cut at the marks, and the rows of the images are put there.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cllm.engine.chat.control_tokens import Piece
from cllm.engine.chat.readable import in_words
from cllm.engine.image import NamedImage
from cllm.errors import InvalidRequestError

SHOWN = "<image>"  # an image in a rendered text


def image_in_words() -> list[Piece]:
    """Return the words that replace an image, as a part of a rendered text."""
    return [Piece(in_words("image"), is_template=False)]


@dataclass(slots=True)
class ImageMarks:
    """The images of one chat, and their marks.

    Attributes
    ----------
    images : list of NamedImage
        In the order of their marks' numbers.
    nonce : str
        Beginning of every mark.
    """

    images: list[NamedImage] = field(default_factory=list)
    nonce: str = field(default_factory=lambda: f"image-{secrets.token_hex(16)}-")

    def add(self, image: NamedImage) -> str:
        """Return the mark of another image."""
        self.images.append(image)
        return f"{self.nonce}{len(self.images) - 1}-"

    def shown(self, text: str) -> str:
        """Return a rendered text with `<image>` in place of each mark."""
        return self._pattern.sub(SHOWN, text)

    def parts_of(self, text: str) -> list[str | NamedImage]:
        """Split a text at its marks: texts, which may be empty, and images alternate."""
        return [
            self.images[int(part)] if i % 2 else part
            for i, part in enumerate(self._pattern.split(text))
        ]

    def cut(self, pieces: Iterable[Piece], *, takes_images: bool) -> list[list[Piece] | NamedImage]:
        """Return the pieces of a rendered chat, and its images between them.

        Parameters
        ----------
        takes_images : bool
            False: words replace an optional image.

        Raises
        ------
        InvalidRequestError
            The template does not render each image once, or the model takes no images.  An optional image may be
            rendered any number of times.
        """
        found: list[list[Piece] | NamedImage] = []
        run: list[Piece] = []
        seen: list[NamedImage] = []
        for piece in pieces:
            for part in self.parts_of(piece.text):
                if isinstance(part, str):
                    run += [Piece(part, piece.is_template)] if part else []
                elif takes_images:
                    found += [run, part]
                    run = []
                    seen.append(part)
                elif part.is_optional:
                    run += image_in_words()
                else:
                    limit = "left out: the engine has no projector (mmproj)"
                    raise InvalidRequestError(part.field, "an image", limit)
        n_seen = Counter(map(id, seen))
        for image in self.images if takes_images else ():
            if not image.is_optional and n_seen[id(image)] != 1:
                limit = "left out: the chat template does not show each image once"
                raise InvalidRequestError(image.field, "an image", limit)
        return [*found, run]

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{self.nonce}(\d{{1,6}})-")
