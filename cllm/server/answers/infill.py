"""The prompt of a text with a gap in it, as llama-server makes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cllm import Engine, FimTokens
from cllm.checks import MAX_CHARACTERS_PER_TOKEN, MAX_TEXT_BYTES, check_lengths

Tokenize = Callable[[str], Awaitable[Sequence[int]]]
# Separator of other files for a model without a token for files; the same as in llama-server.
BETWEEN = "\n\n--- snippet ---\n\n"
REPOSITORY, FILE = "myproject\n", "filename\n"  # llama-server's: clients do not send these names
MAX_BYTES_PER_CHARACTER = 4  # of UTF-8
SUFFIX_SHARE = 4  # the suffix has 1/4 of the room, and the part that a short prefix leaves


@dataclass(frozen=True, slots=True)
class Gap:
    """A text with a gap in it.

    Attributes
    ----------
    prefix, suffix : str
        Texts before and after the gap.
    extra : sequence of (str, str)
        Names and texts of other files, the nearest last.
    middle : str
        Beginning of the text in the gap, which the model continues.
    """

    prefix: str
    suffix: str
    extra: Sequence[tuple[str, str]] = ()
    middle: str = ""


async def prompt_of_gap(engine: Engine, fim: FimTokens, gap: Gap, n_output: int = 1) -> list[int]:
    """Return the prompt for a gap, with room for `n_output` tokens in the context of the engine.

    Raises
    ------
    PromptTooLongError, TooMuchTextError
        `gap.middle` cannot fit.
    """
    check_lengths([gap.middle], engine.model.n_ctx, "prompt")

    async def tokenize(text: str) -> list[int]:
        return await engine.tokenize(text, add_special=False) if text else []

    return await infill_prompt(gap, fim, tokenize, max(1, engine.model.n_ctx - max(1, n_output)))


async def infill_prompt(gap: Gap, fim: FimTokens, tokenize: Tokenize, n_max: int) -> list[int]:
    """Return the tokens of the prompt for the text in the gap.

    Parameters
    ----------
    gap : Gap
    fim : FimTokens
    tokenize : async callable
        Returns the tokens of a text, without special tokens at its ends.
    n_max : int
        Tokens that the prompt may have.  A long prefix loses its beginning, a long suffix its end.  Other
        files get the remaining room.  `middle` is never cut, and may exceed the limit.
    """
    # Characters; the rest of a text would be cut in any case, or be too long to be tokenized at once.
    n_most = min(n_max * MAX_CHARACTERS_PER_TOKEN, MAX_TEXT_BYTES // MAX_BYTES_PER_CHARACTER)
    middle = await tokenize(gap.middle)
    prefix, suffix = await tokenize(gap.prefix[-n_most:]), await tokenize(gap.suffix[:n_most])
    begin = [] if fim.begin is None else [fim.begin]
    n_left = max(0, n_max - len(begin) - len(middle) - 3)
    n_suffix = min(len(suffix), n_left // SUFFIX_SHARE)
    n_prefix = min(len(prefix), n_left - n_suffix)
    n_suffix = min(len(suffix), n_left - n_prefix)
    extra = await _other_files(_nearest(gap.extra, n_most), fim, tokenize)
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


def _nearest(files: Sequence[tuple[str, str]], n_most: int) -> list[tuple[str, str]]:
    """Return the last files, with `n_most` characters at most; the first of them loses its beginning."""
    kept: list[tuple[str, str]] = []
    for name, text in reversed(files):
        if n_most <= 0:
            break
        kept.append((name[:n_most], text[-n_most:]))
        n_most -= len(name) + len(text) + 1
    return kept[::-1]


async def _other_files(
    files: Sequence[tuple[str, str]], fim: FimTokens, tokenize: Tokenize
) -> list[int]:
    """Return the tokens of the other files, which come before the text with the gap."""
    tokens: list[int] = []
    if fim.repository is not None:
        tokens += [fim.repository, *await tokenize(REPOSITORY)]
    for name, text in files:
        if fim.file is not None:
            tokens += [fim.file, *await tokenize(f"{name}\n")]
        else:
            tokens += await tokenize(BETWEEN)
        tokens += await tokenize(text)
    if fim.file is not None:
        tokens += [fim.file, *await tokenize(FILE)]
    return tokens
