"""Checker: finds unordered accesses to the same memory.

It keeps a vector clock per stream. The clock of an operation contains the operations that come before it: the earlier
ones of its own stream, those that its stream waits for, and all that come before these. An operation that the host
knows to be done comes before everything that is enqueued later. Two accesses to the same bytes, at least one of them a
write, are a conflict if neither comes before the other, in whatever order the device has run them this time.

It follows what streams enqueue, by `CheckingHook`, and makes no driver calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from ..._base._types import SourceLine
from ...completion._methods import METHODS, Access
from ...completion._queue import Queue, own_queue
from ...completion._stream_operation import StreamOperation, stream_operation
from ...completion._stream_queue import StreamQueue, stream_queue
from ...errors import UnorderedAccessWarning
from ...kernels import Kernel
from ...memory._accesses import Accesses
from ...memory._block import Block
from ...memory._buffer import DeviceBuffer, block_of, offset_of
from .._event import Event

__all__ = ["Checker", "CheckingHook", "Conflict", "Touch", "touches_of"]

T = TypeVar("T")

#: Conflicts that `Checker.conflicts` keeps. Later ones are only warned of.
MOST_KEPT = 1000

#: Readers of one memory before those that have passed are dropped.
MANY_READERS = 64


class Touch(NamedTuple):
    """An operation's access to bytes of a block."""

    block: Block
    start: int
    stop: int
    reads: bool
    writes: bool
    line: SourceLine | None = None  #: of the program; with None, the line that calls the method

    def conflicts(self, other: Touch) -> bool:
        """Return whether both access the same bytes, and one of them writes."""
        same = self.block is other.block and self.start < other.stop and other.start < self.stop
        return same and (self.writes or other.writes)


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """Two unordered accesses to the same bytes."""

    first: str  #: ``file:line`` of the two in the user's code
    second: str
    first_kind: str  #: the kinds of the operations: ``"launch"``, ``"upload"`` …
    second_kind: str
    first_stream: str  #: the names of their streams
    second_stream: str
    memory: str  #: the buffer

    def __str__(self) -> str:
        return (
            f"nothing puts these two in order, and one of them writes {self.memory}: {self.first_kind} on "
            f"{self.first_stream} at {self.first}, and {self.second_kind} on {self.second_stream} at {self.second}; "
            "let the later stream wait for the earlier operation, or await that"
        )


class _Clock:
    """The vector clock of a stream: what comes before its next operation."""

    __slots__ = ("name", "number", "seen", "tick")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.tick = 0  # the number of its own operations
        self.seen: dict[int, int] = {}  # of other streams; never changed in place, since operations refer to it

    def advance(self) -> tuple[int, int, dict[int, int]]:
        """Count an operation of the stream. Return its stamp: what `join` takes."""
        self.tick += 1
        return self.number, self.tick, self.seen

    def join(self, number: int, tick: int, seen: dict[int, int]) -> None:
        joined = dict(self.seen)
        for other, ticks in [*seen.items(), (number, tick)]:
            if ticks > joined.get(other, 0):
                joined[other] = ticks
        joined.pop(self.number, None)
        self.seen = joined


class _Entry:
    """One operation's accesses."""

    __slots__ = ("__weakref__", "kind", "line", "number", "operation", "stream", "tick")

    def __init__(self, clock: _Clock, kind: str, line: SourceLine, operation: StreamOperation[Any] | None) -> None:
        self.number = clock.number
        self.tick = clock.tick
        self.stream = clock.name
        self.kind = kind
        self.line = line
        self.operation = None if operation is None else weakref.ref(operation)

    def known_to_be_done(self) -> bool:
        if self.operation is None:
            return False
        operation = self.operation()
        return operation is None or operation.is_settled  # its queue holds one that has not


class Checker:
    """Finds the conflicts of one device. The list ``conflicts`` has the first 1 000."""

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self._clocks: weakref.WeakKeyDictionary[StreamQueue, _Clock] = weakref.WeakKeyDictionary()
        self._stamps: weakref.WeakKeyDictionary[StreamOperation[Any], tuple[int, int, dict[int, int]]]
        self._stamps = weakref.WeakKeyDictionary()
        self._records: dict[int, tuple[Accesses[_Entry], weakref.ref[Block]]] = {}
        self._number = 0
        #: The line and the accesses to use for the next methods, if `acting_for` has set them.
        self._declared: tuple[SourceLine, Sequence[Touch]] | None = None

    def _clock(self, queue: StreamQueue) -> _Clock:
        clock = self._clocks.get(queue)
        if clock is None:
            self._number += 1
            clock = self._clocks[queue] = _Clock(self._number, queue.name)
        return clock

    def stamp(self, queue: Queue, operation: StreamOperation[Any]) -> None:
        """Note that the operation was enqueued, after all that its stream waits for."""
        if operation not in self._stamps:
            self._stamps[operation] = self._clock(own_queue(queue)).advance()

    def wait(self, queue: StreamQueue, operation: StreamOperation[Any]) -> None:
        """Note that the stream waits for an operation of another stream."""
        stamp = self._stamps.get(operation)
        if stamp is not None:
            self._clock(queue).join(*stamp)
        else:  # enqueued without a hook: it comes, at the latest, after all work of its stream
            self.wait_for_all(queue, operation.queue)

    def follow(self, queue: StreamQueue, operation: StreamOperation[Any]) -> None:
        """Do the same as `StreamQueue.follow`, and note the wait."""
        queue.follow(operation)
        self.wait(queue, operation)

    def wait_for_all(self, queue: StreamQueue, other: StreamQueue) -> None:
        """Note that the stream waits for all work of another stream."""
        clock = self._clock(other)
        self._clock(queue).join(clock.number, clock.tick, clock.seen)

    @staticmethod
    def touches(accesses: Iterable[tuple[object, int, int, bool, bool]]) -> Sequence[Touch]:
        """Return the accesses to device memory: block, start and end, and whether it is read and written."""
        return [
            Touch(memory, start, stop, reads, writes)
            for memory, start, stop, reads, writes in accesses
            if isinstance(memory, Block)
        ]

    @contextlib.contextmanager
    def acting_for(self, line: SourceLine, touches: Sequence[Touch]) -> Iterator[None]:
        """Use this line and these accesses, declared by the caller, for the methods called in the block."""
        before, self._declared = self._declared, (line, touches)
        try:
            yield
        finally:
            self._declared = before

    @contextlib.contextmanager
    def access(self, queue: Queue, kind: str, touches: Sequence[Touch]) -> Iterator[list[StreamOperation[Any]]]:
        """Look for conflicts of an operation, which the block then enqueues and appends to the list."""
        line: SourceLine | None = None
        if self._declared is not None:
            line, touches = self._declared
        if line is None:
            line = SourceLine.of_caller()
        clock = self._clock(own_queue(queue))
        for touch in touches:
            self._find_conflicts(clock, kind, touch.line or line, touch)
        enqueued: list[StreamOperation[Any]] = []
        yield enqueued
        for operation in enqueued:
            self.stamp(queue, operation)
        for touch in touches:
            self._note(_Entry(clock, kind, touch.line or line, enqueued[-1] if enqueued else None), touch)

    def _find_conflicts(self, clock: _Clock, kind: str, line: SourceLine, touch: Touch) -> None:
        known = self._records.get(id(touch.block))
        if known is None:
            return
        record = known[0]
        others = record.last_writers(touch.start, touch.stop)
        if touch.writes:
            others = others + record.readers_since(touch.start, touch.stop)
        for other in others:
            if other.number == clock.number or clock.seen.get(other.number, 0) >= other.tick:
                continue
            if not other.known_to_be_done():
                self.report(Conflict(str(other.line), str(line), other.kind, kind, other.stream, clock.name,
                                      str(touch.block)), line)  # fmt: skip

    def _note(self, entry: _Entry, touch: Touch) -> None:
        block, start, stop, _, writes, _ = touch
        if start == stop:
            return
        key = id(block)
        known = self._records.get(key)
        if known is None:
            known = self._records[key] = (Accesses(), weakref.ref(block, functools.partial(self._forget, key)))
        record = known[0]
        if writes:
            record.write(start, stop, entry)
            return
        if len(record.readers) >= MANY_READERS:
            for reader in list(record.readers):
                same = reader.number == entry.number and record.readers[reader] == [(start, stop)]
                if same or reader.known_to_be_done():
                    del record.readers[reader]  # all of a stream before its newest reader are ordered before that
        record.read(start, stop, entry)

    def _forget(self, key: int, _: object) -> None:
        self._records.pop(key, None)

    def report(self, conflict: Conflict, line: SourceLine) -> None:
        """Keep a conflict, and warn of it for this line."""
        if len(self.conflicts) < MOST_KEPT:
            self.conflicts.append(conflict)
        line.warn(str(conflict), UnorderedAccessWarning)


class CheckingHook:
    """The hook of a checked stream: tells the checker what each method reads, writes and waits for."""

    __slots__ = ("_checker", "_queue")

    def __init__(self, checker: Checker, queue: StreamQueue) -> None:
        self._checker = checker
        self._queue = queue

    def call(self, method: str, proceed: Callable[..., T], *args: Any) -> T:
        """Check the accesses of a method's operation, and note when it was enqueued."""
        checker, queue, row = self._checker, self._queue, METHODS[method]
        if row.accesses:
            kind = method if row.kind is None else row.kind.name
            with checker.access(queue, kind, touches_of(row.accesses, args)) as enqueued:
                result = proceed(*args)
                enqueued.append(cast("StreamOperation[Any]", result))
            return result
        result = proceed(*args)
        operation: Any = result.operation if isinstance(result, Event) else result
        if row.writes_result:
            target = operation.value
            touches = [_touch(target, False, True)] if isinstance(target, DeviceBuffer) else []
            with checker.access(queue, method, touches) as enqueued:
                enqueued.append(operation)
        elif row.kind is not None and isinstance(operation, StreamOperation):
            if method == "wait":
                self._note_wait(*args)
            checker.stamp(queue, operation)
        return result

    def _note_wait(self, other: Any) -> None:
        checker, queue = self._checker, self._queue
        if isinstance(other, (StreamOperation, Event)):
            checker.wait(queue, stream_operation(other.operation) if isinstance(other, Event) else other)
        else:
            checker.wait_for_all(queue, stream_queue(other))


def touches_of(accesses: tuple[tuple[int, Access], ...], args: Sequence[Any]) -> list[Touch]:
    """Return a method's accesses to buffers. Arguments that are no buffers are left to the method's own checks."""
    touches: list[Touch] = []
    for index, access in accesses:
        argument = args[index]
        if isinstance(argument, DeviceBuffer):
            touches.append(_touch(argument, access != "writes", access != "reads"))
        elif access == "declared":
            touches += _declared(args[0], argument)
        elif access == "listed":
            touches += argument
        elif access == "each":
            parts = argument.values() if isinstance(argument, dict) else argument
            touches += [_touch(part, True, True) for part in parts if isinstance(part, DeviceBuffer)]
    return touches


def _declared(kernel: object, arguments: tuple[Any, ...]) -> list[Touch]:
    """Return what a kernel declares that it does with the buffers among its arguments."""
    if not isinstance(kernel, Kernel):
        return []
    return [
        _touch(argument, True, not parameter.is_const)
        for parameter, argument in zip(kernel.signature.parameters, arguments, strict=False)
        if parameter.is_pointer and isinstance(argument, DeviceBuffer)
    ]


def _touch(buffer: DeviceBuffer, reads: bool, writes: bool) -> Touch:
    start = offset_of(buffer)
    return Touch(block_of(buffer), start, start + buffer.nbytes, reads, writes)
