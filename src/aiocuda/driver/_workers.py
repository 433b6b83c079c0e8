"""Threads for calls that may block."""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..errors import ClosedError, ForkedProcessError

__all__ = ["Workers", "most_threads"]

#: Copy threads that fill a PCIe 5 link from pageable memory: 40 GB/s up and 50 down on 16 processors. 4 give 34 and 35.
MOST = 8

#: What blocks need not compute: page-locking, compiling, reading files. So some more of it than processors.
LEAST = 4


class Mailbox(Protocol):
    """A port, as a thread sees it."""

    def put(self, tag: int) -> None: ...


class _Job(NamedTuple):
    work: Callable[[], object]
    port: Mailbox
    tag: int


def most_threads() -> int:
    """How many threads copies are worth on this machine: one for each processor that the process may use, 4 to 8."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(LEAST, min(MOST, processors))


class _State:
    """What the threads share. They hold this and not the `Workers`, so that those can be collected."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.alive = 0
        self.unfinished = 0  # queued or running
        self.closed = False


class Workers:
    """Daemon threads that run blocking work and put a tag when it is done.

    Work starts in the order of `submit`, and up to ``threads`` of it run at once. A thread is started when there is
    more work than threads, and never before. The threads end after `close`, or when this object is collected, once
    what is queued has run.

    Parameters
    ----------
    threads
        The most at once; left out, `most_threads` of this machine.
    name
        The threads' names start with it.
    """

    def __init__(self, threads: int | None = None, *, name: str = "aiocuda-worker") -> None:
        self._limit = most_threads() if threads is None else threads
        self._name = name
        self._pid = os.getpid()
        self._started = 0
        self._state = _State()
        # Not at exit: the process must be able to drain then, and daemon threads end by themselves.
        weakref.finalize(self, _dismiss, self._state, self._limit).atexit = False

    @property
    def alive(self) -> int:
        """How many threads there are."""
        return self._state.alive

    def submit(self, work: Callable[[], object], port: Mailbox, tag: int) -> None:
        """Run ``work`` on a thread, then put ``tag`` into the port. Never blocks.

        ``work`` must not raise. If it does, the tag still comes, and the exception goes to `threading.excepthook`.

        Raises
        ------
        ClosedError
            After `close`.
        ForkedProcessError
            In a forked child, which has none of the threads.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError("the worker threads belong to the parent process; open the device in the child")
        state = self._state
        with state.lock:
            if state.closed:
                raise ClosedError("the worker threads have been closed")
            state.unfinished += 1
            state.jobs.put(_Job(work, port, tag))
            if state.alive < min(state.unfinished, self._limit):
                self._start()

    def close(self) -> None:
        """Take no more work. The threads end when what is queued has run. Idempotent, and does not wait."""
        if os.getpid() != self._pid:  # a forked child has no threads to end, and the lock may be held for good
            return
        with self._state.lock:
            self._state.closed = True
        _dismiss(self._state, self._limit)

    def _start(self) -> None:
        thread = threading.Thread(target=_serve, args=(self._state,), name=f"{self._name}-{self._started}", daemon=True)
        self._state.alive += 1
        try:
            thread.start()
        except RuntimeError:
            # No thread can be had. Those that run will come to the job; without any it would never run.
            self._state.alive -= 1
            if not self._state.alive:
                self._state.unfinished -= 1
                self._state.jobs.get()
                raise
        self._started += 1


def _dismiss(state: _State, threads: int) -> None:
    # Without the lock: a finalizer runs wherever the collector does, also inside it. `SimpleQueue.put` allows that.
    for _ in range(threads):
        state.jobs.put(None)


def _serve(state: _State) -> None:
    try:
        while (job := state.jobs.get()) is not None:
            work, port, tag = job
            del job
            try:
                work()
            except BaseException:  # noqa: BLE001 - reported, and whoever waits for the tag must not wait for ever
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del work  # before anybody hears that it is done: what it used is his from then on
            with state.lock:
                state.unfinished -= 1
            port.put(tag)
            del port  # an idle thread keeps nothing alive
    finally:
        with state.lock:
            state.alive -= 1
