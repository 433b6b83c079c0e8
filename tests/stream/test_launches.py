"""Launches: bound once, and checked as strictly each time after."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from aiocuda import InvalidTypeError, Stream
from tests.helpers import AFFINE, SPIN, open_peer

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes"),
    [
        (1.0, 1, 0),
        (1, 1.0, 0),
        (True, 1, 0),
        (1, True, 0),
        (np.float32(1), 1, 0),
        (np.True_, 1, 0),
        ((1.0, 1, 1), 1, 0),
        (1, (1, True), 0),
        (1, 1, 0.0),
        (1, 1, False),
        (1, 1, np.False_),
    ],
)
async def test_what_equals_an_integer_is_refused_after_the_integer_was_bound(
    stream: Stream, grid: Any, block: Any, shared_bytes: Any
) -> None:
    buffer = await stream.upload(np.ones(1, np.uint32))
    for extents in ((1, 1), (1, 1), ((1, 1, 1), 1), (1, (1, 1))):  # the first one loads the kernel
        await stream.launch(AFFINE, *extents, buffer, 1, 2, 0)
        await stream.launch(SPIN, *extents, 1)
    for kernel, args in ((AFFINE, (buffer, 1, 2, 0)), (SPIN, (1,))):
        with pytest.raises(InvalidTypeError, match="takes integers"):
            stream.launch(kernel, grid, block, *args, shared_bytes=shared_bytes)
    assert (await stream.download(buffer))[0] == 2**4


class Size(enum.IntEnum):
    ONE = 1


async def test_integers_of_every_type_are_bound_once() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        buffer = await stream.upload(np.ones(1, np.uint32))
        await stream.launch(AFFINE, 1, (1, 1), buffer, 1, 2, 0)  # its load
        await stream.launch(AFFINE, 1, (1, 1), buffer, 1, 2, 0)
        bound = stream._launches.bound[AFFINE, 1, (1, 1), 0]
        integers: tuple[Any, ...] = (1, np.int64(1), np.uint8(1))
        for one in integers:
            for pair in ((1, 1), (one, one)):
                await stream.launch(AFFINE, one, pair, buffer, 1, 2, 0, shared_bytes=one - one)
        assert stream._launches.bound == {(AFFINE, 1, (1, 1), 0): bound}
        assert stream._launches.bound[AFFINE, 1, (1, 1), 0] is bound
        await stream.launch(AFFINE, Size.ONE, (Size.ONE, 1), buffer, 1, 2, 0)
        assert (await stream.download(buffer))[0] == 2**9
