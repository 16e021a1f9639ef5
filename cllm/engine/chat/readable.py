"""Parts of messages as text: results of tools, and parts of other providers in a history.

They are never rejected, because a client cannot change its history: words replace a part without text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from cllm.engine.chat.json_scanner import MAX_DEPTH as MAX_NESTING
from cllm.log_once import log_once

logger: logging.Logger = logging.getLogger(__name__)

# Types of parts, each with the field that has the text.
TEXTS = {
    "text": "text", "input_text": "text", "output_text": "text", "summary_text": "text",
    "reasoning_text": "text", "refusal": "refusal", "thinking": "thinking", "compaction": "content",
}  # fmt: skip
# Words that replace parts without text.
WORDS = {
    "image": "an image", "image_url": "an image", "input_image": "an image",
    "computer_screenshot": "an image", "document": "a document", "input_file": "a file",
    "file": "a file", "container_upload": "a file", "input_audio": "a recording", "audio": "a recording",
    "audio_url": "a recording", "resource": "a file", "tool_reference": "a tool",
}  # fmt: skip
# Fields of other parts whose texts the model reads, in this order.
FIELDS = (
    "title", "name", "tool_name", "query", "queries", "url", "code", "command", "action", "input",
    "arguments", "text", "content", "output", "outputs", "stdout", "stderr", "logs", "results",
    "error", "message",
)  # fmt: skip
# Fields of the result of a tool of MCP.
RESULT_FIELDS = {"content", "isError", "structuredContent", "_meta"}
MAX_DEPTH = 6
MIN_FILE = 4096  # characters of a file as base64 text
FILE = re.compile(r"(data:[^,]{0,200},)?[A-Za-z0-9+/_=\r\n-]*")
MAX_TEXTS = 4096  # parts of one content


def text_of(part: object) -> str | None:
    """Return the text of a part that has nothing but text; None for another.

    Documents with a text, and results of a search, are text.
    """
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    text = part.get(TEXTS.get(kind, "")) if isinstance(kind, str) else None
    if isinstance(text, str):
        return text
    if kind == "document":
        source = part.get("source")
        source = source if isinstance(source, Mapping) else {}
        given = source.get("data") if source.get("type") == "text" else source.get("content")
        body = given if isinstance(given, str) else _joined(given)
        heads = _texts_at(part, "title", "context")
        return None if body is None else "\n".join([*heads, body])
    if kind == "search_result":
        heads = _texts_at(part, "title", "source")
        body = _joined(part.get("content"))
        return None if body is None else "\n".join([*heads, body])
    return None


def _texts_at(part: Mapping[str, Any], *names: str) -> list[str]:
    return [part[name] for name in names if isinstance(part.get(name), str)]


def _joined(parts: object) -> str | None:
    texts = [text_of(part) for part in parts] if isinstance(parts, list) else [None]
    return None if None in texts else "\n".join(map(str, texts))


def words_of(
    content: object, depth: int = 0, *, mark_of: Callable[[object], str | None] | None = None
) -> str:
    """Return any content as text.  Words replace a part without text, which is logged once for each kind.

    Parameters
    ----------
    mark_of : callable, optional
        Returns the mark of a part with an image or audio, and None for another part.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return _named("nothing")
    if depth > MAX_DEPTH:
        return _named("something nested")
    if isinstance(content, Sequence):
        parts = [words_of(part, depth + 1, mark_of=mark_of) for part in content[:MAX_TEXTS]]
        return "\n".join(parts if len(content) <= MAX_TEXTS else [*parts, "[and more]"])
    if not isinstance(content, Mapping):
        return str(content)
    text = text_of(content) if mark_of is None else mark_of(content) or text_of(content)
    if text is None and (inner := _inner(content)) is not None:
        text = words_of(inner, depth + 1, mark_of=mark_of)
    if text is not None:
        return text
    kind = content.get("type")
    if not isinstance(kind, str):
        return json.dumps(_without_files(content), ensure_ascii=False, default=str)
    said = (
        " ".join(islice(_texts(content, 0), MAX_TEXTS))
        if kind not in WORDS or kind == "tool_reference"
        else ""
    )
    if not (
        said or kind in WORDS or kind in TEXTS or "_" in kind
    ):  # the tool's own data, which happens to have a field `type`
        return json.dumps(_without_files(content), ensure_ascii=False, default=str)
    return _named(WORDS.get(kind, kind[:40]), said)


def _inner(content: Mapping[str, Any]) -> object:
    """Return the content of a result of MCP, of a result inside a result, or of a document; None for another."""
    kind, inner = content.get("type"), content.get("content")
    is_result = kind == "tool_result" or content.keys() <= RESULT_FIELDS
    if is_result and isinstance(inner, list):
        return inner
    if kind == "resource" and isinstance(content.get("resource"), Mapping):
        text = content["resource"].get("text")
        return text if isinstance(text, str) else None
    if kind == "document" and isinstance(source := content.get("source"), Mapping):
        inner = source.get("content")
        heads = _texts_at(content, "title", "context")
        return [*heads, *inner] if isinstance(inner, list) else None
    return None


def _without_files(value: object, depth: int = 0) -> object:
    """Return data of a tool with words in place of files as base64 text."""
    if isinstance(value, str):
        return "[a file]" if len(value) > MIN_FILE and FILE.fullmatch(value) else value
    if isinstance(value, list | Mapping) and depth > MAX_NESTING:
        return _named("something nested")
    if isinstance(value, list):
        return [_without_files(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {name: _without_files(item, depth + 1) for name, item in value.items()}
    return value


def in_words(kind: str) -> str:
    """Return the words that replace a part of a type without text."""
    return _named(WORDS[kind])


def _named(kind: str, said: str = "") -> str:
    log_once(logger, "content of a tool result or of the history was replaced by words: %s", kind)
    return f"[{kind}: {said}]" if said else f"[{kind}, which this model cannot read]"


def _texts(value: object, depth: int) -> Iterator[str]:
    """Yield the texts in a part that another provider defines."""
    if isinstance(value, str):
        if not value.startswith("data:"):
            yield value
    elif isinstance(value, list) and depth < MAX_DEPTH:
        for item in value:
            yield from _texts(item, depth + 1)
    elif isinstance(value, Mapping) and depth < MAX_DEPTH:
        kind = value.get("type")
        if depth and (text := text_of(value)) is not None:
            yield text
            return
        if depth and isinstance(kind, str) and kind in WORDS:
            yield WORDS[kind]
            return
        for name in FIELDS:
            yield from _texts(value.get(name), depth + 1)
