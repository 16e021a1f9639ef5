"""A source of drafts that knows the answers, and is right with a given probability."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from cllm import Completion, Engine
from cllm.engine.config import EngineConfig
from cllm.engine.core.run_queue import MakeSampler
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import Drafter, Drafts
from cllm.engine.thread.backend import Backend, Loaded

# Returns the next token of a sequence after these tokens; None at its end, or if it is not known.
NextToken = Callable[[Sequence, list[int]], int | None]


class OracleDrafter:
    """A `Drafter` whose drafts are right with a given probability.

    Parameters
    ----------
    next_token : callable
        Returns the right token.
    share : float
        Share of right draft tokens, 0 to 1.  The same tokens are right in every run.
    is_honest : bool
        True: `expect` computes probabilities from `share`.  False: it returns 1 for each token.
    """

    step_s = 0.0

    def __init__(self, next_token: NextToken, share: float, *, is_honest: bool = False) -> None:
        self._next_token = next_token
        self._share = share
        self._expected = share if is_honest else 1.0

    def expect(self, sequence: Sequence, n_max: int) -> list[float]:
        """See `Drafter`."""
        return [self._expected ** (n + 1) for n in range(n_max)]

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        """See `Drafter`."""
        return [self._drafts(sequence, n) for sequence, n in wanted]

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Ignore what was accepted."""

    def _drafts(self, sequence: Sequence, n: int) -> Drafts:
        tokens = list(sequence.tokens)
        for _ in range(n):
            token = self._next_token(sequence, tokens)
            if token is None:
                break
            if zlib.crc32(array("i", [*tokens, 0])) % 1000 >= 1000 * self._share:
                token = token - 1 if token else 1
            tokens.append(token)
        return tuple(tokens[len(sequence.tokens) :])


class OracleEngine(Engine):
    """An engine with a model, and with a given drafter and sampler.

    Parameters
    ----------
    *arguments, **options
        Arguments of `Engine`.
    drafter : Drafter, optional
        Source of drafts; None: no speculation.
    make_sampler : callable, optional
        Makes the samplers of requests; None: those of the engine.
    """

    _child_backend = None

    def __init__(
        self,
        *arguments: Any,
        drafter: Drafter | None,
        make_sampler: MakeSampler | None = None,
        **options: Any,
    ) -> None:
        speculation = None if drafter is None else "ngram"
        super().__init__(*arguments, speculation=speculation, **options)
        self._replaced: dict[str, Any] = {"drafter": drafter}
        if make_sampler is not None:
            self._replaced["make_sampler"] = make_sampler

    def _make_backend(self, config: EngineConfig) -> Backend:
        return _WithParts(super()._make_backend(config), self._replaced)


class _WithParts:
    """A `Backend` that replaces some fields of what another one loads."""

    def __init__(self, backend: Backend, parts: dict[str, Any]) -> None:
        self._backend = backend
        self._parts = parts
        self.check_memory = backend.check_memory
        self.check_lora = backend.check_lora
        self.stop = backend.stop
        self.constraints = backend.constraints

    def load(self, owned: ExitStack) -> Loaded:
        return replace(self._backend.load(owned), **self._parts)


def known_answers(completions: Iterable[Completion]) -> NextToken:
    """Return a `NextToken` that repeats earlier answers to the same prompts."""
    answers: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for completion in completions:
        answers.setdefault(completion.prompt_token_ids, []).append(completion.token_ids)

    def next_token(sequence: Sequence, tokens: list[int]) -> int | None:
        said = tuple(tokens[sequence.n_prompt :])
        for answer in answers.get(sequence.request.prompt_token_ids, ()):
            # A prompt may have several answers: take one that begins with the output so far, without drafts.
            if answer[: sequence.n_output] == said[: sequence.n_output] and len(answer) > len(said):
                return answer[len(said)]
        return None

    return next_token
