"""Choose the positions at which the memory of a sequence is saved, so that others can start there.  Pure.

Memory of one position only, that of recurrent models and of windows that slide, can be shared whole or
not at all: no sequence can take part of a longer prefix.  So it is saved where others will need it: where
two requests have diverged, for that is where the next will part from them; a little before the end of a
prompt, for the next turn of a chat has another text there as soon as its template leaves out thoughts;
and every so often.  The output of a request that may go back has its last checkpoints, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from cllm.checks import INT32_MAX

NEVER = INT32_MAX
# No two are nearer to each other: computing so few tokens takes no longer than a decode with one of them.
MIN_GAIN = 32
# Before the end of a prompt; what a template writes to let the model begin has rarely more tokens.
TAIL = 16
# Every so often: a prompt has at most so many of them, at multiples of this or of a power of two of it.
INTERVAL = 512
N_REGULAR = 8
# In an output: every so often, and how many of one output are kept.
OUTPUT_INTERVAL, N_OUTPUT_CHECKPOINTS = 64, 2


def next_checkpoint(
    n_computed: int,
    n_prompt: int,
    branch_points: Iterable[int] = (),
    *,
    n_least: int = 0,
    n_output_from: int = NEVER,
) -> int:
    """Return the next position at which the memory of a sequence must be saved; `NEVER` if there is none.

    Parameters
    ----------
    n_computed : int
        Its tokens that are computed, or shared.
    n_prompt : int
        Tokens of its prompt.
    branch_points : iterable of int
        Positions at which other sequences have diverged from it, or will.
    n_least : int
        Nowhere else before so many tokens.
    n_output_from : int
        From so many tokens on, the output of a request that may go back is kept.
    """
    step = INTERVAL
    while n_prompt > N_REGULAR * step:
        step *= 2
    first, last = max(n_computed + MIN_GAIN, n_least), n_prompt - TAIL
    regular = -(-first // step) * step
    found = [at for at in branch_points if at > n_computed]
    if first <= last:
        found.append(regular if regular + MIN_GAIN <= last else last)
    elif n_output_from != NEVER:
        found.append((max(n_computed, n_output_from) // OUTPUT_INTERVAL + 1) * OUTPUT_INTERVAL)
    return min(found, default=NEVER)
