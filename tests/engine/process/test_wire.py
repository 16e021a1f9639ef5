"""Commands, events and errors come out of the border as they went in."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.constraint import NamedConstraint
from cllm.engine.core.commands import (
    AddEmbedding,
    AddRequest,
    Answered,
    Ask,
    Audit,
    CancelRequest,
    ClearPrefixCache,
    Command,
    Embedded,
    Ended,
    EraseSlot,
    ExtentInfo,
    Finished,
    Inspect,
    LiveView,
    LoadedLoras,
    LoadLora,
    Progressed,
    Read,
    Ready,
    Shutdown,
    SlotInfo,
    SlotState,
    Stopped,
    TickInfo,
    UnloadLora,
)
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.embedding import EmbeddingInfo, EmbeddingRequest
from cllm.engine.lora import LoraInfo, LoraUse
from cllm.engine.output import Completion, FinishReason, Timings, TokenDelta, TokenLogprob, Usage
from cllm.engine.process import wire
from cllm.engine.process.frames import Frame, FrameReader, packets
from cllm.engine.process.wire import (
    Beat,
    FromChild,
    Logged,
    decode_commands,
    decode_events,
    encode_commands,
    encode_events,
)
from cllm.engine.request import FimTokens, GenerationRequest, ModelInfo, SequenceState, Thinking
from cllm.engine.sampling_params import SamplingParams
from cllm.errors import (
    CllmError,
    DeadlineError,
    DecodeFailedError,
    EmbeddingError,
    EngineFailedError,
    GenerationError,
    InvalidArgumentError,
    ModelLoadError,
)
from tests.conftest import examples

PROPERTY = examples(100)
LOGPROB = TokenLogprob(1, "\ufffd", b"\xff", -1.5, (TokenLogprob(2, "b", b"b", float("-inf")),))
COMPLETION = Completion(
    request_id="r",
    text="text 你好",
    token_ids=(1, 2),
    prompt_token_ids=(),
    finish_reason=FinishReason.STOP,
    stop_reason=7,
    usage=Usage(3, 1, 2),
    timings=Timings(0.1, 0.2, 0.3, None, 0.6, None, 0.1, 1),
    logprobs=(LOGPROB,),
    prompt_logprobs=(None, LOGPROB),
)
MODEL = ModelInfo(
    "path", "name", "about", "llama", 1, 2, 3, 4, 5, 6, None, "{{ x }}", 7,
    sampling={"top_k": 3, "temperature": 0.5}, fingerprint="f",
    embedding=EmbeddingInfo("rank", 2, 512, ("yes", "no"), (1, 2), (2,), is_softmaxed=True),
    loras=(LoraInfo("a", "a.gguf", 0.5, (1, 2)),), fim=FimTokens(1, 2, 3, None, 5, 6),
)  # fmt: skip


def request(**options: object) -> GenerationRequest:
    values: dict[str, object] = {
        "request_id": "r", "serial": 3, "prompt_token_ids": (1, 2, 3), "params": SamplingParams(),
        "priority": -1, "submitted_at": 1.5, "deadline": None, **options,
    }  # fmt: skip
    return GenerationRequest(**values)  # type: ignore[arg-type]


def values_of(found: GenerationRequest) -> dict[str, object]:
    return {f.name: getattr(found, f.name) for f in fields(found)}


@pytest.mark.parametrize(
    "given_request",
    [
        request(),
        request(deadline=2.5, first_scored=1, strips_space=True, fingerprint="f", seed=2**32 - 1),
        request(constraint=NamedConstraint("regex", "[0-9]+"), generated_token_ids=(4, 5)),
        request(thinking=Thinking(b"<think>", (b"</think>", b"\xff"), True, None, (1, 2))),
        request(spelled={3: b"\xfe", 4: b""}, resamples=True, n_unread=9),
        request(params=SamplingParams(logit_bias={3: 1.5, 4: float("-inf")}, stop="\n", seed=1)),
        request(params=SamplingParams(json_schema={"type": "object"}, stop_token_ids=[1])),
        request(lora=LoraUse((("a", 1.0), ("b", -0.5)), (("b", -0.5),), 2)),
        request(params=SamplingParams(grammar='root ::= "a"', logprobs=2, speculation=True)),
    ],
)
def test_a_request_arrives_as_it_was(given_request: GenerationRequest) -> None:
    (arrived,) = decode_commands(encode_commands([AddRequest(given_request)]))
    assert isinstance(arrived, AddRequest)
    assert values_of(arrived.request) == values_of(given_request)


def test_commands_arrive_in_their_order() -> None:
    commands: list[Command] = [
        CancelRequest("a"), Read("b", 3), Ask(6, ClearPrefixCache()), Ask(1, Audit()), Ask(2, Inspect()),
        Shutdown(), Ask(5, EraseSlot(6)),
        AddEmbedding(EmbeddingRequest("e", 4, ((1, 2), (3,)), -1, 0.5, 1.5)),
        Ask(3, LoadLora("a", "x/a.gguf", 0.5)), Ask(4, UnloadLora("a")),
    ]  # fmt: skip
    assert decode_commands(encode_commands(commands)) == commands


def test_events_arrive_as_they_were() -> None:
    events: list[FromChild] = [
        Progressed("r", TokenDelta("a", (1,))),
        Progressed("s", TokenDelta("", (2, 3), logprobs=(LOGPROB,))),
        Ready(MODEL, EngineStatistics(n_ticks=3)),
        Answered(1, ("one", "two")),
        Answered(6, ()),
        Answered(7, 12),
        Answered(8, error=None),
        Answered(9, LoadedLoras(())),
        Answered(
            2,
            LiveView(
                (SlotInfo(0, SlotState.DECODE, "r", age_s=1.5, media=((2, 6),)),),
                (ExtentInfo(0, 6, -1, (0, 1)),),
                (TickInfo(1, 2, 3, 0.1, 0.2, 0.3),),
                n_waiting=4,
                oldest_waiting_s=0.5,
            ),
        ),
        Embedded("e", np.arange(4, dtype=np.float32).tobytes(), 2),
        Embedded("f"),
        Answered(3, LoadedLoras((LoraInfo("a", "a.gguf", 0.5, (1, 2)),))),
        Ended(),
        Logged("cllm.engine", 30, "text"),
        Beat(0.5, 1.5),
        Stopped(None),
    ]
    told, statistics = decode_events(encode_events(events, EngineStatistics(n_ticks=4)))
    assert told == events
    assert statistics == EngineStatistics(n_ticks=4)
    assert decode_events(encode_events([]))[1] is None


def test_the_tokens_of_a_request_come_before_its_end() -> None:
    end = Finished("r", TokenDelta("", (), FinishReason.STOP, 2), COMPLETION)
    told, _ = decode_events(encode_events([end, Progressed("s", TokenDelta("a", (1,)))]))
    assert [type(event) for event in told] == [Progressed, Finished]
    assert told[1] == end


@pytest.mark.parametrize("kind", [GenerationError, EngineFailedError])
def test_an_error_arrives_with_its_type_its_cause_and_what_it_knows(kind: type) -> None:
    error = kind("request r failed")
    error.__cause__ = InvalidArgumentError("generated", 3, "tokens that the constraint allows")
    sent = Finished("r", TokenDelta("", (), FinishReason.ERROR), COMPLETION, error)
    ((arrived,), _) = decode_events(encode_events([sent]))
    assert isinstance(arrived, Finished)
    assert type(arrived.error) is kind
    assert str(arrived.error) == "request r failed"
    assert arrived.error is not None
    assert arrived.error.completion == COMPLETION
    cause = arrived.error.__cause__
    assert isinstance(cause, InvalidArgumentError)
    assert (cause.field, cause.value, cause.limit) == (
        "generated", 3, "tokens that the constraint allows",
    )  # fmt: skip


@pytest.mark.parametrize("kind", [EmbeddingError, DeadlineError, EngineFailedError])
def test_why_there_are_no_vectors_arrives_too(kind: type) -> None:
    error = kind("no vectors")
    error.__cause__ = DecodeFailedError("llama_encode", -3)
    ((arrived,), _) = decode_events(encode_events([Embedded("e", error=error)]))
    assert isinstance(arrived, Embedded)
    assert type(arrived.error) is kind
    assert str(arrived.error) == "no vectors"
    assert arrived.error is not None
    assert isinstance(arrived.error.__cause__, DecodeFailedError)


class OwnError(Exception):
    """An exception that the other process does not know."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModelLoadError("path", "why"), ModelLoadError),
        (DecodeFailedError("llama_decode", 2), DecodeFailedError),
        (ValueError("value"), ValueError),
        (MemoryError(), MemoryError),
        (OwnError("own"), CllmError),
    ],
)
def test_what_stops_the_engine_is_raised_here_too(
    error: BaseException, kind: type[BaseException]
) -> None:
    ((arrived,), _) = decode_events(encode_events([Stopped(error)]))
    assert isinstance(arrived, Stopped)
    assert type(arrived.error) is kind
    assert str(error) in str(arrived.error)
    if isinstance(error, DecodeFailedError):
        assert isinstance(arrived.error, DecodeFailedError)
        assert arrived.error.code == 2


def test_causes_without_end_are_cut() -> None:
    error = ValueError("0")
    last: BaseException = error
    for i in range(1, 100):
        last.__cause__ = ValueError(str(i))
        last = last.__cause__
    ((arrived,), _) = decode_events(encode_events([Stopped(error)]))
    assert isinstance(arrived, Stopped)
    n_causes, cause = 0, arrived.error
    while cause is not None and cause.__cause__ is not None:
        n_causes, cause = n_causes + 1, cause.__cause__
    assert n_causes == 4


@PROPERTY
@given(
    frames=st.lists(
        st.lists(st.binary(max_size=50), min_size=1, max_size=4).map(tuple), max_size=8
    ),
    data=st.data(),
)
def test_frames_arrive_however_their_bytes_are_cut(
    frames: list[Frame], data: st.DataObject
) -> None:
    stream = b"".join(packet for frame in frames for packet in packets(frame, is_bulky=False))
    reader, found = FrameReader(), list[Frame]()
    while stream:
        n_bytes = data.draw(st.integers(1, len(stream)))
        found += reader.add(stream[:n_bytes])
        stream = stream[n_bytes:]
    assert found == frames


class Word(str):
    """Not quite a `str`."""

    def __str__(self) -> str:
        return "another"


def test_numbers_of_numpy_and_words_of_others_cross_as_pythons_own() -> None:
    params = SamplingParams(
        seed=np.int64(3),  # type: ignore[arg-type]
        max_tokens=np.int32(7),  # type: ignore[arg-type]
        temperature=np.float64(0.5),
        logit_bias={np.int64(5): np.float64(1.5)},  # type: ignore[dict-item]
        stop=[Word("end")],
    )
    request = GenerationRequest("r", 0, (1,), params, np.int64(2), 0.0, None)  # type: ignore[arg-type]
    (command,) = decode_commands(encode_commands([AddRequest(request)]))
    assert isinstance(command, AddRequest)
    got = command.request.params
    assert (got.seed, got.max_tokens, got.temperature) == (3, 7, 0.5)
    assert (dict(got.logit_bias), got.stop, command.request.priority) == ({5: 1.5}, ("end",), 2)


@pytest.mark.parametrize("n_bytes_max", [4, 3])
def test_what_the_cache_held_crosses_both_ways_but_not_what_is_too_large_for_a_frame(
    n_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_STATE_BYTES", n_bytes_max)
    state = SequenceState(b"held", 3)
    request = GenerationRequest("r", 1, (1, 2), SamplingParams(), 0, 0.5, None, state=state)
    (command,) = decode_commands(encode_commands([AddRequest(request)]))
    assert isinstance(command, AddRequest)
    event = Finished("r", TokenDelta("", ()), COMPLETION, state=state)
    (told,), _ = decode_events(encode_events([event]))
    assert isinstance(told, Finished)
    expected = state if n_bytes_max == 4 else None
    assert (command.request.state, told.state) == (expected, expected)
    assert decode_commands(encode_commands([CancelRequest("r", True)])) == [
        CancelRequest("r", True)
    ]
