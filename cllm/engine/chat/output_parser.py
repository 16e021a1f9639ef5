"""OutputParser: split the text of an answer, as it arrives, into reasoning, content and calls.  Pure.

No text is lost and no error is raised: text that is not a call is content.  Only markers, and white space
beside them, are dropped.  The result does not depend on how the text was divided into pieces.

A call is held back until it is complete, so that no program runs half a call.  A long call is held back
until its arguments have `N_HELD` characters, and streams from then on.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cllm.engine.chat.call_syntax import CallSyntax, TaggedCalls
from cllm.engine.chat.message_checks import MAX_ID, is_name
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.text_reader import (
    SPACE,
    EndOfTextError,
    Markers,
    MismatchError,
    Step,
    TextReader,
)
from cllm.engine.chat.tool_schema import ANYTHING, Tool, ValueSchema, parameters_of
from cllm.engine.output import ToolCallDelta

N_HELD = 256
# A failed call of more characters is content as a whole: it is not searched for calls again.
MAX_REREAD = 4096


@dataclass(slots=True)
class ParsedText:
    """Text that one piece added to each channel."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser:
    """Parser that splits one answer into its channels.

    Parameters
    ----------
    output_format : OutputFormat
    tools : sequence of ToolParameters or mapping, optional
        Tools that were offered; their schemas decide which arguments are strings.
    prefix : str
        Markers at the end of the prompt, which decide in which channel the answer begins.
    call_ids : CallIds, optional
        Ids for calls without one.
    allows_several : bool
        False if calls after the first one are left out.

    Attributes
    ----------
    call_ids : CallIds
    n_calls : int
        Number of calls that have begun, including one that is held back.
    n_ended : int
        Number of calls that have come to their end; a call that was reported in part may have none.
    is_reasoning : bool
        True while reasoning is read; always False for a format with a `turn`.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Iterable[Tool] = (),
        *,
        prefix: str = "",
        call_ids: CallIds | None = None,
        allows_several: bool = True,
    ) -> None:
        self._allows_several = allows_several
        self._is_left_out = False  # the call that is being read
        self._format = output_format
        self._tools = {tool.name: tool for tool in parameters_of(tools)}
        self._reader = TextReader()
        self.call_ids: CallIds = CallIds("call") if call_ids is None else call_ids
        self._told = ParsedText()
        self._held: ToolCallDelta | None = None  # the beginning of the call that is being read
        self._pieces: list[str] = []  # of its arguments
        self._n_held = 0
        self._mark = 0  # position from which text is content if it is not a call
        # White space that may turn out to stand before a marker.
        self._space = self._reasoning_space = ""
        self._has_content = self._has_reasoning = self._follows_marker = False
        self.n_calls: int = 0
        self.n_ended: int = 0
        self.is_reasoning: bool = False
        self._steps = self._turn() if output_format.turn is not None else self._channels()
        self._is_over = False
        self.push(prefix)

    def push(self, text: str) -> ParsedText:
        """Add text, and return the additions to the channels."""
        is_open = self._has_content and not self._space
        if is_open and self._reader.has_no_marker(text, self.content):
            return ParsedText(text)  # nearly every token is content, which the steps need not read
        if text and not self._is_over:
            self._reader.add(text)
            self._resume()
        return self._take()

    def finish(self) -> ParsedText:
        """End the text, and return the last additions to the channels."""
        if not self._is_over:
            self._reader.is_closed = True
            self._resume()
            self._is_over = True
        return self._take()

    def _resume(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._is_over = True

    def _take(self) -> ParsedText:
        told, self._told = self._told, ParsedText()
        return told

    # --- What the steps read -----------------------------------------------------------------
    def _turn(self) -> Step[None]:
        turn = self._format.turn
        assert turn is not None
        self._mark = self._reader.at
        try:
            yield from turn.read(self._reader, self)
        except EndOfTextError:
            self.content(turn.text_of(self._cut_off()))
        self._end_space()

    def _channels(self) -> Step[None]:
        output_format, reader = self._format, self._reader
        reasoning, calls = output_format.reasoning, output_format.calls
        start = reasoning[0] if reasoning else ""
        triggers = calls.triggers if calls else ()
        markers = Markers((start, *triggers, *output_format.dropped))
        if reasoning and not start:
            yield from self._reasoning(reasoning[1])
        while True:
            if calls and calls.is_bare and not self._has_content:
                yield from self._bare_call()
            try:
                marker = (yield from reader.until(*markers.markers, emit=self.content))[1]
            except EndOfTextError:
                self._end_space()
                return
            if reasoning and marker == start and self._has_content and "\n" not in self._space:
                self.content(marker)  # an answer that names it
            elif reasoning and marker == start:
                self._space = ""
                yield from self._reasoning(reasoning[1])
            elif marker in triggers:
                yield from self._calls(marker)
            else:
                self._space, self._follows_marker = "", True

    def _reasoning(self, end: str) -> Step[None]:
        self.is_reasoning = True
        try:
            _, found = yield from self._reader.until(
                end, *self._format.reasoning_stops, emit=self.reasoning
            )
            self._reader.at -= len(found) if found != end else 0
            self._reasoning_space = ""
        except EndOfTextError:
            self._told.reasoning += self._reasoning_space
        self.is_reasoning = False
        self._follows_marker = True

    def _bare_call(self) -> Step[None]:
        """Read a call without a marker, if the answer begins with one."""
        reader = self._reader
        reader.hold()
        mark = reader.at
        yield from reader.skip_space()
        first = yield from reader.peek()
        self.content(reader.since(mark))
        if first and first in "{[":
            yield from self._calls("")
        reader.release()

    def _calls(self, trigger: str) -> Step[None]:
        """Read a stretch of calls after its trigger; text that is not a call is content."""
        reader, calls = self._reader, self._format.calls
        assert calls is not None
        reader.at -= len(trigger)  # to be kept from there on
        reader.hold()
        self._mark = start = reader.at
        reader.at += len(trigger)
        try:
            yield from self._read(calls, trigger, start)
        except EndOfTextError:
            left = self._cut_off()
            is_marker = left.strip() == trigger and not trigger.strip().isalpha()
            self.content("" if is_marker else left)  # a lone trigger is dropped unless it is a word
        except MismatchError:
            self.fail()
            if self._mark == start and reader.at - start <= MAX_REREAD:
                # Continue right after the trigger: another trigger may follow.
                reader.at = start + max(len(trigger), 1)
            self.content(reader.since(self._mark))
        reader.release()

    def _cut_off(self) -> str:
        """Forget a call that the end of the text cuts off, and return its text; "" if it is left out."""
        is_left_out = self._is_left_out
        self.fail()
        text = self._reader.since(self._mark) + self._reader.rest()
        return "" if is_left_out else text

    def _read(self, calls: CallSyntax, trigger: str, start: int) -> Step[None]:
        try:
            yield from calls.read(trigger, self._reader, self)
        except EndOfTextError:
            if self._held is None or not isinstance(calls, TaggedCalls):
                raise
            # Perhaps only an end marker is missing, which is not known before the end of the text.
            self.fail()
            self._reader.at = max(self._mark, start + len(trigger))
            yield from replace(calls, is_lenient=True).read(trigger, self._reader, self)

    # --- What the steps tell -----------------------------------------------------------------
    def content(self, text: str) -> None:
        """See `TurnSink`."""
        kept = text.rstrip(SPACE)
        if not kept:
            self._space += text
            return
        if not self._has_content and (self._follows_marker or self.n_calls):
            text, kept, self._space = text.lstrip(SPACE), kept.lstrip(SPACE), ""
        self._told.content += self._space + kept
        self._space = text[len(kept) :]
        self._has_content = True

    def reasoning(self, text: str) -> None:
        """See `TurnSink`."""
        kept = text.rstrip(SPACE)
        if not kept:
            self._reasoning_space += text
            return
        begin = self._reasoning_space + kept
        self._told.reasoning += begin if self._has_reasoning else begin.lstrip(SPACE)
        self._reasoning_space = text[len(kept) :]
        self._has_reasoning = True

    def mark(self) -> None:
        """See `TurnSink`."""
        self._mark = self._reader.at

    def untold(self) -> str:
        """See `TurnSink`."""
        return self._reader.since(self._mark)

    def between(self, text: str) -> None:
        """See `CallSink`."""
        self.content(text)
        self.mark()

    def _end_space(self) -> None:
        """Add white space at the end to the content, unless calls, or markers without content, precede it."""
        if not self.n_calls and (self._has_content or not self._follows_marker):
            self._told.content += self._space
        self._space = ""

    def knows(self, name: str) -> bool:
        """See `TurnSink`."""
        return name in self._tools

    def parameters_of(self, name: str) -> ValueSchema:
        """See `CallSink`."""
        tool = self._tools.get(name)
        return ANYTHING if tool is None else tool.value

    def begin(self, name: str, call_id: str | None = None, *, must_be_known: bool = False) -> None:
        """See `CallSink`."""
        # The limits are those of messages: clients send a call back.
        if not is_name(encodable(name)) or (must_be_known and not self.knows(name)):
            raise MismatchError
        self._is_left_out = bool(self.n_calls) and not self._allows_several
        if self._is_left_out:
            return
        own_id = encodable(call_id) if call_id and len(call_id) <= MAX_ID else None
        self._held = ToolCallDelta(self.n_calls, own_id, encodable(name), "")
        self._n_held = 0
        self.n_calls += 1

    def arguments(self, piece: str) -> None:
        """See `CallSink`."""
        if not piece:
            return
        if self._is_left_out:
            self._mark = self._reader.at
            return
        self._pieces.append(encodable(piece))
        self._n_held += len(piece)
        if self._held is None or self._n_held >= N_HELD:
            self._release()

    def end(self) -> None:
        """See `CallSink`."""
        if not self._is_left_out:
            self._release()
            self.n_ended += 1
        self._is_left_out = False
        self._mark = self._reader.at

    def _release(self) -> None:
        """Report the part of the call that was held back."""
        if (held := self._held) is not None:
            # Each continuation of the output gives another id to a call that has not been reported.
            held = held if held.id is not None else replace(held, id=self.call_ids.next())
            self._told.tool_calls += (held,)
            self._held = None
        if self._pieces:
            piece = ToolCallDelta(self.n_calls - 1, None, None, "".join(self._pieces))
            self._told.tool_calls += (piece,)
            self._pieces.clear()
        self._mark = self._reader.at

    def fail(self) -> None:
        """See `TurnSink`."""
        self._is_left_out = False
        if self._held is not None:
            self._held = None
            self._pieces.clear()
            self.n_calls -= 1


def encodable(text: str) -> str:
    """Return the text with "?" for each lone surrogate, which an escape in JSON can create."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class CallIds:
    """Ids of calls, equal for equal seeds: nine letters and digits, as Mistral requires.

    Parameters
    ----------
    seed : str
        Text that determines the ids; each request has another one.
    told : sequence of str
        First ids, in place of those of the seed.

    Attributes
    ----------
    used : list of str
        Ids so far.
    """

    def __init__(self, seed: str, told: Sequence[str] = ()) -> None:
        self._seed = seed
        self._told = told
        self.used: list[str] = []

    def next(self) -> str:
        """Return the next id."""
        n_used = len(self.used)
        seeded = hashlib.sha256(f"{self._seed}:{n_used}".encode("utf-8", "replace")).digest()
        own = base64.b32encode(seeded).decode()[:9].lower()
        self.used.append(self._told[n_used] if n_used < len(self._told) else own)
        return self.used[-1]

    def end_told(self) -> None:
        """Take all further ids from the seed."""
        self._told = ()
