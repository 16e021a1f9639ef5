"""JsonScanner: find the end of one JSON value in text that arrives in parts.  Pure."""

from __future__ import annotations

import re

MAX_DEPTH = 64
SPACE = " \t\r\n"
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
MAX_SCALAR = 308  # an integer of so many digits has at most 1,024 bits
DELIMITERS = ",]} \t\r\n:"
HEX = "0123456789abcdefABCDEF"
# Control characters with their escapes: models write them into strings without the escape.
CONTROL = {chr(code): f"\\u{code:04x}" for code in range(32)} | {
    "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f",
}  # fmt: skip


class NotJsonError(Exception):
    """The text is no JSON from `at` on."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at: int = at


class JsonScanner:
    """Scanner of one JSON value, which looks at each character once.

    Control characters inside strings are accepted, and escaped in the output.

    Attributes
    ----------
    is_done : bool
        True if the value is complete.
    """

    def __init__(self) -> None:
        self.is_done: bool = False
        self._open: list[str] = []  # of each level: the bracket that ends it
        self._wants = "value"
        self._scalar = ""
        self._is_string = False
        self._n_escape = 0  # characters that an escape still lacks; -1: its kind is not known yet
        self._out: list[str] = []

    def taken(self) -> str:
        """Return the text read since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def ends_here(self) -> bool:
        """Return True if the value is complete at the end of the text, which is what ends a lone number."""
        if not self._open and self._scalar and SCALAR.fullmatch(self._scalar):
            self._out.append(self._scalar)
            self._scalar, self.is_done = "", True
        return self.is_done

    def scan(self, text: str, at: int) -> int:
        """Scan from `at`, and return the position of the end of the value, or of the text.

        Raises
        ------
        NotJsonError
            The text is not JSON, has over 64 levels, or a number of over 308 characters.
        """
        while at < len(text) and not self.is_done:
            at = self._string(text, at) if self._is_string else self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        character = text[at]
        if self._n_escape:
            return self._escape(character, at)
        if character == '"':
            self._is_string = False
            self._out.append(character)
            if self._wants == "key":
                self._wants = "colon"
            else:
                self._ended()
            return at + 1
        if character == "\\":
            self._n_escape = -1
            self._out.append(character)
            return at + 1
        if character in CONTROL:
            self._out.append(CONTROL[character])
            return at + 1
        match = PLAIN.match(text, at)
        assert match is not None
        self._out.append(match.group())
        return match.end()

    def _escape(self, character: str, at: int) -> int:
        if self._n_escape > 0:
            if character not in HEX:
                raise NotJsonError(at)
            self._n_escape -= 1
        elif character == "u":
            self._n_escape = 4
        elif character in '"\\/bfnrt':
            self._n_escape = 0
        else:
            raise NotJsonError(at)
        self._out.append(character)
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        character = text[at]
        if self._scalar:
            if character not in DELIMITERS:
                if len(self._scalar) >= MAX_SCALAR:
                    raise NotJsonError(at)
                self._scalar += character
                return at + 1
            if not SCALAR.fullmatch(self._scalar):
                raise NotJsonError(at)
            self._out.append(self._scalar)
            self._scalar = ""
            self._ended()
            return at
        if character in SPACE:
            self._out.append(character)
            return at + 1
        self._token(character, at)
        if not self._scalar:  # a scalar is in the output when it is complete
            self._out.append(character)
        return at + 1

    def _token(self, character: str, at: int) -> None:
        wants = self._wants
        if character == '"' and wants in ("value", "key", "first key", "first value"):
            self._is_string = True
            self._wants = "key" if "key" in wants else "value"
        elif character in "{[" and wants in ("value", "first value"):
            if len(self._open) >= MAX_DEPTH:
                raise NotJsonError(at)
            self._open.append("}" if character == "{" else "]")
            self._wants = "first key" if character == "{" else "first value"
        elif character == ":" and wants == "colon":
            self._wants = "value"
        elif character == "," and wants == "more":
            self._wants = "key" if self._open[-1] == "}" else "value"
        elif (
            self._open
            and character == self._open[-1]
            and wants in ("more", "first " + _inside(character))
        ):
            self._open.pop()
            self._ended()
        elif wants in ("value", "first value") and (character in "-0123456789tfn"):
            self._scalar = character
        else:
            raise NotJsonError(at)

    def _ended(self) -> None:
        """Note that a value is complete."""
        self._wants = "more"
        self.is_done = not self._open


def _inside(bracket: str) -> str:
    return "key" if bracket == "}" else "value"
