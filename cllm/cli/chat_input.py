"""Input of `cllm chat` from a script; `chat_prompt.py` reads a terminal."""

from __future__ import annotations

from typing import Protocol

from cllm import CllmError
from cllm.cli.terminal import complain, input_lines

SEVERAL_LINES = '"""'  # begins a message of several lines, and ends it


class ChatInput(Protocol):
    """Source of messages."""

    async def ask(self) -> str | None:
        """Return the next message; None at the end of the input."""

    def interrupt(self) -> bool:
        """Handle a SIGINT while `ask` waits; return False if the chat has to end."""


class ScriptInput:
    """Messages from standard input: lines, or several lines between three quotes.

    Attributes
    ----------
    has_failed : bool
        True if a line was rejected.
    """

    def __init__(self) -> None:
        self._lines = input_lines()
        self.has_failed: bool = False

    async def ask(self) -> str | None:
        """Return the next message; None at the end.  A message that is not UTF-8 is reported and left out."""
        while (line := await anext(self._lines, None)) is not None:
            lines = [line]
            while not is_whole("\n".join(each.text for each in lines)):
                if (line := await anext(self._lines, None)) is None:
                    self._fail(f"the message from line {lines[0].number} on has no end")
                    return None
                lines.append(line)
            try:
                return "\n".join([each.checked() for each in lines])
            except CllmError as error:
                self._fail(str(error))
        return None

    def _fail(self, problem: str) -> None:
        self.has_failed = True
        complain(problem)

    def interrupt(self) -> bool:
        """Return False: a script ends."""
        return False


def is_whole(message: str) -> bool:
    """Return False if the message begins with three quotes and does not end with three others."""
    text = message.strip()
    n = len(SEVERAL_LINES)
    return text[:n] != SEVERAL_LINES or (len(text) >= 2 * n and text.endswith(SEVERAL_LINES))


def unquoted(message: str) -> str:
    """Return a message without the three quotes around it."""
    text = message.strip()
    if not text.startswith(SEVERAL_LINES):
        return text
    return text.removeprefix(SEVERAL_LINES).removesuffix(SEVERAL_LINES).strip()
