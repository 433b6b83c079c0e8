"""Checks grid, block and shared memory of a launch against the limits of the device."""

from __future__ import annotations

import operator
from typing import Any

from .._base._types import DeviceProperties, Dim3
from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["check_extent"]

_LAUNCH = "launch(kernel, grid, block, *arguments), or launch(kernel, *arguments, n=count, block=256)"


def check_extent(grid: Any, block: Any, shared_bytes: Any, properties: DeviceProperties) -> tuple[Dim3, Dim3]:
    """Return grid and block as three integers each, after all checks.

    Raises
    ------
    InvalidTypeError
        A grid or block that is not an integer or one to three integers; ``shared_bytes`` that is no integer.
    InvalidArgumentError
        A value below 1 (``shared_bytes``: below 0) or above the device's limit, which the message names.
    """
    grid = _extent("grid", grid, properties.max_grid, properties.name)
    block = _extent("block", block, properties.max_block, properties.name)
    threads = block[0] * block[1] * block[2]
    if threads > properties.max_threads_per_block:
        raise InvalidArgumentError(
            f"block {block} has {threads} threads; {properties.name} runs at most "
            f"{properties.max_threads_per_block} per block",
            limit=properties.max_threads_per_block,
        )
    shared_bytes = _integer("shared_bytes", shared_bytes)
    if not 0 <= shared_bytes <= properties.max_shared_bytes:
        raise InvalidArgumentError(
            f"shared_bytes is {shared_bytes}; {properties.name} gives a block 0 to {properties.max_shared_bytes} bytes",
            limit=properties.max_shared_bytes,
        )
    return grid, block


def _extent(what: str, value: Any, limits: Dim3, device: str) -> Dim3:
    sizes = [_integer(what, size) for size in (value if isinstance(value, tuple | list) else (value,))]
    if not 1 <= len(sizes) <= 3:
        raise InvalidTypeError(f"{what} is an integer or one to three of them, not {value!r}")
    x, y, z = sizes = sizes + [1] * (3 - len(sizes))
    if 1 <= x <= limits[0] and 1 <= y <= limits[1] and 1 <= z <= limits[2]:
        return x, y, z
    axis = next(axis for axis in range(3) if not 1 <= sizes[axis] <= limits[axis])
    cure = ". launch(kernel, *arguments, n=0) launches nothing" * (what == "grid" and sizes[axis] == 0)
    raise InvalidArgumentError(
        f"{what}.{'xyz'[axis]} is {sizes[axis]}; {device} takes 1 to {limits[axis]}{cure}", limit=limits[axis]
    )


def _integer(what: str, value: Any) -> int:
    if type(value) is int:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        cure = f": {_LAUNCH}" * (what != "shared_bytes")
        raise InvalidTypeError(f"{what} takes integers, not {value!r} ({type(value).__name__}){cure}")
    return number
