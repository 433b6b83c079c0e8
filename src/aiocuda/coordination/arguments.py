"""Arguments: what the verbs of a coordinator are given."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidArgumentError, InvalidTypeError
from ..memory.buffer import DeviceBuffer
from .node import Node

__all__ = ["as_buffer", "check_count", "resolved"]


def as_buffer(thing: Any) -> DeviceBuffer:
    """A device buffer, and nothing else."""
    if not isinstance(thing, DeviceBuffer):
        raise InvalidTypeError(f"a device buffer is meant, or the node of an upload, not {type(thing).__name__}")
    return thing


def resolved(args: tuple[Any, ...]) -> tuple[BaseException | None, tuple[Any, ...]]:
    """Uploads as their buffers; or why one of them has none."""
    found: list[Any] = []
    for argument in args:
        if isinstance(argument, Node):
            if argument._value is None and argument._error is not None:
                return argument._error, args
            argument = argument.buffer
        found.append(argument)
    return None, tuple(found)


def check_count(name: str, value: object, most: int) -> None:
    """An option that counts something."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{name} is an integer, not {value!r}")
    if not 1 <= value <= most:
        raise InvalidArgumentError(f"{name} is from 1 to {most}, and this is {value}")
