"""Waits between streams, on the device: one stream for another one, and all streams of a group for each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..completion._stream_queue import CLOSED, COMPLICATED, StreamOperation, StreamQueue, nothing
from ..stream._stream import CheckedStream

__all__ = ["follow", "follow_checked", "join"]


def follow(queue: StreamQueue, operation: StreamOperation[Any] | None) -> None:
    """Let later work of a stream wait, on the device, for an operation of another stream.

    If the operation has failed and no waiter has received the failure, later work of the stream is skipped.
    """
    if operation is None:
        return
    if operation.extra is not None:
        failure = operation.failure
        if operation.is_settled and failure is not None and not failure.delivered:
            queue.wait(operation)  # skips later work
            return
    follow_checked(queue, operation)


def follow_checked(queue: StreamQueue, operation: StreamOperation[Any]) -> None:
    """Do the same as `StreamQueue.follow`, and notify the checker of the stream, if it has one."""
    queue.follow(operation)
    stream = queue.stream
    if isinstance(stream, CheckedStream) and stream.device.checker is not None:
        stream.device.checker.wait(queue, operation)


def join(queues: Iterable[StreamQueue]) -> StreamOperation[None]:
    """Let later work of each stream wait for all earlier work of all of them.

    The first stream waits for the others and records an event; then the others wait for that event. So N streams cost
    2 × (N - 1) waits and one record instead of N² waits.
    """
    first, *others = dict.fromkeys(queues)
    first.check()
    for queue in others:
        if queue.obstacles & CLOSED or queue.loop is not first.loop:
            queue.check()
    quick = not isinstance(first.stream, CheckedStream)  # the streams of a device are either all checked or not at all
    _wait_for_all(first, others, quick)
    # Unlike other marks, a barrier is often awaited: its duration is learned.
    estimate = first.device_state.predictor.estimate(("barrier", len(others)))
    joined: StreamOperation[None] = first.enqueue("barrier", estimate, nothing, ())
    lease = joined.lease
    wait = first.driver.stream_wait
    for queue in others:
        if quick and lease is not None and not queue.obstacles & COMPLICATED and not queue.host_queue.entries:
            queue.note_wait()
            wait(queue.handle, lease.handle)
        else:
            follow(queue, joined)
    return joined


def _wait_for_all(first: StreamQueue, others: list[StreamQueue], quick: bool) -> None:
    """Let the first stream wait for the newest operation of each of the others.

    If neither `follow` nor `StreamQueue.end` has a special case to handle, this function waits for the event itself: 16
    streams are joined in 18 µs instead of 22 µs.
    """
    wait, handle = first.driver.stream_wait, first.handle
    if quick and not first.obstacles & COMPLICATED and not first.host_queue.entries:
        for queue in others:
            pending = queue.pending
            if (
                pending
                and not queue.obstacles & COMPLICATED  # others may have enqueued more work on a shared stream
                and queue.unmarked_wait_at != queue.enqueued
                and not queue.host_queue.entries
            ):
                tail = pending[-1]
                lease = tail.lease
                if lease is not None and tail.extra is None:
                    first.note_wait()
                    wait(handle, lease.handle)
                    continue
            follow(first, queue.end())
    else:
        for queue in others:
            follow(first, queue.end())
