"""The process that runs each case of the bindings' hazards in a child of its own.

The program reads numbers of cases from standard input and forks a child for each.  It does not load
libllama itself, which cannot be used after a fork.  A case takes milliseconds and can kill only its
own child.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.bindings.hazard_case import TIME_LIMIT_S, Case, Scene
from tests.bindings.hazards import CASES
from tests.reliability.forking import serve


def run_case(case: Case, scene: Scene) -> dict[str, str]:
    """Run a case; return its error and message, and under "afterwards" the error of a failed `check_alive`."""
    try:
        returned = case.act(scene)
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    else:
        return {"error": "", "message": f"returned {returned!r}"[:500]}
    try:
        scene.check_alive()
    except Exception as error:
        answer["afterwards"] = repr(error)
    return answer


def main(model_path: Path, directory: Path) -> None:
    """Serve the cases with a model."""

    def run(index: int, case_directory: Path) -> dict[str, str]:
        return run_case(CASES[index], Scene(model_path, case_directory))

    serve(run, directory, TIME_LIMIT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
