"""Strings that a schema allows, as terminals of llguidance's Lark, for formats without escapes.  Pure.

If a value may be a string or another type, a string that looks like the other type is written as JSON.
`is_quoted` tells the parser which strings these are, and `quoted_text` tells the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cllm.engine.json_schema import FORMATS, SchemaDocument, count_of, not_enforced, values_of
from cllm.engine.patterns import is_irregular, with_escapes
from cllm.errors import InvalidRequestError

ANY_TEXT = "/(?s:.*)/"
MAX_TERMINAL = 50_000  # characters of one terminal
LIMIT = f"one with fewer enums, patterns and alternatives: its grammar has over {MAX_TERMINAL} characters"
_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_DATE = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_CLOCK = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_URI_CHAR = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
# Each accepts what llguidance accepts, or less: 29 February and unusual host names are left out.
FORMAT_PATTERNS = {
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P(?:{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": "|".join(
        [f"(?:{_H16}:){{7}}{_H16}"]
        + [f"(?:{_H16}:){{{n}}}(?::{_H16}){{1,{7 - n}}}" for n in range(1, 7)]
        + [f"::(?:{_H16}(?::{_H16}){{0,6}})?", f"(?:{_H16}:){{1,7}}:"]
    ),
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_URI_CHAR}*)*"
        rf"|{_URI_CHAR}+(?:/{_URI_CHAR}*)*)(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
    ),
}
assert FORMAT_PATTERNS.keys() == FORMATS
# Beginnings of values of each type.  If a value may also have that type, a string that begins like this
# is written as JSON: llguidance's lexer does not backtrack, so these characters must decide.
_BEGINNINGS = {
    "null": "null|None", "boolean": "true|false|True|False", "integer": "-?[0-9]",
    "fraction": "-?[0-9]", "array": r"\[", "object": r"\{",
}  # fmt: skip


def quoted_text(types: Iterable[str]) -> str:
    """Return a regular expression for strings that are written as JSON if values of `types` are allowed too."""
    kinds = "|".join(dict.fromkeys(_BEGINNINGS[kind] for kind in sorted(types)))
    return rf"[ \t\r\n]*(?:{kinds}|\x22)(?s:.*)"


def is_quoted(text: str, types: Iterable[str]) -> bool:
    """Return True if a string is written as JSON because values of `types` are allowed too."""
    return re.fullmatch(quoted_text(types), text) is not None


def literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def literals_of(text: str, spelled: Mapping[int, bytes]) -> list[str]:
    """Return a text in Lark: string literals, and `<[ID]>` for each control token that `spelled` names."""
    ids = {name.decode(): token for token, name in spelled.items()}
    names = "|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)"
    parts = [part for part in re.split(f"({names})", text) if part]
    return [f"<[{ids[part]}]>" if part in ids else literal(part) for part in parts]


def text_terminal(
    document: SchemaDocument, schema: object, seen: frozenset[int] = frozenset()
) -> str | None:
    """Return a terminal for the strings that a schema allows; None if it allows no string.

    Raises
    ------
    InvalidRequestError
        The schema is strict and has a keyword that cannot be enforced, or the terminal is too long.
    """
    if not isinstance(schema, Mapping):
        return None if schema is False else ANY_TEXT
    if id(schema) not in document.texts:
        is_cycle = id(schema) in seen
        if is_cycle or "string" not in document.types(schema):
            return None
        document.texts[id(schema)] = _combined(document, schema, seen | {id(schema)})
    return document.texts[id(schema)]


def _combined(
    document: SchemaDocument, schema: Mapping[str, Any], seen: frozenset[int]
) -> str | None:
    parts = list(_own_parts(document, schema))
    for part in document.all_of(schema):
        parts.append(text_terminal(document, part, seen) if id(part) not in seen else ANY_TEXT)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            kinds = [text_terminal(document, part, seen) for part in schema[keyword]]
            texts = [kind for kind in kinds if kind is not None]
            texts = list(dict.fromkeys(texts)) if keyword == "anyOf" else texts
            if keyword == "oneOf" and len(texts) > 1:
                others = (" | ".join(texts[:i] + texts[i + 1 :]) for i in range(len(texts)))
                texts = [f"({text} & ~({o}))" for text, o in zip(texts, others, strict=True)]
            parts.append(f"({' | '.join(texts)})" if texts else None)
    if None in parts:
        return None
    if sum(len(part or "") for part in parts) > MAX_TERMINAL:
        raise InvalidRequestError("tools", "the schema of a text", LIMIT)
    said = [part for part in dict.fromkeys(parts) if part not in (None, ANY_TEXT)]
    return f"({' & '.join(map(str, said))})" if said else ANY_TEXT


def _own_parts(document: SchemaDocument, schema: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield a terminal for each string keyword of a schema, without subschemas; None if no string fits it."""
    for keyword in not_enforced(schema):
        document.cannot(keyword)
    for values in values_of(schema):
        texts = [literal(value) for value in values if isinstance(value, str)]
        yield f"({' | '.join(texts)})" if texts else None
    n_min, n_max = count_of(schema, "minLength") or 0, count_of(schema, "maxLength")
    if n_max is not None and n_min > n_max:
        yield None
    elif n_min or n_max is not None:
        yield f"/(?s:.{{{n_min},{'' if n_max is None else n_max}}})/"
    if isinstance(pattern := schema.get("pattern"), str):
        found = searched(pattern)
        if found is None:
            document.cannot(f"pattern: {pattern}", "its assertions are not at its ends")
        else:
            yield f"/{found}/"
    if schema.get("format") in FORMATS:
        yield f"/{FORMAT_PATTERNS[schema['format']].replace('/', chr(92) + '/')}/"


def searched(pattern: str) -> str | None:
    """Return a regular expression for all strings that contain a match of `pattern`.

    None for lookaround, back references, and `^` or `$` inside an alternative: they cannot be expressed.
    """
    if is_irregular(pattern):
        return None
    pattern = with_escapes(pattern)
    parts, depth, in_class, branches = [""], 0, False, list[str]()
    at = 0
    while at < len(pattern):
        char = pattern[at]
        taken = pattern[at : at + 2] if char == "\\" else char
        at += len(taken)
        if char == "\\":
            digits = {"\\d": "0-9", "\\w": "a-zA-Z0-9_"}.get(taken)
            parts[-1] += (digits if in_class else f"[{digits}]") if digits else _escaped(taken[1:])
        elif in_class:
            in_class = char != "]"
            parts[-1] += _escaped(char, taken)
        elif char == "|" and not depth:
            parts.append("")
        elif char in "^$" and (depth or not _is_at_end(pattern, at, char)):
            return None
        else:
            in_class = char == "["
            depth += {"(": 1, ")": -1}.get(char, 0)
            parts[-1] += _escaped(char, taken)
    for part in parts:
        begin, end = "" if part.startswith("^") else "(?s:.*)", "(?s:.*)"
        part = part.removeprefix("^")
        if part.endswith("$") and (len(part) - len(part[:-1].rstrip("\\"))) % 2 == 1:
            part, end = part[:-1], ""
        branches.append(f"{begin}(?:{part}){end}")
    return "|".join(branches)


def _is_at_end(pattern: str, at: int, char: str) -> bool:
    """Return True if the `^` before `at` begins an alternative, or the `$` before `at` ends one."""
    if char == "^":
        return at == 1 or (pattern[at - 2] == "|" and pattern[at - 3 : at - 2] != "\\")
    return at == len(pattern) or pattern[at] == "|"


def _escaped(char: str, taken: str | None = None) -> str:
    """Return a character of a regular expression, escaped for Lark's `/…/`.

    `taken` is returned for a character that needs no escape; by default the character after a backslash.
    """
    known = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
    return known.get(char, f"\\{char}" if taken is None else taken)


def narrowed(schema: dict[str, Any], types: Iterable[str], quoted: str = "") -> dict[str, Any]:
    """Return a closed schema, restricted to values of `types`.

    Parameters
    ----------
    quoted : str, optional
        Regular expression of strings that remain allowed in addition.
    """
    kinds = set(types)
    names = sorted(kinds - {"integer", "fraction"})
    names += ["number"] if "fraction" in kinds else ["integer"] if "integer" in kinds else []
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    body = {key: value for key, value in schema.items() if key != "$defs"}
    kept: dict[str, Any] = {"type": names, "allOf": [body]}
    if quoted:
        text = {"type": "string", "pattern": f"^(?:{quoted})$"}
        kept = {"anyOf": [kept, {"allOf": [body, text]}]}
    return {**kept, **definitions}
