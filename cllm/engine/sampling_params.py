"""SamplingParams: how to choose the tokens of one request; a frozen value that validates itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from cllm.checks import MAX_SEED, check_float, check_int
from cllm.errors import InvalidRequestError

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request; llama-server's names and defaults.

    Parameters
    ----------
    max_tokens : int, optional
        At most so many output tokens; None: until the model ends or the context is full.
    temperature : float
        0 is greedy; otherwise 0.001 to 100.
    top_k : int
        Keep the k most likely tokens; 0 or -1 keeps all.
    top_p, min_p : float
        0 to 1; 1 and 0 switch them off.
    seed : int, optional
        0 to 2³² - 2; None draws one.
    stop : str or sequence of str
        Text that ends the output and is not part of it.  At most 64, of at most 1,024 bytes.
    stop_token_ids : sequence of int
        Tokens that end the output like an end-of-generation token.

    Raises
    ------
    InvalidRequestError
        Names the field, the value and the limit.
    """

    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        error = InvalidRequestError
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, error)
        check_float("temperature", self.temperature, 0.0, 100.0, error)
        if 0.0 < self.temperature < 1e-3:
            raise error("temperature", self.temperature, "0 or at least 0.001")
        check_int("top_k", self.top_k, -1, 2**31 - 1, error)
        check_float("top_p", self.top_p, 0.0, 1.0, error)
        check_float("min_p", self.min_p, 0.0, 1.0, error)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED, error)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        ids_given = self.stop_token_ids
        if isinstance(ids_given, str | bytes) or not isinstance(ids_given, Iterable):
            raise error("stop_token_ids", self.stop_token_ids, "a sequence of token ids")
        ids = tuple(
            check_int("stop_token_ids", t, 0, 2**31 - 1, error) for t in self.stop_token_ids
        )
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or isinstance(strings, bytes):
        raise InvalidRequestError("stop", stop, "a string or a sequence of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", len(strings), f"at most {MAX_STOP_STRINGS} strings")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError("stop", text, "a string that is not empty")
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError("stop", text, f"at most {MAX_STOP_BYTES} bytes long")
    return tuple(strings)
