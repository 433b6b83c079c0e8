"""`Workers`: threads for calls that may block."""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from .._base._processor import processors
from ..errors import ClosedError, ForkedProcessError
from . import protocol
from ._port import native_port

__all__ = ["NativeWorkers", "Workers", "most_threads"]

#: Copy threads that use a whole PCIe 5 link from pageable memory: 40 GB/s up and 50 down on 16 processors. With 4
#: threads it is 34 and 35.
MOST = 8

#: Calls that block often use no processor: page-locking, compiling, reading files. More threads than processors help.
LEAST = 4


class _Port(Protocol):
    """The methods of a port that `Workers` uses."""

    def put(self, tag: int) -> None: ...


class _NoPort:
    """Discards tags."""

    def put(self, tag: int) -> None:
        pass


_NO_PORT = _NoPort()


class _Job(NamedTuple):
    work: Callable[[], object]
    port: _Port
    tag: int


def most_threads() -> int:
    """Return the best number of copy threads on this machine: one for each processor of the process, 4 to 8."""
    return max(LEAST, min(MOST, processors()))


class _Threads:
    """The jobs, and the threads that run them. These have no reference to `Workers`, so that it can be collected."""

    __slots__ = ("_closed", "_jobs", "_limit", "_lock", "_name", "_started", "_unfinished", "alive")

    def __init__(self, limit: int, name: str) -> None:
        self.alive = 0
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._limit = limit
        self._started = 0
        self._unfinished = 0  # jobs that are queued or run
        self._closed = False

    def submit(self, job: _Job) -> None:
        """Run a job on a thread. `ClosedError` after `close`."""
        with self._lock:
            if self._closed:
                raise ClosedError("the worker threads have been closed")
            self._unfinished += 1
            self._jobs.put(job)
            if self.alive < min(self._unfinished, self._limit):
                self._start()

    def resize(self, limit: int) -> None:
        """Change the number of threads."""
        with self._lock:
            if self._closed:
                return
            self._limit = limit
            while self.alive < min(self._unfinished, limit):
                self._start()
            for _ in range(self.alive - limit):
                self._jobs.put(None)

    def close(self) -> None:
        """Refuse new jobs, and end the threads when the queued ones have run."""
        with self._lock:
            self._closed = True
        self.request_end()

    def request_end(self) -> None:
        """End the threads when the queued jobs have run."""
        # Without the lock: a finalizer may run at any time, also while this thread holds it. `SimpleQueue.put` allows
        # that.
        for _ in range(max(self._limit, self.alive)):
            self._jobs.put(None)

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True)
        self.alive += 1
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started. A running thread will do the job. Without one the job would never run.
            self.alive -= 1
            if not self.alive:
                self._unfinished -= 1
                self._jobs.get()
                raise
        self._started += 1

    def _serve(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                work, port, tag = job
                del job
                try:
                    work()
                except BaseException:  # noqa: BLE001 - reported; a task waits for the tag
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
                del work  # before the notification, after which the caller may reuse everything that `work` refers to
                with self._lock:
                    self._unfinished -= 1
                port.put(tag)
                del port  # an idle thread must not keep it alive
        finally:
            with self._lock:
                self.alive -= 1


class Workers:
    """Daemon threads that run blocking work and then put a tag into a port.

    Work starts in the order of `submit`. A new thread is started only when there is more work than threads. The threads
    run the queued work and then end after `close`, or when this object is collected.

    Parameters
    ----------
    threads
        The largest number of threads. Default `most_threads`.
    name
        The beginning of the threads' names.
    """

    __slots__ = ("__weakref__", "_pid", "_threads")

    def __init__(self, threads: int | None = None, *, name: str = "aiocuda-worker") -> None:
        self._pid = os.getpid()
        self._threads = _Threads(most_threads() if threads is None else threads, name)
        # Not at exit: the process must be able to drain then, and daemon threads end by themselves.
        weakref.finalize(self, self._threads.request_end).atexit = False

    @property
    def alive(self) -> int:
        """The number of running threads."""
        return self._threads.alive

    def submit(self, work: Callable[[], object], port: _Port, tag: int) -> None:
        """Run ``work`` on a thread, then put ``tag`` into the port. Never blocks.

        ``work`` must not raise. If it does, the tag is still put, and `threading.excepthook` receives the exception.

        Raises
        ------
        ClosedError
            After `close`.
        ForkedProcessError
            In a forked child, which does not have the threads.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError("the worker threads belong to the parent process; open the device in the child")
        self._threads.submit(_Job(work, port, tag))

    def call_until_false(self, step: Callable[[], bool]) -> None:
        """Call ``step`` on a thread until it returns False. See `submit`; there is no tag."""

        def run() -> None:
            while step():
                pass

        self.submit(run, _NO_PORT, 0)

    def resize(self, threads: int) -> None:
        """Change the number of threads. If there are fewer from now on, threads end when they have finished work."""
        self._threads.resize(threads)

    def close(self) -> None:
        """Refuse new work. The threads end when the queued work has run. Idempotent. Does not wait."""
        if os.getpid() != self._pid:  # a forked child has no threads to end, and the lock may be held forever
            return
        self._threads.close()


class NativeWorkers:
    """`protocol.WorkerThreads`: threads of one user, for ports of `open_port`."""

    def __init__(self, threads: int, name: str, step: Callable[[], bool], port: protocol.Port, tag: int) -> None:
        self._workers = Workers(threads, name=name)
        self._step = step
        self._port = native_port(port)
        self._tag = tag

    def wake(self, threads: int) -> None:
        for _ in range(threads):
            self._workers.call_until_false(self._step)

    def notify(self) -> None:
        self._port.put(self._tag)

    def resize(self, threads: int) -> None:
        self._workers.resize(threads)

    def close(self) -> None:
        self._workers.close()
