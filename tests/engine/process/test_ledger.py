"""Whatever crashes when: every reader hears each token once, and only who is guilty ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from cllm.engine.core.commands import (
    AddEmbedding,
    AddRequest,
    Answered,
    Ask,
    Audit,
    CancelRequest,
    Command,
    Embedded,
    Event,
    Finished,
    LayoutMedia,
    LoadedLoras,
    LoadLora,
    Progressed,
    Read,
    UnloadLora,
    Withdraw,
)
from cllm.engine.embedding import EmbeddingRequest
from cllm.engine.lora import LoraUse
from cllm.engine.media import MediaInput
from cllm.engine.output import Completion, FinishReason, Timings, TokenDelta, Usage
from cllm.engine.process.batch_record import Underway
from cllm.engine.process.ledger import Ledger
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from cllm.errors import (
    DeadlineError,
    EmbeddingError,
    EngineFailedError,
    GenerationError,
    InvalidRequestError,
    ModelLoadError,
)

N_OUTPUT = 12
CRASH = RuntimeError("crashed")


def request(number: int) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=N_OUTPUT)
    return GenerationRequest(f"r{number}", number, (number,), params, 0, 0.0, None)


def token(number: int, position: int) -> int:
    return 1000 * number + position


@dataclass
class FakeProcess:
    """Computes a token a tick for each request that it has; knows nothing after a crash."""

    poison: frozenset[str] = frozenset()
    outputs: dict[str, list[int]] = field(default_factory=dict)
    n_given: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case AddRequest(added):
                    assert added.request_id not in self.outputs, "it has it already"
                    given = list(added.generated_token_ids)
                    self.outputs[added.request_id] = given
                    self.n_given[added.request_id] = len(given)
                    self.numbers[added.request_id] = added.serial
                case CancelRequest(request_id) if request_id in self.outputs:
                    self._finish(request_id, (), FinishReason.CANCELLED)
                case Ask(call_id):
                    self.events.append(Answered(call_id, ()))

    @property
    def batch(self) -> tuple[str, ...]:
        return tuple(self.outputs)

    @property
    def crashes(self) -> bool:
        return bool(self.poison.intersection(self.outputs))

    def tick(self) -> None:
        for request_id in self.batch:
            output = self.outputs[request_id]
            new = token(self.numbers[request_id], len(output))
            output.append(new)
            if len(output) == N_OUTPUT:
                self._finish(request_id, (new,), FinishReason.LENGTH)
            else:
                self.events.append(Progressed(request_id, TokenDelta(f"{new} ", (new,))))

    def _finish(self, request_id: str, tokens: tuple[int, ...], reason: FinishReason) -> None:
        output = self.outputs.pop(request_id)[self.n_given[request_id] :]
        text = "".join(f"{t} " for t in output)
        completion = Completion(
            request_id, text, tuple(output), (), reason, None, Usage(1, 0, len(output)),
            Timings(0.0, 0.0, 0.0, None, 0.0, None, None, 0),
        )  # fmt: skip
        delta = TokenDelta("".join(f"{t} " for t in tokens), tokens, reason)
        self.events.append(Finished(request_id, delta, completion))

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events


class World:
    """A ledger between readers and a process that may crash at any moment."""

    def __init__(self, poison: frozenset[str] = frozenset()) -> None:
        self.ledger = Ledger()
        self.poison = poison
        self.process = FakeProcess(poison)
        self.heard: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}
        self.answered: list[int] = []
        self.n_crashes = 0
        self.computed: tuple[str, ...] = ()
        self.process.obey(self.ledger.on_ready())

    def command(self, command: Command) -> None:
        self.process.obey(self.ledger.command(command))
        self.hear(self.ledger.expire(1.0))

    def hear(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Progressed(request_id, delta):
                    assert request_id not in self.finished
                    self.heard.setdefault(request_id, []).extend(delta.token_ids)
                    self.command(Read(request_id, 1))
                case Finished(request_id, delta):
                    assert request_id not in self.finished, "two ends"
                    self.heard.setdefault(request_id, []).extend(delta.token_ids)
                    self.finished[request_id] = event
                case Answered(call_id):
                    self.answered.append(call_id)

    def deliver(self) -> None:
        events, commands = self.ledger.events(self.process.take(), 1.0)
        self.process.obey(commands)
        self.hear(events)

    def tick(self) -> None:
        self.computed = self.process.batch
        if self.process.crashes:
            self.crash()
        else:
            self.process.tick()
            self.deliver()

    def crash(self, *, is_own: bool = True) -> None:
        self.n_crashes += 1
        self.hear(self.ledger.on_crash(CRASH, Underway(self.computed), 1.0, is_own=is_own))
        self.process, self.computed = FakeProcess(self.poison), ()
        self.hear(self.ledger.expire(1.0))
        self.process.obey(self.ledger.on_ready())

    def check_whole(self, number: int) -> None:
        expected = [token(number, i) for i in range(N_OUTPUT)]
        ended = self.finished[f"r{number}"]
        assert self.heard[f"r{number}"] == expected
        assert ended.completion.token_ids == tuple(expected)
        assert ended.completion.text == "".join(f"{t} " for t in expected)
        assert ended.completion.prompt_token_ids == (number,)
        assert ended.completion.usage.n_output == N_OUTPUT


@pytest.mark.parametrize("seed", range(200))
def test_every_reader_hears_each_token_once_whenever_the_process_is_killed(seed: int) -> None:
    choose, world = random.Random(seed), World()
    n_requests, n_submitted = 12, 0
    while len(world.finished) < n_requests:
        if n_submitted < n_requests and choose.random() < 0.5:
            world.command(AddRequest(request(n_submitted)))
            n_submitted += 1
        if choose.random() < 0.2 and world.n_crashes < 30:
            if choose.random() < 0.5:  # what it has computed was not heard
                world.computed = world.process.batch
                world.process.tick()
            world.crash(is_own=False)
        world.tick()
    for number in range(n_requests):
        world.check_whole(number)
    assert not world.ledger.requests


@pytest.mark.parametrize("n_requests", [1, 2, 50])
def test_who_crashes_it_alone_ends_after_three_crashes_and_nobody_else(n_requests: int) -> None:
    world = World(poison=frozenset({"r0"}))
    for number in range(n_requests):
        world.command(AddRequest(request(number)))
    for _ in range(20 * n_requests):
        world.tick()
    assert world.n_crashes == 3
    failed = world.finished["r0"]
    assert failed.completion.finish_reason is FinishReason.ERROR
    assert isinstance(failed.error, GenerationError)
    assert failed.error.__cause__ is CRASH
    for number in range(1, n_requests):
        world.check_whole(number)


@pytest.mark.parametrize("seed", range(100))
def test_kills_in_between_hide_nobody_who_is_guilty_and_accuse_nobody_else(seed: int) -> None:
    choose, world = random.Random(seed), World(poison=frozenset({"r2"}))
    for number in range(8):
        world.command(AddRequest(request(number)))
    for _ in range(400):
        if choose.random() < 0.1:
            world.computed = world.process.batch
            world.crash(is_own=False)
        world.tick()
    assert {r for r, f in world.finished.items() if f.error} == {"r2"}
    for number in set(range(8)) - {2}:
        world.check_whole(number)


def test_an_image_that_crashes_the_encoder_ends_its_request_and_no_other() -> None:
    ledger = Ledger()
    ledger.on_ready()
    shown, other = MediaInput(b"a" * 32, b"", (0, 0), 1), MediaInput(b"b" * 32, b"", (0, 0), 1)
    for number, media in enumerate([(other, shown), (), (other,)]):
        ledger.command(AddRequest(replace(request(number), media=media)))
    told, given = list[Event](), list[list[str]]()
    for beside in [("r1",), ("r1",), ()]:
        told += ledger.on_crash(CRASH, Underway(beside, shown.digest), 1.0)
        commands = ledger.on_ready()
        given.append([c.request.request_id for c in commands if isinstance(c, AddRequest)])
    assert given == [["r0", "r1", "r2"], ["r0"], ["r1"]]
    (ended,) = told
    assert isinstance(ended, Finished)
    assert ended.request_id == "r0"
    assert isinstance(ended.error, GenerationError)


def test_two_who_crash_it_both_end() -> None:
    world = World(poison=frozenset({"r3", "r7"}))
    for number in range(10):
        world.command(AddRequest(request(number)))
    for _ in range(500):
        world.tick()
    assert {r for r, f in world.finished.items() if f.error} == {"r3", "r7"}
    for number in set(range(10)) - {3, 7}:
        world.check_whole(number)
    assert world.n_crashes <= 6


def test_a_request_that_comes_between_two_trials_meets_none_of_the_suspects() -> None:
    world = World(poison=frozenset({"r1"}))
    for number in range(2):
        world.command(AddRequest(request(number)))
    for _ in range(2):
        world.tick()
    batches = [world.process.batch]
    world.tick()
    batches.append(world.process.batch)  # taken back, which the ledger has not heard yet
    world.command(AddRequest(request(2)))
    batches.append(world.process.batch)
    world.deliver()
    batches.append(world.process.batch)
    assert batches == [("r0",), (), (), ("r1",)]
    for _ in range(2 * N_OUTPUT):
        world.tick()
    world.check_whole(0)
    world.check_whole(2)


def test_what_is_cancelled_while_the_process_is_gone_ends_without_another_token() -> None:
    world = World()
    world.command(AddRequest(request(1)))
    world.tick()
    world.hear(world.ledger.on_crash(CRASH, Underway(), 1.0))
    world.command(CancelRequest("r1"))
    completion = world.finished["r1"].completion
    assert completion.finish_reason is FinishReason.CANCELLED
    assert list(completion.token_ids) == world.heard["r1"] == [token(1, 0)]
    assert world.ledger.on_ready() == [], "the next process does not get it"


def test_a_cancel_that_a_crash_has_lost_ends_its_request() -> None:
    ledger = Ledger()
    ledger.on_ready()
    ledger.command(AddRequest(request(1)))
    assert ledger.command(CancelRequest("r1")) == [CancelRequest("r1")]
    assert ledger.expire(1.0) == [], "the process ends it"
    assert ledger.on_crash(CRASH, Underway(("r1",)), 1.0) == []
    (ended,) = ledger.expire(1.0)
    assert isinstance(ended, Finished)
    assert ended.completion.finish_reason is FinishReason.CANCELLED
    assert ledger.on_ready() == []


def test_a_deadline_is_kept_while_the_process_is_gone() -> None:
    ledger = Ledger()
    ledger.on_ready()
    scored = replace(request(1), deadline=5.0, first_scored=1)
    ledger.command(AddRequest(scored))
    ledger.command(AddRequest(request(2)))
    ledger.command(AddEmbedding(replace(texts(3), deadline=6.0)))
    ledger.events([Progressed("r1", TokenDelta("a", (7,)))], 1.0)
    ledger.on_crash(CRASH, Underway(), 2.0)
    assert ledger.expire(4.9) == []
    (ended,) = ledger.expire(5.0)
    assert isinstance(ended, Finished)
    assert ended.delta == TokenDelta("", (), FinishReason.DEADLINE)
    completion = ended.completion
    assert (completion.finish_reason, completion.text) == (FinishReason.DEADLINE, "a")
    assert (completion.token_ids, completion.prompt_logprobs) == ((7,), (None,))
    (late,) = ledger.expire(6.0)
    assert isinstance(late, Embedded)
    assert isinstance(late.error, DeadlineError)
    assert serials(ledger.on_ready()) == [2]


def test_a_request_that_waits_for_a_trial_ends_at_its_deadline() -> None:
    ledger = Ledger()
    ledger.on_ready()
    ledger.command(AddRequest(request(1)))
    for _ in range(2):
        ledger.on_crash(CRASH, Underway(("r1",)), 1.0)
        ledger.on_ready()
    assert ledger.is_trying
    assert ledger.command(AddRequest(replace(request(2), deadline=5.0))) == []
    (ended,) = ledger.expire(5.0)
    assert isinstance(ended, Finished)
    assert ended.request_id == "r2"
    assert ledger.command(AddRequest(request(3))) == []
    assert ledger.command(CancelRequest("r3")) == []
    (ended,) = ledger.expire(5.0)
    assert isinstance(ended, Finished)
    assert ended.completion.finish_reason is FinishReason.CANCELLED


def with_two_suspects() -> tuple[Ledger, list[Command]]:
    """Return a ledger of two requests that were underway in two crashes, and the commands for the next process."""
    ledger = Ledger()
    ledger.on_ready()
    for number in (1, 2):
        ledger.command(AddRequest(request(number)))
    for _ in range(2):
        ledger.on_crash(CRASH, Underway(("r1", "r2")), 1.0)
        given = ledger.on_ready()
    return ledger, given


def test_a_suspect_that_has_ended_is_not_tried_though_another_request_has_its_id() -> None:
    ledger, given = with_two_suspects()
    assert serials(given) == [1]
    ledger.command(CancelRequest("r2"))
    assert len(ledger.expire(1.0)) == 1
    again = replace(request(2), serial=3)
    assert ledger.command(AddRequest(again)) == []
    ledger.command(AddRequest(request(4)))
    _, commands = ledger.events([Progressed("r1", TokenDelta("a", (7,)))], 1.0)
    assert commands == [CancelRequest("r1")], "it is recalled while another suspect may wait"
    _, commands = ledger.events(finished("r1"), 1.0)
    assert serials(commands) == [1, 3, 4], "nothing is tried any more"


def test_a_request_that_is_cancelled_while_it_is_recalled_is_not_counted_here() -> None:
    ledger, _ = with_two_suspects()
    _, commands = ledger.events([Progressed("r1", TokenDelta("a", (7,)))], 1.0)
    assert commands == [CancelRequest("r1")]
    ledger.command(CancelRequest("r1"))
    (ended,), _ = ledger.events(finished("r1"), 1.0)
    assert isinstance(ended, Finished)
    assert ended.completion.finish_reason is FinishReason.CANCELLED
    assert ledger.n_finished == {}, "the process has counted it"


def test_requests_are_held_back_while_a_suspect_is_tried() -> None:
    """Their deadlines are looked at more often then."""
    ledger = Ledger()
    assert ledger.holds_back
    ledger.on_ready()
    assert not ledger.holds_back
    for number in (1, 2):
        ledger.command(AddRequest(request(number)))
    for _ in range(2):
        ledger.on_crash(CRASH, Underway(("r1", "r2")), 1.0)
        ledger.on_ready()
        assert ledger.holds_back == ledger.is_trying
    assert ledger.holds_back


@pytest.mark.parametrize("seed", range(100))
def test_every_request_ends_once_whatever_is_cancelled_silent_and_killed(seed: int) -> None:
    choose, world = random.Random(seed), World(poison=frozenset({"r2"}))
    n_requests, n_submitted = 12, 0
    while len(world.finished) < n_requests:
        if n_submitted < n_requests and choose.random() < 0.5:
            world.command(AddRequest(request(n_submitted)))
            n_submitted += 1
        if choose.random() < 0.1:
            world.command(CancelRequest(f"r{choose.randrange(n_requests)}"))
        if choose.random() < 0.1:  # its events come after the ends of their requests
            world.hear(world.ledger.expire(1.0, is_silent=True))
        if choose.random() < 0.1 and world.n_crashes < 30:
            world.crash(is_own=False)
        world.tick()
    for number in range(n_requests):
        completion = world.finished[f"r{number}"].completion
        assert list(completion.token_ids) == world.heard[f"r{number}"]
        assert completion.token_ids == tuple(
            token(number, i) for i in range(len(completion.token_ids))
        )
    assert not world.ledger.requests


def serials(commands: list[Command]) -> list[int]:
    return [c.request.serial for c in commands if isinstance(c, AddRequest)]


def finished(request_id: str) -> list[Event]:
    process = FakeProcess()
    process.obey([AddRequest(replace(request(1), request_id=request_id))])
    process.obey([CancelRequest(request_id)])
    return process.take()


def test_a_silent_process_keeps_no_request_and_what_it_sends_later_meets_no_reader() -> None:
    ledger = Ledger()
    ledger.on_ready()
    for number in (1, 2, 3):
        ledger.command(AddRequest(replace(request(number), deadline=5.0 if number == 2 else None)))
    ledger.command(CancelRequest("r1"))
    assert ledger.expire(5.0) == []
    told = ledger.expire(5.0, is_silent=True)
    ended = {e.request_id: e.completion.finish_reason for e in told if isinstance(e, Finished)}
    assert ended == {"r1": FinishReason.CANCELLED, "r2": FinishReason.DEADLINE}
    again = replace(request(4), request_id="r1")
    assert ledger.command(AddRequest(again)) == [], "the process still has a request of this id"
    late = [Progressed("r1", TokenDelta("a", (7,))), Progressed("r3", TokenDelta("b", (8,)))]
    assert ledger.events(late, 6.0) == ([late[1]], [])
    assert ledger.events([*finished("r1"), *finished("r2")], 6.0) == ([], [AddRequest(again)])
    own = Progressed("r1", TokenDelta("c", (9,)))
    assert ledger.events([own], 6.0) == ([own], [])


def test_a_silent_process_that_is_killed_has_no_requests_of_the_next_one() -> None:
    ledger = Ledger()
    ledger.on_ready()
    ledger.command(AddRequest(replace(request(1), deadline=5.0)))
    assert len(ledger.expire(5.0, is_silent=True)) == 1
    assert ledger.on_crash(CRASH, Underway(("r1",)), 6.0) == []
    again = request(1)
    assert ledger.command(AddRequest(again)) == []
    assert ledger.on_ready() == [AddRequest(again)]


def test_a_question_that_a_crash_has_met_is_asked_again() -> None:
    world = World()
    world.hear(world.ledger.on_crash(CRASH, Underway(), 1.0))
    world.command(Ask(5, Audit()))
    world.process = FakeProcess()
    world.process.obey(world.ledger.on_ready())
    world.deliver()
    world.process.take()
    assert world.answered == [5]
    world.crash()
    world.deliver()
    assert world.answered == [5]


def test_a_reader_that_had_fallen_behind_is_as_far_behind_in_the_new_process() -> None:
    ledger = Ledger()
    ledger.on_ready()
    ledger.command(AddRequest(request(1)))
    ledger.events([Progressed("r1", TokenDelta("a", (i,))) for i in range(5)], 1.0)
    ledger.command(Read("r1", 2))
    ledger.on_crash(CRASH, Underway(), 1.0)
    (given,) = ledger.on_ready()
    assert isinstance(given, AddRequest)
    assert given.request.n_unread == 3
    assert given.request.generated_token_ids == (0, 1, 2, 3, 4)


def test_a_continued_request_counts_the_deltas_that_its_reader_had_not_taken_before() -> None:
    ledger = Ledger()
    ledger.command(AddRequest(replace(request(1), generated_token_ids=(0, 1, 2, 3), n_unread=4)))
    ledger.command(Read("r1", 1))
    given = ledger.on_ready()
    ledger.events([Progressed("r1", TokenDelta("a", (4,)))], 1.0)
    ledger.command(Read("r1", 2))
    ledger.on_crash(CRASH, Underway(), 1.0)
    given += ledger.on_ready()
    requests = [command.request for command in given if isinstance(command, AddRequest)]
    assert [r.n_unread for r in requests] == [3, 2]
    assert [r.generated_token_ids for r in requests] == [(0, 1, 2, 3), (0, 1, 2, 3, 4)]


def texts(number: int) -> EmbeddingRequest:
    return EmbeddingRequest(f"e{number}", number, ((1, 2), (3,)))


def test_texts_are_given_again_after_a_crash_and_told_of_once() -> None:
    ledger = Ledger()
    assert ledger.on_ready() == []
    assert ledger.command(AddEmbedding(texts(1))) == [AddEmbedding(texts(1))]
    assert ledger.on_crash(CRASH, Underway(("e1",)), 1.0, is_own=False) == []
    assert ledger.command(AddEmbedding(texts(2))) == []
    assert ledger.on_ready() == [AddEmbedding(texts(1)), AddEmbedding(texts(2))]
    vectors = Embedded("e1", b"12345678", 1)
    assert ledger.events([vectors], 1.0) == ([vectors], [])
    assert ledger.events([vectors], 1.0) == ([], [])


def test_texts_that_crash_it_alone_end_and_others_are_computed() -> None:
    ledger = Ledger()
    ledger.on_ready()
    for number in (1, 2):
        ledger.command(AddEmbedding(texts(number)))
    told: list[Event] = []
    for _ in range(2):
        told += ledger.on_crash(CRASH, Underway(("e1", "e2")), 1.0)
        given = ledger.on_ready()
    assert given == [AddEmbedding(texts(1))]  # tried alone
    told += ledger.on_crash(CRASH, Underway(("e1",)), 1.0)
    assert ledger.on_ready() == [AddEmbedding(texts(2))]
    told += ledger.events([Embedded("e2", b"1234", 1)], 1.0)[0]
    guilty, innocent = told
    assert isinstance(guilty, Embedded)
    assert (guilty.request_id, type(guilty.error)) == ("e1", EmbeddingError)
    assert innocent == Embedded("e2", b"1234", 1)
    assert not ledger.requests


def test_texts_that_were_cancelled_while_the_process_is_gone_end_without_it() -> None:
    ledger = Ledger()
    ledger.on_ready()
    ledger.command(AddEmbedding(texts(1)))
    ledger.on_crash(CRASH, Underway(), 1.0)
    assert ledger.command(CancelRequest("e1")) == []
    (ended,) = ledger.expire(1.0)
    assert isinstance(ended, Embedded)
    assert isinstance(ended.error, EmbeddingError)
    assert ended.error.__cause__ is None
    assert ledger.on_ready() == []


def test_when_nothing_helps_those_who_wait_for_vectors_are_told_too() -> None:
    ledger = Ledger()
    ledger.command(AddEmbedding(texts(1)))
    (ended,) = ledger.fail_all(CRASH, 1.0)
    assert isinstance(ended, Embedded)
    assert isinstance(ended.error, EngineFailedError)


def test_when_nothing_helps_everybody_is_told() -> None:
    world = World()
    for number in range(3):
        world.command(AddRequest(request(number)))
    world.tick()
    world.hear(world.ledger.fail_all(CRASH, 1.0))
    assert len(world.finished) == 3
    for ended in world.finished.values():
        assert isinstance(ended.error, EngineFailedError)
        assert len(ended.completion.token_ids) == 1
    assert not world.ledger.requests


def test_at_the_end_of_the_engine_every_request_is_cancelled_with_its_output() -> None:
    world = World()
    world.command(AddRequest(request(1)))
    world.tick()
    world.command(AddEmbedding(texts(2)))
    finished, embedded = world.ledger.cancel_all(1.0)
    assert isinstance(finished, Finished)
    assert finished.completion.finish_reason is FinishReason.CANCELLED
    assert finished.completion.token_ids == (token(1, 0),)
    assert isinstance(embedded, Embedded)
    assert isinstance(embedded.error, EmbeddingError)
    assert not world.ledger.requests


def test_requests_are_counted_by_the_process_that_ends_them_and_otherwise_here() -> None:
    ledger = Ledger()
    ledger.on_ready()
    for number in range(1, 6):
        ledger.command(AddRequest(replace(request(number), deadline=5.0 if number > 3 else None)))
    ledger.command(AddEmbedding(replace(texts(6), deadline=5.0)))
    ledger.events(finished("r1"), 1.0)
    assert ledger.n_finished == {}
    ledger.command(CancelRequest("r2"))
    assert len(ledger.expire(1.0, is_silent=True)) == 1
    ledger.events(finished("r2"), 1.0)
    assert ledger.n_finished == {}, "the process counts both"
    assert len(ledger.expire(5.0, is_silent=True)) == 3
    ledger.on_crash(CRASH, Underway(("r3",)), 6.0)
    assert ledger.n_finished == {FinishReason.DEADLINE: 2}
    ledger.command(CancelRequest("r3"))
    assert len(ledger.expire(6.0)) == 1
    assert ledger.n_finished == {FinishReason.DEADLINE: 2, FinishReason.CANCELLED: 1}
    ledger.command(AddRequest(request(7)))
    for _ in range(3):
        ledger.on_ready()
        ledger.on_crash(CRASH, Underway(("r7",)), 6.0)
    assert not ledger.requests
    assert ledger.n_finished[FinishReason.ERROR] == 1


def test_a_withdrawn_question_is_not_asked_again() -> None:
    ledger = Ledger()
    assert ledger.on_ready() == []
    ask = Ask(1, LayoutMedia((16_000,)))
    assert ledger.command(ask) == [ask]
    assert ledger.command(Withdraw(1)) == [Withdraw(1)]
    assert ledger.on_crash(CRASH, Underway(), 0.0) == []
    assert ledger.on_ready() == []
    assert ledger.command(Withdraw(1)) == [Withdraw(1)]  # an answered one


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (LoadLora("a", "a.gguf"), ModelLoadError),
        (LayoutMedia((8, 9)), InvalidRequestError),
        (LayoutMedia((16_000,)), InvalidRequestError),
    ],
)
def test_a_question_that_met_two_crashes_in_a_row_ends_with_an_error(
    question: LoadLora | LayoutMedia, error: type[Exception]
) -> None:
    ledger = Ledger()
    assert ledger.on_ready() == []
    dangerous, unload = Ask(1, question), Ask(2, UnloadLora("b"))
    assert [*ledger.command(dangerous), *ledger.command(unload)] == [dangerous, unload]
    assert ledger.on_crash(CRASH, Underway(), 0.0) == []
    assert ledger.on_ready() == [dangerous, unload]
    (told,) = ledger.on_crash(CRASH, Underway(), 0.0)
    assert isinstance(told, Answered)
    assert (told.call_id, told.value) == (1, None)
    assert isinstance(told.error, error)
    assert ledger.on_ready() == [unload]
    answer = Answered(2, LoadedLoras(()))
    assert ledger.events([answer], 0.0) == ([answer], [])
    assert ledger.on_crash(CRASH, Underway(), 0.0) == []
    assert ledger.on_ready() == []


def test_a_load_is_repeated_after_somebody_has_killed_the_process() -> None:
    ledger = Ledger()
    load = Ask(1, LoadLora("a", "a.gguf"))
    ledger.command(load)
    assert ledger.on_ready() == [load]
    assert ledger.on_crash(CRASH, Underway(), 0.0, is_own=False) == []
    assert ledger.on_ready() == [load]


def test_an_adapter_is_freed_after_the_requests_that_a_crash_holds_back() -> None:
    """While suspects are tried, one after another, the process does not know that others need the adapter."""
    ledger, unload = Ledger(), Ask(9, UnloadLora("a"))
    assert ledger.on_ready() == []
    ledger.command(AddRequest(replace(request(1), lora=LoraUse((("a", 1.0),)))))
    ledger.command(AddRequest(request(2)))
    assert ledger.command(unload) == [unload]
    for _ in range(2):
        ledger.on_crash(CRASH, Underway(("r1", "r2")), 0.0)
        commands = ledger.on_ready()
    process, asked = FakeProcess(), list[Command]()
    while True:
        asked += [command for command in commands if isinstance(command, Ask)]
        if asked:
            break
        process.obey(commands)
        process.tick()
        _, commands = ledger.events(process.take(), 0.0)
    process.obey(commands)
    assert not ledger.is_trying
    assert process.batch == ("r2", "r1"), "both are in the process again"
    assert asked == [unload]


def test_an_adapter_that_no_request_uses_is_freed_whatever_is_tried() -> None:
    ledger, unload = Ledger(), Ask(9, UnloadLora("a"))
    ledger.on_ready()
    for number in (1, 2):
        ledger.command(AddRequest(request(number)))
    for _ in range(2):
        ledger.on_crash(CRASH, Underway(("r1", "r2")), 0.0)
        ledger.on_ready()
    assert ledger.is_trying
    assert ledger.command(unload) == [unload]
