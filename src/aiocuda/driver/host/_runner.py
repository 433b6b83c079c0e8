"""A thread that does what engines do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from ..software.rules import Command

__all__ = ["Runner", "Task"]

#: Carries a command out, says that it has ended, and returns what the same thread goes on with.
Task: TypeAlias = Callable[["Runner", Command], Command | None]


#: Seconds. A lock waits no longer than `threading.TIMEOUT_MAX`, which differs between platforms; then it is asked
#: again.
_LONGEST = 3600.0


class Runner:
    """A daemon thread that carries out one command at a time, asleep where the command takes modelled time.

    While idle it holds nothing of the driver, so that an unused driver can be collected.
    """

    def __init__(self, name: str) -> None:
        # A queue in C: handing over costs 1.5 µs, and a finalizer may put into it wherever the collector runs.
        self._inbox: queue.SimpleQueue[tuple[Task, Command] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
        # Held, but for the instant of a dismissal. Not the inbox: a `SimpleQueue.get` whose time is up before it
        # waits, as it can be with microseconds on a busy machine, waits for ever (CPython 3.11.7, soon).
        self._sleeping = threading.Lock()
        self._sleeping.acquire()
        self._dismissed = False
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Has the thread not ended?"""
        return self._thread.is_alive()

    def assign(self, task: Task, command: Command) -> None:
        """Carry out a command. The runner must be idle."""
        self._inbox.put((task, command))

    def dismiss(self) -> None:
        """End the thread: at once where it sleeps, else when its command has ended."""
        if not self._dismissed:
            self._dismissed = True
            self._sleeping.release()
            self._inbox.put(None)

    def sleep_until(self, when: float) -> None:
        """Sleep until a time of `time.monotonic`, or until dismissed."""
        while not self._dismissed and (rest := when - time.monotonic()) > 0:
            self._sleeping.acquire(timeout=min(rest, _LONGEST))


def _serve(runner: Runner) -> None:
    while (assigned := runner._inbox.get()) is not None:
        task, command = assigned
        del assigned
        while (following := task(runner, command)) is not None:
            command = following
        del task, command
