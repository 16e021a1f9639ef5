"""Images in the content of messages: marks in the text that a template renders.  Pure.

A template gets text alone.  Each image becomes a mark in it, which contains a random number that no caller
can know.  After rendering, the text is cut at the marks, and the rows of the images are put there.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cllm.engine.chat.control_tokens import Piece
from cllm.engine.image import Image
from cllm.errors import InvalidRequestError

SHOWN = "<image>"  # an image in a rendered text


@dataclass(slots=True)
class ImageMarks:
    """The images of one chat, and their marks.

    Attributes
    ----------
    images : list of Image
        In the order of their marks' numbers.
    nonce : str
        Beginning of every mark.
    """

    images: list[Image] = field(default_factory=list)
    nonce: str = field(default_factory=lambda: f"image-{secrets.token_hex(16)}-")

    def add(self, image: Image) -> str:
        """Return the mark of another image."""
        self.images.append(image)
        return f"{self.nonce}{len(self.images) - 1}-"

    def shown(self, text: str) -> str:
        """Return a rendered text with `<image>` in place of each mark."""
        return self._pattern.sub(SHOWN, text)

    def cut(self, pieces: Iterable[Piece]) -> list[list[Piece] | Image]:
        """Return the pieces of a rendered chat, and its images between them.

        Raises
        ------
        InvalidRequestError
            The template does not render each image once.
        """
        found: list[list[Piece] | Image] = []
        run: list[Piece] = []
        seen: list[int] = []
        for piece in pieces:
            # Texts and numbers of images by turns.
            for i, part in enumerate(self._pattern.split(piece.text)):
                if i % 2:
                    found += [run, self.images[int(part)]]
                    run = []
                    seen.append(int(part))
                elif part:
                    run.append(Piece(part, piece.is_template))
        if sorted(seen) != list(range(len(self.images))):
            limit = "left out: the chat template does not show each image once"
            raise InvalidRequestError("messages", "an image", limit)
        return [*found, run]

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{self.nonce}(\d{{1,6}})-")


def text_of_parts(parts: Sequence[object], marks: ImageMarks, text_of: Iterable[str]) -> str:
    """Return a content with images as text: texts one line each, images without lines of their own.

    Parameters
    ----------
    text_of : iterable of str
        The texts of the parts that are not images, in order.
    """
    texts, written, follows_text = iter(text_of), "", False
    for part in parts:
        image = image_of(part)
        if image is not None:
            written += marks.add(image)
        else:
            written += ("\n" if follows_text else "") + next(texts)
        follows_text = image is None
    return written


def image_of(part: object) -> Image | None:
    """Return the image of a content part `{"type": "image", "image": Image}`; None for another part."""
    if isinstance(part, dict) and part.get("type") == "image":
        image = part.get("image")
        return image if isinstance(image, Image) else None
    return None
