"""The workload of the fault matrix: ten requests with known answers on an engine with room for three.

`Bench` serves them with a fault and checks the answers and the state of the engine afterwards.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio
import pytest

from cllm import Completion, Engine, FinishReason, TokenStream
from cllm.bindings import DrySampler
from cllm.engine.core import saved_states
from cllm.engine.core.commands import CancelRequest, Command
from cllm.engine.core.row_cost import RowCost
from cllm.engine.llama.sampler import DrySamplers
from cllm.engine.thread import inference_thread
from cllm.errors import CllmError, EngineFailedError, GenerationError
from tests.conftest import QUIET, our_threads, put_at_once
from tests.reliability.answers import unlike, unlike_beginning
from tests.reliability.native_faults import Fault, Met, NativeFaults, raises
from tests.simulation.oracle_drafter import OracleDrafter, OracleEngine, known_answers

N_VOCAB = 260
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 3, "prefix_cache_bytes": 1 << 20, **QUIET}
HEAD = "The river runs down to the sea, and an old man watches it: "
NUMBERS = r"root ::= [0-9] [0-9] [0-9] [0-9] [0-9] [0-9]"
EVERY_SAMPLER: dict[str, Any] = {
    "temperature": 0.9, "dynatemp_range": 0.2, "top_n_sigma": 3.0, "typical_p": 0.9,
    "xtc_probability": 0.3, "seed": 12, "ignore_eos": True,
}  # fmt: skip
PENALTIES: dict[str, Any] = {
    "temperature": 0.5, "seed": 6, "repeat_penalty": 1.1, "dry_multiplier": 0.5,
    "logit_bias": {65: -1.0}, "ignore_eos": True,
}  # fmt: skip
# Other requests in a batch change a logit by up to 0.01; seeds and prompts are chosen so that this changes no token.
# `ignore_eos` and `max_tokens` fix the lengths of most outputs, whatever the weights say.
# The requests are submitted together, in this order.  The cells are too few for all of the first three.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (HEAD + "No", {"temperature": 0.0, "ignore_eos": True, "max_tokens": 26}),
    "seeded": (
        "note:In a small town in the north there was a house by the sea.\ncount:11..40",
        {**EVERY_SAMPLER, "max_tokens": 26},
    ),
    "penalized": ("Two and two make four, and the cat sat. " * 2, {**PENALTIES, "max_tokens": 20}),
    "numbers": ("Count: ", {"grammar": NUMBERS, "temperature": 0.0}),
    "more numbers": ("Again: ", {"grammar": NUMBERS, "temperature": 1.0, "seed": 3}),
    "scored": ("Anna has ", {
        "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True, "max_tokens": 8,
    }),
    "cancelled": (HEAD + "He", {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}),
    "mirostat": (HEAD + "She", {"mirostat": 1, "seed": 4, "ignore_eos": True, "max_tokens": 8}),
    "mirostat 2": (HEAD + "They", {"mirostat": 2, "seed": 5, "ignore_eos": True, "max_tokens": 8}),
}  # fmt: skip
CONSTRAINED = ("numbers", "more numbers")
CHAT = [{"role": "user", "content": "What is two plus three?"}]
NAMES = (*REQUESTS, "chat")
CANCELLED, CANCELLED_AT = "cancelled", 48  # decodes
PROBE: tuple[str, dict[str, Any]] = ("Hello", {"temperature": 0.0, "max_tokens": 2})

# Functions that are called only once, for the template of the first chat.
ABOUT_CHATS = ("llama_vocab_get_attr", "llama_vocab_get_text")
# Functions whose faults an audit reports: they return wrong positions, or copy nothing without an error.
TOLD_BY_AUDITS = ("llama_memory_seq_pos_min", "llama_memory_seq_pos_max", "llama_memory_seq_cp")
HANG_S = 20.0  # a run takes less than a tenth of a second

Answer = Completion | Exception
Ids = tuple[int, ...]


@dataclass
class Run:
    """Answers, faults and errors of one run of the workload."""

    answers: dict[str, Answer] = field(default_factory=dict)
    met: list[Met] = field(default_factory=list)
    n_calls: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    has_failed: bool = False

    @property
    def refused(self) -> set[str]:
        """Requests that were not submitted."""
        return {n for n, a in self.answers.items() if not is_answered(a)}

    @property
    def failed(self) -> set[str]:
        """Requests that ended with an error after they had been submitted."""
        failures = {n for n, a in self.answers.items() if isinstance(a, Exception)}
        return failures - self.refused

    @property
    def whole(self) -> set[str]:
        """Requests that were answered to their ends."""
        by_themselves = (FinishReason.STOP, FinishReason.LENGTH)
        completions = {n: a for n, a in self.answers.items() if isinstance(a, Completion)}
        return {n for n, c in completions.items() if c.finish_reason in by_themselves}


def is_answered(answer: Answer) -> bool:
    """Return True if an answer is that of a request that was submitted."""
    return isinstance(answer, Completion | GenerationError | EngineFailedError)


class Bench:
    """An engine whose native calls can fail; if the engine fails, a new one replaces it.

    Attributes
    ----------
    share : float, optional
        Draft tokens whenever there is room, of which this share is right; None: no drafts.
    alone : dict
        Answer of each request alone, without faults.
    n_engines : int
    serving : Counter
        Native objects that an idle engine keeps open, by the function that makes them.
    """

    serving = Counter(
        {"llama_model_load_from_file": 1, "llama_init_from_model": 1, "llama_sampler_init_dry": 1}
    )

    def __init__(self, share: float | None = None) -> None:
        self.share = share
        self.faults = NativeFaults()
        self.alone: dict[str, Completion] = {}
        self.n_engines = 0
        self._counts: dict[tuple[bool, tuple[Fault, ...]], dict[str, int]] = {}
        self._leaked: Counter[str] = Counter()
        self._unraisable: list[str] = []
        self._stack = ExitStack()

    async def __aenter__(self) -> Self:
        self._n_tasks = len(anyio.get_running_tasks())
        self._stack.enter_context(self.faults)
        self._stack.enter_context(always_the_same())
        self._stack.enter_context(warned_of(self._unraisable))
        await self._open()
        for name in NAMES:
            async with self._stream(name) as stream:
                self.alone[name] = await stream.completion()
            await self.engine.reset_prefix_cache()
        if self.share is not None:
            assert not await self._close()
            await self._open()
        self._probe = await self._ask()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if wrong := await self._close():
                raise AssertionError(wrong)
        finally:
            self._stack.close()

    async def _open(self) -> None:
        self.engine = await self._make_engine().__aenter__()
        await self.engine.audit()  # the engine's own first audit comes before this one
        self.n_engines += 1

    def _make_engine(self) -> Engine:
        if self.share is None or not self.alone:
            return Engine(**OPTIONS)
        drafter = OracleDrafter(known_answers(self.alone.values()), self.share)
        return OracleEngine(drafter=drafter, **OPTIONS)

    async def _close(self) -> list[str]:
        """Close the engine; return descriptions of the threads, tasks and objects that are left."""
        await self.engine.aclose()
        wrong = [f"{name} is left" for name in our_threads()]
        await anyio.lowlevel.checkpoint()
        if len(anyio.get_running_tasks()) > self._n_tasks:
            wrong.append("a task is left")
        return wrong + self._not_freed(Counter())

    def _not_freed(self, expected: Counter[str]) -> list[str]:
        """Return descriptions of objects that should have been freed, each only once."""
        left = self._n_open() - expected - self._leaked
        self._leaked += left
        return [f"what {name} made is not freed" for name in left]

    def _stream(self, name: str) -> TokenStream:
        if name == "chat":
            return self.engine.stream_chat(CHAT, request_id=name, temperature=0.0, max_tokens=6)
        prompt, options = REQUESTS[name]
        return self.engine.stream(prompt, request_id=name, **options)

    async def _ask(self) -> Ids:
        prompt, options = PROBE
        completion = await self.engine.generate(prompt, **options)
        await self.engine.reset_prefix_cache()
        return completion.token_ids

    # --- One run -------------------------------------------------------------------------------
    async def run(self, *faults: Fault) -> Run:
        """Serve the workload with these faults, and check what is left afterwards."""
        run = Run()
        self._forget(faults)
        self._arm(faults)
        with anyio.move_on_after(HANG_S) as scope:
            await self._serve(run)
            found = await self._audit()
            if not any(fault.function in TOLD_BY_AUDITS for fault in faults):
                run.wrong += found
        self._take(run)
        if scope.cancelled_caught:
            run.wrong.append("it hangs")
        with suppress(EngineFailedError):
            run.wrong += await self._look()
        run.has_failed = self.engine.health().status == "failed"
        if run.has_failed or scope.cancelled_caught:
            run.wrong += await self._close()
            await self._open()
        return run

    async def _serve(self, run: Run) -> None:
        streams: dict[str, TokenStream] = {}
        with self._held_back():
            for name in NAMES:
                stream, self.faults.opening = self._stream(name), name
                try:
                    streams[name] = await stream.__aenter__()
                except Exception as error:
                    run.answers[name] = error
                finally:
                    self.faults.opening = None
        for name, stream in streams.items():
            try:
                run.answers[name] = await stream.completion()
            except CllmError as error:
                run.answers[name] = error

    def _arm(self, faults: tuple[Fault, ...]) -> None:
        """Arm the faults for the next run, and the cancellation of one request."""
        self.faults.arm(*faults)
        cancel = CancelRequest(CANCELLED)
        inbox = self.engine._parts.inbox
        self.faults.at("llama_decode", CANCELLED_AT, lambda: inbox.put(cancel))

    def _take(self, run: Run) -> None:
        """Move the met faults and call counts into `run`, and disarm the faults."""
        run.met, run.n_calls = self.faults.met, dict(self.faults.n_calls)
        self.faults.disarm()
        run.wrong += self._unraisable
        self._unraisable.clear()

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        """Hold back all commands inside the `with`, and submit them together at its end."""
        held: list[Command] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine._parts.inbox, "put", held.append)
            yield
        self._submit(held)

    def _submit(self, held: list[Command]) -> None:
        put_at_once(self.engine._parts.inbox, held)

    def _n_open(self) -> Counter[str]:
        """Return the numbers of native objects that are not freed, by the function that made them."""
        return self.faults.n_open

    async def _audit(self) -> list[str]:
        """Run an audit while faults are armed; return its findings, none if the engine fails."""
        with suppress(EngineFailedError):
            return await self.engine.audit()
        return []

    async def _look(self) -> list[str]:
        """Return the faults of an engine that should be idle."""
        engine = self.engine
        wrong = [f"before: {w}" for w in _of_use(engine)]
        await engine.reset_prefix_cache()  # answered only after a recovery
        wrong += await engine.audit() + _of_use(engine)
        wrong += self._not_freed(self.serving)
        if engine.statistics().n_seq_ids_cached or engine.statistics().n_kv_cells_cached:
            wrong.append("something is left in the prefix cache")
        if await self._ask() != self._probe:
            wrong.append("the next request is answered otherwise")
        return wrong

    def _forget(self, faults: tuple[Fault, ...]) -> None:
        """Empty the caches of the engine, so that it calls llama.cpp again."""
        forget_words(self.engine._check_serving())
        if any(fault.function in ABOUT_CHATS for fault in faults):
            if (chat := self.engine._parts.input_processor.texts._chat) is not None:
                chat.close()
            self.engine._parts.input_processor.texts._chats = None

    async def count_calls(self, function: str, *faults: Fault) -> int:
        """Return the number of calls of a function in a run with only these faults."""
        key = (function in ABOUT_CHATS, faults)
        if key not in self._counts:
            watch = Fault(function, 0, raises(RuntimeError))  # there is no such call
            run = await self.run(watch, *faults)
            assert not run.wrong, run.wrong
            self._counts[key] = run.n_calls
        return self._counts[key].get(function, 0)

    # --- What is to be so ----------------------------------------------------------------------
    def check(self, run: Run, affected: set[str] | None, free: str | None = None) -> None:
        """Add to `run.wrong` each request whose answer or error is not the expected one.

        Parameters
        ----------
        affected : set of str, optional
            Requests that must end with an error; None: the engine fails, and requests without an answer end.
        free : str, optional
            A request that may have any answer.
        """
        for name in NAMES:
            answer = run.answers.get(name)
            if answer is None:
                run.wrong.append(f"{name}: no answer")
            elif name == free:
                continue
            elif affected is None:
                run.wrong += self._told(name, answer)
            elif name in affected:
                cause = run.met[0].fault.outcome.cause
                run.wrong += self._ended(name, answer, cause, is_input=run.met[0].is_input)
            else:
                run.wrong += self._exact(name, answer)
        if run.has_failed != (affected is None):
            run.wrong.append("the engine has" + " not" * (affected is None) + " failed")

    def _exact(self, name: str, answer: Answer) -> list[str]:
        if isinstance(answer, Exception):
            return [f"{name}: {answer!r} ({answer.__cause__!r})"]
        is_cut = answer.finish_reason is FinishReason.CANCELLED and name == CANCELLED
        compare = unlike_beginning if is_cut else unlike
        return [f"{name}: {found}"] if (found := compare(answer, self.alone[name])) else []

    def _ended(
        self, name: str, answer: Answer, cause: type[Exception], *, is_input: bool
    ) -> list[str]:
        errors = [answer, getattr(answer, "__cause__", None)]
        if not any(self._is_because(error, cause) for error in errors):
            return [f"{name}: {answer!r}, not for {cause.__name__}"]
        if is_input:
            return []
        if not isinstance(answer, GenerationError) or answer.completion is None:
            return [f"{name}: {answer!r}, not a GenerationError"]
        return self._begun(name, answer.completion)

    def _is_because(self, error: object, cause: type[Exception]) -> bool:
        return isinstance(error, cause)

    def _told(self, name: str, answer: Answer) -> list[str]:
        if isinstance(answer, EngineFailedError):
            return self._begun(name, answer.completion) if answer.completion else []
        return self._exact(name, answer)

    def _begun(self, name: str, completion: Completion) -> list[str]:
        found = unlike_beginning(completion, self.alone[name])
        return [f"{name}: {found}"] if found else []


def forget_words(vocabulary: Any) -> None:
    """Empty the caches of a vocabulary, so that it calls llama.cpp again."""
    vocabulary._pieces.clear()
    vocabulary._is_eog.clear()
    vocabulary.__dict__.pop("prefixes_space", None)


@contextmanager
def always_the_same() -> Iterator[None]:
    """Let every run make the same calls: disable automatic audits, and use fixed times for decisions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference_thread, "AUDIT_EVERY_TICK", False)
        patch.setattr(inference_thread, "IDLE_AUDIT_S", float("inf"))
        patch.setattr(saved_states.SavedStates, "is_worth", lambda *_: True)
        patch.setattr(DrySamplers, "get", _made_again)
        for name in ("seconds", "measured"):  # fixed costs, whatever else this machine computes
            patch.setattr(RowCost, name, lambda _self, n_rows: 1.0 + 0.001 * n_rows)
        yield


_kept = DrySamplers.get


def _made_again(samplers: DrySamplers, values: Any) -> DrySampler:
    with suppress(Exception):
        samplers.close()
    return _kept(samplers, values)


@contextmanager
def warned_of(found: list[str]) -> Iterator[None]:
    """Add unraisable exceptions to `found`, with a `ResourceWarning` for each object that was not closed."""

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        found.append(f"unraisable exception: {unraisable.exc_value!r}")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        patch.setattr(sys, "unraisablehook", note)
        yield


def _of_use(engine: Engine) -> list[str]:
    counts = engine.statistics()
    names = ("n_running", "n_waiting", "n_paused", "n_seq_ids_used", "n_kv_cells_used")
    return [f"{name} is {value}" for name in names if (value := getattr(counts, name))]
