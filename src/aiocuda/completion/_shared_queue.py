"""SharedStreamQueue: a stream on which others enqueue, too, and may be capturing it into a graph of theirs.

Whatever is enqueued, recorded or waited for on a stream that is captured becomes part of that graph, or spoils it. So a
shared stream is asked first, each time; a stream of our own never is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..driver.protocol import Driver
from ..errors import BusyError
from ._operation import Operation
from ._stream_queue import StreamQueue

__all__ = ["SharedStreamQueue", "captured", "is_captured", "lent", "refuse_captured", "takes"]

#: Answered for a default stream while a stream that waits for it is captured.
STREAM_CAPTURE_IMPLICIT = 906


class SharedStreamQueue(StreamQueue):
    """A queue whose stream others use: imported, or on loan as long as that lasts."""

    __slots__ = ()

    def check(self) -> None:
        """May something be enqueued now?"""
        super().check()
        refuse_captured(self)

    def submit(
        self,
        operation: Operation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        ahead: bool = False,
    ) -> None:
        """Hand an operation to the driver, unless somebody captures the stream.

        A marker of ours is put behind our own work then, without an event: the stream hears nothing of it.
        """
        if not ahead:
            self.check()
        elif captured(self):
            if call is not None:
                refuse_captured(self)
            if not self.active:
                self.reactor.activate(self)
            self.pending.append(operation)
            return
        super().submit(operation, call, arguments, ahead)

    def follow(self, operation: Operation[Any]) -> None:
        """Come behind an operation of another stream, unless somebody captures this one."""
        refuse_captured(self)
        super().follow(operation)


@contextlib.contextmanager
def lent(queue: StreamQueue) -> Iterator[None]:
    """Others use the stream as long as the block lasts."""
    queue.lent += 1
    queue.__class__ = SharedStreamQueue
    try:
        yield
    finally:
        queue.lent -= 1
        if not queue.shared:
            queue.__class__ = StreamQueue


def refuse_captured(queue: StreamQueue) -> None:
    """Raise `BusyError` while somebody else captures the stream."""
    if captured(queue):
        raise BusyError(
            f"{queue.name} is being captured into a graph by somebody else, and what is enqueued now would become part "
            "of it, or spoil it: end that capture first, or use a stream of your own"
        )


def captured(queue: StreamQueue) -> bool:
    """Does somebody else capture this stream? ``cuStreamIsCapturing``."""
    return is_captured(queue._driver, queue.handle)


def is_captured(driver: Driver, stream: int) -> bool:
    """The same, by the driver's name of the stream. Any thread."""
    try:
        return driver.stream_capturing(stream)
    except BusyError as error:
        if getattr(error, "code", 0) == STREAM_CAPTURE_IMPLICIT:
            return True
        raise


def takes(queue: StreamQueue) -> bool:
    """May memory go back in this stream's order just now?"""
    return not queue.ended and not (queue.shared and captured(queue))
