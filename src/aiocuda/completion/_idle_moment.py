"""Idle moments: no operation of this process is unfinished on any device of a driver.

Some calls of CUDA wait for every running kernel of the process, and hold the launches of all threads meanwhile, so a
worker thread does not help. They are made at idle moments, where they wait for nothing.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from .._base._log import log
from .._base._wakeups import MOST_PER_TURN
from ..driver.protocol import Driver
from ..errors import AiocudaError, ClosedError
from ._waiting_calls import reactors_of

if TYPE_CHECKING:
    from ._device_state import DeviceState
    from ._jobs import Finish
    from ._reactor import Reactor

__all__ = ["IDLE_SECONDS", "IdleJob", "IdleMoments", "is_idle", "log_not_idle"]

T = TypeVar("T")

#: Called on the loop with the result, the error, and whether the moment was idle. The result or the error is None.
IdleFinish: TypeAlias = Callable[[T | None, BaseException | None, bool], object]

#: Seconds after which a call that can wait for an idle moment does not wait any more.
IDLE_SECONDS = 1.0

#: Seconds between two looks for an idle moment.
LOOK_SECONDS = 0.001


def is_idle(driver: Driver) -> bool:
    """Return whether no operation of this process is unfinished on any device of the driver. From any thread.

    Operations that are still on the host do not count: they may wait for the very call that waits for an idle moment.
    Work of other libraries is not seen. After a fault, no call waits for the devices any more, so the answer is True.
    """
    if driver.fault is not None:
        return True
    reactors = [known() for known in list(reactors_of(driver))]
    try:
        return all(reactor is None or reactor.is_idle() for reactor in reactors)
    except (AiocudaError, RuntimeError):  # a query was refused; or a loop that had stopped changes its queues again
        return False


def log_not_idle(device_state: DeviceState, work: str) -> None:
    """Log that a call was made while operations were unfinished: no idle moment has come within its time."""
    log("info", "no_idle_moment", device=device_state.properties.name, work=work)


#: The result of `IdleJob.run` that has not called the function.
NOT_CALLED = object()


class IdleJob:
    """A function that waits for an idle moment, runs on a worker thread, or has run.

    Attributes
    ----------
    finish
        Called on the loop when the function has ended: ``finish(result, error, was_idle)``.
    called
        The function was called.
    was_idle
        The moment directly before the call was idle.
    ended
        ``finish`` was called.
    """

    __slots__ = ("_reactor", "called", "deadline", "ended", "finish", "is_due", "was_idle", "work")

    def __init__(self, reactor: Reactor, work: Callable[[], Any], finish: IdleFinish[Any], seconds: float) -> None:
        self._reactor = reactor
        self.work = work
        self.finish = finish
        self.deadline = reactor.loop.time() + seconds  #: the loop's time from which it does not wait any more
        self.called = self.was_idle = self.ended = False
        self.is_due = False  #: the deadline has passed

    @property
    def is_over(self) -> bool:
        """True if ``finish`` was called, or never will be: its loop was closed. Any thread may ask."""
        return self.ended or self._reactor.closed or self._reactor.loop.is_closed()

    def hurry(self) -> None:
        """Wait for an idle moment no longer. Any thread."""
        self.deadline = -math.inf

    def run(self, work: Callable[[], T]) -> T | object:
        """Call the function if the moment is still idle, or the deadline has passed. On a worker thread.

        Otherwise return `NOT_CALLED`: `IdleMoments` then waits for another idle moment.
        """
        if self.called:  # by another thread: Ctrl-C has made `_look` give it twice
            return NOT_CALLED
        self.was_idle = is_idle(self._reactor.device_state.driver)
        if not (self.was_idle or self.is_due):
            return NOT_CALLED
        self.called = True
        return work()


class IdleMoments:
    """The functions of one loop that wait for an idle moment. No thread waits meanwhile.

    The loop looks once per millisecond. It queries its own streams that nobody awaits; other loops look at theirs.
    """

    __slots__ = ("_jobs", "_reactor", "_timer", "_waiting")

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._jobs: dict[IdleJob, None] = {}  # all that have not ended
        self._waiting: dict[IdleJob, None] = {}  # those of them that no thread has
        self._timer: asyncio.TimerHandle | None = None

    def start(self, work: Callable[[], T], finish: IdleFinish[T], seconds: float) -> IdleJob:
        """Call ``work`` on a worker thread at the first idle moment, or when it has not come within so many seconds.

        ``finish(result, error, was_idle)`` is called on the loop. If the reactor is closed before, ``finish`` gets a
        `ClosedError`, and ``work`` may have been called or not. After a fault, ``work`` is called at once: the driver
        raises the fault in it, or does nothing.
        """
        if self._reactor.closed:
            raise ClosedError("the device has been closed: nothing more is given to its threads")
        job = IdleJob(self._reactor, work, finish, seconds)
        self._look_later(0.0)
        self._jobs[job] = self._waiting[job] = None
        return job

    async def run(self, work: Callable[[], T], seconds: float) -> tuple[T, bool]:
        """Do the same as `start`; return the result of ``work``, and whether the moment was idle.

        Cancelling the wait does not stop the work, as with `Jobs.run`.
        """

        def start(finish: Finish[Any]) -> None:
            self.start(work, lambda result, error, was_idle: finish((result, was_idle), error), seconds)

        found: tuple[T, bool] = await self._reactor.jobs.wait(start)
        return found

    @property
    def is_busy(self) -> bool:
        """True until all functions have ended. Any thread may ask."""
        return bool(self._jobs)

    def _look_later(self, seconds: float) -> None:
        """Have the loop call `_look` after so many seconds, unless it will do so already."""
        if self._timer is None:
            # In an empty context: what it logs concerns no single task.
            self._timer = self._reactor.loop.call_later(seconds, self._look, context=Context())

    def _look(self) -> None:
        """Give all waiting functions to worker threads if the moment is idle; else those whose deadline has passed."""
        self._timer = None
        try:
            self._query_unattended()
            idle, now = is_idle(self._reactor.device_state.driver), self._reactor.loop.time()
            for job in tuple(self._waiting):
                job.is_due = now >= job.deadline
                if idle or job.is_due:
                    self._give(job)
                    del self._waiting[job]  # last: if Ctrl-C comes before, a second thread gets it and does not call it
        finally:
            if self._waiting:
                self._look_later(LOOK_SECONDS)

    def _give(self, job: IdleJob) -> None:
        """Give a function to a worker thread. If the moment is over by then, `_ended` has the function wait again."""
        ended = functools.partial(self._ended, job)
        try:
            # The function is an argument of `run`, so that `Jobs` finds its name.
            self._reactor.jobs.start(functools.partial(job.run, job.work), ended)
        except Exception as error:  # noqa: BLE001 - `finish` gets it
            self._reactor.guard(ended, None, error)

    def _query_unattended(self) -> None:
        """Query the streams of this loop that no task awaits, on all devices. The watchdog does so every 25 ms only."""
        budget = MOST_PER_TURN
        for known in list(reactors_of(self._reactor.device_state.driver)):
            reactor = known()
            if reactor is None or reactor.loop is not self._reactor.loop or reactor.closed:
                continue
            with reactor.query_guard:
                for queue in list(reactor.queues):
                    if budget > 0 and not queue.watch.attended:
                        budget -= queue.poll(budget, newest_only=True)

    def _ended(self, job: IdleJob, result: Any, error: BaseException | None) -> None:
        """Finish a function that a thread has called. Have one that it has not called wait for another idle moment."""
        if job.ended or (result is NOT_CALLED and job.called):  # by `close`, or by another thread that has it, too
            return
        if result is not NOT_CALLED:
            job.ended = True
            del self._jobs[job]
            job.finish(result, error, job.was_idle)
        else:
            self._look_later(LOOK_SECONDS)
            self._waiting[job] = None

    def close(self) -> list[Callable[[], object]]:
        """Drop the functions that no thread has. Return calls of their ``finish``, to be made if the loop is open.

        `Jobs.close` finishes those that a thread has.
        """
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for job in waiting:
            job.ended = True
            del self._jobs[job]
        error = ClosedError("the device was closed before a thread had done this")
        return [functools.partial(job.finish, None, error.again(), False) for job in waiting]
