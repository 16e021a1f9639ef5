"""The texts of errors have one style; `python -m tests.test_messages` prints the table of all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.check_prose import BANNED

ROOT = Path(__file__).parents[1]
RAISES = re.compile(
    r"(Error|Problem|BadParameter)$|^(error|invalid|unavailable|too_many|overflow)$"
)
# "model is 5, must be LIMIT": these take a field, a value and a limit.
WITH_LIMIT = re.compile(r"(InvalidArgument|InvalidRequest|TooMuchText)Error$|^error$")


class Message(NamedTuple):
    """A text of an error in the source, with `{…}` for what is inserted."""

    place: str
    error: str
    text: str
    is_limit: bool


def text_of(node: ast.expr) -> str | None:
    """The text of a literal or an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)
        return "".join(map(str, parts))
    return None


def messages() -> Iterator[Message]:
    """Every literal text that an error of the package is made with."""
    for path in sorted((ROOT / "cllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            error = ast.unparse(node.func).split(".")[-1]
            if not RAISES.search(error):
                continue
            has_limit = bool(WITH_LIMIT.search(error)) and len(node.args) >= 3
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            if (text := text_of(node.args[2 if has_limit else -1])) and " " in text:
                yield Message(place, error, text, has_limit)


MESSAGES = list(messages())


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 300
    assert sum(message.is_limit for message in MESSAGES) > 100


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a banned word", BANNED.pattern),
        ("a full stop or an exclamation mark at the end", r"(?<!\.\.)[.!]$"),
        (
            "a capital letter at the beginning",
            r"^(?!True|None|False|Ray|Infill|Object)[A-Z][a-z]+ ",
        ),
        ("something that is not there", r"\bis not there\b|\bnot there yet\b"),
        ("an apology or an appeal", r"(?i)\b(sorry|please|unfortunately|oops)\b"),
        ("a contraction", r"\b(can't|won't|doesn't|isn't|don't)\b"),
    ],
)
def test_no_message_has(what: str, pattern: str) -> None:
    # Words that clients match stand as llama-server has them; `json` and others have theirs.
    found = [
        m for m in MESSAGES if re.search(pattern, m.text) and "JSON serializable" not in m.text
    ]
    assert not found, what


def test_a_limit_completes_must_be() -> None:
    """ "field is value, must be LIMIT": no verb of its own, and no second "must"."""
    for message in MESSAGES:
        if message.is_limit:
            assert not re.match(r"(must|is|has|cannot|should|may)\b", message.text), message


if __name__ == "__main__":
    for message in MESSAGES:
        print(f"{message.place}\t{message.error}\t{'must be ' * message.is_limit}{message.text}")
