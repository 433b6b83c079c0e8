"""The order of samples: permutations, windows, ranks, resumes. Checked against orders computed without arithmetic."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.data import Shuffle
from aiocuda.data._options import LoaderOptions
from aiocuda.data._sources import BatchPlan, IndexFeed, Order, Permutation, Positions, WindowShuffle
from aiocuda.data._state import LoaderState, Progress

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

QUICK = settings(max_examples=50, deadline=None)


def permuted(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    found: list[int] = Permutation(length, Shuffle(seed), epoch).indices(np.arange(length, dtype=np.uint64)).tolist()
    return found


@QUICK
@given(length=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 2**40))
@example(length=1, seed=0, epoch=0)
@example(length=63, seed=63, epoch=0)
@example(length=64, seed=64, epoch=0)
@example(length=65, seed=65, epoch=0)
@example(length=4096, seed=4096, epoch=0)
@example(length=100_003, seed=100_003, epoch=0)
def test_each_index_comes_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(length, seed, epoch)) == list(range(length))


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
        "import numpy as np; from aiocuda.data._sources import *; "
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


@QUICK
@given(window=st.integers(1, 100), length=st.integers(0, 200), seed=st.integers(), epoch=st.integers(0, 2**40))
@example(window=1, length=50, seed=3, epoch=1)
@example(window=100, length=50, seed=3, epoch=1)
def test_a_window_yields_each_item_once_and_none_too_early(window: int, length: int, seed: int, epoch: int) -> None:
    shuffled = WindowShuffle(window, Shuffle(seed, window), epoch)
    order = [item for number in range(length) for item in shuffled.add(number)]
    assert len(order) == max(0, length - window)
    order += shuffled.end()
    assert sorted(order) == list(range(length))
    assert all(item <= place + window for place, item in enumerate(order))
    if window == 1:
        assert order == list(range(length))


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


LENGTHS, BATCH_SIZES, WORLDS = st.integers(0, 60), st.integers(1, 8), st.integers(1, 8)


def check_rest(order: list[int], start: int, length: int, world: int) -> None:
    """The samples from a position on, then fewer than ``world`` of those at the start of the epoch."""
    assert order == [place % length for place in range(start, start + len(order))]
    assert length - start <= len(order) < length - start + world


@QUICK
@given(length=LENGTHS, batch_size=BATCH_SIZES, world=WORLDS, drop_last=st.booleans())
@example(length=0, batch_size=3, world=2, drop_last=False)
@example(length=1, batch_size=1, world=8, drop_last=False)  # all other ranks repeat the same sample
@example(length=5, batch_size=4, world=8, drop_last=True)  # no batch
@example(length=12, batch_size=3, world=2, drop_last=False)  # nothing is repeated
@example(length=29, batch_size=4, world=3, drop_last=True)
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
        check_rest(order, 0, length, world)


@QUICK
@given(length=LENGTHS, batch_size=BATCH_SIZES, before=WORLDS, after=WORLDS, done=st.integers(1, 4))
@example(length=41, batch_size=3, before=1, after=1, done=2)
@example(length=41, batch_size=3, before=3, after=5, done=2)
@example(length=41, batch_size=3, before=2, after=8, done=7)  # all were delivered
def test_another_world_size_goes_on_at_the_position(
    length: int, batch_size: int, before: int, after: int, done: int
) -> None:
    ranks = [batches(length, batch_size, False, rank, before)[:done] for rank in range(before)]
    assume(len(ranks[0]) == done)
    start = Positions(length, Order(batch_size, False, (0, before), None, 0, 0, 0)).step(done - 1).position
    delivered = sorted(row for rank in ranks for batch in rank for row in batch)
    assert sorted(set(delivered)) == list(range(start))
    rest = [batches(length, batch_size, False, rank, after, start) for rank in range(after)]
    check_rest(
        [row for step in zip(*rest, strict=True) for rows in zip(*step, strict=True) for row in rows],
        start,
        length,
        after,
    )


def options(length: int, batch_size: int, shuffle: Shuffle | None) -> LoaderOptions:
    return LoaderOptions.checked(
        range(length), None, None, None, shuffle, None, (0, 1), batch_size=batch_size, drop_last=False, workers=0,
        executor="thread", ordered=False, prefetch=1, on_error="raise", timeout=None, restarts=0,
    )  # fmt: skip


def plans(length: int, order: Order) -> dict[int, BatchPlan]:
    return {plan.number: plan for plan in iter(IndexFeed(length, order).next_plan, None)}


@QUICK
@given(
    length=st.integers(0, 42),
    batch_size=st.integers(3, 8),
    shuffle=st.none() | st.builds(Shuffle, st.integers()),
    delivered=st.permutations(range(14)),
    count=st.integers(0, 14),
)
@example(length=42, batch_size=3, shuffle=None, delivered=list(range(14)), count=5)  # in order
@example(length=42, batch_size=3, shuffle=None, delivered=list(range(13, -1, -1)), count=13)  # all but the first
@example(length=42, batch_size=3, shuffle=Shuffle(1), delivered=list(range(14)), count=14)
def test_the_batches_that_were_not_delivered_come_after_a_resume(
    length: int, batch_size: int, shuffle: Shuffle | None, delivered: list[int], count: int
) -> None:
    chosen = options(length, batch_size, shuffle)
    progress = Progress(chosen)
    order, left_out = progress.begin(progress.coming(None)[0])
    assert not left_out
    planned = plans(length, order)
    done = [number for number in delivered if number in planned][:count]
    for number in done:
        progress.delivered(number, planned[number].end)
    resumed = Progress(chosen)
    resumed.load(LoaderState.of(json.loads(json.dumps(progress.state().to_dict()))))
    order, left_out = resumed.begin(resumed.coming(None)[0])
    rest = {number: plan for number, plan in plans(length, order).items() if number not in left_out}
    assert rest == {number: plan for number, plan in planned.items() if number not in done}


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
