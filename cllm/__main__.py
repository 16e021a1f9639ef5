"""`cllm` and `python -m cllm`: the command line, which needs the extra `cli`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit; without the extra `cli`, print how to install it, and exit with 2."""
    try:
        from cllm.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print("cllm needs the extra cli: pip install 'cllm[cli]'", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    sys.exit(run())


if __name__ == "__main__":
    main()
