"""Closing: how a stream ends. After its work, if it is closed; ahead of it, if it is left by an exception."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..completion._failure import Poison
from ..completion._operation import STAGING
from ..completion._stream_queue import StreamQueue
from ..errors import BusyError, ClosedError

if TYPE_CHECKING:
    from .._device import Device
    from .._loop_state import LoopState

__all__ = ["close", "destroy", "forget_dropped", "give_up", "leave", "refuse", "returned"]


def refuse(queue: StreamQueue) -> None:
    """Refuse new work at once, for who is going to `close` several streams one after the other."""
    if not queue.ended:
        queue.check_loop()
        queue.refuse()


async def close(device: Device, queue: StreamQueue) -> None:
    """Refuse new work, wait for what was accepted, then destroy the stream. If that wait is cancelled, leave it."""
    if queue.ended:
        return
    queue.check_loop()
    if queue.lent:
        raise BusyError(f"{queue.name} is lent: leave the `async with stream.lend()` block first")
    queue.refuse()
    try:
        while not (queue.ended or queue.idle):
            await queue.settle()
    except BaseException:
        give_up(device, queue)
        raise
    if not queue.ended:  # by another task, which was quicker
        queue.finish()
        _give_back(device, queue)


def leave(device: Device, queue: StreamQueue) -> None:
    """Withdraw what is on the host, and wait for nothing: the stream is destroyed behind what it has accepted.

    A stream that is lent is destroyed behind what its borrower enqueues, too, once the loan ends. A stream whose device
    is being closed stays as it is: that waits for its work.
    """
    if not queue.draining:
        give_up(device, queue)


def give_up(device: Device, queue: StreamQueue) -> None:
    """Leave a stream, whatever closes it: the wait for its work was cancelled."""
    if queue.ended:
        return
    queue.check_loop()
    queue.finish()
    _withdraw(queue)
    if not queue.lent:
        _close_behind(device, queue)


def returned(device: Device, queue: StreamQueue) -> None:
    """End the last loan of a stream that was closed meanwhile, by itself or with its device."""
    if queue.lent:
        return
    if _is_held(device, queue):
        queue.submit_marker()  # what others have enqueued is waited for, like our own
        _close_behind(device, queue)
    elif not _is_listed(device, queue) and device.driver.fault is None:
        with contextlib.suppress(ClosedError):  # the driver was closed with its device
            device.driver.stream_destroy(queue.handle)


def _close_behind(device: Device, queue: StreamQueue) -> None:
    """Destroy the stream once the device is done with all that it was given. Until then its site watches it."""
    if queue.idle:
        _give_back(device, queue)
    elif queue.device_state.driver.fault is None:  # else the site keeps it: it has to tell those who wait
        last = queue.submit_marker()
        # Not in the middle of resolving: somebody may have come behind it, to wait for the device's end.
        last.on_settled = lambda: queue.loop.call_soon(_close_behind, device, queue)


def forget_dropped(device: Device, loop_state: LoopState) -> None:
    """Imported streams that nobody holds any more: there is nothing to warn of, for their owner closes them."""
    for queue in tuple(loop_state.queues):
        if queue.imported and queue.stream is None and queue.idle:
            queue.finish()
            _give_back(device, queue)


def _give_back(device: Device, queue: StreamQueue) -> None:
    if _is_held(device, queue):
        del device._loop_states.here().queues[queue]
        queue.reactor.retire(queue)
        destroy(device, queue)


def _is_held(device: Device, queue: StreamQueue) -> bool:
    """Is it still there to be closed? Otherwise its device takes it, or has."""
    return not device.closed and _is_listed(device, queue)


def _is_listed(device: Device, queue: StreamQueue) -> bool:
    """Has the device not let go of it yet?"""
    loop_state = device._loop_states.get(queue.loop)
    return loop_state is not None and queue in loop_state.queues


def _withdraw(queue: StreamQueue) -> None:
    """Abandon what the device has not heard of; what waits for it in other streams is skipped.

    A download that has begun keeps its place until no thread writes its array any more.
    """
    if queue.host_queue.entries and not queue.pending:
        queue.submit_marker()  # so that they pass behind what was allocated for them
    followers, queue.host_queue.followers = queue.host_queue.followers, {}
    withdrawn = list(queue.host_queue.entries)
    landings = [operation.copy_out if operation.status == STAGING else None for operation in withdrawn]
    queue.withdraw_all()
    if not withdrawn:
        return
    error = ClosedError(f"{queue.name} was left by an exception while this was still on the host")
    spoiled = Poison(error, queue.loop, repr(withdrawn[0]))
    spoiled.reported = not followers  # who leaves by an exception knows; who waits elsewhere may not
    failure = spoiled.failure()
    for operation, land in zip(withdrawn, landings, strict=True):
        operation.failure = failure
        if land is not None:
            operation.copy_out = land
            if not operation.detached:
                operation.detached = True
                queue.pending.append(operation)
    for follower in followers:
        follower.host_queue.pump()
        follower.attend()


def destroy(device: Device, queue: StreamQueue) -> None:
    """Give a closed queue's stream back to the driver. After a fault there is nothing to give back to.

    A stream that is lent goes back when the loan ends: until then nobody else may get it from the driver.
    """
    queue.finish()
    if device.driver.fault is not None:
        return
    if not queue.imported:
        device._device_state.stream_opened(-1)
    device.memory.release(queue)
    if not queue.lent:
        device.driver.stream_destroy(queue.handle)  # an import is forgotten
