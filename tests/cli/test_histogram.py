from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aiocuda import Device
from aiocuda.cli._histogram import HEADER_BYTES, MOST_SEGMENTS, THREADS, Counter, entropies, histograms
from tests.helpers import quickly


def reference(data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    return np.array([np.count_nonzero(data == value) for value in range(256)])


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["random", "text", "zeros", "ascending"])
async def test_the_kernel_counts_each_segment(device: Device, kind: str) -> None:
    """Of any length, at any place; what lies between them is not counted."""
    lengths = [1, 15, 16, 17, 0, 255, 4096, 100_003, 131_072, 5, *([3] * 300), 262_147]
    places = []
    used = HEADER_BYTES
    for length in lengths:
        used += 16 * (length % 3 == 0)  # gaps, now and then
        places.append(used)
        used += -(-length // 16) * 16
    chance = np.random.default_rng(7)
    content = {
        "random": chance.integers(0, 256, used, np.uint8),
        "text": np.frombuffer(b"the quick brown fox " * (used // 20 + 1), np.uint8)[:used].copy(),
        "zeros": np.zeros(used, np.uint8),
        "ascending": np.arange(used).astype(np.uint8),
    }[kind]
    table = content[:HEADER_BYTES].view(np.int64).reshape(-1, 2)
    table[: len(lengths)] = list(zip(places, lengths, strict=True))
    async with device.stream() as stream:
        slot = await quickly(stream.upload(content))
        rows = stream.empty((MOST_SEGMENTS, 256), np.uint32)
        stream.fill(rows, 7)
        stream.launch(histograms, len(lengths), THREADS, slot, len(lengths), rows)
        found = await quickly(stream.download(rows))
    for place, length, row in zip(places, lengths, found, strict=False):
        assert np.array_equal(row, reference(content[place : place + length]))
    assert (found[len(lengths) :] == 7).all()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 1 << 14, (1 << 14) + 1, 100_001])
def test_the_independent_counter(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    counter = Counter()
    counter.add(data)
    counter.add(np.zeros(1000, np.uint8))
    counter.add(data[: size // 3])
    expected = reference(data) + reference(data[: size // 3])
    expected[0] += 1000
    assert np.array_equal(counter.total(), expected)


def test_entropy() -> None:
    rows = np.zeros((6, 256), np.int64)
    rows[1, 65] = 10**12
    rows[2, :] = 3
    rows[3, :2] = 1
    rows[4, :4] = 1, 2, 3, 4
    rows[5, :2] = 1, 10**9
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    rare = 1 / (10**9 + 1)
    expected = [0, 0, 8, 1, -(shares * np.log2(shares)).sum(), -rare * np.log2(rare) - (1 - rare) * np.log2(1 - rare)]
    assert entropies(rows) == pytest.approx(expected, abs=1e-9)
    assert not np.signbit(entropies(rows)).any()
    assert entropies(np.zeros((0, 256), np.int64)).shape == (0,)
