"""`cllm chat`: talk to a model.

Standard output has only the answers, so that a script can use the command; notes and errors go to
standard error.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import anyio
import typer

from cllm import (
    CllmError,
    Engine,
    EngineConfig,
    SamplingParams,
)
from cllm.cli.chat_commands import ChatCommands
from cllm.cli.chat_session import Chat
from cllm.cli.options import TOY, EngineFlags, SamplingFlags, text_or_file, with_flags
from cllm.cli.terminal import (
    BOLD,
    StandardOutput,
    is_terminal,
    loaded,
    note,
    run,
    styled,
)
from cllm.cli.tool_file import FunctionTool, load_tools

with suppress(ImportError):  # Python may be built without; then `input` has no editing
    import readline  # noqa: F401

SEVERAL_LINES = '"""'  # begins a message of several lines, and ends it


async def talk(chat: Chat) -> None:
    """Answer messages until the input ends, a command ends the chat, or Ctrl-C is pressed at the prompt."""
    commands = ChatCommands(chat)
    if is_terminal(sys.stdin):
        note(f"{chat.name}, {chat.history.n_ctx:,} tokens of context, /help for help")
        if chat.is_of_toy:
            note(TOY)

    async def stop_on(interrupts: AsyncIterator[signal.Signals]) -> None:
        # At the prompt Ctrl-C does not come here, see `_ask`.
        async for _ in interrupts:
            await chat.stop()

    with anyio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on, interrupts)
            while not commands.has_ended and (message := _ask_message()) is not None:
                await _take(chat, commands, message.strip())
            tasks.cancel_scope.cancel()


async def _take(chat: Chat, commands: ChatCommands, line: str) -> None:
    """Run a command, a line that begins with one slash, or answer the line; `//` stands for a slash."""
    if line.startswith("/") and not line.startswith("//"):
        await commands.obey(line)
    elif line:
        attached, chat.attached = "".join(chat.attached), []
        media, chat.media = tuple(chat.media), []
        await chat.answer(attached + line.removeprefix("/"), media)


def _ask_message() -> str | None:
    """Return the next message: a line, or lines from three quotes to three quotes; None as for `_ask`."""
    line = _ask()
    if line is None or not line.lstrip().startswith(SEVERAL_LINES):
        return line
    lines = [line.lstrip().removeprefix(SEVERAL_LINES)]
    while not lines[-1].rstrip().endswith(SEVERAL_LINES):
        if (line := _ask("… ")) is None:
            return None
        lines.append(line)
    lines[-1] = lines[-1].rstrip().removesuffix(SEVERAL_LINES)
    return "\n".join(lines)


def _ask(prompt: str = "> ") -> str | None:
    """Return the next line; None at the end of the input or on Ctrl-C.

    Blocks the event loop, which has nothing else to do: an answer has ended before this is called,
    and `input` with its editing can be interrupted on the main thread only.
    """
    if sys.stdin is None:
        return None
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if not is_terminal(sys.stdin):
            return input()
        if not is_terminal(sys.stdout):
            print(prompt, end="", file=sys.stderr, flush=True)
            return input()
        prompt = styled(prompt, BOLD, sys.stdout)
        if "readline" in sys.modules:  # it must know which characters have no width
            prompt = re.sub("(\x1b.*?m)", "\x01\\1\x02", prompt)
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        if is_terminal(sys.stdin):
            print(file=sys.stderr)
        return None
    finally:
        signal.signal(signal.SIGINT, previous)


async def _chat(
    config: EngineConfig,
    params: SamplingParams,
    system: str | None,
    tools: Mapping[str, FunctionTool] | None,
    effort: str | None,
) -> int:
    is_script = not is_terminal(sys.stdin)
    async with loaded(Engine(config=config)) as engine:
        if engine.model.chat_template is None:
            name = engine.model.name or engine.config.model_path.name
            raise CllmError(f"{name} has no chat template; try cllm generate")
        chat = Chat(engine, params, system, StandardOutput(), tools, effort)
        await talk(chat)
    return 1 if is_script and chat.has_failed else 0


@with_flags(n_seq_max=1)
def chat(
    engine: EngineFlags,
    sampling: SamplingFlags,
    system: Annotated[str | None, typer.Option(help="System message: text, or @FILE.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="A Python file; the model may call its functions.")
    ] = None,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="How much the model thinks: from none to max.")
    ] = None,
) -> int:
    """Talk to the model: it streams, remembers, calls tools, and stops on Ctrl-C."""
    functions = None if tools is None else load_tools(tools)
    told = None if system is None else text_or_file(system, "--system")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    config = engine.config()
    return run(_chat, config, sampling.params(), told, functions, reasoning_effort)
