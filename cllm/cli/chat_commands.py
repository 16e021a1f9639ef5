"""Commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import typer

from cllm import (
    Audio,
    CllmError,
    ClosedError,
    EngineFailedError,
    Image,
    InvalidRequestError,
    RequestError,
    SamplingParams,
)
from cllm.checks import closest
from cllm.cli.chat_files import new_chat_file, read_chat, write_chat
from cllm.cli.chat_session import Chat, n_turns
from cllm.cli.habits import hint_for_model
from cllm.cli.history import Turn
from cllm.cli.options import READERS
from cllm.cli.terminal import complain, note
from cllm.cli.texts import decoded, visible
from cllm.hub.cache import cached_models
from cllm.hub.names import is_name
from cllm.settings import settings_of

N_SHOWN = 64  # tokens of /tokens, and characters of a message
N_UNDONE = 400  # characters of a message that /undo shows


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """One command of a chat.

    Attributes
    ----------
    obey : callable
        Runs the command; takes the text after its name.
    completes : callable or None
        Returns the words that Tab offers as its argument; `files` stands for paths.
    """

    arguments: str
    help: str
    obey: Callable[[str], Awaitable[None]]
    completes: Callable[[], Iterable[str]] | None = None


class ChatCommands:
    """The commands of a chat, by name.  Event loop only.

    Attributes
    ----------
    has_ended : bool
        True once the user has ended the chat.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.has_ended: bool = False
        leave = ChatCommand("", "leave; so do /quit, /bye and Ctrl-D", self._exit)
        self._commands = {
            "regen": ChatCommand("", "answer the last message once more", self._regen),
            "undo": ChatCommand("", "take back the last message and its answer", self._undo),
            "edit": ChatCommand(
                "", "change the last message in $EDITOR, and answer it once more", self._edit
            ),
            "clear": ChatCommand("", "begin a new chat; so does /reset", self._reset),
            "system": ChatCommand(
                "TEXT", "set the system message; without TEXT, remove it", self._system
            ),
            "set": ChatCommand(
                "NAME VALUE",
                "set an option of cllm generate; without NAME, show those set",
                self._set,
                lambda: sorted(PARAMETERS),
            ),
            "model": ChatCommand(
                "MODEL",
                "continue with another model; without MODEL, list those here",
                self._model,
                models,
            ),
            "file": ChatCommand(
                "PATH", "put a text file before the next message", self._file, files
            ),
            "image": ChatCommand(
                "PATH", "put an image before the next message", partial(self._attach, Image), files
            ),
            "audio": ChatCommand(
                "PATH",
                "put a recording before the next message",
                partial(self._attach, Audio),
                files,
            ),
            "save": ChatCommand(
                "PATH", "write the chat as JSON; PATH has a default", self._save, files
            ),
            "load": ChatCommand("PATH", "continue a saved chat", self._load, files),
            "tokens": ChatCommand("TEXT", "show the tokens of a text", self._tokens),
            "stats": ChatCommand("", "show the length of the chat, and its speed", self._stats),
            "help": ChatCommand("", "show this help; so does /?", self._help),
            "exit": leave,
        }
        self._by_name = self._commands | {
            "quit": leave, "bye": leave, "reset": self._commands["clear"], "?": self._commands["help"],
        }  # fmt: skip

    @property
    def names(self) -> list[str]:
        """Names of the commands, without the slash, in the order of the help."""
        return list(self._commands)

    def words(self, name: str) -> Iterable[str] | None:
        """Return the words that complete the argument of a command; None for paths of files.

        Empty if there is no such command, or its argument is text.
        """
        command = self._by_name.get(name)
        if command is None or command.completes is None:
            return ()
        return None if command.completes is files else command.completes()

    async def obey(self, line: str) -> None:
        """Execute a command, a line that begins with a slash."""
        name, _, rest = line[1:].partition(" ")
        command = self._by_name.get(name)
        if command is None:
            meant = closest(name, self._by_name)
            complain(
                f"there is no command /{name}, {f'did you mean /{meant}' if meant else 'see /help'}"
            )
        elif bool(rest.strip()) and not command.arguments:
            complain(f"/{name} takes nothing after it")
        else:
            try:
                await command.obey(rest.strip())
            except (ClosedError, EngineFailedError, BrokenPipeError):
                raise
            # Such as a file above the limits of the tokenizer, or a path of an unknown user.
            except (CllmError, OSError, RuntimeError, ValueError) as error:
                complain(f"/{name}: {error}")

    # --- The chat ------------------------------------------------------------------------------
    async def _reset(self, _: str) -> None:
        self._chat.history.reset()
        self._chat.file = None
        self._drop_files()
        note("A new chat.")

    async def _undo(self, _: str) -> None:
        if self._drop_files():
            note("The files before the next message are taken back.")
            return
        turn = self._chat.history.undo()
        note(
            "There is nothing to undo."
            if turn is None
            else f"Taken back: {_shortened(turn.message)}"
        )

    def _drop_files(self) -> bool:
        """Forget the files before the next message; return False if there are none."""
        chat = self._chat
        had_files = bool(chat.attached or chat.media)
        chat.attached, chat.media = [], []
        return had_files

    async def _regen(self, _: str) -> None:
        chat = self._chat
        turn = chat.history.undo()
        if turn is None:
            note("There is no answer yet.")
            return
        given, chat.params = chat.params, replace(chat.params, seed=None)
        try:
            await self._answer_instead(turn, turn.message)
        finally:
            chat.params = given

    async def _answer_instead(self, turn: Turn | None, message: str) -> None:
        """Answer a message in place of a turn that was taken back, which returns if there is no answer."""
        has_answer = False
        try:
            has_answer = await self._chat.answer(message, () if turn is None else turn.media)
        finally:
            if turn is not None and not has_answer:
                self._chat.history.turns.append(turn)
                note("The last turn is as before.")

    async def _edit(self, _: str) -> None:
        turns = self._chat.history.turns
        # Ctrl-C in the editor reaches this process too; later it stops the answer.
        with anyio.CancelScope(shield=True):
            before = turns[-1].message if turns else ""
            text = await anyio.to_thread.run_sync(_edited, before)
            if text is None or not text.strip():
                note("Nothing is changed.")
                return
            note(text)
            await self._answer_instead(self._chat.history.undo(), text)

    async def _model(self, name: str) -> None:
        chat = self._chat
        if not name:
            note("\n".join([f"{chat.name}, in use", *models()]))
            return
        if hint := hint_for_model(name):
            complain(f"{name}: {hint}")
            return
        try:
            await chat.switch(name if is_name(name) else str(Path(name).expanduser()))
        except CllmError as error:
            complain(str(error))
        else:
            note(f"{chat.name}, {chat.history.n_ctx:,} tokens of context")

    async def _system(self, text: str) -> None:
        self._chat.history.system = text or None
        note("The model is told that first." if text else "The model is told nothing first.")

    async def _set(self, given: str) -> None:
        chat = self._chat
        name, _, text = given.removeprefix("parameter ").partition(" ")
        name, text = name.lstrip("-"), text.strip()
        if not name:
            changed = {
                f.name: value
                for f in fields(SamplingParams)
                if (value := getattr(chat.params, f.name)) != getattr(SamplingParams(), f.name)
            }
            note(
                "\n".join(f"{key} = {value!r}" for key, value in changed.items())
                or "Nothing is set."
            )
            return
        field = PARAMETERS.get(name)
        if field is not None and not text:
            note(f"{field} = {getattr(chat.params, field)!r}")
            return
        if name in self._commands:
            complain(f"{name} is no parameter: use /{name}")
            return
        if field is None:
            meant = closest(name, PARAMETERS)
            hint = f"did you mean {meant}" if meant else "Tab after /set has their names"
            complain(f"there is no parameter {name}; {hint}")
            return
        try:
            chat.params = replace(chat.params, **{field: _value_of(field, text)})
        except (InvalidRequestError, TypeError, typer.BadParameter) as error:
            complain(str(error))
        else:
            note(f"{field} = {getattr(chat.params, field)!r}")

    # --- Files ---------------------------------------------------------------------------------
    async def _file(self, path: str) -> None:
        text = _read(path)
        if text is not None:
            n_tokens = await self._chat.count(text)
            self._chat.attached.append(f"{Path(path).name}:\n{text.rstrip()}\n\n")
            note(f"{n_tokens:,} tokens, before the next message.")

    async def _attach(self, kind: type[Image] | type[Audio], path: str) -> None:
        file = Path(path).expanduser().resolve()
        if kind.kind not in self._chat.modalities:
            taken = "images" if kind is Image else "audio"
            complain(f"this model takes no {taken}: give a projector for it as --mmproj")
        elif not file.is_file():
            complain(f"{path or 'the path'} is not a file")
        else:
            self._chat.media.append(kind(file))
            note(f"{file.name}, before the next message.")

    async def _save(self, path: str) -> None:
        history = self._chat.history
        if not (path or history.turns):
            note("There is nothing to save.")
            return
        try:
            file = Path(path).expanduser() if path else self._chat.file or new_chat_file()
            write_chat(file, history, self._chat.model)
        except (OSError, RuntimeError) as error:
            problem = getattr(error, "strerror", None) or error
            complain(f"cannot write {path or 'the chat'}: {problem}")
        else:
            self._chat.file = self._chat.file if path else file
            note(f"{n_turns(len(history.turns))} in {file}")

    async def _load(self, path: str) -> None:
        if not path:
            complain("/load needs the path of a chat")
            return
        await self.load(Path(path).expanduser())

    async def load(self, path: Path) -> bool:
        """Continue the chat in a file; return False after an error message if that cannot be done."""
        try:
            system, turns = read_chat(path)
        except OSError as error:
            complain(f"cannot read {path}: {error.strerror or error}")
            return False
        except (ValueError, KeyError, TypeError, CllmError) as error:
            complain(f"{path} is no chat: {error}")
            return False
        chat, history = self._chat, self._chat.history
        before = history.system, history.turns
        history.system, history.turns = system, turns
        try:
            await chat.recount()
        except RequestError as error:  # such as an image whose file is gone
            history.system, history.turns = before
            complain(f"cannot continue {path}: {error}")
            return False
        chat.file = None
        self._drop_files()
        last = f", the last: {turns[-1].message.strip()[:N_SHOWN]}" if turns else ""
        note(f"{n_turns(len(turns))}, {history.n_tokens:,} tokens{last}")
        return True

    # --- The rest ------------------------------------------------------------------------------
    async def _tokens(self, text: str) -> None:
        tokens = await self._chat.tokenize(text)
        shown = " ".join(f"{visible(piece)!r}:{token}" for token, piece in tokens[:N_SHOWN])
        note(f"{len(tokens):,} tokens" + (f": {shown}" if shown else ""))

    async def _stats(self, _: str) -> None:
        note(self._chat.statistics())

    async def _help(self, _: str) -> None:
        commands = {f"/{name} {c.arguments}": c.help for name, c in self._commands.items()}
        commands |= {
            "//text": 'say "/text"',
            '"""': "begins a message of several lines, and ends it",
            "Ctrl-C": "stop the answer; at the prompt, clear the line, and twice, leave",
            "Ctrl-R": "search the messages of all sessions",
            "Tab": "complete a command, a file or a model",
            "Ctrl-X Ctrl-E": "write the message in $EDITOR",
        }
        width = max(map(len, commands))
        note("\n".join(f"{name:{width}} {text}" for name, text in commands.items()))

    async def _exit(self, _: str) -> None:
        self.has_ended = True


def _parameters() -> dict[str, str]:
    """Return the fields of `SamplingParams` by their names, and by those of their options."""
    found = {}
    for field in fields(SamplingParams):
        found[field.name] = found[field.name.replace("_", "-")] = field.name
        for flag in settings_of(SamplingParams)[field.name].flags.split():
            found[flag.lstrip("-")] = field.name
    found.pop("", None)
    return found


PARAMETERS = _parameters()


def _value_of(field: str, text: str) -> Any:
    """Return a value as the option of the field reads it, or as JSON."""
    if field in READERS and text != "null":
        return READERS[field](text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shortened(message: str) -> str:
    """Return a message without what is beyond `N_UNDONE` characters, such as the rest of a file."""
    return message if len(message) <= N_UNDONE else f"{message[:N_UNDONE]} …"


def files() -> Iterable[str]:
    """Stand for the paths of files, which the prompt completes."""
    return ()


def models() -> list[str]:
    """Return the names of the models that are downloaded."""
    return [str(model.name) for model in cached_models()]


def _edited(text: str) -> str | None:
    """Return the text as the user's editor leaves it; None after an error, or if it is the same."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="cllm-") as directory:
        file = Path(directory) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(file)], check=True)
            found = decoded(file.read_bytes(), "its line {}".format).rstrip("\n")
        except (OSError, ValueError, subprocess.CalledProcessError, CllmError) as error:
            complain(f"{editor}: {error}")
            return None
    return None if found == text else found


def _read(path: str) -> str | None:
    """Return the content of a text file; None after an error message if it cannot be read."""
    try:
        return decoded(Path(path).expanduser().read_bytes(), "its line {}".format)
    except OSError as error:
        problem = error.strerror or str(error)
    except InvalidRequestError as error:
        problem = str(error)
    complain(f"cannot read {path or 'a file'}: {problem}")
    return None
