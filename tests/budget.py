"""How many searches and random programs `make test` runs, and how many `make slow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["PART", "part_of", "portions", "spread"]

#: `make test` runs one of so many random programs, and one of so many searches; `make slow` runs all of them.
PART = 5


def part_of(count: int) -> int:
    """Return the number of random programs, of ``count`` in `make slow`, that `make test` runs."""
    return -(-count // PART)


def portions(count: int) -> list[Any]:
    """Return the parameters of a test of random programs: their number in `make test`, and that in `make slow`."""
    return [pytest.param(part_of(count), id="part"), pytest.param(count, id="all", marks=pytest.mark.heavy)]


def spread(values: Sequence[Any]) -> list[Any]:
    """Return the parameters of a test of searches: `make test` runs the first of each group, `make slow` the rest."""
    return [
        value if index % PART == 0 else pytest.param(value, marks=pytest.mark.heavy)
        for index, value in enumerate(values)
    ]
