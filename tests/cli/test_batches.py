from __future__ import annotations

from itertools import pairwise

import pytest

from aiocuda.cli._batches import ALIGNMENT, LEAST_CAPACITY, MOST_CAPACITY, SEGMENT_BYTES, batches, capacity_for
from aiocuda.cli._files import File
from aiocuda.cli._histogram import HEADER_BYTES, MOST_SEGMENTS

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import given, settings
from hypothesis import strategies as st


def file(*lengths: int) -> File:
    """Pieces of these lengths, a hole before each."""
    pieces, offset = [], 0
    for length in lengths:
        offset += 10
        pieces.append((offset, length))
        offset += length
    return File("f", offset, 0, tuple(pieces))


sizes = st.one_of(st.integers(1, 100), st.integers(1, 3 * SEGMENT_BYTES), st.just(SEGMENT_BYTES))


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.lists(sizes, max_size=3), max_size=30), st.sampled_from([1 << 14, SEGMENT_BYTES, 1 << 20]))
def test_every_byte_goes_into_one_place(lengths: list[list[int]], capacity: int) -> None:
    files = [file(*each) for each in lengths]
    covered: list[list[tuple[int, int]]] = [[] for _ in files]
    for batch in batches(files, capacity):
        assert 0 < len(batch.segments) <= MOST_SEGMENTS
        assert batch.used <= HEADER_BYTES + capacity + ALIGNMENT
        assert batch.nbytes <= capacity
        for segment in batch.segments:
            assert 0 < segment.length <= SEGMENT_BYTES
            assert segment.position % ALIGNMENT == 0
            assert HEADER_BYTES <= segment.position <= segment.position + segment.length <= HEADER_BYTES + capacity
            covered[segment.file].append((segment.offset, segment.length))
        assert all(before.position + before.length <= after.position for before, after in pairwise(batch.segments))
        assert all(before.file <= after.file for before, after in pairwise(batch.segments))
    for each, parts in zip(files, covered, strict=True):
        joined: list[tuple[int, int]] = []
        for offset, length in parts:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        assert tuple(joined) == each.pieces


def test_small_files_share_a_slot_and_large_ones_span_slots() -> None:
    small = list(batches([file(10) for _ in range(100)], 1 << 20))
    assert [len(batch.segments) for batch in small] == [100]
    many = list(batches([file(1) for _ in range(2 * MOST_SEGMENTS + 1)], 1 << 20))
    assert [len(batch.segments) for batch in many] == [MOST_SEGMENTS, MOST_SEGMENTS, 1]
    large = list(batches([file(5 << 20)], 1 << 20))
    assert [batch.nbytes for batch in large] == [1 << 20] * 5


@pytest.mark.parametrize(
    ("total", "capacity"),
    [(0, LEAST_CAPACITY), (1, LEAST_CAPACITY), (100 << 20, 4 << 20), (256 << 20, 8 << 20), (1 << 40, MOST_CAPACITY)],
)
def test_slots_are_many_and_large(total: int, capacity: int) -> None:
    assert capacity_for([file(total)] if total else []) == capacity
