"""Event: a point in a stream's order. Streams wait for it, tasks await it, and it measures time."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from .._base._checks import flag
from .._base._mistakes import lacks, or_none, refuses
from .._base._types import ProcessLocal
from .._core import ABANDONED, DONE, QUEUED, Operation, Ring, StreamOperation
from ..completion._device_state import DeviceState
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, StaleHandleError, WrongDeviceError

if TYPE_CHECKING:
    from .._core import Lease, Ring

__all__ = ["Event", "record_event"]


@lacks
@refuses("is an event, and no time: start.elapsed_ms(end) is the time between two of stream.record(timing=True)")
class Event(ProcessLocal):
    """A CUDA event on loan.

    Made by `aiocuda.Stream.record`, or taken from an `aiocuda.EventPool` and recorded later. It behaves like the
    operation that recorded it last: it can be awaited, passed to `aiocuda.gather` and waited for by other streams. The
    loan ends with `release`, or when the program does not hold the event any more; after that its methods raise
    `StaleHandleError`.
    """

    __slots__ = ("__weakref__", "_device_state", "_expected", "_generation", "_lease", "_loan_ended", "_operation",
                 "lender", "timing")  # fmt: skip

    @or_none
    def __init__(
        self, device_state: DeviceState, timing: bool, lender: object = None,
        loan_ended: Callable[[bool], None] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(device_state, DeviceState):
            raise InvalidTypeError("an event is made by stream.record(), or lent by an aiocuda.EventPool(device)")
        self.timing = timing  #: True if it can measure elapsed time
        self.lender = lender  #: the `aiocuda.EventPool` that it was acquired from, or None
        self._loan_ended = loan_ended  # called with `timing` when the loan ends; on any thread if a finaliser ends it
        self._device_state = device_state
        self._operation: StreamOperation[None] | None = None
        #: Functions to call when it is recorded. A dict, so that one of many is removed in constant time.
        self._expected: dict[Callable[[StreamOperation[None]], object], None] | None = None
        self._borrow(device_state.leases.take(timing))

    def _borrow(self, lease: Lease) -> None:
        lease.lent = True
        self._lease: Lease | None = lease
        self._generation = lease.generation

    def _give_back(self) -> None:
        """End this loan of a CUDA event. An unfinished operation gives the event back when it has passed."""
        lease, self._lease = self._lease, None
        if lease is None or lease.generation != self._generation:
            return
        lease.lent = False
        leases, operation, generation = self._device_state.leases, self._operation, self._generation
        if operation is None or operation.is_settled:
            leases.give_late(lease)
        elif operation.lease is lease:
            return
        elif operation.status not in (QUEUED, ABANDONED):
            leases.give(lease)  # it was skipped, or is just being resolved
        else:  # still on the host: it will be recorded yet, or skipped
            former = operation.on_settled

            def passed() -> None:
                if former is not None:
                    former()  # of memory that depends on it
                if lease.generation == generation:
                    leases.give(lease)

            operation.on_settled = passed

    def _record(self, queue: Ring) -> StreamOperation[None]:
        """Record it after all work of the queue. Waits for an earlier record of it are not affected."""
        lease = self._check()
        if self._operation is not None:
            lease = self._device_state.leases.take(self.timing)  # first: if that fails, this loan goes on unchanged
            self._give_back()
            self._borrow(lease)
        self._operation = queue.rare.enqueue_record(lease, self)
        expected, self._expected = self._expected, None
        for call in expected or ():
            call(self._operation)
        return self._operation

    def _when_recorded(self, call: Callable[[StreamOperation[None]], object]) -> Callable[[], None]:
        """Call a function with the operation that records the event. It has not been recorded yet.

        Returns a function that prevents the call. It keeps no reference to the event.
        """
        if self._expected is None:
            self._expected = {}
        self._expected[call] = None
        known = weakref.ref(self)

        def forget() -> None:
            event = known()
            if event is not None and event._expected is not None:
                event._expected.pop(call, None)

        return forget

    def _check(self) -> Lease:
        if self._lease is None or self._lease.generation != self._generation:
            raise StaleHandleError("this event has been released: another operation may have its CUDA event by now")
        return self._lease

    @property
    def handle(self) -> int:
        """The driver's number of its CUDA event, during the loan. Never used twice; not CUDA's own handle."""
        return self._check().handle

    @property
    def operation(self) -> Operation[None]:
        """The operation that recorded it.

        Raise `StaleHandleError` if the event has been released, `InvalidArgumentError` if it was never recorded.
        """
        self._check()
        if self._operation is None:
            raise InvalidArgumentError("this event was never recorded: use stream.record(event=event) first")
        return self._operation

    def _awaited(self) -> tuple[Operation[None]]:
        """Return what `aiocuda.wait` waits for."""
        return (self.operation,)

    @property
    def stream(self) -> Any:
        """The stream that it was recorded in."""
        return self.operation.stream

    def done(self) -> bool:
        """Return True if all work before it has finished. It queries the device as `Operation.done` does."""
        return self.operation.done()

    def result(self) -> None:
        """Return None, or raise the error of the work before it."""
        return self.operation.result()

    def exception(self) -> BaseException | None:
        """Return the error with which recording it failed, or None."""
        return self.operation.exception()

    def cancelled(self) -> bool:
        """Return False, as `Operation.cancelled` does. `asyncio.wait` calls it."""
        return False

    def add_done_callback(
        self, fn: Callable[[Operation[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Run ``fn(operation)`` in the event loop once the work before it is done."""
        self.operation.add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Operation[Any]], object]) -> int:
        """Remove a callback; return how many times it was added."""
        return self.operation.remove_done_callback(fn)

    async def wait(self) -> None:
        """Await it; the same as a coroutine."""
        await self.operation

    def __await__(self) -> Generator[Any, None, None]:
        return self.operation.__await__()

    @or_none
    def elapsed_ms(self, end: Event) -> float:
        """Return the device time from this event to a later one, in milliseconds. ``cuEventElapsedTime``.

        Raise `InvalidArgumentError` if one of them was made without ``timing=True``, `BusyError` if one of them has not
        passed: await it. Raise `WrongDeviceError` if they belong to two devices, whose clocks differ.
        """
        if not isinstance(end, Event):
            raise InvalidTypeError(
                f"the time ends with another aiocuda.Event, start.elapsed_ms(end), not with {type(end).__name__}; an "
                "await of an event returns None, so keep the event"
            )
        if end._device_state is not self._device_state:
            raise WrongDeviceError(
                f"{self!r} is of {_place(self)}, and {end!r} of {_place(end)}: only events of one "
                "device have a time between them"
            )
        for event in (self, end):
            if not event.timing:
                raise InvalidArgumentError(
                    f"{event!r} was made without timing, so it has no time: use stream.record(timing=True)"
                )
            if not event.operation.done():
                raise BusyError(f"{event!r} is not done: await it, then ask for the time")
        driver = self._device_state.driver
        fault = driver.fault
        if fault is not None:
            raise fault.again()
        return driver.event_elapsed_ms(self.handle, end.handle)

    def release(self) -> None:
        """End the loan. Waits of streams for it stay valid."""
        self._check()
        self._end()

    def _end(self) -> None:
        self._give_back()
        if self._loan_ended is not None:
            self._loan_ended(self.timing)

    def __del__(self) -> None:
        if getattr(self, "_lease", None) is not None:
            self._end()

    def __repr__(self) -> str:
        if self._lease is None:
            state = "released"
        elif self._operation is None:
            state = "never recorded"
        else:
            state = self._operation.seen_state
            if self._operation.status < DONE:
                state += "; coroutine: .wait()"  # for asyncio.create_task(event), which refuses it
        return f"<Event {'timing ' if self.timing else ''}{state}>"


def _place(event: Event) -> str:
    state = event._device_state
    return f"{state.driver.name}:{state.device}"


def record_event(queue: Ring, timing: bool = False, event: Event | None = None) -> Event:
    """Do the same as `Stream.record`, without the stream's hook."""
    queue.check()
    if event is None:
        if timing is not False and isinstance(timing, Event):
            raise InvalidTypeError("timing is True or False; to record an event again: stream.record(event=event)")
        event = Event(queue.device_state, flag(timing, "timing"))
    elif not isinstance(event, Event):
        cure = "an event of a pool: `async with pool.borrow() as event`"
        raise InvalidTypeError(f"event must be an aiocuda.Event, not {type(event).__name__}; {cure}")
    elif event._device_state is not queue.device_state:
        raise WrongDeviceError(f"{event!r} belongs to another device: an event is recorded on its own")
    elif not event.timing and flag(timing, "timing"):
        raise InvalidArgumentError(f"{event!r} was made without timing: pool.acquire(timing=True) makes one")
    event._record(queue)
    return event
