"""Grid, block and shared memory against a device's limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocuda._base._types import DeviceProperties, Dim3
from aiocuda.errors import InvalidArgumentError, InvalidTypeError
from aiocuda.kernels._extent import check_extent

PROPERTIES = DeviceProperties(
    name="H200",
    compute_capability=(9, 0),
    total_memory=2**37,
    multiprocessors=132,
    max_grid=(2**31 - 1, 65535, 65535),
    max_block=(1024, 1024, 64),
    max_threads_per_block=1024,
    max_shared_bytes=232448,
    default_shared_bytes=49152,
    copy_engines=3,
    hardware_queues=32,
    managed_memory=True,
    concurrent_managed_access=True,
    unified_addressing=True,
)


def check(grid: Any, block: Any, shared_bytes: Any = 0) -> tuple[Dim3, Dim3]:
    return check_extent(grid, block, shared_bytes, PROPERTIES)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (7, (7, 1, 1)),
        ((7,), (7, 1, 1)),
        ((7, 2), (7, 2, 1)),
        ([7, 2, 3], (7, 2, 3)),
        (np.int64(7), (7, 1, 1)),
        ((np.uint8(7), 2, np.array(3)), (7, 2, 3)),
    ],
)
def test_one_to_three_integers_become_three(given: object, made: Dim3) -> None:
    grid, block = check(given, given)
    assert grid == block == made
    assert {type(size) for size in grid + block} == {int}


def test_the_limits_themselves_are_allowed() -> None:
    assert check((2**31 - 1, 65535, 65535), (1024, 1, 1), 232448) == ((2**31 - 1, 65535, 65535), (1024, 1, 1))
    assert check(1, (4, 4, 64))[1] == (4, 4, 64)


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes", "message", "limit"),
    [
        (0, 1, 0, r"grid.x is 0; H200 takes 1 to 2147483647", 2**31 - 1),
        (-1, 1, 0, r"grid.x is -1", 2**31 - 1),
        (2**31, 1, 0, r"grid.x is 2147483648", 2**31 - 1),
        ((1, 65536), 1, 0, r"grid.y is 65536; H200 takes 1 to 65535", 65535),
        ((1, 1, 0), 1, 0, r"grid.z is 0", 65535),
        (1, 0, 0, r"block.x is 0; H200 takes 1 to 1024", 1024),
        (1, 1025, 0, r"block.x is 1025", 1024),
        (1, (1, 1, 65), 0, r"block.z is 65; H200 takes 1 to 64", 64),
        (1, (32, 33), 0, r"block \(32, 33, 1\) has 1056 threads; H200 runs at most 1024", 1024),
        (1, 1, -1, r"shared_bytes is -1; H200 gives a block 0 to 232448 bytes", 232448),
        (1, 1, 232449, r"shared_bytes is 232449", 232448),
    ],
)
def test_an_extent_beyond_the_device_names_the_limit(
    grid: object, block: object, shared_bytes: object, message: str, limit: int
) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        check(grid, block, shared_bytes)
    assert caught.value.limit == limit  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [True, 1.0, "1", None, (), (1, 1, 1, 1), (1, 2.0), (None,), {1, 2}, np.ones(3, int)])
def test_wrong_extent(value: object) -> None:
    for grid, block in ((value, 1), (1, value)):
        with pytest.raises(InvalidTypeError):
            check(grid, block)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, (1,)])
def test_wrong_number_of_bytes(value: object) -> None:
    with pytest.raises(InvalidTypeError, match="shared_bytes takes integers"):
        check(1, 1, value)
