"""The commands, and how their errors look: one line on stderr, no traceback."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from cllm import CllmError
from cllm.cli.bench import bench
from cllm.cli.chat import chat
from cllm.cli.demo import demo
from cllm.cli.doctor import doctor
from cllm.cli.generate import generate
from cllm.cli.info import info
from cllm.cli.pull import models, pull
from cllm.cli.serve import serve
from cllm.cli.tokenize import tokenize
from cllm.doctor.installation import llama_version

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="cllm",
    help="One llama.cpp model as a first-class citizen of an asyncio program.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(doctor)
app.command()(bench)
app.command()(pull)
app.command()(models)
app.command()(info)
app.command()(tokenize)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cllm {version('cllm')}, {llama_version()}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> int:
    """Run the command line and return the exit code."""
    try:
        # Typer would exit by itself: then an error of ours could not be told from a crash.
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("CLLM_DEBUG") == "1":
            raise
        if isinstance(error, CllmError):
            print(f"cllm: {error}", file=sys.stderr)
            return EXIT_FAILED
        if hasattr(error, "format_message"):  # click's own: wrong usage
            print(f"cllm: {error.format_message()}", file=sys.stderr)
            return EXIT_USAGE
        print(f"cllm: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return code if isinstance(code, int) else 0
