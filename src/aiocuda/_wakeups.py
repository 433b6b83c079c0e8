"""Waking: waiters in the order of their coming, and the number of them that a loop wakes in one iteration.

A structure on which many tasks wait keeps them in `Waiters`. It wakes them through the `Wakes` of their loop: at most
256 in one iteration of the loop, the others in the iterations that follow. So 10 000 waiters do not block the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["MOST_WOKEN", "Callback", "Waiters", "Wakes", "wake_future"]

#: Waiters that a loop wakes in one iteration, at most. To wake one and run its task takes 4 µs and more.
MOST_WOKEN = 256

T = TypeVar("T")


class Callback:
    """A function that a loop is to call, in a context. Two of the same function are two waiters."""

    __slots__ = ("context", "function")

    def __init__(self, function: Callable[[Any], object], context: contextvars.Context) -> None:
        self.function = function
        self.context = context


class Waiters(Generic[T]):
    """Waiters in the order of their coming. To add, find and remove one takes constant time, in any order."""

    __slots__ = ("_callbacks", "_order")

    def __init__(self, *waiters: T) -> None:
        self._order: OrderedDict[Any, None] = OrderedDict.fromkeys(waiters)
        #: Callbacks by their function, from the first `remove` on.
        self._callbacks: dict[Any, list[Callback]] | None = None

    def add(self, waiter: T) -> None:
        """Put one at the end."""
        self._order[waiter] = None
        if self._callbacks is not None and isinstance(waiter, Callback):
            try:
                self._callbacks.setdefault(waiter.function, []).append(waiter)
            except TypeError:
                self._callbacks = None  # a function without a hash: see `remove`

    def add_first(self, waiter: T) -> None:
        """Put one in front of all others."""
        self._order[waiter] = None
        self._order.move_to_end(waiter, last=False)

    def discard(self, waiter: T) -> bool:
        """Take one out; False if it is not in here."""
        return self._order.pop(waiter, False) is None

    @property
    def first(self) -> T:
        """The first one."""
        first: T = next(iter(self._order))
        return first

    def pop(self) -> T:
        """Take the first one out. `KeyError` if there is none."""
        first: T = self._order.popitem(last=False)[0]
        return first

    def remove(self, function: Callable[[Any], object]) -> int:
        """Take all callbacks out whose function equals this one; their number."""
        found: list[Any]
        try:
            if self._callbacks is None:
                callbacks: dict[Any, list[Callback]] = {}
                for waiter in self._order:
                    if type(waiter) is Callback:
                        callbacks.setdefault(waiter.function, []).append(waiter)
                self._callbacks = callbacks
            found = self._callbacks.pop(function, [])
        except TypeError:  # a function without a hash can only be compared with all others
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

    What is to be woken is described by a function that wakes one waiter each time it is called, and returns whether
    more are left. A function whose turn has not come yet wakes nobody: the order between functions is kept, too.
    """

    __slots__ = ("__weakref__", "_at_once", "_left", "_loop", "_queue", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[Callable[[], bool]] = deque()
        self._left = MOST_WOKEN  # until `_next` runs
        self._at_once = 0  # of those woken since `_next` ran, the ones that were woken by their own call of `wake`
        self._scheduled = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Wakes:
        """The loop's one. It lives as long as somebody holds it, or it has something left to do."""
        known = _in_use.get(id(loop))
        if known is None:
            known = _in_use[id(loop)] = cls(loop)
        return known

    def wake(self, wake_next: Callable[[], bool]) -> None:
        """Call ``wake_next`` until it returns False: at once as often as this iteration allows, then in the next ones.

        ``wake_next`` takes a waiter out before it wakes it: an interrupt in between costs that one waiter.
        """
        if not self._scheduled:
            self._loop.call_soon(self._next)
            self._scheduled = True
        queue = self._queue
        queue.append(wake_next)
        if len(queue) == 1:
            before = self._left
            try:
                self._go_on()
            finally:
                self._at_once += before - self._left

    def wake_all(self, waiters: Waiters[T], wake: Callable[[T], object]) -> None:
        """Call ``wake`` with each of the waiters, and take it out. More may join or leave meanwhile."""

        def wake_next() -> bool:
            if waiters:
                wake(waiters.pop())
            return bool(waiters)

        if waiters:
            self.wake(wake_next)

    def _go_on(self) -> None:
        queue = self._queue
        while queue and self._left > 0:
            self._left -= 1
            if not queue[0]():
                queue.popleft()

    def _next(self) -> None:
        """The next iteration. What was woken since the last one may have been woken in this iteration, and counts."""
        self._scheduled = False
        self._left, self._at_once = MOST_WOKEN - self._at_once, 0
        try:
            self._go_on()
        finally:
            if self._queue and not self._scheduled:
                self._loop.call_soon(self._next)
                self._scheduled = True


def wake_future(future: asyncio.Future[None]) -> None:
    """Wake the task that waits for a future, unless it has left."""
    if not future.done():
        future.set_result(None)
