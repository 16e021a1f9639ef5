"""A check of the engine itself: identical requests between others, with its prefix cache."""

from __future__ import annotations

from pathlib import Path

import anyio

from cllm import CllmError, Engine
from cllm.doctor.diagnosis import STEADY, growth
from cllm.doctor.findings import Check, Plan, Status

N_SEQ_MAX = 4


def engine_check(path: Path, plan: Plan, *, n_threads: int) -> Check:
    """Compare the decode times of the first and the last of identical requests to an engine.

    Another prompt is computed before each of them, so that the prefix cache fills.  Starts an event loop: do not
    call it from a coroutine.

    Parameters
    ----------
    plan : Plan
        Number and shape of the requests.
    n_threads : int
        Compute threads.
    """
    try:
        measured = anyio.run(_serve, path, plan, n_threads, backend_options={"debug": False})
    except CllmError as error:  # an engine needs more than the checks and experiments before
        return Check("engine", Status.FAILED, str(error))
    return check_times(*measured)


def check_times(decode_s: list[float], n_cells: list[int]) -> Check:
    """Return the check for the seconds in `llama_decode` of each request, and the cells in use after it."""
    ratio = growth(decode_s)
    text = (
        f"{len(decode_s)} identical requests to the engine, with others between; cells of finished "
        f"requests {n_cells[0]:,} → {n_cells[-1]:,}; decode time of the last quarter over the first: ×{ratio:.2f}"
    )
    if ratio <= STEADY:
        return Check("engine", Status.OK, text)
    text += ": other load, heat, or a fault of cllm; repeat it on a quiet machine"
    return Check("engine", Status.WARNING, text)


async def _serve(path: Path, plan: Plan, n_threads: int) -> tuple[list[float], list[int]]:
    """Run the requests; return the seconds in `llama_decode` of each, and the cells that are cached after it."""
    n_prompt, n_output = plan.shape.n_prompt, plan.shape.n_output
    decode_s: list[float] = []
    n_cells: list[int] = []
    async with Engine(
        path,
        n_ctx=2 * max(plan.n_ctx, N_SEQ_MAX * plan.shape.n_rows),
        n_seq_max=N_SEQ_MAX,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        tune=None,
    ) as engine:
        n_vocab = engine.model.n_vocab

        async def run(first: int) -> float:
            before = engine.statistics()
            # Token ids: prompts of equal length that differ from the first token on.
            prompt = [(first + i) % n_vocab for i in range(n_prompt)]
            await engine.generate(prompt, max_tokens=n_output, ignore_eos=True, temperature=0)
            after = engine.statistics()
            n_cells.append(after.n_kv_cells_cached)
            return after.tick_times.decode_s - before.tick_times.decode_s

        await run(0)  # computes the prompt that the others find in the cache
        n_cells.clear()
        for number in range(plan.n_requests):
            await run(n_prompt * (number + 1))
            n_cells.pop()
            decode_s.append(await run(0))
    return decode_s, n_cells
