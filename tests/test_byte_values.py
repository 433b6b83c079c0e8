from __future__ import annotations

import itertools
import random

from aiocuda._base._byte_values import ByteValues


def test_one_value_is_one_run() -> None:
    ranges = ByteValues(100, "a")
    assert ranges.within(0, 100) == [(100, "a")]
    assert ranges.within(10, 30) == [(20, "a")]


def test_equal_neighbours_are_one_run() -> None:
    ranges = ByteValues(100, 0)
    for start in range(0, 100, 10):
        ranges.change(start, start + 10, lambda value: value + 1)
    assert ranges.within(0, 100) == [(100, 1)]
    ranges.change(20, 40, lambda value: 7)
    ranges.change(20, 40, lambda value: 1)
    assert ranges.within(0, 100) == [(100, 1)]


def test_as_a_list_of_bytes_would_be() -> None:
    chance = random.Random(4)
    ranges, shadow = ByteValues(64, 0), [0] * 64
    for _ in range(2000):
        start = chance.randrange(64)
        stop = chance.randrange(start + 1, 65)
        term = chance.randrange(3)

        def change(value: int, term: int = term) -> int:
            return (value * 2 + term) % 4

        ranges.change(start, stop, change)
        shadow[start:stop] = map(change, shadow[start:stop])
        at = chance.randrange(64)
        end = chance.randrange(at + 1, 65)
        runs = ranges.within(at, end)
        assert [value for nbytes, value in runs for _ in range(nbytes)] == shadow[at:end]
        assert all(one[1] != two[1] for one, two in itertools.pairwise(runs))
