"""Checker: finds accesses to one memory that nothing puts in order.

It keeps a vector clock per stream. An operation's clock says which operations of which streams come before it: those
before it in its own stream, those that its stream was told to wait for, and all that come before these. What the host
knows to be done comes before whatever is enqueued later. Two accesses to the same bytes, one of them a write, of which
neither comes before the other, are a conflict, whatever the device made of it this time.

It follows what is enqueued, by `CheckedStream`, and asks the device nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._types import Place
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue
from ..errors import UnorderedAccessWarning
from ..memory._accesses import Accesses
from ..memory._block import Block

__all__ = ["Checker", "Conflict", "Touch"]

#: Conflicts kept; what comes later is warned of all the same.
MOST_KEPT = 1000

#: Readers of one memory that are kept before those that have passed are looked for.
MANY_READERS = 64


class Touch(NamedTuple):
    """Bytes of a block, and what an operation does with them."""

    block: Block
    start: int
    stop: int
    reads: bool
    writes: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """Two accesses to the same bytes that nothing puts in order.

    Attributes
    ----------
    first, second
        ``file:line`` of the two in the user's code.
    first_kind, second_kind
        What they do: ``"launch"``, ``"upload"`` …
    first_stream, second_stream
        Names of their streams.
    memory
        The buffer.
    """

    first: str
    second: str
    first_kind: str
    second_kind: str
    first_stream: str
    second_stream: str
    memory: str

    def __str__(self) -> str:
        return (
            f"nothing puts these two in order, and one of them writes {self.memory}: {self.first_kind} on "
            f"{self.first_stream} at {self.first}, and {self.second_kind} on {self.second_stream} at {self.second}; "
            "let the later stream wait for the earlier operation, or await that"
        )


class _Clock:
    """What comes before the next operation of a stream."""

    __slots__ = ("name", "number", "seen", "tick")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.tick = 0  # of its own operations
        self.seen: dict[int, int] = {}  # of others'; never changed in place, since operations hold it

    def join(self, number: int, tick: int, seen: dict[int, int]) -> None:
        joined = dict(self.seen)
        for other, ticks in [*seen.items(), (number, tick)]:
            if ticks > joined.get(other, 0):
                joined[other] = ticks
        joined.pop(self.number, None)
        self.seen = joined


class _Entry:
    """One operation's accesses."""

    __slots__ = ("__weakref__", "kind", "number", "operation", "place", "stream", "tick")

    def __init__(self, clock: _Clock, kind: str, place: Place) -> None:
        self.number = clock.number
        self.tick = clock.tick
        self.stream = clock.name
        self.kind = kind
        self.place = place
        self.operation: weakref.ref[Operation[Any]] | None = None

    def known_to_be_done(self) -> bool:
        if self.operation is None:
            return False
        operation = self.operation()
        return operation is None or operation.is_settled  # its queue holds one that has not


class Checker:
    """One device's accesses.

    Attributes
    ----------
    conflicts : list of Conflict
        What was found, the first 1 000 of it.
    """

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self._clocks: weakref.WeakKeyDictionary[StreamQueue, _Clock] = weakref.WeakKeyDictionary()
        self._stamps: weakref.WeakKeyDictionary[Operation[Any], tuple[int, int, dict[int, int]]]
        self._stamps = weakref.WeakKeyDictionary()
        self._records: dict[int, tuple[Accesses[_Entry], weakref.ref[Block]]] = {}
        self._number = 0
        #: Whose accesses the next verb's are, if somebody has said.
        self._said: tuple[Place, Sequence[Touch]] | None = None

    # -- order ---------------------------------------------------------------------------------------------------

    def _clock(self, queue: StreamQueue) -> _Clock:
        clock = self._clocks.get(queue)
        if clock is None:
            self._number += 1
            clock = self._clocks[queue] = _Clock(self._number, queue.name)
        return clock

    def stamp(self, queue: StreamQueue, operation: Operation[Any]) -> None:
        """It was enqueued, behind all that its stream waits for."""
        if operation not in self._stamps:
            clock = self._clock(queue)
            clock.tick += 1
            self._stamps[operation] = (clock.number, clock.tick, clock.seen)

    def wait(self, queue: StreamQueue, operation: Operation[Any]) -> None:
        """The stream waits for an operation of another one."""
        stamp = self._stamps.get(operation)
        if stamp is not None:
            self._clock(queue).join(*stamp)
        else:  # somebody enqueued it without telling: at the latest it comes behind all that its stream was given
            self.wait_for_all(queue, operation.queue)

    def wait_for_all(self, queue: StreamQueue, other: StreamQueue) -> None:
        """The stream waits for all that another one was given."""
        clock = self._clock(other)
        self._clock(queue).join(clock.number, clock.tick, clock.seen)

    @contextlib.contextmanager
    def acting_for(self, place: Place, touches: Sequence[Touch]) -> Iterator[None]:
        """The verbs in the block are somebody's who has said what they read and write."""
        before, self._said = self._said, (place, touches)
        try:
            yield
        finally:
            self._said = before

    # -- accesses ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def access(self, queue: StreamQueue, kind: str, touches: Sequence[Touch]) -> Iterator[list[Operation[Any]]]:
        """A verb that touches memory: looked at before it is enqueued. The block appends the operation."""
        place: Place | None = None
        if self._said is not None:
            place, touches = self._said
        if place is None:
            place = Place.of_caller()
        clock = self._clock(queue)
        for touch in touches:
            self._look(clock, kind, place, touch)
        enqueued: list[Operation[Any]] = []
        yield enqueued
        for operation in enqueued:
            self.stamp(queue, operation)
        entry = _Entry(clock, kind, place)
        entry.operation = weakref.ref(enqueued[-1]) if enqueued else None
        for touch in touches:
            self._note(entry, touch)

    def _look(self, clock: _Clock, kind: str, place: Place, touch: Touch) -> None:
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
                self._report(Conflict(str(other.place), str(place), other.kind, kind, other.stream, clock.name,
                                      str(touch.block)), place)  # fmt: skip

    def _note(self, entry: _Entry, touch: Touch) -> None:
        block, start, stop, _, writes = touch
        if start == stop:
            return
        key = id(block)
        known = self._records.get(key)
        if known is None:
            known = self._records[key] = (Accesses(), weakref.ref(block, functools.partial(self._gone, key)))
        record = known[0]
        if writes:
            record.write(start, stop, entry)
            return
        if len(record.readers) >= MANY_READERS:
            for reader in list(record.readers):
                same = reader.number == entry.number and record.readers[reader] == [(start, stop)]
                if same or reader.known_to_be_done():
                    del record.readers[reader]  # the newest of a stream stands for those before it
        record.read(start, stop, entry)

    def _gone(self, key: int, _: object) -> None:
        self._records.pop(key, None)

    def _report(self, conflict: Conflict, place: Place) -> None:
        if len(self.conflicts) < MOST_KEPT:
            self.conflicts.append(conflict)
        place.warn(str(conflict), UnorderedAccessWarning)
