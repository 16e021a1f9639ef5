"""LoRA adapters: what an engine has loaded, and which of them compute the tokens of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cllm.checks import check_float
from cllm.engine.file_content import FileContent
from cllm.errors import InvalidArgumentError, InvalidRequestError

# Adapters of one decode: pairs of name and scale, sorted by name, without scales of 0.
LoraSet = tuple[tuple[str, float], ...]

MAX_SCALE = 1e4
MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A loaded adapter.

    Attributes
    ----------
    path : str
        File of the adapter.
    scale : float
        Scale for requests that name no adapters; 0: such requests do not use the adapter.
    invocation_tokens : tuple of int
        Tokens that activate an activated LoRA (aLoRA).  It computes from their last occurrence in a prompt
        on; without them it is not used.  Empty: the adapter computes all tokens.
    content : FileContent or None
        Digest of the file when it was loaded.
    """

    name: str
    path: str
    scale: float = 0.0
    invocation_tokens: tuple[int, ...] = ()
    content: FileContent | None = None


@dataclass(frozen=True, slots=True)
class LoraUse:
    """The adapters that compute the tokens of a request.

    Attributes
    ----------
    loras : LoraSet
        Adapters of the tokens from `start` on.
    before : LoraSet
        Adapters of the tokens before.
    start : int
        Position at which the set changes.
    """

    loras: LoraSet = ()
    before: LoraSet = ()
    start: int = 0

    @property
    def names(self) -> set[str]:
        """Names of all these adapters."""
        return {name for name, _ in (*self.loras, *self.before)}

    def at(self, position: int) -> LoraSet:
        """Return the adapters that compute the token at this position."""
        return self.loras if position >= self.start else self.before

    def n_until_change(self, position: int) -> float:
        """Return the number of tokens from `position` on with the same adapters; inf if they never change."""
        return self.start - position if position < self.start else math.inf

    def n_alike(self, other: LoraUse) -> float:
        """Return the number of first positions with the same adapters as `other`; inf if all are equal."""
        for position in sorted({0, self.start, other.start}):
            if self.at(position) != other.at(position):
                return position
        return math.inf

    def uses(self, name: str) -> bool:
        """Return True if an adapter of this name computes any token of the request."""
        return any(lora == name for lora, _ in (*self.loras, *self.before))


NO_LORA = LoraUse()


def check_lora(lora: object) -> dict[str, float] | None:
    """Return the checked adapters of a request: names and scales; None if it names none.

    Raises
    ------
    InvalidRequestError
    """
    if lora is None:
        return None
    if not isinstance(lora, Mapping):
        raise InvalidRequestError("lora", lora, "a mapping from names of adapters to scales")
    return {
        check_lora_name(name): check_float(
            f"lora[{name!r}]", scale, -MAX_SCALE, MAX_SCALE, InvalidRequestError
        )
        for name, scale in lora.items()
    }


def check_lora_name(
    name: object,
    error: type[InvalidArgumentError | InvalidRequestError] = InvalidRequestError,
    field: str = "lora",
) -> str:
    """Return the checked name of an adapter."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise error(field, name, f"a name of an adapter: 1 to {MAX_NAME} printable characters")
    return name


def lora_use(
    wanted: Mapping[str, float] | None, loaded: Mapping[str, LoraInfo], tokens: Sequence[int]
) -> LoraUse:
    """Return the adapters that compute a request.

    Parameters
    ----------
    wanted : mapping or None
        Names and scales that the request gives; None: all loaded adapters with their own scales.
    loaded : mapping
        Loaded adapters by name.
    tokens : sequence of int
        Prompt, in which an aLoRA looks for its invocation tokens.

    Raises
    ------
    InvalidRequestError
        An adapter is not loaded, or more than one aLoRA is used.
    """
    if wanted is None:
        wanted = {name: info.scale for name, info in loaded.items()}
    for name in wanted:
        if name not in loaded:
            known = ", ".join(sorted(loaded)) or "none is loaded"
            raise InvalidRequestError("lora", name, f"the name of a loaded adapter: {known}")
    used = {name: scale for name, scale in sorted(wanted.items()) if scale}
    if not used:
        return NO_LORA
    activated = [name for name in used if loaded[name].invocation_tokens]
    if not activated:
        return LoraUse(tuple(used.items()))
    if len(activated) > 1:
        raise InvalidRequestError("lora", activated, "one activated adapter (aLoRA) at most")
    always = tuple((name, scale) for name, scale in used.items() if name != activated[0])
    start = _last_place(loaded[activated[0]].invocation_tokens, tokens)
    if start is None:
        return LoraUse(always)
    return LoraUse(tuple(used.items()), always, start)


def _last_place(wanted: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Return the last position at which `wanted` begins in `tokens`; None if it does not occur."""
    wanted = tuple(wanted)
    for start in range(len(tokens) - len(wanted), -1, -1):
        if tuple(tokens[start : start + len(wanted)]) == wanted:
            return start
    return None
