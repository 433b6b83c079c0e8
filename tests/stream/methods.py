"""The methods of streams that make operations, each with arguments that it takes: the list that tests share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from aiocuda import Device, DeviceBuffer, Event, Operation, PinnedBuffer, Stream, UnifiedBuffer
from tests.helpers import AFFINE

__all__ = ["ARGUMENTS", "LABELLED", "N", "World", "call", "methods_of", "operation_of"]

#: Items of each buffer and array.
N = 64


@dataclasses.dataclass(frozen=True)
class World:
    """What the arguments are made of. Both streams have a use for the memory."""

    device: Device
    stream: Stream
    other: Stream  # its work is what `stream` waits for
    buffer: DeviceBuffer
    pinned: PinnedBuffer
    managed: UnifiedBuffer

    @classmethod
    async def make(cls, device: Device, stream: Stream, other: Stream) -> World:
        """Return a world with loaded kernels, locked memory and no unfinished work."""
        buffer = stream.empty(N, np.uint32)
        await stream.fill(buffer, 0)
        await device.load(AFFINE)
        pinned, managed = await device.pinned(N, np.uint32), device.unified(N, np.uint32)
        return cls(device, stream, other, buffer, pinned, managed)


def _nothing(*_: object) -> None:
    pass


#: The arguments of each method that makes operations.
ARGUMENTS: dict[str, Callable[[World], tuple[Any, ...]]] = {
    "upload": lambda world: (np.zeros(N, np.uint32),),
    "launch": lambda world: (AFFINE, 1, N, world.buffer, N, 1, 1),
    "download": lambda world: (world.buffer, world.pinned),
    "copy": lambda world: (world.buffer, world.pinned),
    "fill": lambda world: (world.buffer, 1),
    "prefetch": lambda world: (world.managed,),
    "submit": lambda world: (_nothing, world.buffer),
    "wait": lambda world: (world.other,),
    "record": lambda world: (),
    "synchronize": lambda world: (),
    "add_callback": lambda world: (_nothing,),
}

#: The methods that take ``label=``. The functions of `submit` take arguments of any name.
LABELLED = [name for name in ARGUMENTS if "label" in inspect.signature(getattr(Stream, name)).parameters]


def call(world: World, name: str, **options: Any) -> Any:
    """Call a method of ``world.stream`` with its arguments."""
    return getattr(world.stream, name)(*ARGUMENTS[name](world), **options)


def methods_of(world: World) -> dict[str, Callable[..., Any]]:
    """Return a function for each method that the device has: it calls the method with its arguments."""
    prefetches = world.device.properties.concurrent_managed_access
    return {name: functools.partial(call, world, name) for name in ARGUMENTS if prefetches or name != "prefetch"}


def operation_of(result: Any) -> Operation[Any]:
    """Return the operation that a method has made; `Stream.record` returns its event."""
    operation = result.operation if isinstance(result, Event) else result
    assert isinstance(operation, Operation)
    return operation
