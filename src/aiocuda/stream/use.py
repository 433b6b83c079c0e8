"""What a stream asks of memory before it uses it for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..completion.lane import Lane
from ..errors import WrongDeviceError
from ..memory.block import Block
from ..memory.pinned import PinGate

if TYPE_CHECKING:
    from ..device import Device

__all__ = ["meet"]

#: Lanes that a block may have been used by before those that have passed are forgotten.
MANY_USES = 8


def meet(lane: Lane, memory: Block, device: Device) -> None:
    """Check that the lane may use this memory, and order it behind the allocation.

    Raises
    ------
    StaleHandleError
        It has been freed.
    WrongDeviceError
        It belongs to another device.
    """
    lane.check()
    memory.check()
    if memory.device not in (device.index, -1) or memory.driver is not device.driver:
        raise WrongDeviceError(
            f"this buffer lives on device {memory.device}, the stream is on device {device.index}: "
            "bring it over by stream.copy(target, source)"
        )
    if len(memory.uses) >= MANY_USES:
        memory.unfinished()  # forgets what has passed: streams come and go, and a buffer may outlive them all
    born = memory.born
    if born is not None and lane is not memory.home:
        if born._passed:
            memory.born = None
        else:
            lane.follow(born)
    region = memory.region
    if region is not None:
        if region.pinned:
            memory.region = None
        else:
            lane.enqueue_behind("wait", PinGate(region, lane), None, ())
