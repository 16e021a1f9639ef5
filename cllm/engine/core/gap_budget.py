"""Limit the time of other work between two ticks while streams wait: a batch of texts, or a part of an encode.

`target_itl_ms` limits the gap between two tokens of a stream: a tick and the other work after it.
Both times scatter, depending on the machine.  So the aim is learned: a share of the target that keeps
nearly all gaps below `TOLERANCE` times the target.  Pure: times come in as numbers.
"""

from __future__ import annotations

# Gaps above this share of the target are late.  Clients see a little more, and should see at most 1.2 of it.
TOLERANCE = 1.1
P_LATE = 0.005  # share of gaps that may be longer than `TOLERANCE` times the target
# Aim as a share of the target.
FIRST_AIM, MIN_AIM, MAX_AIM = 0.9, 0.5, 1.05
# A late gap lowers the aim by this share, any other gap raises it by `P_LATE` of this share.
BACKOFF = 0.04
# The other work gets at least this share of the target, even if the streams alone exceed it: it must not starve.
MIN_SHARE = 0.1


class Aim:
    """Share of the target that other work and the next tick may take together.

    Attributes
    ----------
    share : float
    """

    def __init__(self, share: float = FIRST_AIM) -> None:
        self.share: float = share

    def observe(self, gap_s: float, target_s: float) -> None:
        """Learn from a gap that other work has filled."""
        is_late = gap_s > TOLERANCE * target_s
        self.share *= 1.0 - BACKOFF if is_late else 1.0 + BACKOFF * P_LATE
        self.share = min(max(self.share, MIN_AIM), MAX_AIM)


class GapBudget:
    """Chooses the seconds of the next piece of other work; one for each kind of it.

    Parameters
    ----------
    target_itl_s : float or None
        `target_itl_ms` in seconds; None: the other work gets half of the time.
    first_aim : float
        Aim before the first gap, as a share of the target.
    """

    def __init__(self, target_itl_s: float | None, first_aim: float = FIRST_AIM) -> None:
        self._target_s = target_itl_s
        self._aim = Aim(first_aim)
        self._last: float | None = None  # begin of the present gap; None: it is not measured

    def pause(self) -> None:
        """Note that no other work or no streams wait: the present gap is not measured."""
        self._last = None

    def seconds(self, now: float, tick_s: float, next_tick_s: float) -> float:
        """Return the seconds for work that begins now, between a tick of `tick_s` and the next one."""
        if (target_s := self._target_s) is None:
            return tick_s
        if self._last is not None:
            self._aim.observe(now - self._last, target_s)
        left_s, least_s = self._aim.share * target_s - next_tick_s, MIN_SHARE * target_s
        self._last = now if left_s > least_s else None
        return max(left_s, least_s)
