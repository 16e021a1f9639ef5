"""Commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from cllm import Audio, CllmError, Image, InvalidRequestError, RequestError, SamplingParams
from cllm.cli.chat_session import Chat
from cllm.cli.history import turns_of
from cllm.cli.terminal import complain, note, visible

N_SHOWN = 64  # tokens of /tokens


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """One command of a chat.

    Attributes
    ----------
    obey : callable
        Runs the command; takes the text after its name.
    """

    arguments: str
    help: str
    obey: Callable[[str], Awaitable[None]]


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
            "reset": ChatCommand("", "forget the whole chat", self._reset),
            "system": ChatCommand(
                "TEXT", "set the system message; without TEXT, remove it", self._system
            ),
            "set": ChatCommand(
                "NAME VALUE", "set a sampling parameter; without NAME, show those set", self._set
            ),
            "file": ChatCommand("PATH", "put a text file before the next message", self._file),
            "image": ChatCommand(
                "PATH", "put an image before the next message", partial(self._attach, Image)
            ),
            "audio": ChatCommand(
                "PATH", "put a recording before the next message", partial(self._attach, Audio)
            ),
            "save": ChatCommand("PATH", "write the chat to a file, as JSON", self._save),
            "load": ChatCommand("PATH", "continue a saved chat", self._load),
            "tokens": ChatCommand("TEXT", "show the tokens of a text", self._tokens),
            "stats": ChatCommand("", "show the length of the chat, and its speed", self._stats),
            "help": ChatCommand("", "show this help", self._help),
            "exit": leave,
        }
        self._by_name = self._commands | {"quit": leave, "bye": leave}

    async def obey(self, line: str) -> None:
        """Execute a command, a line that begins with a slash."""
        name, _, rest = line[1:].partition(" ")
        command = self._by_name.get(name)
        if command is None:
            complain(f"there is no command /{name}, see /help")
        elif bool(rest.strip()) and not command.arguments:
            complain(f"/{name} takes nothing after it")
        else:
            await command.obey(rest.strip())

    # --- The chat ------------------------------------------------------------------------------
    async def _reset(self, _: str) -> None:
        self._chat.history.reset()
        note("A new chat.")

    async def _undo(self, _: str) -> None:
        turn = self._chat.history.undo()
        note("There is nothing to undo." if turn is None else f"Taken back: {turn.message}")

    async def _regen(self, _: str) -> None:
        chat = self._chat
        turn = chat.history.undo()
        if turn is None:
            note("There is no answer yet.")
            return
        given, chat.params = chat.params, replace(chat.params, seed=None)
        try:
            await chat.answer(turn.message, turn.media)
        finally:
            chat.params = given

    async def _system(self, text: str) -> None:
        self._chat.history.system = text or None
        note("The model is told that first." if text else "The model is told nothing first.")

    async def _set(self, given: str) -> None:
        chat = self._chat
        name, _, text = given.partition(" ")
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
        if name not in {f.name for f in fields(SamplingParams)}:
            complain(f"there is no parameter {name}; cllm generate --help has their names")
            return
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        try:
            chat.params = replace(chat.params, **{name: value})
        except (InvalidRequestError, TypeError) as error:
            complain(str(error))
        else:
            note(f"{name} = {getattr(chat.params, name)!r}")

    # --- Files ---------------------------------------------------------------------------------
    async def _file(self, path: str) -> None:
        text = _read(path)
        if text is not None:
            self._chat.attached.append(f"{Path(path).name}:\n{text.rstrip()}\n\n")
            n_tokens = await self._chat.count(text)
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
        chat = {"messages": history.all_messages()}
        text = json.dumps(chat, ensure_ascii=False, indent=1, default=_path_of) + "\n"
        try:
            Path(path).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            complain(f"cannot write {path or 'a file'}: {error.strerror or error}")
        else:
            note(f"{len(history.turns)} turns in {path}")

    async def _load(self, path: str) -> None:
        text = _read(path)
        if text is None:
            return
        chat = self._chat
        try:
            system, turns = turns_of(json.loads(text)["messages"])
        except (ValueError, KeyError, TypeError, CllmError) as error:
            complain(f"{path} is no chat: {error}")
            return
        history = chat.history
        before = history.system, history.turns
        history.system, history.turns = system, turns
        try:
            if turns:
                n_tokens = await chat.count_prompt(history.all_messages())
                turns[-1] = replace(turns[-1], n_tokens=n_tokens)
        except RequestError as error:  # such as an image whose file is gone
            history.system, history.turns = before
            complain(f"cannot continue {path}: {error}")
            return
        note(f"{len(turns)} turns, {history.n_tokens:,} tokens")

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
            "Ctrl-C": "stop the answer; at the prompt, leave",
        }
        width = max(map(len, commands))
        note("\n".join(f"{name:{width}} {text}" for name, text in commands.items()))

    async def _exit(self, _: str) -> None:
        self.has_ended = True


def _path_of(media: Image | Audio) -> str:
    return str(media.source)


def _read(path: str) -> str | None:
    """Return the content of a text file; None after an error message if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    complain(f"cannot read {path or 'a file'}: {problem}")
    return None
