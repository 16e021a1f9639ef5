"""ConstraintCompiler: compiles the constraints of requests off the event loop.

Event loop only.  Another process tries each constraint first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cllm.engine.constraint import CompiledConstraint, NamedConstraint, NotAvailableError
from cllm.engine.constraints.llguidance import Guidance
from cllm.engine.constraints.trial import ConstraintTrial
from cllm.engine.file_content import FileContent
from cllm.engine.sampling_params import CONSTRAINTS, SamplingParams
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
    files : callable
        What the engine has loaded: another model has another vocabulary.
    names_only : bool
        Try constraints, and leave it to the process that samples to compile them.
    """

    def __init__(
        self,
        check_serving: CheckServing,
        workers: WorkerThreads,
        *,
        n_threads: int,
        files: Callable[[], Sequence[FileContent]],
        names_only: bool = False,
    ) -> None:
        self._check_serving = check_serving
        self._workers = workers
        self._n_threads = n_threads
        self._files = files
        self._names_only = names_only
        self._trial: ConstraintTrial | None = None
        self._worker: WorkerThread | None = None
        self._guidance: Guidance | None = None

    async def aclose(self) -> None:
        """End the process that tries constraints."""
        if self._trial is not None:
            await self._trial.aclose()

    async def compile(
        self, params: SamplingParams, tool_grammar: str | None = None
    ) -> CompiledConstraint | None:
        """Return the constraint in these parameters, or of this grammar of calls, ready to start.

        Raises
        ------
        InvalidRequestError
            A constraint that cannot be used, or would cost too much.
        """
        if tool_grammar is not None:
            return await self._compile("tools", tool_grammar)
        for field in CONSTRAINTS:
            if (text := getattr(params, field)) is not None:
                return await self._compile(field, text)
        return None

    async def _compile(self, field: str, text: str) -> CompiledConstraint:
        vocabulary = self._check_serving()
        if self._names_only:
            await self._try(field, text)
            return NamedConstraint(field, text)
        if self._worker is None:
            self._worker = self._workers.start("cllm-compiler")

        def prepare() -> Guidance:
            if self._guidance is None:
                self._guidance = Guidance(vocabulary, self._n_threads)
            return self._guidance

        try:
            await self._worker.run(prepare)  # says what is missing before a process is started
            await self._try(field, text)
            return await self._worker.run(lambda: prepare().compile(field, text))
        except (NotAvailableError, RuntimeError) as error:  # or a panic in llguidance
            raise InvalidRequestError(field, text, f"left out: {error}") from error

    async def _try(self, field: str, text: str) -> None:
        if self._trial is None:
            path = str(Path(self._check_serving().path).absolute())
            content = next(file for file in self._files() if file.path == path)
            self._trial = ConstraintTrial(content, self._workers)
        try:
            await self._trial.run(field, text)
        except NotAvailableError as error:
            raise InvalidRequestError(field, text, f"left out: {error}") from error
