"""Jobs: functions that may block, run on the driver's threads and finished on the loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from .._base._user_code import LEAVES_LOOP, failure_of
from ..driver.protocol import Driver, Port, WorkerThreads
from ..errors import ClosedError

__all__ = ["JOB", "Jobs"]

T = TypeVar("T")

#: Called on the loop with the result and the error; one of the two is None.
Finish: TypeAlias = Callable[[T | None, BaseException | None], object]

#: Called on the worker thread with a job's name, and its start and end as times of the driver.
JobWatch: TypeAlias = Callable[[str, float, float], object]

#: This bit is set in the tags of jobs, and clear in the tags of notifiers: both come through one port.
JOB = 1 << 62

#: One counter for the process: loops use a port one after another, and tags must be unique.
_sequence = itertools.count(1)


class _Crew(NamedTuple):
    """The functions that `Jobs.worker_threads` got for one group of threads."""

    heard: Callable[[], object]
    closed: Callable[[BaseException], object]
    is_busy: Callable[[], bool]


class Jobs:
    """The jobs of one loop, by tag.

    Attributes
    ----------
    closed : bool
        No more jobs are accepted.
    running : set of int
        The tags of jobs that threads are running, even if the loop is closed.
    """

    __slots__ = ("_crews", "_driver", "_port", "_waiting", "_watches", "closed", "running")

    def __init__(self, driver: Driver, port: Port) -> None:
        self._driver = driver
        self._port = port
        #: By tag: the function to finish the job, and the list in which the thread leaves the outcome.
        self._waiting: dict[int, tuple[Finish[Any], list[Any]]] = {}
        self._crews: dict[int, _Crew] = {}
        self._watches: tuple[JobWatch, ...] = ()
        self.closed = False
        self.running: set[int] = set()

    def watch(self, watch: JobWatch) -> None:
        """Call ``watch(name, start, end)`` on the worker thread after each job, until `unwatch`. It must not raise."""
        self._watches = (*self._watches, watch)

    def unwatch(self, watch: JobWatch) -> None:
        """End a `watch`. Does nothing if it has ended."""
        self._watches = tuple(each for each in self._watches if each != watch)

    def start(self, work: Callable[[], T], finish: Finish[T]) -> None:
        """Run ``work`` on a thread of the driver, then ``finish(result, error)`` on the loop.

        After ``work``, the driver puts the tag of the job into the port. The reactor then calls `finished` on the loop.
        """
        if self.closed:
            raise ClosedError("the device has been closed: nothing more is given to its threads")
        tag = JOB | next(_sequence)
        outcome: list[Any] = [None, None]  # the result and the error

        def run() -> None:
            begun = self._driver.now() if self._watches else 0.0  # 0.0: nothing to tell a watch
            try:
                outcome[0] = work()
            except BaseException as error:  # noqa: BLE001 - `finish` gets it on the loop
                outcome[1] = failure_of(error)
            if begun:
                for watch in self._watches:
                    watch(_name(work), begun, self._driver.now())
            self.running.discard(tag)

        self._waiting[tag] = finish, outcome
        self.running.add(tag)
        try:
            self._driver.offload(run, self._port, tag)
        except BaseException:
            self.running.discard(tag)
            del self._waiting[tag]
            raise

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread and wait for it. Cancelling the wait does not stop the work."""
        return await self.wait(functools.partial(self.start, work))

    async def wait(self, start: Callable[[Finish[T]], object]) -> T:
        """Call ``start(finish)``, and wait until ``finish(result, error)`` is called. Return the result, or raise.

        If the wait was cancelled before, the loop's exception handler gets the error.
        """
        loop = asyncio.get_running_loop()
        # The future's result has the error. As the future's exception, a GeneratorExit would be thrown into the waiting
        # task and close its coroutines; raised here, it is an error as any other.
        future: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if future.done():  # the wait was cancelled
                if error is not None and not self.closed:
                    loop.call_exception_handler({"message": "aiocuda: work failed unheard", "exception": error})
            else:
                future.set_result((result, error))

        start(finish)
        result, error = await future
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # T may be None itself

    def worker_threads(
        self,
        threads: int,
        name: str,
        step: Callable[[], bool],
        *,
        heard: Callable[[], object],
        closed: Callable[[BaseException], object],
        is_busy: Callable[[], bool],
    ) -> tuple[WorkerThreads, Callable[[], object]]:
        """Return threads that call ``step`` when they are woken, and a function that their owner calls at the end.

        After that function, ``heard`` and ``closed`` are not called any more.

        Parameters
        ----------
        threads, name, step
            See `Notify.worker_threads`.
        heard
            Called on the loop after `WorkerThreads.notify`; once for several.
        closed
            Called on the loop if the device is closed first.
        is_busy
            Whether a thread is at work. Any thread may call it.
        """
        if self.closed:
            raise ClosedError("the device has been closed: nothing more is given to its threads")
        tag = JOB | next(_sequence)
        made = self._driver.worker_threads(threads, name, step, self._port, tag)
        self._crews[tag] = _Crew(heard, closed, is_busy)
        return made, lambda: self._crews.pop(tag, None)

    def is_busy(self, loop_runs: bool) -> bool:
        """Return whether a thread is at work. With ``loop_runs``, a job also counts until the loop has finished it."""
        return bool(self._waiting if loop_runs else self.running) or any(
            crew.is_busy() for crew in list(self._crews.values())
        )

    def report_unawaited(self, result: object, error: BaseException | None) -> None:
        """Pass a failure to the loop's exception handler: the ``finish`` of a job without a waiter.

        After a fault or a close, failures are expected, and reported elsewhere.
        """
        if error is not None and self._driver.fault is None and not self.closed:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "aiocuda: work that nobody waits for failed", "exception": error}
            )

    def finished(self, tag: int) -> None:
        """Finish the job of a tag, or call ``heard`` of worker threads. A tag for an earlier loop is ignored."""
        job = self._waiting.pop(tag, None)
        if job is None:
            crew = self._crews.get(tag)
            if crew is not None:
                crew.heard()
        else:
            finish, (result, error) = job
            finish(result, error)
            if isinstance(error, LEAVES_LOOP):
                raise error  # KeyboardInterrupt or SystemExit of the work ends the loop, too

    def close(self) -> list[Callable[[], object]]:
        """Accept no more jobs. Return functions to be called on the loop if it is open.

        Each tells the waiter of a job, or the user of a crew of worker threads, that the device was closed, with a
        `ClosedError` of its own. Jobs that threads have begun run to their end; nobody gets their results.
        """
        self.closed = True
        waiting, self._waiting = self._waiting, {}
        error = ClosedError("the device was closed before a thread had done this")
        crews, self._crews = self._crews, {}
        return [
            *(functools.partial(finish, None, error.again()) for finish, _ in waiting.values()),
            *(functools.partial(_call, crew.closed, error.again()) for crew in crews.values()),
        ]

    def __len__(self) -> int:
        return len(self._waiting)


def _name(work: Callable[..., object]) -> str:
    """Return a name for a job: of its function, or of the function that encloses its lambda."""
    while isinstance(work, functools.partial):
        # `Context.run` and `IdleJob.run` call their first argument: that is the function.
        work = work.args[0] if getattr(work.func, "__name__", "") == "run" and work.args else work.func
    name = str(getattr(work, "__qualname__", type(work).__qualname__))
    parts = [part for part in name.split(".") if part not in ("<lambda>", "<locals>")]
    return parts[-1] if parts else name


def _call(function: Callable[[BaseException], object], error: BaseException) -> None:
    function(error)
