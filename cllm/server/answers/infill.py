"""The prompt of a text with a gap in it, as llama-server makes it.  Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cllm import FimTokens

Tokenize = Callable[[str], Awaitable[Sequence[int]]]
# Where the model knows no files; in llama-server's words.
BETWEEN = "\n\n--- snippet ---\n\n"
REPOSITORY, FILE = "myproject\n", "filename\n"  # llama-server's, for those that clients do not tell
SUFFIX_SHARE = 4  # of what fits, one part in so many at most


@dataclass(frozen=True, slots=True)
class Gap:
    """A text with a gap in it.

    Attributes
    ----------
    prefix, suffix : str
        Before the gap, and after it.
    extra : sequence of (str, str)
        Names and texts of other files, the nearest last.
    middle : str
        The beginning of what is filled in.
    """

    prefix: str
    suffix: str
    extra: Sequence[tuple[str, str]] = ()
    middle: str = ""


async def infill_prompt(gap: Gap, fim: FimTokens, tokenize: Tokenize, n_max: int) -> list[int]:
    """Return the tokens of the prompt for the text in the gap.

    Parameters
    ----------
    gap : Gap
    fim : FimTokens
    tokenize : async callable
        Tokens of a text in the midst of a prompt.
    n_max : int
        Tokens that the prompt may have.  The prefix keeps its end, the suffix its beginning; other
        files have what is left.
    """
    middle = await tokenize(gap.middle)
    prefix, suffix = await tokenize(gap.prefix), await tokenize(gap.suffix)
    begin = [] if fim.begin is None else [fim.begin]
    n_left = max(0, n_max - len(begin) - len(middle) - 3)
    n_suffix = min(len(suffix), n_left // SUFFIX_SHARE)
    n_prefix = min(len(prefix), n_left - n_suffix)
    n_suffix = min(len(suffix), n_left - n_prefix)
    extra = await _other_files(gap, fim, tokenize)
    n_extra = min(len(extra), n_left - n_prefix - n_suffix)
    return [
        *extra[len(extra) - n_extra :],
        *begin,
        fim.prefix,
        *prefix[len(prefix) - n_prefix :],
        *middle,
        fim.suffix,
        *suffix[:n_suffix],
        fim.middle,
    ]


async def _other_files(gap: Gap, fim: FimTokens, tokenize: Tokenize) -> list[int]:
    """Return the tokens of the other files, which come before the text with the gap."""
    tokens: list[int] = []
    if fim.repository is not None:
        tokens += [fim.repository, *await tokenize(REPOSITORY)]
    for name, text in gap.extra:
        if fim.file is not None:
            tokens += [fim.file, *await tokenize(f"{name}\n")]
        else:
            tokens += await tokenize(BETWEEN)
        tokens += await tokenize(text)
    if fim.file is not None:
        tokens += [fim.file, *await tokenize(FILE)]
    return tokens
