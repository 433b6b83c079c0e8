"""StreamPool: lends streams, shared or exclusive, and grows and shrinks with the load."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, Never, Self

from .._base._checks import check_duration, check_integer, check_seconds, check_timeout, flag
from .._base._mistakes import figures, keywords, lacks, refuses, unknown_keyword
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._types import Priority, SourceLine
from .._base._user_code import LEAVES_LOOP, call
from .._base._wakeups import Wakes
from ..completion import Operation
from ..device import Device
from ..errors import AiocudaError, DeadlockError, InvalidArgumentError, InvalidTypeError
from ..lowlevel import owned, resources_of, when_passed
from ._device_watch import DeviceWatch, check_device
from ._lease import LeasedStream, PendingLease, new_lease
from ._place import Place
from ._requests import RANKS, Request, RequestQueue, waiting_for_lease
from ._strategy import NewStream, Offer, Optimisation, Strategy, StrategyName, advise, as_strategy
from ._workload import Workload, WorkloadRecord, WorkloadStatistics, classify

__all__ = ["StreamPool", "StreamPoolStatistics"]

#: Default maximum of streams. A driver has as many hardware queues by default.
MAXIMUM = 8

#: Seconds that a stream beyond the minimum may be idle before it is closed. Creating one takes 13 µs.
KEEP_SECONDS = 1.0


_STREAM = "stream takes a workload, priority= and exclusive="
_TIMEOUTS = dict.fromkeys(
    ("timeout", "timeout_s"), "use `async with asyncio.timeout(seconds):` around the wait, or pool.any_ready(timeout=…)"
)


@figures
class StreamPoolStatistics(NamedTuple):
    """Figures of a stream pool."""

    strategy: str  #: name of the strategy
    minimum: int  #: limits for the number of streams
    maximum: int
    streams: int  #: present number of streams
    peak: int  #: largest number of streams so far
    made: int  #: streams created so far
    closed: int  #: streams closed so far
    leases: int  #: present leases
    exclusive: int  #: present exclusive leases
    waiting: int  #: requests that wait for a stream
    leased: int  #: leases so far
    waited: int  #: leases that had to wait
    utilisation: float  #: streams that are leased or have unfinished operations ÷ ``maximum``, 0-1
    workloads: Mapping[Workload, WorkloadStatistics]  #: durations of the leases whose operations have ended


@lacks
@refuses(
    __enter__="is closed by `async with`, not `with`: `async with aiocuda.StreamPool(device) as pool`",
    __getitem__="has no places: `async with pool.stream() as stream` leases a stream",
)
class StreamPool(Owner):
    """Streams of one device, leased to the coroutines of one event loop.

    Several shared leases may use one stream; a request for a shared lease waits only if all streams are leased
    exclusively or reserved. A request for an exclusive lease waits until a stream has no lease. Waiting requests are
    served by priority, then in order of arrival. The pool creates a stream if all present ones are in use, and closes
    streams that were idle for some time.

    At the end of an ``async with`` block, the pool waits for its operations and closes its streams. If the block ends
    with an exception or a cancellation, the pool withdraws the operations that are still on the host and does not
    wait, as `aiocuda.Stream` does. Closing the device closes the streams, too.

    Parameters
    ----------
    device
        The device of the streams. The pool belongs to the running event loop.
    minimum, maximum
        Limits for the number of streams. The default maximum is 8. The largest is ``device.hardware_queues``, because
        streams that share a hardware queue wait for each other.
    strategy
        ``"round_robin"``; ``"load_balanced"``, by the predicted time of unfinished operations; ``"priority"``;
        ``"workload"``; or an object with a name and ``choose(offer)``, see `aiocuda.pool.Strategy`.
    keep_seconds
        Seconds that a stream beyond the minimum may be idle before it is closed.
    """

    @keywords(
        "StreamPool takes a device, minimum=, maximum=, strategy= and keep_seconds=",
        "StreamPool(device, minimum, maximum): `async with aiocuda.StreamPool(device, maximum=4) as pool`",
        **dict.fromkeys(
            ("size", "n", "streams", "max_size", "max_streams", "num_streams"), "use maximum=, and minimum="
        ),
    )
    def __init__(
        self, device: Device, minimum: int = 1, maximum: int | None = None, *,
        strategy: StrategyName | Strategy = "load_balanced", keep_seconds: float = KEEP_SECONDS,
    ) -> None:  # fmt: skip
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a pool is made for an aiocuda.Device, not {type(device).__name__}")
        most = device.hardware_queues
        if maximum is None:
            maximum = max(min(MAXIMUM, most), minimum) if isinstance(minimum, int) else MAXIMUM
        for name, value in (("minimum", minimum), ("maximum", maximum)):
            check_integer(value, name)
            if not 1 <= value <= most:
                raise InvalidArgumentError(
                    f"{name} is from 1 to {most}, the hardware queues of {device.name}, and this is {value}", limit=most
                )
        if minimum > maximum:
            raise InvalidArgumentError(f"minimum={minimum} is more than maximum={maximum}")
        self._keep_seconds = check_seconds(keep_seconds, "keep_seconds")
        self._device = device
        self._resources = resources_of(device)
        self._resources.loop_state()  # raises if the device is closed, or has failed
        self._loop = asyncio.get_running_loop()
        self._scope = Scope(
            "this pool", "make a pool in each loop, share the device",
            "make another one by aiocuda.StreamPool(device)", loop=self._loop,
            wrong_loop=self._resources.device_state.wrong_loop,
        )  # fmt: skip
        self._minimum, self._maximum = minimum, maximum
        self._strategy = as_strategy(strategy)
        self._made_at = SourceLine.of_caller()
        places = self._places = list[Place]()
        use = "`async with aiocuda.StreamPool(device) as pool`"
        self._scope.must_end(use, self._made_at, lambda: all(place.stream.closed for place in places))
        self._requests = RequestQueue()
        self._record = WorkloadRecord()
        self._watch = DeviceWatch()
        self._numbers = itertools.count()
        self._generations = itertools.count(1)
        self._shrink_scheduled = False
        self._prioritised = False  # True after a request with another priority than "normal"
        self._peak = self._made = self._closed_streams = self._leased = self._waited = 0

    # -- leases --------------------------------------------------------------------------------------------------

    def stream(
        self, workload: Any = None, *, priority: Priority = "normal", exclusive: bool = False, **unknown: Never
    ) -> PendingLease:
        """Lease a stream for a block: ``async with pool.stream() as stream``.

        Operations that are unfinished at the end of the block go on. ``stream = await pool.stream()`` returns a lease
        that lasts until its `release`.

        Parameters
        ----------
        workload
            ``"compute"``, ``"memory"``, ``"mixed"`` or ``"coordination"``, or anything that
            `aiocuda.pool.classify` takes: a kernel, the name of a stream method, several of them. With None, the
            strategy chooses without it, and the statistics use the operations of the lease.
        priority
            The order in which waiting requests are served; with the strategy ``"priority"`` also the priority of the
            stream.
        exclusive
            True for a stream without other leases. The request waits while all streams are leased.

        Raises
        ------
        ClosedError, DeviceFault
            The pool or its device has been closed, or the device has faulted, before or during the wait.
        DeadlockError
            All streams are leased by blocks that wait for each other; the block of this task may be one of them.
        """
        if unknown:
            raise unknown_keyword("StreamPool.stream", unknown, _STREAM, _TIMEOUTS)
        if not isinstance(priority, str) or priority not in RANKS:
            raise InvalidArgumentError(f"priority must be 'high', 'normal' or 'low', not {priority!r}")
        found = None if workload is None else classify(workload)
        alone = flag(exclusive, "exclusive")
        return PendingLease(lambda: self._acquire(Request(found, priority, alone, needs_idle=False)))

    def has_ready(self) -> bool:
        """Return whether `any_ready` would return without waiting: a stream is free and idle, or can be created."""
        self._check()
        return len(self._places) < self._maximum or any(
            not place.leases and not place.reserved and place.idle for place in self._places
        )

    async def any_ready(self, *, timeout: float | None = None) -> LeasedStream:  # noqa: ASYNC109 - the contract's name
        """Lease an idle stream exclusively: ``async with await pool.any_ready() as stream``.

        Wait at most ``timeout`` seconds, then raise `TimeoutError`; None or infinity: no limit. Raises the errors of
        `stream`, too, and `DeadlockError` only without a timeout.
        """
        limit = check_timeout(timeout)
        request = Request(None, "normal", exclusive=True, needs_idle=True, has_timeout=limit is not None)
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._acquire(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(f"{self!r} had no idle stream within the timeout of {limit:g} s") from None

    async def _acquire(self, request: Request) -> LeasedStream:
        self._check()
        self._prioritised = self._prioritised or request.priority != "normal"
        place = None if self._requests.undecided else self._assign(request)  # earlier requests are served first
        if place is None:
            place = await self._wait(request)
        self._leased += 1
        return new_lease(place, next(self._generations), request.workload, self._lease_ended)

    async def _wait(self, request: Request) -> Place:
        self._waited += 1
        self._watch.start(self._check_waiters)
        future = self._requests.add(request)
        self._reserve()
        try:
            with waiting_for_lease(request, future, self._places, self._maximum, self):
                return await future
        except (asyncio.CancelledError, DeadlockError):
            self._requests.discard(request)
            if future.done() and not future.cancelled() and future.exception() is None:
                self._free(future.result())  # the request was served just before: pass the stream on
            self._serve()  # a stream that was reserved for this request is available
            raise

    def _assign(self, request: Request) -> Place | None:
        """Choose a stream for a request and count the lease; None if the request has to wait."""
        free = [place for place in self._places if self._can_use(place, request)]
        if request.exclusive and len(self._places) == self._maximum and not free:
            return None
        offer = Offer(request.workload, request.priority, tuple(self._places), free, self._minimum, self._maximum)
        chosen = call(self._strategy.choose, offer)
        if isinstance(chosen, NewStream) and offer.room:
            chosen = self._open_stream(chosen)
        if isinstance(chosen, NewStream) or (chosen is None and offer.room and not self._places):
            chosen = self._open_stream(NewStream())  # there is no stream to wait for
        if chosen is None:
            return None
        chosen.leases += 1
        chosen.exclusive = request.exclusive
        chosen.reserved = False
        return chosen

    def _can_use(self, place: Place, request: Request) -> bool:
        if place.exclusive:
            return False
        if request.exclusive:
            return not place.leases and (not request.needs_idle or place.idle)
        return not place.reserved

    def _open_stream(self, new: NewStream) -> Place:
        number = next(self._numbers)
        stream = self._device.stream(new.priority, f"pool-{number}")
        owned(stream, self._made_at)
        place = Place(number, stream, new.workload)
        self._places.append(place)
        self._made += 1
        self._peak = max(self._peak, len(self._places))
        return place

    # -- the end of a lease --------------------------------------------------------------------------------------

    def _lease_ended(self, place: Place, workload: Workload, began: float) -> None:
        """Record the duration of a lease, and make its stream available."""
        driver = self._device.driver
        tail = place.queue.tail()
        if tail is None:
            self._record.add(workload, max(0.0, place.load.ended_at - began))
        else:  # the callback makes the reactor resolve operations that no task awaits; otherwise they get no end time

            def ended(operation: Operation[Any]) -> None:
                if operation is tail and operation.state == "done":
                    self._record.add(workload, driver.now() - began)

            when_passed(tail, ended, contextvars.copy_context())
        self._free(place)
        self._serve()

    def _free(self, place: Place) -> None:
        place.leases -= 1
        place.exclusive = False
        place.used_at = self._device.driver.now()
        if not self._scope.closing:
            self._schedule_shrink()

    def _serve(self) -> None:
        """Serve the waiting requests, as a stream may have become available."""
        self._reserve()  # again, because requests may have left the queue
        if self._requests:
            self._requests.retry_all()
            Wakes.of(self._loop).wake(self._serve_next)

    def _serve_next(self) -> bool:
        """Serve or fail one request; True if another request may be served."""
        requests = self._requests
        while (request := requests.first()) is not None:
            assert request.future is not None
            if request.future.done():  # cancelled
                requests.discard(request)
                return True
            try:
                self._check()
                place = self._assign(request)
            except BaseException as error:
                requests.refuse(request, error)
                if isinstance(error, LEAVES_LOOP):
                    raise
                return True
            if place is not None:
                requests.serve(request, place)
                return True
            requests.decline(request)
        self._reserve()
        return False

    def _reserve(self) -> None:
        """Reserve one stream for each exclusive request. A reserved stream gets no new leases, so it becomes free."""
        shared = self._requests.reserve(self._places)
        if self._requests.wants_idle:
            for place in shared:
                place.when_idle(lambda operation: self._serve())

    def _check_waiters(self) -> bool:
        """Fail all waiting requests if the device has ended; True if requests wait."""
        try:
            self._check()
        except AiocudaError:
            self._serve()
        return len(self._requests) > 0

    def _schedule_shrink(self) -> None:
        if len(self._places) > self._minimum and not self._shrink_scheduled:
            self._shrink_scheduled = True
            self._loop.call_later(self._keep_seconds, self._shrink)

    def _shrink(self) -> None:
        """Close streams that were idle for `keep_seconds`, and check again later if there are more than the minimum."""
        self._shrink_scheduled = False
        if self._scope.closing or self._device.closed or self._device.driver.fault is not None:
            return
        now = self._device.driver.now()
        for place in sorted(self._places, key=lambda place: place.used_at):
            if len(self._places) == self._minimum:
                return
            if place.leases or place.reserved or now - place.used_at < self._keep_seconds or not place.idle:
                continue
            self._places.remove(place)
            self._closed_streams += 1
            self._resources.streams.leave(place.queue)
        self._schedule_shrink()

    # -- strategy and statistics ---------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy that chooses the streams; `optimize` may replace it."""
        return self._strategy

    def record(self, workload: Any, seconds: float) -> None:
        """Record the duration of work that was no lease of this pool, as one more lease of its workload.

        `statistics` and `optimize` count it.

        Parameters
        ----------
        workload
            As `stream` takes it: the name of a workload, a kernel, an operation, or several of these.
        seconds
            From the beginning of the work to its end.

        Raises
        ------
        InvalidArgumentError, InvalidTypeError
            An unknown workload; a negative or infinite time, or no number.
        ClosedError, WrongLoopError
            The pool or its device has been closed; the pool is used in another event loop.
        """
        self._check()
        self._record.add(classify(workload), check_duration(seconds, "seconds"))

    def optimize(self) -> Optimisation:
        """Replace the strategy if the recorded durations favour another one.

        If copies took more time than kernels, the new strategy is ``"workload"``: copies get streams of their own. If
        kernels took more, it is ``"load_balanced"``. The strategy stays the same if fewer than 32 leases for copies or
        kernels are recorded, if a request had a priority, or if the strategy is ``"priority"`` or the caller's own.
        When the strategy changes, the record starts again.

        Returns
        -------
        Optimisation
            ``(before, after, memory_seconds, compute_seconds)``: the names of the strategies, and the recorded times
            that decided.
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
        """Return the present figures."""
        places = self._places
        used = sum(bool(place.leases) or place.queue.tail() is not None for place in places)
        return StreamPoolStatistics(
            strategy=self._strategy.name, minimum=self._minimum, maximum=self._maximum,
            streams=len(places), peak=self._peak, made=self._made, closed=self._closed_streams,
            leases=sum(place.leases for place in places), exclusive=sum(place.exclusive for place in places),
            waiting=len(self._requests), leased=self._leased, waited=self._waited,
            utilisation=used / self._maximum, workloads=self._record.statistics(),
        )  # fmt: skip

    # -- closing -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Refuse new operations with `ClosedError`, wait for the streams' work, then close the streams.

        Present leases refuse new operations, too, and need not be returned. Tasks that wait for a lease get a
        `ClosedError`. If the wait is cancelled, the pool withdraws the operations that are still on the host and
        closes without waiting.
        """
        for place in self._places:
            self._resources.streams.check_not_lent(place.queue)
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        self._serve()
        for place in self._places:
            self._resources.streams.refuse(place.queue)

    async def _drain(self) -> None:
        await self._resources.streams.drain([place.queue for place in self._places])

    async def _release(self, outcome: Outcome) -> None:
        for place in self._places:
            self._resources.streams.leave(place.queue)

    async def __aenter__(self) -> Self:
        self._scope.enter()
        check_device(self._device, "streams")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            await self._scope.leave(self)
            return
        await self.aclose()
        self._resources.streams.raise_unseen(place.queue for place in self._places)

    def _check(self) -> None:
        self._scope.check()
        check_device(self._device, "streams")

    def __repr__(self) -> str:
        state = "closed" if self._scope.closing else f"{len(self._places)} of {self._maximum} streams"
        return f"<StreamPool {self._strategy.name}: {state}>"
