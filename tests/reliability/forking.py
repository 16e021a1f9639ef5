"""The loop of the servers of hazard cases: each case runs in a child, forked before libllama is loaded."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def serve(run_case: Callable[[int, Path], dict[str, str]], directory: Path, limit_s: int) -> None:
    """Read numbers of cases from standard input, a line each; write the outcome of each as a line of JSON.

    Parameters
    ----------
    run_case : callable
        Runs a case in the child, given its number and a new directory.  SIGALRM ends it after `limit_s`.
    """
    gc.freeze()
    for line in sys.stdin:
        index = int(line)
        case_directory = directory / str(index)
        case_directory.mkdir()
        answer = case_directory / "answer.json"
        pid = os.fork()
        if pid == 0:
            signal.alarm(limit_s)
            answer.write_text(json.dumps(run_case(index, case_directory)))
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        outcome = json.loads(answer.read_text()) if answer.exists() else {}
        if os.WIFSIGNALED(status):
            outcome["died"] = signal.Signals(os.WTERMSIG(status)).name
        elif status:
            outcome["died"] = f"exit code {os.waitstatus_to_exitcode(status)}"
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()
