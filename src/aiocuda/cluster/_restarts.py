"""Restarts: how long to wait before a replica is started again, and how often."""

from __future__ import annotations

from collections import deque

__all__ = ["Restarts"]

#: Restarts are counted over this number of seconds.
WINDOW = 60.0

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0


class Restarts:
    """The restarts of one replica.

    Parameters
    ----------
    limit
        The most restarts in 60 seconds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque()

    def delay(self, now: float) -> float | None:
        """Return the seconds to wait before the next restart, which is counted; None if the limit is reached.

        It is 0.1 s after 60 s without a restart, and doubles with each restart in them, up to 5 s.
        """
        times = self._times
        while times and now - times[0] >= WINDOW:
            times.popleft()
        if len(times) >= self._limit:
            return None
        delay = min(FIRST_DELAY * 2.0 ** min(len(times), 10), LONGEST_DELAY)
        times.append(now + delay)
        return delay
