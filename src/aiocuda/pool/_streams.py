"""StreamPool: streams on loan, shared or exclusive, as many as the load needs."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Self

from .._checks import flag
from .._device import Device
from .._types import Priority, ProcessLocal
from .._user_code import LEAVES_LOOP, call
from ..completion._operation import DONE, Operation
from ..completion._stream_queue import stream_queue
from ..errors import AiocudaError, ClosedError, DeadlockError, InvalidArgumentError, InvalidTypeError
from ..stream import _closing
from ._advice import Optimisation, advise
from ._lease import LeasedStream, Leasing, lease
from ._limits import seconds_of, timeout_of
from ._line import RANKS, Line, Request, holding_up
from ._place import Place
from ._statistics import StreamPoolStatistics
from ._strategy import NewStream, Offer, Strategy, StrategyName, as_strategy
from ._watch import Watch, check_device
from ._workload import Record, Workload, classify

__all__ = ["StreamPool"]

#: Streams of a pool that nobody has given a limit; as many as a driver's hardware queues unless told otherwise.
MAXIMUM = 8

#: Seconds that a stream beyond the minimum may lie idle before it is closed. To make one takes 13 µs.
KEEP_SECONDS = 1.0


class StreamPool(ProcessLocal):
    """Streams of one device, leased to one loop's coroutines.

    A lease is shared unless it asks to be alone; shared ones never wait for each other. An exclusive one waits until a
    stream is nobody's: by priority, then first come first served. The pool makes a stream when all that it has are in
    use, and closes one that has long been idle.

    ``async with`` closes the pool at the end, after its work; left by an exception or a cancellation it withdraws what
    is still on the host and waits for nothing, as a stream does. Its streams end with their device at the latest.

    Parameters
    ----------
    device
        Whose streams. The pool belongs to the running loop.
    minimum, maximum
        How many streams. The maximum is 8 unless given, and never more than ``device.hardware_queues``: streams that
        share a queue wait for each other.
    strategy
        ``"round_robin"``; ``"load_balanced"``, by predicted time of the work in flight; ``"priority"``; ``"workload"``;
        or an object with a name and ``choose(offer)``, see `aiocuda.pool.Strategy`.
    keep_seconds
        How long a stream beyond the minimum may be idle before it is closed.
    """

    def __init__(
        self,
        device: Device,
        minimum: int = 1,
        maximum: int | None = None,
        *,
        strategy: StrategyName | Strategy = "load_balanced",
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a pool is made for an aiocuda.Device, not {type(device).__name__}")
        most = device.hardware_queues
        if maximum is None:
            maximum = max(min(MAXIMUM, most), minimum) if isinstance(minimum, int) else MAXIMUM
        for name, value in (("minimum", minimum), ("maximum", maximum)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidTypeError(f"{name} is an integer, not {value!r}")
            if not 1 <= value <= most:
                raise InvalidArgumentError(
                    f"{name} is from 1 to {most}, the hardware queues of {device.name}, and this is {value}", limit=most
                )
        if minimum > maximum:
            raise InvalidArgumentError(f"minimum={minimum} is more than maximum={maximum}")
        self._keep = seconds_of(keep_seconds, "keep_seconds")
        self._loop_state = device._loop_state()
        self._device = device
        self._minimum, self._maximum = minimum, maximum
        self._strategy = as_strategy(strategy)
        self._places: list[Place] = []
        self._line = Line()
        self._record = Record()
        self._watch = Watch(self._look)
        self._numbers = itertools.count()
        self._generations = itertools.count(1)
        self._closed = self._shrinking = self._prioritised = False
        self._peak = self._made = self._given_up = self._leased = self._waited = 0

    # -- leases --------------------------------------------------------------------------------------------------

    def stream(self, workload: Any = None, *, priority: Priority = "normal", exclusive: bool = False) -> Leasing:
        """A stream for as long as a block lasts: ``async with pool.stream() as stream``.

        What it was given runs on after that. Awaited instead, it is a lease that lasts until its `release`.

        Parameters
        ----------
        workload
            ``"compute"``, ``"memory"``, ``"mixed"`` or ``"coordination"``, or what it is to be found from: a kernel,
            the name of a verb, several of them; see `aiocuda.pool.classify`. None: it is found from what the lease is
            given, for the record, and nobody knows it when the stream is chosen.
        priority
            Who waits for a stream goes by it; with the strategy ``"priority"`` the stream does, too.
        exclusive
            Nobody else gets the stream meanwhile. This waits while all of them are leased.

        Raises
        ------
        ClosedError, DeviceFault
            The pool or its device has been closed, or the device has faulted, also while this waited.
        DeadlockError
            All streams are leased by blocks that wait for each other, this task's own perhaps.
        """
        if not isinstance(priority, str) or priority not in RANKS:
            raise InvalidArgumentError(f"priority must be 'high', 'normal' or 'low', not {priority!r}")
        found = None if workload is None else classify(workload)
        alone = flag(exclusive, "exclusive")
        return Leasing(lambda: self._acquire(Request(found, priority, alone, idle=False)))

    def has_ready(self) -> bool:
        """Would `any_ready` return at once: is a stream idle and nobody's, or may one be made?"""
        self._check()
        return len(self._places) < self._maximum or any(
            not place.leases and not place.claimed and place.idle for place in self._places
        )

    async def any_ready(self, *, timeout: float | None = None) -> LeasedStream:  # noqa: ASYNC109 - the contract's name
        """An exclusive lease of a stream that has nothing to do: ``async with await pool.any_ready() as stream``.

        Parameters
        ----------
        timeout
            Seconds to wait at most. None, or infinity: no limit.

        Raises
        ------
        TimeoutError
            None was idle in time.
        ClosedError, DeviceFault, DeadlockError
            As `stream`; the last one only without a timeout.
        """
        async with asyncio.timeout(limit := timeout_of(timeout)):
            return await self._acquire(Request(None, "normal", exclusive=True, idle=True, timed=limit is not None))

    async def _acquire(self, request: Request) -> LeasedStream:
        self._check()
        self._prioritised = self._prioritised or request.priority != "normal"
        place = None if self._line.undecided else self._take(request)  # those who are being served come first
        if place is None:
            place = await self._wait(request)
        self._leased += 1
        return lease(self, place, next(self._generations), request.workload)

    async def _wait(self, request: Request) -> Place:
        self._waited += 1
        self._watch.start()
        turn = self._line.join(request)
        self._claim()
        try:
            with holding_up(request, turn, self._places, self._maximum, self):
                return await turn
        except (asyncio.CancelledError, DeadlockError):
            self._line.leave(request)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give(turn.result())  # it came at the very moment: to the next one
            self._serve()  # what was claimed for this one is free for others
            raise

    def _take(self, request: Request) -> Place | None:
        """A place for this lease, taken; None if it has to wait."""
        free = [place for place in self._places if self._is_free(place, request)]
        if request.exclusive and len(self._places) == self._maximum and not free:
            return None
        offer = Offer(request.workload, request.priority, tuple(self._places), free, self._minimum, self._maximum)
        chosen = call(self._strategy.choose, offer)
        if isinstance(chosen, NewStream) and offer.room:
            chosen = self._open(chosen)
        if isinstance(chosen, NewStream) or (chosen is None and offer.room and not self._places):
            chosen = self._open(NewStream())  # there is none to wait for
        if chosen is None:
            return None
        chosen.leases += 1
        chosen.exclusive = request.exclusive
        chosen.claimed = False
        return chosen

    def _is_free(self, place: Place, request: Request) -> bool:
        if place.exclusive:
            return False
        if request.exclusive:
            return not place.leases and (not request.idle or place.idle)
        return not place.claimed

    def _open(self, new: NewStream) -> Place:
        number = next(self._numbers)
        stream = self._device.stream(new.priority, f"pool-{number}")
        place = Place(number, stream, new.workload)
        self._places.append(place)
        self._made += 1
        self._peak = max(self._peak, len(self._places))
        return place

    # -- what comes back -----------------------------------------------------------------------------------------

    def returned(self, place: Place, workload: Workload, began: float) -> None:
        """A lease has ended: called by it."""
        queue = stream_queue(place.stream)
        tail = queue.tail()
        if tail is None:
            self._record.add(workload, max(0.0, queue.last_resolved - began))
        else:  # one wake per lease whose work nobody has awaited: a time that nobody was told would be no time

            def ended(operation: Operation[Any]) -> None:
                if operation.status == DONE:
                    self._record.add(workload, queue.driver.now() - began)

            tail.add_done_callback(ended)
        self._give(place)
        self._serve()

    def _give(self, place: Place) -> None:
        place.leases -= 1
        place.exclusive = False
        place.used_at = stream_queue(place.stream).driver.now()
        if len(self._places) > self._minimum and not self._shrinking and not self._closed:
            self._shrinking = True
            self._loop_state.reactor.loop.call_later(self._keep, self._shrink)

    def _serve(self) -> None:
        """Something has become free: the first request, by priority, that can use it gets it; then the next one."""
        self._claim()  # anew: who claimed a stream may have left
        if self._line:
            self._line.offer_again()
            self._loop_state.reactor.wakes.wake(self._serve_next)

    def _serve_next(self) -> bool:
        """Serve a request, or refuse it; could there be another one?"""
        line = self._line
        while (request := line.first()) is not None:
            assert request.turn is not None
            if request.turn.done():  # cancelled
                line.leave(request)
                return True
            try:
                self._check()
                place = self._take(request)
            except BaseException as error:
                line.refuse(request, error)
                if isinstance(error, LEAVES_LOOP):
                    raise
                return True
            if place is not None:
                line.serve(request, place)
                return True
            line.decline(request)
        self._claim()
        return False

    def _claim(self) -> None:
        """For each who waits to be alone, one stream gets no new sharers, so that it is nobody's soon."""
        shared = self._line.claim(self._places)
        if self._line.wants_idle:
            for place in shared:
                place.when_idle(self._idle)

    def _idle(self, operation: Operation[Any]) -> None:
        self._serve()

    def _look(self) -> bool:
        """While anybody waits: of a device that has ended, no stream may ever come back."""
        try:
            self._check()
        except AiocudaError:
            self._serve()  # each of them is told
        return len(self._line) > 0

    def _shrink(self) -> None:
        """Close what was idle for long; look again while there is more than the minimum."""
        self._shrinking = False
        if self._closed or self._device.closed or self._device.driver.fault is not None:
            return
        now = self._device.driver.now()
        for place in sorted(self._places, key=lambda place: place.used_at):
            if len(self._places) == self._minimum:
                return
            if place.leases or place.claimed or now - place.used_at < self._keep or not place.idle:
                continue
            self._places.remove(place)
            self._given_up += 1
            _closing.leave(self._device, stream_queue(place.stream))
        if len(self._places) > self._minimum:
            self._shrinking = True
            self._loop_state.reactor.loop.call_later(self._keep, self._shrink)

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The one that chooses; `optimize` may change it."""
        return self._strategy

    def optimize(self) -> Optimisation:
        """Change the strategy, or how many streams it keeps for copies, to what the record says.

        Where copies took more time than kernels, they get streams of their own; where kernels did, all streams serve
        all, by load. Too short a record changes nothing, and neither does one with priorities, nor one that was made
        under a strategy of the caller's own. The record begins anew when the strategy has changed.

        Returns
        -------
        Optimisation
            ``(before, after, memory_seconds, compute_seconds)``: the strategies' names, and the recorded figures that
            decided.
        """
        self._check()
        strategy, found = advise(self._strategy, self._record, self._prioritised)
        if strategy is not self._strategy:
            self._strategy = strategy
            self._record.clear()
            for place in self._places:
                place.workload = None
        return found

    def statistics(self) -> StreamPoolStatistics:
        """A snapshot."""
        places = self._places
        used = sum(bool(place.leases) or not stream_queue(place.stream).idle for place in places)
        return StreamPoolStatistics(
            strategy=self._strategy.name,
            minimum=self._minimum,
            maximum=self._maximum,
            streams=len(places),
            peak=self._peak,
            made=self._made,
            closed=self._given_up,
            leases=sum(place.leases for place in places),
            exclusive=sum(place.exclusive for place in places),
            waiting=len(self._line),
            leased=self._leased,
            waited=self._waited,
            utilisation=used / self._maximum,
            workloads=self._record.statistics(),
        )

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Refuse new work with `ClosedError`, wait for the streams' work, then close them.

        So do leases; one that was not returned delays nothing, and a task that waits for one gets a `ClosedError`. A
        cancellation meanwhile leaves the pool as an exception leaves ``async with``.
        """
        self._check_loop()
        self._refuse()
        try:
            for place in self._places:
                await place.stream.aclose()
        except BaseException:
            for place in self._places:
                _closing.give_up(self._device, stream_queue(place.stream))
            raise

    def _refuse(self) -> None:
        self._closed = True
        self._serve()
        for place in self._places:
            _closing.refuse(stream_queue(place.stream))

    def _leave(self) -> None:
        for place in self._places:
            _closing.leave(self._device, stream_queue(place.stream))

    async def __aenter__(self) -> Self:
        self._check()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.aclose()
        else:
            self._check_loop()
            self._refuse()
            self._leave()

    def _check_loop(self) -> None:
        loop = self._loop_state.reactor.loop
        if asyncio._get_running_loop() is not loop:
            raise self._device._device_state.wrong_loop(loop, "this pool", "make a pool in each loop, share the device")

    def _check(self) -> None:
        self._check_loop()
        if self._closed:
            raise ClosedError("this pool has been closed: make another one by aiocuda.StreamPool(device)")
        check_device(self._device, "streams")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._places)} of {self._maximum} streams"
        return f"<StreamPool {self._strategy.name}: {state}>"
