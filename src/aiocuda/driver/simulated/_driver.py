"""The simulated driver."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import InvalidTypeError
from ..software import Code, Devices, Memory, Model, Streams
from ..software._model import BANDWIDTH, LATENCY, MEMORY
from ._graphs import Graphs
from ._notify import Notify
from ._upset import Upset

__all__ = ["SimulatedDriver"]


class SimulatedDriver(Notify, Devices, Streams, Graphs, Memory, Code):
    """A driver that decides by a seed what CUDA leaves open, and in virtual time.

    What CUDA orders is kept. What it does not order comes in any order, another one with each seed; everything takes
    as long as the seed says; notifications are late. A buffer's content changes when an operation completes, and not
    before. On an `aiocuda.testing.SimulatedLoop` the same seed does the same again, to the last byte of the trace, and
    hours pass in no time. On any other loop one thing happens per turn, and only legality is promised.

    A kernel's twin runs when the kernel completes. One that is a generator function runs bit by bit, and yields the
    seconds in between.

    Parameters
    ----------
    seed
        Decides. None decides nothing: everything takes what the model says, and the first goes first.
    devices, memory, bandwidth, latency
        As in `aiocuda.driver.host.HostDriver`; times are virtual.
    upsets
        What is to go wrong. None leaves that to the seed: nothing in half of all cases, else one to three things.
        ``()`` is nothing.
    """

    def __init__(
        self,
        seed: int | None = 0,
        *,
        devices: int = 1,
        memory: int = MEMORY,
        bandwidth: float = BANDWIDTH,
        latency: float = LATENCY,
        upsets: Iterable[Upset] | None = (),
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InvalidTypeError(f"seed={seed!r} must be an int, or None")
        super().__init__(Model(devices, memory, bandwidth, latency), seed, upsets)

    def event_query(self, event: int) -> bool:
        """Has everything before the last record been done? Costs 1 µs, as every query."""
        self._begin("event_query")  # the hottest verb: it is not asked for its name
        done = self._machine.event(event).is_done
        if done:
            self.order.seen(event)
            self._note(f"see {event} done")
        return done

    def stream_query(self, stream: int) -> bool:
        """Is everything that the stream accepted done? Costs 1 µs."""
        self._enter()
        found = self._machine.stream(stream)
        if found.is_idle:
            self.order.seen_idle(found.handle)
        return found.is_idle

    def event_record(self, event: int, stream: int) -> None:
        """The event is done when all earlier work of the stream is."""
        super().event_record(event, stream)
        known_as = self._machine.stream(stream).handle  # a default stream has several
        self.order.record(event, known_as)
        self._note(f"record {event} in {known_as}")

    def stream_wait(self, stream: int, event: int) -> None:
        """Later work of the stream waits for what the event recorded last."""
        super().stream_wait(stream, event)
        known_as = self._machine.stream(stream).handle
        self.order.wait(known_as, event)
        self._note(f"wait for {event} in {known_as}")

    def __repr__(self) -> str:
        return f"SimulatedDriver(seed={self.seed})"
