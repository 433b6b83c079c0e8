from __future__ import annotations

import numpy as np
import pytest

from aiocuda.cli._batches import batches
from aiocuda.cli._demo import CompleteFiles, FileCounts
from aiocuda.cli._files import File


@pytest.mark.parametrize("capacity", [1 << 12, 1 << 14, 1 << 20])
def test_rows_become_files(capacity: int) -> None:
    chance = np.random.default_rng(capacity)
    sizes = [0, 1, 5000, 300_000, 16, 16, 0, 700_001, 9]
    data = [chance.integers(0, 256, size, np.uint8) for size in sizes]
    files = [File(str(number), size, 0, ((0, size),) if size else ()) for number, size in enumerate(sizes)]
    files.append(File("holes", 10_000, 0, ((100, 50), (5000, 1))))
    data.append(np.full(10_000, 0, np.uint8))
    data[-1][100:150] = 3
    data[-1][5000] = 4
    counts = FileCounts(files)
    found: dict[int, list[int]] = {}

    def note(counted: CompleteFiles) -> None:
        found.update(zip(counted.numbers, counted.histograms.tolist(), strict=True))
        assert len(counted.entropies) == len(counted.numbers)

    for batch in batches(files, capacity):
        rows = np.array(
            [
                np.bincount(data[one.file][one.offset : one.offset + one.length], minlength=256)
                for one in batch.segments
            ],
            np.uint32,
        )
        note(counts.add(batch, rows))
        assert (rows.sum(axis=1) == [one.length for one in batch.segments]).all()  # nothing of the slot's is touched
    assert list(found) == [number for number, file in enumerate(files) if file.pieces]
    note(counts.without_pieces())
    assert found == {number: np.bincount(content, minlength=256).tolist() for number, content in enumerate(data)}
    assert set(counts.digests) == set(found)
    assert counts.digests[0] == counts.digests[6] != counts.digests[1]


def test_files_that_could_not_be_read_are_not_counted() -> None:
    files = [File(str(number), 10, 0, ((0, 10),)) for number in range(3)]
    counts = FileCounts(files)
    counts.failed[1] = "vanished"
    (batch,) = batches(files, 1 << 20)
    counted = counts.add(batch, np.ones((3, 256), np.uint32))
    assert counted.numbers == [0, 2]
    assert counted.histograms.shape == (2, 256)
    assert set(counts.digests) == {0, 2}
