"""StreamBarrier: coroutines that bring their streams to one point, and go on from there together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from .._deadlock import waiting
from .._device import Device
from .._event import Event
from .._types import ProcessLocal
from .._wakeups import Waiters, Wakes, wake_future
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue, stream_queue
from ..errors import (
    AiocudaError,
    BrokenBarrierError,
    InvalidArgumentError,
    InvalidTypeError,
    WrongDeviceError,
    WrongLoopError,
)
from ..pool._limits import timeout_of
from ..pool._watch import Watch, check_device
from ..stream import Stream
from ._group import StreamGroup
from ._joining import follow

__all__ = ["StreamBarrier"]


class StreamBarrier(ProcessLocal):
    """A point that all parties reach before any of them goes on, on the device as well as on the host.

    Each party is a coroutine, and brings a stream, several, or a `StreamGroup`. When the last one has come, later work
    of each stream waits, on the device, for all earlier work of all of them. Names are those of `asyncio.Barrier`. It
    serves any number of rounds; the next one may begin before the last one's work is done.

    A party that leaves before the last one has come **breaks** the barrier, because the others would wait in vain. A
    party leaves when it is cancelled or times out, and when the barrier refuses its streams: a stream of another
    driver, of another event loop, or of a closed device, for example. The other parties get a `BrokenBarrierError`, and
    so do parties that come later, until `reset`. Their streams go on as if nobody had come. A party that leaves later,
    while the device is still at work, changes nothing for the others. A call with arguments of a wrong type or value
    does not count as a party: it breaks nothing.

    Streams of several devices of one driver may meet: first those of each device, then the devices. N streams cost N
    events and less than 2 × N waits.

    Parameters
    ----------
    parties
        How many come, 1 or more.
    """

    def __init__(self, parties: int) -> None:
        if isinstance(parties, bool) or not isinstance(parties, int):
            raise InvalidTypeError(f"parties is an integer, not {parties!r}")
        if parties < 1:
            raise InvalidArgumentError(f"a barrier has 1 party or more, and this is {parties}", parties=parties)
        self._parties = parties
        self._round = _Round()
        self._broken = False
        self._watch = Watch(self._look)

    @property
    def parties(self) -> int:
        """How many must come."""
        return self._parties

    @property
    def n_waiting(self) -> int:
        """How many have come, and wait for the others."""
        return len(self._round.turns)

    @property
    def broken(self) -> bool:
        """Has a party left, or has it been aborted? `reset` mends it."""
        return self._broken

    async def wait(self, *streams: Stream | StreamGroup, timeout: float | None = None) -> float:  # noqa: ASYNC109
        """Bring streams to the barrier; wait for the other parties, and for all that the streams were given before.

        Parameters
        ----------
        *streams
            Streams and groups. The same one twice counts once. None: the party has only itself to bring.
        timeout
            Seconds to wait at most; None, or infinity: no limit.

        Returns
        -------
        float
            Seconds of device time from the first stream's arrival to the last one's, the same for all parties. Where
            several devices meet, whose clocks differ, this has the time in it that the last arrival takes to be told.

        Raises
        ------
        BrokenBarrierError
            Another party has left or was refused, or the barrier was aborted or reset. ``__cause__`` is the refusal.
        TimeoutError
            The others did not come in time, or the device was not done: this one has left.
        DeadlockError
            The others never come: this one waits in a bracket of a coordinator, without a timeout, and all that the
            coordinator has is blocked. The barrier is broken.
        WrongDeviceError, WrongLoopError
            This party brings a stream of another driver than the other streams, or of another event loop. The barrier
            is broken. If the call itself comes from another event loop, the barrier stays as it is.
        DeviceFault, ClosedError
            The device has faulted or was closed, also while this waited. The barrier is broken.
        """
        limit = timeout_of(timeout)
        members = _members(streams)
        loop = asyncio.get_running_loop()
        if self._broken:
            raise BrokenBarrierError("this barrier is broken: await barrier.reset() once all parties know")
        current = self._at(loop)
        turn: asyncio.Future[None] = loop.create_future()
        async with asyncio.timeout(limit):
            try:
                current.check(members)
                current.arrive(members, turn)
            except BaseException as error:
                self._refuse(error)
                raise
            if len(current.turns) == self._parties:
                self._round = _Round()
                self._release(current)
            else:
                self._watch.start()
            what = f"{self._parties - len(current.turns)} of {self._parties} parties of {self!r}"
            try:
                with waiting(what, turn, None if limit is None else _ends):
                    await turn
            except BaseException:
                if current is self._round and not loop.is_closed():
                    self._break(BrokenBarrierError("a party of this barrier left before all had come"))
                raise
            return await current.seconds()

    async def abort(self) -> None:
        """Break it: whoever waits, and whoever comes, gets a `BrokenBarrierError`."""
        self._at(asyncio.get_running_loop())
        self._break(BrokenBarrierError("this barrier was aborted"))

    async def reset(self) -> None:
        """Begin anew, unbroken. Whoever waits gets a `BrokenBarrierError`."""
        self._at(asyncio.get_running_loop())
        self._break(BrokenBarrierError("this barrier was reset while parties waited"))
        self._broken = False

    def _at(self, loop: asyncio.AbstractEventLoop) -> _Round:
        """The round that parties of this loop meet in."""
        there = self._round.loop
        if there is not None and there is not loop:
            if not there.is_closed():
                raise WrongLoopError("parties of another event loop wait at this barrier: make one in each loop")
            self._round = _Round()  # whoever waited there has gone with it
        return self._round

    def _release(self, full: _Round) -> None:
        """The last party has come."""
        try:
            full.meet()
        except BaseException as error:
            own = full.turns.pop()
            own.cancel()
            broken = BrokenBarrierError("the streams could not be made to wait for each other")
            broken.__cause__ = error
            self._broken = True
            full.tell(broken)
            raise
        full.tell(None)

    def _refuse(self, error: BaseException) -> None:
        """A party cannot come: the others would wait for it in vain."""
        self._look()  # first: parties whose own device has ended get that as their error
        broken = BrokenBarrierError(f"a party of this barrier was refused: {error}")
        broken.__cause__ = error
        self._break(broken)

    def _break(self, error: AiocudaError) -> None:
        self._broken = True
        broken, self._round = self._round, _Round()
        broken.tell(error)

    def _look(self) -> bool:
        """While parties wait: of a device that has ended, the others may never come."""
        try:
            self._round.look()
        except AiocudaError as error:
            self._break(error)
        return bool(self._round.turns)

    def __repr__(self) -> str:
        state = "broken" if self._broken else f"{self.n_waiting} of {self._parties} have come"
        return f"<StreamBarrier: {state}>"


class _Round:
    """Parties that meet once."""

    __slots__ = ("_arrivals", "_devices", "_releases", "_seconds", "loop", "turns")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.turns: list[asyncio.Future[None]] = []
        self._arrivals: dict[Stream, Event] = {}
        self._devices: dict[Device, None] = {}
        self._releases: dict[Any, Event] = {}  # by device
        self._seconds: float | None = None

    def check(self, streams: list[Stream]) -> None:
        """May these come?"""
        known = next(iter(self._arrivals), None)
        for stream in streams:
            stream_queue(stream).check()
            known = known or stream
            if stream.device.driver is not known.device.driver:
                raise WrongDeviceError(
                    f"{stream!r} belongs to another driver than {known!r}: no device can wait for both"
                )

    def arrive(self, streams: list[Stream], turn: asyncio.Future[None]) -> None:
        """One party: an event with a time behind all that its streams were given."""
        self._arrivals |= {stream: stream.record(timing=True) for stream in streams}
        self._devices |= dict.fromkeys(stream.device for stream in streams)
        self.loop = turn.get_loop()
        self.turns.append(turn)

    def look(self) -> None:
        """Can the others still come?"""
        for device in self._devices:
            check_device(device, "streams")

    def tell(self, error: AiocudaError | None) -> None:
        """Everybody may go on, or is told why not."""

        def wake(turn: asyncio.Future[None]) -> None:
            if error is None:
                wake_future(turn)
            elif not turn.done():
                turn.set_exception(error.again())

        if self.loop is not None:
            Wakes.of(self.loop).wake_all(Waiters(*self.turns), wake)

    def meet(self) -> None:
        """Streams of one device meet at the first of them; these meet at the first device's."""
        devices: dict[Any, dict[StreamQueue, tuple[Stream, Event]]] = {}
        for stream, event in self._arrivals.items():
            if stream_queue(stream).closed:
                stream_queue(stream).check()  # closed while its party waited; a lease that has ended says so itself
            devices.setdefault(stream_queue(stream).device_state.device, {})[stream_queue(stream)] = (stream, event)
        hubs: dict[Any, StreamQueue] = {}
        for device, members in devices.items():
            device_state, *others = members
            hubs[device] = device_state
            for queue in others:
                follow(device_state, members[queue][1].operation)
        first: Operation[Any] | None = None
        for device_state in list(hubs.values())[1:]:
            follow(next(iter(hubs.values())), device_state.submit_marker())
        for device, device_state in hubs.items():
            follow(device_state, first)
            stream = devices[device][device_state][0]
            release = self._releases[device] = Stream.record(stream, timing=True)
            if first is None:
                first = release.operation
            for queue in devices[device]:
                if queue is not device_state:
                    follow(queue, release.operation)

    async def seconds(self) -> float:
        """When all of it is done: how long it took from the first arrival to the last."""
        for release in self._releases.values():
            await release.operation
        if self._seconds is None:
            self._seconds = self._measure() / 1e3
            for stream in self._arrivals:
                stream_queue(stream).poll()  # so that what has passed the barrier counts as done in this loop, too
        return self._seconds

    def _measure(self) -> float:
        arrivals: dict[Any, list[Event]] = {}
        for stream, event in self._arrivals.items():
            arrivals.setdefault(stream_queue(stream).device_state.device, []).append(event)
        if len(arrivals) == 1:
            ((start, *others),) = arrivals.values()
            times = [0.0, *(_elapsed_ms(start, event) for event in others)]
            return max(times) - min(times)
        # Each device's own clock: from its first arrival to the moment when it was told of all others'.
        spans = [_elapsed_ms(event, self._releases[device]) for device, events in arrivals.items() for event in events]
        return max(spans, default=0.0)


def _ends(stuck: Collection[asyncio.Task[Any]]) -> bool:
    """A wait with a timeout ends, whoever comes."""
    return True


def _elapsed_ms(start: Event, end: Event) -> float:
    """Of events that the device has passed, since what waited for them is done: their streams may not know yet."""
    driver = start._device_state.driver
    fault = driver.fault
    if fault is not None:
        raise fault.again()
    return driver.event_elapsed_ms(start.handle, end.handle)


def _members(streams: tuple[Stream | StreamGroup, ...]) -> list[Stream]:
    found: dict[StreamQueue, Stream] = {}
    for one in streams:
        if isinstance(one, StreamGroup):
            found.update((stream_queue(stream), stream) for stream in one)
        elif isinstance(one, Stream):
            found[stream_queue(one)] = one
        else:
            raise InvalidTypeError(f"a party brings aiocuda streams or groups to a barrier, not {type(one).__name__}")
    return list(found.values())
