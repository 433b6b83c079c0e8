"""Admission: refuses requests whose deadline the predicted time cannot meet."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from ._times import BatchTimes

__all__ = ["Admission"]

#: After so many seconds of refusals in a bucket, one request is let through: its batch measures the time again.
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
        self._refusing_since: dict[int, float] = {}  # by bucket

    def predict(self, weight: int, before: int, running: Sequence[float], wait: float) -> tuple[int, float | None]:
        """Return the weight of the batch of a new request, and the seconds until it will have its result.

        A batch that waits for a place is supposed to become as heavy as the recent ones. The seconds are None if no
        batch like that was measured.

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
        full = self._times.predicted(self._limit) or 0.0
        places = sorted([0.0] * (self._places - len(running)) + list(running))
        begin = _begin(places, batches, full)
        if begin > 0.0:
            # Further requests join the batch while it waits for a place. Its time with the present ones would be too
            # short: under overload whole batches of accepted requests would miss their deadlines.
            own = max(own, min(math.ceil(self._times.weight), self._limit))
        elif own < self._limit:
            begin = wait
        seconds = self._times.predicted(own)
        return own, None if seconds is None else begin + seconds

    def admits(self, deadline: float, own: int, predicted: float | None, now: float) -> bool:
        """True if the deadline can be met, if that is not known, or to measure again after a second of refusals.

        The refusals are those of one bucket: while smaller batches meet their deadlines, none of a bucket that is
        predicted to be slow would ever run, and its prediction would stay.

        Parameters
        ----------
        own
            The weight of the request's batch, as predicted.
        """
        bucket = self._times.bucket(own)
        if predicted is None or predicted <= deadline:
            self._refusing_since.pop(bucket, None)
            return True
        since = self._refusing_since.setdefault(bucket, now)
        if now - since >= PROBE_AFTER:
            self._refusing_since[bucket] = now
            self._times.restart()
            return True
        return False


def _begin(places: Sequence[float], batches: int, full: float) -> float:
    """Return the seconds until a batch begins after ``batches`` others of ``full`` seconds each.

    Parameters
    ----------
    places
        For each place, the seconds until it is free; sorted.
    """
    if full <= 0.0:
        return places[0]

    def before(seconds: float) -> int:
        return sum(math.ceil((seconds - each) / full) for each in places if each < seconds)

    # The later places are still busy when the batch begins. On the others, one batch begins in each `full` seconds.
    used = bisect_right(places, batches, key=before)
    last = places[used - 1]
    free = sorted(each + math.ceil((last - each) / full) * full for each in places[:used])
    rounds, place = divmod(batches - before(last), used)
    return free[place] + rounds * full
