"""StreamOperation: an operation of a stream: the public interface, and the rare cases of its life."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

from .._base._checks import check_callback
from .._base._failure import Failure, Poison, raisable
from .._base._label import LABEL
from .._base._wakeups import Callback, Waiters
from .._core import ABANDONED, DONE, FAILED, INTERNAL, Operation, QueuedOperation, State
from ..errors import BusyError, ClosedError, InvalidTypeError
from ._extra import CopyOut, Extra
from ._methods import KINDS

__all__ = ["TRANSITIONS", "StreamOperation", "check_awaited", "stream_operation"]

T_co = TypeVar("T_co", covariant=True)

#: The states that can follow each state.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STAGING, State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.STAGING: frozenset({State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.SUBMITTED: frozenset({State.LANDING, State.DONE, State.FAILED, State.ABANDONED}),
    State.LANDING: frozenset({State.DONE, State.FAILED, State.ABANDONED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}

_NAMES = {state: state.name.lower() for state in State}

#: The kinds that have a size in bytes.
_SIZED = frozenset(kind.name for kind in KINDS.values() if kind.size is not None)


class StreamOperation(QueuedOperation[T_co]):
    """An operation as the library sees it: its place in a stream queue, its event, memory, failure and waiters."""

    __slots__ = ()

    @property
    def state(self) -> str:
        self.done()
        return self.seen_state

    @property
    def seen_state(self) -> str:
        return _NAMES[State(self.status)]

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
        keep: Any = self.keep if self.kind in _SIZED else None  # a buffer, or a tuple that begins with a buffer
        return 0 if keep is None else int((keep[0] if type(keep) is tuple else keep).nbytes)

    @property
    def is_awaited(self) -> bool:
        return self.waiters is not None or self.queue.rare.reports.awaits(self)

    @property
    def waits_for(self) -> StreamOperation[Any] | None:
        keep: Any = self.keep if self.kind == "wait" else None
        return keep if isinstance(keep, StreamOperation) else None

    @property
    def part_of(self) -> StreamOperation[Any] | None:
        entries = self.queue.on_host
        return entries[0] if self.kind is INTERNAL and self.copy_out is not None and entries else None

    @property
    def shown_name(self) -> str:
        """The name for errors: of its copy for a chunk, of an earlier operation for a marker."""
        if self.kind is not INTERNAL:
            return str(self)
        queue = self.queue
        pending = list(queue.pending)
        at = pending.index(self) if self in pending else len(pending)
        if self.copy_out is None:
            others = reversed(pending[:at])
        else:
            others = iter([*pending[at:], *queue.on_host])
        found = next((other for other in others if other.kind is not INTERNAL), None)
        return f"the work of {queue.name}" if found is None else str(found)

    def exception(self) -> BaseException | None:
        state = self.status
        if state == DONE:
            return None
        if state == FAILED:
            assert self.failure is not None
            self.failure.poison.delivered = True
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
                self.failure.poison.had_waiter = True
            if type(self.waiters) is Waiters:
                self.waiters.add(Callback(fn, context))  # the earlier waiters are being woken
            else:
                queue.loop.call_soon(fn, self, context=context)
            return
        self.add_waiter(Callback(fn, context))
        queue.attend()

    def follow(self, fn: Callable[[StreamOperation[Any]], object], context: contextvars.Context) -> None:
        """Add a callback of the library. The program has not seen a failure that such a callback gets."""
        queue = self.queue
        queue.check_loop()
        if self.status >= DONE:
            self.report_await()
            if type(self.waiters) is Waiters:
                self.waiters.add(Callback(fn, context, sees=False))
            else:
                queue.loop.call_soon(fn, self, context=context)
            return
        self.add_waiter(Callback(fn, context, sees=False))
        queue.attend()

    def note_waiters(self, poison: Poison) -> None:
        """Note that code of the program gets the failure, if it has a waiter or a callback."""
        waiters = self.waiters
        if waiters is not None and self.kind is not INTERNAL and not poison.had_waiter:
            for waiter in tuple(waiters) if type(waiters) is Waiters else (waiters,):
                if type(waiter) is not Callback or waiter.sees:
                    poison.had_waiter = True

    def remove_done_callback(self, fn: Callable[[StreamOperation[Any]], object]) -> int:
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

    async def settle(self) -> None:
        self.queue.check_loop()
        if not self.is_settled:
            await self.queue.rare.settle()
        if not self.is_settled:
            raise ClosedError(
                f"{self!r} was still with the device when that was closed: what it may touch stays in use"
            )

    async def wait(self) -> T_co:
        # Here, because the coroutine of a compiled class is none for `inspect.iscoroutine`.
        return await self

    def __dir__(self) -> list[str]:
        """Return the names of the public class."""
        return [name for name in super().__dir__() if hasattr(Operation, name)]

    @property
    def is_unwanted(self) -> bool:
        """True if the operation was abandoned or has failed, so that its result is not needed."""
        return self.status == ABANDONED or self.failure is not None

    # The attributes of `Extra`.

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
        """Call `Extra.on_await`: the operation has finished, and a task awaits it now."""
        extra = self.extra
        if extra is not None and extra.on_await:
            reports, extra.on_await = extra.on_await, ()
            for report in reports:
                self.queue.reactor.guard(self.context.copy().run, report, self)

    def _extras(self) -> Extra:
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
        """Fail in its turn: the host's work after the device has finished has failed."""
        poison = Poison(error, self.queue.loop, str(self))
        self.fail_in_turn(poison.failure(), error)
        self.note_unseen(poison)

    def note_unseen(self, poison: Poison) -> None:
        """Keep the failure for the end of a block, if the program knows the operation."""
        if self.kind is not INTERNAL and self.status != ABANDONED:
            self.queue.rare.unseen.note(poison)

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Fail now, if unfinished, and wake the waiters. The device has faulted.

        A second call continues a call that Ctrl-C has interrupted.
        """
        if self.status == ABANDONED:
            self.detached = False
        elif self.status < DONE:
            self.fail_in_turn(failure, error)
            self.note_waiters(failure.poison)
            self.status = FAILED
            self.queue.reactor.failed += self.kind is not INTERNAL
        self.wake_waiters_paced()

    def drop_result(self) -> None:
        """Finish as abandoned and wake the waiters.

        The operation keeps its place in the queue, its event and its memory until its turn comes.
        """
        extra = self._extras()
        # These lines make no call: Ctrl-C leaves the operation abandoned or unchanged. If Ctrl-C prevents the wake-up,
        # the waiters are woken in the operation's turn.
        extra.detached = True
        self.status = ABANDONED
        self.value = None
        self.queue.reactor.abandoned += self.kind is not INTERNAL
        if extra.failure is not None:
            extra.failure.poison.had_waiter = True  # the program has dropped the result
        self.wake_waiters_paced()


def stream_operation(operation: Operation[T_co]) -> StreamOperation[T_co]:
    """Return an operation as the library sees it. Every operation is a `StreamOperation`."""
    assert isinstance(operation, StreamOperation)
    return operation


def check_awaited(thing: object, role: str) -> None:
    """Raise `InvalidTypeError` if an operation was passed instead of its result."""
    if isinstance(thing, Operation):
        raise InvalidTypeError(
            f"{role} is an Operation: await it first, and pass its result. It is {thing!r}"
        ) from None
