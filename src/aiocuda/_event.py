"""Event: a point in a stream's order, to be waited for, awaited or timed."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from ._mistakes import lacks
from ._types import ProcessLocal
from .completion._device_state import DeviceState
from .completion._operation import ABANDONED, QUEUED, Operation
from .errors import BusyError, InvalidArgumentError, InvalidTypeError, StaleHandleError

if TYPE_CHECKING:
    from .completion._event_leases import Lease
    from .completion._stream_queue import StreamQueue

__all__ = ["Event"]


@lacks(
    synchronize="`await event` waits for it",
    sync="`await event` waits for it",
    query="event.done() says whether it has passed",
    elapsed_time="start.elapsed_ms(end) is the time between two events",
    record="stream.record(event=event) records it",
)
class Event(ProcessLocal):
    """A CUDA event on loan.

    Made by `aiocuda.Stream.record`, or taken from an `aiocuda.EventPool` and recorded later. It stands for the
    operation that recorded it last: it can be awaited, given to `aiocuda.gather` and waited for by other streams. The
    loan ends with `release`, or when nobody holds the event any more; after that it answers to nothing.

    Attributes
    ----------
    timing : bool
        Can it be asked for elapsed time?
    lender : EventPool or None
        Where it was acquired.
    """

    __slots__ = ("__weakref__", "_device_state", "_expected", "_generation", "_lease", "_loan_ended", "_operation",
                 "lender", "timing")  # fmt: skip

    def __init__(
        self,
        device_state: DeviceState,
        timing: bool,
        lender: object = None,
        loan_ended: Callable[[bool], None] | None = None,
    ) -> None:
        self.timing = timing
        self.lender = lender
        self._loan_ended = loan_ended  # called with `timing` when the loan ends; on any thread if a finaliser ends it
        self._device_state = device_state
        self._operation: Operation[None] | None = None
        #: Who waits for it to be recorded at all.
        self._expected: list[Callable[[Operation[None]], object]] | None = None
        self._borrow(device_state.leases.take(timing))

    def _borrow(self, lease: Lease) -> None:
        lease.lent = True
        self._lease: Lease | None = lease
        self._generation = lease.generation

    def _give_back(self) -> None:
        """End this loan of a CUDA event; the operation that records it gives it back if it is still under way."""
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

    def _record(self, queue: StreamQueue) -> Operation[None]:
        """Record it behind all that the queue has been given. A new record never disturbs the one before."""
        self._check()
        if self._operation is not None:
            lease = self._device_state.leases.take(self.timing)  # first: without another one this loan goes on as it is
            self._give_back()
            self._borrow(lease)
        self._operation = queue.enqueue_record(self._check(), self)
        expected, self._expected = self._expected, None
        for tell in expected or ():
            tell(self._operation)
        return self._operation

    def _when_recorded(self, tell: Callable[[Operation[None]], object]) -> None:
        """Be told of the operation that records it, which nothing has yet."""
        if self._expected is None:
            self._expected = []
        self._expected.append(tell)

    def _check(self) -> Lease:
        if self._lease is None or self._lease.generation != self._generation:
            raise StaleHandleError("this event has been released: its CUDA event may serve somebody else by now")
        return self._lease

    @property
    def handle(self) -> int:
        """The driver's name for its CUDA event, never used twice, as long as the loan lasts; not CUDA's own handle."""
        return self._check().handle

    @property
    def operation(self) -> Operation[None]:
        """The operation that recorded it.

        Raises
        ------
        StaleHandleError
            It has been released.
        InvalidArgumentError
            It was never recorded.
        """
        self._check()
        if self._operation is None:
            raise InvalidArgumentError("this event was never recorded: use stream.record(event=event) first")
        return self._operation

    @property
    def stream(self) -> Any:
        """The stream that it was recorded in."""
        return self.operation.stream

    def done(self) -> bool:
        """Is all work before it done, as far as the loop knows?"""
        return self.operation.done()

    def result(self) -> None:
        """None, or what the work before it failed with."""
        return self.operation.result()

    def exception(self) -> BaseException | None:
        """What recording it failed with, or None."""
        return self.operation.exception()

    def cancelled(self) -> bool:
        """Return False, as `Operation.cancelled` does. `asyncio.wait` calls it."""
        return False

    def add_done_callback(
        self, fn: Callable[[Operation[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Run ``fn(operation)`` on the loop once the work before it is done."""
        self.operation.add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Operation[Any]], object]) -> int:
        """Forget a callback; how many times it was there."""
        return self.operation.remove_done_callback(fn)

    async def wait(self) -> None:
        """The same as awaiting it, as a coroutine."""
        await self.operation

    def __await__(self) -> Generator[Any, None, None]:
        return self.operation.__await__()

    def elapsed_ms(self, end: Event) -> float:
        """Device time from this event to a later one, in milliseconds. ``cuEventElapsedTime``.

        Raises
        ------
        InvalidArgumentError
            One of them was made without ``timing=True``.
        BusyError
            One of them is not done: await it.
        """
        if not isinstance(end, Event):
            raise InvalidTypeError(f"the time ends with another aiocuda.Event, not with {type(end).__name__}")
        for event in (self, end):
            if not event.timing:
                raise InvalidArgumentError(
                    f"{event!r} was made without timing, so it has no time: use stream.record(timing=True)"
                )
            if not event.operation.done():
                raise BusyError(f"{event!r} is not done: await it, then ask for the time")
        fault = self._device_state.driver.fault
        if fault is not None:
            raise fault.again()
        return self._device_state.driver.event_elapsed_ms(self.handle, end.handle)

    def release(self) -> None:
        """End the loan. Waits that streams were given for it still hold."""
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
            state = self._operation.state
        return f"<Event {'timing ' if self.timing else ''}{state}>"
