"""OutputChannels: the deltas of a chat's answer, split into reasoning, content and calls.

The inference thread sends one text, which is split here, in the event loop.  The text of an output that continues is
split in a worker thread, before any delta arrives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from cllm.engine.chat.output_parser import OutputParser, ParsedText
from cllm.engine.output import Completion, FinishReason, TokenDelta, ToolCall, ToolCallDelta

ONE_TOKEN = (0,)  # any token: only their number counts


class OutputChannels:
    """Channels of one answer so far.

    Parameters
    ----------
    parser : OutputParser
    told : sequence of str
        Earlier text of the answer, token by token; no delta contains it.
    n_left_out : int
        Number of the first tokens of `told` that the completion leaves out, but for their calls.

    Attributes
    ----------
    told : str
        Content of the earlier text.
    """

    def __init__(self, parser: OutputParser, told: Sequence[str] = (), n_left_out: int = 0) -> None:
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._n_reasoning = 0
        self._split_all(told[:n_left_out])
        self._left_out = "".join(self._content), "".join(self._reasoning), self._n_reasoning
        self._content, self._reasoning, self._n_reasoning = [], [], 0
        self._split_all(told[n_left_out:])
        self.told: str = self._left_out[0] + "".join(self._content)
        parser.call_ids.end_told()

    @property
    def call_ids(self) -> tuple[str, ...]:
        """Ids that were given to calls, in their order."""
        return tuple(self._parser.call_ids.used)

    def _split_all(self, told: Sequence[str]) -> None:
        for text in told:
            self.split(TokenDelta(text, ONE_TOKEN))

    def with_left_out(self, completion: Completion) -> Completion:
        """Return the completion with the channels of what it leaves out."""
        content, reasoning, n_reasoning = self._left_out
        usage = completion.usage
        return replace(
            completion,
            text=content + "".join(self._content),
            reasoning=reasoning + completion.reasoning,
            usage=replace(usage, n_reasoning=n_reasoning + usage.n_reasoning),
        )

    def split(self, delta: TokenDelta) -> TokenDelta:
        """Return the delta with its text split into content, reasoning and calls."""
        told = self._parser.push(delta.text)
        if told.reasoning or self._parser.is_reasoning:
            self._n_reasoning += len(delta.token_ids)
        if told.content is delta.text and not (told.reasoning or told.tool_calls):
            self._content.append(delta.text)  # nearly every one: as fast as possible
            return delta
        return self._told(delta, told)

    def finish(self, delta: TokenDelta, completion: Completion) -> tuple[TokenDelta, Completion]:
        """Return the last delta and the completion, both split.

        With whole calls, "stop" becomes "tool_calls".
        """
        delta = self.split(delta)
        rest = self._told(delta, self._parser.finish())
        reason = completion.finish_reason
        if reason is FinishReason.STOP and self._calls and self._are_whole():
            reason = FinishReason.TOOL_CALLS
        last = replace(
            rest,
            text=delta.text + rest.text,
            reasoning=delta.reasoning + rest.reasoning,
            tool_calls=delta.tool_calls + rest.tool_calls,
            finish_reason=reason,
        )
        whole = replace(
            completion,
            text="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(call.whole() for call in self._calls),
            finish_reason=reason,
            usage=replace(completion.usage, n_reasoning=self._n_reasoning),
        )
        return last, whole

    def _are_whole(self) -> bool:
        """True if no call was cut off: each has ended, or only a marker after its arguments is missing."""
        parser = self._parser
        return parser.n_ended == parser.n_calls or all(call.is_json for call in self._calls)

    def _told(self, delta: TokenDelta, told: ParsedText) -> TokenDelta:
        self._note(told)
        return replace(
            delta, text=told.content, reasoning=told.reasoning, tool_calls=told.tool_calls
        )

    def _note(self, told: ParsedText) -> None:
        self._content.append(told.content)
        self._reasoning.append(told.reasoning)
        for piece in told.tool_calls:
            if piece.name is not None:
                self._calls.append(_Call(piece))
            self._calls[piece.index].arguments.append(piece.arguments)


class _Call:
    """A tool call whose arguments may be incomplete."""

    def __init__(self, first: ToolCallDelta) -> None:
        self._first = first
        self.arguments: list[str] = []

    @property
    def is_json(self) -> bool:
        """True if the arguments are a JSON object."""
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False

    def whole(self) -> ToolCall:
        assert self._first.id is not None
        assert self._first.name is not None
        return ToolCall(self._first.id, self._first.name, "".join(self.arguments))
