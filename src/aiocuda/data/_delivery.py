"""Delivery: the batch that the consumer has."""

from __future__ import annotations

from typing import Any

from .._base._log import log
from ..device import Device
from ..lowlevel import Queue, handle_of, queue_of, resources_of
from ..stream import Stream
from ._batch import Batch, BatchMemory

__all__ = ["Delivery"]


class Delivery:
    """The batch that the consumer has. It is freed when the next one is requested, unless something keeps it.

    Attributes
    ----------
    kept : int
        Batches that another library still held then.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._resources = resources_of(device)
        self._memory: BatchMemory | None = None
        self.kept = 0

    def deliver(self, number: int, indices: tuple[int, ...], stream: Stream, memory: BatchMemory) -> Batch:
        """Return a batch for the consumer."""
        self._memory = memory
        self._device.memory.exports.note_complete(memory.buffers.values())
        return Batch(number, indices, stream, memory, self._queue_of)

    def release(self) -> None:
        """End the consumer's batch: the next one is requested, or the loader is closed."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        exports = self._device.memory.exports
        if exports.returned and not self._resources.closed:
            exports.sweep(self._resources.open_reactor())  # takes back what other libraries have released
        if memory.release() == "exported":
            self.kept += 1
            if self.kept == 1:
                log(
                    "warning", "batch_kept", device=self._device.name,
                    reason="another library still held a batch when the next one was requested: it is freed later",
                )  # fmt: skip

    def _queue_of(self, stream: Any) -> Queue:
        """Return the queue of a stream of aiocuda or of another library."""
        if isinstance(stream, Stream):
            return queue_of(stream)
        return self._resources.imports.queue_of(handle_of(stream))
