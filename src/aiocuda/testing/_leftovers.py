"""What a test has left behind on its device: nothing, if all is well."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["left_on"]


def left_on(device: Device) -> list[str]:
    """What nobody has awaited, closed, freed or dropped, a line each. On the loop that has used the device."""
    if device.closed or device.driver.fault is not None:
        return []  # closed, all has gone back; and what a lost device holds, nobody can give back
    found = []
    unfinished = device.statistics().in_flight
    if unfinished:
        found.append(f"{unfinished} unfinished operation{'s' * (unfinished != 1)}: await them, or abandon them")
    streams = [queue.name for loop_state in device._loop_states for queue in loop_state.queues if not queue.closed]
    if streams:
        found.append(f"open streams ({', '.join(streams)}): use `async with device.stream() as stream`")
    if not found:  # what is unfinished or open holds buffers, and they are no news
        held = _held(device)
        if any(held):
            gc.collect()  # a buffer that only garbage holds has been dropped
            held = _held(device)
        if any(held):
            found.append(f"{held[0]} bytes of device memory and {held[1]} of pinned memory: free or drop those buffers")
    return found


def _held(device: Device) -> tuple[int, int]:
    """Bytes of device memory and of pinned memory that somebody still holds."""
    for loop_state in device._loop_states:
        device.memory.sweep(loop_state.reactor)
    device._pinned.sweep()
    return device.memory.live_bytes, sum(region.nbytes for region in device._pinned.lent.values())
