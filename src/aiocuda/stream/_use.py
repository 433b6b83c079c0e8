"""What a stream asks of memory before it uses it for the first time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..completion._host_queue import Every, Gate
from ..completion._stream_queue import StreamQueue
from ..errors import ClosedError, WrongDeviceError
from ..memory._block import MANY_USES, Block
from ..memory._pinned import PinGate
from ..memory._unified import UnifiedBuffer

if TYPE_CHECKING:
    from .._device import Device
    from ..kernels import Kernel

__all__ = ["check_here", "lend", "meet", "meet_all", "note_launch"]


def meet(queue: StreamQueue, memory: Block, device: Device) -> PinGate | None:
    """Check that the queue may use this memory, and order it behind the allocation.

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
    queue.check()
    check_here(memory, device)
    lend(memory, queue)
    if len(memory.uses) >= MANY_USES:
        memory.unfinished()  # forgets what has passed
    allocation_event = memory.allocation_event
    if allocation_event is not None and queue is not memory.home:
        if allocation_event.is_settled:
            memory.allocation_event = None
        else:
            queue.follow(allocation_event)
    region = memory.region
    if region is None:
        return None
    if not region.locked:
        return PinGate(region, queue)
    memory.region = None
    memory.ready = True
    return None


def lend(memory: Block, queue: StreamQueue) -> None:
    """Whose memory a stream of another opened device uses, that one is not closed before it has.

    Raises
    ------
    ClosedError
        It is just being closed.
    """
    device_state = memory.owner.device_state
    if device_state is not queue.device_state:
        if device_state.closing:
            raise ClosedError(
                f"{device_state.properties.name} is being closed: {queue.name} may not use its memory any more"
            )
        device_state.note_cross_device_use(queue)


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


def meet_all(queue: StreamQueue, blocks: Iterable[Block], device: Device) -> Gate | None:
    """The same for several blocks."""
    gates = [gate for memory in blocks if (gate := meet(queue, memory, device)) is not None]
    return Every(gates) if gates else None


def note_launch(queue: StreamQueue, kernel: Kernel, pointers: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Managed memory moves to the device whose kernel reads or writes it.

    A launch comes here only if one of its buffers is new to the stream, or managed: see `ManagedBlock.ready`.
    """
    for index in pointers:
        buffer = args[index]
        if isinstance(buffer, UnifiedBuffer):
            buffer._used(queue.device_state.device, f"launch {kernel.name}", writes=kernel.writes(index))
