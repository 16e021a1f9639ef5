"""Exceptions of cllm, and what to do about each.

CllmError
├── LibraryError                        libllama cannot be used: fix the installation
│   ├── LibraryNotFoundError
│   └── AbiMismatchError                built from another llama.cpp than the declarations
├── ModelLoadError(path, reason)        fix the path or the file
│   └── ModelChangedError               a file has changed since the engine opened it: `Engine.reload`
├── DownloadError(name, reason)         fix the name, the network or the disk, and ask again
├── RpcServerError(address, reason)     start that server, free it, or take it out of `rpc`
├── ContextError                        these context parameters cannot work with this model
│   └── NotGenerativeError              an encoder: it computes embeddings, and no text
├── LlamaCallError(function, code)      a libllama call failed
│   ├── NoKVSlotError                   llama_decode → 1: smaller batch or fewer sequences
│   ├── InvalidBatchError               llama_decode → -1: a bug in cllm
│   └── DecodeFailedError               llama_decode → 2 or < -1: re-read the KV cache
├── InvalidArgumentError                also a ValueError; names the field, the value, the limit
│   └── PositionError(seq_id, X, Y)     positions of a sequence have a gap or step back
├── RequestError                        this request cannot be served; the engine is fine
│   ├── PromptTooLongError(n_prompt, n_ctx)
│   ├── InvalidRequestError             also a ValueError; names the field, the value, the limit
│   │   └── TooMuchTextError            more text than cllm accepts with any model
│   ├── QueueFullError(n_waiting, retry_after_s)
│   ├── GenerationError                 one request failed while running; its cause is attached
│   ├── EmbeddingError                  texts could not be embedded or ranked; its cause is attached
│   └── DeadlineError                   the time of the request has passed; also a TimeoutError
├── EncodeCancelledError                you cancelled the encoding of an image or a recording
├── StaleLogitsError                    a later decode has overwritten these logits
├── EngineFailedError                   the engine has stopped; __cause__ says why
├── ClosedError                         you closed it
├── InUseError                          close what depends on it first
├── WrongThreadError                    you called it from another thread or event loop
├── WrongProcessError                   you called it in a forked child
└── MissingExtraError                   also an ImportError; run the pip command that it names

Numbers in a message are attributes too.  A generation that is cancelled or passes its deadline ends with a
finish reason, not with an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from cllm.engine.output import Completion

E = TypeVar("E", bound=BaseException)
N_SHOWN = 80  # characters of a rejected value in a message

__all__ = (
    "AbiMismatchError",
    "CllmError",
    "ClosedError",
    "ContextError",
    "DeadlineError",
    "DecodeFailedError",
    "DownloadError",
    "EmbeddingError",
    "EncodeCancelledError",
    "EngineFailedError",
    "GenerationError",
    "InUseError",
    "InvalidArgumentError",
    "InvalidBatchError",
    "InvalidRequestError",
    "LibraryError",
    "LibraryNotFoundError",
    "LlamaCallError",
    "MissingExtraError",
    "ModelChangedError",
    "ModelLoadError",
    "NoKVSlotError",
    "NotGenerativeError",
    "PositionError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RpcServerError",
    "StaleLogitsError",
    "TooMuchTextError",
    "WrongProcessError",
    "WrongThreadError",
)


class CllmError(Exception):
    """Base of the exceptions that cllm defines.  All can be copied, also to another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructors of subclasses take other arguments than the message.
        reduced: tuple[Any, ...] = super().__reduce__()  # type: ignore[assignment]
        _, arguments, *state = reduced
        return _again, (type(self), arguments), *state


class LibraryError(CllmError):
    """libllama cannot be used as it is installed."""


class LibraryNotFoundError(LibraryError):
    """No libllama was found; the message lists the places that were searched."""


class AbiMismatchError(LibraryError):
    """libllama does not match the declarations in `cllm.bindings`: it was built from another llama.cpp."""


class ModelLoadError(CllmError):
    """The model file cannot be used.

    Attributes
    ----------
    path : str
    reason : str
        llama.cpp's own last error where it gave one.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot load {path!r}: {reason}")
        self.path = path
        self.reason = reason


class ModelChangedError(ModelLoadError):
    """A file of an engine has changed since the engine opened it.

    `Engine.reload` loads what it contains now.
    """


class DownloadError(CllmError):
    """A named model could not be downloaded.  A partial file is never used as a model.

    Attributes
    ----------
    name : str
    reason : str
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot download {name}: {reason}")
        self.name = name
        self.reason = reason


class RpcServerError(CllmError):
    """A server of `EngineConfig.rpc` cannot compute for this engine.

    Attributes
    ----------
    address : str
    reason : str
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"RPC server {address}: {reason}")
        self.address = address
        self.reason = reason


class ContextError(CllmError):
    """llama.cpp refused to create a context with these parameters for this model."""


class NotGenerativeError(ContextError):
    """The model cannot generate text: it is an encoder or a diffusion model."""


class LlamaCallError(CllmError):
    """A libllama call returned a failure.

    Attributes
    ----------
    function : str
        Name of the C function.
    code : int
        Value that it returned.
    """

    def __init__(self, function: str, code: int, meaning: str = "failed") -> None:
        super().__init__(f"{function} returned {code}: {meaning}")
        self.function = function
        self.code = code


class NoKVSlotError(LlamaCallError):
    """The KV cache has no room for the batch; nothing was stored."""


class InvalidBatchError(LlamaCallError):
    """llama.cpp rejected the batch; nothing was stored.  A bug in cllm."""


class DecodeFailedError(LlamaCallError):
    """The decode was aborted or failed; part of the batch may be stored."""


class EncodeCancelledError(CllmError):
    """An encode was cancelled by its caller."""


def _beginning(value: object, room: list[int], around: tuple[int, ...] = ()) -> object:
    """Return as much of a value as a message shows: the `repr` of a large one takes a second.

    `room` is the number of items that are left; -1 if a value is inside itself.  `around` has the ids of the
    containers around the value.
    """
    if type(value) in (str, bytes):
        return value[:N_SHOWN]  # type: ignore[index]
    if type(value) not in (list, tuple, dict):
        return value
    if id(value) in around:
        room[0] = -1
        return value
    around = (*around, id(value))
    pairs = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    kept = {}
    for key, item in pairs:
        if room[0] <= 0:
            break
        room[0] -= 1
        kept[_beginning(key, room)] = _beginning(item, room, around)
    if isinstance(value, dict):
        return kept
    return list(kept.values()) if isinstance(value, list) else tuple(kept.values())


def _shown(value: object) -> str:
    """Return the `repr` of a value, shortened."""
    try:
        room = [N_SHOWN]
        part = _beginning(value, room)
        shown = repr(part if room[0] >= 0 else value)
    except (RecursionError, ValueError):  # too deep, too many digits
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= N_SHOWN else shown[: N_SHOWN - 3] + "..."


class _FieldError(CllmError, ValueError):
    """A value out of its limits.  In a copy, containers and objects are replaced by their shortened `repr`.

    Attributes
    ----------
    field : str
    value : object
    limit : str
        What would have been accepted.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {_shown(value)}, must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments, attributes = super().__reduce__()
        # Other values may be impossible to copy, such as a lock, or contain one.
        if self.value is not None and type(self.value) not in (str, bytes, int, float, bool):
            attributes = {**attributes, "value": _shown(self.value)}
        return make, arguments, attributes


class InvalidArgumentError(_FieldError):
    """An argument or a setting has a value that cannot be used, such as one that would abort libllama."""


class PositionError(InvalidArgumentError):
    """Positions of a batch do not continue a sequence: they leave a gap or step back.

    Positions of a sequence are consecutive from 0.

    Attributes
    ----------
    seq_id : int
    last_pos : int
        X, the last position the KV cache (or the batch so far) has for the sequence; -1 if none.
    first_pos : int
        Y, the position at which the new tokens would start.
    """

    def __init__(self, seq_id: int, last_pos: int, first_pos: int) -> None:
        super().__init__(
            "p0",
            first_pos,
            f"{last_pos + 1}: sequence {seq_id} ends at X = {last_pos}, "
            f"the tokens start at Y = {first_pos}",
        )
        self.seq_id = seq_id
        self.last_pos = last_pos
        self.first_pos = first_pos


class RequestError(CllmError):
    """One request cannot be served; the engine and every other request are fine."""


class PromptTooLongError(RequestError):
    """The prompt does not fit the context of one sequence.

    `n_prompt` is the number of tokens of the prompt, `n_ctx` the largest number for a sequence.  Clients
    recognize an overflow by the wording of the message, and then shorten their history.
    """

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"prompt is too long: {n_prompt} tokens > {n_ctx} maximum; "
            f"this model's maximum context length is {n_ctx} tokens"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class InvalidRequestError(_FieldError, RequestError):
    """A field of the request has a value that cannot be served."""


class TooMuchTextError(InvalidRequestError):
    """A field of the request has more bytes of text than cllm accepts with any model."""


class QueueFullError(RequestError):
    """Too many requests, `n_waiting`, are waiting; try again after `retry_after_s` seconds, an estimate."""

    def __init__(self, n_waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"the queue is full: {n_waiting} requests are waiting, retry after {retry_after_s:.1f} s"
        )
        self.n_waiting = n_waiting
        self.retry_after_s = retry_after_s


class _FailedRequestError(RequestError):
    """A request failed while it was running; `__cause__` says why."""

    @classmethod
    def of(cls, request_id: str, cause: BaseException) -> Self:
        """Return the error of a request that failed because of `cause`, with `cause` as `__cause__`."""
        error = cls(f"request {request_id} failed: {cause}")
        error.__cause__ = cause
        return error


class GenerationError(_FailedRequestError):
    """A request failed while it was running; `__cause__` says why.

    Attributes
    ----------
    completion : Completion | None
        Output of the request until it failed; None if it is not known.
    """

    completion: Completion | None = None


class EmbeddingError(_FailedRequestError):
    """The texts of a request were not embedded or ranked; `__cause__` says why, None if it was cancelled."""


class DeadlineError(RequestError, TimeoutError):
    """Vectors, a ranking or a score were not computed, or a server sent no token, before the deadline."""


class StaleLogitsError(CllmError):
    """The logits belong to a decode that is no longer the last one, or that failed."""


class EngineFailedError(CllmError):
    """The engine has stopped after a failure and serves no request; `__cause__` says why, if it is known.

    Attributes
    ----------
    completion : Completion | None
        Output of the request until then, if the request that raises this error was running.
    """

    completion: Completion | None = None

    @classmethod
    def of(cls, cause: BaseException) -> Self:
        """Return the error that requests of an engine raise after `cause` has stopped it."""
        error = cls(f"the engine has failed: {cause!r}")
        error.__cause__ = cause
        return error


class ClosedError(CllmError):
    """The object is not open: it was closed, was not entered yet, or is draining."""


class InUseError(CllmError):
    """The object cannot be closed while others depend on it."""


class WrongThreadError(CllmError):
    """The object belongs to another thread or another event loop."""


class WrongProcessError(CllmError):
    """The object was made before a fork, and is used in the child process; libllama cannot be used there."""


class MissingExtraError(CllmError, ImportError):
    """A library is not installed that belongs to an extra of cllm."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a failed import in the block into a `MissingExtraError` that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in ("", "cllm"):
            raise
        text = f"{library} is not installed: pip install 'cllm[{name}]'"
        raise MissingExtraError(text, name=error.name) from None


def as_told(kind: type[E], text: str, **attributes: object) -> E:
    """Return an error of another process or server from its text; constructors take other arguments."""
    error = _again(kind, (text,))
    vars(error).update(attributes)
    return error


def _again(kind: type[E], arguments: tuple[Any, ...]) -> E:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    return error
