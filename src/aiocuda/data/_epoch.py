"""EpochRun: the batches of one epoch on their way to the device."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

from .._base._scope import Scope
from .._base._shutdown import end_tasks
from .._base._tasks import start_task
from .._base._types import SourceLine
from .._base._user_code import LEAVES_LOOP, failure_of
from ..errors import BusyError, ClosedError, DeviceFault, WorkerLostError
from ._job import BatchJob
from ._resources import LoaderResources
from ._sources import AsyncReader, BatchPlan, IndexFeed, Order, StreamReader, iterator_has_ended
from ._threads import ignore
from ._upload import BatchUpload, collated

__all__ = ["EpochRun", "LoadingBatch"]

#: Batches that are begun without a pause: each takes the loop about 60 µs.
MOST_BEGUN = 16

#: The states of a batch of which nothing is left to do.
LOADED = ("ready", "empty", "failed")

#: Samples of an epoch that are skipped since each has ended its worker processes. More are no accident, and each takes
#: the time to start two processes.
MOST_FATAL = 16


class LoadingBatch:
    """A batch on its way: decoding, uploading, and then ready, empty or failed.

    Attributes
    ----------
    plan, job
    state
        ``"empty"`` if all its samples were skipped.
    upload
        None before it begins.
    indices
        The indices of the samples that were not skipped.
    error
        The exception that it failed with.
    """

    __slots__ = ("error", "indices", "job", "plan", "state", "upload")

    def __init__(self, plan: BatchPlan, job: BatchJob) -> None:
        self.plan = plan
        self.job = job
        self.state: Literal["decoding", "uploading", "ready", "empty", "failed"] = "decoding"
        self.upload: BatchUpload | None = None
        self.indices: tuple[int, ...] = plan.indices
        self.error: BaseException | None = None

    def end_decoding(self) -> Sequence[int]:
        """Return the rows of the samples that are not skipped. Without any, the batch is empty."""
        job = self.job
        rows: Sequence[int] = range(job.size)
        if job.errors:
            rows = [row for row in rows if row not in job.errors]
            self.indices = tuple(self.plan.indices[row] for row in rows)
            job.errors.clear()  # their tracebacks hold the frames of decode, with views of the slot
        self.state = "uploading" if rows else "empty"
        return rows

    def fail(self, error: BaseException) -> None:
        """End with an error. The memory on the device is not used any more."""
        self.state = "failed"
        self.error = failure_of(error)  # a bare StopAsyncIteration would end the consumer's epoch
        if self.upload is not None:
            self.upload.memory.free()


class EpochRun:
    """One epoch: at most ``prefetch`` batches are decoded, uploaded or ready.

    All methods are called on the loop. When the workers have ended a batch, a callback begins its upload. The end of an
    upload is looked for when the consumer requests a batch: before that, the device needs no attention.

    Parameters
    ----------
    scope
        That of the loader.
    ahead
        Numbers of batches that were delivered before the run begins.
    """

    def __init__(self, resources: LoaderResources, scope: Scope, order: Order, ahead: Collection[int] = ()) -> None:
        self._resources = resources
        self._scope = scope
        self._options = options = resources.options
        self._clock = resources.now if resources.has_timer else None
        self._ahead = ahead
        self._may_be_empty = order.start > 0 or bool(ahead)  # a state of the last batch has an empty rest
        self._has_begun = False
        self._feed: IndexFeed | StreamReader | AsyncReader
        if options.kind == "map":
            assert options.length is not None
            self._feed = IndexFeed(options.length, order)
        elif options.kind == "iterable":
            self._feed = StreamReader(options.source, order)
        else:
            self._feed = AsyncReader(options.source, order, scope)
        self._loading: deque[LoadingBatch] = deque()
        self._decoding: dict[BatchJob, LoadingBatch] = {}  # the batches whose jobs are not done
        self._exhausted = False
        self._reading = False
        self._read_task: asyncio.Task[None] | None = None
        self._source_error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._awaited_from: float | None = None  # since then the consumer has waited for an upload
        self._timer: asyncio.TimerHandle | None = None
        self._fatal = 0  # samples that were skipped since each has ended its worker processes
        self._closing = False
        resources.slots.begin_epoch(self._slot_locked)

    # -- the consumer --------------------------------------------------------------------------------------------

    async def next(self) -> LoadingBatch | None:
        """Wait for the next batch that is loaded: ready, empty or failed; None after the last one."""
        has_suspended = False
        while True:
            if self._closing or self._scope.closing:  # after `aclose` has freed the batch in hand, no task gets another
                raise ClosedError("the loader was closed while a task waited for the next batch: request no more of it")
            if len(self._loading) < self._options.prefetch:
                self._fill()
            batch = self._next_loaded()
            if batch is not None:
                if not has_suspended and self._resources.turn.is_over():
                    has_suspended = True
                    await asyncio.sleep(0)  # a consumer that never suspends would keep other tasks waiting
                    continue
                self._loading.remove(batch)
                self._fill()
                return batch
            if not self._loading and not self._reading and self._exhausted:
                if self._source_error is not None:
                    error, self._source_error = self._source_error, None
                    raise error
                return None
            if not self._loading and self._resources.slots.is_exhausted:
                raise BusyError(
                    "the device has not ended the uploads of an earlier epoch in time, and they hold all of the memory "
                    "that the loader shares with its processes: make another loader"
                )
            has_suspended = True
            if not (self._loading or self._reading) and self._resources.slots.is_ready:
                await asyncio.sleep(0)  # `_fill` has met only batches that were delivered before this run
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._awaited_from is not None:
                    self._resources.meter.add_upload_wait(self._resources.now() - self._awaited_from)
                    self._awaited_from = None

    def check_empty(self, line: SourceLine | None, *, is_first: bool) -> None:
        """Warn if the epoch has ended without a batch; raise if its source is an iterator that had ended before."""
        if self._may_be_empty:
            return
        feed, options = self._feed, self._options
        if not (is_first or feed.samples or isinstance(feed, IndexFeed) or feed.has_own_iterator):
            raise iterator_has_ended(options.source, "a loader")
        shard = f", shard={options.shard}" if options.shard[1] > 1 else ""
        given = f"{feed.samples} samples, batch_size={options.batch_size}, drop_last={options.drop_last}{shard}"
        why = ""
        if self._has_begun:
            why = ", and on_error= has skipped them all: on_error='raise' shows why"
        elif feed.samples and options.drop_last:
            why = ": make batch_size smaller, or leave drop_last out"
        (line or SourceLine.of_caller()).warn(f"an epoch of this loader has no batch: {given}{why}", RuntimeWarning)

    def put_back(self, batch: LoadingBatch) -> None:
        """Return the newest batch of `next` again at the next call: it did not reach the program."""
        self._loading.appendleft(batch)

    def _next_loaded(self) -> LoadingBatch | None:
        """Return the batch that comes next, if it is loaded. Look at the uploads of all that may come next."""
        found = None
        for batch in tuple(self._loading):
            if batch.state == "uploading":
                self._look(batch)
            if found is None and batch.state in LOADED:
                found = batch
            if self._options.ordered:
                break
        return found

    def _look(self, batch: LoadingBatch) -> None:
        """Find out whether the upload of a batch has ended. If not, wake the consumer when it has."""
        upload = batch.upload
        if upload is None:
            return  # its samples are being collated
        if not upload.poll():
            if self._awaited_from is None:
                self._awaited_from = self._resources.now()
            upload.watch(lambda: self._wake(batch))
            return
        error = upload.finish()
        if error is not None:
            self._fail(batch, error, give_back=upload.is_settled)
            return
        self._resources.meter.add_upload(upload.nbytes, upload.copy_seconds)
        batch.state = "ready"
        self._may_be_empty = True
        self._give_back(batch)

    def _wake(self, batch: LoadingBatch | None = None) -> None:
        """Wake the consumer; if a batch has changed, only if it may come next."""
        if self._waiter is None or self._waiter.done():
            return
        if batch is None or not self._options.ordered or not self._loading or batch is self._loading[0]:
            self._waiter.set_result(None)

    # -- the source ----------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin batches while there is room, but not so many that the loop is held for long."""
        for _ in range(MOST_BEGUN):
            if self._exhausted or self._reading or self._closing or len(self._loading) >= self._options.prefetch:
                return
            if not self._resources.slots.is_ready:
                return
            if isinstance(self._feed, IndexFeed):
                self._begin(self._feed.next_plan())
            elif isinstance(self._feed, StreamReader):
                self._reading = True
                self._resources.read(self._feed, self._read)
            else:
                self._reading = True
                reading = start_task(self._await_source, self._feed)
                if not reading.done():  # an eager task that has ended may have begun the next one
                    self._read_task = reading

    def _slot_locked(self) -> None:
        """There may be room for another batch: the memory of a slot has been page-locked, or could not be."""
        self._fill()
        self._wake()

    async def _await_source(self, reader: AsyncReader) -> None:
        meter, now = self._resources.meter, self._resources.now
        began = now()
        plan: BatchPlan | None = None
        error: BaseException | None = None
        try:
            plan = await reader.read()
        except asyncio.CancelledError as caught:
            if self._closing:
                raise
            error = ClosedError("the source of the loader was cancelled")
            error.__cause__ = caught
        except BaseException as caught:
            error = caught
            if isinstance(caught, LEAVES_LOOP):
                self._read(None, caught)
                raise
        meter.add_source(now() - began)
        self._read(plan, error)

    def _read(self, plan: BatchPlan | None, error: BaseException | None) -> None:
        """The samples of the next batch have been read."""
        self._reading = False
        if error is not None:
            self._exhausted = True
            self._source_error = error
        elif not self._closing:
            self._begin(plan)
            self._fill()
        self._wake()

    # -- decoding ------------------------------------------------------------------------------------------------

    def _begin(self, plan: BatchPlan | None) -> None:
        """Begin the next batch, unless it was delivered before this run. None is the end of the source."""
        if plan is None:
            self._exhausted = True
            return
        if plan.number in self._ahead:
            return
        self._has_begun = True
        resources = self._resources
        job = BatchJob(plan, resources.slots.take(), self._advanced, self._clock)
        batch = self._decoding[job] = LoadingBatch(plan, job)
        self._loading.append(batch)
        try:
            resources.decode(job)
        except Exception as error:  # noqa: BLE001 - the consumer gets it
            job.fail(error)
            self._advanced(job)
        if self._clock is not None and self._timer is None:
            self._set_timer(self._options.timeout or 0.0)
        if resources.slow is not None:
            resources.slow.begin()

    def _advanced(self, job: BatchJob) -> None:
        """Workers have ended rows of a batch, or rows have expired."""
        if job.expired or self._resources.meter.set_aside:
            stuck = self._resources.set_aside(job)
            if stuck > self._resources.at_once and job.failure is None:
                job.fail(
                    TimeoutError(
                        f"{stuck} samples of the loader exceeded the timeout of {self._options.timeout:g} s, and their "
                        "functions have not returned: each holds a thread and its memory; look for the reason in "
                        "decode=, or use executor='process', which ends them"
                    )
                )
        if not job.done or self._closing:
            return
        batch = self._decoding.pop(job, None)
        if batch is None:
            return
        self._resources.meter.add_decode(job.times)
        failure = job.failure
        if failure is None and job.errors:
            failure = self._first_failure(batch)
        rows = batch.end_decoding()
        if failure is not None:
            self._fail(batch, failure)
        elif not rows:
            self._give_back(batch)
            self._wake(batch)
        elif self._options.layout is None:
            samples = [job.results[row] for row in rows]
            tensors = self._resources.tensors
            work = partial(collated, samples, batch.indices, self._options.collate, job.slot.memory, tensors)
            job.results.clear()
            self._resources.on_thread(work, partial(self._collated, batch))
        else:
            self._upload(batch, job.slot.arrays, rows)

    def _first_failure(self, batch: LoadingBatch) -> BaseException | None:
        """Return the failure that ends the epoch, or None; count the samples that are skipped."""
        policy = self._options.on_error
        for row in sorted(batch.job.errors):
            error = batch.job.errors[row]
            if policy == "raise" or not isinstance(error, Exception) or isinstance(error, DeviceFault):
                return error
            if isinstance(error, WorkerLostError):
                self._fatal += 1
                if self._fatal > MOST_FATAL:
                    return _too_many_fatal_samples(error)
            if callable(policy):
                try:
                    policy(error, batch.plan.indices[row])
                except BaseException as raised:  # noqa: BLE001 - the consumer gets it
                    if raised is not error and raised.__context__ is None:
                        raised.__context__ = error  # as of an exception in an `except` block
                    return raised
            self._resources.meter.skip(batch.plan.indices[row], is_fatal=isinstance(error, WorkerLostError))
        return None

    def _collated(self, batch: LoadingBatch, result: Any, error: BaseException | None) -> None:
        """The arrays of the batch have been made."""
        if self._closing:
            return
        if error is not None:
            error.add_note(f"in batch {batch.plan.number}, when its samples were collated")
            self._fail(batch, error)
            return
        arrays, needed, form = result
        slot = batch.job.slot
        self._upload(batch, arrays, None, form)
        if needed > (0 if slot.memory is None else slot.memory.nbytes):
            slot.resize(self._resources.device, needed)

    # -- the timeout of samples on threads -----------------------------------------------------------------------

    def _set_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._timer = None
        timeout = self._options.timeout
        if self._closing or timeout is None:
            return
        oldest: list[float] = []
        for batch in tuple(self._loading):
            if batch.state != "decoding":
                continue
            if batch.job.expire(timeout):
                self._advanced(batch.job)
            began = batch.job.oldest()
            oldest.append(self._resources.now() if began is None else began)
        if oldest:
            self._set_timer(min(oldest) + timeout - self._resources.now())

    # -- the upload ----------------------------------------------------------------------------------------------

    def _upload(
        self, batch: LoadingBatch, arrays: dict[Any, Any], rows: Sequence[int] | None, form: Any = None
    ) -> None:
        """Copy the rows that were not skipped to the device; None means all."""
        upload = batch.upload = BatchUpload(self._resources.stream(batch.plan.number), form)
        try:
            upload.start(arrays, rows, is_timed=self._resources.meter.times_upload())
            self._wake(batch)
        except BaseException as error:
            self._fail(batch, error, give_back=not upload.has_begun)
            if isinstance(error, LEAVES_LOOP):
                raise

    def _fail(self, batch: LoadingBatch, error: BaseException, *, give_back: bool = True) -> None:
        batch.fail(error)
        if give_back:
            self._give_back(batch)
        self._wake(batch)

    def _give_back(self, batch: LoadingBatch) -> None:
        """Make the batch's slot free, unless a worker may still write there."""
        if not batch.job.expired:
            self._resources.slots.give_back(batch.job.slot)

    # -- the end -------------------------------------------------------------------------------------------------

    async def close(self, seconds: float | None) -> bool:
        """End the epoch. Return False if a function of the program does not return within ``seconds``."""
        self._closing = True
        self._wake()
        if self._timer is not None:
            self._timer.cancel()
        if self._read_task is not None:
            self._read_task.cancel()
            await asyncio.wait({self._read_task})
        for batch in self._loading:
            batch.job.cancel()
        settled = await self._resources.settle(seconds)
        copying = {start_task(batch.upload.settle): batch for batch in self._loading if batch.upload}
        late = await end_tasks(copying, self._resources.drain_seconds)
        unknown = {batch for task, batch in copying.items() if task in late or not task.result()}
        for batch in self._loading:
            if batch.upload is not None:
                batch.upload.memory.free()
            if settled and batch not in unknown and batch.state in ("decoding", "uploading"):
                self._give_back(batch)
        self._loading.clear()
        if isinstance(self._feed, AsyncReader):
            await self._feed.aclose()
        elif isinstance(self._feed, StreamReader) and settled:
            self._resources.on_thread(self._feed.close, ignore)
        return settled


def _too_many_fatal_samples(error: WorkerLostError) -> WorkerLostError:
    """Return the error for one more such sample than an epoch skips. Its own failure is the cause."""
    failure = WorkerLostError(
        f"{error}. {MOST_FATAL} samples of this epoch have done that before and were skipped, and no more are: repair "
        "decode= or the source, or use a machine with more memory",
        index=error.index,
        exit_code=error.exit_code,
    )
    failure.__cause__ = error
    return failure
