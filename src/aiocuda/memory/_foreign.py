"""Foreign memory: allocated by another library, used by ours.

A block of it holds what its producer handed over. That is let go when the block was freed, or nobody holds it any more,
and everything that used it has passed: the producer may give the memory to somebody else at once, in an order that we
do not know. It happens on a loop, in a sweep, because what then runs is the producer's.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ..completion._device_state import DeviceState
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue, stream_queue
from ..errors import WrongDeviceError
from ._block import Block
from ._buffer import DeviceBuffer
from ._deferred_frees import MOST_LOOKED_AT, DeferredFrees
from ._exports import Exports

if TYPE_CHECKING:
    from ._buffer import HasQueue

__all__ = ["ForeignMemory"]

#: What a device that was left at work may still touch: it is kept as long as the process.
_parked: list[object] = []


class ForeignBlock(Block):
    """A range of somebody else's memory."""

    __slots__ = ("producer",)

    producer: object  #: what the memory lives by

    def __del__(self) -> None:
        # On any thread, in the middle of anything: this one thing.
        self.owner.dropped.append(getattr(self, "producer", None))  # type: ignore[arg-type]  # a `ForeignMemory`


class ForeignMemory:
    """What one device's loops use of other libraries' memory."""

    __slots__ = ("_alive", "_limbo", "closed", "device", "device_state", "driver", "dropped", "exports", "properties")

    def __init__(self, device_state: DeviceState, device: object, exports: Exports) -> None:
        self.device_state = device_state
        self.driver = device_state.driver
        self.properties = device_state.properties
        self.device = device
        self.exports = exports
        self.closed = False
        #: What finalisers have left; see `ForeignBlock`.
        self.dropped: list[Any] | deque[Any] = []
        self._limbo: DeferredFrees[ForeignBlock] = DeferredFrees()
        self._alive: dict[weakref.ref[ForeignBlock], None] = {}

    def adopt(
        self,
        producer: object,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        allocation_event: Operation[Any] | None,
        home: StreamQueue | None,
    ) -> DeviceBuffer:
        """A buffer over it. The first use in each stream but ``home`` comes behind ``allocation_event``."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = ForeignBlock(self.driver, self.device_state.device, address if nbytes else 0, nbytes, home, self)
        block.shape, block.dtype, block.allocation_event, block.producer = shape, dtype, allocation_event, producer
        self._alive[weakref.ref(block, self._alive.pop)] = None
        return DeviceBuffer(self, block, 0, shape, dtype)

    def free(self, block: Block, stream: HasQueue | StreamQueue | None) -> None:
        """Let go of it once everything that uses it has passed."""
        assert isinstance(block, ForeignBlock)
        queue = stream if isinstance(stream, StreamQueue) or stream is None else stream_queue(stream)
        if queue is not None and (
            queue.device_state.driver is not self.driver or queue.device_state.device != self.device_state.device
        ):
            raise WrongDeviceError(f"{queue.name} is a stream of another device: free on a stream of this one")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if queue is not None:
            queue.check()
        block.retire()
        self._limbo.add(block)
        self.sweep(MOST_LOOKED_AT)

    def sweep(self, most: int | None = None) -> None:
        """Let go of what nobody uses any more. ``most`` is the number of freed buffers to look at; None for all."""
        if self.driver.fault is not None or self.closed:
            return
        for block in self._limbo.take(most):
            block.producer = None
        self.dropped.clear()

    def close(self) -> None:
        """The device is closed. What it may still touch is kept; all else is let go."""
        self.closed = True
        if self.driver.fault is not None:
            _parked.extend((self._limbo, self.dropped))  # and what finalisers will leave
            return
        for known in list(self._alive):
            block = known()
            if block is None:
                continue  # just gone
            if block.unfinished():
                _parked.append(block)
            else:
                block.producer = None  # nobody can use it any more
        self._limbo.clear()
        self.dropped = deque(maxlen=0)  # what finalisers leave from here on goes at once: there are no sweeps any more
