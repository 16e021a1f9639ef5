"""Limit the duration of a batch of texts while streams wait for it.

`target_itl_ms` limits the gap between two tokens of a stream: a tick and the batch of texts after it.
Both times scatter, depending on the machine.  So the aim is learned: a share of the target that keeps
nearly all gaps below `TOLERANCE` times the target.  Pure: times come in as numbers.
"""

from __future__ import annotations

TOLERANCE = 1.2
P_LATE = 0.005  # share of gaps that may be longer than `TOLERANCE` times the target
# Aim as a share of the target.
FIRST_AIM, MIN_AIM, MAX_AIM = 0.9, 0.5, 1.05
# A late gap lowers the aim by this share, any other gap raises it by `P_LATE` of this share.
BACKOFF = 0.04
# Texts get at least this share of the target, even if the streams alone exceed it, so as not to starve.
MIN_SHARE = 0.1


class TextBudget:
    """Chooses the seconds of the next batch of texts; one for each engine.

    Parameters
    ----------
    target_itl_s : float or None
        `target_itl_ms` in seconds; None: texts get half of the time.
    """

    def __init__(self, target_itl_s: float | None) -> None:
        self._target_s = target_itl_s
        self._aim = FIRST_AIM
        self._last: float | None = None  # begin of the present gap; None: it is not measured

    def pause(self) -> None:
        """Note that no texts or no streams wait: the present gap is not measured."""
        self._last = None

    def seconds(self, now: float, tick_s: float, next_tick_s: float) -> float:
        """Return the seconds for a batch that begins now, between a tick of `tick_s` and the next one."""
        if (target_s := self._target_s) is None:
            return tick_s
        if self._last is not None:
            is_late = now - self._last > TOLERANCE * target_s
            self._aim *= 1.0 - BACKOFF if is_late else 1.0 + BACKOFF * P_LATE
            self._aim = min(max(self._aim, MIN_AIM), MAX_AIM)
        left_s, least_s = self._aim * target_s - next_tick_s, MIN_SHARE * target_s
        self._last = now if left_s > least_s else None
        return max(left_s, least_s)
