"""LogHistogram: percentiles of any number of times, in bounded memory."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["ACCURACY", "LogHistogram"]

#: The largest relative error of a percentile.
ACCURACY: Final = 0.01

_GROWTH: Final = math.log((1 + ACCURACY) / (1 - ACCURACY))

#: Times below this are counted as 0: they are shorter than the resolution of a timing event, half a microsecond.
_LEAST_MS: Final = 1e-4

#: Times above this are counted as this: 11 days.
_MOST_MS: Final = 1e9


class LogHistogram:
    """Percentiles of any number of times in milliseconds, with a relative error of at most 1 %.

    It counts the times in buckets whose bounds grow by 2 %: at most 1 500 buckets, whatever the times are. The
    percentiles of two merged histograms are those of all their times together.
    """

    __slots__ = ("_counts", "_zeros")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._zeros = 0

    def add(self, ms: float) -> None:
        """Count a time."""
        if ms < _LEAST_MS:
            self._zeros += 1
        else:
            bucket = math.ceil(math.log(min(ms, _MOST_MS)) / _GROWTH)
            self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def merge(self, other: LogHistogram) -> None:
        """Count all times of another histogram, too."""
        self._zeros += other._zeros
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    def percentile(self, share: float) -> float:
        """Return the smallest time that at least this share of the times, above 0 and at most 1, does not exceed."""
        count = self._zeros + sum(self._counts.values())
        left = math.ceil(share * count) - self._zeros
        if left <= 0:
            return 0.0
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return math.exp(bucket * _GROWTH) * (1 - ACCURACY)  # no time of the bucket differs by more than 1 %
        raise AssertionError("the buckets have all times")
