"""Files with chats: saved by the user, or saved automatically."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

from cllm import Audio, Image
from cllm.cli.history import History, Turn, turns_of
from cllm.cli.texts import decoded
from cllm.engine.cache_directory import replacing, state_file


def new_chat_file() -> Path:
    """Return the path of a file for a new chat, with the time in its name; create its directory.

    Raises
    ------
    OSError
        The directory cannot be created.
    RuntimeError
        The home directory is unknown.
    """
    directory = state_file("chats")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory / f"{datetime.now():%Y-%m-%d-%H%M%S-%f}.json"


def last_chat_file() -> Path | None:
    """Return the file of the last chat that was kept; None if there is none."""
    try:
        return max(state_file("chats").glob("*.json"), key=os.path.getmtime, default=None)
    except (OSError, RuntimeError):
        return None


def write_chat(path: Path, history: History, model: str | None = None) -> None:
    """Replace a file by a chat as JSON, readable by its owner alone; images and recordings are paths.

    Parameters
    ----------
    model : str, optional
        Model of the chat, for `model_of`; None: the embedded one.

    Raises
    ------
    OSError
        The file is unchanged.
    ValueError
        The chat has text that is not UTF-8.
    """
    chat = {"model": model, "messages": history.all_messages()}
    text = json.dumps(chat, ensure_ascii=False, indent=1, default=_path_of)
    data = (text + "\n").encode()
    with replacing(path) as written:
        written.touch(mode=0o600)
        written.write_bytes(data)


def read_chat(path: Path) -> tuple[str | None, list[Turn]]:
    """Return the system message and the turns of a chat; their token counts are unknown.

    Raises
    ------
    OSError
    CllmError, ValueError, KeyError, TypeError
        The file has no chat.
    """
    text = decoded(path.read_bytes(), "its line {}".format)
    return turns_of(json.loads(text)["messages"])


def model_of(path: Path) -> str | None:
    """Return the model of a chat; None if its file names none."""
    try:
        model = json.loads(path.read_bytes())["model"]
    except (OSError, ValueError, KeyError, TypeError):  # reading the chat says so
        return None
    return model if isinstance(model, str) else None


def _path_of(media: Image | Audio) -> str:
    return str(media.source)
