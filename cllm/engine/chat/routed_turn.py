"""Turns made of messages with headers that say to whom each goes: harmony and its kin.  Pure.

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
        """A piece of the answer."""

    def reasoning(self, text: str) -> None:
        """A piece of reasoning."""

    def fail(self) -> None:
        """Discard a call that was held back."""

    def mark(self) -> None:
        """Mark the position from which text is content if the text ends before it becomes anything else."""

    def untold(self) -> str:
        """Return the text read since `mark` that was not reported."""

    def knows(self, name: str) -> bool:
        """Return True if a tool of this name was offered."""


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """Messages with headers.

    Attributes
    ----------
    message : str
        Ends a header.
    ends : tuple of str
        End a message that is no call.
    reasoning_route, content_route : str
        Regular expressions for headers.
    call_route : str
        The same for calls; its group "name" is the tool.
    calls : CallSyntax, optional
        How the message of a call is written; None: as JSON.
    call_ends : tuple of str
    header : str
        A regular expression for headers that were cut off, which are not content.
    words : str
        The same for what may stand in a header.
    thought_written : (str, str)
        What the model writes before and behind a thought.
    call_written : str
        The header of a call as the model writes it, with `{name}` in it.
    answer_written, others_written : str, tuple of str
        The header of an answer, and those of other messages that are no calls.
    between : str
        What ends a message that is no call and begins the next one.
    answers, answer : tuple of str, str
        Headers that begin an answer behind thoughts; what ends a thought and begins an answer.
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
        """Return the content of a text that is no message, without its marker or a header that was cut off."""
        text = text.removeprefix(self.start)
        return "" if re.fullmatch(self.header, text) else text

    def read(self, reader: TextReader, sink: TurnSink) -> Step[None]:
        """All messages, to the end of the text.

        Raises
        ------
        EndOfTextError
            Inside of a header or a call.
        """
        while not (yield from reader.is_at_end()):
            mark = reader.hold()
            sink.mark()
            try:
                yield from self._message(reader, sink)
            except EndOfTextError:
                raise
            except MismatchError:
                # Not a header, or not a call: whatever it is, it is text.
                sink.fail()
                reader.at = max(reader.at, mark + 1)
                sink.content(self.text_of(sink.untold()))
            reader.release()

    def _message(self, reader: TextReader, sink: TurnSink) -> Step[None]:
        mark = reader.at
        yield from reader.accept(self.start)
        header = yield from self._header(reader)
        if header is None:
            return
        name = self._called(header, sink)
        reasons = re.search(self.reasoning_route, header) is not None
        answers = re.search(self.content_route, header) is not None
        if name is None and not (reasons or answers):
            sink.between(self.text_of(reader.since(mark)))
        elif (others := re.sub(self.words, "", header)).strip():
            sink.between(others)  # what is no part of a header is not lost in one
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
        """The tool that a header calls, if it calls one."""
        match = re.search(self.call_route, header)
        if match is None:
            return None
        name = match["name"]
        return name if match.groupdict().get("own") is not None or sink.knows(name) else None

    def _header(self, reader: TextReader) -> Step[str | None]:
        """Up to the message; None if it ends without one."""
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
    header=r"(?: to=[\w.]*)?(?:<\|channel\|>(?:analysis|commentary|final)?)?(?: to=[\w.]*)?(?: ?<\|constrain\|>(?:json)?)?",
    words=r"<\|(?:channel|constrain)\|>|to=[\w.-]*|\b(?:analysis|commentary|final|json|code|assistant)\b",
    thought_written=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    call_written="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    answer_written="<|channel|>final<|message|>",
    others_written=("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
    between="<|end|><|start|>assistant",
    answers=("<|channel|>final<|message|>", "<|channel|>commentary"),
    answer="<|end|><|start|>assistant<|channel|>final<|message|>",
    markers=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
)
