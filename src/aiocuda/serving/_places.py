"""Places: the streams and the slots of a batcher, one of each for every batch that runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from .._device import Device
from .._device_resources import resources_of
from ..completion._stream_queue import stream_queue
from ..errors import AiocudaError
from ..pipeline import Slot, TripleBuffer
from ..stream import Stream

__all__ = ["Places"]


class Places:
    """The streams and the slots of a batcher, one of each for every batch that runs at a time.

    Parameters
    ----------
    device
        The device of the streams; None for a batcher without a device, which has no streams.
    count
        The number of batches that run at a time.
    """

    def __init__(self, device: Device | None, count: int) -> None:
        self._device = device
        self._ring = TripleBuffer(count)
        self._streams: list[Stream] = []
        if device is not None:
            try:
                for number in range(count):
                    self._streams.append(device.stream(name=f"batches {number}"))
            except BaseException:
                self.leave()
                raise

    @contextlib.asynccontextmanager
    async def place(self, item: Any) -> AsyncIterator[Slot | None]:
        """Take a place for the time of the block, and wait at its end for the work on its stream.

        One is free, so this does not wait for another batch. A failure of the work leaves the block, unless an
        exception does.
        """
        if not self._streams:
            yield None
            return
        slot = await self._ring.acquire(item)
        stream = slot.stream = self._streams[slot.number]
        try:
            try:
                yield slot
            except BaseException as error:
                await _finish_after(error, stream)
                raise
            await stream.synchronize()
        finally:
            self._ring.release(slot)

    async def aclose(self) -> None:
        """Wait for the work of all streams, and close them. A cancellation leaves them."""
        try:
            if self._device is not None:
                await resources_of(self._device).streams.close_all([stream_queue(stream) for stream in self._streams])
        finally:
            self._ring.free_buffers()

    def leave(self) -> None:
        """Close the streams without waiting for their work."""
        for stream in self._streams:
            resources_of(self._device).streams.leave(stream_queue(stream))
        self._ring.free_buffers()


async def _finish_after(error: BaseException, stream: Stream) -> None:
    """Wait for the work that a failed function has left on its stream, and add its failure to the error as a note."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return  # the batcher is being left
    try:
        await stream.synchronize()
    except AiocudaError as second:
        cause = second.__cause__ or second
        if cause is not error:
            error.add_note(f"the work on {stream.name!r} failed, too: {type(cause).__name__}: {cause}")
