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

from ..completion.hub import Hub
from ..completion.lane import Lane
from ..completion.operation import Operation
from ..errors import WrongDeviceError
from .block import Block
from .buffer import DeviceBuffer
from .exports import Exports
from .limbo import MOST_LOOKED_AT, Limbo

if TYPE_CHECKING:
    from .buffer import HasLane

__all__ = ["ForeignMemory"]

#: What a device that was left at work may still touch: it is kept as long as the process.
_parked: list[object] = []


class ForeignBlock(Block):
    """A range of somebody else's memory."""

    __slots__ = ("producer",)

    producer: object  #: what the memory lives by

    def __del__(self) -> None:
        # On any thread, in the middle of anything: this one thing.
        self.owner.garbage.append(getattr(self, "producer", None))  # type: ignore[arg-type]  # a `ForeignMemory`


class ForeignMemory:
    """What one device's loops use of other libraries' memory."""

    __slots__ = ("_alive", "_limbo", "closed", "device", "driver", "exports", "garbage", "hub", "properties")

    def __init__(self, hub: Hub, device: object, exports: Exports) -> None:
        self.hub = hub
        self.driver = hub.driver
        self.properties = hub.properties
        self.device = device
        self.exports = exports
        self.closed = False
        #: What finalisers have left; see `ForeignBlock`.
        self.garbage: list[Any] | deque[Any] = []
        self._limbo: Limbo[ForeignBlock] = Limbo()
        self._alive: dict[weakref.ref[ForeignBlock], None] = {}

    def adopt(
        self,
        producer: object,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        born: Operation[Any] | None,
        home: Lane | None,
    ) -> DeviceBuffer:
        """A buffer over it. The first use in each stream but ``home`` comes behind ``born``."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = ForeignBlock(self.driver, self.hub.device, address if nbytes else 0, nbytes, home, self)
        block.shape, block.dtype, block.born, block.producer = shape, dtype, born, producer
        self._alive[weakref.ref(block, self._alive.pop)] = None
        return DeviceBuffer(self, block, 0, shape, dtype)

    def free(self, block: Block, stream: HasLane | Lane | None) -> None:
        """Let go of it once everything that uses it has passed."""
        assert isinstance(block, ForeignBlock)
        lane = stream if isinstance(stream, Lane) or stream is None else stream._lane
        if lane is not None and (lane.hub.driver is not self.driver or lane.hub.device != self.hub.device):
            raise WrongDeviceError(f"{lane.name} is a stream of another device: free on a stream of this one")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if lane is not None:
            lane.check()
        block.retire()
        self._limbo.add(block)
        self.sweep(MOST_LOOKED_AT)

    def sweep(self, most: int | None = None) -> None:
        """Let go of what nobody uses any more. ``most`` is the number of freed buffers to look at; None for all."""
        if self.driver.fault is not None or self.closed:
            return
        for block in self._limbo.take(most):
            block.producer = None
        self.garbage.clear()

    def close(self) -> None:
        """The device is closed. What it may still touch is kept; all else is let go."""
        self.closed = True
        if self.driver.fault is not None:
            _parked.extend((self._limbo, self.garbage))  # and what finalisers will leave
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
        self.garbage = deque(maxlen=0)  # what finalisers leave from here on goes at once: there are no sweeps any more
