"""Protocols of vocabularies: the methods that each part of an engine needs.

`cllm.bindings.Vocabulary` has all of these methods, for any thread.  A test of one part needs a fake with
the methods of one protocol only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class OutputVocabulary(Protocol):
    """Vocabulary for a tick: the text of a token, and if it ends the output."""

    def piece(self, token: int) -> bytes: ...
    def is_eog(self, token: int) -> bool: ...


def spelled_piece(spelled: Mapping[int, bytes], vocabulary: OutputVocabulary, token: int) -> bytes:
    """Return the bytes that a token adds to a text in which some control tokens are spelled out."""
    return spelled[token] if token in spelled else vocabulary.piece(token)


class SpellingVocabulary(Protocol):
    """Vocabulary for log probabilities."""

    def piece(self, token: int) -> bytes: ...
    def spelling(self, token: int) -> bytes: ...


class ChatVocabulary(Protocol):
    """Vocabulary for chats: control tokens, and the tokenizer."""

    bos: int | None
    eos: int | None
    adds_bos: bool

    def text(self, token: int) -> str: ...
    def control_names(self) -> list[str]: ...
    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]: ...
    def tokenize_inside(self, text: str, *, parse_special: bool = False) -> list[int]: ...


class RankVocabulary(ChatVocabulary, Protocol):
    """Vocabulary for rankings: tokens of a document that may be cut to fit, and its text again."""

    def join(self, tokens: Sequence[int]) -> bytes: ...


class GuidanceVocabulary(Protocol):
    """Vocabulary for structured output by llguidance, from a worker thread."""

    n_tokens: int

    @property
    def ends(self) -> tuple[int, ...]: ...
    def pieces(self) -> list[bytes]: ...
    def spelling(self, token: int) -> bytes: ...
    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]: ...
    def tokenize_inside(self, text: str) -> list[int]: ...


class EngineVocabulary(OutputVocabulary, RankVocabulary, GuidanceVocabulary, Protocol):
    """Vocabulary with all methods that an engine needs."""

    @property
    def path(self) -> str: ...
    @property
    def prefixes_space(self) -> bool: ...
