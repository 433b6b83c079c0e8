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
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from ..._base._types import SourceLine
from ..._core import DONE, Ring, StreamOperation, stream_operation
from ...completion._methods import METHODS, Access
from ...completion._stream_queue import stream_queue
from ...errors import UnorderedAccessWarning
from ...kernels import Kernel
from ...memory._accesses import Accesses
from ...memory._block import Block
from ...memory._buffer import DeviceBuffer, block_of, offset_of
from ...memory._pinned import PinnedBuffer
from ...memory.interchange._host_arrays import as_source
from .._event import Event
from ._clocks import Clock, Stamp
from ._sources import HostSources

__all__ = ["Checker", "CheckingHook", "Conflict", "Touch", "touches_of"]

T = TypeVar("T")

#: Conflicts that `Checker.conflicts` keeps. Later ones are only warned of.
MOST_KEPT = 1000

#: The number of streams in a vector clock from which those that are gone are dropped.
MANY_SEEN = 64

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
    second: str  #: empty if the program has written a host array: no operation does that
    first_kind: str  #: the kinds of the operations: ``"launch"``, ``"upload"`` …
    second_kind: str
    first_stream: str  #: the names of their streams
    second_stream: str
    memory: str  #: the buffer or the host array

    def __str__(self) -> str:
        if not self.second:
            return (
                f"the program has written {self.memory} before the end of the {self.first_kind} on {self.first_stream} "
                f"at {self.first}, which reads it, by a line that the checker cannot name: await the {self.first_kind} "
                "before that line"
            )
        return (
            f"nothing puts these two in order, and one of them writes {self.memory}: {self.first_kind} on "
            f"{self.first_stream} at {self.first}, and {self.second_kind} on {self.second_stream} at {self.second}; "
            "let the later stream wait for the earlier operation, or await that"
        )


class _Entry:
    """One operation's accesses."""

    __slots__ = ("__weakref__", "kind", "line", "number", "operation", "stream", "tick")

    def __init__(self, clock: Clock, kind: str, line: SourceLine, operation: StreamOperation[Any] | None) -> None:
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


class _Declarations(threading.local):
    """The line and the accesses to use for the next methods of a thread, if `Checker.acting_for` has set them."""

    newest: tuple[SourceLine, Sequence[Touch]] | None = None


class Checker:
    """Finds the conflicts of all checked devices of one driver. The list ``conflicts`` has the first 1 000.

    The loops of several threads may share it.
    """

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self._clocks: weakref.WeakKeyDictionary[Ring, Clock] = weakref.WeakKeyDictionary()
        #: The operations that are alive, by their ids.
        self._stamps: dict[int, tuple[weakref.ref[StreamOperation[Any]], Stamp]] = {}
        self._host: dict[int, int] = {}  # the newest ticks that the host knows to be done; see also `_is_known`
        self.sources = HostSources()
        self._records: dict[int, tuple[Accesses[_Entry], weakref.ref[Block]]] = {}
        self._numbers = itertools.count()
        self._declarations = _Declarations()
        self._lock = threading.RLock()  # of the records; a finaliser that runs while it is held may enqueue work

    def _clock(self, queue: Ring) -> Clock:
        clock = self._clocks.get(queue)
        if clock is None:
            clock = self._clocks.setdefault(queue, Clock(next(self._numbers), queue.name))
        return clock

    def stamp(self, queue: Ring, operation: StreamOperation[Any]) -> None:
        """Note that the operation was enqueued, after all that its stream waits for."""
        key = id(operation)
        if key not in self._stamps:
            ended = weakref.ref(operation, functools.partial(self._ended, key))
            stamp = self._clock(queue).advance()
            self._stamps[key] = ended, stamp
            self.sources.follow(operation, stamp)

    def _ended(self, key: int, _: object) -> None:
        """An operation is gone. Its queue held it until it was done, so the host knows that all before it is."""
        self._stamps.pop(key)[1].add_to(self._host)
        self._host = self._without_gone(self._host)

    def _is_known(self, number: int, tick: int) -> bool:
        """Return whether the host knows that an operation is done, by any operation that comes after it."""
        return (
            self._host.get(number, 0) >= tick
            or number not in self._numbers_of_queues()
            or any(
                stamp.covers(number, tick) and (operation := known()) is not None and operation.status == DONE
                for known, stamp in list(self._stamps.values())
            )
        )

    def _numbers_of_queues(self) -> set[int]:
        return {clock.number for clock in list(self._clocks.values())}

    def _without_gone(self, ticks: dict[int, int]) -> dict[int, int]:
        """Return the ticks, if they have become many without those of queues that are gone: their work is done."""
        if len(ticks) < MANY_SEEN or len(ticks) <= 2 * len(self._clocks):
            return ticks
        known = self._numbers_of_queues()
        return {number: tick for number, tick in ticks.items() if number in known}

    def wait(self, queue: Ring, operation: StreamOperation[Any]) -> None:
        """Note that the stream waits for an operation of another stream."""
        known = self._stamps.get(id(operation))
        if known is not None:
            self._join(queue, known[1])
        else:  # enqueued without a hook: it comes, at the latest, after all work of its stream
            self.wait_for_all(queue, operation.queue)

    def follow(self, queue: Ring, operation: StreamOperation[Any]) -> None:
        """Do the same as `Ring.follow`, and note the wait."""
        queue.follow(operation)
        self.wait(queue, operation)

    def wait_for_all(self, queue: Ring, other: Ring) -> None:
        """Note that the stream waits for all work of another stream."""
        self._join(queue, self._clock(other).stamp())

    def _join(self, queue: Ring, stamp: Stamp) -> None:
        clock = self._clock(queue)
        clock.join(stamp)
        clock.seen = self._without_gone(clock.seen)

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
        before, self._declarations.newest = self._declarations.newest, (line, touches)
        try:
            yield
        finally:
            self._declarations.newest = before

    @contextlib.contextmanager
    def access(self, queue: Ring, kind: str, touches: Sequence[Touch]) -> Iterator[list[StreamOperation[Any]]]:
        """Look for conflicts of an operation, which the block then enqueues and appends to the list."""
        line = self._line()
        if self._declarations.newest is not None:
            touches = self._declarations.newest[1]
        clock = self._clock(queue)
        with self._lock:
            for touch in touches:
                self._find_conflicts(clock, kind, touch.line or line, touch)
        enqueued: list[StreamOperation[Any]] = []
        yield enqueued
        for operation in enqueued:
            self.stamp(queue, operation)
        with self._lock:
            for touch in touches:
                self._note(_Entry(clock, kind, touch.line or line, enqueued[-1] if enqueued else None), touch)

    def _line(self) -> SourceLine:
        """Return the line of the program that calls a method now, or is declared."""
        declared = self._declarations.newest
        return SourceLine.of_caller() if declared is None else declared[0]

    def watch_source(
        self, queue: Ring, source: Any, operation: StreamOperation[Any], captured_at: SourceLine | None = None
    ) -> None:
        """Report the program if it writes a host array before the end of an operation that reads it."""
        array, line, stamp = as_source(source), captured_at or self._line(), self._stamps[id(operation)][1]

        def changed() -> None:
            if not self._is_known(stamp.number, stamp.tick):
                memory = f"the host array of shape {array.shape} {array.dtype}"
                self.report(Conflict(str(line), "", operation.kind, "write", queue.name, "", memory), line)

        self.sources.watch(array, operation, stamp, changed)

    def _find_conflicts(self, clock: Clock, kind: str, line: SourceLine, touch: Touch) -> None:
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
            if not (other.known_to_be_done() or self._is_known(other.number, other.tick)):
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

    def __init__(self, checker: Checker, queue: Ring) -> None:
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
            if row.host:
                self._note_host_memory(row.host, args, cast("StreamOperation[Any]", result))
            return result
        result = proceed(*args)
        operation: Any = result.operation if isinstance(result, Event) else result
        if row.writes_result:
            target = operation.value
            touches = [_touch(target, False, True)] if isinstance(target, DeviceBuffer) else []
            with checker.access(queue, method, touches) as enqueued:
                enqueued.append(operation)
            self._note_host_memory(row.host, args, operation)
        elif row.kind is not None and isinstance(operation, StreamOperation):
            if method == "wait":
                self._note_wait(*args)
            checker.stamp(queue, operation)
        return result

    def _note_host_memory(
        self, accesses: tuple[tuple[int, Access], ...], args: tuple[Any, ...], operation: StreamOperation[Any]
    ) -> None:
        """Note what the operation reads and writes on the host."""
        checker = self._checker
        for index, access in accesses:
            argument = args[index]
            if access == "reads" and not isinstance(argument, DeviceBuffer):
                checker.watch_source(self._queue, argument, operation)
            elif access == "writes" and argument is not None and not isinstance(argument, DeviceBuffer):
                checker.sources.written(as_source(argument), operation)
            elif access == "each":
                checker.sources.written(None, operation)
            elif access == "declared":
                for pinned in argument:
                    if isinstance(pinned, PinnedBuffer):
                        checker.sources.written(pinned, operation)

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
