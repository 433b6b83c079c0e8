"""Places: the streams and the slots of a batcher, one of each for every batch that runs at a time."""

from __future__ import annotations

from typing import Any

from ..device import Device
from ..lowlevel import owned, queue_of, resources_of
from ..pipeline import TripleBuffer
from ..stream import Stream
from ._place import Place

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
                    stream = device.stream(name=f"batches {number}")
                    self._streams.append(owned(stream))
            except BaseException:
                self.leave()
                raise

    def place(self, item: Any) -> Place:
        """Return a context manager that takes a place for the time of its block: see `Place`."""
        return Place(self._ring, self._streams, item)

    async def drain(self) -> None:
        """Wait for the work of all streams. They accept no more."""
        if self._device is not None:
            streams, queues = resources_of(self._device).streams, [queue_of(stream) for stream in self._streams]
            for queue in queues:
                streams.refuse(queue)
            await streams.drain(queues)

    def leave(self) -> None:
        """Close the streams without waiting for their work, if there is any."""
        for stream in self._streams:
            resources_of(self._device).streams.leave(queue_of(stream))
        self._ring.free_buffers()
