"""Waiting: which task waits for what, so that waits that nothing can end are found.

A primitive on which tasks wait for each other, a lease, a barrier, a place, says so for as long as it waits::

    with waiting(f"{self!r}, held by {holder!r}", future, can_end=lambda stuck: holder not in stuck):
        await future

A set of tasks that wait, none of which can go on before another one of them does, is a deadlock: it is found when the
last of them begins to wait, by structure, and he gets the `DeadlockError`. Who cannot say who might end his wait leaves
``can_end`` out: such a wait counts as one that somebody will end, until all that a coordinator has is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

from .errors import DeadlockError

__all__ = ["Wait", "deadlock", "find_stuck", "waiting"]

#: What a task waits for, and who holds it: a text, or a function that returns it when an error needs it.
What: TypeAlias = "str | Callable[[], str]"

Task: TypeAlias = "asyncio.Task[Any]"

#: Could the wait end if none of these tasks ever goes on?
CanEnd: TypeAlias = Callable[[Collection[Task]], bool]


class Wait:
    """One task's wait."""

    __slots__ = ("__weakref__", "can_end", "future", "loop", "task", "what")

    def __init__(self, task: Task, what: What, future: asyncio.Future[Any], can_end: CanEnd | None) -> None:
        self.task = task
        self.what = what
        self.future = future
        self.can_end = can_end
        self.loop = task.get_loop()


#: By the task's id, and not held: a task that goes with its loop takes its wait along, and all that this would hold.
#: Several loops share it; it is changed by single operations only.
_waits: dict[int, weakref.ref[Wait]] = {}


class _Waiting(Collection[Task]):
    """All tasks that wait just now."""

    def __contains__(self, task: object) -> bool:
        return id(task) in _waits

    def __iter__(self) -> Iterator[Task]:
        return (wait.task for wait in _all())

    def __len__(self) -> int:
        return len(_waits)


_WAITING = _Waiting()


def _all() -> list[Wait]:
    return [wait for known in tuple(_waits.values()) if (wait := known()) is not None]


class _Suspects(Collection[Task]):
    """Tasks that are taken to wait in vain until one of them turns out not to: one, and all that are asked about."""

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
    """Can nothing end this wait? Looks only at the tasks that it depends on, directly or over others."""
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
    """The current task waits for a future, as long as the block lasts.

    Parameters
    ----------
    what
        What it waits for, and for whom: it stands in the error's text. A function is called only for that.
    future
        What it waits on. A wait that turns out hopeless later gets the error through it.
    can_end
        Given tasks of which none will go on, can the wait still end? None says that nobody can tell.

    Raises
    ------
    DeadlockError
        It can never end. ``path`` names the waits.
    """
    task = asyncio.current_task()
    if task is None:  # a callback that drives a coroutine by hand: it holds nothing that others wait for
        yield
        return
    key = id(task)
    before = _waits.get(key)
    wait = Wait(task, what, future, can_end)
    _waits[key] = weakref.ref(wait)
    try:
        # First whether it ends although no waiting task goes on, which is quickly answered; then whether the tasks that
        # it depends on wait in vain. All waits are looked at only for the error: else each of n waits would cost n.
        if can_end is not None and not future.done() and not can_end(_WAITING) and _is_stuck(wait):
            raise deadlock(find_stuck(wait.loop))
        yield
    finally:
        if before is None:
            del _waits[key]
        else:
            _waits[key] = before


def find_stuck(loop: asyncio.AbstractEventLoop, patient: bool = True) -> list[Wait]:
    """The waits of a loop that nothing can end. Not ``patient``, nobody comes to end one that anybody might."""
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
    """What to raise where these wait."""
    path = tuple(
        f"{wait.task.get_name()} waits for {wait.what if isinstance(wait.what, str) else wait.what()}" for wait in stuck
    )
    return DeadlockError(f"nothing can end {'this wait' if len(path) == 1 else 'these waits'}: {'; '.join(path)}",
                         path=path)  # fmt: skip
