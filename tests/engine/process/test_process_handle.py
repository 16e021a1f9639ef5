"""The socket between an engine and its process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest

from cllm.engine.core.commands import (
    AddRequest,
    Ask,
    Audit,
    CancelRequest,
    Command,
    Finished,
    Progressed,
    Read,
    Shutdown,
)
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.media import MediaInput
from cllm.engine.output import TokenDelta
from cllm.engine.process import child
from cllm.engine.process.child import ToParent
from cllm.engine.process.frames import MAX_PACKET, FrameReader
from cllm.engine.process.handle import MAX_SENT, CommandSender, ProcessHandle
from cllm.engine.process.wire import Beat, FromChild, decode_commands, decode_events
from cllm.engine.request import GenerationRequest, SequenceState
from cllm.engine.sampling_params import SamplingParams
from tests.engine.process.test_wire import COMPLETION


def test_a_connection_has_something_unread_when_data_has_come_and_when_the_process_has_ended() -> (
    None
):
    """A process that ends with unread commands resets the connection."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    handle = ProcessHandle.__new__(ProcessHandle)  # without a process
    handle.socket = ours
    with ours:
        assert not handle.has_unread
        theirs.send(b"x")
        assert handle.has_unread
        assert ours.recv(1) == b"x"
        assert not handle.has_unread
        ours.send(b"x")
        theirs.close()
        assert handle.has_unread


def image(n_bytes: int, digest: bytes = b"d") -> MediaInput:
    return MediaInput(digest, bytes(n_bytes), (n_bytes // 3, 1), 1)


def asked(request_id: str, *media: MediaInput, state: SequenceState | None = None) -> AddRequest:
    params = SamplingParams()
    return AddRequest(
        GenerationRequest(request_id, 1, (1,), params, 0, 0.0, None, state=state, media=media)
    )


def names(commands: Iterable[object]) -> list[object]:
    return [
        command.request.request_id if isinstance(command, AddRequest) else command
        for command in commands
    ]


class Wire:
    """A sender, and what has arrived at the other end of its socket."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.sender = CommandSender(ours)
        self._theirs = theirs
        self._reader = FrameReader()

    def read(self) -> list[object]:
        """Read once, and return the commands that are complete."""
        try:
            frames = self._reader.receive(self._theirs)
        except BlockingIOError:
            frames = []
        assert frames is not None
        return [command for frame in frames for command in decode_commands(frame)]

    def read_all(self) -> list[object]:
        """Send and read until nothing is left."""
        found = self.read()
        while self.sender.has_unsent:
            self.sender.send([])
            found += self.read()
        while commands := self.read():
            found += commands
        return found


@pytest.fixture
def wire() -> Iterator[Wire]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield Wire(ours, theirs)


def test_commands_overtake_the_images_of_other_requests(wire: Wire) -> None:
    wire.sender.send([asked("image", image(30_000_000))])
    assert wire.sender.has_unsent
    others: list[Command] = [
        Read("other", 3),
        asked("small", image(3000)),
        CancelRequest("another"),
    ]
    wire.sender.send(others)
    arrived = list[object]()
    while len(arrived) < 3:
        arrived += wire.read()
        wire.sender.send([])
    assert names(arrived) == names(others)
    assert wire.sender.has_unsent
    assert names(wire.read_all()) == ["image"]


def test_commands_for_a_request_stay_behind_its_images(wire: Wire) -> None:
    wire.sender.send([asked("image", image(3_000_000)), Read("image", 1)])
    behind: list[Command] = [CancelRequest("image"), asked("image", image(3)), Read("image", 2)]
    for command in behind:
        wire.sender.send([command])
    assert names(wire.read_all()) == ["image", Read("image", 1), behind[0], "image", behind[2]]
    wire.sender.send([Ask(2, Audit()), Read("image", 3)])
    assert wire.read_all() == [Ask(2, Audit()), Read("image", 3)]


def test_a_request_that_is_sent_waits_for_no_other_image(wire: Wire) -> None:
    wire.sender.send([asked("first", image(300_000))])
    wire.sender.send([asked("second", image(30_000_000))])
    arrived = list[object]()
    while not arrived:
        arrived += wire.read()
        wire.sender.send([])
    swift: list[Command] = [Read("first", 3), Ask(1, Audit()), CancelRequest("first")]
    wire.sender.send(swift)
    while len(arrived) < 4:
        arrived += wire.read()
        wire.sender.send([])
    assert names(arrived) == ["first", *swift]
    assert wire.sender.has_unsent
    wire.sender.send([Shutdown()])  # the end of all requests
    assert names(wire.read_all()) == ["second", Shutdown()]
    wire.sender.send([asked("third", image(300_000)), Shutdown()])
    assert names(wire.read_all()) == ["third", Shutdown()]


def test_what_requests_share_is_sent_once_and_arrives_as_it_was(wire: Wire) -> None:
    shared = image(1_000_000)
    state = SequenceState(bytes(range(256)) * 5000, 7)
    wire.sender.send([asked("a", shared, image(3)), asked("b", shared), asked("c", state=state)])
    a, b, c = (each.request for each in wire.read_all() if isinstance(each, AddRequest))
    assert (a.media, b.media, c.state) == ((shared, image(3)), (shared,), state)
    assert a.media[0].data is b.media[0].data


def test_one_call_sends_a_bounded_number_of_bytes() -> None:
    """The call may run in the event loop, next to a process that reads as fast as this one sends."""

    class Fast:
        n_bytes = 0

        def send(self, data: memoryview) -> int:
            self.n_bytes += len(data)
            return len(data)

    fast = Fast()
    sender = CommandSender(fast)  # type: ignore[arg-type]
    sender.send([asked("image", image(30_000_000))])
    assert MAX_SENT <= fast.n_bytes <= MAX_SENT + MAX_PACKET + 100
    while sender.has_unsent:
        sender.send([])
    assert fast.n_bytes > 30_000_000


def test_tokens_overtake_the_kv_state_of_another_request() -> None:
    """The inference thread does not wait until the parent has read the state."""
    state = SequenceState(bytes(20_000_000), 7)
    ends = [Finished(name, TokenDelta("", ()), COMPLETION, state=state) for name in "ab"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, reader, arrived = ToParent(ours), FrameReader(), list[FromChild]()
        token = Progressed("c", TokenDelta("x", (1,)))
        last = Progressed("a", TokenDelta("y", (2,)))

        def send() -> None:
            sender.post([last, *ends])
            sender.post([token])

        post = threading.Thread(target=send)
        post.start()
        while len(arrived) < 4:
            for frame in reader.receive(theirs) or []:
                arrived += decode_events(frame)[0]
            post.join(0.02 if post.is_alive() else None)  # a packet a time until the token is sent
        assert arrived == [last, token, *ends]
        sender.close()


class Counted:
    """Stand-in for an inference thread: the attributes that `ToParent` reads."""

    statistics = EngineStatistics(n_ticks=4)
    n_requests: tuple[int, int, int] | None = None


def test_statistics_come_with_tokens_after_a_time_and_with_all_other_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "STATISTICS_S", 3600.0)
    token = Progressed("a", TokenDelta("x", (1,)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, reader = ToParent(ours), FrameReader()
        sender.thread = thread = Counted()  # type: ignore[assignment]

        def has_statistics(send: Callable[[], object]) -> bool:
            send()
            (frame,) = reader.receive(theirs) or []
            return decode_events(frame)[1] == thread.statistics

        end = Finished("b", TokenDelta("", ()), COMPLETION)
        assert not has_statistics(partial(sender.post, [end]))  # no model is loaded
        thread.n_requests = (0, 1, 0)
        assert has_statistics(partial(sender.post, [token]))
        assert not has_statistics(partial(sender.post, [token]))
        assert has_statistics(partial(sender.post, [end]))
        assert not has_statistics(partial(sender.tell, Beat(0.0, 0.0)))
        assert not has_statistics(partial(sender.post, [token]))
        thread.n_requests = (1, 1, 0)
        assert has_statistics(partial(sender.post, [token]))
        monkeypatch.setattr(child, "STATISTICS_S", 0.0)
        assert has_statistics(partial(sender.post, [token]))
        sender.close()
