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
    """Compiles the constraints of requests, and keeps the 16 that were used last.

    Parameters
    ----------
    check_serving : callable
        Returns the vocabulary; raises an error if requests are not served.
    workers : WorkerThreads
        Starts the thread that compiles, at the first use.
    n_threads : int
        Number of threads that compute masks.
    files : callable
        Returns the files that the engine has loaded; trials use the vocabulary of its model.
    names_only : bool
        True: only try constraints; the process that samples compiles them.
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
        """Return the compiled constraint of `tool_grammar` (Lark), else of `params`; None if there is none.

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
            # Raises without llguidance, before a process is started.
            guidance = await self._worker.run(prepare)
            # Built while the process of the trial starts: each takes a second with 150,000 tokens.
            self._worker.prepare(lambda: guidance.tokenizer)
            await self._try(field, text)
            return await self._worker.run(lambda: guidance.compile(field, text))
        except (NotAvailableError, RuntimeError) as error:  # or a panic in llguidance
            raise InvalidRequestError(
                field, text, f"a constraint that this installation can enforce: {error}"
            ) from error

    async def _try(self, field: str, text: str) -> None:
        if self._trial is None:
            path = str(Path(self._check_serving().path).absolute())
            content = next(file for file in self._files() if file.path == path)
            self._trial = ConstraintTrial(content, self._workers)
        try:
            await self._trial.run(field, text)
        except NotAvailableError as error:
            raise InvalidRequestError(
                field, text, f"a constraint that this installation can enforce: {error}"
            ) from error
