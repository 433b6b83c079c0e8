"""Arguments: what the verbs of a coordinator are given."""

from __future__ import annotations

from typing import Any

from .._device import Device
from ..errors import InvalidArgumentError, InvalidTypeError
from ..kernels._extent import check_extent
from ..memory._buffer import DeviceBuffer
from ._node import Node

__all__ = ["as_buffer", "check_count", "check_launch", "resolved"]


def as_buffer(thing: Any) -> DeviceBuffer:
    """A device buffer, and nothing else."""
    if not isinstance(thing, DeviceBuffer):
        raise InvalidTypeError(f"a device buffer is meant, or the node of an upload, not {type(thing).__name__}")
    return thing


def resolved(args: tuple[Any, ...]) -> tuple[BaseException | None, tuple[Any, ...]]:
    """Uploads as their buffers; where one of them has no buffer, None, and why."""
    error: BaseException | None = None
    found: list[Any] = []
    for argument in args:
        if isinstance(argument, Node):
            if argument._value is None and argument._error is not None:
                error = error or argument._error
                argument = None
            else:
                argument = argument.buffer
        found.append(argument)
    return error, tuple(found)


def check_count(name: str, value: object, most: int) -> None:
    """An option that counts something."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{name} is an integer, not {value!r}")
    if not 1 <= value <= most:
        raise InvalidArgumentError(f"{name} is from 1 to {most}, and this is {value}")


def check_launch(known: set[Any], device: Device, grid: Any, block: Any, shared_bytes: int) -> None:
    """Grid and block, of which those that were checked before are known."""
    try:
        key = (grid, block, shared_bytes)
        if key in known:
            return
    except TypeError:
        key = None  # a list
    check_extent(grid, block, shared_bytes, device.properties)
    if key is not None and type(grid) in (int, tuple) and type(block) in (int, tuple) and len(known) < 256:
        known.add(key)
