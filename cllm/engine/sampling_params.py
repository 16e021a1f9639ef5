"""SamplingParams: how to choose the tokens of one request; a frozen value that validates itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypedDict

from cllm import sampling_limits
from cllm.checks import INT32_MAX, check_bool, check_float, check_int, encode_text
from cllm.errors import InvalidRequestError
from cllm.sampling_limits import FLOAT_RANGES, MAX_BIAS, MAX_BREAKERS, check_limits

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024


# llama-server's order and names.
SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGPROBS = 256
CONSTRAINTS = ("grammar", "lark", "json_schema", "regex")
MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, MAX_REGEX_BYTES = 64 << 10, 256 << 10, 16 << 10
MAX_SCHEMA_DEPTH = 64
INTEGER_RANGES = {
    "max_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    **sampling_limits.INTEGER_RANGES,
}
MAY_BE_NONE = frozenset(("max_tokens", "seed", "logprobs", "prompt_logprobs"))


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    logit_bias: Mapping[int, float]
    samplers: Sequence[str]
    min_keep: int
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    banned_strings: str | Sequence[str]
    ignore_eos: bool
    penalize_prompt: bool
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: str | None
    lark: str | None
    json_schema: Mapping[str, object] | str | None
    regex: str | None
    speculation: bool | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request; llama-server's names and defaults.

    Parameters
    ----------
    max_tokens : int, optional
        At most so many output tokens; None: until the model ends or the context is full.
    min_tokens : int
        Before so many output tokens, none that would end the output is sampled; stop strings end
        it nevertheless.
    temperature : float
        0 is greedy; otherwise 0.001 to 100.
    top_k : int
        Keep the k most likely tokens; 0 or -1 keeps all.
    top_p, min_p, typical_p : float
        0 to 1; 1, 0 and 1 switch them off.
    top_n_sigma : float
        Keep what lies within so many standard deviations of the largest logit; -1 is off.
    xtc_probability, xtc_threshold : float
        Exclude all but the least of the tokens above the threshold, with this probability.
    dynatemp_range, dynatemp_exponent : float
        Temperatures between `temperature` ± range, by the entropy of the candidates; 0 is off.
    repeat_penalty, presence_penalty, frequency_penalty : float
        For tokens among the last `repeat_last_n`, prompt included; 1, 0 and 0 switch them off.
    repeat_last_n : int
        0 is off, -1 the whole context.
    penalize_prompt : bool
        False: the penalties count tokens of the output alone, as OpenAI's do.  With DRY the prompt counts.
    dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n :
        DRY: penalize what would continue a repetition; a multiplier of 0 is off.
    dry_sequence_breakers : sequence of str
        Where repetitions end.  At most 64.
    mirostat : int
        1 or 2; 0 is off.  In place of all samplers but the temperature, penalties and biases.
    mirostat_tau, mirostat_eta : float
    adaptive_target, adaptive_decay : float
        Adaptive-p: choose tokens whose probability is near the target, on average over about
        1 / (1 - decay) of them; behind all other samplers.  A target below 0 is off.
    logit_bias : mapping of int to float
        Added to the logits of tokens; -inf bans one.  At most 1,024.
    samplers : sequence of str
        Which samplers, in which order: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p,
        xtc, temperature.
    min_keep : int
        Candidates that top_p, typical_p, min_p and xtc leave at least.
    seed : int, optional
        0 to 2³² - 2; None draws one.
    stop : str or sequence of str
        Text that ends the output and is not part of it.  At most 64, of at most 1,024 bytes.
    stop_token_ids : sequence of int
        Tokens that end the output like an end-of-generation token.
    banned_strings : str or sequence of str
        Text that the output does not have: where it would be written, the token that begins it is
        another one.  Held back until that is certain.  Of a chat: in what a reader is shown.  As
        many, and as long, as `stop`.
    ignore_eos : bool
        Never sample an end-of-generation token, unless a constraint leaves nothing else.
    logprobs, prompt_logprobs : int, optional
        For each output token, or prompt token, its log probability and those of so many most likely
        ones, at most 256, before any sampler; None is off.  A prompt that is scored shares no
        prefix.
    grammar : str, optional
        The output follows this grammar in GBNF, llama.cpp's format.  At most 64 KiB.  A control token
        is written `<think>` or `<[id]>`; in a string its name is text.  At most one of these four;
        each needs the extra `structured`.
    lark : str, optional
        The output follows this grammar in Lark as llguidance reads it.  At most 64 KiB.
    json_schema : mapping or str, optional
        The output is JSON of this schema, given as a value or as JSON text; `{"type": "object"}`
        for any object.  At most 256 KiB, 64 levels deep.
    regex : str, optional
        The whole output matches it.  At most 16 KiB.

    Raises
    ------
    InvalidRequestError
        Names the field, the value and the limit.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    logit_bias: Mapping[int, float] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    samplers: Sequence[str] = SAMPLERS
    min_keep: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    banned_strings: str | Sequence[str] = ()
    ignore_eos: bool = False
    penalize_prompt: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    lark: str | None = None
    json_schema: Mapping[str, object] | str | None = None
    regex: str | None = None
    speculation: bool | None = None

    def __post_init__(self) -> None:
        error = InvalidRequestError
        for name, (low, high) in INTEGER_RANGES.items():
            if (number := getattr(self, name)) is not None or name not in MAY_BE_NONE:
                check_int(name, number, low, high, error)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens, which is {self.max_tokens}"
            raise error("min_tokens", self.min_tokens, limit)
        for name in FLOAT_RANGES:
            check_limits(name, getattr(self, name), error)
        check_bool("ignore_eos", self.ignore_eos, error)
        check_bool("penalize_prompt", self.penalize_prompt, error)
        if self.speculation is not None:
            check_bool("speculation", self.speculation, error)
        for name, value in (
            ("stop", _stop_strings("stop", self.stop)),
            ("banned_strings", _stop_strings("banned_strings", self.banned_strings)),
            ("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", _biases(self.logit_bias)),
            ("samplers", _samplers(self.samplers)),
            ("dry_sequence_breakers", _breakers(self.dry_sequence_breakers)),
            ("json_schema", _schema(self.json_schema)),
        ):
            object.__setattr__(self, name, value)
        _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)
        _check_text("lark", self.lark, MAX_GRAMMAR_BYTES)
        _check_text("regex", self.regex, MAX_REGEX_BYTES)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise error(given[1], getattr(self, given[1]), f"left out beside {given[0]}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, after penalties and biases."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens are penalized for having occurred."""
        is_off = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return "penalties" in self.samplers and self.repeat_last_n != 0 and not is_off

    @property
    def has_dry(self) -> bool:
        """Whether repetitions are penalized."""
        return "dry" in self.samplers and self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def changes_logits(self) -> bool:
        """Whether some tokens are made more or less likely, by a bias or for having occurred."""
        return bool(self.logit_bias) or self.has_penalties or self.has_dry

    @property
    def remembers_prompt(self) -> bool:
        """Whether penalties or DRY look at the prompt."""
        return self.has_dry or (self.has_penalties and self.penalize_prompt)

    @property
    def active_samplers(self) -> tuple[str, ...]:
        """Those of `samplers` that change anything, in order."""
        is_on = {
            "penalties": self.has_penalties,
            "dry": self.has_dry,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0,
            "temperature": True,
        }
        return tuple(name for name in self.samplers if is_on[name])


def window(last_n: int, n_ctx: int) -> int:
    """How many tokens `repeat_last_n` or `dry_penalty_last_n` stand for: -1 is the context."""
    return n_ctx if last_n < 0 else last_n


def _token_ids(name: str, given: object) -> tuple[int, ...]:
    error = InvalidRequestError
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise error(name, given, "a sequence of token ids")
    tokens = tuple(itertools.islice(given, MAX_STOP_TOKENS + 1))  # it may have no end
    if len(tokens) > MAX_STOP_TOKENS:
        n_given = len(given) if isinstance(given, Sized) else f"more than {MAX_STOP_TOKENS}"
        raise error(name, n_given, f"at most {MAX_STOP_TOKENS} tokens")
    return tuple(check_int(name, token, 0, INT32_MAX, error) for token in tokens)


def _biases(given: object) -> Mapping[int, float]:
    error = InvalidRequestError
    if not isinstance(given, Mapping):
        raise error("logit_bias", given, "a mapping of token ids to numbers")
    if len(given) > MAX_BIASES:
        raise error("logit_bias", len(given), f"at most {MAX_BIASES} tokens")
    biases = {}
    for token, bias in given.items():
        check_int("logit_bias", token, 0, INT32_MAX, error)
        is_ban = bias == float("-inf")
        biases[token] = (
            bias if is_ban else check_float("logit_bias", bias, -MAX_BIAS, MAX_BIAS, error)
        )
    return MappingProxyType(biases)


def _samplers(given: object) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise InvalidRequestError("samplers", given, "a sequence of names")
    for name in given:
        if name not in SAMPLERS:
            raise InvalidRequestError("samplers", name, f"one of {', '.join(SAMPLERS)}")
    if len(set(given)) < len(given):
        raise InvalidRequestError("samplers", given, "each at most once")
    return tuple(given)


def _breakers(given: object) -> tuple[str, ...]:
    error, name = InvalidRequestError, "dry_sequence_breakers"
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise error(name, given, "a sequence of strings")
    if len(given) > MAX_BREAKERS:
        raise error(name, len(given), f"at most {MAX_BREAKERS} strings")
    for text in given:
        if not isinstance(text, str) or not 0 < len(text) <= 40 or "\0" in text:
            raise error(name, text, "1 to 40 characters without NUL")
        encode_text(name, text, error)
    return tuple(given)


def _stop_strings(field: str, stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or isinstance(strings, bytes):
        raise InvalidRequestError(field, stop, "a string or a sequence of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(field, len(strings), f"at most {MAX_STOP_STRINGS} strings")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(field, text, "a string that is not empty")
        if len(encode_text(field, text, InvalidRequestError)) > MAX_STOP_BYTES:
            raise InvalidRequestError(field, text, f"at most {MAX_STOP_BYTES} bytes long")
    return tuple(strings)


def _check_text(name: str, text: object, n_bytes_max: int) -> None:
    if text is None:
        return
    error = InvalidRequestError
    if not isinstance(text, str) or not text:
        raise error(name, text, "text that is not empty")
    n_bytes = len(encode_text(name, text, error))
    if n_bytes > n_bytes_max:
        raise error(name, f"{n_bytes} bytes", f"at most {n_bytes_max} bytes")


def _schema(given: object) -> str | None:
    """A schema as JSON text, which is immutable."""
    if given is None:
        return None
    error = InvalidRequestError
    try:
        if isinstance(given, str):
            _check_text("json_schema", given, MAX_SCHEMA_BYTES)
            schema = json.loads(given)
        elif isinstance(given, Mapping):
            schema = dict(given)
        else:
            raise error("json_schema", given, "a mapping, or one as JSON text")
        # Hardly ever longer than it was given.
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        depth = _depth(schema)
    except InvalidRequestError:
        raise
    except Exception as cause:  # a mapping of the caller's may raise anything
        raise error("json_schema", given, f"JSON ({str(cause) or type(cause).__name__})") from None
    if not isinstance(schema, dict):
        raise error("json_schema", given, "an object")
    if depth > MAX_SCHEMA_DEPTH:
        raise error("json_schema", given, f"at most {MAX_SCHEMA_DEPTH} levels deep")
    _check_text("json_schema", text, MAX_SCHEMA_BYTES)
    return text


def _depth(value: object) -> int:
    """Levels of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 1
