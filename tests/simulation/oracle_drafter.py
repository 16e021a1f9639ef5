"""Guesses that are right as often as a test wants."""

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

# What a sequence goes on with after these tokens; None if that is its end, or not known.
NextToken = Callable[[Sequence, list[int]], int | None]


class OracleDrafter:
    """A `Drafter` that is sure of all its drafts, and not always right.

    Parameters
    ----------
    next_token : callable
        What is right.
    share : float
        Of drafts that are right: always the same ones.
    is_honest : bool
        Expects as many to be right as are; otherwise all.
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
        """It knows better."""

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
    """An engine with a model, and an oracle for a drafter: the answers are known.

    Parameters
    ----------
    *arguments, **options
        Of `Engine`.
    drafter : Drafter, optional
        None: nothing is guessed.
    make_sampler : callable, optional
        Chooses the tokens in place of the model; None: it does.
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
    """A `Backend` with other parts."""

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
    """What is right where each prompt has been answered before, and is answered so again."""
    answers: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for completion in completions:
        answers.setdefault(completion.prompt_token_ids, []).append(completion.token_ids)

    def next_token(sequence: Sequence, tokens: list[int]) -> int | None:
        said = tuple(tokens[sequence.n_prompt :])
        for answer in answers.get(sequence.request.prompt_token_ids, ()):
            # Of several answers to one prompt, one that begins so: a guess may be wrong.
            if answer[: sequence.n_output] == said[: sequence.n_output] and len(answer) > len(said):
                return answer[len(said)]
        return None

    return next_token
