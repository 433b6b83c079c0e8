"""Wait: what `aiocuda.wait` returns, where that is no operation of a stream; and the end of what it uses in a loop."""

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
    """A wait for work that no stream of aiocuda has accepted.

    Subclasses say what ends it, by `_begin`, `_leave` and `_look`. They watch while the wait has a waiter: a cancelled
    one leaves nothing.

    Attributes
    ----------
    loop : asyncio.AbstractEventLoop
        The only loop that may use it.
    status : int
        A value of `State`.
    keep : object
        What is waited for; held until the wait is done.
    context : contextvars.Context
        Of the caller.
    """

    __slots__ = ("__weakref__", "_deadline", "_error", "_timeout", "_timer", "_waiters", "context", "keep", "loop",
                 "status")  # fmt: skip

    _looks_first = False  #: True if an await begins with `_look`
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
        """Begin to watch: the wait has its first waiter."""

    def _leave(self) -> None:
        """Watch no longer: no waiter is left."""

    def _look(self) -> None:
        """Call `finish` if the work is done now."""

    def finish(self, error: BaseException | None = None) -> None:
        """End the wait, and wake its waiters."""
        self._end(DONE if error is None else FAILED, error)

    def _end(self, status: int, error: BaseException | None) -> None:
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
        if isinstance(waiter, Callback):
            self.loop.call_soon(waiter.function, self, context=waiter.context)
        else:
            wake_future(waiter)

    # -- the limit of time ---------------------------------------------------------------------------------------------

    def limit(self, seconds: float) -> None:
        """End the wait by `TimeoutError` in so many seconds."""
        self._timeout, self._deadline = seconds, self.loop.time() + seconds

    def _expire(self) -> None:
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
        """True if nothing watches for the end any more."""
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
        if self.status < DONE and asyncio._get_running_loop() is self.loop:
            self._look()
            if self._deadline is not None and self.loop.time() >= self._deadline:
                self._expire()
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
            self._wake(callback)
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
            yield  # other tasks run, also if this one awaits only what is done
        else:
            yield from self._wait_by(self.loop.create_future()).__await__()
        self.result()

    async def _wait_by(self, waiter: asyncio.Future[None]) -> None:
        self._add(waiter)
        try:
            await waiter
        finally:
            if self.status < DONE and self._waiters.discard(waiter):
                self._removed()

    def _add(self, waiter: asyncio.Future[None] | Callback) -> None:
        is_first = not self._waiters
        self._waiters.add(waiter)
        if not is_first:
            return
        try:
            if self._deadline is not None:
                self._timer = self.loop.call_at(self._deadline, self._expire)
            self._begin()
        except BaseException:  # else the next waiter would not be the first
            self._waiters.discard(waiter)
            self._removed()
            raise

    def _removed(self) -> None:
        """Watch no longer if no waiter is left."""
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
        self._left = {id(operation) for operation in self._operations}
        for operation in self._operations:
            operation.add_done_callback(self._note, context=self.context)

    def _leave(self) -> None:
        for operation in self._operations:
            operation.remove_done_callback(self._note)

    def _note(self, operation: Operation[Any]) -> None:
        self._left.discard(id(operation))
        if not self._left:
            self._look()

    def _look(self) -> None:
        if self.status < DONE and all(operation.done() for operation in self._operations):
            in_order = sorted(self._operations, key=lambda operation: getattr(operation, "id", 0))
            errors = [error for operation in in_order if (error := operation.exception()) is not None]
            self.finish(errors[0] if errors else None)

    def _end(self, status: int, error: BaseException | None) -> None:
        super()._end(status, error)
        self._operations = ()  # after a timeout, what they wait for is not held


class ThreadWait(Wait):
    """A wait for a function that blocks, on a daemon thread of its own. A cancelled wait leaves the thread."""

    __slots__ = ()

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: object, block: Callable[[], object]) -> None:
        super().__init__(loop, keep)
        threading.Thread(target=self.context.run, args=(self._run, block), name="aiocuda-wait", daemon=True).start()

    def _run(self, block: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            block()
        except BaseException as caught:  # noqa: BLE001 - raised in the waiter
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
        if self.status >= DONE:
            return
        try:
            answer = self.context.copy().run(self._function)
        except BaseException as error:
            self.finish(failure_of(error))
            if isinstance(error, LEAVES_LOOP):
                raise
            return
        if answer is True:
            self.finish()
        elif answer is not False:
            text = f"{described(self._function)} returned {described(answer)}: a polled function returns a bool"
            self.finish(InvalidTypeError(text))

    def look(self) -> None:
        """Call the function."""
        self._look()


class _Poller:
    """Calls the functions of one event loop, by one alarm."""

    __slots__ = ("__weakref__", "_alarm", "_end", "_now", "_waits", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # uvloop's time is that at which the turn began; a simulated loop has a time of its own.
        self._now = time.monotonic if abs(loop.time() - time.monotonic()) < A_LONG_TURN else loop.time
        self._waits: dict[PolledWait, tuple[float, float]] = {}  # the begin of each, and the time of its next call
        self._alarm = Alarm(loop, self._now, self._alarmed, watches=True)
        self._end = end_with_loop(self)

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
        """Call the function of a wait until `remove`."""
        now = self._now()
        self._waits[wait] = (now, now + FIRST_CALL)
        self._alarm.set(now + FIRST_CALL, now)

    def remove(self, wait: PolledWait) -> None:
        """Call the function of a wait no longer. Does nothing if it is not called."""
        self._waits.pop(wait, None)

    def _alarmed(self, now: float) -> None:
        reached = max(now + self._alarm.early, self._alarm.reached)
        due = [wait for wait, (_, when) in self._waits.items() if when <= reached]
        try:
            for wait in due:
                if wait in self._waits:  # else an earlier function has ended it
                    wait.look()
        finally:  # Ctrl-C: the others are still called
            now = self._now()
            for wait in due:
                if wait in self._waits:
                    begun, _ = self._waits[wait]
                    self._waits[wait] = (begun, now + min(max((now - begun) * PART_BETWEEN, FIRST_CALL), MOST_BETWEEN))
            following = min((when for _, when in self._waits.values()), default=math.inf)
            if following < math.inf:
                self._alarm.set(following, now)

    def close(self) -> None:
        """Stop the alarm."""
        self._alarm.close()
        _pollers.pop(id(self.loop), None)


#: By the id of the loop. The loop holds its poller by the alarm.
_pollers: weakref.WeakValueDictionary[int, _Poller] = weakref.WeakValueDictionary()


class HasEnd(Protocol):
    """An object that the descriptors of its loop hold, so that it is collected with the loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_used(self) -> bool:
        """True while a wait is pending."""

    def close(self) -> None:
        """Release everything. The loop may be closed already."""


#: Loops whose ``shutdown_asyncgens`` has run: they warn of further generators.
_shut_down: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

#: All objects that have not ended. Each reference removes itself when its object is collected.
_known: dict[weakref.ref[HasEnd], None] = {}


def end_with_loop(thing: HasEnd) -> object:
    """Close an object with the running loop; return a generator that the object must hold.

    ``shutdown_asyncgens``, which `asyncio.run` and servers call, closes it. Where a wait is still pending then, or
    where the loop is closed without that call, the loop's end releases it, or else the next call of this function in
    the process does.
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
    sys.set_asyncgen_hooks(finalizer=None)  # which would hold the loop, and schedule a call in it
    try:
        generator.asend(None).send(None)
    except StopIteration:
        pass  # it has reached its `yield`
    finally:
        sys.set_asyncgen_hooks(*hooks)
    return generator


async def _until_shutdown(
    thing: weakref.ref[HasEnd], loop: weakref.ref[asyncio.AbstractEventLoop]
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        found, running = thing(), loop()
        if found is not None and running is not None:  # else the object is collected, and the loop goes on
            _shut_down.add(running)
            if not found.is_used:
                found.close()


def described(thing: Any) -> str:
    """Return a short text for errors. It runs no code of the program, and reads no values of an array or tensor.

    A ``repr`` could block the loop, as that of an object that holds a tensor, or raise where a waiter would never end.
    """
    while type(thing) is functools.partial:
        thing = thing.func
    kind = type(thing)
    if kind in (list, tuple):
        return f"[{', '.join(map(described, thing[:3]))}{', …' if len(thing) > 3 else ''}]"
    if kind is types.MethodType:
        thing = thing.__func__
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
