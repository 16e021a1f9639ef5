"""The time at which the events of a tick are posted to the event loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cllm.engine.config import EngineConfig
from cllm.engine.core.commands import Event, Finished, Progressed
from cllm.engine.output import TokenDelta
from cllm.engine.thread.inference_thread import InferenceThread
from cllm.engine.thread.interrupter import Interrupter
from cllm.engine.thread.mailbox import Inbox
from cllm.engine.thread.worker_thread import WorkerThreads
from tests.engine.process.test_wire import COMPLETION

TOKEN = Progressed("a", TokenDelta("x", (1,)))
END = Finished("a", TokenDelta("", ()), COMPLETION)


@pytest.mark.parametrize(
    ("process", "decodes_next", "events", "waits"),
    [
        (False, True, [TOKEN], True),
        (False, False, [TOKEN], False),
        (False, True, [TOKEN, END], False),
        (True, True, [TOKEN], False),
    ],
)
def test_tokens_wait_for_the_next_decode_only_in_the_process_of_their_event_loop(
    process: bool, decodes_next: bool, events: list[Event], waits: bool
) -> None:
    unused: Any = None
    config = EngineConfig(process=process)
    thread = InferenceThread(config, unused, Inbox(), unused, WorkerThreads(), Interrupter())
    core: Any = SimpleNamespace(decodes_next=decodes_next)
    assert thread._can_wait(core, events) == waits
