"""The order of samples: permutations, windows, ranks. Checked against orders that are computed without arithmetic."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.data import Shuffle
from aiocuda.data._order import Order, Permutation, Positions, WindowShuffle
from aiocuda.data._sources import IndexFeed


def permuted(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    found: list[int] = Permutation(length, Shuffle(seed), epoch).indices(np.arange(length, dtype=np.uint64)).tolist()
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 7, 63, 64, 65, 1000, 4096, 100_003])
def test_each_index_comes_once(length: int) -> None:
    assert sorted(permuted(length, seed=length)) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(permuted(100, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    assert permuted(100, 3, 4) == permuted(100, 3, 4)


def test_all_orders_of_four_are_equally_frequent() -> None:
    """Chi-square of 24 orders in 480 epochs: 23 degrees of freedom, and 60 is beyond one in 30 000."""
    counts = Counter(tuple(permuted(4, 1, epoch)) for epoch in range(480))
    assert len(counts) == math.factorial(4)
    assert sum((count - 20) ** 2 / 20 for count in counts.values()) < 60


@pytest.mark.parametrize("length", [10, 100, 1000])
def test_each_index_is_at_each_place_equally_often(length: int) -> None:
    epochs = 1000
    begin = np.zeros(1, np.uint64)
    first = Counter(int(Permutation(length, Shuffle(2), epoch).indices(begin)[0]) for epoch in range(epochs))
    expected = epochs / length
    chi_square = sum((first[index] - expected) ** 2 / expected for index in range(length))
    assert chi_square < length + 6 * math.sqrt(2 * length)


def test_neighbours_do_not_stay_neighbours() -> None:
    order = permuted(100_000, 5)
    close = sum(abs(one - other) < 10 for one, other in itertools.pairwise(order))
    assert close < 50  # 20 by chance


def test_one_index_needs_no_memory_for_the_others() -> None:
    positions = np.array([0, 123_456_789_012, 2**50 - 1], np.uint64)
    indices = Permutation(2**50, Shuffle(1), 0).indices(positions)
    assert (indices < 2**50).all()
    assert len(set(indices.tolist())) == 3


def test_the_order_is_the_same_in_every_process() -> None:
    program = (
        "import numpy as np; from aiocuda.data._order import *; "
        "print(Permutation(20, Shuffle(7), 3).indices(np.arange(20, dtype=np.uint64)).tolist())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "5",
        "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert ended.stdout.strip() == str(permuted(20, 7, 3))


def test_the_order_of_a_seed_never_changes() -> None:
    """A resumed run, also under a later version, goes on in the same order."""
    assert permuted(12, 0, 0) == PERMUTATION
    window = WindowShuffle(4, Shuffle(0, 4), 0)
    assert [item for number in range(12) for item in window.add(number)] + window.end() == WINDOW


PERMUTATION = [11, 5, 7, 9, 3, 1, 8, 10, 0, 2, 4, 6]
WINDOW = [0, 1, 3, 5, 6, 2, 8, 9, 4, 7, 11, 10]


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_yields_each_item_once_and_none_too_early(window: int) -> None:
    shuffled = WindowShuffle(window, Shuffle(3, window), 1)
    order = [item for number in range(50) for item in shuffled.add(number)] + shuffled.end()
    assert sorted(order) == list(range(50))
    assert all(item <= place + window for place, item in enumerate(order))
    if window == 1:
        assert order == list(range(50))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"seed": 1.5}, InvalidTypeError, "seed is an integer, not 1.5"),
        ({"seed": True}, InvalidTypeError, "seed is an integer"),
        ({"window": 0}, InvalidArgumentError, "at least 1 sample, not 0"),
        ({"window": "9"}, InvalidTypeError, "window is an integer"),
    ],
)
def test_wrong_shuffles(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Shuffle(**arguments)


# -- ranks -----------------------------------------------------------------------------------------------------------


def batches(length: int, batch_size: int, drop_last: bool, rank: int, world: int, start: int = 0) -> list[list[int]]:
    positions = Positions(length, Order(batch_size, drop_last, (rank, world), None, 0, start, 0))
    steps = [positions.step(at) for at in range(len(positions))]
    return [positions.samples(step.begin, step.end - step.begin).tolist() for step in steps]


@pytest.mark.parametrize("length", [0, 1, 2, 5, 12, 13, 29])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_share_the_order_and_have_equally_many_batches(
    length: int, batch_size: int, world: int, drop_last: bool
) -> None:
    ranks = [batches(length, batch_size, drop_last, rank, world) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    order: list[int] = []
    for step in zip(*ranks, strict=True):
        assert len({len(batch) for batch in step}) == 1
        for row in zip(*step, strict=True):
            order += row
    if drop_last:
        assert order == list(range(length // (batch_size * world) * batch_size * world))
    else:
        assert order[:length] == list(range(length))
        assert order[length:] == [place % length for place in range(len(order) - length)]
        assert len(order) - length < world


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_another_world_size_goes_on_at_the_position(before: int, after: int) -> None:
    length, size = 41, 3
    done = [row for rank in range(before) for batch in batches(length, size, False, rank, before)[:2] for row in batch]
    start = Positions(length, Order(size, False, (0, before), None, 0, 0, 0)).step(1).position
    rest = [row for rank in range(after) for batch in batches(length, size, False, rank, after, start) for row in batch]
    assert sorted(done) == list(range(start))
    assert set(rest) - set(range(after)) == set(range(start, length)) - set(range(after))


@pytest.mark.parametrize("shuffle", [None, Shuffle(1)])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_no_batch_is_planned_at_the_expense_of_one_turn(shuffle: Shuffle | None, batch_size: int) -> None:
    """Indices are computed in blocks. A batch whose turn it is must not pay for the plans of a whole block."""
    feed = IndexFeed(3000 * batch_size, Order(batch_size, False, (0, 1), shuffle, 0, 0, 0))
    calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        calls[-1] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        while feed.next_plan() is not None:
            calls.append(0)
    finally:
        sys.setprofile(None)
    assert len(calls) == 3001
    assert max(calls) < 200
