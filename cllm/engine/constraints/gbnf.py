"""Read a GBNF grammar as llama.cpp would, and refuse what llama.cpp must not read.  Pure.

llama.cpp's parser recurses for each bracket, makes up to thousands of rules of one repetition, and
prints to stderr what it does not understand; a few bytes of GBNF hang it or end the process.  The
syntax here is exactly that of `llama_grammar_parser`; what the rules may be is in `gbnf_rules`.
"""

from __future__ import annotations

import re

from cllm.checks import encode_text
from cllm.engine.constraints.gbnf_rules import (
    MAX_CODE_POINT,
    NAMED_TOKEN,
    OTHER_TOKEN,
    GrammarFault,
    Item,
    Rule,
    check_rules,
    mask_of,
)
from cllm.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 64 << 10
MAX_RULES = 2_000
MAX_NESTING = 64
MAX_REPETITIONS = 1_000
MAX_TOKEN_TEXT = 256
# Of 8 bytes each, kept three times: `"…"{1000}` repeats every character of its string.
MAX_ELEMENTS = 200_000
# llama.cpp's own limit (MAX_REPETITION_THRESHOLD) on the rules in a group times its repetitions.
MAX_REPEATED_RULES = 2_000

_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_TOKEN = re.compile(r"<(?:\[([0-9]+)\]|(?!\[)([^>]*))>")
_HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]-'}}


def check_gbnf(text: str, n_vocab: int) -> None:
    """Refuse a grammar that llama.cpp could not read, or that it should not.

    Parameters
    ----------
    text : str
        GBNF, at most 64 KiB of UTF-8.
    n_vocab : int
        `<[id]>` must be less.

    Raises
    ------
    InvalidRequestError
        Its value says where, its limit what would have been accepted.
    """
    if not isinstance(text, str):
        raise InvalidRequestError("grammar", text, "a string")
    # A character is at least a byte: do not encode gigabytes to count them.
    n_bytes = len(text)
    if n_bytes <= MAX_GRAMMAR_BYTES:
        n_bytes = len(encode_text("grammar", text, InvalidRequestError))
    if n_bytes > MAX_GRAMMAR_BYTES:
        limit = f"at most {MAX_GRAMMAR_BYTES} bytes of UTF-8"
        raise InvalidRequestError("grammar", f"of {n_bytes} bytes or more", limit)
    try:
        if "\0" in text:
            raise GrammarFault(text.index("\0"), "text without NUL characters")
        parser = _Parser(text, n_vocab)
        parser.parse()
        check_rules(parser.rules, parser.token_texts)
    except GrammarFault as fault:
        line = text.count("\n", 0, fault.at) + 1
        excerpt = text[fault.at : fault.at + 40].split("\n")[0].strip() or "the end"
        raise InvalidRequestError("grammar", f"line {line}: {excerpt}", fault.limit) from None


class _Parser:
    """Rules from a text.  Recurses once for each open bracket, which are few.

    Attributes
    ----------
    rules : list of Rule
        In no order of llama.cpp's.
    token_texts : list of str
        Every `<text>`, with its brackets.
    """

    def __init__(self, text: str, n_vocab: int) -> None:
        self.rules: list[Rule] = []
        self.token_texts: list[str] = []
        self._text = text
        self._n_vocab = n_vocab
        self._at = 0
        self._names: dict[str, int] = {}
        self._n_rules = 0  # that llama.cpp would have by now
        self._n_elements = 0

    def parse(self) -> None:
        """Read all rules."""
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            self._named_rule()
        if "root" not in self._names:
            raise GrammarFault(0, "a grammar with a rule that is named root")
        for rule in self.rules:
            if not rule.alternatives:
                raise GrammarFault(rule.at, "the name of a rule that is defined")

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
            raise GrammarFault(self._at, limit)
        self._at = match.end()
        return match

    # --- Rules -------------------------------------------------------------------------------
    def _named_rule(self) -> None:
        start = self._at
        rule = self.rules[self._reference()]
        self._skip(_BLANKS)
        if not self._text.startswith("::=", self._at):
            raise GrammarFault(self._at, "::= after the name of a rule")
        if rule.alternatives:
            raise GrammarFault(start, "one definition of each rule: llama.cpp forgets the first")
        self._at += 3
        self._skip(_BLANKS_AND_LINES)
        rule.at = start
        self._alternatives(rule, 0)
        if self._at < len(self._text) and self._peek() not in "\r\n":
            raise GrammarFault(self._at, "part of a rule, or a new line")
        self._skip(_BLANKS_AND_LINES)

    def _reference(self) -> int:
        """The index of the rule whose name comes next, which may be its first mention."""
        start = self._at
        name = self._take(_NAME, "the name of a rule: letters, digits and -").group()
        if name not in self._names:
            self._names[name] = self._new_rule(start, named=True)
            self._count_rules(start, 1)
        return self._names[name]

    def _new_rule(self, at: int, *, named: bool) -> int:
        self.rules.append(Rule(at, named))
        return len(self.rules) - 1

    def _count_rules(self, at: int, n: int) -> None:
        self._n_rules += n
        if self._n_rules > MAX_RULES:
            limit = f"at most {MAX_RULES} rules, counting brackets and repetitions"
            raise GrammarFault(at, limit)

    def _count_elements(self, at: int, n: int) -> None:
        self._n_elements += n
        if self._n_elements > MAX_ELEMENTS:
            raise GrammarFault(at, f"at most {MAX_ELEMENTS} characters after all repetitions")

    def _alternatives(self, rule: Rule, depth: int) -> None:
        rule.alternatives.append(self._sequence(depth))
        while self._peek() == "|":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            rule.alternatives.append(self._sequence(depth))

    def _sequence(self, depth: int) -> list[Item]:
        blanks = _BLANKS_AND_LINES if depth else _BLANKS
        items: list[Item] = []
        last: Item | None = None  # what a repetition would repeat: `""` and `x{0}` are nothing
        while character := self._peek():
            start = self._at
            if character in "*+?{":
                low, high = self._bounds(blanks)
                if last is None:
                    raise GrammarFault(start, "a repetition of something")
                last = self._repeated(items.pop(), low, high, start)
            elif character == '"':
                last = self._string()
            elif character == "[":
                last = self._character_class()
            elif character in "<!":
                last = self._token()
            elif character == ".":
                self._at += 1
                last = Item(start, None, mask_of(1, MAX_CODE_POINT))
            elif character == "(":
                last = self._group(depth + 1)
            elif _NAME.match(character):
                last = Item(start, self._reference())
            else:
                break
            if last is not None:
                items.append(last)
            self._skip(blanks)
        return items

    def _group(self, depth: int) -> Item:
        start = self._at
        if depth > MAX_NESTING:
            raise GrammarFault(start, f"at most {MAX_NESTING} brackets within each other")
        self._at += 1
        self._skip(_BLANKS_AND_LINES)
        n_rules_before = self._n_rules
        self._count_rules(start, 1)
        index = self._new_rule(start, named=False)
        self._alternatives(self.rules[index], depth)
        if self._peek() != ")":
            raise GrammarFault(self._at, "part of a group, or )")
        self._at += 1
        return Item(start, index, n_rules=self._n_rules - n_rules_before)

    # --- Repetitions -------------------------------------------------------------------------
    def _bounds(self, blanks: re.Pattern[str]) -> tuple[int, int | None]:
        """The least and the most repetitions, from `*`, `+`, `?`, `{m}`, `{m,}` or `{m,n}`."""
        start, character = self._at, self._peek()
        self._at += 1
        if character != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        self._skip(blanks)
        low = self._count(start)
        self._skip(blanks)
        high: int | None = low
        if self._peek() == ",":
            self._at += 1
            self._skip(blanks)
            high = self._count(start) if _DIGITS.match(self._peek()) else None
            self._skip(blanks)
        if self._peek() != "}":
            raise GrammarFault(start, "{m}, {m,} or {m,n}")
        self._at += 1
        if high is not None and high < low:
            raise GrammarFault(start, "{m,n} with m <= n")
        return low, high

    def _count(self, start: int) -> int:
        digits = self._take(_DIGITS, "{m}, {m,} or {m,n}").group().lstrip("0")
        # Python refuses to make a number of thousands of digits.
        if len(digits) > 9 or int(digits or "0") > MAX_REPETITIONS:
            raise GrammarFault(start, f"at most {MAX_REPETITIONS} repetitions")
        return int(digits or "0")

    def _repeated(self, item: Item, low: int, high: int | None, at: int) -> Item | None:
        """`item` repeated, or None where that is nothing."""
        if high is None and item.low == 0:  # llama.cpp takes `x*+` for left recursion
            raise GrammarFault(at, "no * or + of something that may be empty, without brackets")
        n_times = high or low or 1
        if item.n_rules * n_times > MAX_REPEATED_RULES:
            limit = f"at most {MAX_REPEATED_RULES} rules times their repetitions"
            raise GrammarFault(at, limit)
        # llama.cpp writes the part `low` times, and a rule for each further repetition.
        n_made = 1 if high is None else high - low
        size = item.size * low + min(n_made, 1)
        self._count_rules(at, n_made)
        self._count_elements(at, max(0, size - item.size) + n_made * (item.size + 3))
        if high == 0:
            return None
        n_rules = item.n_rules * n_times
        if (item.low, item.high) == (1, 1):
            item.low, item.high, item.size, item.n_rules = low, high, size, n_rules
            return item
        outer = self._new_rule(item.at, named=False)
        self.rules[outer].alternatives.append([item])
        return Item(item.at, outer, low=low, high=high, size=size, n_rules=n_rules)

    # --- Strings, classes, tokens ------------------------------------------------------------
    def _character(self) -> int:
        """The code point that comes next in a string or a class."""
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
            raise GrammarFault(start, 'a closing " or ]' if at_end else limit)
        self._at += 1
        return ord(character)

    def _string(self) -> Item | None:
        start = self._at
        self._at += 1
        codes: list[int] = []
        while self._peek() != '"':
            at = self._at
            codes.append(self._character())
            if not 0 < codes[-1] <= MAX_CODE_POINT:
                raise GrammarFault(at, "a character that text can have")
        self._at += 1
        if not codes:
            return None
        literal = "".join(map(chr, codes))
        return Item(start, None, mask_of(codes[0]), literal, size=len(codes))

    def _character_class(self) -> Item:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        size = 0
        while self._peek() != "]":
            at = self._at
            low = high = self._character()
            if self._peek() == "-" and self._peek(1) != "]":
                self._at += 1
                high = self._character()
                size += 1
            if high < low:
                raise GrammarFault(at, "a range that goes up")
            ranges.append((low, high))
            size += 1
        self._at += 1
        mask = _complement(ranges) if negated else _union(ranges)
        if not ranges or not mask:
            raise GrammarFault(start, "a class that some character is in")
        return Item(start, None, mask, size=size)

    def _token(self) -> Item:
        start = self._at
        negated = self._peek() == "!"
        self._at += negated
        match = self._take(_TOKEN, "a token: <[id]> or <text>")
        digits, text = match.groups()
        if digits is not None:
            digits = digits.lstrip("0")
            if len(digits) > 9 or int(digits or "0") >= self._n_vocab:
                raise GrammarFault(start, f"token ids 0 to {self._n_vocab - 1}")
            return Item(start, None, OTHER_TOKEN)
        if len(text.encode()) > MAX_TOKEN_TEXT:
            raise GrammarFault(start, f"a token of at most {MAX_TOKEN_TEXT} bytes")
        if negated:
            return Item(start, None, OTHER_TOKEN)
        self.token_texts.append(match.group())
        return Item(start, None, NAMED_TOKEN)


def _union(ranges: list[tuple[int, int]]) -> int:
    mask = 0
    for low, high in ranges:
        mask |= mask_of(low, high)
    return mask


def _complement(ranges: list[tuple[int, int]]) -> int:
    """The set of the characters in none of the ranges."""
    mask, start = 0, 1
    for low, high in sorted(ranges):
        if start < low:
            mask |= mask_of(start, min(low - 1, MAX_CODE_POINT))
        start = max(start, high + 1)
    return mask | (mask_of(start, MAX_CODE_POINT) if start <= MAX_CODE_POINT else 0)
