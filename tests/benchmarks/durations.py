"""The durations of kernels that the rows about waits await: some repeat, others cannot be foreseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

__all__ = ["PATTERNS", "REPEATING", "SURPRISING", "durations", "mean"]

_LONGEST = 40.0

#: Milliseconds of the next kernel, by the name of a pattern; from a source of chance, and the kernel's number.
PATTERNS: dict[str, Callable[[random.Random, int], float]] = {
    "constant": lambda chance, number: 10.0,
    "in_turn": lambda chance, number: (1.0, 10.0)[number % 2],
    "uniform": lambda chance, number: chance.uniform(2.0, 20.0),
    "longer": lambda chance, number: 25.0 if chance.random() < 0.1 else 10.0,
    "shorter": lambda chance, number: 3.0 if chance.random() < 0.1 else 20.0,
    "lognormal": lambda chance, number: min(_LONGEST, chance.lognormvariate(1.6, 0.8)),
}

#: The patterns whose next duration is mostly the one before, and the others.
REPEATING = ("constant", "longer", "shorter")
SURPRISING = ("in_turn", "uniform", "lognormal")

_MEANS = {"constant": 10.0, "in_turn": 5.5, "uniform": 11.0, "longer": 11.5, "shorter": 18.3, "lognormal": 6.8}


def mean(pattern: str) -> float:
    """Return the mean duration in seconds."""
    return _MEANS[pattern] / 1e3


def durations(pattern: str, seed: object, scale: float = 1.0) -> Iterator[float]:
    """Yield seconds, ``scale`` times those of the pattern. The same seed gives the same durations."""
    chance, number = random.Random(f"{pattern} {seed}"), 0
    while True:
        yield PATTERNS[pattern](chance, number) / 1e3 * scale
        number += 1
