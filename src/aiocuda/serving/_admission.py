"""Admission: refuses requests whose deadline the predicted time cannot meet."""

from __future__ import annotations

from collections.abc import Sequence

from ._times import BatchTimes

__all__ = ["Admission"]

#: After so many seconds of refusals, one request is let through: its batch measures the time again.
PROBE_AFTER = 1.0


class Admission:
    """Predicts when a new request will have its result, and refuses those that would miss their deadline.

    Parameters
    ----------
    times
        The measured times of batches.
    limit
        The greatest weight of a batch.
    places
        The number of batches that run at a time.
    """

    def __init__(self, times: BatchTimes, limit: int, places: int) -> None:
        self._times = times
        self._limit = limit
        self._places = places
        self._refusing_since: float | None = None

    def predict(self, weight: int, before: int, running: Sequence[float], wait: float) -> float | None:
        """Return the seconds until a new request will have its result; None if no batch like its own was measured.

        Parameters
        ----------
        weight
            Of the request.
        before
            The weight of the waiting requests that are served before it.
        running
            For each running batch, the predicted seconds until it ends.
        wait
            The seconds that a batch still waits for further requests if a place is free and it is not full.
        """
        batches, own = divmod(before, self._limit)
        if own + weight > self._limit:
            batches, own = batches + 1, 0
        own += weight
        seconds = self._times.predicted(own)
        if seconds is None:
            return None
        full = self._times.predicted(self._limit) or 0.0
        places = sorted([0.0] * (self._places - len(running)) + list(running))
        rounds, place = divmod(batches, self._places)
        begin = places[place] + rounds * full
        if begin <= 0.0 and own < self._limit:
            begin = wait
        return begin + seconds

    def admits(self, deadline: float, predicted: float | None, now: float) -> bool:
        """True if the deadline can be met, if that is not known, or to measure again after a second of refusals."""
        if predicted is None or predicted <= deadline:
            self._refusing_since = None
            return True
        if self._refusing_since is None:
            self._refusing_since = now
        elif now - self._refusing_since >= PROBE_AFTER:
            self._refusing_since = now
            self._times.restart()
            return True
        return False
