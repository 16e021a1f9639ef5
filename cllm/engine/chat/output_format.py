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
        Syntax of calls; None if calls are not parsed.
    dropped : tuple of str
        Markers around the answer, which are not part of it.
    reasoning_stops : tuple of str
        Texts before which reasoning ends even without its end marker.
    turn : RoutedTurn or None
        Format of answers that consist of messages with headers.  It replaces all other attributes.
    name : str
        Name of the format for display only.
    """

    reasoning: tuple[str, str] | None = None
    calls: CallSyntax | None = None
    dropped: tuple[str, ...] = ()
    turn: RoutedTurn | None = None
    name: str = "plain"
    reasoning_stops: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts of the format's parts; control tokens named in them are text for the parser."""
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
        """Return the markers at the end of a prompt that show in which channel the answer begins, or ""."""
        if self.turn is not None:
            start = prompt.rfind(self.turn.start)
            header, message, _ = prompt[max(start, 0) :].partition(self.turn.message)
            return header + message if start >= 0 else ""
        if self.reasoning is None or not self.reasoning[0]:
            return ""
        return self.reasoning[0] if prompt.rstrip().endswith(self.reasoning[0]) else ""


def _strings_of(value: object) -> list[str]:
    """Return every text that is not empty in nested values."""
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, tuple):
        return [text for part in value for text in _strings_of(part)]
    if is_dataclass(value):
        return [text for field in fields(value) for text in _strings_of(getattr(value, field.name))]
    return []
