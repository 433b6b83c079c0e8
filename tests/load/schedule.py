"""Times of arrivals: a Poisson process, from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

__all__ = ["MOST_ARRIVALS", "Phase", "poisson"]

#: The most arrivals of one schedule. A client keeps an outcome for each.
MOST_ARRIVALS = 200_000


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A part of a schedule with one rate.

    Attributes
    ----------
    rate
        Mean arrivals per second.
    seconds
        Length of the phase.
    """

    rate: float
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf") or not 0 < self.seconds < float("inf"):
            raise ValueError(f"a phase has a finite rate and length, both above 0, not {self.rate} and {self.seconds}")


def poisson(phases: Sequence[Phase], seed: int) -> list[float]:
    """Return the times of the arrivals in seconds, in order; the first phase begins at 0.

    The gaps are independent and exponentially distributed, as between requests of many independent clients. The same
    seed gives the same schedule.

    Raises
    ------
    ValueError
        The phases have more than `MOST_ARRIVALS` arrivals on average.
    """
    expected = sum(phase.rate * phase.seconds for phase in phases)
    if expected > MOST_ARRIVALS:
        raise ValueError(f"the schedule has about {expected:.0f} arrivals: shorten it to at most {MOST_ARRIVALS}")
    draw = random.Random(seed)
    arrivals: list[float] = []
    begin = 0.0
    for phase in phases:
        end = begin + phase.seconds
        at = begin + draw.expovariate(phase.rate)  # without memory: a new gap may begin at the phase's begin
        while at < end:
            arrivals.append(at)
            at += draw.expovariate(phase.rate)
        begin = end
    return arrivals
