"""ConstraintCompiler: what a request may be constrained by, checked and compiled off the event loop.

Event loop only.  A grammar is a text until the inference thread makes a sampler of it, for that is
llama.cpp's own: here it is looked through, and tried in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from cllm.bindings import Vocabulary
from cllm.engine.constraint import CompiledConstraint
from cllm.engine.gbnf import check_gbnf
from cllm.engine.grammar_trial import GrammarTrial
from cllm.engine.guidance import Guidance
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.worker_thread import WorkerThread
from cllm.errors import InvalidRequestError, RequestError


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
        self._trial: GrammarTrial | None = None
        self._worker: WorkerThread | None = None
        self._guidance: Guidance | None = None

    async def aclose(self) -> None:
        """End what was begun."""
        if self._trial is not None:
            await self._trial.aclose()
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
            await self._try(params.grammar)
        for field, text in (("json_schema", params.json_schema), ("regex", params.regex)):
            if text is not None:
                assert isinstance(text, str)
                return await self._compile(field, text)
        return None

    async def _try(self, grammar: str) -> None:
        vocabulary = self._check_serving()
        check_gbnf(grammar, vocabulary.n_tokens)
        if self._trial is None:
            self._trial = GrammarTrial(vocabulary.path)
        await self._trial.run(grammar)

    async def _compile(self, field: str, text: str) -> CompiledConstraint:
        vocabulary = self._check_serving()
        if self._worker is None:
            self._worker = WorkerThread("cllm-compiler")

        def call() -> CompiledConstraint:
            if self._guidance is None:
                self._guidance = Guidance(vocabulary, self._n_threads)
            return self._guidance.compile(field, text)

        try:
            return await self._worker.run(call)
        except RequestError:
            raise
        except Exception as error:  # llguidance is not installed, or has a bug
            raise InvalidRequestError(field, text, f"left out: {error}") from error
