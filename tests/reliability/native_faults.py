"""Faults of libllama and libmtmd: the k-th call of any of its functions has a wrong outcome.

`NativeFaults` wraps every function of the loaded library, those that release the GIL and those that
keep it, and counts their calls.  Once armed with a `Fault`, the k-th call of its function has the
outcome that it names, and every other call is the real one.  `Met.owner` is the request that the call
was made for, found from the arguments and from the stack of the calling thread.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from cllm.bindings import _llama_h as h
from cllm.bindings._functions import Functions
from cllm.bindings._library import library
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence
from cllm.engine.request import GenerationRequest
from cllm.errors import InvalidArgumentError

INJECTED = "injected"
# Functions that make objects which have to be freed, and the functions that free them.
MAKES = (
    "llama_model_load_from_file", "llama_init_from_model", "llama_sampler_chain_init",
    "llama_sampler_init_dry",
)  # fmt: skip
FREES = ("llama_model_free", "llama_free", "llama_sampler_free")
SAMPLER = h.DECLARATIONS.prototypes["llama_sampler_chain_init"].restype


@dataclass
class Call:
    """One call that is about to be made."""

    number: int
    real: Callable[..., Any]
    arguments: tuple[Any, ...]
    row: int = 0

    def make(self) -> Any:
        """Make the real call."""
        return self.real(*self.arguments)


@dataclass(frozen=True)
class Outcome:
    """A wrong behavior of a call.

    Attributes
    ----------
    cause : type
        Type of the error with which the request of the call ends, if it ends.
    """

    words: str
    act: Callable[[Call], Any]
    cause: type[Exception] = Exception

    def __str__(self) -> str:
        return self.words


def returns(value: Any, words: str = "", *, after: bool = False) -> Outcome:
    """Return the outcome that a call returns `value`, without the real call or after it."""

    def act(call: Call) -> Any:
        if after:
            call.make()
        return value

    shown = words or ("NULL" if value is None else str(value))
    # NULL in place of a sampler is found by the bindings.
    return Outcome(shown + (", after the call" if after else ""), act, InvalidArgumentError)


def raises(error: type[Exception], *, after: bool = False) -> Outcome:
    """Return the outcome that a call raises an error, without the real call or after it."""

    def act(call: Call) -> Any:
        if after:
            call.make()
        raise error(INJECTED)

    return Outcome(error.__name__ + (", after the call" if after else ""), act, error)


def changes(words: str, change: Callable[[int], int]) -> Outcome:
    """Return the outcome that a call is made and `change` is applied to its result."""
    return Outcome(words, lambda call: change(call.make()))


def overwrites_row(value: float, n_vocab: int, cause: type[Exception]) -> Outcome:
    """Return the outcome that all logits of one row are `value`."""

    def act(call: Call) -> Any:
        pointer = call.make()
        np.ctypeslib.as_array(pointer, shape=(call.row + 1, n_vocab))[call.row] = value
        return pointer

    return Outcome(f"a row of {value}", act, cause)


def selects_nothing() -> Outcome:
    """Return the outcome that a sampler is applied and selects no candidate."""

    def act(call: Call) -> None:
        call.make()
        call.arguments[1].selected = -1

    return Outcome("selects nothing", act, InvalidArgumentError)


@dataclass(frozen=True)
class Fault:
    """The k-th call of a function has this outcome."""

    function: str
    k: int
    outcome: Outcome


@dataclass(frozen=True)
class Met:
    """A fault that has happened.

    Attributes
    ----------
    owner : str or None
        Request that the call was made for; None if it was made for several or none.
    is_input : bool
        True if the request had not been submitted yet.
    """

    fault: Fault
    owner: str | None
    is_input: bool


class NativeFaults:
    """Every function of a library, watched while this is entered.

    Parameters
    ----------
    functions : Functions, optional
        By default those of libllama.

    Attributes
    ----------
    n_calls : Counter
        Calls by function since `arm`.
    met : list of Met
        Faults that have happened since `arm`.
    n_open : Counter
        Models, contexts and sampler chains that are not freed, by the function that made them.
    opening : str or None
        Request that the event loop is submitting; the bench sets it.
    """

    def __init__(self, functions: Functions | None = None) -> None:
        self._functions = functions or library()
        self.n_calls: Counter[str] = Counter()
        self.met: list[Met] = []
        self.opening: str | None = None
        self.n_open: Counter[str] = Counter()
        self._makers: dict[int, str] = {}
        self._faults: dict[tuple[str, int], Fault] = {}
        self._actions: dict[tuple[str, int], Callable[[], None]] = {}
        # Requests that samplers were made for, by address of the sampler.
        self._samplers: dict[int, str | None] = {}
        self._real: dict[str, Any] = {}

    def __enter__(self) -> Self:
        functions = vars(self._functions)
        self._real = {name: functions[name] for name in self._functions.declared.prototypes}
        for name, real in self._real.items():
            setattr(self._functions, name, _Watched(self, name, real))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Open handles keep their watched functions; after `disarm` these call the real ones.
        self.disarm()
        for name, real in self._real.items():
            setattr(self._functions, name, real)

    def arm(self, *faults: Fault) -> None:
        """Reset the counts, and arm these faults."""
        self.disarm()
        self._faults = {(fault.function, fault.k): fault for fault in faults}

    def disarm(self) -> None:
        """Remove all faults and actions, and reset the counts; calls are still watched."""
        self._faults, self._actions = {}, {}
        self.n_calls.clear()
        self.met = []

    def at(self, function: str, k: int, action: Callable[[], None]) -> None:
        """Do this just before the k-th call, in its thread; until `arm` or `disarm`."""
        self._actions[function, k] = action

    # --- Called by what is watched -------------------------------------------------------------
    def call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Make a call, or return the outcome of its fault."""
        self.n_calls[name] = k = self.n_calls[name] + 1
        if action := self._actions.pop((name, k), None):
            action()
        fault = self._faults.pop((name, k), None)
        if fault is None:
            result = self._make(name, real, arguments)
        else:
            call = Call(k, lambda *given: self._make(name, real, given), arguments)
            self.met.append(self._meet(fault, call))
            result = fault.outcome.act(call)
        if name.startswith("llama_sampler_") and isinstance(result, SAMPLER) and result:
            self._samplers[_address(result)] = self.opening or _served()
        return result

    def _make(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Make the real call, and count objects that it makes or frees."""
        if name in FREES:
            self.n_open[self._makers.pop(_address(arguments[0]))] -= 1
        result = real(*arguments)
        if name in MAKES and result:
            self._makers[_address(result)] = name
            self.n_open[name] += 1
        return result

    def _meet(self, fault: Fault, call: Call) -> Met:
        first = call.arguments[0] if call.arguments else None
        owner = self.opening or _served()
        if fault.function == "llama_get_logits":
            rows = _rows_that_count()
            call.row, owner = rows[call.number % len(rows)]
        elif isinstance(first, SAMPLER):
            owner = self._samplers[_address(first)]
        return Met(fault, owner, self.opening is not None)


class _Watched:
    """A watched function with the attributes of the real one."""

    def __init__(self, faults: NativeFaults, name: str, real: Any) -> None:
        self._faults, self._name, self._real = faults, name, real
        self.__name__ = name

    def __call__(self, *arguments: Any) -> Any:
        return self._faults.call(self._name, self._real, arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # `restype`, `argtypes`


def _address(pointer: Any) -> int:
    return ctypes.addressof(pointer.contents)


def _locals(name: str) -> Iterator[Any]:
    """Yield the local variables of this name of all callers, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        if name in frame.f_code.co_varnames and name in (known := frame.f_locals):
            yield known[name]
        frame = frame.f_back  # type: ignore[assignment]


def _served() -> str | None:
    """The request that the inference thread is working for."""
    for name, kind in (("sequence", Sequence), ("request", GenerationRequest)):
        for value in _locals(name):
            if isinstance(value, kind):
                return str(value.request_id)
    return None


def _rows_that_count() -> list[tuple[int, str]]:
    """Return the output rows of the last batch, without those of drafts, each with its request id."""
    chunks: list[Chunk] = next(_locals("chunks"))
    rows, n_before = [], 0
    for chunk in chunks:
        n_own = chunk.n_outputs - len(chunk.drafts)
        rows += [(n_before + n, chunk.sequence.request_id) for n in range(n_own)]
        n_before += chunk.n_outputs
    return rows
