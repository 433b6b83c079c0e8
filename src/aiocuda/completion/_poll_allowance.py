"""PollAllowance: the time that a loop may poll beside armed host callbacks."""

from __future__ import annotations

__all__ = ["PollAllowance"]

#: The part of a second's allowance that may be used at once. The rest comes back during the second.
BURST = 0.2


class PollAllowance:
    """The time that a loop may poll beside armed host callbacks: a share of each second, for all streams together.

    Parameters
    ----------
    share
        Of each second; 1.0 for no limit, 0.0 for no polls.
    """

    __slots__ = ("_full_at", "_share", "_since")

    def __init__(self, share: float) -> None:
        self._share = share
        self._full_at = 0.0  # the time at which all of the allowance has come back
        self._since = 0.0  # the last pass of polls; 0.0 if the loop does not poll

    def is_left(self, now: float) -> bool:
        """Return whether the loop may poll now."""
        return self._share >= 1.0 or (self._share > 0.0 and self._full_at - now < BURST / (1.0 - BURST))

    def count(self, now: float, *, polls: bool) -> None:
        """Count the time since the last pass of polls, and note whether the loop goes on to poll."""
        if self._since and self._share > 0.0:
            spent = (now - self._since) / (self._share * (1.0 - BURST))
            self._full_at = max(self._full_at, self._since) + spent
        self._since = now if polls else 0.0
