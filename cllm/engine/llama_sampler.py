"""The sampler of each request over llama.cpp's samplers.  Inference thread only."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Candidates, Model, SamplerChain
from cllm.checks import MAX_SEED
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling import TOUCHING, RowSampler, TokenSampler
from cllm.engine.sampling_params import SamplingParams, window


class LlamaChain:
    """A `Chain` of llama.cpp's samplers, in llama-server's way.

    Parameters
    ----------
    seed : int
        Of everything that is drawn.
    prompt : sequence of int
        Penalties and DRY see it.
    n_ctx : int
        What -1 means for how far they look back.
    """

    def __init__(
        self, model: Model, params: SamplingParams, *, seed: int, prompt: Sequence[int], n_ctx: int
    ) -> None:
        self._chain = chain = SamplerChain(model.vocab)
        self.close = chain.close
        self.accept = chain.accept
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
        else:
            chain.add_dist(seed)
        if params.has_penalties or params.has_dry:
            for token in prompt:
                chain.accept(token)

    def _add(self, name: str, params: SamplingParams, seed: int, n_ctx: int) -> None:
        chain, min_keep = self._chain, params.min_keep
        match name:
            case "penalties":
                chain.add_penalties(
                    window(params.repeat_last_n, n_ctx),
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            case "dry":
                chain.add_dry(
                    params.dry_multiplier,
                    params.dry_base,
                    params.dry_allowed_length,
                    window(params.dry_penalty_last_n, n_ctx),
                    params.dry_sequence_breakers,
                )
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

    def choose(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int:
        """One of the candidates; not accepted yet."""
        candidates = Candidates(ids, logits)
        # The largest of the row may be banned, and nothing finite left: `apply` says so.  The ids
        # are a row's own and need no look.
        if math.isfinite(float(logits.max())):
            return self._chain.decide(candidates)
        return self._chain.apply(candidates)


class SamplerFactory:
    """Makes the sampler of each request.

    Parameters
    ----------
    n_ctx : int
        Positions that one sequence can have.
    """

    def __init__(self, model: Model, n_ctx: int) -> None:
        self._model = model
        self._n_ctx = n_ctx
        self._scratch: NDArray[np.bool_] = np.empty(model.vocab.n_tokens, np.bool_)

    def __call__(self, request: GenerationRequest) -> TokenSampler | None:
        """None if the most likely token is always the choice."""
        params, vocab = request.params, self._model.vocab
        banned = [*vocab.suppressed, *(self._eog_tokens if params.ignore_eos else ())]
        is_touched = params.logit_bias or params.has_penalties or params.has_dry
        if params.is_greedy and not (is_touched or banned or params.min_tokens):
            return None
        prompt = request.prompt_token_ids
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        chain = LlamaChain(self._model, params, seed=seed, prompt=prompt, n_ctx=self._n_ctx)
        return RowSampler(
            chain,
            params,
            prompt=prompt,
            banned=banned,
            ends=[*self._eog_tokens, *params.stop_token_ids] if params.min_tokens else (),
            n_ctx=self._n_ctx,
            scratch=self._scratch,
        )

    @cached_property
    def _eog_tokens(self) -> tuple[int, ...]:
        """Asked of every token once, when the first request wants to know."""
        vocab = self._model.vocab
        return tuple(token for token in range(vocab.n_tokens) if vocab.is_eog(token))
