"""ConstraintCompiler: what a request may be constrained by, checked and compiled off the event loop.

Event loop only.  Everything is tried in another process first.  A grammar stays a text until the
inference thread makes a sampler of it, for that is llama.cpp's own.
"""

from __future__ import annotations

from cllm.engine.constraint import CompiledConstraint, NamedConstraint, NotAvailableError
from cllm.engine.constraints.gbnf import check_gbnf
from cllm.engine.constraints.llguidance import Guidance
from cllm.engine.constraints.trial import ConstraintTrial
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.backend import CheckServing
from cllm.engine.thread.worker_thread import WorkerThread, WorkerThreads
from cllm.errors import InvalidRequestError


class ConstraintCompiler:
    """Compiles the constraints of requests, each text once.

    Parameters
    ----------
    check_serving : callable
        The vocabulary, or why requests are not served.
    workers : WorkerThreads
        One more is started when it is first wanted.
    n_threads : int
        That compute masks.
    names_only : bool
        Try constraints, and leave it to the process that samples to compile them.
    """

    def __init__(
        self,
        check_serving: CheckServing,
        workers: WorkerThreads,
        *,
        n_threads: int,
        names_only: bool = False,
    ) -> None:
        self._check_serving = check_serving
        self._workers = workers
        self._n_threads = n_threads
        self._names_only = names_only
        self._trials: dict[str, ConstraintTrial] = {}
        self._worker: WorkerThread | None = None
        self._guidance: Guidance | None = None

    async def aclose(self) -> None:
        """End what was begun."""
        for trial in self._trials.values():
            await trial.aclose()

    async def compile(
        self, params: SamplingParams, tool_grammar: str | None = None
    ) -> CompiledConstraint | None:
        """What llguidance has to do in these parameters, or in this grammar, ready to start.

        Raises
        ------
        InvalidRequestError
            A constraint that cannot be used, or would cost too much.
        """
        if tool_grammar is not None:
            return await self._compile("tools", tool_grammar)
        if params.grammar is not None:
            trial = self._trial("llama.cpp")
            if not trial.knows(params.grammar):
                check_gbnf(params.grammar, self._check_serving().n_tokens)
            await self._tried(trial, "grammar", params.grammar)
        for field, text in (("json_schema", params.json_schema), ("regex", params.regex)):
            if text is not None:
                assert isinstance(text, str)
                return await self._compile(field, text)
        return None

    def _trial(self, kind: str) -> ConstraintTrial:
        if kind not in self._trials:
            self._trials[kind] = ConstraintTrial(self._check_serving().path, self._workers, kind)
        return self._trials[kind]

    async def _compile(self, field: str, text: str) -> CompiledConstraint:
        vocabulary = self._check_serving()
        if self._names_only:
            await self._tried(self._trial("llguidance"), field, text)
            return NamedConstraint(field, text)
        if self._worker is None:
            self._worker = self._workers.start("cllm-compiler")

        def prepare() -> Guidance:
            if self._guidance is None:
                self._guidance = Guidance(vocabulary, self._n_threads)
            return self._guidance

        try:
            await self._worker.run(prepare)  # says what is missing before a process is started
            await self._tried(self._trial("llguidance"), field, text)
            return await self._worker.run(lambda: prepare().compile(field, text))
        except (NotAvailableError, RuntimeError) as error:  # or a panic in llguidance
            raise InvalidRequestError(field, text, f"left out: {error}") from error

    async def _tried(self, trial: ConstraintTrial, field: str, text: str) -> None:
        try:
            await trial.run(text, field)
        except NotAvailableError as error:
            raise InvalidRequestError(field, text, f"left out: {error}") from error
