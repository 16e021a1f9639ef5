"""Input of `cllm chat` on a terminal: editing, completion, and a history of all sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

import anyio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import create_output

from cllm.cli.chat_input import is_whole
from cllm.cli.terminal import note
from cllm.engine.cache_directory import state_file

LEAVE_WITHIN_S = 2.0  # between two Ctrl-C that end the chat


class TerminalInput:
    """Messages typed on a terminal.  Needs asyncio.

    Tab completes commands and their arguments.  Ctrl-R searches the messages of all sessions.  A paste of
    several lines is one message; so is the text between three quotes.

    Parameters
    ----------
    screen : text file or None
        Terminal that shows the prompt; None: standard output.
    completer : Completer
    """

    def __init__(self, screen: TextIO | None, completer: Completer) -> None:
        self._interrupted_at = -LEAVE_WITHIN_S
        session: PromptSession[str] = PromptSession(
            FormattedText([("bold", "> ")]),
            # A dumb terminal gets the plain prompt only if no output is chosen.
            output=None if screen is None else create_output(screen),
            history=_history(),
            completer=completer,
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_suspend=True,
            multiline=Condition(lambda: not is_whole(session.default_buffer.text)),
            prompt_continuation=FormattedText([("bold", "… ")]),
            reserve_space_for_menu=6,
            tempfile_suffix=".md",
        )
        self._session = session
        self._asking = anyio.CancelScope()

    async def ask(self) -> str | None:
        """Return the next message; None after Ctrl-D, or after Ctrl-C twice within two seconds."""
        while True:
            with anyio.CancelScope() as self._asking, suppress(KeyboardInterrupt):
                try:
                    message = await self._session.prompt_async(handle_sigint=False)
                except EOFError:
                    return None
                self._interrupted_at = -LEAVE_WITHIN_S
                # Bytes that are not UTF-8 are lone surrogates, which no tokenizer takes.
                return message.encode("utf-8", "replace").decode()
            previous, self._interrupted_at = self._interrupted_at, time.monotonic()
            if self._interrupted_at - previous < LEAVE_WITHIN_S:
                return None
            note("Ctrl-C again leaves.")

    def interrupt(self) -> bool:
        """Do what Ctrl-C does.  A terminal sends a signal until the prompt reads its keys."""
        self._asking.cancel()
        return True


class CommandCompleter(Completer):
    """Completes the names of commands, and their arguments.

    Parameters
    ----------
    names : iterable of str
        Names without the slash.
    complete : callable
        Returns the completer of a command's arguments, by its name; None: they have no completion.
    """

    def __init__(self, names: Iterable[str], complete: Callable[[str], Completer | None]) -> None:
        self._names = WordCompleter([f"/{name}" for name in names], sentence=True)
        self._complete = complete

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Yield the completions of the text before the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            yield from self._names.get_completions(document, event)
        elif (completer := self._complete(name)) is not None:
            yield from completer.get_completions(Document(rest), event)


def _history() -> History:
    """Return the messages of all sessions; those of this one if they cannot be kept in a file."""
    try:
        file = state_file("chat_history")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(file)
