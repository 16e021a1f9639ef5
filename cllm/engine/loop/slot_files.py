"""SlotFiles: what a seq_id holds, in files that callers name.  Event loop only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cllm.engine.core.messages import EraseSlot, RestorePrefix, SaveSlot, SlotAnswered
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.request import ModelInfo, SequenceState
from cllm.engine.state_file import DamagedFileError, read_state_file, write_state_file
from cllm.engine.thread.worker_thread import WorkerThread, WorkerThreads
from cllm.errors import ClosedError, InvalidRequestError

KIND = "slot 1"


@dataclass(frozen=True, slots=True)
class SlotFile:
    """What a slot's file holds.

    Attributes
    ----------
    n_tokens : int
        That were saved; or that are kept for requests that begin alike.
    n_bytes : int
        Of the state that was written or read.
    """

    n_tokens: int
    n_bytes: int


class SlotFiles:
    """Saves slots, and brings them back as prefixes.  Files are written and read in a thread."""

    def __init__(self, dispatcher: Dispatcher, workers: WorkerThreads) -> None:
        self._dispatcher = dispatcher
        self._workers = workers
        self._thread: WorkerThread | None = None

    async def save(self, seq_id: int, path: str | Path) -> SlotFile:
        """See `Engine.save_slot`."""
        self._check(seq_id)
        model = self._model()
        answer: SlotAnswered = await self._dispatcher.ask(lambda n: SaveSlot(n, seq_id))
        if answer.state is None:
            raise InvalidRequestError("seq_id", seq_id, "that of a slot that holds tokens")
        header = {"kind": KIND, "key": model.state_key, "token_ids": answer.token_ids}
        data = answer.state.data
        await self._worker().run(partial(write_state_file, Path(path), header, data))
        return SlotFile(answer.n_tokens, len(data))

    async def restore(self, path: str | Path) -> SlotFile:
        """See `Engine.restore_slot`."""
        model = self._model()
        token_ids, data = await self._worker().run(partial(_read, Path(path), model))
        state = SequenceState(data, len(token_ids))
        answer = await self._dispatcher.ask(lambda n: RestorePrefix(n, token_ids, state))
        return SlotFile(answer.n_tokens, len(data))

    async def erase(self, seq_id: int) -> int:
        """See `Engine.erase_slot`."""
        self._check(seq_id)
        answer: SlotAnswered = await self._dispatcher.ask(lambda n: EraseSlot(n, seq_id))
        return answer.n_tokens

    def _model(self) -> ModelInfo:
        if (model := self._dispatcher.model) is None:
            raise ClosedError("the engine has not been entered")
        return model

    def _worker(self) -> WorkerThread:
        if self._thread is None:
            self._thread = self._workers.start("cllm-slots")
        return self._thread

    @staticmethod
    def _check(seq_id: int) -> None:
        if not isinstance(seq_id, int) or isinstance(seq_id, bool) or not 0 <= seq_id < 1 << 31:
            raise InvalidRequestError("seq_id", seq_id, "the number of a slot")


def _read(path: Path, model: ModelInfo) -> tuple[tuple[int, ...], bytes]:
    """Tokens and state of a file, of this model and these settings."""
    try:
        header, data = read_state_file(path)
        token_ids = _tokens_of(header, path, model.n_vocab)
    except OSError as error:
        limit = f"a file that can be read ({error.strerror})"
    except DamagedFileError as error:
        limit = f"a file of Engine.save_slot, unchanged ({error})"
    else:
        if header.get("key") == model.state_key:
            return token_ids, data
        limit = "a file of this model, with these settings, this library and such a CPU"
    raise InvalidRequestError("path", os.fspath(path), limit)


def _tokens_of(header: dict[str, Any], path: Path, n_vocab: int) -> tuple[int, ...]:
    if header.get("kind") != KIND:
        raise DamagedFileError(f"{path} is {header.get('kind')!r}, not {KIND!r}")
    token_ids = header.get("token_ids")
    is_whole = isinstance(token_ids, list) and all(
        type(token) is int and 0 <= token < n_vocab for token in token_ids
    )
    if not is_whole or not token_ids:
        raise DamagedFileError(f"{path} has been changed")
    return tuple(token_ids)
