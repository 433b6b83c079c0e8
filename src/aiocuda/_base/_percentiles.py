"""The mean, the median and the 99th percentile of the values that `statistics()` remembers."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["mean_p50_p99"]


def mean_p50_p99(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the mean, the median and the 99th percentile; zeros if there are no values.

    A percentile between two values is interpolated linearly, as `numpy.percentile` does it.
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0, 0.0, 0.0
    return sum(ordered) / len(ordered), _percentile(ordered, 0.5), _percentile(ordered, 0.99)


def _percentile(ordered: list[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
