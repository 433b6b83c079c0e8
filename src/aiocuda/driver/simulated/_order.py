"""`OrderChecker`: finds missing waits between streams, by vector clocks.

A missing wait is found even if the commands happen to run in the right order. Each stream counts its commands. Its
vector clock has, for every stream, the number of commands that are ordered before its next command. A record copies
the stream's clock to the event; a wait merges the event's clock into the stream's. A query that finds an event done
merges the event's clock into the host's, and the host's clock is merged into every stream that it enqueues to later. A
notification changes no clock, because it does not prove that the event is done.

The method is that of Fidge (1988) and Mattern (1989), which race detectors use.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TypeAlias

__all__ = ["OrderChecker"]

#: Stream → the number of its commands that are ordered before.
VectorClock: TypeAlias = dict[int, int]


class _Block:
    """One allocation: the command that allocates it, and the last command of each stream that uses it."""

    __slots__ = ("allocated_by", "nbytes", "stream", "uses")

    def __init__(self, nbytes: int, stream: int, allocated_by: int) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.allocated_by = allocated_by
        self.uses: dict[int, int] = {}


class OrderChecker:
    """The vector clocks of streams, events and the host, and the uses of each allocation."""

    __slots__ = ("_addresses", "_blocks", "_events", "_host", "_streams")

    def __init__(self) -> None:
        self._streams: dict[int, VectorClock] = {}
        self._events: dict[int, VectorClock] = {}
        self._host: VectorClock = {}
        self._blocks: dict[int, _Block] = {}
        self._addresses: list[int] = []  # of them, sorted

    def submit(self, stream: int) -> int:
        """Count a command of a stream and return its number."""
        clock = self._streams.get(stream)
        if clock is None:
            clock = self._streams[stream] = {stream: 0}
        _merge(clock, self._host)
        clock[stream] += 1
        return clock[stream]

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""
        self.submit(stream)
        self._events[event] = dict(self._streams[stream])

    def wait(self, stream: int, event: int) -> None:
        """Make a stream wait for the event's last record."""
        self.submit(stream)
        _merge(self._streams[stream], self._events.get(event, {}))

    def event_seen_done(self, event: int) -> None:
        """A query of the host has found the event's last record done."""
        _merge(self._host, self._events.get(event, {}))

    def stream_seen_idle(self, stream: int) -> None:
        """A query of the host has found a stream idle."""
        _merge(self._host, self._streams.get(stream, {}))

    def allocate(self, address: int, nbytes: int, stream: int) -> None:
        """Allocate memory in a stream."""
        self._blocks[address] = _Block(nbytes, stream, self.submit(stream))
        insort(self._addresses, address)

    def use(self, address: int, stream: int, number: int) -> str | None:
        """Note that a command uses memory. Return a sentence about the missing wait, or None."""
        index = bisect_right(self._addresses, address) - 1
        block = self._blocks[self._addresses[index]] if index >= 0 else None
        if block is None or address >= self._addresses[index] + block.nbytes:
            return None  # not device memory, or freed: the range is checked when the command runs
        block.uses[stream] = number
        if self._streams[stream].get(block.stream, 0) < block.allocated_by:
            return f"stream {stream} uses {address:#x}, allocated in stream {block.stream}, which it does not wait for"
        return None

    def free(self, address: int, stream: int) -> str | None:
        """Free memory in a stream. Return a sentence about the missing wait, or None."""
        self.submit(stream)
        block = self._blocks.pop(address, None)
        if block is None:
            return None
        self._addresses.remove(address)
        clock = self._streams[stream]
        for user, number in {**block.uses, block.stream: block.allocated_by}.items():
            if clock.get(user, 0) < number:
                return f"{address:#x} is freed in stream {stream}, and stream {user} may still use it"
        return None


def _merge(clock: VectorClock, other: VectorClock) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number
