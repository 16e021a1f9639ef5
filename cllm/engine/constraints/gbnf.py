"""Write a GBNF grammar, llama.cpp's format, as a Lark grammar for llguidance.  Pure.

The syntax is that of `llama_grammar_parser` (llama-grammar.cpp).  Every character becomes a lexeme of
its own: llguidance matches lexemes longest first, so a longer lexeme would change the language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise

MAX_NESTING = 64  # brackets and repetitions; llguidance's parser recurses
MAX_REPETITIONS = 2_000  # MAX_REPETITION_THRESHOLD of llama.cpp

# Code points that a text can contain, without NUL: (first, last) of each range.
_TEXT = ((0x1, 0xD7FF), (0xE000, 0x10FFFF))

_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_TOKEN = re.compile(r"!?<(?:\[([0-9]+)\]|(?!\[)[^>]*)>")
_HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]-'}}


class GbnfError(ValueError):
    """The text is not GBNF; the message names the place and the expected text."""


def lark_of_gbnf(text: str, n_vocab: int, token_of: Callable[[str], int | None]) -> str:
    """Return the grammar in llguidance's Lark.

    Parameters
    ----------
    text : str
        GBNF.
    n_vocab : int
        Number of tokens; `<[id]>` must be less.
    token_of : callable
        Returns the id of the token spelled `<text>`, brackets included; None if it is not one token.

    Raises
    ------
    GbnfError
    """
    writer = _Writer(text, n_vocab, token_of)
    try:
        return writer.write()
    except _Fault as fault:
        line = text.count("\n", 0, fault.at) + 1
        excerpt = text[fault.at : fault.at + 40].split("\n")[0].strip() or "the end"
        raise GbnfError(f"{fault.limit}, in place of {excerpt!r} (line {line})") from None


class _Fault(Exception):
    """Fault at position `at`, where the text must be `limit`."""

    def __init__(self, at: int, limit: str) -> None:
        super().__init__(at, limit)
        self.at = at
        self.limit = limit


class _Writer:
    """Reads GBNF and writes Lark, from left to right.  Recurses once for each open bracket."""

    def __init__(self, text: str, n_vocab: int, token_of: Callable[[str], int | None]) -> None:
        self._text = text
        self._n_vocab = n_vocab
        self._token_of = token_of
        self._at = 0
        self._names = {"root": "start"}
        self._mentions: dict[str, int] = {"root": 0}  # the first place of each name
        self._rules: dict[str, str] = {}

    def write(self) -> str:
        """Return the grammar, a line for each rule."""
        if "\0" in self._text:
            raise _Fault(self._text.index("\0"), "text without NUL characters")
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            self._rule()
        if "root" not in self._rules:
            raise _Fault(self._mentions["root"], "a grammar with a rule that is named root")
        for name, at in self._mentions.items():
            if name not in self._rules:
                raise _Fault(at, "the name of a rule that is defined")
        return "".join(f"{self._names[name]}: {body}\n" for name, body in self._rules.items())

    # --- Places in the text ------------------------------------------------------------------
    def _peek(self, n: int = 0) -> str:
        return self._text[self._at + n : self._at + n + 1]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        match = blanks.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _take(self, pattern: re.Pattern[str], limit: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise _Fault(self._at, limit)
        self._at = match.end()
        return match

    # --- Rules -------------------------------------------------------------------------------
    def _rule(self) -> None:
        start = self._at
        name = self._name()
        self._skip(_BLANKS)
        if not self._text.startswith("::=", self._at):
            raise _Fault(self._at, "::= after the name of a rule")
        if name in self._rules:
            raise _Fault(start, "one definition of each rule: llama.cpp forgets the first")
        self._at += 3
        self._skip(_BLANKS_AND_LINES)
        self._rules[name] = ""
        self._rules[name], _ = self._alternatives(0)
        if self._at < len(self._text) and self._peek() not in "\r\n":
            raise _Fault(self._at, "part of a rule, or a new line")
        self._skip(_BLANKS_AND_LINES)

    def _name(self) -> str:
        start = self._at
        name = self._take(_NAME, "the name of a rule: letters, digits and -").group()
        self._mentions.setdefault(name, start)
        self._names.setdefault(name, f"r{len(self._names)}")
        return name

    def _alternatives(self, depth: int) -> tuple[str, int]:
        """Return the alternatives of a rule or group in Lark, and their depth of brackets and repetitions."""
        sequences = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            sequences.append(self._sequence(depth))
        return " | ".join(text for text, _ in sequences), max(nesting for _, nesting in sequences)

    def _sequence(self, depth: int) -> tuple[str, int]:
        blanks = _BLANKS_AND_LINES if depth else _BLANKS
        items: list[str] = []
        last = ""  # what a repetition would repeat: `""` and `x{0}` are nothing
        deepest = nesting = 0
        while character := self._peek():
            start = self._at
            if character in "*+?{":
                if not last:
                    raise _Fault(start, "a repetition of something")
                times = self._times(blanks)
                nesting += 1
                items.pop()
                last = f"({last}){times}" if times else ""
            else:
                nesting = 0
                if character == '"':
                    last = self._string()
                elif character == "[":
                    last = self._character_class()
                elif character in "<!":
                    last = self._token()
                elif character == ".":
                    self._at += 1
                    last = _lexeme(_TEXT)
                elif character == "(":
                    last, nesting = self._group(depth + 1)
                elif _NAME.match(character):
                    last = self._names[self._name()]
                else:
                    break
            _check_nesting(depth + nesting, start)
            deepest = max(deepest, nesting)
            if last:
                items.append(last)
            self._skip(blanks)
        return " ".join(items) or '""', deepest

    def _group(self, depth: int) -> tuple[str, int]:
        _check_nesting(depth, self._at)
        self._at += 1
        self._skip(_BLANKS_AND_LINES)
        inner, nesting = self._alternatives(depth)
        if self._peek() != ")":
            raise _Fault(self._at, "part of a group, or )")
        self._at += 1
        return f"({inner})", nesting + 1

    # --- Repetitions -------------------------------------------------------------------------
    def _times(self, blanks: re.Pattern[str]) -> str:
        """Return `*`, `+`, `?`, `{m}`, `{m,}` or `{m,n}` as Lark has it; "" for no times."""
        start, character = self._at, self._peek()
        self._at += 1
        if character != "{":
            return character
        self._skip(blanks)
        low = self._number(start)
        if low > MAX_REPETITIONS:
            raise _Fault(start, f"at most {MAX_REPETITIONS} repetitions")
        self._skip(blanks)
        high: int | None = low
        if self._peek() == ",":
            self._at += 1
            self._skip(blanks)
            high = self._number(start) if _DIGITS.match(self._peek()) else None
            if high is not None and high > MAX_REPETITIONS:
                high = None  # as llama.cpp reads it
            self._skip(blanks)
        if self._peek() != "}":
            raise _Fault(start, "{m}, {m,} or {m,n}")
        self._at += 1
        if high is None:
            return f"{{{low},}}"
        if high < low:
            raise _Fault(start, "{m,n} with m <= n")
        return f"{{{low},{high}}}" if high else ""

    def _number(self, start: int) -> int:
        digits = self._take(_DIGITS, "{m}, {m,} or {m,n}").group().lstrip("0")
        return int(digits[:9] or "0")  # Python refuses to make a number of thousands of digits

    # --- Strings, classes, tokens ------------------------------------------------------------
    def _character(self) -> int:
        """Return the code point that comes next in a string or a class."""
        start, character = self._at, self._peek()
        if character == "\\":
            if match := _HEX.match(self._text, start):
                self._at = match.end()
                return int(match[match.lastindex or 0], 16)
            character = _ESCAPES.get(self._peek(1), "")
            self._at += 1
        if not character:
            limit = '\\n, \\r, \\t, \\\\, \\", \\[, \\], \\-, \\x12, \\u1234 or \\U00012345'
            at_end = start + 1 >= len(self._text)
            raise _Fault(start, 'a closing " or ]' if at_end else limit)
        self._at += 1
        return ord(character)

    def _string(self) -> str:
        self._at += 1
        lexemes: list[str] = []
        while self._peek() != '"':
            at = self._at
            code = self._character()
            if not any(low <= code <= high for low, high in _TEXT):
                raise _Fault(at, "a character that text can have")
            lexemes.append(json.dumps(chr(code), ensure_ascii=False))
        self._at += 1
        return " ".join(lexemes) if len(lexemes) < 2 else f"({' '.join(lexemes)})"

    def _character_class(self) -> str:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            at = self._at
            low = high = self._character()
            if self._peek() == "-" and self._peek(1) != "]":
                self._at += 1
                high = self._character()
            if high < low:
                raise _Fault(at, "a range that goes up")
            ranges.append((low, high))
        self._at += 1
        if negated:
            edges = [(-1, -1), *_joined(ranges), (_TEXT[-1][1] + 1,) * 2]
            allowed = [(one[1] + 1, other[0] - 1) for one, other in pairwise(edges)]
        else:
            allowed = ranges
        found = [
            (max(low, first), min(high, last))
            for low, high in allowed
            for first, last in _TEXT
            if max(low, first) <= min(high, last)
        ]
        if not ranges or not found:
            raise _Fault(start, "a class that some character is in")
        return _lexeme(found)

    def _token(self) -> str:
        start = self._at
        match = self._take(_TOKEN, "a token: <[id]> or <text>")
        negation = "^" if match[0].startswith("!") else ""
        token: int | None
        if match[1] is None:
            token = self._token_of(match[0].removeprefix("!"))
            if token is None:
                raise _Fault(start, "the text of one token of the vocabulary")
        else:
            digits = match[1].lstrip("0") or "0"
            if len(digits) > 9 or int(digits) >= self._n_vocab:
                raise _Fault(start, f"token ids 0 to {self._n_vocab - 1}")
            token = int(digits)
        return f"<[{negation}{token}]>"


def _check_nesting(n: int, at: int) -> None:
    if n > MAX_NESTING:
        raise _Fault(at, f"at most {MAX_NESTING} brackets and repetitions within each other")


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _lexeme(ranges: Iterable[tuple[int, int]]) -> str:
    """Return a Lark lexeme that matches one character of these ranges."""
    return "/[" + "".join(rf"\u{{{low:x}}}-\u{{{high:x}}}" for low, high in ranges) + "]/"
