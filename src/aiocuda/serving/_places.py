"""Places: the streams and the slots of a batcher, one of each for every batch that runs at a time."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from ..device import Device
from ..errors import AiocudaError
from ..lowlevel import owned, queue_of, resources_of
from ..pipeline import PipelineRing, ResultCopies, Slot, SlotMemory, memory_of
from ..stream import Stream
from ._results import outcomes, own_outcomes

__all__ = ["Place", "Places"]


class Places:
    """The streams and the slots of a batcher, one of each for every batch that runs at a time.

    Parameters
    ----------
    device
        The device of the streams; None for a batcher without a device, which has no streams.
    count
        The number of batches that run at a time.

    Attributes
    ----------
    ring : PipelineRing
        The slots.
    streams : list of Stream
        By the number of the slot.
    """

    def __init__(self, device: Device | None, count: int) -> None:
        self._device = device
        self.ring = PipelineRing(count)
        self.streams: list[Stream] = []
        if device is not None:
            try:
                for number in range(count):
                    stream = device.stream(name=f"batches {number}")
                    self.streams.append(owned(stream, closed_by="its batcher"))
            except BaseException:
                self.leave()
                raise

    def are_busy(self) -> bool:
        """Return whether a stream has unfinished work."""
        return any(queue_of(stream).tail() is not None for stream in self.streams)

    async def drain(self) -> None:
        """Wait for the work of all streams. They accept no more."""
        if self._device is not None:
            streams, queues = resources_of(self._device).streams, [queue_of(stream) for stream in self.streams]
            for queue in queues:
                streams.refuse(queue)
            await streams.drain(queues)

    def leave(self) -> None:
        """Close the streams without waiting for their work, if there is any."""
        for stream in self.streams:
            resources_of(self._device).streams.leave(queue_of(stream))
        self.ring.free_buffers()


class Place:
    """Takes a place for the time of the block, with an item for its slot.

    One is not taken, because no batch begins without a place. `outcomes` waits for the work on the stream; the end of
    the block waits for it if an exception leaves the block before. This is no generator of `contextlib`, which sets
    ``__traceback__``: a frozen dataclass refuses that.

    Attributes
    ----------
    slot : Slot or None
        None without a device.
    stream : Stream or None
    blocks_replaced, results_copied : int
        For the statistics of the batcher.
    """

    __slots__ = ("_is_awaited", "_item", "_places", "blocks_replaced", "results_copied", "slot", "stream")

    def __init__(self, places: Places, item: Any) -> None:
        self._places = places
        self._item = item
        self._is_awaited = False  # the work on the stream
        self.slot: Slot | None = None
        self.stream: Stream | None = None
        self.blocks_replaced = self.results_copied = 0

    async def __aenter__(self) -> Self:
        places = self._places
        if places.streams:
            # None is free if operations of other streams use the memory of the slot, and a graph has its address.
            slot = places.ring.take() if places.ring.free else await places.ring.reserve()
            slot.enter("uploading")
            memory = places.ring.begin(slot, self._item, None).memory
            if memory.pinned or memory.buffers:
                self._renew(slot, memory)
            slot.stream = self.stream = places.streams[slot.number]
            self.slot = slot
        return self

    def _renew(self, slot: Slot, memory: SlotMemory) -> None:
        """Let the slot replace the memory that anything else refers to."""
        try:
            self.blocks_replaced = memory.renew()
        except BaseException:  # Ctrl-C
            self._places.ring.end(slot)
            raise

    async def outcomes(self, results: Any, size: int) -> list[Any]:
        """Wait for the work on the stream, and return the outcomes of a batch, without memory of the slot.

        Raises
        ------
        BatchError
            As `outcomes` of the results.
        AiocudaError
            The work has failed, or a copy of the results.
        """
        slot, stream = self.slot, self.stream
        if slot is None or stream is None:
            return outcomes(results, size)
        try:
            await stream.synchronize()
        finally:
            self._is_awaited = True  # also if it has failed: to wait again would add the same failure as a note
        memory = memory_of(slot)
        if not (memory.pinned or memory.buffers):
            return outcomes(results, size)
        self._is_awaited = False  # the copies
        found, self.results_copied = await own_outcomes(results, size, ResultCopies(memory, stream))
        self._is_awaited = True
        return found

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        slot, stream = self.slot, self.stream
        if slot is None or stream is None:
            return
        try:
            if error is not None and not self._is_awaited:
                await _finish_after(error, stream)
        finally:
            self._places.ring.end(slot)


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
