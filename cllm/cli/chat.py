"""`cllm chat`: talk to a model.

Standard output has only the answers, so that a script can use the command; notes and errors go to
standard error.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from cllm import (
    CllmError,
    Engine,
    EngineConfig,
    SamplingParams,
)
from cllm.cli.chat_commands import ChatCommands
from cllm.cli.chat_files import last_chat_file, model_of
from cllm.cli.chat_input import ChatInput, ScriptInput, unquoted
from cllm.cli.chat_session import AnswerOutput, Chat
from cllm.cli.options import TOY, EngineFlags, SamplingFlags, text_or_file, with_flags
from cllm.cli.terminal import (
    StandardOutput,
    has_styles,
    is_terminal,
    loaded,
    note,
    run,
)
from cllm.cli.tool_file import FunctionTool, load_tools


async def talk(chat: Chat, commands: ChatCommands, messages: ChatInput, *, is_kept: bool) -> None:
    """Answer messages until the input ends, a command ends the chat, or the user leaves.

    SIGINT stops an answer, or else a command, or else ends the chat.

    Parameters
    ----------
    is_kept : bool
        True if the chat is written to its file after each message.
    """
    taking: anyio.CancelScope | None = None

    async def stop_on(interrupts: AsyncIterator[signal.Signals]) -> None:
        async for _ in interrupts:
            if chat.is_answering:
                await chat.stop()
            elif taking is not None:
                taking.cancel()
            elif not messages.interrupt():
                tasks.cancel_scope.cancel()

    with anyio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on, interrupts)
            while not commands.has_ended and (message := await messages.ask()) is not None:
                with anyio.CancelScope() as taking:
                    await _take(chat, commands, message.strip())
                if taking.cancelled_caught:
                    note("Stopped.")
                taking = None
                if is_kept:
                    chat.keep()
            tasks.cancel_scope.cancel()


async def _take(chat: Chat, commands: ChatCommands, message: str) -> None:
    """Run a command, a line that begins with one slash, or answer the message; `//` stands for a slash."""
    if message.startswith("/") and not message.startswith("//"):
        await commands.obey(message)
    elif message:
        attached, media = chat.attached, chat.media
        chat.attached, chat.media = [], []
        text = "".join(attached) + unquoted(message.removeprefix("/"))
        if not await chat.answer(text, tuple(media)) and (attached or media):
            chat.attached, chat.media = attached, media
            note("The files stay before the next message.")


async def _chat(
    config: EngineConfig,
    params: SamplingParams,
    system: str | None,
    tools: Mapping[str, FunctionTool] | None,
    effort: str | None,
    continued: Path | None,
    has_markdown: bool,
) -> int:
    can_ask = is_terminal(sys.stdout) or is_terminal(sys.stderr)
    is_script = not (is_terminal(sys.stdin) and can_ask)
    async with loaded(Engine(config=config)) as engine:
        if engine.model.chat_template is None:
            name = engine.model.name or engine.config.model_path.name
            raise CllmError(f"{name} has no chat template; try cllm generate")
        chat = Chat(engine, params, system, _output(has_markdown), tools, effort)
        commands = ChatCommands(chat)
        messages = ScriptInput() if is_script else _typed(commands)
        if not is_script:
            note(f"{chat.name}, {chat.history.n_ctx:,} tokens of context, /help for help")
            if chat.is_of_toy:
                note(TOY)
        if continued is not None and await commands.load(continued):
            chat.file = continued
            if system is not None:
                chat.history.system = system
                await chat.recount()
        await talk(chat, commands, messages, is_kept=not is_script or continued is not None)
        if not is_script and chat.file is not None and chat.is_kept:
            note("The chat is kept: cllm chat --continue resumes it.")
    has_failed = chat.has_failed or (isinstance(messages, ScriptInput) and messages.has_failed)
    return 1 if is_script and has_failed else 0


def _output(has_markdown: bool) -> AnswerOutput:
    if not has_markdown:
        return StandardOutput()
    from cllm.cli.chat_output import MarkdownOutput  # scripts do not need it

    return MarkdownOutput(Console())


def _typed(commands: ChatCommands) -> ChatInput:
    # prompt_toolkit takes longer to import than a script needs for its first answer.
    from prompt_toolkit.completion import Completer, PathCompleter, WordCompleter, merge_completers

    from cllm.cli.chat_prompt import CommandCompleter, TerminalInput

    def completer(name: str) -> Completer:
        words = commands.words(name)
        paths = PathCompleter(expanduser=True)
        if words is None:
            return paths
        found = WordCompleter(list(words), sentence=True)
        return merge_completers([found, paths]) if name == "model" else found

    screen = None if is_terminal(sys.stdout) else sys.stderr
    return TerminalInput(screen, CommandCompleter(commands.names, completer))


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
    go_on: Annotated[
        bool, typer.Option("--continue", help="Resume the last chat that was kept.")
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown/--no-markdown", help="Show answers as Markdown on a terminal."),
    ] = True,
) -> int:
    """Talk to the model: it streams, remembers, calls tools, and stops on Ctrl-C."""
    functions = None if tools is None else load_tools(tools)
    told = None if system is None else text_or_file(system, "--system")
    continued = last_chat_file() if go_on else None
    if go_on and continued is None:
        note("No chat is kept yet: this is a new one.")
    if continued is not None and not ("model" in engine.given or "hf" in engine.given):
        engine.given |= {"model": [model]} if (model := model_of(continued)) else {}
    has_markdown = markdown and has_styles(sys.stdout)
    return run(
        _chat,
        engine.config(),
        sampling.params(),
        told,
        functions,
        reasoning_effort,
        continued,
        has_markdown,
    )
