"""ProcessDecoders: the worker processes of a loader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from .._base._off_loop import off_loop
from .._base._tasks import start_task
from .._base._thread_times import ThreadTimes
from .._base._user_code import LEAVES_LOOP
from .._processes._child import END_SECONDS, Child
from .._processes._failures import Failure
from .._processes._fork_server import ProgramServer, server_of
from .._processes._imports import Order
from .._processes._messages import Buffer, Parts, Pickled, pickled
from .._processes._parent import InheritedFile
from ..errors import ClosedError, WorkerLostError
from ..lowlevel import Jobs
from ._fields import Layout
from ._job import BatchJob, RowQueue
from ._sharing import SharedFile, SharedSlots
from ._threads import LoaderThreads
from ._worker_main import Reply, Request, WorkerSetup, main

__all__ = ["ProcessDecoders"]

#: Why a process is replaced: it has ended, a sample took too long, or its epoch has been left and it does not return.
_Why: TypeAlias = Literal["lost", "expired", "left"]

#: Of a process that has ended by itself.
_CURE: Final = "look for the reason in its output; exit code -9 is often the system's answer to too little memory"

#: A sample that has ended so many processes fails, where samples that fail are left out.
MOST_TRIES = 2


class _Place:
    """The place of one worker process: the process, which may be replaced by another one, and its request."""

    __slots__ = ("_timer", "attempt", "exit_code", "is_ready", "job", "number", "renewed", "rows", "tries", "worker")

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: WorkerProcess | None = None
        self.is_ready = False  # the worker takes requests
        self.renewed: bytes | None = None  # the source that the worker has got with a request
        self.job: BatchJob | None = None  # of the request; None if there is none
        self.rows: Sequence[int] = ()
        self.attempt = 0  # counts the requests that were begun
        self.tries = 0  # the processes that the only row of the request has ended
        self.exit_code: int | None = None  # of the last of them
        self._timer: asyncio.TimerHandle | None = None  # for the timeout of the request

    # -- the process ---------------------------------------------------------------------------------------------

    def occupy(self, worker: WorkerProcess) -> WorkerProcess:
        """Return the process, which has the place from now on. It does not take requests yet."""
        self.worker = worker
        self.renewed = None
        return worker

    def open(self, replied: Callable[[_Place, Reply, memoryview], None], ended: Callable[[_Place], None]) -> None:
        """The process has started, and takes requests."""
        assert self.worker is not None
        self.worker.connect(partial(replied, self), partial(ended, self))
        self.is_ready = True

    def close(self) -> None:
        """The process is being replaced: its replies do not count any more."""
        self.stop_timer()
        self.is_ready = False

    # -- the request ---------------------------------------------------------------------------------------------

    def assign(self, job: BatchJob, rows: Sequence[int]) -> None:
        """A request for other rows begins."""
        self.job = job
        self.rows = rows
        self.tries = 0

    def begin_attempt(self) -> BatchJob:
        """Return the job: its request is being sent to the process."""
        assert self.job is not None
        self.attempt += 1
        return self.job

    def start_timer(self, seconds: float, expire: Callable[[_Place], object]) -> None:
        """Call a function if the request does not end in this time."""
        self._timer = asyncio.get_running_loop().call_later(seconds, expire, self)

    def stop_timer(self) -> None:
        """The process has answered the request, or does not answer it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drop(self, failed: Container[int]) -> None:
        """Take rows that have failed out of the request."""
        self.rows = [row for row in self.rows if row not in failed]

    def isolate(self, row: int, exit_code: int | None) -> list[int]:
        """A row has ended the process: leave nothing else in the request. Return the other rows."""
        others = [each for each in self.rows if each != row]
        self.rows = (row,)
        self.tries += 1
        self.exit_code = exit_code
        return others

    def end_request(self) -> BatchJob | None:
        """Return the job of the request, which the place has no more; None if there was none."""
        job, self.job = self.job, None
        return job


class ProcessDecoders:
    """The worker processes of a loader. All methods are called on the loop.

    Each process has one request at a time: rows of one batch. The next one is sent when the reply has come. Calls that
    may block, such as the start of a process, run on threads.

    Parameters
    ----------
    payload
        The result of `Payload.file`.
    order
        For the server that forks the processes.
    layout, shared
    jobs
        Runs calls on threads of the driver.
    threads
        Pickle and load samples, where these are sent.
    rows
        The rows to decode.
    workers
        The number of processes.
    restarts
        How many processes may be started in place of lost ones.
    skips
        True if samples that fail are left out. Then one that has ended `MOST_TRIES` processes fails, and their
        successors do not count as restarts.
    timeout
        Seconds for a sample; None is no limit.
    """

    def __init__(
        self,
        payload: tuple[SharedFile, tuple[int, ...]],
        order: Order,
        layout: Layout | None,
        shared: SharedSlots,
        jobs: Jobs,
        threads: LoaderThreads,
        rows: RowQueue,
        *,
        workers: int,
        restarts: int,
        skips: bool,
        timeout: float | None,
    ) -> None:
        self._layout = layout
        self._shared = shared
        self._jobs = jobs
        self._threads = threads
        self._rows = rows
        self._most_restarts = restarts
        self._skips = skips
        self._timeout = timeout
        self._closed = False
        self._source, self._parts = payload
        self._order = order
        self._waiting: asyncio.Task[object] | None = None  # until the server has imported the packages
        self._renewed: bytes | None = None  # the source and the decoder, if they have changed since the start
        self._places = [_Place(number) for number in range(workers)]
        self._free: list[_Place] = []  # without a request
        self._decoding: dict[BatchJob, None] = {}
        self._replacing: set[asyncio.Task[None]] = set()
        self._lost: BaseException | None = None  # a process was lost, and no restart was left
        self._idle: asyncio.Future[None] | None = None  # set while `settle` waits
        self._counted = 0  # of the restarts, those that count against the limit
        self.restarts = 0  #: processes that were started in place of lost ones

    # -- start ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start all processes, and wait until they are ready. `kill` cancels this while the server imports packages."""
        ready = server_of(self._order).ready
        if not (ready.is_set() or self._closed):
            self._waiting = start_task(off_loop, ready.wait)
            await asyncio.wait({self._waiting})
        if self._closed:
            raise ClosedError("the loader was closed while it was being opened")
        workers = [self._made(place) for place in self._places]

        def start() -> None:
            try:
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.wait_until_ready()
            except BaseException:
                for worker in workers:
                    worker.kill()
                raise

        await self._jobs.run(start)
        for place in self._places:
            self._connect(place)

    def _made(self, place: _Place) -> WorkerProcess:
        self._shared.reset(place.number)
        setup = WorkerSetup(
            place.number,
            InheritedFile(self._source.fd),
            self._parts,
            InheritedFile(self._shared.file.fd),
            self._shared.file.nbytes,
            self._shared.slots_at,
            self._shared.slot_bytes,
            self._layout,
        )
        return place.occupy(WorkerProcess(setup, server_of(self._order)))

    def _connect(self, place: _Place) -> None:
        place.open(self._replied, self._ended_itself)
        if place.job is not None and not place.job.is_wanted:
            self._leave(place, place.job)
        if place.job is None:
            self._next(place)
        else:
            self._send(place)

    def renew(self, pickle: bytes) -> None:
        """Have each process load this source and decoder, with its next request."""
        self._renewed = pickle

    # -- requests ------------------------------------------------------------------------------------------------

    def decode(self, job: BatchJob) -> None:
        """Decode a batch; ``job.ended`` is called when all its rows have ended."""
        if self._lost is not None:
            job.fail(self._lost)
            job.ended(job)
            return
        self._decoding[job] = None
        self._rows.put(job)
        self._use_free(job.size)

    def _use_free(self, most: int) -> None:
        """Send requests to processes that have none."""
        for _ in range(min(len(self._free), most)):
            self._next(self._free.pop())

    def _next(self, place: _Place) -> None:
        """Send a request for the next rows, if there are any."""
        taken = None if self._closed else self._rows.take()
        if taken is None:
            place.end_request()
            self._free.append(place)
            self._notify_idle()
            return
        place.assign(*taken)
        self._send(place)

    def _send(self, place: _Place) -> None:
        job = place.begin_attempt()
        if job.plan.samples is None:
            self._ask(place, None, [])
        else:
            samples = [job.sample(row) for row in place.rows]
            self._threads.start(partial(_pickled, place.rows, samples), partial(self._pickled, place, place.attempt))

    def _pickled(self, place: _Place, attempt: int, result: Any, error: BaseException | None) -> None:
        """The samples of a request have been pickled, on a thread."""
        job = place.job
        if attempt != place.attempt or job is None or not place.is_ready:
            return  # the process was lost meanwhile, and its successor gets the rows
        if error is not None:
            job.fail(error, place.rows)
            self._done(job)
            self._next(place)
            return
        samples, buffers, failures = result
        if failures:
            place.drop(failures)
            self._report(job, list(failures), {}, failures, ThreadTimes())
        if samples:
            self._ask(place, samples, buffers)
        else:
            self._next(place)

    def _ask(self, place: _Place, samples: tuple[Pickled, ...] | None, buffers: list[Buffer]) -> None:
        job, rows = place.job, place.rows
        assert job is not None
        assert place.worker is not None
        plan = job.plan
        indices, places = tuple(plan.indices[row] for row in rows), tuple(plan.positions[row] for row in rows)
        renewed = None if place.renewed is self._renewed else self._renewed
        place.renewed = self._renewed
        place.worker.ask(Request(job.slot.number, tuple(rows), indices, plan.epoch, places, samples, renewed), buffers)
        if self._timeout is not None:
            place.start_timer(self._timeout, self._expire)

    def _replied(self, place: _Place, reply: Reply, rest: memoryview) -> None:
        if not place.is_ready:
            return  # the process is being replaced, and its rows are decoded again or not wanted any more
        place.stop_timer()
        job, rows = place.job, place.rows
        assert job is not None
        if place.tries and self._skips and not self._count_restart():
            index = job.plan.indices[rows[0]]
            at = f"while it was decoding sample {index}, which another process has decoded"
            how = f"has ended with exit code {place.exit_code} {at}"
            self._fail(place, _no_restart_left(how, index, place.exit_code))
            return
        self._rows.note_times(reply.times.seconds, reply.times.cpu, len(rows))
        self._next(place)  # first: the process has work while this one goes on
        if reply.failures or reply.results:
            self._threads.start(partial(_loaded, reply, rest), partial(self._loaded, job, rows, reply.times))
        else:
            self._report(job, rows, {}, {}, reply.times)

    def _loaded(
        self,
        job: BatchJob,
        rows: Sequence[int],
        times: ThreadTimes,
        result: Any,
        error: BaseException | None,
    ) -> None:
        """The results or the failures of a reply have been loaded, on a thread."""
        if error is not None:
            job.fail(error, rows)
            self._done(job)
        else:
            results, errors = result
            self._report(job, rows, results, errors, times)

    def _report(self, job: BatchJob, rows: Sequence[int], results: Any, errors: Any, times: ThreadTimes) -> None:
        if job.report(rows, results, errors, times):
            self._done(job)

    def _done(self, job: BatchJob) -> None:
        if job.done:
            self._decoding.pop(job, None)
            job.ended(job)
        self._notify_idle()

    # -- lost processes ------------------------------------------------------------------------------------------

    def _expire(self, place: _Place) -> None:
        """A sample has taken too long."""
        self._replace(place, "expired")

    def _ended_itself(self, place: _Place) -> None:
        if not self._closed:
            self._replace(place, "lost")
        elif (job := place.end_request()) is not None:
            job.fail(ClosedError("the loader was closed while a worker process was decoding"), place.rows)
            self._done(job)

    def _replace(self, place: _Place, why: _Why) -> None:
        place.close()
        if place in self._free:
            self._free.remove(place)
        task = start_task(self._replaced, place, why)
        self._replacing.add(task)
        task.add_done_callback(self._replacing_ended)

    def _replacing_ended(self, task: asyncio.Task[None]) -> None:
        self._replacing.discard(task)
        self._notify_idle()

    async def _replaced(self, place: _Place, why: _Why) -> None:
        """End a process, and start another one in its place, if one may be started."""
        try:
            exit_code = await self._end(place)
            row = self._shared.row_of(place.number)
            error: BaseException = self._error(place, why, row, exit_code)
            counts = self._end_request(place, why, row, exit_code)
            if not self._closed and self._lost is None and (not counts or self._count_restart()):
                await self._start_another(place)
                return
        except BaseException as caught:
            self._fail(place, caught)
            if isinstance(caught, (asyncio.CancelledError, *LEAVES_LOOP)):
                raise
            return
        self._fail(place, error)

    async def _end(self, place: _Place) -> int | None:
        """End a process, and return its exit code. Afterwards it does not write to the shared memory."""
        worker = place.worker
        assert worker is not None
        worker.kill()
        worker.dismiss()
        return await self._jobs.run(worker.end)

    async def _start_another(self, place: _Place) -> None:
        """Start a process; another one for each that ends before it is ready, while restarts are left."""
        while True:
            self.restarts += 1
            worker = self._made(place)
            try:
                await self._jobs.run(partial(_start, worker))
                break
            except WorkerLostError as error:
                if self._closed or self._lost is not None or not self._count_restart():
                    error.add_note("it was started in place of another one, and restarts= allows no more processes")
                    raise
        self._connect(place)
        if self._closed:
            worker.kill()

    def _count_restart(self) -> bool:
        """Count a process against ``restarts=``. Return False if none was left."""
        if self._counted == self._most_restarts:
            return False
        self._counted += 1
        return True

    def _end_request(self, place: _Place, why: _Why, row: int | None, exit_code: int | None) -> bool:
        """Decide on the rows of a process that has ended. Return True if its successor counts as a restart now."""
        job = place.job
        if job is None:
            return True
        if why == "expired":
            place.end_request()
            late = TimeoutError(f"decoding took more than the timeout of {self._timeout:g} s")
            self._report(job, place.rows, {}, dict.fromkeys(place.rows, late), ThreadTimes(self._timeout or 0.0))
            return True
        if why == "left" or not job.is_wanted:
            self._leave(place, job)
            return why == "left" or row is None or not self._skips
        if row is None:
            return True  # no sample is the cause: the request is sent again
        self._isolate(place, job, row, exit_code)
        if self._skips and place.tries == MOST_TRIES:
            place.end_request()
            fatal = _fatal_sample(job.plan.indices[row], place.tries, exit_code)
            self._report(job, [row], {}, {row: fatal}, ThreadTimes())
        return not self._skips

    def _isolate(self, place: _Place, job: BatchJob, row: int, exit_code: int | None) -> None:
        """Have the next process try the row that has ended the last one, and nothing else.

        Its memory may have been damaged by an earlier row. If it was, the row succeeds alone.
        """
        others = place.isolate(row, exit_code)
        if others:
            self._rows.put_back(job, others)
            self._use_free(len(others))

    def _leave(self, place: _Place, job: BatchJob) -> None:
        """Withdraw the rows of a place: their batch is not wanted."""
        place.end_request()
        job.put_back(place.rows)
        self._done(job)

    def _error(self, place: _Place, why: _Why, row: int | None, exit_code: int | None) -> WorkerLostError:
        """Return the error for the case that no process may take the place of one that has ended."""
        if row is None and why == "expired":
            row = place.rows[0]  # the process has not begun with it
        index = None if row is None or place.job is None else place.job.plan.indices[row]
        at = "while it was decoding no sample" if index is None else f"while it was decoding sample {index}"
        if why == "left":
            how = f"was killed {at}, since the epoch had been left and decode did not return in time"
            return _no_restart_left(how, index, exit_code, "set timeout=, or raise restarts=")
        if why == "expired":
            how = f"was killed, since sample {index} took more than the timeout of {self._timeout:g} s"
            return _no_restart_left(how, index, exit_code, "raise the timeout or restarts=")
        how = f"has ended with exit code {exit_code} {at}"
        if index is not None:
            tries = place.tries + 1
            how += f", which was tried {'once' if tries == 1 else f'{tries} times'}"
        return _no_restart_left(how, index, exit_code)

    def _fail(self, place: _Place, error: BaseException) -> None:
        """End all batches: a process was lost, and none takes its place."""
        job = place.end_request()
        if job is not None:
            job.fail(error, place.rows)
        self._lost = error
        for each in tuple(self._decoding):
            each.fail(error)
            self._done(each)
        self._notify_idle()

    # -- the end -------------------------------------------------------------------------------------------------

    def running(self) -> dict[tuple[BatchJob, int, int], int]:
        """Return the index of each sample that is being decoded now, by its job, row and attempt."""
        found = {}
        for place in self._places:
            row = self._shared.row_of(place.number)
            if place.job is not None and row is not None and row in place.rows:
                found[place.job, row, place.attempt] = place.job.plan.indices[row]
        return found

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [place.worker.pid for place in self._places if place.worker is not None and place.worker.pid is not None]

    @property
    def _is_idle(self) -> bool:
        return not self._replacing and all(place.job is None for place in self._places)

    def _notify_idle(self) -> None:
        if self._idle is not None and not self._idle.done() and self._is_idle:
            self._idle.set_result(None)

    async def settle(self, seconds: float | None) -> bool:
        """Wait until no process decodes; False if one does not end in this time."""
        idle = self._idle = asyncio.get_running_loop().create_future()
        self._notify_idle()
        await asyncio.wait({idle}, timeout=seconds)
        self._idle = None
        self._decoding = {job: None for job in self._decoding if not job.done}  # without cancelled jobs
        return idle.done()

    async def end_requests(self) -> None:
        """Kill the processes whose requests, which nothing waits for any more, have not ended; start others."""
        for place in self._places:
            if place.job is not None and place.is_ready:
                self._replace(place, "left")
        if self._replacing:
            await asyncio.wait(self._replacing)

    def begin_close(self) -> None:
        """Start no further process, and send no further request."""
        self._closed = True

    def kill(self) -> None:
        """End all processes at once. Does not wait."""
        self._closed = True
        if self._waiting is not None:
            self._waiting.cancel()
        for place in self._places:
            place.stop_timer()
            if place.worker is not None:
                place.worker.kill()

    async def close(self, run: Callable[[Callable[[], None]], Any]) -> None:
        """End all processes. ``run`` runs a call on a thread."""
        self._closed = True
        if self._replacing:
            await asyncio.wait(self._replacing)
        workers = [place.worker for place in self._places if place.worker is not None]
        for worker in workers:
            worker.dismiss()

        def end() -> None:
            deadline = time.monotonic() + END_SECONDS
            with contextlib.ExitStack() as ends:  # it calls all of them, even if one raises
                ends.callback(self._source.close)
                for worker in workers:
                    ends.callback(worker.end, deadline)

        await run(end)


def _start(worker: WorkerProcess) -> None:
    """Start a process, and wait until it is ready. **May block.**"""
    worker.start()
    worker.wait_until_ready()


def _pickled(rows: Sequence[int], samples: Sequence[Any]) -> tuple[Any, list[Buffer], dict[int, Any]]:
    """Return the pickled samples, the memory of their arrays, and the errors of samples that cannot be pickled."""
    buffers: list[Buffer] = []
    found: list[Pickled] = []
    failures: dict[int, BaseException] = {}
    for row, sample in zip(rows, samples, strict=True):
        try:
            found.append(pickled(sample, buffers))
        except BaseException as error:  # noqa: BLE001 - the failure of that sample
            failures[row] = error
    return tuple(found), buffers, failures


def _loaded(reply: Reply, rest: memoryview) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """Return the results and the errors of a reply."""
    results: dict[int, Any] = {}
    errors = {row: error_of(failure) for row, failure in reply.failures.items()}
    parts = Parts(tuple(reply.results.values()), rest)
    for at, row in enumerate(reply.results):
        try:
            results[row] = parts.load(at)
        except BaseException as error:  # noqa: BLE001 - the failure of that sample
            errors[row] = error
    return results, errors


def _no_restart_left(how: str, index: int | None, exit_code: int | None, cure: str = _CURE) -> WorkerLostError:
    """Return the error for a process that has ended and may not be replaced."""
    return WorkerLostError(
        f"a worker process of the loader {how}, and restarts= allows no more processes in its place: {cure}",
        index=index,
        exit_code=exit_code,
    )


def _fatal_sample(index: int, tries: int, exit_code: int | None) -> WorkerLostError:
    """Return the failure of a sample that has ended so many processes, the last one with this exit code."""
    return WorkerLostError(
        f"sample {index} has ended {tries} worker processes of the loader, the last one with exit code {exit_code}: "
        f"{_CURE}",
        index=index,
        exit_code=exit_code,
    )


class WorkerProcess(Child):
    """One process that decodes samples, and this process's end of its pipe.

    One request is on its way at a time. `connect` is called with a function that takes a `Reply`.
    """

    def __init__(self, setup: WorkerSetup, server: ProgramServer) -> None:
        name = f"aiocuda-loader-{setup.number}"
        super().__init__(main, setup, name=name, use="start a loader", server=server, daemon=True)

    def wait_until_ready(self) -> None:
        """Wait until the process has loaded the source and the decoder. **May block.**"""
        try:
            failure = self.first_message()
        except EOFError as error:
            exit_code = self.end()
            text = f"a worker process of the loader {self.early_end}"
            raise WorkerLostError(text, index=None, exit_code=exit_code) from error
        if failure is not None:
            self.end()
            reason = error_of(failure)
            reason.add_note("when a worker process of the loader loaded the source and decode=")
            raise reason

    def ask(self, request: Request, buffers: Sequence[Buffer] = ()) -> None:
        """Send a request. The process has answered the last one."""
        self.sockets[0].send(request, buffers)


def error_of(failure: Failure) -> BaseException:
    """Return the exception of a worker process, with its traceback as a note."""
    error = failure.load()
    if error is None:
        error = RuntimeError(f"{failure.text} (this exception of a worker process cannot be pickled)")
    error.add_note(f"in a worker process:\n{failure.trace}")
    return error
