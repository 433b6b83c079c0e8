"""What is ordered before what, by vector clocks: an edge that is missing is found whether or not it did harm this time.

Each stream counts its commands, and knows how far it is behind every other stream: a record takes that knowledge, a
wait for the record adds it. The host learns what a record knew when a query finds it done, and hands that on to
whatever it enqueues later. A notification teaches nothing, since it proves nothing.

After Fidge (1988) and Mattern (1989), as race detectors use them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TypeAlias

__all__ = ["Order"]

#: Stream → how many of its commands are known to come before.
Knowledge: TypeAlias = dict[int, int]


class _Block:
    """One allocation: where it was born, and the last use of each stream."""

    __slots__ = ("allocation_event", "nbytes", "stream", "uses")

    def __init__(self, nbytes: int, stream: int, allocation_event: int) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.allocation_event = allocation_event
        self.uses: dict[int, int] = {}


class Order:
    """The edges between commands, and who uses which allocation."""

    __slots__ = ("_addresses", "_blocks", "_events", "_host", "_streams")

    def __init__(self) -> None:
        self._streams: dict[int, Knowledge] = {}
        self._events: dict[int, Knowledge] = {}
        self._host: Knowledge = {}
        self._blocks: dict[int, _Block] = {}
        self._addresses: list[int] = []  # of them, sorted

    def submit(self, stream: int) -> int:
        """One more command; its number."""
        known = self._streams.get(stream)
        if known is None:
            known = self._streams[stream] = {stream: 0}
        _learn(known, self._host)
        known[stream] += 1
        return known[stream]

    def record(self, event: int, stream: int) -> None:
        """The event knows what the stream knows."""
        self.submit(stream)
        self._events[event] = dict(self._streams[stream])

    def wait(self, stream: int, event: int) -> None:
        """The stream comes behind the event's last record."""
        self.submit(stream)
        _learn(self._streams[stream], self._events.get(event, {}))

    def seen(self, event: int) -> None:
        """The host has seen the event's last record done."""
        _learn(self._host, self._events.get(event, {}))

    def seen_idle(self, stream: int) -> None:
        """The host has seen a stream idle."""
        _learn(self._host, self._streams.get(stream, {}))

    def allocate(self, address: int, nbytes: int, stream: int) -> None:
        """Memory is there from this place of a stream on."""
        self._blocks[address] = _Block(nbytes, stream, self.submit(stream))
        insort(self._addresses, address)

    def use(self, address: int, stream: int, number: int) -> str | None:
        """The command of this number touches memory. What is wrong with that, if anything is."""
        index = bisect_right(self._addresses, address) - 1
        block = self._blocks[self._addresses[index]] if index >= 0 else None
        if block is None or address >= self._addresses[index] + block.nbytes:
            return None  # no device memory, or none any more: the machine looks at the range when the command runs
        block.uses[stream] = number
        if self._streams[stream].get(block.stream, 0) < block.allocation_event:
            return f"stream {stream} uses {address:#x}, allocated in stream {block.stream}, which it does not wait for"
        return None

    def free(self, address: int, stream: int) -> str | None:
        """Memory is gone from this place of a stream on. What is wrong with that, if anything is."""
        self.submit(stream)
        block = self._blocks.pop(address, None)
        if block is None:
            return None
        self._addresses.remove(address)
        known = self._streams[stream]
        for user, number in {**block.uses, block.stream: block.allocation_event}.items():
            if known.get(user, 0) < number:
                return f"{address:#x} is freed in stream {stream}, and stream {user} may still use it"
        return None


def _learn(known: Knowledge, more: Knowledge) -> None:
    for stream, number in more.items():
        if number > known.get(stream, 0):
            known[stream] = number
