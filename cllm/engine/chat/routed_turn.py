"""Turns of messages with headers that name the recipient of each message: harmony and similar formats.  Pure.

`<|start|>assistant<|channel|>analysis<|message|>…<|end|>` is reasoning, `to=functions.name` a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from cllm.engine.chat.call_syntax import CallSink, CallSyntax
from cllm.engine.chat.text_reader import EndOfTextError, MismatchError, Step, TextReader

MAX_HEADER = 512


class TurnSink(CallSink, Protocol):
    """Receiver of all channels."""

    def content(self, text: str) -> None:
        """Add a piece of the answer."""

    def reasoning(self, text: str) -> None:
        """Add a piece of reasoning."""

    def fail(self) -> None:
        """Discard a call that was held back."""

    def mark(self) -> None:
        """Mark the current position: text after it is content if it turns out to be no message."""

    def untold(self) -> str:
        """Return the text read since `mark` that was not reported."""

    def knows(self, name: str) -> bool:
        """Return True if a tool of this name was offered."""


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """Messages with headers.

    Attributes
    ----------
    start, message : str
        Optional text before a header; text between a header and its message.
    ends : tuple of str
        Alternatives for the end of a message.
    reasoning_route, content_route : str
        Regular expressions for the headers of reasoning and of content.
    call_route : str
        Regular expression for the headers of calls.  Group "name" is the tool.  The tool must have
        been offered, unless there is a match of a group "own".
    calls : CallSyntax, optional
        Syntax of the message of a call; None: the arguments as JSON.
    call_ends : tuple of str
        Further alternatives for the end of a call.
    header : str
        Regular expression for headers that were cut off, which are not content.
    words : str
        Regular expression for the words of a header; other text in a header is content.
    thought_written : (str, str)
        Text that the model writes before and after a thought.
    call_written : str
        Header of a call as the model writes it, with `{name}` for the tool.
    answer_written, others_written : str, tuple of str
        Header of an answer, and headers of other messages that are not calls.
    between : str
        Text that ends a message that is not a call and begins the next one.
    answers, answer : tuple of str, str
        Headers that begin an answer after thoughts; text that ends a thought and begins an answer.
    markers : tuple of str
        Control tokens of the format.
    """

    message: str
    ends: tuple[str, ...]
    reasoning_route: str
    content_route: str
    call_route: str
    call_ends: tuple[str, ...] = ()
    calls: CallSyntax | None = None
    start: str = ""
    header: str = "(?!)"
    words: str = "(?s:.+)"
    thought_written: tuple[str, str] = ("", "")
    call_written: str = ""
    answer_written: str = ""
    others_written: tuple[str, ...] = ()
    between: str = ""
    answers: tuple[str, ...] = ()
    answer: str = ""
    markers: tuple[str, ...] = field(default=())

    def text_of(self, text: str) -> str:
        """Return a text that is not a message, without `start`; "" if it is a header that was cut off."""
        text = text.removeprefix(self.start)
        return "" if re.fullmatch(self.header, text) else text

    def read(self, reader: TextReader, sink: TurnSink) -> Step[None]:
        """Read all messages up to the end of the text.

        Raises
        ------
        EndOfTextError
            The text ends inside a header or a call.
        """
        while not (yield from reader.is_at_end()):
            mark = reader.hold()
            sink.mark()
            try:
                yield from self._message(reader, sink)
            except EndOfTextError:
                raise
            except MismatchError:
                # Text that is neither a message with a header nor a call is content.
                sink.fail()
                reader.at = max(reader.at, mark + 1)
                sink.content(self.text_of(sink.untold()))
            reader.release()

    def _message(self, reader: TextReader, sink: TurnSink) -> Step[None]:
        mark = reader.at
        yield from reader.accept(self.start)
        header = yield from self._header(reader)
        name = self._called(header, sink)
        reasons = re.search(self.reasoning_route, header) is not None
        answers = re.search(self.content_route, header) is not None
        if name is None and not (reasons or answers):
            sink.between(self.text_of(reader.since(mark)))
        elif (others := re.sub(self.words, "", header)).strip():
            sink.between(others)  # text that does not belong in a header is content
        if name is not None:
            yield from self._call(name, reader, sink)
            return
        emit = sink.reasoning if reasons and not answers else sink.content
        reader.release()
        try:
            yield from reader.until(*self.ends, emit=emit)
        except EndOfTextError:
            return

    def _called(self, header: str, sink: TurnSink) -> str | None:
        """Return the tool that a header calls; None if it calls none, or an unknown one without "own"."""
        match = re.search(self.call_route, header)
        if match is None:
            return None
        name = match["name"]
        return name if match.groupdict().get("own") is not None or sink.knows(name) else None

    def _header(self, reader: TextReader) -> Step[str]:
        """Read a header up to `message`, and return it; `MismatchError` if another marker ends it."""
        header, marker = yield from reader.until(self.message, *self.ends, limit=MAX_HEADER)
        if marker != self.message:
            raise MismatchError
        return header

    def _call(self, name: str, reader: TextReader, sink: TurnSink) -> Step[None]:
        if self.calls is not None:
            yield from reader.skip_space()
            trigger = yield from reader.accept_any(self.calls.triggers)
            if trigger is None:
                raise MismatchError
            yield from self.calls.read(trigger, reader, sink)
        else:
            sink.begin(name)
            yield from reader.skip_space()
            if (yield from reader.peek()) != "{":
                raise MismatchError
            yield from reader.json(sink.arguments)
            sink.end()
        yield from reader.skip_space()
        yield from reader.accept_any((*self.call_ends, *self.ends))


HARMONY = RoutedTurn(
    start="<|start|>assistant",
    message="<|message|>",
    ends=("<|end|>", "<|return|>"),
    call_ends=("<|call|>",),
    call_route=r"to=(?P<own>functions\.)?(?P<name>[^\s<]+)(?!.*to=)",
    reasoning_route=r"<\|channel\|>\s*analysis[^|]*$",
    content_route=r"<\|channel\|>\s*(final|commentary)[^|]*(<\|constrain\|>[^|]*)?$|^\s*$",
    header=r"(?: to=[^\s<]*)?(?:<\|channel\|>(?:analysis|commentary|final)?)?(?: to=[^\s<]*)?(?: ?<\|constrain\|>(?:json)?)?",
    words=r"<\|(?:channel|constrain)\|>|to=[^\s<]*|\b(?:analysis|commentary|final|json|code|assistant)\b",
    thought_written=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    call_written="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    answer_written="<|channel|>final<|message|>",
    others_written=("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
    between="<|end|><|start|>assistant",
    answers=("<|channel|>final<|message|>", "<|channel|>commentary"),
    answer="<|end|><|start|>assistant<|channel|>final<|message|>",
    markers=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
)
