"""MicroBatcher: requests of many tasks, computed together."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from typing import Any, Never, Self

from .._base._advice import advise, is_advice_wanted
from .._base._checks import check_deadline
from .._base._clock import running_clock
from .._base._deadlock import HOLDER, Holder
from .._base._fault_watch import FaultWatch
from .._base._generic import Generic, Item, Result
from .._base._label import LABEL
from .._base._log import log
from .._base._loop_watch import LoopWatch
from .._base._mistakes import keywords, lacks, refuses, unknown_keyword
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._shutdown import DRAIN_TIMEOUT, finish_within
from .._base._tasks import start_task
from .._base._types import SourceLine
from .._base._user_code import LEAVES_LOOP
from ..coordination import NodePriority, check_priority
from ..device import Device
from ..errors import BusyError, ClosedError, DeadlineError, DeviceFault, DrainTimeoutWarning, InvalidTypeError
from ..lowlevel import resources_of
from ._admission import Admission, BatchTimes
from ._batch import Batch, BatchHooks, RunningBatch
from ._deadlines import Deadlines, wait_cure
from ._errors import OverloadedError
from ._options import BatcherOptions
from ._places import Place, Places
from ._requests import Request, RequestQueue
from ._results import Delivery, failures, is_failure
from ._statistics import BatcherMeter, BatcherStatistics

__all__ = ["MicroBatcher"]

_ITEM = operator.attrgetter("item")

#: Seconds in which a function that is cancelled has to end.
END_AFTER_CANCEL = 0.1

#: Seconds. A longer `batch_wait_timeout_s` was probably meant in milliseconds.
LONG_WAIT = 10.0

#: Seconds. A later deadline was probably meant in milliseconds, or is a time of the loop.
LONG_DEADLINE = 60.0

_OPEN = "is entered by `async with`: `async with batcher`"
_SUBMIT = "submit takes an item, priority= and deadline_s=, the seconds from now in which the caller needs the result"


@lacks
@refuses(__enter__=_OPEN, __await__=_OPEN, __call__="is not called: `await batcher.submit(item)` returns a result")
class MicroBatcher(Owner, Generic[Item, Result]):
    """Collects the requests of many tasks, and calls a function with several of them at a time.

    ::

        async def infer(batch):
            x = batch.slot.pinned("x", (32, 4))[: batch.padded]
            x[: batch.size] = batch.items
            y = model(batch.stream, await batch.stream.upload(x))
            return (await batch.stream.download(y))[: batch.size]

        batcher = MicroBatcher(infer, max_batch_size=32, buckets=(1, 8, 32), device=device)
        async with batcher:
            result = await batcher.submit(row, deadline_s=0.1)

    A batch begins when fewer than ``max_concurrent_batches`` run and one of these holds: its weight has reached
    ``max_batch_size``; the request that arrived first has waited for ``batch_wait_timeout_s``; the batcher is being
    closed. Requests are served by priority, and within a priority in the order of their calls; a request that was
    overtaken 64 times rises one priority.

    Each request has exactly one outcome: a result, an exception, or the cancellation of its caller. A request that was
    cancelled or has expired is in no batch that begins later; in a running batch, its result is discarded.

    Leaving ``async with`` refuses new requests and completes those that were accepted. A batch whose requests were all
    cancelled or have expired then has `Device.drain_timeout` (5 s) to end. If an exception leaves the block, waiting
    requests fail with `ClosedError`, and all running batches have this time.

    Parameters
    ----------
    function
        A coroutine function. It gets an `aiocuda.serving.Batch` and returns a sequence with one result, or one
        exception, for each item. Parts of a result in the slot's memory are copied. The function runs with the
        context variables of the task that has entered the batcher; its operations have the labels of the requests (see
        `aiocuda.label`), joined by commas.
    max_batch_size
        The greatest weight of a batch. Without ``weight``, that is its number of items.
    batch_wait_timeout_s
        Seconds that a request waits for others while fewer than ``max_concurrent_batches`` run. 0 takes the requests
        of one loop iteration. More than 10 give a `PerformanceWarning`.
    max_concurrent_batches
        The greatest number of batches that run at a time. Each has a stream of its own.
    max_queued_requests
        The greatest number of requests that wait for a batch. Further ones are refused with `OverloadedError`.
    buckets
        Weights to which ``function`` pads batches: ``batch.padded`` is the smallest that holds the batch. The largest
        is ``max_batch_size`` or more. The time of a batch is measured for each bucket.
    weight
        A function of an item, called once for each; it returns an integer of at least 1, such as the number of tokens.
        A batch takes the requests in their order, up to the first one that does not fit.
    device
        Gives each batch a stream and a slot, and notifies its listeners of each batch: see `Device.listen`. Without
        it, ``batch.stream`` and ``batch.slot`` raise `InvalidArgumentError`.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        An argument cannot be used.
    """

    @keywords(
        "help(aiocuda.serving.MicroBatcher) lists its parameters",
        "a batcher has one positional argument, its function: MicroBatcher(infer, max_batch_size=32, device=device)",
        **dict.fromkeys(
            ("timeout", "timeout_s", "timeout_ms", "max_wait", "max_wait_s", "max_wait_ms", "max_latency_ms"),
            "use batch_wait_timeout_s=, in seconds",
        ),
        **dict.fromkeys(("batch_size", "max_batch", "size"), "use max_batch_size="),
        **dict.fromkeys(("concurrency", "workers", "num_workers"), "use max_concurrent_batches="),
        **dict.fromkeys(("max_queue", "max_queue_size", "queue_size"), "use max_queued_requests="),
        max_ongoing_requests="use max_queued_requests=, and max_concurrent_batches= for the batches that run",
        name="a batcher has no name: `with aiocuda.label('name')` around submit names its requests",
        deadline_s="each request has its own: batcher.submit(item, deadline_s=…)",
        stream="leave it out: with device=, each batch has a stream, batch.stream",
    )
    def __init__(
        self,
        function: Callable[[Batch[Item]], Coroutine[Any, Any, Iterable[Result | BaseException]]],
        *,
        max_batch_size: int,
        batch_wait_timeout_s: float = 0.002,
        max_concurrent_batches: int = 1,
        max_queued_requests: int = 1024,
        buckets: Iterable[int] | None = None,
        weight: Callable[[Item], int] | None = None,
        device: Device | None = None,
    ) -> None:
        self._options = options = BatcherOptions.checked(
            function, max_batch_size, batch_wait_timeout_s, max_concurrent_batches, max_queued_requests, buckets,
            weight, device,
        )  # fmt: skip
        if options.batch_wait_timeout_s > LONG_WAIT and is_advice_wanted():
            advise(
                "batch wait", SourceLine.of_caller(),
                f"a request waits up to {options.batch_wait_timeout_s:g} s for others: batch_wait_timeout_s is in "
                "seconds, such as 0.005 for 5 ms",
            )  # fmt: skip
        limit, places = options.max_batch_size, options.max_concurrent_batches
        self.device = device  #: the device of the streams, or None
        self._hooks = None if device is None else BatchHooks(device, options.function)
        self._queue = RequestQueue()
        self._times = BatchTimes(limit, options.buckets, places)
        self._admission = Admission(self._times, limit, places)
        self._meter = BatcherMeter(limit)
        self._running: dict[RunningBatch, None] = {}  # in places
        self._tasks: set[asyncio.Task[None]] = set()  # also of batches whose outcomes are being delivered
        self._requests = self._batches = 0  # for their numbers
        self._fault: DeviceFault | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # set while it is entered
        self._context = contextvars.Context()
        self._places: Places | None = None
        self._fault_watch: FaultWatch | None = None
        self._delivery: Delivery | None = None
        self._deadlines: Deadlines | None = None
        self._loop_watch: LoopWatch | None = None
        self._is_watched = False  # the loop is, because requests wait
        self._timer: asyncio.Handle | None = None  # for the earliest request
        self._resources = None if device is None else resources_of(device)
        #: Returns the seconds that running batches have to end.
        self._drain_time: Callable[[], float] = (
            (lambda: DRAIN_TIMEOUT) if self._resources is None else self._resources.deadline.left
        )
        self._scope = Scope(
            "this batcher", "make one in each loop, share the device", "make another one",
            drain_seconds=self._drain_time, tasks=self._tasks,
        )  # fmt: skip
        self._is_advancing = self._closing = self._has_advised = False

    # -- requests ------------------------------------------------------------------------------------------------

    async def submit(
        self, item: Item, *more: Never, priority: NodePriority = "normal", deadline_s: float | None = None,
        **unknown: Never,
    ) -> Result:  # fmt: skip
        """Return the result for an item, when its batch has ended.

        Cancelling the call withdraws the request. If its batch runs already, the result is discarded.

        Parameters
        ----------
        item
            Passed to the function as it is.
        priority
            ``"critical"``, ``"high"``, ``"normal"``, ``"low"`` or ``"cleanup"``.
        deadline_s
            The caller needs the result within this number of seconds, counted from the call, at most a day. None sets
            no limit. A negative deadline has passed. More than a minute gives a `PerformanceWarning`, once.

        Raises
        ------
        OverloadedError
            ``max_queued_requests`` requests wait. Raised immediately; ``retry_after_s`` is the predicted time in which
            they are served, in full batches.
        DeadlineError
            The deadline has passed. Raised immediately, without a place in the queue, if the measured times of batches
            show that the request would miss it.
        DeviceFault
            The device has faulted, now or earlier.
        DeadlockError
            A batch function has called this method, and all places are held by batches that wait in such a call. Not
            raised if the request has a deadline, and not by `submit_nowait`.
        BatchError
            The function returned the wrong number of results, or operations; its exception cannot be copied; this
            result has a part in the slot's device memory, as an array of another library; or a result of the batch is
            an object, such as a pydantic model, with a part in the memory of a graph of the program.
        ClosedError
            The batcher is closed, or was left by an exception.
        InvalidArgumentError, InvalidTypeError
            An argument cannot be used, or the item is heavier than a batch.
        Exception
            The exception of the function, as an object of its own for each request, with the original as its
            ``__cause__``; the exception that the function has returned for this item; the exception of ``weight``.
        """
        if more or unknown:
            raise _wrong_arguments(unknown)
        future = self.submit_nowait(item, priority=priority, deadline_s=deadline_s)
        holder = HOLDER.get()
        try:
            if holder is None or deadline_s is not None:
                return await future
            what = f"the result of a request that {holder.name} awaits of {self!r}: use another batcher for it"
            with holder.waiting(what, future, functools.partial(self._can_end, future)):
                return await future
        except BaseException:
            # A coroutine that is closed, or gets an exception by `throw`, has not cancelled the future.
            if not future.cancel() and not future.cancelled():
                future.exception()  # the caller was cancelled after the request had failed: nothing else retrieves it
            raise
        finally:
            del future  # the traceback of its exception refers to this frame

    def submit_nowait(
        self, item: Item, *more: Never, priority: NodePriority = "normal", deadline_s: float | None = None,
        **unknown: Never,
    ) -> asyncio.Future[Result]:  # fmt: skip
        """Return the future of the result for an item. `submit` has the arguments and the errors.

        Cancelling the future withdraws the request.
        """
        if more or unknown:
            raise _wrong_arguments(unknown)
        rank = check_priority(priority)
        deadline = None if deadline_s is None else check_deadline(deadline_s)
        loop = self._check_accepts()
        options, queue = self._options, self._queue
        weight = 1
        if options.weight is not None:
            weight = options.weight_of(item)
            self._check_accepts()  # the function of the program may have used this batcher
        now = loop.time()
        if deadline is not None:
            self._check_deadline(weight, rank, deadline, now)
        self._requests += 1
        future: asyncio.Future[Result] = loop.create_future()
        context = None if self._hooks is None else self._hooks.context()
        request = Request(self._requests, item, weight, rank, now, deadline, future, LABEL.get(), context)
        future.add_done_callback(functools.partial(self._ended, request), context=self._context)
        if deadline is not None:
            assert self._deadlines is not None  # the batcher was entered
            self._deadlines.add(request, now + deadline)
        queue.add(request)
        if not self._is_watched and self._loop_watch is not None:
            self._is_watched = True
            self._loop_watch.watch_while(self._has_requests)
        if len(self._running) < options.max_concurrent_batches:
            if queue.weight >= options.max_batch_size:
                self._begin_due()
            else:
                self._set_timer(loop)
        return future

    def _can_end(self, future: asyncio.Future[Any], stuck: Collection[asyncio.Task[Any]]) -> bool:
        """Return whether a request can get its outcome although none of these tasks goes on."""
        running = [batch for batch in self._running if any(each.future is future for each in batch.requests)]
        if not running:
            if len(self._running) < self._options.max_concurrent_batches:
                return True
            if not any(each.future is future for each in self._queue):
                return True  # it is about to get it
            running = [*self._running]
        return not all(batch.holder is not None and batch.holder.is_stuck(stuck) for batch in running)

    def _has_requests(self) -> bool:
        self._is_watched = bool(self._queue.weight or self._running)
        return self._is_watched

    def _check_accepts(self) -> asyncio.AbstractEventLoop:
        """Return the batcher's loop, or raise an error if it accepts no request here and now."""
        if self._closing:
            raise ClosedError(
                "the batcher is closed: it accepts no more requests. Await the tasks that submit inside its block, or "
                "use submit_nowait there: it accepts a request at once"
            )
        loop = self._loop
        if loop is None:
            raise BusyError("this batcher was not entered: use `async with MicroBatcher(…) as batcher` around submit")
        if asyncio._get_running_loop() is not loop:
            raise self._scope.wrong_loop()
        fault = self._find_fault()
        if fault is not None:
            raise fault.again()
        queued = len(self._queue)
        if queued >= self._options.max_queued_requests:
            self._meter.overloaded += 1
            running = [batch.remaining(loop.time()) for batch in self._running]
            retry_after = self._admission.seconds_of_queue(self._queue.weight, running)
            raise OverloadedError(
                f"{queued} requests wait, as many as max_queued_requests: try again after {retry_after:.3g} s",
                retry_after_s=retry_after, queued=queued,
            )  # fmt: skip
        return loop

    def _check_deadline(self, weight: int, rank: int, deadline: float, now: float) -> None:
        if deadline > LONG_DEADLINE and not self._has_advised:
            self._has_advised = True
            if is_advice_wanted():
                advise(
                    "deadline", SourceLine.of_caller(),
                    f"a request has {deadline:g} s: deadline_s is in seconds from now, such as 0.5 for 500 ms, and no "
                    "time of the loop",
                )  # fmt: skip
        if deadline < 0.0:
            self._meter.refused += 1
            raise DeadlineError(
                f"the deadline had passed {-deadline:.3g} s before the call", deadline_s=deadline, predicted_s=None
            )
        wait = self._options.batch_wait_timeout_s
        if self._queue.weight:
            wait = max(0.0, self._queue.earliest.arrived + wait - now)
        own, predicted = self._admission.predict(
            weight, self._queue.weight_before(rank), [running.remaining(now) for running in self._running], wait
        )
        if not self._admission.admits(deadline, own, predicted, now):
            self._meter.refused += 1
            raise DeadlineError(
                f"the result would be ready after {predicted:.3g} s, later than the deadline of {deadline:.3g} s"
                f"{wait_cure(deadline, self._options.batch_wait_timeout_s)}",
                deadline_s=deadline, predicted_s=predicted,
            )  # fmt: skip

    def _ended(self, request: Request, future: asyncio.Future[Any]) -> None:
        """Release what a request that has its outcome still has."""
        request.future = None
        if request.deadline is not None and self._deadlines is not None:
            self._deadlines.remove(request)
        if future.cancelled():
            self._meter.cancelled += 1
            self._queue.remove(request)
        if request.context is not None and self._hooks is not None and self._loop is not None:
            self._hooks.ended(request, cancelled=future.cancelled(), now=self._loop.time())

    # -- batches -------------------------------------------------------------------------------------------------

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """See to it that the waiting requests begin in time. There is a place for their batch."""
        if self._timer is not None:
            return
        wait = self._options.batch_wait_timeout_s
        if wait == 0.0:
            self._timer = loop.call_soon(self._advance, context=self._context)
        else:
            due = self._queue.earliest.arrived + wait
            self._timer = loop.call_at(due, self._advance, due, context=self._context)

    def _advance(self, due: float = 0.0) -> None:
        """Begin the batches that are due after some time: ``due`` is the time of the timer that calls this."""
        self._find_fault()  # if there is one, no request waits after this
        self._begin_due(due)

    def _begin_due(self, due: float = 0.0) -> None:
        """Begin all batches that are due and have a place, and set the timer for the next one.

        uvloop rounds timers to milliseconds: a timer that fires before its time, ``due``, counts as on time, because
        another one for the rest would fire in each iteration of the loop.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop, queue, options = self._loop, self._queue, self._options
        if loop is None or self._is_advancing:  # an eager task may end inside `_begin`: the loop below continues
            return
        self._is_advancing = True
        try:
            now = loop.time()
            while queue.weight and len(self._running) < options.max_concurrent_batches:
                is_full = queue.weight >= options.max_batch_size
                if is_full or self._closing or max(now, due) >= queue.earliest.arrived + options.batch_wait_timeout_s:
                    if not self._begin(now, loop) and queue.weight:
                        self._timer = loop.call_soon(self._advance, context=self._context)
                        break
                else:
                    self._set_timer(loop)
                    break
        finally:
            self._is_advancing = False

    def _begin(self, now: float, loop: asyncio.AbstractEventLoop) -> bool:
        """Begin a batch of the requests that are served first. Return False if all of them have ended."""
        requests, weight = self._queue.take(self._options.max_batch_size, now)
        if not requests:
            return False
        running = RunningBatch(self._batches, requests, weight, now, self._times.predicted(weight))
        self._batches += 1
        self._meter.begin(requests, now)
        self._running[running] = None
        # Each batch has a copy of its own: what one sets, the next one does not have.
        task = start_task(self._run, running, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._task_ended, running), context=self._context)
        return True

    async def _run(self, running: RunningBatch) -> None:
        """Call the function for a batch, give each request its outcome, and begin the next batches."""
        error: BaseException | None = None
        found: Iterable[Any] = ()
        task = asyncio.current_task()
        is_added = task in self._tasks  # an eager task runs before `_begin` adds it
        if task is not None and not is_added:
            self._tasks.add(task)
        try:
            found = await self._call(running)
        except BaseException as failure:  # noqa: BLE001 - each request gets it, and Ctrl-C leaves the loop below
            error = failure
            found = self._failures(failure)
        try:
            if running.ends and self._hooks is not None:
                self._hooks.end(running, found, error)
            self._end(running, found)
            assert self._delivery is not None
            await self._delivery.drained()
            if isinstance(error, LEAVES_LOOP) or (isinstance(error, asyncio.CancelledError) and _is_cancelled()):
                raise error
        finally:
            if task is not None and not is_added:
                self._tasks.discard(task)
            del error, found  # the traceback of the error refers to this frame, which refers to the items

    def _end(self, running: RunningBatch, found: Iterable[Any]) -> None:
        """Give each request of a batch its outcome, and its place to the next batch."""
        assert self._delivery is not None
        del self._running[running]
        if running.requests:  # else they were cancelled, or have expired, before the first step of its task
            self._meter.end(len(running.requests), running.weight)
        before = self._batches
        if self._queue.weight:
            self._advance()
        # If a batch has begun, its first step is enqueued before the callers of this batch take the loop's time.
        self._delivery.put(running.requests, found, later=self._batches != before)

    def _task_ended(self, running: RunningBatch, task: asyncio.Task[None]) -> None:
        """Forget the task of a batch. One that was cancelled before its first step has not ended its batch."""
        self._tasks.discard(task)
        if running in self._running:
            self._end(running, _left())

    async def _call(self, running: RunningBatch) -> list[Any]:
        """Call the function, and return its results and exceptions."""
        loop, places, options = self._loop, self._places, self._options
        assert loop is not None
        assert places is not None
        began = loop.time()
        running.drop_ended(began)  # since the batch was formed
        if not running.requests:
            return []
        fault = self._find_fault()
        if fault is not None:
            raise fault.again()
        if self._resources is not None and self._resources.closed:
            raise ClosedError(
                "the device of this batcher was closed before it: put the batcher's block inside that of the device, "
                "`async with aiocuda.open_device() as device, MicroBatcher(…, device=device) as batcher`"
            )
        async with Place(places, running.number) as place:
            self._meter.blocks_replaced += place.blocks_replaced
            items, weight = list(map(_ITEM, running.requests)), running.weight
            batch = Batch(items, running.number, weight, options.padded(weight), place.slot, place.stream)
            label = running.label()
            if label is not None:
                LABEL.set(label)  # in the context of this task, which ends with the batch
            if self._hooks is not None:
                self._hooks.begin(running, batch, began)
            try:
                # In the context of this task, too. Tasks of the function have it, and may live longer than the batch.
                HOLDER.set(holder := Holder(f"batch {batch.number}"))
                running.holder = holder
                try:
                    results = await options.function(batch)
                finally:
                    holder.task = None
                found = await place.outcomes(results, len(running.requests))
            except BaseException as error:
                self._note_fault(error)  # before this waits for the stream: no other batch begins
                raise
            self._meter.results_copied += place.results_copied
        self._times.add(running.weight, len(found), loop.time() - began)
        for outcome in found:
            if is_failure(outcome):
                self._note_fault(outcome)
        return found

    def _failures(self, error: BaseException) -> Iterable[BaseException]:
        """Return exceptions for the requests of a batch that has failed."""
        self._note_fault(error)
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            return _left()
        return failures(error)

    # -- faults --------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """False once a device has faulted: CUDA has ended in this process, and every request fails."""
        # It changes nothing, because a probe may read it on another thread.
        return self._fault is None and (self.device is None or self.device.driver.fault is None)

    def _find_fault(self) -> DeviceFault | None:
        if self._fault is None and self.device is not None and self.device.driver.fault is not None:
            self._note_fault(self.device.driver.fault)
        return self._fault

    def _note_fault(self, error: BaseException) -> None:
        """Remember the fault, if the error is one or contains one; the waiting requests get it."""
        fault = _fault_in(error)
        if fault is None or self._fault is not None:
            return
        self._fault = fault
        log("error", "batcher_faulted", queued=len(self._queue), fault=str(fault))
        self._fail_queued()

    def _fail_queued(self) -> None:
        """Fail all requests that wait for a batch."""
        fault, delivery = self._fault, self._delivery
        if delivery is None:
            return
        requests = self._queue.take_all()
        error = ClosedError("the batcher was left before this request was served") if fault is None else fault
        delivery.put(requests, (error.again() for _ in requests))

    # -- state ---------------------------------------------------------------------------------------------------

    def statistics(self) -> BatcherStatistics:
        """Return the statistics since the batcher was made."""
        running = sum(not request.done for batch in self._running for request in batch.requests)
        return self._meter.snapshot(self._requests, len(self._queue), running, self._times)

    def __repr__(self) -> str:
        return (
            f"<MicroBatcher {len(self._queue)} queued, {len(self._running)} of "
            f"{self._options.max_concurrent_batches} batches running>"
        )

    # -- open and close ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        with self._scope.entering():
            self._places = Places(self.device, self._options.max_concurrent_batches)
            self._loop = asyncio.get_running_loop()
        resources = self._resources
        if resources is not None:
            use = "`async with MicroBatcher(function, ...) as batcher`"
            self._scope.must_end(use, SourceLine.of_caller(), lambda: resources.closed)
            self._fault_watch = FaultWatch(self._loop, self._find_fault)
        if running_clock() is None:  # a simulated loop does not run in real time
            self._loop_watch = LoopWatch.of(self._loop)
        self._delivery = Delivery(self._loop, self._meter)
        self._context = contextvars.copy_context()
        self._deadlines = Deadlines(
            self._loop, self._queue, self._meter, self._context, self._options.batch_wait_timeout_s
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        await self._scope.exit(self, kind)

    async def aclose(self) -> None:
        """Refuse new requests, complete the accepted ones, and close the streams. A second call waits for the first.

        A cancellation leaves the batcher, as an exception leaves ``async with``.

        Raises
        ------
        BusyError
            The batcher's own function has called it, which would wait for itself.
        WrongLoopError, NoEventLoopError
            It was called in another loop, or without one.
        """
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        self._closing = True
        if self._loop is not None and not self._loop.is_closed():
            self._advance()  # a batch that waits for further requests begins now

    def _withdraw(self) -> None:
        self._fail_queued()

    def _unfinished(self) -> int | None:
        if self._places is None or self._delivery is None:
            return 0
        requests = self._queue.weight + len(self._deadlines or ()) + len(self._delivery)
        return None if requests or self._tasks or self._places.are_busy() else 0

    async def _drain(self) -> None:
        if self._places is not None:
            await self._answered()
            # The requests of a batch that still runs were cancelled, or have expired: no caller waits for it.
            if await self._idle_within(self._drain_time()):
                await self._places.drain()

    async def _release(self, outcome: Outcome) -> None:
        """Cancel the functions that have not returned in time, and leave the streams."""
        if self._places is None:
            return
        try:
            if self._tasks or self._queue.weight:
                self._fail_queued()
                for task in self._tasks:
                    task.cancel()
                await finish_within(END_AFTER_CANCEL, self._idle())
        finally:
            self._places.leave()
            if self._fault_watch is not None:
                self._fault_watch.stop()
                self._fault_watch = None
        if self._running:
            self._abandon_running()

    async def _answered(self) -> None:
        """Wait until each request has its outcome. There are no new ones."""
        # A request that is about to expire may be in no batch, and not in the queue.
        requests = itertools.chain(*(batch.requests for batch in self._running), self._queue, self._deadlines or ())
        for future in [request.future for request in requests]:
            if future is not None and not future.done():
                await asyncio.wait({future})  # one at a time: to wait for 100 000 takes 60 ms of one iteration

    async def _idle(self) -> None:
        """Wait until no request waits, no batch runs, and all outcomes are set."""
        assert self._delivery is not None
        while self._tasks or self._queue.weight:
            if self._tasks:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)  # a cancelled request leaves the queue in the next iteration
        await self._delivery.drained()

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle()
        except TimeoutError:
            return False
        return True

    def _abandon_running(self) -> None:
        """Fail the requests of functions that go on although they were cancelled."""
        assert self._delivery is not None
        for running in self._running:
            self._delivery.put(running.requests, _left())
        self._scope.place.warn(  # after that: a filter may raise the warning
            f"{len(self._running)} batches of a batcher have not ended: their function goes on after its cancellation",
            DrainTimeoutWarning,
        )


def _wrong_arguments(unknown: Iterable[str]) -> InvalidTypeError:
    cures = {"weight": "it belongs to the batcher, MicroBatcher(infer, max_batch_size=64, weight=len)"}
    return unknown_keyword("MicroBatcher.submit", unknown, _SUBMIT, cures) if unknown else InvalidTypeError(_SUBMIT)


def _left() -> Iterator[ClosedError]:
    """Yield errors for the requests of a batch that was left."""
    while True:
        yield ClosedError("the batcher was left while it computed this request")


def _is_cancelled() -> bool:
    """True if the running task was cancelled, in contrast to a function that raises `CancelledError` by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _fault_in(error: BaseException) -> DeviceFault | None:
    """Return the error if it is a `DeviceFault`, or the first one in an exception group."""
    if isinstance(error, DeviceFault):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((fault for each in error.exceptions if (fault := _fault_in(each)) is not None), None)
    return None
