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

Task: TypeAlias = "asyncio.Task[Any]"

#: Could the wait end if none of these tasks ever goes on?
CanEnd: TypeAlias = Callable[[Collection[Task]], bool]


class Wait:
    """One task's wait."""

    __slots__ = ("__weakref__", "can_end", "future", "loop", "task", "what")

    def __init__(self, task: Task, what: str, future: asyncio.Future[Any], can_end: CanEnd | None) -> None:
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


@contextlib.contextmanager
def waiting(what: str, future: asyncio.Future[Any], can_end: CanEnd | None = None) -> Iterator[None]:
    """The current task waits for a future, as long as the block lasts.

    Parameters
    ----------
    what
        What it waits for, and for whom: it stands in the error's text.
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
        # First whether it ends though none of all that wait goes on: else a thousand that wait for one that works would
        # ask each other, each time one more comes.
        if can_end is not None and not future.done() and not can_end(_WAITING):
            stuck = find_stuck(wait.loop)
            if wait in stuck:
                raise deadlock(stuck)
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
    path = tuple(f"{wait.task.get_name()} waits for {wait.what}" for wait in stuck)
    return DeadlockError(f"nothing can end {'this wait' if len(path) == 1 else 'these waits'}: {'; '.join(path)}",
                         path=path)  # fmt: skip
