"""OutputFormat: how a model writes its reasoning, its answer and its calls into one text.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass

from cllm.engine.chat.call_syntax import CallSyntax
from cllm.engine.chat.routed_turn import RoutedTurn


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Description of the output for an `OutputParser`.

    Attributes
    ----------
    reasoning : (str, str) or None
        The markers around reasoning, without white space; the first is "" where reasoning begins by
        itself.
    calls : CallSyntax or None
        How calls are written.
    dropped : tuple of str
        Markers around the answer, which are no part of it.
    reasoning_stops : tuple of str
        What cannot be reasoning: it has ended before these, without its marker.
    turn : RoutedTurn or None
        A format that is nothing but messages with headers; the others do not apply then.
    name : str
        For people.
    """

    reasoning: tuple[str, str] | None = None
    calls: CallSyntax | None = None
    dropped: tuple[str, ...] = ()
    turn: RoutedTurn | None = None
    name: str = "plain"
    reasoning_stops: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are not content; names of control tokens among them count as text."""
        parts = (self.reasoning, self.dropped, self.reasoning_stops, self.calls, self.turn)
        return tuple(text for part in parts for text in _strings_of(part))

    @property
    def thought(self) -> tuple[str, tuple[str, ...], str] | None:
        """Return the start of a thought, its possible ends, and how its end is written; None without thoughts."""
        if self.turn is not None:
            return ("", self.turn.answers, self.turn.answer) if self.turn.answers else None
        if self.reasoning is None:
            return None
        start, end = self.reasoning
        return start, (end, *self.reasoning_stops), f"\n{end}\n\n"

    def opening(self, prompt: str) -> str:
        """Markers at the end of a prompt, which tell in which channel the answer begins."""
        if self.turn is not None:
            start = prompt.rfind(self.turn.start)
            header, message, _ = prompt[max(start, 0) :].partition(self.turn.message)
            return header + message if start >= 0 else ""
        if self.reasoning is None or not self.reasoning[0]:
            return ""
        return self.reasoning[0] if prompt.rstrip().endswith(self.reasoning[0]) else ""


def _strings_of(value: object) -> list[str]:
    """Every text in nested values."""
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, tuple):
        return [text for part in value for text in _strings_of(part)]
    if is_dataclass(value):
        return [text for field in fields(value) for text in _strings_of(getattr(value, field.name))]
    return []
