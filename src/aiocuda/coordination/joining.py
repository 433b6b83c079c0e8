"""Joining: streams made to wait for each other, on the device, in as many steps as there are streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..completion.lane import Lane
from ..completion.operation import Operation
from ..stream import CheckedStream
from . import checking

__all__ = ["follow", "join"]


def follow(lane: Lane, operation: Operation[Any] | None) -> None:
    """What the stream is given from now on waits, on the device, for an operation of another one."""
    if operation is None:
        return
    if operation._extra is not None:
        failure = operation._failure
        if operation._passed and failure is not None and not failure.delivered:
            lane.wait(operation)  # skips what comes
            return
    checking.follow(lane, operation)


def join(lanes: Iterable[Lane]) -> Operation[None]:
    """Whatever the streams are given from now on waits for all that any of them was given so far.

    Through one of them, the first: it waits for the others, an event is recorded behind that, and the others wait for
    it. So N streams cost 2 × (N - 1) waits and one record, and not N².
    """
    hub, *others = dict.fromkeys(lanes)
    hub.check()
    for lane in others:
        if lane.closed or lane.loop is not hub.loop:
            lane.check()
    quick = not isinstance(hub.stream, CheckedStream)  # its device checks all streams, or none
    _wait_for_all(hub, others, quick)
    # Unlike other places in the order it is often waited for: what it takes is learned.
    estimate = hub.hub.predictor.estimate(("barrier", len(others)))
    joined: Operation[None] = hub.enqueue("barrier", estimate, _nothing, ())
    lease = joined._lease
    wait = hub._driver.stream_wait
    for lane in others:
        if quick and lease is not None and type(lane) is Lane and lane.spoiled is None and not lane.queue.entries:
            lane.waits()
            wait(lane.handle, lease.handle)
        else:
            follow(lane, joined)
    return joined


def _wait_for_all(hub: Lane, others: list[Lane], quick: bool) -> None:
    """The hub waits for what each of the others was given last.

    Where `follow` and `Lane.end` would find nothing to ask, its event is waited for right here: 16 streams are joined
    in 18 µs and not 22.
    """
    wait, handle = hub._driver.stream_wait, hub.handle
    if quick and type(hub) is Lane and hub.spoiled is None and not hub.queue.entries:
        for lane in others:
            pending = lane.pending  # and no `SharedLane`: what others have enqueued there is behind all of that
            if pending and type(lane) is Lane and lane.told_at != lane.enqueued and not lane.queue.entries:
                tail = pending[-1]
                lease = tail._lease
                if lease is not None and tail._extra is None and lane.spoiled is None:
                    hub.waits()
                    wait(handle, lease.handle)
                    continue
            follow(hub, lane.end())
    else:
        for lane in others:
            follow(hub, lane.end())


def _nothing() -> None:
    """It is only a place in the order."""
