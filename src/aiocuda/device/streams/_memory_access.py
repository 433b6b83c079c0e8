"""MemoryAccess: the checks and waits of a stream before it uses memory for the first time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..._core import Ring
from ...completion._host_queue import Every, Gate
from ...errors import ClosedError
from ...kernels import Kernel
from ...memory._block import MANY_USES, Block
from ...memory._region import PinGate
from ...memory._unified import UnifiedBuffer
from .._resources import DeviceResources

__all__ = ["MemoryAccess"]


class MemoryAccess:
    """Prepares memory for use by one stream."""

    __slots__ = ("_queue", "_resources")

    def __init__(self, resources: DeviceResources, queue: Ring) -> None:
        self._resources = resources
        self._queue = queue

    def prepare(self, memory: Block) -> PinGate | None:
        """Check that the stream may use the memory, and let it wait for the allocation. The queue has been checked.

        Return the gate of the operation that uses the memory, if the memory is still being page-locked, or could not
        be. Raise what `DeviceResources.check_usable` and `note_cross_device_use` raise.
        """
        queue = self._queue
        self._resources.check_usable(memory)
        if memory.owner.device_state is not queue.device_state:
            self.note_cross_device_use(memory)
        if len(memory.uses) >= MANY_USES:
            memory.unfinished()  # forgets the uses that have passed
        allocation_event = memory.allocation_event
        if allocation_event is not None and queue is not memory.home:
            if allocation_event.is_settled:
                memory.forget_allocation()
            else:
                queue.follow(allocation_event)
        region = memory.region
        if region is None:
            return None
        if not region.locked:
            return PinGate(region, queue)
        memory.end_locking()
        return None

    def prepare_all(self, blocks: Iterable[Block]) -> Gate | None:
        """Check the queue, and `prepare` several blocks; the gate opens when all of them are page-locked."""
        self._queue.check()
        gates = [gate for memory in blocks if (gate := self.prepare(memory)) is not None]
        return Every(gates) if gates else None

    def note_cross_device_use(self, memory: Block) -> None:
        """Let the close of another device, which the memory belongs to, wait for this stream.

        Raise `ClosedError` if that device is being closed; not if it is the base of the stream.
        """
        queue, device_state = self._queue, memory.owner.device_state
        if device_state.closing and queue.rare.base is not device_state:
            raise ClosedError(
                f"{device_state.properties.name} is being closed: {queue.name} may not use its memory any more"
            )
        device_state.note_cross_device_use(queue)

    def note_launch(self, kernel: Kernel, pointers: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Note that managed memory moves to the device whose kernel reads or writes it.

        A launch needs this only if one of its buffers is new to the stream, or managed: see `ManagedBlock.ready`.
        """
        for index in pointers:
            buffer = args[index]
            if isinstance(buffer, UnifiedBuffer):
                buffer._used(self._resources.index, f"launch {kernel.name}", writes=kernel.writes(index))
