"""Joining: streams made to wait for each other, on the device, in as many steps as there are streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue
from ..stream import CheckedStream
from . import _checking

__all__ = ["follow", "join"]


def follow(queue: StreamQueue, operation: Operation[Any] | None) -> None:
    """What the stream is given from now on waits, on the device, for an operation of another one."""
    if operation is None:
        return
    if operation.extra is not None:
        failure = operation.failure
        if operation.is_settled and failure is not None and not failure.delivered:
            queue.wait(operation)  # skips what comes
            return
    _checking.follow(queue, operation)


def join(queues: Iterable[StreamQueue]) -> Operation[None]:
    """Whatever the streams are given from now on waits for all that any of them was given so far.

    Through one of them, the first: it waits for the others, an event is recorded behind that, and the others wait for
    it. So N streams cost 2 × (N - 1) waits and one record, and not N².
    """
    device_state, *others = dict.fromkeys(queues)
    device_state.check()
    for queue in others:
        if queue.closed or queue.loop is not device_state.loop:
            queue.check()
    quick = not isinstance(device_state.stream, CheckedStream)  # its device checks all streams, or none
    _wait_for_all(device_state, others, quick)
    # Unlike other places in the order it is often waited for: what it takes is learned.
    estimate = device_state.device_state.predictor.estimate(("barrier", len(others)))
    joined: Operation[None] = device_state.enqueue("barrier", estimate, _nothing, ())
    lease = joined.lease
    wait = device_state.driver.stream_wait
    for queue in others:
        if (
            quick
            and lease is not None
            and not (queue.shared or queue.recorded)
            and queue.poison is None
            and not queue.host_queue.entries
        ):
            queue.note_wait()
            wait(queue.handle, lease.handle)
        else:
            follow(queue, joined)
    return joined


def _wait_for_all(device_state: StreamQueue, others: list[StreamQueue], quick: bool) -> None:
    """The hub waits for what each of the others was given last.

    Where `follow` and `StreamQueue.end` would find nothing to ask, its event is waited for right here: 16 streams are
    joined in 18 µs and not 22.
    """
    wait, handle = device_state.driver.stream_wait, device_state.handle
    if (
        quick
        and not (device_state.shared or device_state.recorded)
        and device_state.poison is None
        and not device_state.host_queue.entries
    ):
        for queue in others:
            pending = queue.pending  # and not shared: what others have enqueued there is behind all of that
            if (
                pending
                and not (queue.shared or queue.recorded)
                and queue.unmarked_wait_at != queue.enqueued
                and not queue.host_queue.entries
            ):
                tail = pending[-1]
                lease = tail.lease
                if lease is not None and tail.extra is None and queue.poison is None:
                    device_state.note_wait()
                    wait(handle, lease.handle)
                    continue
            follow(device_state, queue.end())
    else:
        for queue in others:
            follow(device_state, queue.end())


def _nothing() -> None:
    """It is only a place in the order."""
