"""Images and audio in the content of messages: marks in the text that a template renders.  Pure.

A template gets text alone.  Each image or recording becomes a mark in it, which contains a random number that
no caller can know.  After rendering, the text is cut at the marks, and the rows of the media are put there.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from cllm.engine.chat.control_tokens import Piece
from cllm.engine.chat.readable import WORDS, in_words
from cllm.engine.media import left_out
from cllm.engine.media_source import NamedMedia
from cllm.errors import InvalidRequestError


def shown(kind: str) -> str:
    """Return how an image or audio is shown in a rendered text."""
    return f"<{kind}>"


def media_in_words(media: NamedMedia) -> list[Piece]:
    """Return the words that replace an image or audio, as a part of a rendered text."""
    return [Piece(in_words(media.media.kind), is_template=False)]


@dataclass(slots=True)
class MediaMarks:
    """The images and audio of one chat, and their marks.

    Attributes
    ----------
    media : list of NamedMedia
        In the order of their marks' numbers.
    nonce : str
        Beginning of every mark.
    """

    media: list[NamedMedia] = field(default_factory=list)
    nonce: str = field(default_factory=lambda: f"media-{secrets.token_hex(16)}-")

    def add(self, media: NamedMedia) -> str:
        """Return the mark of another image or recording."""
        self.media.append(media)
        return f"{self.nonce}{len(self.media) - 1}-"

    def shown(self, text: str) -> str:
        """Return a rendered text with `<image>` or `<audio>` in place of each mark."""
        parts = self.parts_of(text)
        return "".join(p if isinstance(p, str) else shown(p.media.kind) for p in parts)

    def parts_of(self, text: str) -> list[str | NamedMedia]:
        """Split a text at its marks: texts, which may be empty, and media alternate."""
        return [
            self.media[int(part)] if i % 2 else part
            for i, part in enumerate(self._pattern.split(text))
        ]

    def cut(
        self, pieces: Iterable[Piece], modalities: Container[str]
    ) -> list[list[Piece] | NamedMedia]:
        """Return the pieces of a rendered chat, and its media between them.

        Parameters
        ----------
        modalities : container of str
            Kinds that the model takes; words replace an optional image or recording of another kind.

        Raises
        ------
        InvalidRequestError
            The template does not render each image and recording once, or the model does not take it.  An
            optional one may be rendered any number of times.
        """
        found: list[list[Piece] | NamedMedia] = []
        run: list[Piece] = []
        seen: list[NamedMedia] = []
        for piece in pieces:
            for part in self.parts_of(piece.text):
                if isinstance(part, str):
                    run += [Piece(part, piece.is_template)] if part else []
                elif part.media.kind in modalities:
                    found += [run, part]
                    run = []
                    seen.append(part)
                else:  # rejected below, unless it is optional
                    run += media_in_words(part)
        n_seen = Counter(map(id, seen))
        for media in self.media:
            if media.is_optional:
                continue
            if media.media.kind not in modalities:  # a template may have dropped it
                limit = left_out(media.media.kind, modalities)
                raise InvalidRequestError(media.field, WORDS[media.media.kind], limit)
            if n_seen[id(media)] != 1:
                limit = f"left out: the chat template does not show each {media.media.kind} once"
                raise InvalidRequestError(media.field, WORDS[media.media.kind], limit)
        return [*found, run]

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{self.nonce}(\d{{1,6}})-")
