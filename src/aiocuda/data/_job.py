"""BatchJob: the samples of one batch while workers decode them; RowQueue: the jobs that have samples left."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._base._shared import copied
from .._base._thread_times import ThreadTimes
from .._base._user_code import failure_of
from ._sources import BatchPlan
from ._upload import HostSlot

__all__ = ["BatchJob", "RowQueue"]

_NONE = range(0)


class BatchJob:
    """The samples of one batch while workers decode them. Rows are the samples' places in the batch.

    Workers take rows and report each one once; the loop may let a row expire first.

    Parameters
    ----------
    plan, slot
    ended
        Called on the loop with the job when it is done, and when an expired row has ended.
    clock
        Returns the time. None if rows do not expire.

    Attributes
    ----------
    plan
    slot
        The memory that the samples are decoded into.
    ended
    results
        The decoded sample of each row, where there are no fields.
    errors
        The exceptions of the rows that failed, by row.
    failure
        An exception that ends the whole batch, whatever the loader does with samples that fail; else None.
    left
        The number of rows that a worker may take.
    times
        The times of workers for all rows together.
    expired
        The number of rows that have expired and that workers are still decoding. They may write to the slot.
    """

    __slots__ = ("_cancelled", "_clock", "_expired_rows", "_lock", "_next_row", "_returned", "_running",
                 "_started", "ended", "errors", "expired", "failure", "left", "plan", "results", "size", "slot",
                 "times")  # fmt: skip

    def __init__(
        self,
        plan: BatchPlan,
        slot: HostSlot,
        ended: Callable[[BatchJob], object],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.plan = plan
        self.slot = slot
        self.ended = ended
        self.size = len(plan.indices)
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.failure: BaseException | None = None
        self.times = ThreadTimes()
        self.expired = 0
        self._clock = clock
        self._lock = threading.Lock()
        self.left = self.size
        self._next_row = 0
        self._returned: list[int] = []  # rows that were taken and put back
        self._running = 0  # rows that were taken, and have neither ended nor expired
        self._started: dict[int, float] = {}  # the rows that are being decoded, if they may expire
        self._expired_rows: set[int] = set()
        self._cancelled = False

    @property
    def has_rows(self) -> bool:
        """True if a worker may take a row."""
        return self.left > 0 and self.is_wanted

    @property
    def is_wanted(self) -> bool:
        """False if the batch has failed, or its epoch has ended."""
        return self.failure is None and not self._cancelled

    @property
    def done(self) -> bool:
        """True if no row is left to decode."""
        return self._running == 0 and (self.left == 0 or not self.is_wanted)

    def sample(self, row: int) -> Any:
        """Return the sample of a row; None if its worker reads it from the source."""
        return None if self.plan.samples is None else self.plan.samples[row]

    # -- workers: any thread -------------------------------------------------------------------------------------

    def take(self, most: int = 1) -> Sequence[int]:
        """Return the next rows to decode; none if all have been taken, or the batch is not wanted any more."""
        with self._lock:
            if not self.has_rows:
                return _NONE
            rows: Sequence[int]
            if self._returned:
                rows = self._returned[:most]
                del self._returned[:most]
            else:
                rows = range(self._next_row, min(self._next_row + most, self.size))
                self._next_row = rows.stop
            self.left -= len(rows)
            self._running += len(rows)
            if self._clock is not None:
                self._started.update(dict.fromkeys(rows, self._clock()))
            return rows

    def put_back(self, rows: Sequence[int]) -> None:
        """Let workers take rows again: the one that had them was lost, or has no time for them."""
        with self._lock:
            self._returned += rows
            self.left += len(rows)
            self._running -= len(rows)
            for row in rows:
                self._started.pop(row, None)

    def report(
        self,
        rows: Sequence[int],
        results: Mapping[int, Any],
        errors: Mapping[int, BaseException],
        times: ThreadTimes,
    ) -> bool:
        """Report the end of rows, and the times of the worker. Return True if nothing of the batch is left.

        What comes from a row that has expired is dropped, and the result is True.
        """
        with self._lock:
            self.times = self.times.plus(times)
            ended = len(rows)
            if self._clock is not None:
                late = self._expired_rows.intersection(rows)
                if late:
                    self._expired_rows -= late
                    self.expired -= len(late)
                    ended -= len(late)
                    results = {row: result for row, result in results.items() if row not in late}
                    errors = {row: error for row, error in errors.items() if row not in late}
                for row in rows:
                    self._started.pop(row, None)
            self._running -= ended
            if results:
                self.results.update(results)
            for row, error in errors.items():
                self.errors[row] = self._noted(row, error)
            return self.done or ended < len(rows)

    # -- the loop ------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, rows: Sequence[int] = _NONE) -> None:
        """End the whole batch: workers take no more rows. ``rows`` are those of the worker that has failed."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            self._running -= len(rows)
            for row in rows:
                self._started.pop(row, None)

    def cancel(self) -> None:
        """Let workers take no more rows."""
        with self._lock:
            self._cancelled = True

    def expire(self, timeout: float) -> int:
        """Fail the rows that have been decoded for longer than ``timeout`` seconds; return how many these are."""
        if self._clock is None:
            return 0
        with self._lock:
            latest = self._clock() - timeout
            rows = [row for row, started in self._started.items() if started <= latest]
            for row in rows:
                del self._started[row]
                self._expired_rows.add(row)
                self.errors[row] = self._noted(
                    row, TimeoutError(f"decoding took more than the timeout of {timeout:g} s")
                )
            self._running -= len(rows)
            self.expired += len(rows)
        return len(rows)

    def oldest(self) -> float | None:
        """Return the time at which the row began that has been decoded for longest; None if none is being decoded."""
        with self._lock:
            return min(self._started.values(), default=None)

    def _noted(self, row: int, error: BaseException) -> BaseException:
        failure = failure_of(error)
        note = f"at sample {self.plan.indices[row]} of the loader's source"
        if note not in getattr(failure, "__notes__", ()):
            failure.add_note(note)
        return failure


class RowQueue:
    """The jobs that have rows for workers, in the order of the batches. Any thread may use it.

    Parameters
    ----------
    at_once
        The number of workers. None takes more than its part of the rows that wait: near the end the runs become short,
        and all workers end together.
    most_seconds
        Of quick rows, a worker takes so many that they need about this time. 0 is one row.
    least_seconds
        A worker takes more than its part, if that needs less than this time on a processor: each run is also work for
        the loop. Not if it would need more than four times as long in all, as rows do that wait for a disk.
    """

    def __init__(self, at_once: int, most_seconds: float, least_seconds: float = 0.0) -> None:
        self._at_once = at_once
        self.most_seconds = most_seconds
        self._least_seconds = least_seconds
        self._jobs: deque[BatchJob] = deque()
        self._lock = threading.Lock()
        self._row_seconds = self._row_cpu = 0.0  # about: of a row, and that on a processor; 0 before the first one

    def put(self, job: BatchJob) -> None:
        """Add a job."""
        self._jobs.append(job)

    def put_back(self, job: BatchJob, rows: Sequence[int]) -> None:
        """Let workers take rows of a job again, before all others. No worker is woken."""
        job.put_back(rows)
        with self._lock:
            if job not in copied(self._jobs):
                self._jobs.appendleft(job)

    def take(self) -> tuple[BatchJob, Sequence[int]] | None:
        """Return rows of the oldest job; None if there are none."""
        with self._lock:
            while self._jobs:
                job = self._jobs[0]
                rows = job.take(self._most())
                if not job.has_rows:
                    self._jobs.popleft()
                if rows:
                    return job, rows
            return None

    def _most(self) -> int:
        each, cpu = self._row_seconds, self._row_cpu
        most = int(self.most_seconds / each) if each else 1
        if most <= 1:
            return 1
        least = min(self._least_seconds / cpu, 4 * self._least_seconds / each) if cpu else 1
        waiting = sum([job.left for job in copied(self._jobs)])  # the loop adds jobs meanwhile
        return max(1, min(max(waiting // self._at_once, int(least)), most))

    def note_times(self, seconds: float, cpu: float, rows: int) -> None:
        """Learn how long a row takes, and how long on a processor, from the times of some."""
        known = self._row_seconds
        is_new = not known or seconds > 2 * self.most_seconds  # the next runs would take too long, too
        kept = 0.0 if is_new else 0.8
        self._row_seconds = kept * known + (1 - kept) * seconds / rows
        self._row_cpu = kept * self._row_cpu + (1 - kept) * cpu / rows
