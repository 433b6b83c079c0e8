"""Places: the streams and the slots of a batcher, one of each for every batch that runs at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from .._device import Device
from .._device_resources import resources_of
from ..completion._stream_queue import stream_queue
from ..errors import AiocudaError
from ..pipeline import Slot, TripleBuffer
from ..stream import Stream

__all__ = ["Places"]


class Place:
    """Takes a place for the time of the block, and waits at its end for the work on its stream.

    One is free, so this does not wait for another batch. A failure of the work leaves the block, unless an exception
    does. This is no generator of `contextlib`, which sets ``__traceback__``: a frozen dataclass refuses that.
    """

    __slots__ = ("_item", "_ring", "_slot", "_streams")

    def __init__(self, ring: TripleBuffer, streams: Sequence[Stream], item: Any) -> None:
        self._ring = ring
        self._streams = streams
        self._item = item
        self._slot: Slot | None = None

    async def __aenter__(self) -> Slot | None:
        """Return the slot; None without a device."""
        if not self._streams:
            return None
        slot = self._slot = await self._ring.acquire(self._item)
        slot.stream = self._streams[slot.number]
        return slot

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        slot = self._slot
        if slot is None:
            return
        stream = self._streams[slot.number]
        try:
            if error is None:
                await stream.synchronize()
            else:
                await _finish_after(error, stream)
        finally:
            self._ring.release(slot)


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

    def place(self, item: Any) -> Place:
        """Return a context manager that takes a place for the time of its block: see `Place`."""
        return Place(self._ring, self._streams, item)

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
