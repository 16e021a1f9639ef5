"""Questions: questions of the event loop (`Ask`), answered between two ticks.  Inference thread only."""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.core.commands import (
    Answer,
    Answered,
    Ask,
    Audit,
    ClearPrefixCache,
    EraseSlot,
    Event,
    Inspect,
    LayoutMedia,
    LoadedLoras,
    LoadLora,
    MediaLayout,
    Question,
    UnloadLora,
)
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.media import Shape, kind_of, left_out, size_of
from cllm.engine.thread.backend import Loras, MediaEncoderThread
from cllm.errors import CllmError, GenerationError, InvalidRequestError, ModelLoadError


class Questions:
    """Open questions, the oldest first.

    Parameters
    ----------
    audit : callable
        Returns a text for each difference between the bookkeeping and llama.cpp.
    """

    def __init__(
        self,
        core: EngineCore,
        loras: Loras,
        audit: Callable[[], list[str]],
        media: MediaEncoderThread | None = None,
    ) -> None:
        self._core = core
        self._loras = loras
        self._audit = audit
        self._media = media
        self._open: list[Ask] = []

    def ask(self, ask: Ask) -> None:
        """Take a question; clear the prefix cache at once if it is about that."""
        if isinstance(ask.question, ClearPrefixCache):
            self._core.manager.cells.forget_prefixes()
        self._open.append(ask)

    def withdraw(self, call_id: int) -> None:
        """Forget a question whose caller has left."""
        gone = {ask.question for ask in self._open if ask.call_id == call_id}
        self._open = [ask for ask in self._open if ask.call_id != call_id]
        for question in gone - {ask.question for ask in self._open}:
            if isinstance(question, LayoutMedia) and self._media is not None:
                self._media.forget(question.shape)

    def take_events(self) -> list[Event]:
        """Answer the open questions as far as possible now; return the answers as events."""
        events, asked, self._open = list[Event](), self._open, []
        try:
            for ask in asked:
                try:
                    answer = self._answer(ask.question)
                except CllmError as error:
                    events.append(Answered(ask.call_id, error=error))
                    continue
                if answer is None:
                    self._open.append(ask)
                else:
                    events.append(Answered(ask.call_id, answer))
            return events
        finally:
            del events  # the traceback of an error holds this frame

    def _answer(self, question: Question) -> Answer | None:
        """Return the answer; None if it comes later."""
        core = self._core
        match question:
            case Audit():
                # A known fault is repaired first, in the next tick.
                return None if core.manager.cells.fault is not None else tuple(self._audit())
            case ClearPrefixCache():
                # The files are removed in the background.
                tiers = core.manager.saved.tiers
                is_clearing = tiers is not None and tiers.is_clearing
                return None if is_clearing or core.manager.cells.fault is not None else ()
            case Inspect():
                return core.live_view()
            case EraseSlot(seq_id):
                return core.erase_slot(seq_id)
            case LayoutMedia(shape):
                return self._layout(shape)
            case LoadLora(name, path, scale):
                return self._change_loras(lambda: self._loras.load(name, path, scale), path)
            case UnloadLora(name):
                if core.queue.n_using(name):
                    return None
                answer = self._change_loras(lambda: self._loras.unload(name), name)
                core.forget_lora(name)
                return answer

    def _layout(self, shape: Shape) -> MediaLayout | None:
        """Return the chunks of an image or audio; every failure becomes an error of cllm."""
        kind, size = kind_of(shape), size_of(shape)
        if self._media is None:
            raise InvalidRequestError(kind, size, left_out(kind, ()))
        try:
            pieces = self._media.layout(shape)
        except CllmError:
            raise
        except Exception as error:
            raise GenerationError(f"{kind} of {size} was not cut into chunks: {error!r}") from error
        return None if pieces is None else MediaLayout(pieces)

    def _change_loras(self, change: Callable[[], object], path: str) -> Answer:
        """Load or unload adapters; every failure becomes an error of cllm, and the engine continues."""
        try:
            change()
        except CllmError:
            raise
        except Exception as error:
            raise ModelLoadError(path, f"{error!r}") from error
        return LoadedLoras(self._loras.infos)
