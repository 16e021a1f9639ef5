"""Choose the positions at which the memory of a sequence is saved, so that others can start there.  Pure.

Memory of recurrent models and of sliding windows belongs to one position, and can be shared as a whole
only.  So it is saved where later requests will need it:

- where two requests have diverged, because the next one will probably diverge there too;
- a little before the end of a prompt, because a template may write the answer differently in the next turn;
- at regular intervals.

The output of a request that may be rewound has checkpoints too, of which the last ones are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from cllm.checks import INT32_MAX

NEVER = INT32_MAX
# A checkpoint must save at least so many tokens: computing fewer takes no longer than a decode of one.
MIN_GAIN = 32
# Tokens after the last checkpoint of a prompt: the text with which a template begins an answer rarely
# has more.
TAIL = 16
# Regular checkpoints of a prompt: at multiples of `INTERVAL`, doubled until at most `N_REGULAR` fit.
INTERVAL = 512
N_REGULAR = 8
# Tokens between two checkpoints of an output, and number of its checkpoints that are kept.
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
        Smallest position of a checkpoint in the prompt, except at branch points.
    n_output_from : int
        Position after which the output has checkpoints; `NEVER` for none.
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
