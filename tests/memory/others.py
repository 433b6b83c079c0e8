"""Other libraries, as far as a machine without a GPU can have them: what hands arrays over, and what takes them."""

from __future__ import annotations

import gc
from typing import Any

from aiocuda import DeviceBuffer, Stream


class Producer:
    """An array of another library, over one of our buffers."""

    def __init__(self, buffer: Any, **options: Any) -> None:
        self.buffer = buffer
        self.options = options  # instead of those that the consumer gives
        self.asked: list[dict[str, Any]] = []

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        return self.buffer.__dlpack__(**options | self.options)

    def __dlpack_device__(self) -> tuple[int, int]:
        told: tuple[int, int] = self.buffer.__dlpack_device__()
        return told


class Interfaced:
    """An array of another library that has only ``__cuda_array_interface__``."""

    def __init__(self, buffer: DeviceBuffer, stream: int | None = None, **entries: Any) -> None:
        self.buffer = buffer  # what its memory lives by
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": buffer.dtype.str,
            "data": (buffer.address, False),
            "version": 3,
            "stream": stream,
        } | entries


def handle(stream: Stream) -> int:
    """What others call a stream."""
    return stream.device.driver.stream_handle(stream._queue.handle)


def sweep(stream: Stream) -> None:
    """What every tick of the watchdog does."""
    gc.collect()
    stream.device.memory.sweep(stream._queue.reactor)
