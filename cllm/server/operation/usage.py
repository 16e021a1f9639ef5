"""Tokens and times of one HTTP request, for the log and for the limits of its key."""

from __future__ import annotations

from dataclasses import dataclass

from cllm import Completion


@dataclass(slots=True)
class Access:
    """Numbers of one HTTP request: sums of all its outputs.

    Attributes
    ----------
    key : str
        Name of the client's key; empty without one.
    model : str
        Name of the model; empty for a request that generates nothing.
    queued_s : float
        Longest time from submission to admission in seconds.
    first_s : float or None
        Shortest time from submission to a first token in seconds; None without a token.
    error : str
        Code or status of the error that ended a stream after its head; empty without one.
    """

    key: str = ""
    model: str = ""
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    queued_s: float = 0.0
    first_s: float | None = None
    error: str = ""

    def finished(self, completion: Completion) -> None:
        """Add an output."""
        usage, timings = completion.usage, completion.timings
        self.n_prompt += usage.n_prompt
        self.n_cached += usage.n_cached
        self.n_output += usage.n_output
        self.queued_s = max(self.queued_s, timings.queued_s)
        if timings.ttft_s is not None:
            self.first_s = min(timings.ttft_s, self.first_s or timings.ttft_s)

    def given_up(self, n_prompt: int, n_output: int) -> None:
        """Add an output without a completion: its client has left, or it failed."""
        self.n_prompt += n_prompt
        self.n_output += n_output

    @property
    def fields(self) -> dict[str, object]:
        """Fields of the log's line; those about the model only if the request used it."""
        key = {"key": self.key} if self.key else {}
        if not self.model:
            return dict(key)
        first = {} if self.first_s is None else {"first_ms": milliseconds(self.first_s)}
        return {
            **key,
            "model": self.model,
            "prompt_tokens": self.n_prompt,
            "cached_tokens": self.n_cached,
            "output_tokens": self.n_output,
            "queued_ms": milliseconds(self.queued_s),
            **first,
            **({"error": self.error} if self.error else {}),
        }


def milliseconds(seconds: float) -> float:
    """Return seconds as milliseconds, to a microsecond."""
    return round(1000 * seconds, 3)
