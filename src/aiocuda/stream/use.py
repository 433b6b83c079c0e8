"""What a stream asks of memory before it uses it for the first time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..completion.lane import Lane
from ..completion.queue import Every, Gate
from ..errors import WrongDeviceError
from ..memory.block import MANY_USES, Block
from ..memory.pinned import PinGate

if TYPE_CHECKING:
    from ..device import Device

__all__ = ["check_here", "meet", "meet_all"]


def meet(lane: Lane, memory: Block, device: Device) -> PinGate | None:
    """Check that the lane may use this memory, and order it behind the allocation.

    What is to use it is enqueued behind the gate, if there is one: the memory is still being page-locked, or could not
    be.

    Raises
    ------
    StaleHandleError
        It has been freed.
    WrongDeviceError
        It belongs to another device.
    """
    lane.check()
    check_here(memory, device)
    if len(memory.uses) >= MANY_USES:
        memory.unfinished()  # forgets what has passed
    born = memory.born
    if born is not None and lane is not memory.home:
        if born._passed:
            memory.born = None
        else:
            lane.follow(born)
    region = memory.region
    if region is None:
        return None
    if not region.locked:
        return PinGate(region, lane)
    memory.region = None
    memory.ready = True
    return None


def check_here(memory: Block, device: Device) -> None:
    """Raise unless a stream of the device may use this memory; see `meet`."""
    memory.check()
    if memory.driver is not device.driver:
        raise WrongDeviceError(
            f"{memory} belongs to another driver ({memory.driver.name!r}, opened apart from this one): download it on "
            "a stream of its own and upload it here, or open both devices on one driver"
        )
    if memory.device not in (device.index, -1):
        raise WrongDeviceError(
            f"this buffer lives on device {memory.device}, the stream is on device {device.index}: "
            "bring it over by stream.copy(target, source)"
        )


def meet_all(lane: Lane, blocks: Iterable[Block], device: Device) -> Gate | None:
    """The same for several blocks."""
    gates = [gate for memory in blocks if (gate := meet(lane, memory, device)) is not None]
    return Every(gates) if gates else None
