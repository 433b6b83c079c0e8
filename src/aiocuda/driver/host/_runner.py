"""`Runner`: a thread that executes the commands of engines."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from ..software.rules import Command

__all__ = ["Runner", "Task"]

#: Executes and ends a command, and returns the next command of the same thread.
Task: TypeAlias = Callable[["Runner", Command], Command | None]

#: Seconds of one wait. A lock waits at most `threading.TIMEOUT_MAX`, which depends on the platform.
_LONGEST = 3600.0


class Runner:
    """A daemon thread that executes one command at a time, and sleeps during the command's modelled time.

    An idle runner has no reference to the driver, so that an unused driver can be collected.
    """

    def __init__(self, name: str) -> None:
        # `SimpleQueue` is written in C: a hand-over costs 1.5 µs, and a finalizer may call `put` at any time.
        self._inbox: queue.SimpleQueue[tuple[Task, Command] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self, self._inbox), name=name, daemon=True)
        # Always held; `dismiss` releases it to end a sleep. A timeout of the inbox cannot be used: `SimpleQueue.get`
        # waits forever if its timeout of some microseconds is over before it begins to wait (CPython 3.11.7).
        self._sleeping = threading.Lock()
        self._sleeping.acquire()
        self._dismissed = False
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def assign(self, task: Task, command: Command) -> None:
        """Execute a command. The runner must be idle."""
        self._inbox.put((task, command))

    def dismiss(self) -> None:
        """End the thread: immediately if it sleeps, else when its command has ended."""
        if not self._dismissed:
            self._dismissed = True
            self._sleeping.release()
            self._inbox.put(None)

    def sleep_until(self, when: float) -> None:
        """Sleep until a time of `time.monotonic`, or until `dismiss`."""
        while not self._dismissed and (rest := when - time.monotonic()) > 0:
            self._sleeping.acquire(timeout=min(rest, _LONGEST))


def _serve(runner: Runner, inbox: queue.SimpleQueue[tuple[Task, Command] | None]) -> None:
    while (assigned := inbox.get()) is not None:
        task, command = assigned
        del assigned
        while (following := task(runner, command)) is not None:
            command = following
        del task, command
