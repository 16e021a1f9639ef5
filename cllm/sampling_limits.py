"""Limits of the numbers of samplers: one table for `SamplingParams` and for the bindings.

Within these limits, llama.cpp's probabilities stay finite and its buffers small.  Values beyond have no use.
The bindings are stricter where a value has a meaning only in `SamplingParams`, such as -1 for the context.
"""

from __future__ import annotations

from cllm.checks import INT32_MAX, MAX_SEED, ErrorType, check_float, check_int
from cllm.errors import InvalidArgumentError

# Ring buffers of this length are allocated at once; more than a context can hold is useless.
MAX_LAST_N = 1 << 20
MAX_BREAKERS = 64
MAX_LOGPROBS = 256
MAX_BIAS = 1e4
MIN_TEMPERATURE = 1e-3  # smaller values, except 0, give probabilities that are not finite

INTEGER_RANGES = {
    "max_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "top_k": (-1, INT32_MAX),
    "repeat_last_n": (-1, MAX_LAST_N),
    "dry_allowed_length": (0, MAX_LAST_N),
    "dry_penalty_last_n": (-1, MAX_LAST_N),
    "mirostat": (0, 2),
    "min_keep": (0, MAX_LAST_N),
    "seed": (0, MAX_SEED),
}
FLOAT_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 1e4),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    # A penalty of 0 divides by zero: with infinite logits, the last token of the vocabulary wins.
    "repeat_penalty": (1e-3, 1e3),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (0.0, 100.0),
    "mirostat_tau": (0.0, 1e4),
    "mirostat_eta": (0.0, 1e4),
    "adaptive_target": (-1.0, 1.0),
    "adaptive_decay": (0.0, 0.99),
}


def check_limits(field: str, value: object, error: ErrorType = InvalidArgumentError) -> float:
    """Return `value` as the field's `int` or `float` if the table allows it; otherwise raise `error`."""
    if field in INTEGER_RANGES:
        return check_int(field, value, *INTEGER_RANGES[field], error)
    number = check_float(field, value, *FLOAT_RANGES[field], error)
    if field == "temperature" and 0.0 < number < MIN_TEMPERATURE:
        raise error(field, value, f"0 or at least {MIN_TEMPERATURE:g}")
    return number
