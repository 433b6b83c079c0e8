"""Average: a moving average, and the mean deviation from it."""

from __future__ import annotations

from typing import Final

__all__ = ["Average"]

#: The share of the newest value in the mean, and of its deviation in the mean deviation.
SHARE: Final = 1 / 8
DEVIATION_SHARE: Final = 1 / 4


class Average:
    """A moving average, and the mean deviation from it: as TCP has them for its time-outs (RFC 6298).

    The estimates of the completion have averages of their own, in the compiled core: there, many samples are bounds.

    Parameters
    ----------
    first
        The first value.
    """

    __slots__ = ("deviation", "mean")

    def __init__(self, first: float) -> None:
        self.mean = first
        self.deviation = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.deviation += DEVIATION_SHARE * (abs(value - self.mean) - self.deviation)
        self.mean += SHARE * (value - self.mean)
