"""LoaderThreads: the threads of a loader, which read its source, decode samples and collate batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .._base._run_clock import RunClock
from .._base._user_code import failure_of
from ..lowlevel import Jobs
from ._fields import SampleDecoder
from ._job import BatchJob, RowQueue
from ._thread_limit import ThreadLimit

__all__ = ["LoaderThreads", "ThreadDecoder", "ignore"]

#: Seconds of one iteration of the loop for what threads have done.
MOST_SECONDS = 1e-3

#: Seconds after which a thread that decodes alone has not returned from a quick sample, as it should have.
STUCK_SECONDS = 0.02


class ThreadDecoder:
    """Decodes samples on the thread that calls it, straight into page-locked memory if there are fields.

    ``threads`` is the number of threads that may call it, and ``limit`` finds whether one is better.
    """

    def __init__(
        self, decoder: SampleDecoder, has_fields: bool, rows: RowQueue, now: Callable[[], float], threads: int = 1
    ) -> None:
        self.limit = ThreadLimit(threads)
        self._decoder = decoder
        self._has_fields = has_fields
        self._rows = rows
        self._now = now
        self._of_thread = threading.local()  # the `RunClock` of each thread
        self._decoding: dict[int, tuple[BatchJob, int]] = {}  # the row of each thread

    def running(self) -> dict[tuple[BatchJob, int], int]:
        """Return the index of each sample that is being decoded now, by its job and row."""
        return {at: at[0].plan.indices[at[1]] for at in list(self._decoding.values())}

    def pause(self, *, is_idle: bool) -> None:
        """Note that this thread does not go on to decode: it makes a call, or there is nothing to do for it."""
        self._clock().pause()
        if is_idle:
            self.limit.idle()

    def _clock(self) -> RunClock:
        try:
            clock: RunClock = self._of_thread.run_clock
        except AttributeError:
            clock = self._of_thread.run_clock = RunClock(self._now)
        return clock

    def decode(self, job: BatchJob, rows: Sequence[int], threads: int = 1) -> tuple[bool, bool]:
        """Decode rows of a batch and report them, with so many threads that decode now. **May block.**

        Rows after one that takes much longer than those before are put back, as those of a batch that is not wanted any
        more. Return the result of `BatchJob.report`, and whether other threads may take rows that they did not get.
        """
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        clock, thread = self._clock(), threading.get_ident()
        latest = clock.begin() + 2 * self._rows.most_seconds
        is_late = False
        for row in rows:
            self._decoding[thread] = job, row
            error = self._decode_row(job, row, results)
            if error is not None:
                errors[row] = error
            is_late = self._now() > latest
            if is_late or not job.is_wanted:
                break
        del self._decoding[thread]
        times = clock.end()
        end = rows.index(row) + 1
        done, others = rows[:end], rows[end:]
        queued = 0.0 if is_late else clock.queued_share * max(0.0, times.seconds - times.cpu)
        self._rows.note_times(times.seconds - queued, times.cpu, len(done))
        wakes = self.limit.note(threads, times.seconds, times.cpu, len(done), clock.begin())
        if others:
            self._rows.put_back(job, others)  # before the report, which says whether rows are left
            wakes = wakes or job.is_wanted
        return job.report(done, results, errors, times), wakes

    def _decode_row(self, job: BatchJob, row: int, results: dict[int, Any]) -> BaseException | None:
        # In a function of its own, the traceback of an exception does not refer to the frame that keeps the exception.
        plan = job.plan
        index, place = plan.indices[row], (plan.epoch, plan.positions[row])
        try:
            if self._has_fields:
                self._decoder.write(index, job.sample(row), job.slot.row(row), place)
            else:
                results[row] = self._decoder.result(index, job.sample(row), place)
        except BaseException as error:  # noqa: BLE001 - the loader raises it or skips the sample
            return error
        return None


class LoaderThreads:
    """The threads of a loader: they read its source, decode samples and collate batches.

    A thread that was woken takes calls and rows until there are none. The results reach the loop in the order in which
    they are ready, all that are ready with one wake-up.

    Parameters
    ----------
    jobs, name
    threads
        How many may be at work.
    rows, decoder
        The rows that they decode, and what decodes them. None if they only make calls.
    """

    def __init__(
        self,
        jobs: Jobs,
        name: str,
        threads: int,
        rows: RowQueue | None = None,
        decoder: ThreadDecoder | None = None,
    ) -> None:
        self._rows = rows
        self._decoder = decoder
        self._thread_limit = ThreadLimit(1) if decoder is None else decoder.limit
        self._least = self._limit = threads
        self._lock = threading.Lock()
        self._active = 0  # threads that were woken and have not found the queues empty since
        self._calling = 0  # of them, those that make a call
        self._stuck = 0  # of them, those that decode samples whose time has expired
        self._calls: deque[_Call] = deque()
        self._ended: deque[BatchJob | _Call] = deque()  # what the loop has not heard of
        self._notified = False
        self._device_error: BaseException | None = None  # the device was closed: the loop hears of nothing any more
        self._unfinished: dict[BatchJob | _Call, None] = {}
        self._watch: asyncio.TimerHandle | None = None  # set while one thread decodes alone
        self._idle: asyncio.Future[None] | None = None  # set while `settle` waits
        self._threads, self._forget = jobs.worker_threads(
            threads, name, self._step, heard=self._heard, closed=self._device_closed, is_busy=lambda: not self._is_idle
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    def start(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], object]) -> None:
        """Run a function on a thread, then call ``done`` on the loop with its result or its error."""
        if self._device_error is not None:
            raise self._device_error
        call = _Call(work, done)
        self._unfinished[call] = None
        self._calls.append(call)
        self._wake(1)

    def decode(self, job: BatchJob) -> None:
        """Decode a batch; ``job.ended`` is called on the loop when all its rows have ended."""
        if self._device_error is not None:
            raise self._device_error
        assert self._rows is not None
        self._unfinished[job] = None
        self._rows.put(job)
        self._wake(job.size)
        if self._thread_limit.is_one:
            self._watch_the_only_one()

    def set_stuck(self, stuck: int) -> None:
        """Have other threads in place of those whose samples have expired. They do not count as busy."""
        with self._lock:
            self._stuck = stuck
            self._limit = self._least + stuck
        self._threads.resize(self._limit)
        self._wake(self._limit)
        self._notify_idle()

    def _wake(self, most: int) -> None:
        with self._lock:
            count = min(most, self._limit - self._active)
            if self._thread_limit.is_one and not self._calls:
                count = min(count, 1 - self._decoders)
            if count <= 0:
                return
            self._active += count
        woken = 0
        try:
            while woken < count:
                self._threads.wake(1)
                woken += 1
        finally:
            if woken < count:
                with self._lock:
                    self._active -= count - woken

    @property
    def _decoders(self) -> int:
        """About the number of threads that decode: without those that make calls, or were woken for them."""
        return self._active - self._calling - len(self._calls)

    def _watch_the_only_one(self) -> None:
        if self._watch is None and self._unfinished:
            assert self._decoder is not None
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(STUCK_SECONDS, self._check_the_only_one, self._decoder.running())

    def _check_the_only_one(self, before: dict[tuple[BatchJob, int], int]) -> None:
        """Let all threads decode if one is still in a sample of ``before``, as `ThreadDecoder.running` returns them."""
        self._watch = None
        assert self._decoder is not None
        if not self._thread_limit.is_one:
            return
        if before.keys() & self._decoder.running().keys():
            self._thread_limit.end()
            self._wake(self._limit)
        else:
            self._watch_the_only_one()

    def _heard(self) -> None:
        self._notified = False
        if self._thread_limit.is_one:
            self._watch_the_only_one()
        until = time.monotonic() + MOST_SECONDS
        try:
            while self._ended and time.monotonic() < until:
                ended = self._ended.popleft()
                if ended.done:
                    self._unfinished.pop(ended, None)
                ended.ended(ended)  # type: ignore[arg-type]  # each gets itself
        finally:
            if self._ended:  # one has raised, or they took long: the rest comes in a later iteration of the loop
                self._notify()
        if self._idle is not None:
            self._notify_idle()

    def _device_closed(self, error: BaseException) -> None:
        self._device_error = error
        unfinished, self._unfinished = self._unfinished, {}
        for each in unfinished:
            each.fail(error)
            each.ended(each)  # type: ignore[arg-type]  # each gets itself
        self._notify_idle()

    # -- the threads ---------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Make a call or decode some rows. Return False if there is nothing to do."""
        with self._lock:
            call = rows = None
            is_idle = False
            if self._active <= self._limit:
                if self._calls:
                    call = self._calls.popleft()
                    self._calling += 1
                elif self._rows is not None and (self._decoders <= 1 or not self._thread_limit.is_one):
                    threads, rows = self._decoders, self._rows.take()
                    is_idle = rows is None
            if call is None and rows is None:
                self._active -= 1
                is_last = self._idle is not None
        if rows is None and self._decoder is not None:
            self._decoder.pause(is_idle=is_idle)
        if call is not None:
            call.run()
            with self._lock:
                self._calling -= 1
            self._tell(call)
        elif rows is not None:
            assert self._decoder is not None
            job = rows[0]
            ended, wakes = self._decoder.decode(*rows, threads)
            if ended:
                self._tell(job)
            if wakes:
                self._wake(self._limit)
            if self._thread_limit.is_one and self._watch is None:
                self._notify()  # the loop watches the only one
        else:
            if is_last:
                self._notify()
            return False
        return True

    def _tell(self, ended: BatchJob | _Call) -> None:
        self._ended.append(ended)
        self._notify()

    def _notify(self) -> None:
        if not self._notified:
            self._notified = True
            self._threads.notify()

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._device_error is not None or (self._active <= self._stuck and not self._calls and not self._ended)

    def _notify_idle(self) -> None:
        if self._idle is not None and not self._idle.done() and self._is_idle:
            self._idle.set_result(None)

    async def settle(self, seconds: float | None) -> bool:
        """Wait until no function of the program runs; False if one does not return in this time.

        Those whose samples have expired do not count.
        """
        idle = self._idle = asyncio.get_running_loop().create_future()
        self._notify_idle()
        await asyncio.wait({idle}, timeout=seconds)
        self._idle = None
        self._unfinished = {each: None for each in self._unfinished if not each.done}  # without cancelled jobs
        return idle.done()

    def close(self) -> None:
        """End the threads when their functions return."""
        if self._watch is not None:
            self._watch.cancel()
        self._threads.close()
        self._forget()


class _Call:
    """A function for a thread, and the loop's part of it."""

    __slots__ = ("_finish", "_work", "done", "error", "result")

    def __init__(self, work: Callable[[], Any], finish: Callable[[Any, BaseException | None], object]) -> None:
        self._work: Callable[[], Any] | None = work
        self._finish = finish
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self.result = work()
        except BaseException as error:  # noqa: BLE001 - the loop gets it
            self.error = failure_of(error)
        self.done = True

    def fail(self, error: BaseException) -> None:
        """The device was closed before the function has returned."""
        self.error = error

    def ended(self, call: _Call) -> None:
        self._finish(self.result, self.error)


def ignore(result: object, error: BaseException | None) -> None:
    """Do nothing at the end of a call: for the end of a source's iterator."""
