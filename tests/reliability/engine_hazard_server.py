"""The process that runs each case of the engine's hazards in a child of its own.

The program reads numbers of cases from standard input and forks a child for each.  It does not load
libllama itself, which cannot be used after a fork.  A case can kill only its own child.  It shares its
engine with a bystander, a request whose answer must be right whatever the case does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import anyio

from cllm import Engine
from tests.reliability.engine_hazard_case import (
    ANSWER,
    OPTIONS,
    QUESTION,
    STREAM_BUFFER,
    Case,
    Scene,
)
from tests.reliability.engine_hazards import CASES
from tests.reliability.forking import serve

TIME_LIMIT_S, ACT_LIMIT_S = 40, 30
BYSTANDER = "count:10..18"
BYSTANDER_ANSWER = " ".join(map(str, range(10, 19)))


async def run_case(case: Case, directory: Path) -> dict[str, str]:
    """Run a case; return its error and message, and under "afterwards" the faults that it caused."""
    async with Engine(**OPTIONS, **case.options(), stream_buffer=STREAM_BUFFER) as engine:
        outcome: dict[str, str] = {}
        async with engine.stream(BYSTANDER, temperature=0) as bystander:
            await anext(bystander)
            outcome = await attempt(case, Scene(engine, directory))
            text = (await bystander.completion()).text
        wrong = []
        if text != BYSTANDER_ANSWER:
            wrong.append(f"the bystander got {text!r}")
        if found := await engine.audit():
            wrong.append(f"the audit found {found}")
        if (text := (await engine.generate(QUESTION, temperature=0)).text) != ANSWER:
            wrong.append(f"the next request got {text!r}")
        # The last event of a request is sent before its cells are counted as free.
        await engine.audit()
        statistics = engine.statistics()
        if statistics.n_running or statistics.n_waiting or statistics.n_kv_cells_used:
            wrong.append(f"something is left: {statistics}")
    if wrong:
        outcome["afterwards"] = "; ".join(wrong)
    return outcome


async def attempt(case: Case, scene: Scene) -> dict[str, str]:
    """Run the action of a case, and return the name and message of its error."""
    try:
        with anyio.fail_after(ACT_LIMIT_S):
            returned = await case.act(scene)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "", "message": f"returned {returned!r}"[:500]}


def run(index: int, directory: Path) -> dict[str, str]:
    """Run the case of a number."""
    return asyncio.run(run_case(CASES[index], directory))


if __name__ == "__main__":
    serve(run, Path(sys.argv[1]), TIME_LIMIT_S)
