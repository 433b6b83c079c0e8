"""Ordered collections of waiters, and a limit for the waiters that a loop wakes in one iteration.

An object on which many tasks wait keeps them in `Waiters`, and wakes them through the `Wakes` of their loop: at most
256 in one iteration of the loop, the others in the next iterations. So 10 000 waiters do not block the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["MOST_PER_TURN", "MOST_WOKEN", "WATCHDOG_SECONDS", "Callback", "Waiters", "Wakes", "wake_future"]

#: The most waiters that a loop wakes in one iteration. To wake one and to run its task takes 4 µs or more.
MOST_WOKEN = 256

#: Operations resolved in one pass: 1 000 take 1.7 ms, and no turn of the loop may take 5 ms (measured).
MOST_PER_TURN = 256

#: Seconds between two passes of the watchdog over the streams with unfinished operations, awaited or not: after a
#: fault, notifications never come.
WATCHDOG_SECONDS = 0.025

T = TypeVar("T")


class Callback:
    """A function that the loop will call, and its context. Two callbacks of one function are two waiters.

    ``sees``: True for a function of the program, so that the program has seen the failure that the function gets.
    """

    __slots__ = ("context", "function", "sees")

    def __init__(self, function: Callable[[Any], object], context: contextvars.Context, sees: bool = True) -> None:
        self.function = function
        self.context = context
        self.sees = sees


class Waiters(Generic[T]):
    """Waiters in the order of their arrival. Adding, finding and removing one takes constant time."""

    __slots__ = ("_callbacks", "_order")

    def __init__(self, *waiters: T) -> None:
        self._order: OrderedDict[Any, None] = OrderedDict.fromkeys(waiters)
        #: Callbacks by function; None before the first `remove`.
        self._callbacks: dict[Any, list[Callback]] | None = None

    def add(self, waiter: T) -> None:
        """Add a waiter at the end."""
        self._order[waiter] = None
        if self._callbacks is not None and isinstance(waiter, Callback):
            try:
                self._callbacks.setdefault(waiter.function, []).append(waiter)
            except TypeError:
                self._callbacks = None  # an unhashable function: see `remove`

    def add_first(self, waiter: T) -> None:
        """Add a waiter at the beginning."""
        self._order[waiter] = None
        self._order.move_to_end(waiter, last=False)

    def discard(self, waiter: T) -> bool:
        """Remove a waiter. Return False if it is not in the collection."""
        return self._order.pop(waiter, False) is None

    @property
    def first(self) -> T:
        """The first waiter."""
        first: T = next(iter(self._order))
        return first

    def pop(self) -> T:
        """Remove and return the first waiter. `KeyError` if there is none."""
        first: T = self._order.popitem(last=False)[0]
        return first

    def remove(self, function: Callable[[Any], object]) -> int:
        """Remove the callbacks whose function equals this one. Return their number."""
        found: list[Any]
        try:
            if self._callbacks is None:
                callbacks: dict[Any, list[Callback]] = {}
                for waiter in self._order:
                    if type(waiter) is Callback:
                        callbacks.setdefault(waiter.function, []).append(waiter)
                self._callbacks = callbacks
            found = self._callbacks.pop(function, [])
        except TypeError:  # an unhashable function must be compared with all others
            self._callbacks = None
            found = [each for each in self._order if type(each) is Callback and each.function == function]
        return sum([self._order.pop(callback, False) is None for callback in found])

    def __contains__(self, waiter: object) -> bool:
        return waiter in self._order

    def __iter__(self) -> Iterator[T]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


#: The `Wakes` that are in use, by the id of their loop, which each of them holds.
_in_use: weakref.WeakValueDictionary[int, Wakes] = weakref.WeakValueDictionary()


class Wakes:
    """The wake-ups of one event loop.

    A caller passes a function that wakes one waiter per call, and returns whether more are left. The functions run one
    after another, in the order of the calls of `wake`.
    """

    __slots__ = ("__weakref__", "_at_once", "_left", "_loop", "_queue", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[Callable[[], bool]] = deque()
        self._left = MOST_WOKEN  # wake-ups that this iteration of the loop still allows
        self._at_once = 0  # wake-ups inside `wake` since the last call of `_begin_iteration`
        self._scheduled = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Wakes:
        """Return the `Wakes` of a loop. It exists while an object holds it, or while it has waiters to wake."""
        known = _in_use.get(id(loop))
        if known is None:
            known = _in_use[id(loop)] = cls(loop)
        return known

    def wake(self, wake_next: Callable[[], bool]) -> None:
        """Call ``wake_next`` until it returns False: now as often as this iteration allows, then in the next ones.

        ``wake_next`` removes a waiter before it wakes it, so Ctrl-C between the two costs that one waiter.
        """
        if not self._scheduled:
            self._loop.call_soon(self._begin_iteration)
            self._scheduled = True
        queue = self._queue
        queue.append(wake_next)
        if len(queue) == 1:
            before = self._left
            try:
                self._go_on()
            finally:
                self._at_once += before - self._left

    def wake_all(self, waiters: Waiters[T], wake_one: Callable[[T], object]) -> None:
        """Remove each waiter and call ``wake_one`` with it. Waiters may be added or removed during this."""

        def wake_next() -> bool:
            if waiters:
                wake_one(waiters.pop())
            return bool(waiters)

        if waiters:
            self.wake(wake_next)

    def _go_on(self) -> None:
        queue = self._queue
        while queue and self._left > 0:
            self._left -= 1
            if not queue[0]():
                queue.popleft()

    def _begin_iteration(self) -> None:
        """Wake up to `MOST_WOKEN` waiters, less those that `wake` has woken: it may have run in the same iteration."""
        self._scheduled = False
        self._left, self._at_once = MOST_WOKEN - self._at_once, 0
        try:
            self._go_on()
        finally:
            if self._queue and not self._scheduled:
                self._loop.call_soon(self._begin_iteration)
                self._scheduled = True


def wake_future(future: asyncio.Future[None]) -> None:
    """Wake the task that waits for a future, unless the future is done or cancelled."""
    if not future.done():
        future.set_result(None)
