"""Patterns of JSON schemas, which are JavaScript's (ECMA-262), for the regular expressions of llguidance.  Pure."""

from __future__ import annotations

import re

# Parts of a pattern that are not regular: lookarounds, anchors such as \b, and backreferences.
IRREGULAR = re.compile(r"\(\?(?:=|!|<=|<!)|\\[bBAzZGkK1-9]")
ESCAPE = r"\\(?:[pP]\{[^}]*\}|[ux]\{[^}]*\}|.)"
TOKEN = re.compile(rf"{ESCAPE}|\[\^?\]?(?:{ESCAPE}|[^\]\\])*\]|\{{\d+(?:,\d*)?\}}|.", re.DOTALL)
IN_CLASS = re.compile(rf"{ESCAPE}|.", re.DOTALL)
SET = re.compile(r"\\[dDsSwWpP]")  # an escape that stands for several characters


def is_irregular(pattern: str) -> bool:
    """Return True if a pattern has a lookaround, an anchor other than `^` and `$`, or a backreference."""
    return IRREGULAR.search(pattern.replace("\\\\", "")) is not None


def with_escapes(pattern: str) -> str:
    """Return a pattern with a backslash before characters that have a meaning for llguidance alone.

    These are `[`, `&` and `~` in a class, a `-` that makes no range, and a `{` without a count.
    """
    return "".join(map(_escaped, TOKEN.findall(pattern)))


def _escaped(token: str) -> str:
    if token in ("\\<", "\\>"):  # anchors of words for llguidance
        return token[1:]
    if token == "{":
        return "\\{"
    return _class(token) if token[0] == "[" and len(token) > 1 else token


def _class(text: str) -> str:
    begin = "[^" if text.startswith("[^") else "["
    tokens = IN_CLASS.findall(text[len(begin) : -1])
    said, can_begin, ends_range = [begin], False, False
    for token, after in zip(tokens, [*tokens[1:], ""], strict=True):
        if token == "-" and can_begin and after and not SET.match(after):
            said.append("-")
            can_begin, ends_range = False, True
            continue
        said.append(f"\\{token}" if token in "[&~-" else token)
        can_begin, ends_range = not ends_range and not SET.match(token), False
    return "".join([*said, "]"])
