"""Questions to the inference thread are answered when they can be, and no failure ends the engine."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest

from cllm.engine.core.commands import (
    Answered,
    Ask,
    Audit,
    ClearPrefixCache,
    EraseSlot,
    Event,
    Inspect,
    LiveView,
    LoadedLoras,
    LoadLora,
    UnloadLora,
)
from cllm.engine.lora import LoraInfo
from cllm.engine.thread.questions import Questions
from cllm.errors import InvalidRequestError, ModelLoadError
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator

LORA = LoraInfo("a", "a.gguf", 0.0, ())


@dataclass
class FakeLoras:
    """Adapters by name; a path that is not `a.gguf` fails."""

    loaded: dict[str, LoraInfo] = field(default_factory=dict)

    @property
    def infos(self) -> tuple[LoraInfo, ...]:
        return tuple(self.loaded.values())

    def load(self, name: str, path: str, scale: float) -> None:
        if path != LORA.path:
            raise OSError("no such file")
        self.loaded[name] = LORA

    def unload(self, name: str) -> None:
        del self.loaded[name]


@pytest.fixture
def sim() -> Simulator:
    made = Simulator(n_ctx=256, answer=endless)
    made.submit(b"ab", max_tokens=100)
    made.tick(2)
    return made


def answer(questions: Questions, call_id: int, question: Any) -> Event | None:
    questions.ask(Ask(call_id, question))
    events = questions.take_events()
    assert len(events) <= 1
    return events[0] if events else None


def test_each_question_has_an_answer_of_its_own_type(sim: Simulator) -> None:
    questions: Any = Questions(sim.core, FakeLoras(), lambda: ["one"])
    assert answer(questions, 1, Audit()) == Answered(1, ("one",))
    assert answer(questions, 2, EraseSlot(5)) == Answered(2, 0)
    assert answer(questions, 3, LoadLora("a", LORA.path)) == Answered(3, LoadedLoras((LORA,)))
    assert answer(questions, 4, UnloadLora("a")) == Answered(4, LoadedLoras(()))
    view = answer(questions, 5, Inspect())
    assert isinstance(view, Answered)
    assert isinstance(view.value, LiveView)
    assert answer(questions, 6, ClearPrefixCache()) == Answered(6, ())


def test_a_failure_is_an_answer(sim: Simulator) -> None:
    questions: Any = Questions(sim.core, FakeLoras(), list)
    used = answer(questions, 1, EraseSlot(0))
    assert isinstance(used, Answered)
    assert isinstance(used.error, InvalidRequestError)
    missing = answer(questions, 2, LoadLora("b", "b.gguf"))
    assert isinstance(missing, Answered)
    assert isinstance(missing.error, ModelLoadError)
    assert isinstance(missing.error.__cause__, OSError)


def test_an_audit_waits_until_what_is_known_is_mended(sim: Simulator) -> None:
    questions: Any = Questions(sim.core, FakeLoras(), list)
    sim.core.mark_corrupt(RuntimeError("they disagree"))
    assert answer(questions, 1, Audit()) is None
    assert answer(questions, 2, EraseSlot(5)) == Answered(2, 0), "the others are answered"
    sim.tick()
    assert questions.take_events() == [Answered(1, ())]


def test_an_answer_that_is_an_error_holds_nothing(sim: Simulator) -> None:
    questions: Any = Questions(sim.core, FakeLoras(), list)
    gc.disable()
    try:
        questions.ask(Ask(1, LoadLora("b", "b.gguf")))
        events = questions.take_events()
        error = weakref.ref(events[0].error)
        del events  # the caller's own frame
        assert error() is None
    finally:
        gc.enable()
