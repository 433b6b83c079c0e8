"""Wait: what `aiocuda.wait` returns. `end_with_loop`: closes what waits use in a loop when the loop ends."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import sys
import threading
import time
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, Protocol

from .._base._checks import check_callback
from .._base._failure import raisable
from .._base._label import LABEL
from .._base._user_code import LEAVES_LOOP, failure_of
from .._base._wakeups import Callback, Waiters, Wakes, wake_future
from .._core import ABANDONED, DONE, FAILED, SUBMITTED, Operation, State, new_id
from ..errors import BusyError, ClosedError, InvalidTypeError, NoEventLoopError, WrongLoopError
from ._alarm import A_LONG_TURN, Alarm

__all__ = ["JoinedWait", "PolledWait", "ThreadWait", "Wait", "end_with_loop"]

#: Seconds until the first call of a polled function, and the most seconds between two calls. In between, a call comes
#: after an eighth of the time that the wait has taken.
FIRST_CALL = 50e-6
MOST_BETWEEN = 0.005
PART_BETWEEN = 1 / 8


class Wait(Operation[None]):
    """A wait for work that no stream of aiocuda has accepted. It is an operation, but in no queue.

    A subclass watches the work only while the wait has a waiter, from `_begin` to `_leave`, and calls `finish` when the
    work is done. So a cancelled await leaves nothing that watches.

    Attributes
    ----------
    loop : asyncio.AbstractEventLoop
        The only loop that may use it.
    status : int
        A value of `State`: SUBMITTED until the wait is over.
    keep : object
        What is waited for; held until the wait is done.
    context : contextvars.Context
        Of the caller.
    """

    __slots__ = ("__weakref__", "_deadline", "_error", "_timeout", "_timer", "_waiters", "context", "keep", "loop",
                 "status")  # fmt: skip

    _looks_first = False  #: True if an await of an unfinished wait begins with `_look`
    stream = kernel = waits_for = part_of = None
    stream_name = "work outside of aiocuda"
    nbytes = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: object) -> None:
        self.id = new_id()
        self.kind = "wait"
        self.loop = loop
        self.status: int = SUBMITTED
        self.keep = keep
        self.context = contextvars.copy_context()
        self._error: BaseException | None = None
        self._waiters: Waiters[asyncio.Future[None] | Callback] = Waiters()
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = 0.0
        self._deadline: float | None = None

    # -- what ends it --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin to watch the work: the wait has its first waiter."""

    def _leave(self) -> None:
        """Stop watching: no waiter is left, or the wait is over."""

    def _look(self) -> None:
        """Check the work without blocking, and call `finish` if it is done."""

    def finish(self, error: BaseException | None = None) -> None:
        """End the wait, and wake its waiters."""
        self._end(DONE if error is None else FAILED, error)

    def _end(self, status: int, error: BaseException | None) -> None:
        """End the wait as done, failed or abandoned, once: stop the timer and the watching, and wake the waiters."""
        if self.status >= DONE:
            return
        self.status, self._error, self.keep = status, error, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiters:
            self._leave()
            Wakes.of(self.loop).wake_all(self._waiters, self._wake)

    def _wake(self, waiter: asyncio.Future[None] | Callback) -> None:
        """Schedule a callback, or wake the task that waits for a future."""
        if isinstance(waiter, Callback):
            self.loop.call_soon(waiter.function, self, context=waiter.context)
        else:
            wake_future(waiter)

    # -- the limit of time ---------------------------------------------------------------------------------------------

    def limit(self, seconds: float) -> None:
        """Set the deadline: after so many seconds the wait ends by `TimeoutError`."""
        self._timeout, self._deadline = seconds, self.loop.time() + seconds

    def _expire(self) -> None:
        """End the wait by `TimeoutError`, unless the work is done now: the deadline has come."""
        self._look()
        if self.status < DONE:
            self.finish(TimeoutError(f"{described(self.keep)} has not finished within {self._timeout:g} s"))

    # -- the operation -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        self.done()
        return self.seen_state

    @property
    def seen_state(self) -> str:
        return State(self.status).name.lower()

    @property
    def label(self) -> str | None:
        return self.context.get(LABEL)

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiters) and self.status < DONE

    @property
    def is_settled(self) -> bool:
        """True if the wait is over: nothing watches for its end any more."""
        return self.status >= DONE

    def check_loop(self) -> None:
        """Raise unless the wait's own loop is running."""
        running = asyncio._get_running_loop()
        if running is self.loop:
            return
        if running is None:
            raise NoEventLoopError(f"{self!s} belongs to an event loop, and none is running: await it in a coroutine")
        raise WrongLoopError(f"{self!s} belongs to another event loop: call aiocuda.wait in this one")

    def done(self) -> bool:
        if self.status < DONE and asyncio._get_running_loop() is self.loop:  # elsewhere: as last seen
            self._look()
            if self._deadline is not None and self.loop.time() >= self._deadline:
                self._expire()  # here too: the timer runs only while there is a waiter
        return self.status >= DONE

    def result(self) -> None:
        error = self.exception()
        if error is not None:
            try:
                raise error
            finally:
                del error  # otherwise the error would hold itself, and the frames of its callers, by this frame

    def exception(self) -> BaseException | None:
        if self.status < DONE:
            raise BusyError(f"{self!r} has not finished: await it")
        if self.status == ABANDONED:
            return ClosedError(f"{self!r} was abandoned")
        return None if self._error is None else raisable(self._error)

    def add_done_callback(
        self, fn: Callable[[Operation[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        check_callback(fn, context)
        self.check_loop()
        callback = Callback(fn, contextvars.copy_context() if context is None else context)
        if self.status >= DONE:
            self._wake(callback)  # in the next turn of the loop
        else:
            self._add(callback)

    def remove_done_callback(self, fn: Callable[[Operation[Any]], object]) -> int:
        check_callback(fn)
        removed = self._waiters.remove(fn)
        if removed:
            self._removed()
        return removed

    def abandon(self) -> bool:
        self.check_loop()
        if self.status >= DONE:
            return False
        self._end(ABANDONED, None)
        return True

    async def settle(self) -> None:
        """Suspend until the wait is over, also by `abandon` or a timeout. It does not raise the error of the wait."""
        self.check_loop()
        if self.status < DONE:
            waiter: asyncio.Future[None] = self.loop.create_future()
            await self._wait_by(waiter)

    async def wait(self) -> None:
        return await self

    def __await__(self) -> Generator[Any, None, None]:
        self.check_loop()
        if self.status < DONE and self._looks_first:
            self._look()
        if self.status >= DONE:
            yield  # to the other tasks: this one may await only what is done
        else:
            yield from self._wait_by(self.loop.create_future()).__await__()
        self.result()

    async def _wait_by(self, waiter: asyncio.Future[None]) -> None:
        """Suspend until the wait is over. A cancelled task removes its waiter."""
        self._add(waiter)
        try:
            await waiter
        finally:
            if self.status < DONE and self._waiters.discard(waiter):
                self._removed()

    def _add(self, waiter: asyncio.Future[None] | Callback) -> None:
        """Add a waiter. With the first one, start the timer of the deadline and the watching."""
        is_first = not self._waiters
        self._waiters.add(waiter)
        if not is_first:
            return
        try:
            if self._deadline is not None:
                self._timer = self.loop.call_at(self._deadline, self._expire)
            self._begin()
        except BaseException:  # remove the waiter, or the next one would not be the first, and nothing would watch
            self._waiters.discard(waiter)
            self._removed()
            raise

    def _removed(self) -> None:
        """Stop the timer and the watching if no waiter is left."""
        if not self._waiters and self.status < DONE:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._leave()


class JoinedWait(Wait):
    """A wait for several operations. When all have finished, it raises the failure that was enqueued first."""

    __slots__ = ("_left", "_operations")

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: object, operations: Sequence[Operation[Any]]) -> None:
        super().__init__(loop, keep)
        self._operations = operations
        self._left: set[int] = set()
        if not operations:
            self.finish()

    def _begin(self) -> None:
        """Add a callback to each operation. If it has finished, the callback comes in the next turn of the loop."""
        self._left = {id(operation) for operation in self._operations}
        for operation in self._operations:
            operation.add_done_callback(self._note, context=self.context)

    def _leave(self) -> None:
        for operation in self._operations:
            operation.remove_done_callback(self._note)

    def _note(self, operation: Operation[Any]) -> None:
        """Note that an operation has finished; the last one ends the wait."""
        self._left.discard(id(operation))
        if not self._left:
            self._look()

    def _look(self) -> None:
        """Finish if all operations are done: with the failure of the one with the lowest id, if there is any."""
        if self.status < DONE and all(operation.done() for operation in self._operations):
            # The id rises with each enqueued operation. A gathering has none.
            in_order = sorted(self._operations, key=lambda operation: getattr(operation, "id", 0))
            errors = [error for operation in in_order if (error := operation.exception()) is not None]
            self.finish(errors[0] if errors else None)

    def _end(self, status: int, error: BaseException | None) -> None:
        super()._end(status, error)
        self._operations = ()  # after a timeout or `abandon`, do not hold what they wait for


class ThreadWait(Wait):
    """A wait for a function that blocks, on a daemon thread of its own, from the beginning.

    Nothing can stop the function: after a cancelled or timed-out wait, the thread runs until it returns.
    """

    __slots__ = ()

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: object, block: Callable[[], object]) -> None:
        super().__init__(loop, keep)
        threading.Thread(target=self.context.run, args=(self._run, block), name="aiocuda-wait", daemon=True).start()

    def _run(self, block: Callable[[], object]) -> None:
        """On the thread: call the function, then have the loop finish the wait, with the function's error if any."""
        error: BaseException | None = None
        try:
            block()
        except BaseException as caught:  # noqa: BLE001 - the waiters get it
            error = failure_of(caught)
        try:
            self.loop.call_soon_threadsafe(self.finish, error)
        except RuntimeError:
            if not self.loop.is_closed():  # a closed loop has no waiter
                raise


class PolledWait(Wait):
    """A wait that is done when a function returns True. The loop calls the function while the wait has a waiter."""

    __slots__ = ("_function", "_poller")

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: object, function: Callable[[], object]) -> None:
        super().__init__(loop, keep)
        self._function = function
        self._poller = _Poller.of(loop)

    def _begin(self) -> None:
        self._poller.add(self)

    def _leave(self) -> None:
        self._poller.remove(self)

    def _look(self) -> None:
        """Call the function: the wait is done at True, goes on at False, and fails by an error or any other value."""
        if self.status >= DONE:
            return
        try:
            answer = self.context.copy().run(self._function)
        except BaseException as error:
            self.finish(failure_of(error))
            if isinstance(error, LEAVES_LOOP):  # such as Ctrl-C, which also stops the loop
                raise
            return
        if answer is True:
            self.finish()
        elif answer is not False:
            text = f"{described(self._function)} returned {described(answer)}: a polled function returns a bool"
            self.finish(InvalidTypeError(text))

    def look(self) -> None:
        """Call the function: the poller does so."""
        self._look()


class _Poller:
    """Calls the functions of the `PolledWait` of one event loop. One alarm is set for the next call of any of them."""

    __slots__ = ("__weakref__", "_alarm", "_end", "_now", "_waits", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # Not uvloop's `loop.time`, at which the turn began; but that of a simulated loop, which differs by far.
        self._now = time.monotonic if abs(loop.time() - time.monotonic()) < A_LONG_TURN else loop.time
        self._waits: dict[PolledWait, tuple[float, float]] = {}  # its begin, and the time of its next call
        self._alarm = Alarm(loop, self._now, self._alarmed, watches=True)  # by a descriptor, if the loop can watch one
        self._end = end_with_loop(self)  # only held: the end of it closes this poller

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Poller:
        """Return the poller of the running loop."""
        poller = _pollers.get(id(loop))
        if poller is None or poller.loop is not loop:
            poller = _pollers[id(loop)] = cls(loop)
        return poller

    @property
    def is_used(self) -> bool:
        return bool(self._waits)

    def add(self, wait: PolledWait) -> None:
        """Call the function of a wait from now on, until `remove`."""
        now = self._now()
        self._waits[wait] = (now, now + FIRST_CALL)
        self._alarm.set(now + FIRST_CALL, now)  # an earlier alarm stays

    def remove(self, wait: PolledWait) -> None:
        """Stop calling the function of a wait. Does nothing if the wait was not added."""
        self._waits.pop(wait, None)

    def _alarmed(self, now: float) -> None:
        """Call the functions that are due, and set the alarm for the next one of all."""
        # The alarm rings early: by `early`, which may have changed since it was set for `reached`.
        due_by = max(now + self._alarm.early, self._alarm.reached)
        due = [wait for wait, (_, when) in self._waits.items() if when <= due_by]
        try:
            for wait in due:
                if wait in self._waits:  # else an earlier function has ended it
                    wait.look()
        finally:  # also after Ctrl-C in a function: the others are still called, at their next time
            now = self._now()
            for wait in due:
                if wait in self._waits:
                    begun, _ = self._waits[wait]
                    self._waits[wait] = (begun, now + min(max((now - begun) * PART_BETWEEN, FIRST_CALL), MOST_BETWEEN))
            following = min((when for _, when in self._waits.values()), default=math.inf)
            if following < math.inf:
                self._alarm.set(following, now)

    def close(self) -> None:
        """Stop the alarm, and let the next wait of the loop make a new poller."""
        self._alarm.close()
        _pollers.pop(id(self.loop), None)


#: By the id of the loop. The loop holds its poller by the alarm.
_pollers: weakref.WeakValueDictionary[int, _Poller] = weakref.WeakValueDictionary()


class HasEnd(Protocol):
    """What waits use in a loop. The loop holds it, by a descriptor that it watches, so both are collected together."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_used(self) -> bool:
        """True while a wait is pending."""

    def close(self) -> None:
        """Release everything. The loop may be closed already."""


#: Loops whose ``shutdown_asyncgens`` has run. They close no further generator, and warn of it.
_shut_down: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

#: All objects given to `end_with_loop` and not closed by it. A reference removes itself when its object is collected.
_known: dict[weakref.ref[HasEnd], None] = {}


def end_with_loop(thing: HasEnd) -> object:
    """Register an object that is to be closed when its loop, the running one, ends.

    Return an asynchronous generator that the object must hold. `asyncio.run` and servers call ``shutdown_asyncgens`` of
    the loop: it closes the generator, which closes the object, unless a wait is pending. If it has run before, return
    None. An object that is not closed so is collected with its loop; if something holds it longer, the next call of
    this function closes it.
    """
    for known in list(_known):
        found = known()
        if found is not None and found.loop.is_closed():
            _known.pop(known, None)
            found.close()
    _known[weakref.ref(thing, lambda gone: _known.pop(gone, None))] = None
    loop = thing.loop
    if loop in _shut_down or getattr(loop, "_asyncgens_shutdown_called", False):
        return None
    generator = _until_shutdown(weakref.ref(thing), weakref.ref(loop))
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(finalizer=None)  # that of the loop would hold the loop, and schedule a call in it
    try:
        generator.asend(None).send(None)  # its first step: here the loop notes it for `shutdown_asyncgens`
    except StopIteration:
        pass  # it has reached its `yield`
    finally:
        sys.set_asyncgen_hooks(*hooks)
    return generator


async def _until_shutdown(
    thing: weakref.ref[HasEnd], loop: weakref.ref[asyncio.AbstractEventLoop]
) -> AsyncGenerator[None, None]:
    """Wait at the ``yield`` for ``shutdown_asyncgens``, then close the object, unless a wait is pending."""
    try:
        yield
    finally:
        found, running = thing(), loop()
        if found is not None and running is not None:  # else the object was collected, with the generator
            _shut_down.add(running)
            if not found.is_used:
                found.close()


def described(thing: Any) -> str:
    """Return a short text for errors. It runs no code of the program, and reads no values of an array or tensor.

    A ``repr`` of the program could block the loop, such as that of an object with a tensor; or raise, and leave a
    waiter without its end.
    """
    while type(thing) is functools.partial:
        thing = thing.func
    kind = type(thing)
    if kind in (list, tuple):
        return f"[{', '.join(map(described, thing[:3]))}{', …' if len(thing) > 3 else ''}]"
    if kind is types.MethodType:
        thing = thing.__func__  # named below without the object that it is bound to
    if type(thing) in (types.FunctionType, types.BuiltinFunctionType):
        return f"function {thing.__qualname__}"
    package = str(kind.__module__).partition(".")[0]
    if package in _WITH_SHAPES and hasattr(thing, "shape"):
        return f"a {kind.__module__}.{kind.__qualname__} of shape {tuple(thing.shape)}"
    if package == "aiocuda" or kind in _PLAIN:
        text = repr(thing)
        return text if len(text) <= 200 else f"{text[:200]}…"
    return f"a {kind.__module__}.{kind.__qualname__}"


#: Packages whose arrays have their shape on the host.
_WITH_SHAPES = frozenset({"aiocuda", "cupy", "numba", "numba_cuda", "numpy", "torch"})

#: Types whose ``repr`` runs nothing else.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, type})
