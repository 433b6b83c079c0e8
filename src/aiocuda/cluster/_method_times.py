"""MethodTimes: the predicted time of a call, by its method."""

from __future__ import annotations

__all__ = ["MethodTimes"]

#: The weight of a new measurement.
WEIGHT = 0.125


class MethodTimes:
    """The predicted time of a call, by object and method: the exponentially weighted mean of the measured times."""

    def __init__(self) -> None:
        self._means: dict[tuple[int, str], float] = {}

    def predicted(self, number: int, method: str) -> float:
        """Return seconds. A method that was not measured has the mean of the others; 1 s if there are none."""
        known = self._means.get((number, method))
        if known is not None:
            return known
        return sum(self._means.values()) / len(self._means) if self._means else 1.0

    def note(self, number: int, method: str, seconds: float) -> None:
        """Note the measured time of a call."""
        known = self._means.get((number, method), seconds)
        self._means[number, method] = known + WEIGHT * (seconds - known)

    def forget(self, number: int) -> None:
        """Forget an object."""
        self._means = {key: mean for key, mean in self._means.items() if key[0] != number}
