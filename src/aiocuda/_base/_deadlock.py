"""Finds waits that can never end, because tasks wait for each other.

Code in which a task waits for another task declares it for the duration of the wait::

    with waiting(f"{self!r}, held by {holder!r}", future, can_end=lambda stuck: holder not in stuck):
        await future

A deadlock is a set of waiting tasks of which none can go on before another one of the set does. It is found from these
declarations when the last task of the set begins to wait; that task gets the `DeadlockError`. A wait without
``can_end`` may be ended by any code, so it is no part of a deadlock. A coordinator in which nothing moves counts such
waits as stuck, too: it logs them, and ends them only after its ``deadlock_timeout``. See `find_stuck`.

A function of the program that runs for a batch or an item has a `Holder`. It may wait in tasks of its own, for instance
in those of a task group.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from ..errors import DeadlockError

__all__ = ["HOLDER", "Holder", "Wait", "deadlock", "find_stuck", "waiting"]

#: Text with the awaited object and its holder, or a function that returns it. It is called only for an error message.
What: TypeAlias = "str | Callable[[], str]"

Task: TypeAlias = "asyncio.Task[Any]"

#: Called with a collection of tasks: returns whether the wait can end if none of these tasks goes on.
CanEnd: TypeAlias = Callable[[Collection[Task]], bool]


class Wait:
    """The wait of one task. The attributes are those of `waiting`; ``since`` is the loop's time when it began."""

    __slots__ = ("__weakref__", "can_end", "future", "loop", "since", "task", "what")

    def __init__(self, task: Task, what: What, future: asyncio.Future[Any], can_end: CanEnd | None) -> None:
        self.task = task
        self.what = what
        self.future = future
        self.can_end = can_end
        self.loop = task.get_loop()
        self.since = self.loop.time()


#: The present waits, by the id of the task. References are weak, so that a task can be garbage-collected with its loop.
#: All event loops share the dict; each change is one atomic operation.
_waits: dict[int, weakref.ref[Wait]] = {}


class _Waiting(Collection[Task]):
    """The tasks that now wait for something of the library, such as a lease or a place, as a collection."""

    def __contains__(self, task: object) -> bool:
        return id(task) in _waits

    def __iter__(self) -> Iterator[Task]:
        return (wait.task for wait in _all())

    def __len__(self) -> int:
        return len(_waits)


_WAITING = _Waiting()


def _all() -> list[Wait]:
    return [wait for known in list(_waits.values()) if (wait := known()) is not None]


class _Suspects(Collection[Task]):
    """Tasks that may be stuck: a first task, and each waiting task that a ``can_end`` function has looked up.

    A task that can go on is moved to ``cleared``.
    """

    def __init__(self, first: Wait) -> None:
        self.waits: dict[Task, Wait] = {first.task: first}
        self.cleared: set[Task] = set()
        self._loop = first.loop

    def __contains__(self, task: object) -> bool:
        if task in self.waits:
            return True
        known = None if task in self.cleared else _waits.get(id(task))
        wait = None if known is None else known()
        if wait is None or wait.loop is not self._loop or wait.future.done():
            return False
        self.waits[wait.task] = wait
        return True

    def __iter__(self) -> Iterator[Task]:
        return iter(tuple(self.waits))

    def __len__(self) -> int:
        return len(self.waits)


def _is_stuck(first: Wait) -> bool:
    """Return whether the wait can never end. Checks only the tasks that it depends on, directly or indirectly."""
    suspects = _Suspects(first)
    while True:
        before = len(suspects)
        going = [wait for wait in tuple(suspects.waits.values()) if wait.can_end is None or wait.can_end(suspects)]
        if first in going:
            return False
        if not going and len(suspects) == before:
            return True
        for wait in going:
            del suspects.waits[wait.task]
            suspects.cleared.add(wait.task)


@contextlib.contextmanager
def waiting(what: What, future: asyncio.Future[Any], can_end: CanEnd | None = None) -> Iterator[None]:
    """Declare, for the duration of the block, that the current task waits for a future.

    Raise `DeadlockError` if the wait can never end. A wait that is found to be stuck later gets the error through the
    future. ``what`` names the awaited object and its holder, ``can_end`` is None if any code may end the wait.
    """
    task = asyncio.current_task()
    if task is None:  # a callback runs the coroutine by hand: no other task waits for it
        yield
        return
    key = id(task)
    before = _waits.get(key)
    wait = Wait(task, what, future, can_end)
    _waits[key] = weakref.ref(wait)
    try:
        # First the fast check: can the wait end if no waiting task goes on? Only then the tasks that it depends on. All
        # waits are checked only for the error, because the cost would be quadratic in the number of waits.
        if can_end is not None and not future.done() and not can_end(_WAITING) and _is_stuck(wait):
            raise deadlock(find_stuck(wait.loop))
        yield
    finally:
        if before is None:
            del _waits[key]
        else:
            _waits[key] = before


class Holder:
    """A function of the program that runs for a batch or an item, and holds a place of the library until it returns.

    Parameters
    ----------
    name
        Of the batch, or of the stage and the item.

    Attributes
    ----------
    task : asyncio.Task or None
        The task in which the function runs, which makes this object. Set it to None when the function has returned.
    """

    __slots__ = ("_waiters", "name", "task")

    def __init__(self, name: str) -> None:
        self.name = name
        self.task = asyncio.current_task()
        self._waiters: set[Task] = set()  # those that wait by `waiting`, in its context

    @contextlib.contextmanager
    def waiting(self, what: What, future: asyncio.Future[Any], can_end: CanEnd) -> Iterator[None]:
        """Declare that the current task, which has the context of the function, waits. See the function `waiting`."""
        task = asyncio.current_task()
        if task is None or task in self._waiters:
            yield
            return
        self._waiters.add(task)
        try:
            with waiting(what, future, can_end):
                yield
        finally:
            self._waiters.discard(task)

    def is_stuck(self, stuck: Collection[Task]) -> bool:
        """Return whether the function waits in one of these tasks: in its own one, or in another one that it awaits."""
        task = self.task
        if task is None:
            return False
        return task in stuck or any(each in stuck and _awaits(task, each) for each in list(self._waiters))


#: The function that runs in this context.
HOLDER: ContextVar[Holder | None] = ContextVar("aiocuda_holder", default=None)

#: Packages with objects that lead from a task to the tasks that wait for it.
_TASK_GROUPS: Final = ("asyncio", "anyio")

#: Types of callbacks, and of the objects in them. The wake-up of a task is a built-in method.
_IN_CALLBACKS: Final = (types.CellType, types.MethodType, types.BuiltinMethodType, functools.partial, tuple)

#: The most objects that `_awaits` examines.
_MOST_LOOKED_AT: Final = 1000


def _awaits(task: Task, other: Task) -> bool:
    """Return whether a task waits for another one: in an await, a gather, a wait or a task group.

    It follows the callbacks of tasks and futures, through closures and the objects of asyncio and anyio.
    """
    seen: dict[int, object] = {}
    left: list[object] = [other]
    while left and len(seen) < _MOST_LOOKED_AT:
        each = left.pop()
        if each is task:
            return True
        if id(each) in seen:
            continue
        seen[id(each)] = each
        kind = type(each)
        if isinstance(each, asyncio.Future):
            left += [callback for callback, *_ in getattr(each, "_callbacks", None) or ()]
        elif kind is types.FunctionType:
            left += getattr(each, "__closure__", None) or ()
        elif kind in _IN_CALLBACKS:
            left += gc.get_referents(each)
        elif kind.__module__.partition(".")[0] in _TASK_GROUPS and not isinstance(each, asyncio.AbstractEventLoop):
            left += getattr(each, "__dict__", {}).values()
    return False


def find_stuck(loop: asyncio.AbstractEventLoop, patient: bool = True) -> list[Wait]:
    """Return the waits of a loop that can never end.

    With ``patient=False``, waits without ``can_end`` count as waits that no code will end.
    """
    waits = [wait for wait in _all() if wait.loop is loop]
    stuck = {wait.task for wait in waits if not wait.future.done()}
    while True:
        going = [
            wait for wait in waits if wait.task in stuck and (patient if wait.can_end is None else wait.can_end(stuck))
        ]
        if not going:
            return [wait for wait in waits if wait.task in stuck]
        stuck.difference_update(wait.task for wait in going)


def deadlock(stuck: list[Wait]) -> DeadlockError:
    """Return the error that names these waits."""
    path = tuple(
        f"{wait.task.get_name()} waits for {wait.what if isinstance(wait.what, str) else wait.what()}" for wait in stuck
    )
    return DeadlockError(f"nothing can end {'this wait' if len(path) == 1 else 'these waits'}: {'; '.join(path)}",
                         path=path)  # fmt: skip
