"""BatchUpload: the copies of one batch to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ..completion import Operation
from ..device import Event
from ..errors import ClosedError, SkippedError
from ..lowlevel import StreamOperation, queue_of
from ..stream import Stream
from ._batch import BatchMemory

__all__ = ["BatchUpload"]


class BatchUpload:
    """The copies of one batch to the device, on one stream.

    Attributes
    ----------
    memory : BatchMemory
        The memory on the device.
    """

    __slots__ = ("_events", "_is_watched", "_operations", "_stream", "memory")

    def __init__(self, stream: Stream) -> None:
        self.memory = BatchMemory({})
        self._stream = stream
        self._operations: list[Operation[Any]] = []
        self._events: list[Event] = []  # before and after the copies, if their device time is measured
        self._is_watched = False

    @property
    def has_begun(self) -> bool:
        """True if the device may read the arrays."""
        return bool(self._operations)

    @property
    def nbytes(self) -> int:
        """The bytes of the batch."""
        return sum(buffer.nbytes for buffer in self.memory.buffers.values())

    def start(
        self, arrays: Mapping[Any, npt.NDArray[Any]], rows: Sequence[int] | None = None, *, is_timed: bool = False
    ) -> None:
        """Copy the arrays; with ``rows``, only these rows of each, in order and without gaps."""
        stream, buffers = self._stream, self.memory.buffers
        for name, array in arrays.items():
            shape = array.shape if rows is None else (len(rows), *array.shape[1:])
            buffers[name] = stream.empty(shape, array.dtype)
        if is_timed:
            self._events.append(stream.record(timing=True))
        for name, array in arrays.items():
            target = buffers[name]
            if rows is None or len(rows) == len(array):
                self._operations.append(stream.copy(target, array))
                continue
            at = 0
            for begin, end in _runs(rows):
                part = slice(at, at + end - begin)
                self._operations.append(stream.copy(target[part], array[begin:end]))
                at = part.stop
        if is_timed:
            self._events.append(stream.record(timing=True))
            self._operations.append(self._events[-1].operation)

    @property
    def is_settled(self) -> bool:
        """True if the device does not read the arrays any more. A copy that has failed may be unfinished on it."""
        return all(isinstance(each, StreamOperation) and each.is_settled for each in self._operations)

    def poll(self) -> bool:
        """Query the device. Return True if the last copy has ended."""
        if not self._operations:
            return True
        last = self._operations[-1]
        if not last.done():
            queue_of(self._stream).poll()
        return last.done()

    def watch(self, wake: Callable[[], object]) -> None:
        """Call a function on the loop when the last copy has ended. Only the first call of `watch` counts."""
        if not self._is_watched:
            self._is_watched = True
            self._operations[-1].add_done_callback(lambda _: wake())

    def finish(self) -> BaseException | None:
        """Return the error of the copies, which have ended, or None. Then nothing refers to the arrays any more."""
        failures = [error for each in self._operations if (error := each.exception()) is not None]
        if failures:
            own = [error for error in failures if not isinstance(error, SkippedError)]
            return (own or failures)[0]
        self._operations.clear()
        return None

    def copy_seconds(self) -> float | None:
        """Return the device time of the copies, which have ended; None if it was not measured."""
        if not self._events:
            return None
        before, after = self._events
        self._events.clear()
        return before.elapsed_ms(after) * 1e-3

    async def settle(self) -> bool:
        """Wait until the device does not read the arrays any more. Return False if that is unknown."""
        begin = [event.operation for event in self._events[:1]]
        for operation in (*begin, *self._operations):
            try:
                await operation.settle()
            except ClosedError:
                return False
            if operation.done():
                operation.exception()  # nothing awaits it: the loader reports a fault by the batch that is requested
        return True


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive rows: (begin, end)."""
    begin = previous = rows[0]
    for row in rows[1:]:
        if row != previous + 1:
            yield begin, previous + 1
            begin = row
        previous = row
    yield begin, previous + 1
