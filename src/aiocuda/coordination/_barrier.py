"""StreamBarrier: a point that several coroutines and their streams reach before any of them continues."""

from __future__ import annotations

import asyncio
from typing import Any

from .._base._checks import check_integer, check_timeout
from .._base._deadlock import waiting
from .._base._mistakes import keywords, lacks, refuses
from .._base._types import ProcessLocal
from .._base._wakeups import Waiters, Wakes, wake_future
from ..completion import Operation
from ..device import Device, Event
from ..errors import (
    AiocudaError,
    BrokenBarrierError,
    InvalidArgumentError,
    InvalidTypeError,
    WrongDeviceError,
    WrongLoopError,
)
from ..lowlevel import CLOSED, Queue, follow, queue_of, record_event
from ..pool import DeviceWatch, check_device
from ..stream import Stream
from ._group import StreamGroup

__all__ = ["StreamBarrier"]

_PARTIES = "a barrier takes the number of its parties, StreamBarrier(2), and each party `await barrier.wait(stream)`"


@lacks
@refuses(__aenter__="needs streams, so it is no block: `await barrier.wait(stream)` in each party")
class StreamBarrier(ProcessLocal):
    """A point that all parties reach before any of them continues, on the device and on the host.

    Each party is a coroutine with one or several streams, or a `StreamGroup`. When the last party has arrived, later
    work of each stream waits, on the device, for all earlier work of all these streams. The names are those of
    `asyncio.Barrier`. A barrier serves any number of rounds; the next round can begin before the device has finished
    the last one.

    A party that leaves before the last one has arrived **breaks** the barrier, because the others would wait forever. A
    party leaves when it is cancelled or times out, and when the barrier refuses its streams: a stream of another
    driver, of another event loop, or of a closed device, for example. The other parties get a `BrokenBarrierError`, and
    so do later parties until `reset`. Their streams continue as if they had not called `wait`. A party that leaves
    later, while the device still works, does not affect the others. A call with arguments of a wrong type or value does
    not count as a party and does not break the barrier.

    Streams of several devices of one driver can meet: first the streams of each device, then the devices. N streams
    cost N events and less than 2 × N waits.

    Parameters
    ----------
    parties
        How many parties meet, 1 or more.
    """

    @keywords(_PARTIES, _PARTIES)
    def __init__(self, parties: int) -> None:
        check_integer(parties, "parties")
        if parties < 1:
            raise InvalidArgumentError(f"a barrier has 1 party or more, and this is {parties}", parties=parties)
        self._parties = parties
        self._round = _Round()
        self._broken = False
        self._watch = DeviceWatch()

    @property
    def parties(self) -> int:
        """How many parties meet."""
        return self._parties

    @property
    def n_waiting(self) -> int:
        """How many parties wait for the others."""
        return len(self._round.arrivals)

    @property
    def broken(self) -> bool:
        """True if a party has left or the barrier was aborted. `reset` repairs it."""
        return self._broken

    async def wait(self, *streams: Stream | StreamGroup, timeout: float | None = None) -> float:  # noqa: ASYNC109
        """Wait for the other parties, and for all earlier work of the streams.

        Parameters
        ----------
        *streams
            Streams and groups. A stream that is given twice counts once. A party can have no stream.
        timeout
            Seconds to wait at most; None or infinity: no limit.

        Returns
        -------
        float
            Seconds of device time from the arrival of the first stream to the arrival of the last, the same for all
            parties. The clocks of several devices differ; if several meet, the value includes the time until a device
            has been notified of the last arrival.

        Raises
        ------
        BrokenBarrierError
            Another party has left or was refused, or the barrier was aborted or reset. ``__cause__`` is the refusal.
        TimeoutError
            The other parties did not arrive in time, or the device did not finish in time. This party has left.
        DeadlockError
            This party waits without a timeout inside a bracket of a coordinator, and nothing in that coordinator has
            moved for its ``deadlock_timeout``. The barrier is broken.
        WrongDeviceError, WrongLoopError
            A stream of this party has another driver than the other streams, or another event loop. The barrier is
            broken. If the call itself comes from another event loop, the barrier is not affected.
        DeviceFault, ClosedError
            The device has faulted or was closed, perhaps during the wait. The barrier is broken.
        """
        limit = check_timeout(timeout)
        members = _members(streams)
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._wait(members, limit)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"this party waited for its timeout of {limit:g} s: not all {self._parties} parties of the barrier "
                "have arrived, or a device has not finished"
            ) from None

    async def _wait(self, members: list[Stream], limit: float | None) -> float:
        loop = asyncio.get_running_loop()
        if self._broken:
            raise BrokenBarrierError("this barrier is broken: await barrier.reset() once all parties were notified")
        current = self._round_of(loop)
        arrival: asyncio.Future[None] = loop.create_future()
        try:
            current.check(members)
            current.arrive(members, arrival)
        except BaseException as error:
            self._refuse(error)
            raise
        if len(current.arrivals) == self._parties:
            self._round = _Round()
            self._release(current)
        else:
            self._watch.start(self._check_devices)
        missing = f"{self._parties - len(current.arrivals)} of {self._parties} parties of {self!r}"
        try:  # with a timeout, the wait ends even if no party arrives
            with waiting(missing, arrival, None if limit is None else lambda stuck: True):
                await arrival
        except BaseException:
            if current is self._round and not loop.is_closed():
                self._break(BrokenBarrierError("a party of this barrier left before all had arrived"))
            raise
        return await current.seconds()

    async def abort(self) -> None:
        """Break the barrier: waiting and later parties get a `BrokenBarrierError`."""
        self._round_of(asyncio.get_running_loop())
        self._break(BrokenBarrierError("this barrier was aborted"))

    async def reset(self) -> None:
        """Repair the barrier, and start a new round. Waiting parties get a `BrokenBarrierError`."""
        self._round_of(asyncio.get_running_loop())
        self._break(BrokenBarrierError("this barrier was reset while parties waited"))
        self._broken = False

    def _round_of(self, loop: asyncio.AbstractEventLoop) -> _Round:
        """Return the current round. Raise `WrongLoopError` if parties of another loop wait."""
        used = self._round.loop
        if used is not None and used is not loop:
            if not used.is_closed():
                raise WrongLoopError("parties of another event loop wait at this barrier: make one in each loop")
            self._round = _Round()  # the parties that waited have ended with their loop
        return self._round

    def _release(self, full: _Round) -> None:
        """Let the streams wait for each other, and wake the parties: the last one has arrived."""
        try:
            full.meet()
        except BaseException as error:
            own = full.arrivals.pop()
            own.cancel()
            broken = BrokenBarrierError("the streams could not be made to wait for each other")
            broken.__cause__ = error
            self._broken = True
            full.end_waits(broken)
            raise
        full.end_waits(None)

    def _refuse(self, error: BaseException) -> None:
        """Break the barrier, because a party was refused and the others would wait for it forever."""
        self._check_devices()  # first: parties with a closed or faulted device get that error
        broken = BrokenBarrierError(f"a party of this barrier was refused: {error}")
        broken.__cause__ = error
        self._break(broken)

    def _break(self, error: AiocudaError) -> None:
        self._broken = True
        broken, self._round = self._round, _Round()
        broken.end_waits(error)

    def _check_devices(self) -> bool:
        """Break the barrier if a device was closed or has faulted. Return True as long as parties wait."""
        try:
            self._round.check_devices()
        except AiocudaError as error:
            self._break(error)
        return bool(self._round.arrivals)

    def __repr__(self) -> str:
        state = "broken" if self._broken else f"{self.n_waiting} of {self._parties} have come"
        return f"<StreamBarrier: {state}>"


class _Round:
    """One round of a barrier: the parties that meet once."""

    __slots__ = ("_devices", "_events", "_releases", "_seconds", "arrivals", "loop")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  # of the parties, once there is one
        self.arrivals: list[asyncio.Future[None]] = []  # one for each party, done when all parties have arrived
        self._events: dict[Stream, Event] = {}  # the arrival of each stream
        self._devices: dict[Device, None] = {}
        self._releases: dict[Any, Event] = {}  # for each device, the event after all arrivals
        self._seconds: float | None = None

    def check(self, streams: list[Stream]) -> None:
        """Raise an error if a party cannot have these streams."""
        known = next(iter(self._events), None)
        for stream in streams:
            queue_of(stream).check()
            known = known or stream
            if stream.device.driver is not known.device.driver:
                raise WrongDeviceError(
                    f"{stream!r} belongs to another driver than {known!r}: no device can wait for both"
                )

    def arrive(self, streams: list[Stream], arrival: asyncio.Future[None]) -> None:
        """Add a party: record a timing event in each of its streams."""
        self._events |= {stream: stream.record(timing=True) for stream in streams}
        self._devices |= dict.fromkeys(stream.device for stream in streams)
        self.loop = arrival.get_loop()
        self.arrivals.append(arrival)

    def check_devices(self) -> None:
        """Raise an error if a device was closed or has faulted: then the other parties may never arrive."""
        for device in self._devices:
            check_device(device, "streams")

    def end_waits(self, error: AiocudaError | None) -> None:
        """Wake the tasks of all parties. With an error, the barrier is broken: each of the tasks raises it."""

        def end_wait(arrival: asyncio.Future[None]) -> None:
            if error is None:
                wake_future(arrival)
            elif not arrival.done():
                arrival.set_exception(error.again())

        if self.loop is not None:
            Wakes.of(self.loop).wake_all(Waiters(*self.arrivals), end_wait)

    def meet(self) -> None:
        """Let all streams wait for each other.

        The first stream of each device is its leader. The leader waits for the other streams of its device; the first
        leader waits for the other leaders. Then they wait the other way round.
        """
        devices: dict[int, dict[Queue, Event]] = {}
        for stream, event in self._events.items():
            queue = queue_of(stream)
            if queue.obstacles & CLOSED:
                queue.check()  # closed while its party waited; a lease that has ended has its own error
            devices.setdefault(stream.device.index, {})[queue] = event
        leaders: dict[int, Queue] = {}
        for device, members in devices.items():
            leader, *others = members
            leaders[device] = leader
            for queue in others:
                follow(leader, members[queue].operation)
        for leader in list(leaders.values())[1:]:
            follow(next(iter(leaders.values())), leader.mark())
        first: Operation[Any] | None = None
        for device, leader in leaders.items():
            follow(leader, first)
            release = self._releases[device] = record_event(leader, timing=True)
            released = release.operation
            if first is None:
                first = released
            for queue in devices[device]:
                if queue is not leader:
                    follow(queue, released)

    async def seconds(self) -> float:
        """Wait until all earlier work is done; return the time from the first arrival to the last, in seconds."""
        for release in self._releases.values():
            await release.operation
        if self._seconds is None:
            self._seconds = self._measure() / 1e3
            for stream in self._events:
                queue_of(stream).poll()  # so that operations before the barrier are resolved in this loop, too
        return self._seconds

    def _measure(self) -> float:
        """Return the time from the first arrival to the last, in milliseconds."""
        if not self._events:
            return 0.0
        # Not `Event.elapsed_ms`: the device has passed all events, but their streams may not have noticed.
        driver = next(iter(self._events)).device.driver
        if driver.fault is not None:
            raise driver.fault.again()
        elapsed = driver.event_elapsed_ms
        arrivals: dict[int, list[Event]] = {}
        for stream, event in self._events.items():
            arrivals.setdefault(stream.device.index, []).append(event)
        if len(arrivals) == 1:
            ((start, *others),) = arrivals.values()
            times = [0.0, *(elapsed(start.handle, event.handle) for event in others)]
            return max(times) - min(times)
        # By the clock of each device: from its first arrival until it has waited for the arrivals on all devices.
        spans = [
            elapsed(event.handle, self._releases[device].handle)
            for device, events in arrivals.items()
            for event in events
        ]
        return max(spans, default=0.0)


def _members(streams: tuple[Stream | StreamGroup, ...]) -> list[Stream]:
    """Return the streams of a party, each once."""
    found: dict[Queue, Stream] = {}
    for thing in streams:
        if isinstance(thing, StreamGroup):
            found.update((queue_of(stream), stream) for stream in thing)
        elif isinstance(thing, Stream):
            found[queue_of(thing)] = thing
        else:
            raise InvalidTypeError(f"a party brings aiocuda streams or groups to a barrier, not {type(thing).__name__}")
    return list(found.values())
