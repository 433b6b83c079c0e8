"""Several runs of one measurement: the median of a figure, and its worst value, which a bound can hold."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from .figures import Better

__all__ = ["Runs"]


class Runs:
    """The figures of each run, by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Add the figures of one run."""
        for name, value in figures.items():
            self._values.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        """Return the median of each figure."""
        return {name: median(values) for name, values in self._values.items()}

    def worst(self, better: Better, *names: str) -> dict[str, float]:
        """Return the worst value of each named figure as ``worst_…``."""
        choose = max if better == "lower" else min
        return {f"worst_{name}": choose(self._values[name]) for name in names}
