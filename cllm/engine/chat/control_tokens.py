"""Keep the names of control tokens in callers' text from becoming control tokens.  Pure.

A chat template mixes its own control tokens with text of callers and returns one string.  The tokenizer
cannot tell if an `<|im_end|>` is the template's or a caller's.  Before the template runs, a *mark* is
therefore put after the first character of every name in the callers' text.  A mark is a private-use
character that occurs nowhere else.  In this place it is inside every name that starts there, even if
names overlap.  A template may trim, split, compare and copy marked text as usual.  Afterwards the marks
are removed, and a name that contained one is text.

A name that only the template creates is not found: from two adjacent texts, from a key between `<` and
`>`, or from a text that it changes (`lower`, `replace`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from cllm.engine.vocabulary import ChatVocabulary
from cllm.errors import InvalidRequestError

# Planes 15 and 16 are for private use, and no tokenizer has tokens of its own for them.
PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
# Unusable marks that are tried before the request is rejected; only an attack spells so many of them.
MAX_TRIES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendered chat.

    Attributes
    ----------
    text : str
    is_template : bool
        True: tokenize with control tokens recognised.  False: nothing in it is a control token.
    """

    text: str
    is_template: bool


def tokens_of(pieces: Iterable[Piece], vocabulary: ChatVocabulary) -> list[int]:
    """Return the concatenated tokens of pieces; no token such as BOS is added."""
    tokens: list[int] = []
    for text, is_template in ((piece.text, piece.is_template) for piece in pieces):
        if tokens:
            tokens += vocabulary.tokenize_inside(text, parse_special=is_template)
        else:
            tokens = vocabulary.tokenize(text, add_special=False, parse_special=is_template)
    return tokens


class ControlTokens:
    """The spellings of a model's control tokens.

    Parameters
    ----------
    names : iterable of str
        All control tokens.  Text without any of these names must have the same tokens with and
        without parsing of control tokens.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({name for name in names if name})
        self._pattern = re.compile(_longest_of(self._names) if self._names else "(?!)")

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Return the first name at or after `start`, the longest if several begin there; None without one."""
        return self._pattern.search(text, start)

    def guard(self, given: object, trusted: str) -> Guard:
        """Return a guard that separates the names in `given` from those in the template.

        Parameters
        ----------
        given : object
            JSON-like; everything that comes from callers.
        trusted : str
            Other text that the rendered text may contain: the template and its tokens.

        Raises
        ------
        InvalidRequestError
            The caller's text leaves no character that could be a mark.
        """
        texts = list(_strings_of(given))
        if not any(self.search(text) for text in texts):
            return Guard(self, {})
        # Nothing can be put inside a name of one character: that one is replaced by a mark.
        single = [name for name in self._names if len(name) == 1]
        everything = "\n".join((*texts, trusted, *self._names))
        chosen = _unused_characters(everything, 1 + len(single))
        if len(chosen) <= len(single):
            value = f"{len(chosen)} private-use characters unused"
            raise InvalidRequestError("messages", value, f"text that leaves {1 + len(single)}")
        return Guard(self, dict(zip(chosen, ["", *single], strict=True)))


class Guard:
    """Adds marks to one caller's text before a template runs, and removes them afterwards.

    Parameters
    ----------
    names : ControlTokens
    marks : mapping of str to str
        Marks, each with the character that it replaces.  The first is added to names and replaces
        none ("").  The mapping is empty if the caller's text has no names.
    """

    def __init__(self, names: ControlTokens, marks: Mapping[str, str]) -> None:
        self._names = names
        self._mark = next(iter(marks), "")
        self._of_character = str.maketrans({text: mark for mark, text in marks.items() if text})
        self._spelled = {
            spelling: text for mark, text in marks.items() for spelling in _spellings(mark)
        }
        self._pattern = re.compile("|".join(map(re.escape, self._spelled)) or "(?!)")

    def marked(self, value: Any) -> Any:
        """Return a JSON-like value with a mark in every name in its strings and keys; `value` is unchanged."""
        if not self._mark:
            return value
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            return {self._marked_text(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        return value

    def unmarked(self, text: str) -> str:
        """Return the text without marks, for an error message."""
        return self._pattern.sub(lambda match: self._spelled[match[0]], text)

    def pieces(self, text: str) -> list[Piece]:
        """Return a rendered text without its marks, in pieces.

        A name that contained a mark is a piece of text, even if it is another name than the marked
        one.  Adjacent pieces without names of the template are merged, so that a hostile chat does
        not become 100,000 pieces.  A text without marks is one piece.
        """
        plain, places, spans = self._taken_out(text)
        start = 0
        while places and (match := self._names.search(plain, start)):
            start = match.start() + 1
            i = bisect_right(places, match.start())
            if i < len(places) and places[i] < match.end():
                spans.append(match.span())
        pieces, end = [], 0
        for span in _union(spans):
            pieces += [Piece(plain[end : span[0]], True), Piece(plain[slice(*span)], False)]
            end = span[1]
        return self._joined([*pieces, Piece(plain[end:], is_template=True)])

    def _marked_text(self, text: str) -> str:
        text = text.translate(self._of_character) if self._of_character else text
        parts, end, start = [], 0, 0
        while match := self._names.search(text, start):
            # Search one character further, not after the match: overlapping names all need a mark.
            start = match.start() + 1
            parts += [text[end:start], self._mark]
            end = start
        return "".join((*parts, text[end:]))

    def _taken_out(self, text: str) -> tuple[str, list[int], list[tuple[int, int]]]:
        """Return the text without marks, the positions of the marks, and the spans of restored characters."""
        parts: list[str] = []
        places: list[int] = []
        spans: list[tuple[int, int]] = []
        n = end = 0
        for match in self._pattern.finditer(text):
            replaced = self._spelled[match[0]]
            parts += [text[end : match.start()], replaced]
            n += match.start() - end
            if replaced:
                spans.append((n, n + 1))
                n += 1
            else:
                places.append(n)
            end = match.end()
        return "".join((*parts, text[end:])), places, spans

    def _joined(self, pieces: list[Piece]) -> list[Piece]:
        """Return the same text in fewer pieces, at least one."""
        result: list[Piece] = []
        filled = [piece for piece in pieces if piece.text]
        for is_plain, group in groupby(filled, key=self._has_nothing_to_recognise):
            run = list(group)
            if is_plain and len(run) > 1:
                run = [Piece("".join(piece.text for piece in run), is_template=False)]
            result += run
        return result or [Piece("", is_template=True)]

    def _has_nothing_to_recognise(self, piece: Piece) -> bool:
        return not piece.is_template or self._names.search(piece.text) is None


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted spans of the same positions that neither touch nor overlap."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def _strings_of(value: object) -> Iterator[str]:
    """Yield every string in a JSON-like value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings_of(item)


def _unused_characters(text: str, n: int) -> list[str]:
    """Return up to `n` private-use characters of which no spelling occurs in the text."""
    used = set(text)
    free = (chr(code) for codes in PRIVATE_USE for code in codes if chr(code) not in used)
    tried = islice(free, n + MAX_TRIES)
    unused = (mark for mark in tried if not any(form in text for form in _spellings(mark)))
    return list(islice(unused, n))


def _spellings(mark: str) -> tuple[str, ...]:
    r"""Return the spellings of a mark in a template: literal, `tojson(ensure_ascii=true)`, `repr`, `urlencode`.

    What is escaped twice is not recognised: `\\udb80` then stays in the text, and in the name.
    """
    high, low = divmod(ord(mark) - 0x10000, 0x400)
    return (
        mark,
        f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}",
        f"\\U{ord(mark):08x}",
        "".join(f"%{byte:02X}" for byte in mark.encode()),
    )


def _longest_of(names: list[str]) -> str:
    """Return a regular expression that matches the longest of some names, which are sorted and distinct.

    The expression is a tree of common prefixes: plain alternatives would try a thousand names at each
    `<` of a hostile text.
    """
    first, last = names[0], names[-1]  # sorted, so the common prefix of these two is common to all
    n = next(
        (i for i, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first)
    )
    rest = [name[n:] for name in names]
    groups = [list(group) for _, group in groupby(filter(None, rest), key=lambda name: name[0])]
    if not groups:
        return re.escape(first)
    branches = "|".join(map(_longest_of, groups))
    return f"{re.escape(first[:n])}(?:{branches}){'?' if '' in rest else ''}"
