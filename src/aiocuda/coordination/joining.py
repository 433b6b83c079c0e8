"""Joining: streams made to wait for each other, on the device, in as many steps as there are streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..completion.lane import Lane
from ..completion.operation import Operation
from ..completion.predict import INSTANT

__all__ = ["follow", "join", "tail_of"]


def tail_of(lane: Lane) -> Operation[Any] | None:
    """What stands for all that a stream was given so far; None if nothing of it is left to wait for.

    A stream with a failure that nobody has read yet runs nothing; what is to follow it is skipped, as if it waited for
    the operation that failed.
    """
    if lane.spoiled is not None:
        return lane.enqueue("wait", INSTANT, _nothing, ())  # is skipped, and whoever waits for it
    return lane.tail()


def follow(lane: Lane, operation: Operation[Any] | None) -> None:
    """What the stream is given from now on waits, on the device, for an operation of another one."""
    if operation is None:
        return
    failure = operation._failure
    if operation._passed and failure is not None and not failure.delivered:
        lane.wait(operation)  # skips what comes
    else:
        lane.follow(operation)


def join(lanes: Iterable[Lane]) -> Operation[None]:
    """Whatever the streams are given from now on waits for all that any of them was given so far.

    Through one of them, the first: it waits for the others, an event is recorded behind that, and the others wait for
    it. So N streams cost 2 × (N - 1) waits and one record, and not N².
    """
    hub, *others = dict.fromkeys(lanes)
    for lane in (hub, *others):
        lane.check()
    for lane in others:
        follow(hub, tail_of(lane))
    joined: Operation[None] = hub.enqueue("barrier", INSTANT, _nothing, ())
    for lane in others:
        follow(lane, joined)
    return joined


def _nothing() -> None:
    """It is only a place in the order."""
