"""Answers as Markdown on a terminal: what is printed while they grow, and at their end."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cllm.cli.chat_output import MarkdownOutput, complete_blocks

ANSWER = """# Title

Some *text* with `code`
in two lines

- one
- two

```python
def f() -> list[int]:

    return []
```

| a | b |
|---|---|
| 1 | 2 |

<tool_call>x</tool_call> ends
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(text: str) -> str:
    """The screen at the end: each "erase" removes the line that the cursor is on."""
    lines = [""]
    row = 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", text):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\r" or ESCAPES.fullmatch(part):
            pass
        else:
            lines[row] += part
    return "\n".join(line.rstrip() for line in lines).strip("\n")


async def printed(pieces: list[str]) -> str:
    """The screen after an answer in these pieces, each drawn as it comes."""
    file = io.StringIO()
    output = MarkdownOutput(Console(file=file, force_terminal=True, width=60, height=50))
    for piece in pieces:
        output._redraw_at = 0.0  # each is drawn
        await output.write(piece)
    await output.finish()
    return shown(file.getvalue())


@pytest.mark.anyio
async def test_an_answer_looks_the_same_in_one_piece_and_in_single_characters() -> None:
    whole = await printed([ANSWER])
    assert await printed(list(ANSWER)) == whole
    for text in (
        "Title",
        "in two lines",
        " • one",
        "def f() -> list[int]:",
        "<tool_call>x</tool_call> ends",
    ):
        assert text in whole
    assert "```" not in whole
    assert "*text*" not in whole


@pytest.mark.anyio
async def test_lines_of_a_poem_stay_lines() -> None:
    assert await printed(["one\ntwo\nthree"]) == "one\ntwo\nthree"


@pytest.mark.anyio
async def test_control_characters_do_not_reach_the_terminal() -> None:
    assert await printed(["a\x1b[2Jb\x07"]) == "a␛[2Jb␇"


@pytest.mark.anyio
async def test_an_answer_higher_than_the_terminal_is_whole_at_its_end() -> None:
    file = io.StringIO()
    output = MarkdownOutput(Console(file=file, force_terminal=True, width=60, height=8))
    lines = [f"line {n}" for n in range(40)]
    for line in lines:
        output._redraw_at = 0.0
        await output.write(f"{line}\n")
        n_drawn = file.getvalue().rpartition("\x1b[2K")[2].count("\n")
        assert n_drawn <= 8
    await output.finish()
    assert shown(file.getvalue()).splitlines()[-40:] == lines


@pytest.mark.anyio
async def test_addresses_and_loose_lists_are_shown_as_they_are_in_one_piece() -> None:
    text = "1. one\n\n2. two\n\n[docs](https://example.com/a)\n\n[1]: https://example.com/b\n"
    whole = await printed([text])
    assert await printed(list(text)) == whole
    assert "https://example.com/a" in whole
    assert "https://example.com/b" in whole
    assert " 1 one\n 2 two" in whole


@given(st.text("ab\n#-*>`|1. \u2028\x85", max_size=60))
def test_blocks_and_the_rest_are_the_whole_text(text: str) -> None:
    complete, rest = complete_blocks(text)
    assert complete + rest == text
