"""The unfinished operations, open streams and buffers that a test leaves on its device."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from .._device_resources import resources_of

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["left_on"]


def left_on(device: Device) -> list[str]:
    """Return a line for each kind of object that a test has left. Runs on the loop that has used the device."""
    if device.closed or device.driver.fault is not None:
        return []  # a closed device has freed everything, and a lost one cannot free anything
    found = []
    unfinished = device.statistics().in_flight
    if unfinished:
        found.append(f"{unfinished} unfinished operation{'s' * (unfinished != 1)}: await them, or abandon them")
    streams = [
        queue.name for loop_state in resources_of(device).loop_states for queue in loop_state.queues if not queue.closed
    ]
    if streams:
        found.append(f"open streams ({', '.join(streams)}): use `async with device.stream() as stream`")
    if not found:  # unfinished operations and open streams hold buffers, which need no line of their own
        held = _held_bytes(device)
        if any(held):
            gc.collect()  # buffers that only garbage holds
            held = _held_bytes(device)
        if any(held):
            found.append(f"{held[0]} bytes of device memory and {held[1]} of pinned memory: free or drop those buffers")
    return found


def _held_bytes(device: Device) -> tuple[int, int]:
    """Return the bytes of device memory and of pinned memory that are neither freed nor dropped."""
    for loop_state in resources_of(device).loop_states:
        device.memory.sweep(loop_state.reactor)
    resources_of(device).pinned_pool.sweep()
    return device.memory.live_bytes, sum(region.nbytes for region in resources_of(device).pinned_pool.lent.values())
