"""From samples to the figures of a row: percentiles, ratios, and whether the bounds hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

Better: TypeAlias = Literal["lower", "higher"]


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What one figure of a row must reach. Exactly one side is given."""

    figure: str  #: ``"p50"``, ``"ratio"``, or a name in the row's ``figures``
    at_most: float | None = None
    at_least: float | None = None

    @property
    def limit(self) -> float:
        limit = self.at_most if self.at_most is not None else self.at_least
        if limit is None:
            raise ValueError(f"the bound of {self.figure!r} has no limit: give at_most or at_least")
        return limit

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most is not None else value >= self.limit

    def check(self, row: dict[str, Any]) -> dict[str, Any]:
        """A bound and its measured figure. ``met`` is None if the figure is missing, for example without a peer."""
        value = row[self.figure] if self.figure in row else row["figures"].get(self.figure)
        return {
            "figure": self.figure,
            "value": value,
            "at_most" if self.at_most is not None else "at_least": self.limit,
            "met": None if value is None else self.holds(value),
        }


@dataclasses.dataclass(slots=True)
class Measured:
    """What a row, or a peer, hands back: all its samples, in the row's unit."""

    samples: list[float]
    baseline: list[float] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  #: further figures, each named with its unit
    notes: list[str] = dataclasses.field(default_factory=list)  #: reasons why a figure is missing


def percentile(samples: Sequence[float], q: float) -> float:
    """The smallest sample that at least ``q`` percent of the samples do not exceed (nearest rank).

    It is a value that occurred: with few samples, an interpolated p99 would be a value that was never measured.
    """
    if not samples:
        raise ValueError("no samples: a percentile needs at least one")
    if not 0 <= q <= 100:
        raise ValueError(f"q is a percentage, not {q!r}")
    return sorted(samples)[max(0, math.ceil(q / 100 * len(samples)) - 1)]


def tail(samples: Sequence[float], better: Better) -> float:
    """p99 towards the bad side: what 99 % of the samples are no worse than."""
    if better == "lower":
        return percentile(samples, 99)
    return -percentile([-sample for sample in samples], 99)


def summarise(samples: Sequence[float], better: Better) -> dict[str, Any]:
    """``p50 p99 n`` of the samples."""
    return {"p50": percentile(samples, 50), "p99": tail(samples, better), "n": len(samples)}
