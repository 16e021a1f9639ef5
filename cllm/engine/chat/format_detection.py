"""Find out from a chat template how its model writes reasoning and calls.  Pure.

The template is rendered with one call, with two calls, with reasoning and with a plain answer.  The
differences show the markers.  Formats that cannot be detected in this way are in `named_formats`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cllm.engine.chat.call_syntax import CallSyntax, JsonCalls, NamedCalls, TaggedCalls
from cllm.engine.chat.chat_template import unless_rejected
from cllm.engine.chat.named_formats import DEFAULT_CALLS, named_format
from cllm.engine.chat.output_format import OutputFormat

# Function that renders messages with tools (or None), with or without the beginning of an answer.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

NAME, KEY, VALUE, OTHER_KEY = "probe_function", "alpha_key", "first_value", "beta_key"
SECOND_VALUE, REASONING, ANSWER = "second_value", "PROBE-REASONING", "PROBE-ANSWER"
IDS = ("abcdefgh1", "abcdefgh2")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                KEY: {"type": "string", "description": "Text."},
                OTHER_KEY: {"type": "integer", "description": "A number."},
            },
            "required": [KEY],
        },
    },
}
QUESTION = {"role": "user", "content": "PROBE-QUESTION"}
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]{3,}\]")
# Markers to look for in a template's source: the model may reason even if the template drops it.
KNOWN_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)


def detect_format(source: str, render: Render) -> OutputFormat:
    """Return the format of a model's answers, detected from its chat template.

    Parameters
    ----------
    source : str
        Text of the template.
    render : callable
        Renders messages with the template; may raise `InvalidRequestError`.
    """
    named = named_format(source)
    if named is not None and named.turn is not None:
        return named
    found = _Detection(source, render)
    reasoning = found.reasoning()
    try:
        calls = found.calls()
    except ValueError:  # the rendered call is not JSON, or not in order: the syntax is unknown
        calls = None
    if named is not None:
        return replace(
            named,
            reasoning=named.reasoning or reasoning,
            calls=named.calls or calls,
            dropped=named.dropped or found.dropped(),
        )
    name = "plain" if calls is None else type(calls).__name__
    return OutputFormat(reasoning, calls, found.dropped(), name=name)


def call(number: int, **arguments: object) -> dict[str, Any]:
    """Return a call of the probe tool; `number` selects its id."""
    return {
        "id": IDS[number],
        "type": "function",
        "function": {"name": NAME, "arguments": arguments},
    }


def turn(**fields: object) -> dict[str, Any]:
    """Return a turn of the assistant."""
    return {"role": "assistant", "content": "", **fields}


class _Detection:
    def __init__(self, source: str, render: Render) -> None:
        self._source = source
        self._render = render
        self._prompt = self._try([QUESTION], True)
        first = call(0, **{KEY: VALUE, OTHER_KEY: 7})
        self._one = self._try([QUESTION, turn(tool_calls=[first])], False)
        second = call(1, **{KEY: SECOND_VALUE, OTHER_KEY: 8})
        self._two = self._try([QUESTION, turn(tool_calls=[first, second])], False)
        self._plain = self._try([QUESTION, turn(content=ANSWER)], False)
        self._head, _, tail = self._plain.partition(ANSWER)
        self._ends = set(TAG.findall(tail))  # tags that end any turn

    def _try(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Return the rendered text after the question; "" if the template rejects the messages."""
        text = unless_rejected(lambda: self._render(messages, [TOOL], add_generation_prompt))
        if text is None:
            return ""
        return text[text.rfind(QUESTION["content"]) + len(QUESTION["content"]) :]

    # --- Reasoning ---------------------------------------------------------------------------
    def reasoning(self) -> tuple[str, str] | None:
        """Return the markers around reasoning, or None; the first is "" if reasoning begins by itself."""
        thought = {"reasoning_content": REASONING, "thinking": REASONING, "reasoning": REASONING}
        first = call(0, **{KEY: VALUE, OTHER_KEY: 7})
        for fields in ({"content": ANSWER}, {"tool_calls": [first]}):
            text = self._try([QUESTION, turn(**thought, **fields)], False)
            if REASONING in text:
                before, _, after = text.partition(REASONING)
                start, end = _reasoning_markers(before, after)
                begins_by_itself = "think" not in start.lower() and start in self._head
                return ("" if begins_by_itself else start), end
        for start, end in KNOWN_REASONING:
            if end in self._source:
                return start, end
        return None

    def dropped(self) -> tuple[str, ...]:
        """Return the markers around a plain answer, except those in the prompt, around calls or reasoning."""
        if ANSWER not in self._plain:
            return ()
        before, _, after = self._plain.partition(ANSWER)
        shared = len(_common_prefix(before, self._prompt))
        others = {*TAG.findall(self._prompt), *TAG.findall(self._one[-200:])}
        others |= set(self.reasoning() or ())
        around = TAG.findall(before[shared:]) + TAG.findall(after)
        return tuple(dict.fromkeys(tag for tag in around if tag not in others))

    # --- Calls -------------------------------------------------------------------------------
    def calls(self) -> CallSyntax | None:
        """Return the syntax of calls; None if the template writes no calls, or in an unknown syntax.

        A template that writes no calls, but has "<tool_call>" in its source, has `DEFAULT_CALLS`.
        """
        if NAME not in self._one:
            return DEFAULT_CALLS if "<tool_call>" in self._source else None
        found = re.search(rf'\{{\s*"{KEY}"\s*:\s*"{VALUE}"', self._one)
        if found is not None:
            whole = _enclosing_json(self._one, self._one.index(NAME), found.start())
            if whole is not None:
                return self._json_calls(*whole)
            return self._named_calls()
        if KEY in self._one and VALUE in self._one:
            return self._tagged_calls()
        return None

    def _turn_before(self, text: str, end: int) -> str:
        """Return the model's part of a turn up to `end`: without the generation prompt and the reasoning."""
        shared = len(_common_prefix(text[:end], self._prompt))
        # The model's part does not begin inside a marker.
        while shared and text[:shared].rfind("<") > text[:shared].rfind(">"):
            shared = text[:shared].rfind("<")
        return _behind_reasoning(text[shared:end])

    def _json_calls(self, start: int, end: int) -> JsonCalls:
        text = self._one
        before = self._turn_before(text, start).strip()
        marker = before.splitlines()[-1].strip() if before else ""
        marker = _last_tag_on(marker)
        after = TAG.search(text, end)
        ends = () if after is None or after.group() in self._ends else (after.group(),)
        name_is_key = f'"name": "{NAME}"' not in text and re.search(rf'"{NAME}"\s*:\s*\{{', text)
        key = re.search(rf'"([a-z_]+)"\s*:\s*\{{\s*"{KEY}"', text)
        return JsonCalls(
            (marker,) if marker else (),
            ends,
            name_is_key=bool(name_is_key),
            is_bare=not marker,
            is_list=text[start] == "[",
            arguments_key="arguments" if name_is_key or key is None else key.group(1),
        )

    def _named_calls(self) -> NamedCalls | None:
        one = _json_at(self._one, self._one.index(NAME))
        if one is None:
            return None
        separator = self._one[self._one.index(NAME) + len(NAME) : one[0]]
        head = self._turn_before(self._one, self._one.index(NAME))
        section, start, end, section_end = self._frame(head, one[1])
        id_first = id_start = ""
        if IDS[0] in separator:
            id_start, _, separator = (part.strip() for part in separator.partition(IDS[0]))
        if IDS[0] in start:
            start, _, id_first = (part.strip() for part in start.partition(IDS[0]))
        return NamedCalls(
            call_start=start,
            separators=(separator.strip(),),
            call_ends=(end,) if end else (),
            section_start=section,
            section_end=section_end,
            id_start=id_start,
            id_first=id_first,
        )

    def _frame(self, head: str, end_of_one: int) -> tuple[str, str, str, str]:
        """Return the text around all calls and around each call: section, start, end, end of the section."""
        second = self._two.find(NAME, self._two.find(NAME) + 1) if self._two else -1
        if second < 0:
            tag = TAG.search(self._one, end_of_one)
            end = "" if tag is None or tag.group() in self._ends else tag.group()
            return _as_sections("", _whole_tags(head), end, "")
        first_end = self._end_of_arguments(self._two, self._two.find(NAME))
        second_end = self._end_of_arguments(self._two, second)
        gap = self._two[first_end:second]
        start = _common_suffix(head.replace(IDS[0], "\0"), gap.replace(IDS[1], "\0"))
        start = start.replace("\0", IDS[0])
        start = start[_first_tag(start) :]
        # `<a><b>` begins each call, or `<a>` the section and `<b>` each call: the gap says which.
        section = _whole_tags(head[: len(head) - len(start)])
        end = gap[: len(gap) - len(start)].strip()
        tail = self._two[second_end:].lstrip()
        tail = tail[len(end) :].lstrip() if end and tail.startswith(end) else tail
        tag = TAG.match(tail)
        section_end = ""
        if section and tag is not None and tag.group() not in self._ends:
            section_end = tag.group()
        return _as_sections(section, start.strip(), end, section_end)

    def _end_of_arguments(self, text: str, name: int) -> int:
        found = _json_at(text, name)
        if found is not None:
            return found[1]
        number = "7" if text.find(NAME) == name else "8"
        return text.index(number, text.index(OTHER_KEY, name)) + 1

    def _tagged_calls(self) -> TaggedCalls | None:
        text = self._one
        name, key = text.index(NAME), text.index(KEY)
        value, other = text.index(VALUE), text.index(OTHER_KEY)
        if not name < key < value < other:
            return None
        number = text.index("7", other + len(OTHER_KEY))
        to_key = text[name + len(NAME) : key]
        to_value = text[key + len(KEY) : value]
        to_other = text[value + len(VALUE) : other]
        to_number = text[other + len(OTHER_KEY) : number]
        key_start = _common_suffix(to_key, to_other)
        key_start = key_start[_first_tag(key_start) :]
        name_end = to_key[: len(to_key) - len(key_start)].strip()
        value_end = to_other[: len(to_other) - len(key_start)]
        head = self._turn_before(text, name)
        behind = text[number + 1 :].lstrip()
        value_mark = value_end.strip()
        behind = behind[len(value_mark) :] if behind.startswith(value_mark) else behind
        section, start, end, section_end = self._frame(head, number + 1)
        end = end[len(value_mark) :].lstrip() if end.startswith(value_mark) else end
        key_end, value_start, attribute = _value_head(to_value, to_number)
        return TaggedCalls(
            call_start=start,
            name_end=name_end,
            key_start=key_start.strip(),
            key_end=key_end,
            value_start=value_start,
            value_end=value_mark,
            call_ends=_call_ends(end or behind),
            attribute=attribute,
            has_cdata="CDATA" in self._source,
            trims_newline=to_value.endswith("\n") and value_end.startswith("\n"),
            section_start=section,
            section_end=section_end,
        )


def _behind_reasoning(head: str) -> str:
    """Return the text after the end marker of reasoning; the whole text if it has no such marker."""
    ends = [end for _, end in KNOWN_REASONING if end in head]
    return max((head.rpartition(end)[2] for end in ends), key=len, default=head) if ends else head


def _as_sections(section: str, start: str, end: str, section_end: str) -> tuple[str, str, str, str]:
    """Return the markers; if a call is in two tags and has no section, the outer tags become the section."""
    first = TAG.match(start)
    if section or first is None or not start[first.end() :].strip():
        return section, start, end, section_end
    tags = list(TAG.finditer(end))
    if len(tags) > 1:
        end, section_end = end[: tags[-1].start()].strip(), tags[-1].group()
    return first.group(), start[first.end() :].strip(), end, section_end


def _call_ends(end: str) -> tuple[str, ...]:
    """Return the texts that end a call: the whole end, or its first tag, for careless models."""
    whole = "".join(end.split())
    first = TAG.match(end.lstrip())
    return tuple(dict.fromkeys(filter(None, (whole, first.group() if first else ""))))


def _reasoning_markers(before: str, after: str) -> tuple[str, str]:
    tags = [match for match in TAG.finditer(before) if not before[match.end() :].strip()]
    lines = before.strip().splitlines()
    start = tags[-1].group() if tags else (lines[-1].strip() if lines else "")
    behind = after.lstrip()
    tag = TAG.match(behind) or re.match(r"\[[^\[\]\n]+\]", behind)
    end = tag.group() if tag else behind.split("\n")[0].split(ANSWER)[0].strip()
    return start, end


def _enclosing_json(text: str, name: int, arguments: int) -> tuple[int, int] | None:
    """Return the start and end of the JSON value that has both the name and the arguments."""
    for start in range(min(name, arguments)):
        if text[start] not in "{[":
            continue
        try:
            _, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if start < min(name, arguments) and end > max(name, arguments):
            return start, end
    return None


def _json_at(text: str, start: int) -> tuple[int, int] | None:
    """Return the start and end of the JSON object with the arguments, after `start`."""
    found = re.compile(rf'\{{\s*"{KEY}"').search(text, start)
    if found is None:
        return None
    return found.start(), json.JSONDecoder().raw_decode(text, found.start())[1]


def _value_head(to_value: str, to_number: str) -> tuple[str, str, tuple[tuple[str, bool], ...]]:
    """Return the text between a key and its value: end of the key, beginning of the value, and what is between."""
    if to_value == to_number:
        key_end, _, rest = to_value.strip().partition("\n")
        if rest:
            return key_end.strip(), rest.strip(), ()
        first, last = TAG.match(key_end), TAG.findall(key_end)
        if first is not None and len(last) > 1:
            return first.group(), key_end[first.end() :].strip(), ()
        return key_end, "", ()
    before = _common_prefix(to_value, to_number)
    after = _common_suffix(to_value, to_number)
    texts = (to_value, to_number)
    kinds = [text[len(before) : len(text) - len(after)].strip() for text in texts]
    return before.strip(), after.strip(), ((kinds[0], True), (kinds[1], False))


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    n = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[:n]


def _common_suffix(one: str, other: str) -> str:
    return _common_prefix(one[::-1], other[::-1])[::-1]


def _first_tag(text: str) -> int:
    """Return the position of the first `<` or `[`; 0 if there is none."""
    found = re.search(r"[<\[]", text)
    return found.start() if found else 0


def _whole_tags(text: str) -> str:
    """Return the last sequence of tags, without the text before it."""
    found = re.search(r"(?:(?:<[^<>]*>?|\[[^\[\]]*\]?)\s*)*\S*\s*$", text)
    return found.group().strip() if found else text.strip()


def _last_tag_on(line: str) -> str:
    tags = TAG.findall(line)
    return tags[-1] if tags and line.endswith(tags[-1]) else line
