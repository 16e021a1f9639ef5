"""Encoding of commands, events and errors between two processes: MessagePack, by msgspec.

A frame holds the messages that one side sends together.  Most of them are tokens.  Values that the
receiver already has, such as a prompt, are not sent back.  Images, audio and KV states are attached to the
frame: encoding them would hold the GIL.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, SupportsFloat, SupportsIndex, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from cllm import errors
from cllm.engine.constraint import NamedConstraint
from cllm.engine.core.commands import (
    MAX_STATE_BYTES,
    AddEmbedding,
    AddRequest,
    Answer,
    Answered,
    Ask,
    CancelRequest,
    Command,
    Embedded,
    Ended,
    Event,
    Finished,
    Progressed,
    Question,
    Read,
    Ready,
    Shutdown,
    Stopped,
    Withdraw,
)
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.output import Completion, TokenDelta, TokenLogprob
from cllm.engine.process.frames import MAX_PACKET, Attachments, Frame
from cllm.engine.request import GenerationRequest, SequenceState
from cllm.errors import (
    CllmError,
    DeadlineError,
    EmbeddingError,
    EngineFailedError,
    GenerationError,
)

N_CAUSES_MAX = 4  # causes of an error that are sent with it
Plain = str | int | float | bool | None


# --- Values that are written another way -----------------------------------------------------
# `GenerationRequest`, field by field; a constraint is sent as a `NamedConstraint`.
_HINTS = get_type_hints(GenerationRequest) | {"constraint": NamedConstraint | None}
_Request: Any = msgspec.defstruct("_Request", [*_HINTS.items()], array_like=True, frozen=True)


class _Error(msgspec.Struct, array_like=True, frozen=True):
    """An exception."""

    name: str
    text: str
    attributes: dict[str, Plain]
    cause: _Error | None


class _Finished(msgspec.Struct, array_like=True, frozen=True):
    """`Finished`, without the prompt."""

    request_id: str
    delta: TokenDelta
    completion: Completion
    error: _Error | None
    state: SequenceState | None


class _Embedded(msgspec.Struct, array_like=True, frozen=True):
    """`Embedded`."""

    request_id: str
    vectors: bytes
    n_values: int
    error: _Error | None


class _Ask(msgspec.Struct, array_like=True, frozen=True):
    """`Ask`, the question with the index of its type."""

    call_id: int
    question: tuple[int, msgspec.Raw]


class _Answered(msgspec.Struct, array_like=True, frozen=True):
    """`Answered`, the value with the index of its type."""

    call_id: int
    value: tuple[int, msgspec.Raw] | None
    error: _Error | None


class _Stopped(msgspec.Struct, array_like=True, frozen=True):
    """`Stopped`."""

    error: _Error | None


class SetLogLevel(msgspec.Struct, array_like=True, frozen=True):
    """Command to log records of at least this level."""

    level: int


class Logged(msgspec.Struct, array_like=True, frozen=True):
    """A record of the log of the engine's process."""

    name: str
    level: int
    text: str


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """Sign of life of the engine's process, sent twice a second.

    Attributes
    ----------
    busy_s : float
        Seconds that the inference thread has been in its present tick; 0 while it is idle.
    cpu_s : float
        Processor time of the process, of all threads, in seconds.
    """

    busy_s: float
    cpu_s: float


ToChild = Command | SetLogLevel
FromChild = Event | Logged | Beat

# Types of messages; a message is sent with the index of its type here.
COMMANDS: tuple[type, ...] = (
    _Request, CancelRequest, Read, _Ask, Shutdown, SetLogLevel, AddEmbedding, Withdraw,
)  # fmt: skip
EVENTS: tuple[type, ...] = (
    Ready, _Finished, _Answered, _Stopped, Ended, Logged, Beat, _Embedded,
)  # fmt: skip
# Request id, text, tokens, log probabilities.
_Token = tuple[str, str, tuple[int, ...], tuple[TokenLogprob, ...] | None]
_Others = list[tuple[int, msgspec.Raw]]


class _Events(msgspec.Struct, array_like=True, frozen=True):
    """A frame: the tokens of a request come before its end."""

    tokens: list[_Token]
    others: _Others
    statistics: EngineStatistics | None


def _encoded(value: object) -> object:
    """Return a NumPy number, a subclass of `str` or a mapping proxy as a built-in type; reject other types."""
    match value:
        case MappingProxyType():
            return dict(value)
        case str():
            return str.__str__(value)
        case np.bool_():
            return bool(value)
        case SupportsIndex():
            return operator.index(value)
        case SupportsFloat():
            return float(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to the other process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)
_commands = msgspec.msgpack.Decoder(_Others)
_events = msgspec.msgpack.Decoder(_Events)
_QUESTIONS = get_args(Question)
_by_question = [msgspec.msgpack.Decoder(kind) for kind in _QUESTIONS]
_by_answer = [msgspec.msgpack.Decoder(kind) for kind in get_args(Answer)]
_ANSWERS = tuple(get_origin(kind) or kind for kind in get_args(Answer))
_by_command: list[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(kind) for kind in COMMANDS
]
_by_event: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in EVENTS]


# --- Commands --------------------------------------------------------------------------------
def is_bulky(request: GenerationRequest) -> bool:
    """True if the images, the audio and the KV state of a request take more than one packet."""
    n_bytes = 0 if request.state is None else len(request.state.data)
    return n_bytes + sum(len(each.data) for each in request.media) > MAX_PACKET


def encode_commands(commands: Iterable[ToChild]) -> Frame:
    """Return a frame with these commands."""
    attached = Attachments()
    values = [_numbered(COMMANDS, _command_as(command, attached)) for command in commands]
    return attached.frame(_encoder.encode(values))


def decode_commands(frame: Frame) -> list[ToChild]:
    """Return the commands of a frame, with a `NamedConstraint` in place of each constraint."""
    message, *attached = frame
    values = [_by_command[kind].decode(raw) for kind, raw in _commands.decode(message)]
    return [_command_of(value, Attachments(attached)) for value in values]


def _command_as(command: ToChild, attached: Attachments) -> object:
    if isinstance(command, Ask):
        return _Ask(command.call_id, _raw(_QUESTIONS, command.question))
    if not isinstance(command, AddRequest):
        return command
    request = command.request
    attaching = {
        "state": _crossing(request.state, attached),
        "media": tuple(replace(each, data=attached.add(each.data)) for each in request.media),
    }
    return _Request(**_values_of(request) | attaching)


def _crossing(state: SequenceState | None, attached: Attachments) -> SequenceState | None:
    """Return a KV state to be sent; None if it is larger than `MAX_STATE_BYTES`, so that it is computed again."""
    if state is None or len(state.data) > MAX_STATE_BYTES:
        return None
    return replace(state, data=attached.add(state.data))


def _arrived(state: SequenceState | None, attached: Attachments) -> SequenceState | None:
    return None if state is None else replace(state, data=attached.get(state.data))


def _command_of(value: Any, attached: Attachments) -> ToChild:
    if isinstance(value, _Ask):
        kind, raw = value.question
        return Ask(value.call_id, _by_question[kind].decode(raw))
    if not isinstance(value, _Request):
        return cast(ToChild, value)
    arrived = {
        "state": _arrived(value.state, attached),
        "media": tuple(replace(each, data=attached.get(each.data)) for each in value.media),
    }
    return AddRequest(GenerationRequest(**_values_of(value) | arrived))


def _values_of(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in _HINTS}


# --- Events ----------------------------------------------------------------------------------
def has_large_state(event: FromChild) -> bool:
    """True for the end of a request whose KV state takes more than one packet."""
    return (
        isinstance(event, Finished)
        and event.state is not None
        and len(event.state.data) > MAX_PACKET
    )


def encode_events(events: Iterable[FromChild], statistics: EngineStatistics | None = None) -> Frame:
    """Return a frame with these events."""
    tokens, others, attached = [], [], Attachments()
    for event in events:
        if isinstance(event, Progressed):
            delta = event.delta
            tokens.append((event.request_id, delta.text, delta.token_ids, delta.logprobs))
        else:
            others.append(_numbered(EVENTS, _event_as(event, attached)))
    return attached.frame(_encoder.encode((tokens, others, statistics)))


def decode_events(frame: Frame) -> tuple[list[FromChild], EngineStatistics | None]:
    """Return the events of a frame, tokens first, and its statistics if it has any."""
    message, *attached = frame
    values = _events.decode(message)
    told: list[FromChild] = [
        Progressed(request_id, TokenDelta(text, token_ids, logprobs=logprobs))
        for request_id, text, token_ids, logprobs in values.tokens
    ]
    told += [
        _event_of(_by_event[kind].decode(raw), Attachments(attached)) for kind, raw in values.others
    ]
    return told, values.statistics


def _event_as(event: FromChild, attached: Attachments) -> object:
    match event:
        case Finished(request_id, delta, completion, error, state):
            rest = replace(completion, prompt_token_ids=())
            told = None if error is None else error_as(error)
            return _Finished(request_id, delta, rest, told, _crossing(state, attached))
        case Embedded(request_id, vectors, n_values, error):
            told = None if error is None else error_as(error)
            return _Embedded(request_id, vectors, n_values, told)
        case Answered(call_id, answer, error):
            value = None if answer is None else _raw(_ANSWERS, answer)
            return _Answered(call_id, value, None if error is None else error_as(error))
        case Stopped(error):
            return _Stopped(None if error is None else error_as(error))
    return event


def _event_of(value: Any, attached: Attachments) -> FromChild:
    match value:
        case _Finished(request_id=request_id, delta=delta, completion=completion, error=error):
            failure = None if error is None else error_of(error)
            assert failure is None or isinstance(failure, GenerationError | EngineFailedError)
            if failure is not None:
                failure.completion = completion
            return Finished(request_id, delta, completion, failure, _arrived(value.state, attached))
        case _Embedded(request_id=request_id, vectors=vectors, n_values=n_values, error=error):
            failure = None if error is None else error_of(error)
            assert failure is None or isinstance(
                failure, EmbeddingError | DeadlineError | EngineFailedError
            )
            return Embedded(request_id, vectors, n_values, failure)
        case _Answered(call_id=call_id, value=value, error=error):
            failure = None if error is None else error_of(error)
            assert failure is None or isinstance(failure, CllmError)
            answer = None if value is None else _by_answer[value[0]].decode(value[1])
            return Answered(call_id, answer, failure)
        case _Stopped(error=error):
            return Stopped(None if error is None else error_of(error))
    return cast(FromChild, value)


def _raw(kinds: Sequence[type], value: object) -> tuple[int, msgspec.Raw]:
    return kinds.index(type(value)), msgspec.Raw(_encoder.encode(value))


def _numbered(kinds: Sequence[type], value: object) -> tuple[int, object]:
    return kinds.index(type(value)), value


# --- Errors ----------------------------------------------------------------------------------
def error_as(error: BaseException, n_causes: int = N_CAUSES_MAX) -> _Error:
    """Return an exception as values: the name of its type, its text and its plain attributes."""
    cause = error.__cause__
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, Plain)}
    return _Error(
        type(error).__name__,
        str(error),
        attributes,
        error_as(cause, n_causes - 1) if cause is not None and n_causes else None,
    )


def error_of(told: _Error) -> BaseException:
    """Return the exception of an `_Error`: of the same type if cllm or Python has it, else a `CllmError`."""
    kind = getattr(errors, told.name, None) or getattr(builtins, told.name, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        error: BaseException = CllmError(f"{told.name}: {told.text}")
    else:
        error = errors.as_told(kind, told.text, **told.attributes)
    if told.cause is not None:
        error.__cause__ = error_of(told.cause)
    return error
