"""SamplerChain: from plain parameters to a `llama_sampler` chain.

`llama_sampler_chain_add` takes ownership of what it is given: every `add_…` method creates a sampler and
hands it over in one expression.  Only a `DrySampler`, which chains copy, exists on its own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.bindings._handle import NativeHandle
from cllm.bindings._library import library
from cllm.bindings.context import Context
from cllm.bindings.vocabulary import Vocabulary, c_string
from cllm.checks import check_float, check_int
from cllm.errors import InvalidArgumentError, LlamaCallError
from cllm.sampling_limits import MAX_BIAS, MAX_BREAKERS, MAX_LAST_N, check_limits

_ARRAY = h.DECLARATIONS.structs["llama_token_data_array"]
_DATA_POINTER = ctypes.POINTER(h.DECLARATIONS.structs["llama_token_data"])
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class CandidateMemory:
    """Reusable memory for candidates, to avoid an allocation for each sampling.

    Parameters
    ----------
    n : int
        Largest number of candidates.
    """

    def __init__(self, n: int) -> None:
        data = np.empty(n, _CANDIDATE)
        # Created once: creating these views for each sampling would take longer than the sampling.
        self.ids: NDArray[np.int32] = data["id"]
        self.logits: NDArray[np.float32] = data["logit"]
        self.p: NDArray[np.float32] = data["p"]
        self.pointer: Any = ctypes.cast(data.ctypes.data, _DATA_POINTER)  # the fields keep it alive


class Candidates:
    """A `llama_token_data_array` over numpy memory, which samplers sort and shorten in place.

    Parameters
    ----------
    ids, logits : ndarray
        At least one token id, and as many float32 logits; otherwise `InvalidArgumentError` is raised.
    memory : CandidateMemory, optional
        Memory to use instead of new memory; must have room for these candidates.
    """

    def __init__(
        self,
        ids: NDArray[np.integer],
        logits: NDArray[np.float32],
        memory: CandidateMemory | None = None,
    ) -> None:
        n = len(ids)
        if n != len(logits) or n == 0:
            raise InvalidArgumentError("candidates", n, "at least one, with as many ids as logits")
        self._memory = memory = CandidateMemory(n) if memory is None else memory
        memory.ids[:n] = ids
        memory.logits[:n] = logits
        memory.p[:n] = 0.0
        self.struct: Any = _ARRAY(memory.pointer, n, -1, False)

    def refill(self) -> None:
        """Give a single candidate the logit 0 again, after samplers have changed it."""
        self._memory.logits[0] = self._memory.p[0] = 0.0
        self.struct.size, self.struct.selected, self.struct.sorted = 1, -1, False

    def __len__(self) -> int:
        return int(self.struct.size)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Ids of the candidates that are left, in the array's present order."""
        ids: NDArray[np.int32] = self._memory.ids[: len(self)]
        return ids

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits of the candidates that are left."""
        logits: NDArray[np.float32] = self._memory.logits[: len(self)]
        return logits

    @property
    def selected_logit(self) -> float:
        """The logit of the selected candidate, as the samplers left it."""
        return float(self._memory.logits[self.struct.selected])

    def check_ids(self, n_vocab: int) -> None:
        """Raise `InvalidArgumentError` for an id outside 0 to `n_vocab` - 1: samplers use ids as indices."""
        for token in (int(self.ids.min()), int(self.ids.max())):
            check_int("candidate", token, 0, n_vocab - 1)

    @property
    def selected(self) -> int | None:
        """Selected token id; None if no sampler has selected one."""
        index = self.struct.selected
        return int(self._memory.ids[index]) if 0 <= index < self.struct.size else None


class DrySampler(NativeHandle):
    """DRY, which penalizes tokens that continue a repetition: a sampler to be copied into chains.

    llama.cpp looks for each breaker in each token of the vocabulary: 20 ms for a breaker with 150,000 tokens.
    A copy takes microseconds.  One thread only.

    Parameters
    ----------
    vocab : Vocabulary
    multiplier, base, allowed_length : float or int
        Penalty `multiplier * base ** (length - allowed_length)` of a token that repeats `length` tokens.
    last_n : int
        Number of the last tokens in which repetitions are found.
    sequence_breakers : sequence of str
        Texts that a repetition does not go beyond.

    Raises
    ------
    InvalidArgumentError
        A value is out of range.
    """

    def __init__(
        self,
        vocab: Vocabulary,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        sequence_breakers: Sequence[str] = ("\n", ":", '"', "*"),
    ) -> None:
        numbers = (
            check_limits("dry_multiplier", multiplier),
            check_limits("dry_base", base),
            check_limits("dry_allowed_length", allowed_length),
            check_int("dry_penalty_last_n", last_n, 0, MAX_LAST_N),
        )
        check_int("dry_sequence_breakers", len(sequence_breakers), 0, MAX_BREAKERS)
        texts = [c_string("dry_sequence_breakers", text) for text in sequence_breakers]
        array = (ctypes.c_char_p * max(1, len(texts)))(*texts)
        lib = library()
        pointer = lib.llama_sampler_init_dry(vocab._pointer, *numbers, array, len(texts))
        if not pointer:
            raise InvalidArgumentError("sampler", None, "a sampler that llama.cpp accepts")
        super().__init__(pointer, lib.llama_sampler_free, parent=vocab._model)
        self.last_n: int = numbers[-1]


class SamplerChain(NativeHandle):
    """Samplers applied one after another; the last one selects.

    Every `add_…` method adds one sampler and returns the chain.  It raises `InvalidArgumentError` for
    a value out of range, and after a sampler that selects.  One thread only.

    Parameters
    ----------
    vocab : Vocabulary
    """

    def __init__(self, vocab: Vocabulary) -> None:
        self._lib = lib = library()
        self._vocab = vocab
        vocab._pointer  # noqa: B018  # raises if the model is closed, or of another process
        params = lib.llama_sampler_chain_default_params()
        pointer = lib.llama_sampler_chain_init(params)
        if not pointer:
            raise LlamaCallError("llama_sampler_chain_init", 0)
        super().__init__(pointer, lib.llama_sampler_free, parent=vocab._model)
        self._selects: bool = False
        # Samplers with a memory, and how many of the last tokens each looks at; None: all.
        self._memories: list[tuple[str, Any, int | None]] = []

    @property
    def remembers(self) -> bool:
        """True if the selection depends on accepted tokens; if False, `accept` has no effect."""
        return bool(self._memories)

    def _add(
        self,
        sampler: Any,
        *,
        selects: bool = False,
        memory: str | None = None,
        last_n: int | None = None,
    ) -> Self:
        if not sampler:
            raise InvalidArgumentError("sampler", None, "a sampler that llama.cpp accepts")
        if self._selects:
            self._lib.llama_sampler_free(sampler)
            raise InvalidArgumentError(
                "sampler", self.names[-1], "the last sampler: it selects a token"
            )
        self._lib.llama_sampler_chain_add(self._pointer, sampler)
        self._selects = selects
        if memory is not None:
            self._memories.append((memory, sampler, last_n))
        return self

    # --- The samplers that select, and must come last ----------------------------------------
    def add_greedy(self) -> Self:
        """Select the largest logit."""
        return self._add(self._lib.llama_sampler_init_greedy(), selects=True)

    def add_dist(self, seed: int) -> Self:
        """Draw a token from the probabilities of the candidates."""
        return self._add(
            self._lib.llama_sampler_init_dist(check_limits("seed", seed)), selects=True
        )

    def add_mirostat(self, seed: int, tau: float, eta: float, m: int = 100) -> Self:
        """Select with Mirostat 1.0: target entropy `tau`, learning rate `eta`, `m` tokens for its estimate."""
        n_vocab = self._vocab.n_tokens
        sampler = self._lib.llama_sampler_init_mirostat(
            n_vocab,
            check_limits("seed", seed),
            check_limits("mirostat_tau", tau),
            check_limits("mirostat_eta", eta),
            check_int("mirostat_m", m, 1, n_vocab),
        )
        return self._add(sampler, selects=True)

    def add_mirostat_v2(self, seed: int, tau: float, eta: float) -> Self:
        """Select with Mirostat 2.0: target entropy `tau`, learning rate `eta`."""
        sampler = self._lib.llama_sampler_init_mirostat_v2(
            check_limits("seed", seed),
            check_limits("mirostat_tau", tau),
            check_limits("mirostat_eta", eta),
        )
        return self._add(sampler, selects=True)

    def add_adaptive_p(self, target: float, decay: float, seed: int) -> Self:
        """Select tokens near the probability `target` (0 to 1); `decay` (0 to 0.99) weighs former tokens."""
        sampler = self._lib.llama_sampler_init_adaptive_p(
            check_float("adaptive_target", target, 0.0, 1.0),
            check_float("adaptive_decay", decay, 0.0, 0.99),
            check_limits("seed", seed),
        )
        return self._add(sampler, selects=True, memory="adaptive_p")

    # --- The samplers that narrow or change the candidates -----------------------------------
    def add_top_k(self, k: int) -> Self:
        """Keep the `k` largest logits; `k <= 0` keeps all."""
        return self._add(self._lib.llama_sampler_init_top_k(check_limits("top_k", k)))

    def add_top_p(self, p: float, min_keep: int = 1) -> Self:
        """Keep the most likely tokens that together have probability `p`; 1 keeps all (nucleus sampling)."""
        sampler = self._lib.llama_sampler_init_top_p(
            check_limits("top_p", p), self._min_keep(min_keep)
        )
        return self._add(sampler)

    def add_min_p(self, p: float, min_keep: int = 1) -> Self:
        """Keep tokens at least `p` times as likely as the most likely one."""
        sampler = self._lib.llama_sampler_init_min_p(
            check_limits("min_p", p), self._min_keep(min_keep)
        )
        return self._add(sampler)

    def add_typical(self, p: float, min_keep: int = 1) -> Self:
        """Keep the most typical tokens that together have probability `p`; 1 keeps all."""
        sampler = self._lib.llama_sampler_init_typical(
            check_limits("typical_p", p), self._min_keep(min_keep)
        )
        return self._add(sampler)

    def add_temp(self, temperature: float) -> Self:
        """Divide the logits by `temperature`; 0 keeps only the largest."""
        return self._add(
            self._lib.llama_sampler_init_temp(check_limits("temperature", temperature))
        )

    def add_temp_ext(self, temperature: float, delta: float, exponent: float) -> Self:
        """Divide the logits by a temperature within `delta` of `temperature`, higher for a larger entropy."""
        sampler = self._lib.llama_sampler_init_temp_ext(
            check_limits("temperature", temperature),
            check_limits("dynatemp_range", delta),
            check_limits("dynatemp_exponent", exponent),
        )
        return self._add(sampler)

    def add_xtc(self, probability: float, threshold: float, min_keep: int, seed: int) -> Self:
        """Exclude, with this `probability`, all tokens above `threshold` except the least likely of them."""
        sampler = self._lib.llama_sampler_init_xtc(
            check_limits("xtc_probability", probability),
            check_limits("xtc_threshold", threshold),
            self._min_keep(min_keep),
            check_limits("seed", seed),
        )
        return self._add(sampler)

    def add_top_n_sigma(self, n: float) -> Self:
        """Keep tokens within `n` standard deviations of the largest logit; `n <= 0` keeps all."""
        return self._add(self._lib.llama_sampler_init_top_n_sigma(check_limits("top_n_sigma", n)))

    def add_penalties(
        self, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> Self:
        """Penalize tokens among the last `last_n` accepted ones."""
        last_n = check_int("repeat_last_n", last_n, 0, MAX_LAST_N)
        sampler = self._lib.llama_sampler_init_penalties(
            self._vocab.n_tokens,
            last_n,
            check_limits("repeat_penalty", repeat),
            check_limits("frequency_penalty", frequency),
            check_limits("presence_penalty", presence),
        )
        return self._add(sampler, memory="penalties", last_n=last_n)

    def add_dry(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        sequence_breakers: Sequence[str] = ("\n", ":", '"', "*"),
    ) -> Self:
        """DRY: penalize tokens that continue a repetition; see `DrySampler`, which many chains can share."""
        with DrySampler(
            self._vocab, multiplier, base, allowed_length, last_n, sequence_breakers
        ) as dry:
            return self.add_copy(dry)

    def add_copy(self, dry: DrySampler) -> Self:
        """Penalize tokens that continue a repetition, with a copy of `dry`."""
        copy = self._lib.llama_sampler_clone(dry._pointer)
        return self._add(copy, memory="dry", last_n=dry.last_n)

    def add_logit_bias(self, biases: Mapping[int, float]) -> Self:
        """Add to the logits of some tokens; `-inf` bans one."""
        if sum(bias == -np.inf for bias in biases.values()) >= self._vocab.n_tokens:
            raise InvalidArgumentError("logit_bias", len(biases), "not a ban of every token")
        array = (h.DECLARATIONS.structs["llama_logit_bias"] * max(1, len(biases)))()
        for slot, (token, bias) in zip(array, biases.items(), strict=False):
            slot.token = self._vocab.check_token(token)
            slot.bias = (
                bias if bias == -np.inf else check_float("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
            )
        n_vocab = self._vocab.n_tokens
        return self._add(self._lib.llama_sampler_init_logit_bias(n_vocab, len(biases), array))

    # --- Use ---------------------------------------------------------------------------------
    def apply(self, candidates: Candidates) -> int:
        """Run the chain over `candidates` and return the selected token, without accepting it.

        Raises
        ------
        InvalidArgumentError
            The chain does not end with a selecting sampler, or an id is not in the vocabulary.  The
            largest logit is not finite, or the samplers leave no finite one.
        """
        if not self._selects:
            raise InvalidArgumentError(
                "chain", self.names, "a chain that ends with a selecting sampler"
            )
        candidates.check_ids(self._vocab.n_tokens)
        # Without one finite logit llama.cpp answers the last token of the vocabulary.
        if not np.isfinite(candidates.logits.max()):
            raise InvalidArgumentError("largest of logits", candidates.logits.max(), "finite")
        return self.decide(candidates)

    def decide(self, candidates: Candidates) -> int:
        """Run the chain like `apply`, without its checks of chain and candidates.

        The ids must be in the vocabulary, the largest logit finite, and the last sampler must select.
        Raise `InvalidArgumentError` if the samplers leave no candidate with a finite logit.
        """
        self._lib.llama_sampler_apply(self._pointer, candidates.struct)
        token = candidates.selected
        if token is None or not math.isfinite(candidates.selected_logit):
            # Biases and bans can leave nothing; llama.cpp then answers the last candidate.
            raise InvalidArgumentError(
                "chain", self.names, "samplers that leave a candidate with a finite logit"
            )
        return token

    def accept(self, token: int) -> None:
        """Report the sampled token to the samplers with a memory (penalties, DRY, adaptive-p)."""
        self._lib.llama_sampler_accept(self._pointer, self._vocab.check_token(token))

    def accept_prompt(self, tokens: Sequence[int], names: Collection[str]) -> None:
        """Report the tokens of a prompt to these samplers alone: "penalties", "dry", "adaptive_p".

        A sampler that looks at the last `n` tokens is given no others: a call takes 0.4 µs.
        """
        self._pointer  # noqa: B018  # the thread and lifetime check
        accept = self._lib.llama_sampler_accept
        for name, sampler, last_n in self._memories:
            if name in names and last_n != 0:
                seen = tokens[-last_n:] if last_n is not None else tokens
                if seen:
                    self._vocab.check_token(min(seen))
                    self._vocab.check_token(max(seen))
                for token in seen:
                    accept(sampler, token)

    def sample(self, context: Context, row: int) -> int:
        """Sample a token from one output row of the last decode, over the whole vocabulary, and accept it.

        `row` is an index into the batch.  Errors: `StaleLogitsError` without a successful decode;
        `InvalidArgumentError` for another row, a largest logit that is not finite, or a chain that does not
        select.  See `llama_sampler_sample` in llama.h.
        """
        if not self._selects:
            raise InvalidArgumentError(
                "chain", self.names, "a chain that ends with a selecting sampler"
            )
        context.check_output_row(row)
        largest = float(context.output_logits(row).max())
        if not np.isfinite(largest):
            raise InvalidArgumentError("logits", largest, "a row of logits whose largest is finite")
        return int(self._lib.llama_sampler_sample(self._pointer, context._pointer, row))

    def reset(self) -> None:
        """Forget all accepted tokens."""
        self._lib.llama_sampler_reset(self._pointer)

    @property
    def names(self) -> tuple[str, ...]:
        """llama.cpp's names of the samplers, in order."""
        chain = self._pointer
        get, name = self._lib.llama_sampler_chain_get, self._lib.llama_sampler_name
        n = self._lib.llama_sampler_chain_n(chain)
        return tuple(name(get(chain, i)).decode() for i in range(n))

    def _min_keep(self, min_keep: int) -> int:
        return check_int("min_keep", min_keep, 0, self._vocab.n_tokens)

    def __repr__(self) -> str:
        return "<SamplerChain closed>" if self.closed else f"<SamplerChain {' '.join(self.names)}>"
