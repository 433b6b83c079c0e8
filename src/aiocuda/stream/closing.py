"""Closing: how a stream ends. After its work, if it is closed; ahead of it, if it is left by an exception."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..completion.failure import Spoiled
from ..completion.lane import Lane
from ..completion.operation import STAGING
from ..errors import BusyError, ClosedError

if TYPE_CHECKING:
    from ..device import Device
    from ..site import Site

__all__ = ["close", "destroy", "forget_dropped", "give_up", "leave", "refuse", "returned"]


def refuse(lane: Lane) -> None:
    """Refuse new work at once, for who is going to `close` several streams one after the other."""
    if not lane.ended:
        lane.check_loop()
        lane.refuse()


async def close(device: Device, lane: Lane) -> None:
    """Refuse new work, wait for what was accepted, then destroy the stream. If that wait is cancelled, leave it."""
    if lane.ended:
        return
    lane.check_loop()
    if lane.lent:
        raise BusyError(f"{lane.name} is lent: leave the `async with stream.lend()` block first")
    lane.refuse()
    try:
        while not (lane.ended or lane.idle):
            await lane.settle()
    except BaseException:
        give_up(device, lane)
        raise
    if not lane.ended:  # by another task, which was quicker
        lane.finish()
        _give_back(device, lane)


def leave(device: Device, lane: Lane) -> None:
    """Withdraw what is on the host, and wait for nothing: the stream is destroyed behind what it has accepted.

    A stream that is lent is destroyed behind what its borrower enqueues, too, once the loan ends. A stream whose device
    is being closed stays as it is: that waits for its work.
    """
    if not lane.draining:
        give_up(device, lane)


def give_up(device: Device, lane: Lane) -> None:
    """Leave a stream, whatever closes it: the wait for its work was cancelled."""
    if lane.ended:
        return
    lane.check_loop()
    lane.finish()
    _withdraw(lane)
    if not lane.lent:
        _close_behind(device, lane)


def returned(device: Device, lane: Lane) -> None:
    """End the last loan of a stream that was closed meanwhile, by itself or with its device."""
    if lane.lent:
        return
    if _is_held(device, lane):
        lane.mark()  # what others have enqueued is waited for, like our own
        _close_behind(device, lane)
    elif not _is_listed(device, lane) and device.driver.fault is None:
        with contextlib.suppress(ClosedError):  # the driver was closed with its device
            device.driver.stream_destroy(lane.handle)


def _close_behind(device: Device, lane: Lane) -> None:
    """Destroy the stream once the device is done with all that it was given. Until then its site watches it."""
    if lane.idle:
        _give_back(device, lane)
    elif lane.hub.driver.fault is None:  # else the site keeps it: it has to tell those who wait
        last = lane.mark()
        # Not in the middle of resolving: somebody may have come behind it, to wait for the device's end.
        last._release = lambda: lane.loop.call_soon(_close_behind, device, lane)


def forget_dropped(device: Device, site: Site) -> None:
    """Imported streams that nobody holds any more: there is nothing to warn of, for their owner closes them."""
    for lane in tuple(site.lanes):
        if lane.imported and lane.stream is None and lane.idle:
            lane.finish()
            _give_back(device, lane)


def _give_back(device: Device, lane: Lane) -> None:
    if _is_held(device, lane):
        del device._sites.here().lanes[lane]
        lane.reactor.retire(lane)
        destroy(device, lane)


def _is_held(device: Device, lane: Lane) -> bool:
    """Is it still there to be closed? Otherwise its device takes it, or has."""
    return not device.closed and _is_listed(device, lane)


def _is_listed(device: Device, lane: Lane) -> bool:
    """Has the device not let go of it yet?"""
    site = device._sites.get(lane.loop)
    return site is not None and lane in site.lanes


def _withdraw(lane: Lane) -> None:
    """Abandon what the device has not heard of; what waits for it in other streams is skipped.

    A download that has begun keeps its place until no thread writes its array any more.
    """
    if lane.queue.entries and not lane.pending:
        lane.mark()  # so that they pass behind what was allocated for them
    followers, lane.queue.followers = lane.queue.followers, {}
    withdrawn = list(lane.queue.entries)
    landings = [operation._land if operation._state == STAGING else None for operation in withdrawn]
    lane.withdraw_all()
    if not withdrawn:
        return
    error = ClosedError(f"{lane.name} was left by an exception while this was still on the host")
    spoiled = Spoiled(error, lane.loop, repr(withdrawn[0]))
    spoiled.reported = not followers  # who leaves by an exception knows; who waits elsewhere may not
    failure = spoiled.failure()
    for operation, land in zip(withdrawn, landings, strict=True):
        operation._failure = failure
        if land is not None:
            operation._land = land
            if not operation._abandoned:
                operation._abandoned = True
                lane.pending.append(operation)
    for follower in followers:
        follower.queue.pump()
        follower.attend()


def destroy(device: Device, lane: Lane) -> None:
    """Give a closed lane's stream back to the driver. After a fault there is nothing to give back to.

    A stream that is lent goes back when the loan ends: until then nobody else may get it from the driver.
    """
    lane.finish()
    if device.driver.fault is not None:
        return
    if not lane.imported:
        device._hub.stream_opened(-1)
    device.memory.release(lane)
    if not lane.lent:
        device.driver.stream_destroy(lane.handle)  # an import is forgotten
