"""LoraCommands: adapters are loaded and freed between ticks.  Inference thread only."""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.core.messages import Command, Event, LoadLora, LorasChanged, UnloadLora
from cllm.engine.core.run_queue import RunQueue
from cllm.engine.thread.backend import Loras
from cllm.errors import CllmError, ModelLoadError


class LoraCommands:
    """What commands say of adapters, done as soon as it can be.

    Parameters
    ----------
    forget : callable
        Told the name of an adapter that is gone.
    """

    def __init__(self, loras: Loras, queue: RunQueue, forget: Callable[[str], None]) -> None:
        self._loras = loras
        self._queue = queue
        self._forget = forget
        self._leaving: list[UnloadLora] = []
        self._events: list[Event] = []

    def handle(self, command: Command) -> None:
        """Load at once; free when nobody uses it."""
        match command:
            case LoadLora(call_id, name, path, scale):
                try:
                    self._loras.load(name, path, scale)
                except Exception as error:
                    self._events.append(LorasChanged(call_id, error=_told(error, path)))
                else:
                    self._events.append(LorasChanged(call_id, self._loras.infos))
            case UnloadLora():
                self._leaving.append(command)

    def take_events(self) -> list[Event]:
        """What has been done since this was last called."""
        for command in list(self._leaving):
            if not self._queue.n_using(command.name):
                self._leaving.remove(command)
                self._events.append(self._unload(command))
        events, self._events = self._events, []
        return events

    def _unload(self, command: UnloadLora) -> Event:
        try:
            self._loras.unload(command.name)
        except Exception as error:
            return LorasChanged(command.call_id, error=_told(error, command.name))
        self._forget(command.name)
        return LorasChanged(command.call_id, self._loras.infos)


def _told(error: Exception, path: str) -> CllmError:
    """The error as one of cllm's: the engine goes on."""
    if isinstance(error, CllmError):
        return error
    told = ModelLoadError(path, f"{error!r}")
    told.__cause__ = error
    return told
