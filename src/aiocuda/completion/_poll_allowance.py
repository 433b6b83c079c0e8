"""PollAllowance: the time that a loop may poll beside armed host callbacks."""

from __future__ import annotations

__all__ = ["PollAllowance"]

#: What a turn of the loop takes beside a pass of polls: a query of its descriptors, and the call.
TURN_SECONDS = 10e-6

#: The part of a second's allowance that may be used at once. The rest comes back during the second.
BURST = 0.2


class PollAllowance:
    """The time that a loop may poll beside armed host callbacks: a share of each second, for all streams together.

    Parameters
    ----------
    share
        Of each second; 1.0 for no limit, 0.0 for no polls.
    """

    __slots__ = ("_full_at", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._full_at = 0.0  # the time at which all of the allowance has come back

    def is_left(self, now: float) -> bool:
        """Return whether the loop may poll now."""
        return self._share >= 1.0 or (self._share > 0.0 and self._full_at - now < BURST / (1.0 - BURST))

    def spend(self, began: float, ended: float) -> None:
        """Count a pass of polls between two times, and the turn of the loop that it belongs to."""
        if self._share > 0.0:
            spent = (ended - began + TURN_SECONDS) / (self._share * (1.0 - BURST))
            self._full_at = max(self._full_at, began) + spent
