"""Admission: refuses requests whose deadline the predicted time cannot meet. BatchTimes: the times of batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from .._base._average import Average

__all__ = ["Admission", "BatchTimes"]

#: A batch counts as at most so many times the average: one slow batch, for example while another process used the
#: device, must not make the predictions useless. Several slow ones raise the average.
MOST_OF_AVERAGE = 2

#: Seconds that a batch takes, for `Admission.seconds_of_queue`, until one was measured.
UNMEASURED = 0.1

#: The clock of uvloop counts milliseconds: batches that take less are measured as 0 s.
COARSEST_CLOCK = 0.001

#: After so many seconds of refusals in a bucket, one request is let through: its batch measures the time again.
PROBE_AFTER = 1.0


class _BucketTimes(Average):
    """The seconds of the batches of one bucket."""

    __slots__ = ("calls", "is_stale", "last")

    def __init__(self) -> None:
        super().__init__(0.0)
        self.calls = 0
        self.is_stale = True  # the next call replaces the average
        self.last = 0.0

    def restart(self) -> None:
        """Let the next call replace the average."""
        self.is_stale = True

    def add(self, value: float) -> None:
        """Add the time of a batch."""
        self.calls += 1
        self.last = value
        if self.calls == 1:
            return  # it contains a compilation, or the first use of a library
        if self.is_stale:
            self.mean, self.deviation, self.is_stale = value, 0.0, False
        else:
            super().add(min(value, MOST_OF_AVERAGE * max(self.mean, COARSEST_CLOCK)))

    @property
    def predicted(self) -> float | None:
        return None if self.calls < 2 else self.mean + 2 * self.deviation


class BatchTimes:
    """The seconds that batches take, by bucket. The first batch of a bucket does not count.

    Parameters
    ----------
    limit
        The greatest weight of a batch.
    buckets
        Weights to which batches are padded; None for powers of two.
    places
        The number of batches that run at a time.
    """

    def __init__(self, limit: int, buckets: Sequence[int] | None, places: int) -> None:
        self._weights = Average(0.0)
        self._limit = limit
        self._buckets = buckets
        self._places = places
        self._averages: defaultdict[int, _BucketTimes] = defaultdict(_BucketTimes)
        self._requests = Average(0.0)  # of the same batches as the seconds, for the rate
        self._seconds = Average(0.0)

    def bucket(self, weight: int) -> int:
        """Return the bucket of a batch: batches of similar weight have the same."""
        if self._buckets is None:
            return min(1 << (weight - 1).bit_length(), self._limit)
        return next(bucket for bucket in self._buckets if bucket >= weight)

    def add(self, weight: int, requests: int, seconds: float) -> None:
        """Add the time of a batch that has succeeded."""
        average = self._averages[self.bucket(weight)]
        average.add(seconds)
        self._weights.add(weight)
        if average.calls > 1:
            self._requests.add(requests)
            self._seconds.add(seconds)

    def predicted(self, weight: int) -> float | None:
        """Return the seconds that a batch of this weight will take, as far as they are known; else None.

        If its bucket was not measured, the time of a smaller one is a lower limit.
        """
        bucket = self.bucket(weight)
        average = self._averages.get(bucket)
        if average is None or average.calls < 2:
            known = [each for each, average in self._averages.items() if each <= bucket and average.calls > 1]
            average = self._averages[max(known)] if known else None
        return None if average is None else average.predicted

    def restart(self) -> None:
        """Let the next batch of each bucket replace its average."""
        for average in self._averages.values():
            average.restart()

    @property
    def by_bucket(self) -> dict[int, tuple[float | None, float]]:
        """For each bucket, the predicted seconds of a batch, and the seconds of the last one."""
        return {bucket: (average.predicted, average.last) for bucket, average in sorted(self._averages.items())}

    @property
    def rate(self) -> float:
        """Requests per second that all places together serve; 0 before the first batch is measured."""
        requests, seconds = self._requests.mean, self._seconds.mean
        return requests * self._places / (seconds or COARSEST_CLOCK)

    @property
    def weight(self) -> float:
        """The average weight of the recent batches; 0 before the first."""
        return self._weights.mean


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
        begin = _begin(running, self._places, batches, self._times.predicted(self._limit) or 0.0)
        if begin > 0.0:
            # Further requests join the batch while it waits for a place. Its time with the present ones would be too
            # short: under overload whole batches of accepted requests would miss their deadlines.
            own = max(own, min(math.ceil(self._times.weight), self._limit))
        elif own < self._limit:
            begin = wait
        seconds = self._times.predicted(own)
        return own, None if seconds is None else begin + seconds

    def seconds_of_queue(self, weight: int, running: Sequence[float]) -> float:
        """Return the predicted seconds until requests of this weight are served, in full batches after ``running``."""
        full = self._times.predicted(self._limit)
        full = UNMEASURED if full is None else max(full, COARSEST_CLOCK)
        return _begin(running, self._places, (weight - 1) // self._limit, full) + full

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


def _begin(running: Sequence[float], count: int, batches: int, full: float) -> float:
    """Return the seconds until a batch begins after ``batches`` others of ``full`` seconds each.

    Parameters
    ----------
    running
        For each running batch, the predicted seconds until it ends.
    count
        The number of batches that run at a time.
    """
    places = sorted([0.0] * (count - len(running)) + list(running))  # the seconds until each is free
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
