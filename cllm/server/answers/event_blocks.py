"""Conversion of deltas to the begin, growth and end of an answer's parts.  Pure.

The Responses API and the Messages API send an answer as a list of parts, one after another.  A delta of the
engine has text, reasoning and calls side by side.  `Blocks` converts deltas to parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cllm import TokenDelta

REASONING, TEXT, CALL = "reasoning", "text", "call"


@dataclass(slots=True)
class Block:
    """One part of an answer.

    Attributes
    ----------
    kind : str
        `REASONING`, `TEXT` or `CALL`.
    index : int
        Position among the parts of the answer, from 0.
    text : str
        Text so far; for a call, JSON text of its arguments.
    id, name : str
        Id of a call, and name of its tool; otherwise empty.
    """

    kind: str
    index: int
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """Change of a block: `what` is `begin`, `grow` or `end`; `text` is the text that `grow` has added."""

    what: str
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer.

    Attributes
    ----------
    done : list of Block
        All blocks that have begun; the last one may still grow.
    """

    def __init__(self) -> None:
        self.done: list[Block] = []
        self._is_open = False

    def steps(self, delta: TokenDelta) -> Iterator[Step]:
        """Yield the steps that a delta causes: begin, grow and end of blocks."""
        calls = delta.tool_calls
        if calls and calls[0].name is None:  # the rest of the call that is open
            yield self._add(calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning:
            yield from self._grow(REASONING, delta.reasoning)
        if delta.text:
            yield from self._grow(TEXT, delta.text)
        for call in calls:
            if call.name is not None:
                yield from self.end()
                yield from self._begin(Block(CALL, len(self.done), "", call.id or "", call.name))
            if call.arguments:
                yield self._add(call.arguments)

    def end(self) -> Iterator[Step]:
        """Yield the end of the last block, unless it has ended."""
        if self._is_open:
            self._is_open = False
            yield Step("end", self.done[-1])

    def _grow(self, kind: str, text: str) -> Iterator[Step]:
        if not (self._is_open and self.done[-1].kind == kind):
            yield from self.end()
            yield from self._begin(Block(kind, len(self.done)))
        yield self._add(text)

    def _begin(self, block: Block) -> Iterator[Step]:
        self.done.append(block)
        self._is_open = True
        yield Step("begin", block)

    def _add(self, text: str) -> Step:
        block = self.done[-1]
        block.text += text
        return Step("grow", block, text)
