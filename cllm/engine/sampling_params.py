"""SamplingParams: how to choose the tokens of one request; a frozen value that validates itself."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

from cllm.checks import INT32_MAX, ErrorType, check_float, check_int, encode_text
from cllm.errors import InvalidArgumentError, InvalidRequestError
from cllm.sampling_limits import MAX_BIAS, MAX_BREAKERS, check_limits
from cllm.settings import Check, boolean, check_settings, setting

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024


# llama-server's order and names.
SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
CONSTRAINTS = ("grammar", "lark", "json_schema", "regex")
MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, MAX_REGEX_BYTES = 64 << 10, 256 << 10, 16 << 10
MAX_SCHEMA_DEPTH = 64
NO_BIAS: Mapping[int, float] = MappingProxyType({})


def _token_ids(name: str, given: object, error: ErrorType) -> tuple[int, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise error(name, given, "a sequence of token ids")
    try:
        tokens = tuple(itertools.islice(given, MAX_STOP_TOKENS + 1))  # it may have no end
    except TypeError:  # an array without dimensions
        raise error(name, given, "a sequence of token ids") from None
    if len(tokens) > MAX_STOP_TOKENS:
        n_given = len(given) if isinstance(given, Sized) else f"more than {MAX_STOP_TOKENS}"
        raise error(name, n_given, f"at most {MAX_STOP_TOKENS} token ids in the list")
    return tuple(check_int(name, token, 0, INT32_MAX, error) for token in tokens)


def _biases(name: str, given: object, error: ErrorType) -> Mapping[int, float]:
    if not isinstance(given, Mapping):
        raise error(name, given, "a mapping of token ids to numbers")
    if len(given) > MAX_BIASES:
        raise error(name, len(given), f"at most {MAX_BIASES} tokens")
    biases = {}
    for token, bias in given.items():
        is_ban = isinstance(bias, float) and bias == -math.inf
        biases[check_int(name, token, 0, INT32_MAX, error)] = (
            -math.inf if is_ban else check_float(name, bias, -MAX_BIAS, MAX_BIAS, error)
        )
    return MappingProxyType(biases)


def _samplers(name: str, given: object, error: ErrorType) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise error(name, given, "a sequence of names")
    for sampler in given:
        if not isinstance(sampler, str) or sampler not in SAMPLERS:
            raise error(name, sampler, f"one of {', '.join(SAMPLERS)}")
    if len(set(given)) < len(given):
        raise error(name, given, "each at most once")
    return tuple(given)


def _breakers(name: str, given: object, error: ErrorType) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise error(name, given, "a sequence of strings")
    if len(given) > MAX_BREAKERS:
        raise error(name, len(given), f"at most {MAX_BREAKERS} strings")
    for text in given:
        if not isinstance(text, str) or not 0 < len(text) <= 40 or "\0" in text:
            raise error(name, text, "1 to 40 characters without NUL")
        encode_text(name, text, error)
    return tuple(given)


def _stop_strings(name: str, stop: object, error: ErrorType) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or isinstance(strings, bytes):
        raise error(name, stop, "a string or a sequence of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise error(name, len(strings), f"at most {MAX_STOP_STRINGS} strings")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise error(name, text, "a string that is not empty")
        if len(encode_text(name, text, error)) > MAX_STOP_BYTES:
            raise error(name, text, f"at most {MAX_STOP_BYTES} bytes long")
    return tuple(strings)


def _text(n_bytes_max: int) -> Check:
    """Return a check for texts of at most `n_bytes_max` bytes."""

    def check(name: str, text: object, error: ErrorType) -> object:
        if not isinstance(text, str) or not text:
            raise error(name, text, "text that is not empty")
        n_bytes = len(encode_text(name, text, error))
        if n_bytes > n_bytes_max:
            raise error(name, f"{n_bytes} bytes", f"at most {n_bytes_max} bytes")
        return text

    return check


def _schema(name: str, given: object, error: ErrorType) -> str:
    """Return a schema as JSON text, which is immutable."""
    check_text = _text(MAX_SCHEMA_BYTES)
    try:
        if isinstance(given, str):
            check_text(name, given, error)
            schema = json.loads(given)
        elif isinstance(given, Mapping):
            schema = dict(given)
            if _has_parts(schema, MAX_SCHEMA_BYTES // 2):  # each part has two bytes or more
                raise error(name, "larger", f"at most {MAX_SCHEMA_BYTES} bytes")
        else:
            raise error(name, given, "a mapping, or one as JSON text")
        # Compact, so that it is hardly ever longer than the given text: both have the same limit.
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        depth = _depth(schema)
    except (InvalidRequestError, InvalidArgumentError):
        raise
    except Exception as cause:  # a mapping of the caller's may raise anything
        raise error(name, given, f"JSON ({str(cause) or type(cause).__name__})") from None
    if not isinstance(schema, dict):
        raise error(name, given, "an object")
    if depth > MAX_SCHEMA_DEPTH:
        raise error(
            name, given, f"at most {MAX_SCHEMA_DEPTH} levels deep, the innermost value counted"
        )
    check_text(name, text, error)
    return text


def _has_parts(value: Any, n_parts: int) -> bool:
    """Return True if a JSON value has more parts than this, without counting all of them.

    False if a container occurs twice: it may be inside itself, which `json.dumps` finds.
    """
    left, seen = [value], set[int]()
    while left and n_parts >= 0:
        part = left.pop()
        if id(part) in seen:
            return False
        seen.add(id(part))
        inner = part.values() if type(part) is dict else part
        n_parts -= len(inner)
        if n_parts >= 0:
            left += [item for item in inner if type(item) in (dict, list, tuple)]
    return n_parts < 0


def _depth(value: object) -> int:
    """Return the nesting depth of a JSON value: 1 for a number, a text or an empty list."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 1


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
    """Sampling parameters of one request, with llama-server's names and defaults.

    The first sentence about a field is the help of its option.

    Parameters
    ----------
    max_tokens : int, optional
        Output tokens at most; by default until the model ends or the context is full.
    min_tokens : int
        Output tokens at least.  Before so many, no token that would end the output is sampled; stop strings
        end it nevertheless.
    temperature : float
        Sampling temperature; 0 is greedy.  Otherwise 0.001 to 100.
    top_k : int
        Keep the k most likely tokens; 0 keeps all.  So does -1.
    top_p : float
        Keep the most likely tokens that together have this probability; 1 is off.
    min_p : float
        Keep tokens at least this much as likely as the most likely one; 0 is off.
    typical_p : float
        Keep the most typical tokens that together have this probability; 1 is off.
    top_n_sigma : float
        Keep tokens within so many standard deviations of the largest logit; -1 is off.
    xtc_probability : float
        Probability with which XTC excludes all but the least likely token above its threshold; 0 is off.
    xtc_threshold : float
        Probability above which XTC excludes tokens.
    dynatemp_range : float
        Vary the temperature by so much with the entropy of the candidates; 0 is off.
    dynatemp_exponent : float
        Exponent of the entropy that varies the temperature.
    repeat_penalty : float
        Penalty for tokens among the last ones, prompt included; 1 is off.
    repeat_last_n : int
        Number of last tokens that are penalized; 0 is off, -1 the whole context.
    presence_penalty : float
        Penalty for tokens that occur among the last ones; 0 is off.
    frequency_penalty : float
        Penalty for each occurrence of a token among the last ones; 0 is off.
    dry_multiplier : float
        DRY: penalize a token that continues a repetition; 0 is off.
    dry_base : float
        DRY: growth of the penalty with the length of the repetition.
    dry_allowed_length : int
        DRY: length of a repetition without a penalty.
    dry_penalty_last_n : int
        DRY: number of last tokens in which repetitions are found; 0 is off, -1 the whole context.
    dry_sequence_breakers : sequence of str
        DRY: text that ends a repetition.  At most 64.
    mirostat : int
        Mirostat 1 or 2; 0 is off.  It replaces all samplers except the temperature, penalties and biases.
    mirostat_tau : float
        Mirostat: target entropy.
    mirostat_eta : float
        Mirostat: learning rate.
    adaptive_target : float
        Adaptive-p: choose tokens whose probability is near this on average; below 0 is off.  After all
        other samplers.
    adaptive_decay : float
        Adaptive-p: weight of former tokens, whose average covers about 1 / (1 - decay) tokens.
    logit_bias : mapping of int to float
        Numbers added to the logits of tokens; -inf bans a token.  At most 1,024.
    samplers : sequence of str
        A sampler, in the order of use: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc or
        temperature.
    min_keep : int
        Candidates that top_p, typical_p, min_p and xtc keep at least.
    seed : int, optional
        Seed of the random numbers; by default a random one.  0 to 2³² - 2.
    stop : str or sequence of str
        Text that ends the output, and is not part of it.  At most 64, of at most 1,024 bytes.
    stop_token_ids : sequence of int
        Tokens that end the output like an end-of-generation token.
    banned_strings : str or sequence of str
        Text that the output does not contain.  The token that would begin it is replaced by another one.  Text
        is held back until that is certain.  In a chat this holds for the text that a reader is shown.  The
        limits are those of `stop`.
    ignore_eos : bool
        Never sample an end-of-generation token, unless a constraint leaves nothing else.
    penalize_prompt : bool
        Count the tokens of the prompt in the penalties.  False: only those of the output, as OpenAI does.  For
        DRY the prompt counts in any case.
    logprobs : int, optional
        For each output token its log probability, and those of so many most likely tokens, before any
        sampler.  At most 256; None is off.
    prompt_logprobs : int, optional
        For each prompt token its log probability, and those of so many most likely tokens, before any
        sampler.  Such a prompt is computed without the prefix cache.
    grammar : str, optional
        The output follows this GBNF; text or @FILE.  Python takes text only.  At most 64 KiB.  A control token
        is written `<think>` or `<[id]>`; in a string its name is text.  At most one of grammar, lark,
        json_schema and regex; each needs the extra `structured`.
    lark : str, optional
        The output follows this Lark grammar; text or @FILE.  As llguidance reads it.  At most 64 KiB.
    json_schema : mapping or str, optional
        The output is JSON of this schema; text or @FILE.  Python takes a value or JSON text;
        `{"type": "object"}` for any object.  At most 256 KiB, 64 levels deep.
    regex : str, optional
        The whole output matches this expression.  At most 16 KiB.
    speculation : bool, optional
        Guess tokens for this request; None: as the engine is configured.

    Raises
    ------
    InvalidRequestError
        Names the field, the value and the limit.
    """

    max_tokens: int | None = setting(None, check_limits, "-n --max-tokens --predict --n-predict")
    min_tokens: int = setting(0, check_limits)
    temperature: float = setting(0.8, check_limits, "--temperature --temp")
    top_k: int = setting(40, check_limits)
    top_p: float = setting(0.95, check_limits)
    min_p: float = setting(0.05, check_limits)
    typical_p: float = setting(1.0, check_limits)
    top_n_sigma: float = setting(-1.0, check_limits)
    xtc_probability: float = setting(0.0, check_limits)
    xtc_threshold: float = setting(0.1, check_limits)
    dynatemp_range: float = setting(0.0, check_limits)
    dynatemp_exponent: float = setting(1.0, check_limits)
    repeat_penalty: float = setting(1.0, check_limits)
    repeat_last_n: int = setting(64, check_limits)
    presence_penalty: float = setting(0.0, check_limits)
    frequency_penalty: float = setting(0.0, check_limits)
    dry_multiplier: float = setting(0.0, check_limits)
    dry_base: float = setting(1.75, check_limits)
    dry_allowed_length: int = setting(2, check_limits)
    dry_penalty_last_n: int = setting(-1, check_limits)
    dry_sequence_breakers: Sequence[str] = setting(
        ("\n", ":", '"', "*"), _breakers, "--dry-sequence-breaker"
    )
    mirostat: int = setting(0, check_limits)
    mirostat_tau: float = setting(5.0, check_limits)
    mirostat_eta: float = setting(0.1, check_limits)
    adaptive_target: float = setting(-1.0, check_limits)
    adaptive_decay: float = setting(0.9, check_limits)
    logit_bias: Mapping[int, float] = setting(NO_BIAS, _biases, "-", hash=False)
    samplers: Sequence[str] = setting(SAMPLERS, _samplers, "--sampler")
    min_keep: int = setting(0, check_limits)
    seed: int | None = setting(None, check_limits, "-s --seed")
    stop: str | Sequence[str] = setting((), _stop_strings)
    stop_token_ids: Sequence[int] = setting((), _token_ids, "-")
    banned_strings: str | Sequence[str] = setting((), _stop_strings, "--banned-string")
    ignore_eos: bool = setting(False, boolean)
    penalize_prompt: bool = setting(True, boolean)
    logprobs: int | None = setting(None, check_limits, "-")
    prompt_logprobs: int | None = setting(None, check_limits, "-")
    grammar: str | None = setting(None, _text(MAX_GRAMMAR_BYTES))
    lark: str | None = setting(None, _text(MAX_GRAMMAR_BYTES))
    json_schema: Mapping[str, object] | str | None = setting(None, _schema, "-j --json-schema")
    regex: str | None = setting(None, _text(MAX_REGEX_BYTES))
    speculation: bool | None = setting(None, boolean, "-")

    def __post_init__(self) -> None:
        error = InvalidRequestError
        check_settings(self, error)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens, which is {self.max_tokens}"
            raise error("min_tokens", self.min_tokens, limit)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise error(given[1], getattr(self, given[1]), f"left out beside {given[0]}")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken, after penalties and biases."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if tokens are penalized for having occurred."""
        is_off = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return "penalties" in self.samplers and self.repeat_last_n != 0 and not is_off

    @property
    def has_dry(self) -> bool:
        """True if repetitions are penalized."""
        return "dry" in self.samplers and self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def changes_logits(self) -> bool:
        """True if some logits are changed, by a bias or for having occurred."""
        return bool(self.logit_bias) or self.has_penalties or self.has_dry

    @property
    def prompt_samplers(self) -> tuple[str, ...]:
        """Samplers that look at the prompt: penalties with `penalize_prompt`, and DRY."""
        is_on = {"penalties": self.has_penalties and self.penalize_prompt, "dry": self.has_dry}
        return tuple(name for name, is_needed in is_on.items() if is_needed)

    @property
    def active_samplers(self) -> tuple[str, ...]:
        """The samplers that change anything, in order."""
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
    """Return the number of tokens for a value of `repeat_last_n` or `dry_penalty_last_n`: -1 means `n_ctx`."""
    return n_ctx if last_n < 0 else last_n
