"""`ByteValues` against a list with a value for each byte."""

from __future__ import annotations

import itertools

import pytest

from aiocuda._base._byte_values import ByteValues

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import example, given, settings
from hypothesis import strategies as st

NBYTES = 64

#: Not empty, as the ranges of buffers.
RANGES = st.tuples(st.integers(0, NBYTES - 1), st.integers(1, NBYTES)).map(
    lambda pair: (min(pair[0], pair[1] - 1), max(pair[0] + 1, pair[1]))
)

#: A range, and what its new values depend on.
CHANGES = st.lists(st.tuples(RANGES, st.integers(0, 2)), max_size=40)


def run_lengths(values: list[int]) -> list[tuple[int, int]]:
    return [(len(list(run)), value) for value, run in itertools.groupby(values)]


@settings(max_examples=100, deadline=None)
@given(changes=CHANGES, part=RANGES)
@example(changes=[], part=(10, 30))  # one value
@example(changes=[((start, start + 8), 1) for start in range(0, NBYTES, 8)], part=(0, NBYTES))  # equal neighbours
@example(changes=[((0, NBYTES), 1), ((20, 40), 1), ((20, 40), 2)], part=(0, NBYTES))  # equal again
def test_as_a_list_of_bytes_would_be(changes: list[tuple[tuple[int, int], int]], part: tuple[int, int]) -> None:
    ranges, shadow = ByteValues(NBYTES, 0), [0] * NBYTES
    for (start, stop), term in changes:

        def change(value: int, term: int = term) -> int:
            return (value * 2 + term) % 4

        ranges.change(start, stop, change)
        shadow[start:stop] = map(change, shadow[start:stop])
        for low, high in (part, (0, NBYTES)):
            assert ranges.within(low, high) == run_lengths(shadow[low:high])
