"""The sampler of each request over llama.cpp's samplers.  Inference thread only."""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import (
    CandidateMemory,
    Candidates,
    DrySampler,
    Model,
    SamplerChain,
    Vocabulary,
)
from cllm.checks import MAX_SEED
from cllm.engine.constraint import TokenConstraint
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.batch_sampler import TokenSampler
from cllm.engine.sampling.row_sampler import TOUCHING, RowSampler
from cllm.engine.sampling.thinking import ThinkingConstraint, ThinkingFamily
from cllm.engine.sampling_params import SamplingParams, window
from cllm.engine.vocabulary import spelled_piece


class LlamaChain:
    """A `Chain` of llama.cpp's samplers, in llama-server's way.

    Parameters
    ----------
    seed : int
        Seed of all random numbers.
    prompt : sequence of int
        Tokens before the output, for DRY, and for penalties with `penalize_prompt`.
    n_ctx : int
        Number of tokens that `repeat_last_n` and `dry_penalty_last_n` stand for if they are -1.
    memory : RowMemory, optional
        Memory for the candidates of a whole row; all chains of a thread share it.
    drys : DrySamplers, optional
        Samplers that are copied for DRY; without them, the chain reads the sequence breakers itself.
    """

    def __init__(
        self,
        model: Model,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        n_ctx: int,
        memory: RowMemory | None = None,
        drys: DrySamplers | None = None,
    ) -> None:
        self._drys = drys
        self._memory = RowMemory(model.vocab.n_tokens) if memory is None else memory
        self._n_vocab = model.vocab.n_tokens
        self._biases = params.logit_bias
        self._chain = chain = SamplerChain(model.vocab)
        self.close: Callable[[], None] = chain.close
        try:
            self._fill(params, seed, prompt, n_ctx)
        except BaseException:
            chain.close()  # or it would keep the model from being freed
            raise

    def _fill(self, params: SamplingParams, seed: int, prompt: Sequence[int], n_ctx: int) -> None:
        chain = self._chain
        if params.logit_bias:
            chain.add_logit_bias(params.logit_bias)
        for name in params.active_samplers:
            if name in TOUCHING or not (params.is_greedy or params.mirostat):
                self._add(name, params, seed, n_ctx)
        if params.is_greedy:
            chain.add_greedy()
        elif params.mirostat:
            chain.add_temp(params.temperature)
            if params.mirostat == 1:
                chain.add_mirostat(seed, params.mirostat_tau, params.mirostat_eta)
            else:
                chain.add_mirostat_v2(seed, params.mirostat_tau, params.mirostat_eta)
        elif params.adaptive_target >= 0:
            chain.add_adaptive_p(params.adaptive_target, params.adaptive_decay, seed)
        else:
            chain.add_dist(seed)
        chain.accept_prompt(prompt, params.prompt_samplers)

    def _add(self, name: str, params: SamplingParams, seed: int, n_ctx: int) -> None:
        chain, min_keep = self._chain, min(params.min_keep, self._n_vocab)
        match name:
            case "penalties":
                chain.add_penalties(
                    window(params.repeat_last_n, n_ctx),
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            case "dry":
                values = _dry_values(params, n_ctx)
                if self._drys is None:
                    chain.add_dry(*values)
                else:
                    chain.add_copy(self._drys.get(values))
            case "top_n_sigma":
                chain.add_top_n_sigma(params.top_n_sigma)
            case "top_k":
                chain.add_top_k(params.top_k)
            case "typ_p":
                chain.add_typical(params.typical_p, min_keep)
            case "top_p":
                chain.add_top_p(params.top_p, min_keep)
            case "min_p":
                chain.add_min_p(params.min_p, min_keep)
            case "xtc":
                chain.add_xtc(params.xtc_probability, params.xtc_threshold, min_keep, seed)
            case "temperature" if params.dynatemp_range > 0:
                chain.add_temp_ext(
                    params.temperature, params.dynatemp_range, params.dynatemp_exponent
                )
            case "temperature":
                chain.add_temp(params.temperature)

    def choose(self, ids: NDArray[np.integer], logits: NDArray[np.float32]) -> int:
        """Choose one of the candidates, without accepting it.  `ids` and `logits` have the same length."""
        largest = float(np.maximum.reduce(logits, initial=-math.inf))
        return self._decide(Candidates(ids, logits, self._memory.of_all), largest)

    def choose_from_row(self, row: NDArray[np.float32], banned: NDArray[np.integer]) -> int:
        """Choose one of the tokens that are not banned, without accepting it.  `banned` is ascending."""
        candidates = self._memory.candidates(row, banned)
        return self._decide(candidates, float(candidates.logits.max()))

    def accept(self, token: int) -> None:
        """Report the chosen token to the samplers with a memory."""
        if self._chain.remembers:
            self._chain.accept(token)

    def draw(self) -> None:
        """Draw the random numbers of one token, by choosing from a single candidate; the choice is dropped."""
        self._single.refill()
        self._chain.decide(self._single)

    @cached_property
    def _single(self) -> Candidates:
        """One candidate that no bias bans, for all draws of a long output that is recalled."""
        # Not all tokens can be banned.
        token = next((token for token in range(self._n_vocab) if token not in self._biases), 0)
        return Candidates(np.array([token], np.int32), np.zeros(1, np.float32))

    def _decide(self, candidates: Candidates, largest: float) -> int:
        # `apply` raises the error if no logit is finite, as when all others are banned.  `decide` skips
        # the check of the ids, which are valid in a row.
        if math.isfinite(largest):
            return self._chain.decide(candidates)
        return self._chain.apply(candidates)


class RowMemory:
    """Memory for the candidates of one whole row, allocated at the first use."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._ids: NDArray[np.int32] | None = None

    @cached_property
    def of_all(self) -> CandidateMemory:
        """Return memory with room for every token."""
        return CandidateMemory(self._n_vocab)

    def candidates(self, row: NDArray[np.float32], banned: NDArray[np.integer]) -> Candidates:
        """Return all tokens of a row that are not banned; valid until the next call.  `banned` is ascending."""
        if self._ids is None:
            self._ids = np.arange(self._n_vocab, dtype=np.int32)
            self._kept_ids, self._kept_row = np.empty_like(self._ids), np.empty_like(row)
        ids, logits = self._ids, row
        if len(banned):
            n_kept, start = 0, 0
            for end in [*banned.tolist(), self._n_vocab]:
                n = end - start
                self._kept_ids[n_kept : n_kept + n] = self._ids[start:end]
                self._kept_row[n_kept : n_kept + n] = row[start:end]
                n_kept, start = n_kept + n, end + 1
            ids, logits = self._kept_ids[:n_kept], self._kept_row[:n_kept]
        return Candidates(ids, logits, self.of_all)


_DryValues = tuple[float, float, int, int, tuple[str, ...]]
N_DRYS = 4  # of 64 breakers of one letter, one has 30 MB


def _dry_values(params: SamplingParams, n_ctx: int) -> _DryValues:
    return (
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        window(params.dry_penalty_last_n, n_ctx),
        tuple(params.dry_sequence_breakers),
    )


class DrySamplers:
    """The DRY samplers that were used last, to be copied; making one can take longer than a tick."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._used: OrderedDict[_DryValues, DrySampler] = OrderedDict()

    def get(self, values: _DryValues) -> DrySampler:
        """Return the sampler with the values of `DrySampler`'s parameters; valid until the next call."""
        if values not in self._used:
            self._used[values] = DrySampler(self._vocab, *values)
            if len(self._used) > N_DRYS:
                self._used.popitem(last=False)[1].close()
        self._used.move_to_end(values)
        return self._used[values]

    def close(self) -> None:
        """Free all samplers."""
        while self._used:
            self._used.popitem()[1].close()


class SamplerFactory:
    """Makes the sampler of each request.  `close` frees what these share.

    Parameters
    ----------
    n_ctx : int
        Positions that one sequence can have.
    """

    def __init__(self, model: Model, n_ctx: int) -> None:
        self._model = model
        self._n_ctx = n_ctx
        self._memory = RowMemory(model.vocab.n_tokens)
        self._drys = DrySamplers(model.vocab)
        self.close: Callable[[], None] = self._drys.close
        self._ends = model.vocab.ends
        self._thinking = ThinkingFamily(model.vocab.n_tokens, model.vocab.is_eog)

    def __call__(self, request: GenerationRequest) -> TokenSampler | None:
        """Return the sampler of a request; None if it always takes the most likely token."""
        params, suppressed = request.params, self._model.vocab.suppressed
        is_constrained = any((request.constraint, request.thinking))
        may_end = not (params.ignore_eos or params.min_tokens)
        if (
            params.is_greedy
            and may_end
            and not (params.changes_logits or suppressed or is_constrained)
        ):
            return None
        seen = request.prompt_token_ids if params.prompt_samplers else ()
        prompt = tuple(token for token in seen if token >= 0)  # no media
        seed = params.seed if request.seed is None else request.seed
        if seed is None:
            seed = secrets.randbelow(MAX_SEED + 1)
        with ExitStack() as unfinished:  # closes all parts if a later one raises an error
            constraint = self._constraint(request)
            if constraint is not None:
                unfinished.callback(constraint.close)
            chain = LlamaChain(
                self._model,
                params,
                seed=seed,
                prompt=prompt,
                n_ctx=self._n_ctx,
                memory=self._memory,
                drys=self._drys,
            )
            unfinished.callback(chain.close)
            sampler = RowSampler(
                chain,
                params,
                prompt=prompt,
                banned=suppressed,
                ends=() if may_end else self._ends,
                n_ctx=self._n_ctx,
                constraint=constraint,
            )
            unfinished.pop_all()
        return sampler

    def _constraint(self, request: GenerationRequest) -> TokenConstraint | None:
        inner = None if request.constraint is None else request.constraint.start()
        if (rules := request.thinking) is None:
            return inner
        spelling = partial(spelled_piece, request.spelled, self._model.vocab)
        return ThinkingConstraint(self._thinking, rules, inner, spelling)
