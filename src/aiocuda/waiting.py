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
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

from .errors import DeadlockError

__all__ = ["Wait", "deadlock", "find_stuck", "waiting"]

Task: TypeAlias = "asyncio.Task[Any]"

#: Could the wait end if none of these tasks ever goes on?
CanEnd: TypeAlias = Callable[[Collection[Task]], bool]


class Wait(NamedTuple):
    """One task's wait."""

    task: Task
    what: str
    future: asyncio.Future[Any]
    can_end: CanEnd | None
    loop: asyncio.AbstractEventLoop


#: Several loops share it; it is changed by single operations only.
_waits: dict[Task, Wait] = {}


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
    loop = task.get_loop()
    before = _waits.get(task)
    wait = _waits[task] = Wait(task, what, future, can_end, loop)
    try:
        # First whether it ends though none of all that wait goes on: else a thousand that wait for one that works would
        # ask each other, each time one more comes.
        if can_end is not None and not future.done() and not can_end(_waits):
            stuck = find_stuck(loop)
            if wait in stuck:
                raise deadlock(stuck)
        yield
    finally:
        if before is None:
            del _waits[task]
        else:
            _waits[task] = before


def find_stuck(loop: asyncio.AbstractEventLoop, patient: bool = True) -> list[Wait]:
    """The waits of a loop that nothing can end. Not ``patient``, nobody comes to end one that anybody might."""
    waits = [wait for wait in tuple(_waits.values()) if wait.loop is loop]
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
