"""Chat: answers the messages of a conversation, and prints the answers; input is read in `chat.py`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import anyio
from rich.console import Console

from cllm import (
    Audio,
    ChatPromptOptions,
    CllmError,
    Completion,
    Engine,
    FinishReason,
    Image,
    InvalidArgumentError,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    TokenDelta,
    TokenStream,
)
from cllm.cli.chat_files import new_chat_file, write_chat
from cllm.cli.history import History, Media, Message, Messages, Turn
from cllm.cli.terminal import (
    DIM,
    complain,
    has_styles,
    is_terminal,
    note,
    styled,
)
from cllm.cli.texts import visible
from cllm.cli.tool_file import FunctionTool, run_tool


class AnswerOutput(Protocol):
    """Destination of answers: `StandardOutput`, or `MarkdownOutput`."""

    is_terminal: bool

    async def write(self, text: str) -> None:
        """Add a text to the answer."""

    async def finish(self) -> None:
        """End the answer."""


# Answers with tool calls in one turn after which the turn ends.
MAX_ROUNDS = 16


class Chat:
    """A conversation that prints its answers.  Event loop only.

    Attributes
    ----------
    history : History
    params : SamplingParams
        Sampling parameters of the next answers.
    attached : list of str
        Texts that are put before the next message.
    media : list of Image and Audio
        Images and recordings that are put before the next message.
    has_failed : bool
        True if a message could not be answered.
    file : Path or None
        File in which `keep` keeps the chat; None: a new one.
    is_kept : bool
        False once the chat could not be written.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        system: str | None,
        out: AnswerOutput,
        tools: Mapping[str, FunctionTool] | None = None,
        effort: str | None = None,
    ) -> None:
        self._tools = tools or {}
        self._options: ChatPromptOptions = {"reasoning_effort": effort}
        if self._tools:
            self._options["tools"] = [tool.definition for tool in self._tools.values()]
        self._engine = engine
        self.params = params
        self.history: History = History(system, n_ctx=self._n_ctx())
        self.file: Path | None = None
        self.is_kept: bool = True
        self.attached: list[str] = []
        self.media: list[Image | Audio] = []
        self._out = out
        self._last: Completion | None = None
        self._stream: TokenStream | None = None
        self._is_stopped = self._is_answering = self._is_remembered = False
        self.has_failed: bool = False

    @property
    def name(self) -> str:
        """Name of the model, or of its file."""
        return self._engine.model.name or self._engine.config.model_path.name

    @property
    def model(self) -> str | None:
        """File or name of the model; None: the embedded one."""
        given = self._engine.config.model
        return None if given is None else str(Path(given).absolute())

    @property
    def is_of_toy(self) -> bool:
        """True if the embedded model answers."""
        return self._engine.config.model is None

    @property
    def modalities(self) -> tuple[str, ...]:
        """Kinds of content that the model takes: "text", "image", "audio"."""
        return self._engine.model.modalities

    def _n_ctx(self) -> int:
        # Outputs beyond the context that a model was trained for are of no use.
        return min(self._engine.model.n_ctx, self._engine.model.n_ctx_train)

    @property
    def is_answering(self) -> bool:
        """True while an answer is computed, which `stop` stops."""
        return self._is_answering

    async def switch(self, model: str) -> None:
        """Continue with another model: a file, or a name (`hf:…`).

        Raises
        ------
        CllmError
            The model cannot be used for a chat; the present one stays.
        """
        engine, present = self._engine, self._engine.config.model_path
        await engine.reload(model)
        try:
            if engine.model.chat_template is None:
                raise CllmError(f"{model} has no chat template")
            self.history.n_ctx = self._n_ctx()
            await self.recount()
        except CllmError:
            with anyio.CancelScope(shield=True):
                await engine.reload(present)
            self.history.n_ctx = self._n_ctx()
            raise

    async def recount(self) -> None:
        """Count the tokens of a chat that came from elsewhere.

        Raises
        ------
        RequestError
            The chat cannot be continued: the file of an image is gone, for example.
        """
        if turns := self.history.turns:
            n_tokens = await self.count_prompt(self.history.all_messages())
            turns[-1] = replace(turns[-1], n_tokens=n_tokens)

    def keep(self) -> None:
        """Write the chat to its file, which a chat without turns gets later; after an error, write no more."""
        if not self.is_kept or (self.file is None and not self.history.turns):
            return
        try:
            if self.file is None:
                self.file = new_chat_file()
            if self.history.turns:
                write_chat(self.file, self.history, self.model)
            else:  # all were taken back
                self.file.unlink(missing_ok=True)
                self.file = None
        except (OSError, RuntimeError, ValueError) as error:
            self.is_kept = False
            complain(f"the chat is not kept: {error}")

    async def stop(self) -> None:
        """Stop the present answer."""
        self._is_stopped = True
        if self._stream is not None:
            await self._stream.cancel()

    # --- Answers -----------------------------------------------------------------------------
    async def answer(self, message: str, media: Media = ()) -> bool:
        """Print the answer to a message, with the turns that fit the context; print an error of the request.

        Return True if the answer is a turn of the history now.
        """
        self._is_stopped, self._is_answering, self._is_remembered = False, True, False
        self.history.n_ctx = self._n_ctx()
        try:
            turns = await self.history.fitting(
                message,
                media,
                n_answer_max=self.params.max_tokens,
                count=self.count,
                count_prompt=self.count_prompt,
            )
            while not await self._answer_after(turns, message, media):
                turns = turns[1:]
        except (RequestError, InvalidArgumentError) as error:
            self.has_failed = True
            complain(str(error))
        finally:
            self._is_answering = False
        return self._is_remembered

    async def _answer_after(self, turns: list[Turn], message: str, media: Media) -> bool:
        """Print and remember an answer; return False if the prompt is too long and a turn can be dropped."""
        said: list[Message] = []
        for _ in range(MAX_ROUNDS):
            messages = [*self.history.messages(turns, message, media), *said]
            stream = self._engine.stream_chat(messages, self.params, **self._options)
            try:
                async with self._opened(stream):
                    if not said and (n_dropped := self.history.keep(turns)):
                        note(f"The context is full: the first {n_turns(n_dropped)} were dropped.")
                    completion = await self._print(stream)
            except PromptTooLongError:
                if not turns or said:
                    raise
                return False
            said.append(completion.as_message())
            if completion.finish_reason is not FinishReason.TOOL_CALLS:
                break
            for call in completion.tool_calls:
                result = await run_tool(self._tools, call)
                note(f"{call.name} {call.arguments} → {result}")
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
        else:
            note(f"The model goes on calling: stopped after {MAX_ROUNDS} rounds.")
        usage = completion.usage
        n_tokens = usage.n_prompt + usage.n_output
        self._remember(Turn(message, tuple(said), n_tokens, media), completion)
        return True

    async def _print(self, stream: TokenStream) -> Completion:
        """Write an answer as it comes, and its thoughts to standard error if that is a terminal."""
        text, shows_thoughts, is_thinking = "", is_terminal(sys.stderr), False
        try:
            async for delta in self._with_progress(stream):
                if delta.reasoning and shows_thoughts:
                    if not is_thinking:
                        await self._end_text(text)
                        is_thinking, text = True, ""
                    _print_thought(delta.reasoning)
                if delta.text:
                    if is_thinking:
                        _print_thought("\n")
                        is_thinking = False
                    text += delta.text
                    await self._out.write(delta.text)
            return await stream.completion()
        finally:
            if is_thinking:
                _print_thought("\n")
            await self._end_text(text)

    async def _end_text(self, text: str) -> None:
        """End the last line of a text that was printed."""
        if text and not text.endswith("\n"):
            await self._out.write("\n")
        await self._out.finish()

    async def _with_progress(self, stream: TokenStream) -> AsyncIterator[TokenDelta]:
        """Yield the deltas; until the first one, a terminal with styles shows how far the prompt is."""
        if has_styles(sys.stderr):
            from cllm.cli.chat_output import first_delta  # scripts do not need Markdown

            first = await first_delta(stream, self._engine, Console(file=sys.stderr))
            if first is not None:
                yield first
        async for delta in stream:
            yield delta

    def _remember(self, turn: Turn, completion: Completion) -> None:
        """Keep the answer, unless it was stopped before its text; print its statistics on a terminal."""
        is_stopped = completion.finish_reason is FinishReason.CANCELLED
        if is_stopped and not completion.text:
            note("Stopped before there was an answer; the message is taken back.")
            return
        self._last, self._is_remembered = completion, True
        self.history.turns.append(turn)
        if completion.stop_reason == "context":
            note("The context is full: the answer ends here.")
        if is_stopped or self._out.is_terminal:
            told = f"{self.name}: {_pace(completion)}"
            note(f"stopped: {told}" if is_stopped else told)

    @asynccontextmanager
    async def _opened(self, stream: TokenStream) -> AsyncIterator[TokenStream]:
        """Yield the opened stream.  Ctrl-C cancels it, also if it was pressed before the stream was open."""
        try:
            async with stream:
                self._stream = stream
                if self._is_stopped:
                    await stream.cancel()
                yield stream
        finally:
            self._stream = None

    async def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(await self._engine.tokenize(text, add_special=False))

    async def tokenize(self, text: str) -> list[tuple[int, str]]:
        """Return each token id of a text, with its text."""
        tokens = await self._engine.tokenize(text, add_special=False)
        return [(token, await self._engine.detokenize([token])) for token in tokens]

    async def count_prompt(self, messages: Messages) -> int:
        """Count the tokens of a prompt by computing it; the prefix cache keeps it for the next prompt."""
        try:
            asked = self._engine.stream_chat(messages, max_tokens=1, **self._options)
            async with self._opened(asked) as stream:
                return (await stream.completion()).usage.n_prompt
        except PromptTooLongError as error:
            return error.n_prompt

    def statistics(self) -> str:
        """Return the length of the chat, the pace of the last answer, and how much of its prompt was computed."""
        history = self.history
        # The last token of an answer that fills the context has no cell any more.
        n_tokens = min(history.n_tokens, history.n_ctx)
        lines = [f"{n_turns(len(history.turns))}, {n_tokens:,} of {history.n_ctx:,} tokens"]
        if self._last is not None:
            usage = self._last.usage
            lines.append(f"last answer: {_pace(self._last)}")
            n_computed = usage.n_prompt - usage.n_cached
            lines.append(f"last prompt: {n_computed:,} of {usage.n_prompt:,} tokens computed")
        return "\n".join(lines)


def _print_thought(text: str) -> None:
    print(styled(visible(text), DIM, sys.stderr), end="", file=sys.stderr, flush=True)


def n_turns(n: int) -> str:
    """Return a number of turns as text."""
    return f"{n} turn" if n == 1 else f"{n} turns"


def _pace(completion: Completion) -> str:
    """Return the length and the pace of an answer."""
    timings, n_output = completion.timings, completion.usage.n_output
    parts = [f"{n_output} tokens"]
    if n_output > 1 and timings.decode_s > 0:
        parts.append(f"{(n_output - 1) / timings.decode_s:,.0f} tokens/s")
    if timings.ttft_s is not None:
        parts.append(f"first after {timings.ttft_s * 1000:,.0f} ms")
    return ", ".join(parts)
