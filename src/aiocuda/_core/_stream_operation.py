"""StreamOperation: an operation in the queue of a stream: its state, its await and its waiters."""

from __future__ import annotations

import contextvars
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from .._base._checks import check_callback
from .._base._coroutine import coroutine_of
from .._base._failure import Failure, Poison, raisable
from .._base._label import LABEL
from .._base._wakeups import Callback, Waiters
from ..errors import BusyError, ClosedError
from ._hot import Countdown
from ._operation import INTERNAL, Operation
from ._state import ABANDONED, DONE, FAILED, CopyOut, Extra, State

if TYPE_CHECKING:
    import asyncio

    from ._estimate import Estimate
    from ._hot import Lease
    from ._ring import Ring

    #: A future of the loop, a countdown that many operations share, or a callback with its context.
    Waiter = asyncio.Future[None] | Countdown | Callback

__all__ = ["StreamOperation", "stream_operation"]

T_co = TypeVar("T_co", covariant=True)

_STATES = {state: state.name.lower() for state in State}


class StreamOperation(Operation[T_co]):
    """An operation in the queue of a stream: its state, its event, its await and its waiters.

    The hot functions of `Ring` write the attributes directly. The *turn* of an operation comes when the device has
    finished with it and with all earlier ones of the queue; one that has failed or was abandoned stays in the queue
    until then. The library has operations of its own, of kind ``INTERNAL``: a *chunk* of a copy, and a *marker*, which
    is only an event after earlier work. A `Poison` has an error and whether code of the program has seen it; all
    operations that fail because of that error share its `Failure`.
    """

    __slots__ = ("__weakref__", "arguments", "call", "context", "estimate", "extra", "gate", "keep",
                 "lease", "own_label", "queue", "status", "submitted_at", "value", "waiters")  # fmt: skip

    queue: Ring
    context: contextvars.Context  # of the task that submitted it, for hooks and log events
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
    gate: Any  # see `aiocuda.completion._host_queue`

    def done(self) -> bool:
        if self.status < DONE:
            self.queue.glance()  # queries the driver, unless a glance has found nothing done just before
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
        """Query whether the operation is done; if not, suspend until it wakes its waiters. Return its result.

        An await that need not suspend also yields to the loop, if too many before it have not: see `Turn`.
        """
        if self.status < DONE:
            queue = self.queue
            if _get_running_loop() is not queue.loop:
                queue.check_loop()  # raises
            turn = queue.reactor_hot.turn
            if not queue.watch.polling:  # otherwise the reactor queries in this turn
                if turn.immediate:  # other awaits of this turn have found their operations done
                    queue.look_ahead(self)
                if self.status < DONE:
                    queue.linger(self)  # one query, or several within microseconds
            if self.status < DONE:
                waiter: asyncio.Future[None] = queue.loop.create_future()
                self.add_waiter(waiter)
                queue.attend(self)  # have the reactor find out when it ends
                try:
                    yield from waiter
                finally:
                    if self.status < DONE:  # the await was cancelled
                        self.remove_waiter(waiter)
            elif turn.is_over():
                yield
        else:
            if self.extra is not None:
                self.report_await()  # to listeners
            if self.queue.reactor_hot.turn.is_over_for_task():
                yield
        if self.status == DONE:
            return self.value  # type: ignore[no-any-return]  # `cast` is a call
        return self.result()

    @property
    def is_settled(self) -> bool:
        """True if the device has finished with the operation. An abandoned operation is done before that."""
        return self.status >= DONE and (self.extra is None or not self.extra.detached)

    def forget_call(self) -> None:
        """Release the call and its arguments: the operation has left the host queue."""
        self.gate = self.call = None
        self.arguments = ()

    def return_lease(self, lease: Lease) -> None:
        """Give back the event, also one that could not be recorded: `StreamQueue.record_late` takes another."""
        self.lease = None
        if not lease.lent:  # else a user's `Event` gives it back
            self.queue.device_state.leases.give(lease)

    # -- waiters --------------------------------------------------------------------------------------------------

    def add_waiter(self, waiter: Waiter) -> bool:
        """Add a waiter, to wake when the operation finishes. Return False if it is there already: it is woken once."""
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
        """Schedule a callback, end a future, or lower a countdown, whose future ends at 0 or at a first failure."""
        if type(waiter) is Callback:
            self.queue.loop.call_soon(waiter.function, self, context=waiter.context)
            return
        if type(waiter) is Countdown:
            waiter.left -= 1
            if waiter.left and (self.status == DONE or not waiter.fail_fast):
                return  # it waits for others
            waiter = waiter.future
        if not waiter.done():  # type: ignore[union-attr]  # mypy does not narrow by type()
            waiter.set_result(None)  # type: ignore[union-attr]

    # -- the public interface -----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        self.done()
        return self.seen_state

    @property
    def seen_state(self) -> str:
        return _STATES[State(self.status)]

    @property
    def stream(self) -> Any:
        return self.queue.rare.stream

    @property
    def stream_name(self) -> str:
        return self.queue.name

    @property
    def kernel(self) -> str | None:
        return None if self.estimate is None else self.estimate.kernel

    @property
    def label(self) -> str | None:
        return getattr(self, "own_label", None) or self.context.get(LABEL)

    @property
    def nbytes(self) -> int:
        return int(self.queue.rare.size_of(self))

    @property
    def is_awaited(self) -> bool:
        return self.waiters is not None or self.queue.rare.reports.awaits(self)

    @property
    def waits_for(self) -> StreamOperation[Any] | None:
        keep: Any = self.keep if self.kind == "wait" else None  # a wait holds what it waits for
        return keep if isinstance(keep, StreamOperation) else None

    @property
    def part_of(self) -> StreamOperation[Any] | None:
        entries = self.queue.on_host  # a copy is the oldest entry while its chunks are submitted
        return entries[0] if self.kind is INTERNAL and self.copy_out is not None and entries else None

    @property
    def shown_name(self) -> str:
        """The name for errors: for a chunk that of its copy, for a marker that of the last operation before it."""
        if self.kind is not INTERNAL:
            return str(self)
        queue = self.queue
        pending = list(queue.pending)
        at = pending.index(self) if self in pending else len(pending)
        if self.copy_out is None:  # a marker
            others = reversed(pending[:at])
        else:  # a chunk: its copy comes after it, or waits on the host
            others = iter([*pending[at:], *queue.on_host])
        found = next((other for other in others if other.kind is not INTERNAL), None)
        return f"the work of {queue.name}" if found is None else str(found)

    def exception(self) -> BaseException | None:
        state = self.status
        if state == DONE:
            return None
        if state == FAILED:
            assert self.failure is not None
            self.failure.poison.delivered = True  # the caller sees it: nothing else need raise or report it
            self.queue.rare.unseen.forget_seen()
            return raisable(self.value)
        if state == ABANDONED:
            return ClosedError(f"{self!r} was abandoned: its result was dropped")
        raise BusyError(f"{self!r} has not finished: await it")

    def add_done_callback(
        self, fn: Callable[[StreamOperation[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        check_callback(fn, context)
        if context is None:
            context = contextvars.copy_context()
        queue = self.queue
        queue.check_loop()
        if self.status >= DONE:
            self.report_await()
            if self.status == FAILED and self.failure is not None:
                self.failure.poison.had_waiter = True  # code of the program gets it: as `note_waiters`
            if type(self.waiters) is Waiters:
                self.waiters.add(Callback(fn, context))  # the earlier waiters are being woken
            else:
                queue.loop.call_soon(fn, self, context=context)
            return
        self.add_waiter(Callback(fn, context))
        queue.attend()  # have the reactor find out when it ends

    def follow(self, fn: Callable[[StreamOperation[Any]], object], context: contextvars.Context) -> None:
        """Do what `add_done_callback` does, for a callback of the library. A failure that it gets stays unseen.

        If the program never sees the failure, it is still raised at the end of a block, or reported.
        """
        queue = self.queue
        queue.check_loop()
        if self.status >= DONE:
            self.report_await()
            if type(self.waiters) is Waiters:
                self.waiters.add(Callback(fn, context, sees=False))  # the earlier waiters are being woken
            else:
                queue.loop.call_soon(fn, self, context=context)
            return
        self.add_waiter(Callback(fn, context, sees=False))
        queue.attend()

    def note_waiters(self, poison: Poison) -> None:
        """Note, before the waiters are woken, whether code of the program gets the failure: a task or a callback."""
        waiters = self.waiters
        if waiters is not None and self.kind is not INTERNAL and not poison.had_waiter:
            for waiter in tuple(waiters) if type(waiters) is Waiters else (waiters,):
                if type(waiter) is not Callback or waiter.sees:  # not a callback of the library: see `follow`
                    poison.had_waiter = True

    def remove_done_callback(self, fn: Callable[[StreamOperation[Any]], object]) -> int:
        """Remove a callback. Return how many times it was registered."""
        check_callback(fn)
        waiters = self.waiters
        if type(waiters) is Waiters:
            removed = waiters.remove(fn)
            if removed and not waiters:
                self.waiters = None
            return removed
        if type(waiters) is Callback and waiters.function == fn:
            self.waiters = None
            return 1
        return 0

    def abandon(self) -> bool:
        self.queue.check_loop()
        if self.status >= DONE:
            return False
        self.drop_result()
        return True

    def settle(self) -> Coroutine[Any, Any, None]:
        settling: Coroutine[Any, Any, None] = self.queue.rare.settle_operation(self)
        return settling

    def wait(self) -> Coroutine[Any, Any, T_co]:
        return coroutine_of(self)

    def __dir__(self) -> list[str]:
        """Return the names of the public class."""
        return [name for name in object.__dir__(self) if hasattr(Operation, name)]

    @property
    def is_unwanted(self) -> bool:
        """True if the operation was abandoned or has failed, so that its result is not needed."""
        return self.status == ABANDONED or self.failure is not None

    # -- the state that only some operations have ----------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        return None if self.extra is None else self.extra.failure

    @failure.setter
    def failure(self, failure: Failure | None) -> None:
        self._extras().failure = failure

    @property
    def copy_out(self) -> CopyOut | None:
        return None if self.extra is None else self.extra.copy_out

    @copy_out.setter
    def copy_out(self, copy_out: CopyOut | None) -> None:
        self._extras().copy_out = copy_out

    @property
    def detached(self) -> bool:
        return self.extra is not None and self.extra.detached

    @detached.setter
    def detached(self, detached: bool) -> None:
        self._extras().detached = detached

    @property
    def on_settled(self) -> Callable[[], object] | None:
        return None if self.extra is None else self.extra.on_settled

    @on_settled.setter
    def on_settled(self, on_settled: Callable[[], object] | None) -> None:
        self._extras().on_settled = on_settled

    def report_when_awaited(self, report: Callable[[StreamOperation[Any]], object]) -> None:
        """Call a function of a listener, once, if the operation is awaited after it has finished."""
        extra = self._extras()
        extra.on_await = (*extra.on_await, report)

    def report_await(self) -> None:
        """Call the functions of `report_when_awaited`, once: the operation has finished, and a task awaits it now."""
        extra = self.extra
        if extra is not None and extra.on_await:
            reports, extra.on_await = extra.on_await, ()
            for report in reports:
                self.queue.reactor.guard(self.context.copy().run, report, self)

    def _extras(self) -> Extra:
        """Return the `Extra`, which is made when it is needed first."""
        extra = self.extra
        if extra is None:
            extra = self.extra = Extra()
        return extra

    def call_on_settled(self) -> None:
        """Call `on_settled` once: the device has finished with the operation."""
        extra = self.extra
        if extra is not None and extra.on_settled is not None:
            on_settled, extra.on_settled = extra.on_settled, None
            on_settled()

    def fail_in_turn(self, failure: Failure, error: BaseException) -> None:
        """Set the failure that the operation takes when its turn comes."""
        self.failure = failure
        self.value = error

    def fail_copy_out(self, error: BaseException) -> None:
        """Fail in turn: `copy_out`, the host's part of a copy after that of the device, has raised an error.

        Later operations run: this poison is not that of the queue. It reports the failure if the program never sees it.
        """
        poison = Poison(error, self.queue.loop, str(self))
        self.fail_in_turn(poison.failure(), error)
        self.note_unseen(poison)

    def note_unseen(self, poison: Poison) -> None:
        """Keep the failure, for the end of a block to raise if the program has not seen it before.

        The program cannot see that of an internal or an abandoned operation, so such a failure is not kept.
        """
        if self.kind is not INTERNAL and self.status != ABANDONED:
            self.queue.rare.unseen.note(poison)

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Fail now, not in turn, and wake the waiters: the device has faulted. Does nothing more if it has finished.

        A second call continues a call that Ctrl-C has interrupted.
        """
        if self.status == ABANDONED:
            self.detached = False  # the device reports no end any more: count it as settled
        elif self.status < DONE:
            self.fail_in_turn(failure, error)
            self.note_waiters(failure.poison)
            self.status = FAILED
            self.queue.reactor.failed += self.kind is not INTERNAL
        self.wake_waiters_paced()

    def drop_result(self) -> None:
        """Finish as abandoned and wake the waiters, whose awaits raise a `ClosedError`.

        The operation keeps its place in the queue, its event and its memory until its turn comes.
        """
        extra = self._extras()
        # The next lines make no call, so Ctrl-C leaves the operation abandoned or unchanged. If Ctrl-C prevents the
        # wake-up, the waiters are woken in the operation's turn.
        extra.detached = True
        self.status = ABANDONED
        self.value = None
        self.queue.reactor.abandoned += self.kind is not INTERNAL
        if extra.failure is not None:
            extra.failure.poison.had_waiter = True  # the program has dropped the result
        self.wake_waiters_paced()


def stream_operation(operation: Operation[T_co]) -> StreamOperation[T_co]:
    """Return an operation of a stream, typed as the library uses it. (A `Wait` of `aiocuda.wait` is none.)"""
    assert isinstance(operation, StreamOperation)
    return operation
