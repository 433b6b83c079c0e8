"""What a stream asks of memory before it uses it for the first time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..completion.lane import Lane
from ..completion.queue import Every, Gate
from ..errors import ClosedError, WrongDeviceError
from ..memory.block import MANY_USES, Block
from ..memory.pinned import PinGate
from ..memory.unified import UnifiedBuffer

if TYPE_CHECKING:
    from ..device import Device
    from ..kernel import Kernel

__all__ = ["check_here", "lend", "meet", "meet_all", "note_launch"]


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
    ClosedError
        It belongs to a device that is just being closed.
    """
    lane.check()
    check_here(memory, device)
    lend(memory, lane)
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


def lend(memory: Block, lane: Lane) -> None:
    """Whose memory a stream of another opened device uses, that one is not closed before it has.

    Raises
    ------
    ClosedError
        It is just being closed.
    """
    hub = memory.owner.hub
    if hub is not lane.hub:
        if hub.closing:
            raise ClosedError(f"{hub.properties.name} is being closed: {lane.name} may not use its memory any more")
        hub.lend(lane)


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


def note_launch(lane: Lane, kernel: Kernel, pointers: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Managed memory moves to the device whose kernel reads or writes it.

    A launch comes here only if one of its buffers is new to the stream, or managed: see `ManagedBlock.ready`.
    """
    for index in pointers:
        buffer = args[index]
        if isinstance(buffer, UnifiedBuffer):
            buffer._used(lane.hub.device, f"launch {kernel.name}", writes=kernel.writes(index))
