"""The command `cllm` from its first moment on: outside the package, whose import takes a while."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line.  A signal to end during its import ends the process as a later one does."""
    if sys.argv[1:2] == [
        "serve"
    ]:  # from here on nothing runs that could be lost, until it hears signals itself
        signal.signal(signal.SIGTERM, _leave)
    try:
        from cllm.__main__ import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(_number: int, _frame: object) -> None:
    os._exit(0)
