from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from aiocuda.cli._batches import (
    ALIGNMENT,
    Batch,
    batches,
    count_file,
    fill,
    has_changed,
    parts,
    write_table,
)  # fmt: skip
from aiocuda.cli._files import File, find_files
from aiocuda.cli._histogram import HEADER_BYTES
from tests.cli.test_files import as_nobody, open_to_all, sparse

__all__ = ["open_to_all"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="FIFOs and users as POSIX has them")


def laid_out(folder: Path) -> tuple[list[File], Batch, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Files, the one batch that they fit in, and a slot for it."""
    files, _ = find_files(str(folder))
    (batch,) = batches(files, 1 << 20)
    return files, batch, np.full(HEADER_BYTES + (1 << 20), 0xAA, np.uint8)


def test_files_are_read_to_their_positions(tmp_path: Path) -> None:
    contents = {"a": b"x" * 100, "b": os.urandom(300_000), "c": b"end"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files, batch, slot = laid_out(tmp_path)
    assert fill(slot, batch.segments, files) == {}
    write_table(slot, batch)
    table = slot[:HEADER_BYTES].view(np.int64).reshape(-1, 2)
    read = dict.fromkeys(contents, b"")
    for segment, (place, length) in zip(batch.segments, table.tolist(), strict=False):
        assert (place, length) == (segment.position, segment.length)
        read[os.path.basename(files[segment.file].path)] += slot[place : place + length].tobytes()
        if length % ALIGNMENT:
            assert slot[place + length] == 0xAA  # not a byte more
    assert read == contents


def test_unreadable_files_have_a_reason_and_others_are_read(open_to_all: Path) -> None:
    for name in ("a vanished", "b shrank", "c closed", "d fifo", "e folder", "f good"):
        (open_to_all / name).write_bytes(b"0123456789")
    files, batch, slot = laid_out(open_to_all)
    (open_to_all / "a vanished").unlink()
    (open_to_all / "b shrank").write_bytes(b"0123")
    (open_to_all / "c closed").chmod(0)
    (open_to_all / "d fifo").unlink()
    os.mkfifo(open_to_all / "d fifo")
    (open_to_all / "e folder").unlink()
    (open_to_all / "e folder").mkdir()
    with as_nobody():
        failed = fill(slot, batch.segments, files)
    assert failed == {
        0: "vanished",
        1: "shrank while it was read",
        2: "not readable: permission denied",
        3: "no regular file any more",
        4: "no regular file any more",
    }
    good = batch.segments[5]
    assert slot[good.position : good.position + good.length].tobytes() == b"0123456789"
    assert [has_changed(file) for file in files] == [True, True, False, True, True, False]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_of_one_size_and_all_of_it(tmp_path: Path, count: int) -> None:
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(b"x" * 1000 * (1 + number % 3))
    _, batch, _ = laid_out(tmp_path)
    found = list(parts(batch, count))
    assert [segment for part in found for segment in part] == batch.segments
    assert len(found) <= count
    share = batch.nbytes / count
    assert all(sum(segment.length for segment in part) <= share + 3000 for part in found)


def test_the_independent_count(tmp_path: Path) -> None:
    content = os.urandom(2_500_001)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").touch()
    sparse(tmp_path / "c", 3 << 30, at_2147483648=content)
    plain, empty, holes = find_files(str(tmp_path))[0]
    expected = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    assert np.array_equal(count_file(plain), expected)
    assert not count_file(empty).any()
    expected[0] += (3 << 30) - len(content)
    if holes.streamed < 1 << 28:  # else this file system has no holes, and it takes long
        assert np.array_equal(count_file(holes), expected)
    (tmp_path / "a").write_bytes(content[:100])
    with pytest.raises(OSError, match="shrank"):
        count_file(plain)
    (tmp_path / "a").unlink()
    with pytest.raises(FileNotFoundError):
        count_file(plain)
