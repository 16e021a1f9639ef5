"""ConstraintCompiler: what a request may be constrained by, checked and compiled off the event loop.

Event loop only.  Everything is tried in another process first.  A grammar stays a text until the
inference thread makes a sampler of it, for that is llama.cpp's own.
"""

from __future__ import annotations

from collections.abc import Callable

from cllm.bindings import Vocabulary
from cllm.engine.constraint import CompiledConstraint
from cllm.engine.constraint_trial import ConstraintTrial
from cllm.engine.gbnf import check_gbnf
from cllm.engine.guidance import Guidance
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.worker_thread import WorkerThread
from cllm.errors import ClosedError, InvalidRequestError, RequestError


class ConstraintCompiler:
    """Compiles the constraints of requests, each text once.

    Parameters
    ----------
    check_serving : callable
        The vocabulary, or why requests are not served.
    n_threads : int
        That compute masks.
    """

    def __init__(self, check_serving: Callable[[], Vocabulary], *, n_threads: int) -> None:
        self._check_serving = check_serving
        self._n_threads = n_threads
        self._trials: dict[str, ConstraintTrial] = {}
        self._worker: WorkerThread | None = None
        self._guidance: Guidance | None = None

    async def aclose(self) -> None:
        """End what was begun."""
        for trial in self._trials.values():
            await trial.aclose()
        if self._worker is not None:
            await self._worker.aclose()

    async def compile(self, params: SamplingParams) -> CompiledConstraint | None:
        """What llguidance has to do in these parameters, ready to start.

        Raises
        ------
        InvalidRequestError
            A constraint that cannot be used, or would cost too much.
        """
        if params.grammar is not None:
            check_gbnf(params.grammar, self._check_serving().n_tokens)
            await self._trial("llama.cpp").run(params.grammar)
        for field, text in (("json_schema", params.json_schema), ("regex", params.regex)):
            if text is not None:
                assert isinstance(text, str)
                return await self._compile(field, text)
        return None

    def _trial(self, kind: str) -> ConstraintTrial:
        if kind not in self._trials:
            self._trials[kind] = ConstraintTrial(self._check_serving().path, kind)
        return self._trials[kind]

    async def _compile(self, field: str, text: str) -> CompiledConstraint:
        vocabulary = self._check_serving()
        if self._worker is None:
            self._worker = WorkerThread("cllm-compiler")

        def prepare() -> Guidance:
            if self._guidance is None:
                self._guidance = Guidance(vocabulary, self._n_threads)
            return self._guidance

        try:
            await self._worker.run(prepare)  # says what is missing before a process is started
            await self._trial("llguidance").run(text, field)
            return await self._worker.run(lambda: prepare().compile(field, text))
        except (ClosedError, RequestError):
            raise
        except Exception as error:  # llguidance is not installed, or has a bug
            raise InvalidRequestError(field, text, f"left out: {error}") from error
