"""The commands, and how their errors look: one line on stderr, no traceback."""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cllm import CllmError, __version__
from cllm.checks import closest
from cllm.cli.habits import as_spelt_here, hint_for_command
from cllm.cli.imports import importing
from cllm.cli.texts import in_words
from cllm.removed import replacement

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
# In the order of the help.
MODULES = {
    "demo": "demo",
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "doctor": "doctor",
    "bench": "bench",
    "tune": "tune",
    "pull": "pull",
    "models": "pull",
    "info": "info",
    "tokenize": "tokenize",
    "embed": "embed",
}


def command_line(asked: str | None = None) -> typer.Typer:
    """Return the app with only the command `asked`, to import less; with all if there is no such command."""
    app = typer.Typer(
        name="cllm",
        help="One llama.cpp model as a first-class citizen of an asyncio program.",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in [asked] if asked in MODULES else MODULES:
        module = importlib.import_module(f"cllm.cli.{MODULES[name]}")
        app.command()(getattr(module, name))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from cllm.doctor.installation import llama_version

        typer.echo(f"cllm {__version__}, {llama_version()}")
        raise typer.Exit


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


def _hint(asked: list[str]) -> str:
    """Return what to type instead of a command that does not exist."""
    if not asked or asked[0] in MODULES or asked[0].startswith("-"):
        return ""
    is_misspelt = closest(asked[0], MODULES) is not None  # click names the command
    otherwise = "" if is_misspelt else "cllm generate TEXT, or cllm --help"
    return hint_for_command(asked[0]) or otherwise


def _print_anything() -> None:
    """Set the standard streams to replace characters that their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run() -> int:
    """Run the command line and return the exit code; errors are printed, or raised if CLLM_DEBUG is 1.

    It is no error if the reader of standard output has gone.
    """
    _print_anything()
    out = sys.stdout  # Typer replaces it after an error
    code = _run()
    try:
        if out is not None:
            out.flush()
    except OSError as error:
        # Python flushes again at its end.
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), out.fileno())
        if code == 0 and not isinstance(error, BrokenPipeError):
            _complain(f"cannot write standard output: {error.strerror}")
            return EXIT_FAILED
    return code


def _complain(text: str) -> None:
    from cllm.cli.terminal import complain  # slow to import

    complain(text)


def _run() -> int:
    try:
        with importing():
            commands = command_line(*sys.argv[1:2])
        # In standalone mode Typer exits by itself, and cllm's errors look like crashes.
        code = commands(as_spelt_here(sys.argv[1:], os.environ), standalone_mode=False)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.Abort:
        return EXIT_INTERRUPTED
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # Typer exits by itself then
            return 0
        raise
    except Exception as error:
        if os.environ.get("CLLM_DEBUG") == "1":
            raise
        if isinstance(error, CllmError):
            _complain(str(error))
            return EXIT_FAILED
        if hasattr(error, "format_message"):  # click's own: wrong usage
            if isinstance(error, typer.BadParameter):
                error.message = in_words(error)
            hint = replacement(getattr(error, "option_name", "")) or _hint(sys.argv[1:2])
            _complain(f"{error.format_message()} {hint and f'Instead: {hint}.'}".strip())
            return EXIT_USAGE
        _complain(f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    return code if isinstance(code, int) else 0
