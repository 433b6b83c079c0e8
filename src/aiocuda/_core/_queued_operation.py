"""QueuedOperation: an operation in the queue of a stream: its state, its await and its waiters."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from .._base._wakeups import Callback, Waiters
from ._countdown import Countdown
from ._operation import Operation
from ._state import DONE

if TYPE_CHECKING:
    import asyncio
    from contextvars import Context

    from ..completion._extra import Extra
    from ..completion._gates import Gate
    from ._estimate import Estimate
    from ._lease import Lease
    from ._ring import Ring

    #: A future of the loop, a countdown that many operations share, or a callback with its context.
    Waiter = asyncio.Future[None] | Countdown | Callback

__all__ = ["QueuedOperation"]

T_co = TypeVar("T_co", covariant=True)


class QueuedOperation(Operation[T_co]):
    """An operation in the queue of a stream: its state, its event, its await and its waiters.

    The hot functions of `Ring` write the attributes directly. `aiocuda.completion._stream_operation.StreamOperation`
    has the rest of the public interface, and the rare cases.
    """

    __slots__ = ("__weakref__", "arguments", "call", "context", "estimate", "extra", "gate", "keep",
                 "lease", "own_label", "queue", "status", "submitted_at", "value", "waiters")  # fmt: skip

    queue: Ring
    context: Context  # of the task that submitted it, for hooks and log events
    status: int  # a value of `State`
    value: Any  # the result; of a failed operation the error
    estimate: Estimate | None  # of its duration
    keep: object  # objects that the device may use; held until the device has finished
    lease: Lease | None  # its event, from the submission until the operation leaves the queue
    submitted_at: float  # the driver's time of the submission; `IN_CALL` during the driver call; 0.0 before
    waiters: Waiter | Waiters[Waiter] | None  # a single waiter is stored without a `Waiters`
    extra: Extra | None  # the state that only some operations have

    # Set only by ``label=`` of a launch: to set the context variable takes 250 ns longer.
    own_label: str

    # Set only while the operation is in the host queue.
    call: Callable[..., object] | None
    arguments: tuple[Any, ...]
    gate: Gate | None

    def done(self) -> bool:
        if self.status < DONE:
            self.queue.glance()
        return self.status >= DONE

    def result(self) -> T_co:
        if self.status == DONE:
            return self.value  # type: ignore[no-any-return]  # `cast` is a call
        error = self.exception()
        assert error is not None
        try:
            raise error
        finally:
            del error  # otherwise the error would hold itself, and the frames of its callers, by this frame

    def __await__(self) -> Generator[Any, None, T_co]:
        if self.status < DONE:
            queue = self.queue
            if _get_running_loop() is not queue.loop:
                queue.check_loop()
            turn = queue.reactor_hot.turn
            if not queue.watch.polling:  # otherwise the reactor queries in this turn
                if turn.immediate:
                    queue.look_ahead(self)  # type: ignore[arg-type]  # each operation of a queue is a `StreamOperation`
                if self.status < DONE:
                    queue.linger(self)  # type: ignore[arg-type]
            if self.status < DONE:
                waiter: asyncio.Future[None] = queue.loop.create_future()
                self.add_waiter(waiter)
                queue.attend(self)  # type: ignore[arg-type]
                try:
                    yield from waiter
                finally:
                    if self.status < DONE:
                        self.remove_waiter(waiter)
            elif turn.is_over():
                yield
        else:
            if self.extra is not None:
                self.report_await()
            if self.queue.reactor_hot.turn.is_over_for_task():
                yield
        if self.status == DONE:
            return self.value  # type: ignore[no-any-return]  # `cast` is a call
        return self.result()

    @property
    def is_settled(self) -> bool:
        """True if the device has finished with the operation. An abandoned operation is done before that."""
        return self.status >= DONE and (self.extra is None or not self.extra.detached)

    def report_await(self) -> None:
        """Call the listeners that wait for an await of this operation, which has finished."""

    def forget_call(self) -> None:
        """Release the call and its arguments: the operation has left the host queue."""
        self.gate = self.call = None
        self.arguments = ()

    # -- waiters --------------------------------------------------------------------------------------------------

    def add_waiter(self, waiter: Waiter) -> bool:
        """Wake the waiter when the operation finishes. Return False if it is already registered: it is woken once."""
        waiters = self.waiters
        if waiters is None:
            self.waiters = waiter
        elif waiters is waiter:
            return False
        elif type(waiters) is not Waiters:
            self.waiters = Waiters(waiters, waiter)  # type: ignore[arg-type]  # mypy does not narrow by type()
        elif waiter in waiters:
            return False
        else:
            waiters.add(waiter)
        return True

    def remove_waiter(self, waiter: Waiter) -> None:
        """Remove a waiter that no longer waits. Does nothing if it is not registered."""
        waiters = self.waiters
        if waiters is waiter:
            self.waiters = None
        elif type(waiters) is Waiters and waiters.discard(waiter) and not waiters:
            self.waiters = None

    def wake_waiters(self) -> None:
        """Wake the waiters of an operation that finishes in its turn: one at once, several through `Wakes`.

        One pass resolves at most 256 operations, so it wakes at most 256 waiters at once.
        """
        waiters = self.waiters
        if type(waiters) is Waiters:
            self.queue.reactor.wakes.wake(self._wake_next)
        elif waiters is not None:
            self.waiters = None
            self._wake(waiters)  # type: ignore[arg-type]  # mypy does not narrow by type()

    def wake_waiters_paced(self) -> None:
        """Wake the waiters through `Wakes`: any number of operations may finish at the same moment."""
        if self.waiters is not None:
            self.queue.reactor.wakes.wake(self._wake_next)

    def _wake_next(self) -> bool:
        """Wake one waiter. Return True if more are left."""
        waiters = self.waiters
        if type(waiters) is not Waiters:
            self.waiters = None
            if waiters is not None:
                self._wake(waiters)  # type: ignore[arg-type]
            return False
        if waiters:
            self._wake(waiters.pop())
        if waiters:
            return True
        self.waiters = None
        return False

    def _wake(self, waiter: Waiter) -> None:
        if type(waiter) is Callback:
            self.queue.loop.call_soon(waiter.function, self, context=waiter.context)
            return
        if type(waiter) is Countdown:
            waiter.left -= 1
            if waiter.left and (self.status == DONE or not waiter.fail_fast):
                return
            waiter = waiter.future
        if not waiter.done():  # type: ignore[union-attr]  # mypy does not narrow by type()
            waiter.set_result(None)  # type: ignore[union-attr]
