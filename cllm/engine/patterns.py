"""Patterns of JSON schemas, which are JavaScript's (ECMA-262), for the regular expressions of llguidance.  Pure."""

from __future__ import annotations

import re

# Parts of a pattern that are not regular: lookarounds, anchors such as \b, and backreferences.
IRREGULAR = re.compile(r"\(\?(?:=|!|<=|<!)|\\[bBAzZGkK1-9]")
ESCAPE = r"\\(?:[pPux]\{[^{}]*+\}|.)"
# A class that is not closed reaches to the end: llguidance rejects it.  Nothing is tried twice: a client writes patterns.
TOKEN = re.compile(rf"{ESCAPE}|\[\^?+(?:{ESCAPE}|[^\]\\])*+\]?+|\{{\d++(?:,\d*+)?\}}|.", re.DOTALL)
IN_CLASS = re.compile(rf"{ESCAPE}|.", re.DOTALL)
SET = re.compile(r"\\[dDsSwWpP]")  # an escape that stands for several characters
# Classes without characters; those of llguidance have some.
EMPTY = {"[]": r"[^\s\S]", "[^]": r"[\s\S]"}
# Escapes of plain characters in JavaScript, which are anchors of words for llguidance.
ANGLES = {"\\<": "<", "\\>": ">"}


def is_irregular(pattern: str) -> bool:
    """Return True if a pattern has a lookaround, an anchor other than `^` and `$`, or a backreference."""
    return IRREGULAR.search(pattern.replace("\\\\", "")) is not None


def with_escapes(pattern: str) -> str:
    """Return a pattern that llguidance reads as JavaScript does.

    A character that has a meaning for llguidance alone gets a backslash: `[`, `&` and `~` in a class, a `-` that
    makes no range, and a `{` without a count.  Escapes of angle brackets lose theirs.
    """
    return "".join(map(_escaped, TOKEN.findall(pattern)))


def _escaped(token: str) -> str:
    if token == "{":
        return "\\{"
    if token[0] == "[" and token.endswith("]"):
        return EMPTY.get(token) or _class(token)
    return ANGLES.get(token, token)


def _class(text: str) -> str:
    begin = "[^" if text.startswith("[^") else "["
    tokens = IN_CLASS.findall(text[len(begin) : -1])
    said, can_begin, ends_range = [begin], False, False
    for token, after in zip(tokens, [*tokens[1:], ""], strict=True):
        if token == "-" and can_begin and after and not SET.match(after):
            said.append("-")
            can_begin, ends_range = False, True
            continue
        said.append(f"\\{token}" if token in "[&~-" else ANGLES.get(token, token))
        can_begin, ends_range = not ends_range and not SET.match(token), False
    return "".join([*said, "]"])
