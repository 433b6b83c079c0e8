"""PipelineItem: one item on its way through the stages of a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from .._base._shutdown import end_tasks
from .._base._tasks import start_task
from .._base._types import SourceLine
from .._base._user_code import LEAVES_LOOP, add_note, failure_of
from ..completion import gather
from ..errors import (
    ClosedError,
    DeviceFault,
    DrainTimeoutWarning,
    InvalidArgumentError,
    SkippedError,
    UnsupportedError,
)
from ..lowlevel import Chain, State, StreamOperation, queue_of, resources_of, wait_for
from ..stream import Stream
from ._failures import combine
from ._replay import Replay, Replayed
from ._result_copies import PLAIN, ResultCopies, own_array
from ._slot import Slot, SlotState, StageSlot
from ._stage import Stage, operations_of, results_of

if TYPE_CHECKING:
    from ..device import Event
    from ._resources import PipelineResources

__all__ = ["SKIPPED", "PipelineItem", "settle_items"]

#: The state of an operation that has succeeded, as a plain integer: hot functions compare it.
DONE: Final = int(State.DONE)

#: What `PipelineItem.finish` returns for an item that a stage has skipped.
SKIPPED: Final = object()

_PROGRESS: dict[SlotState, int] = {"uploading": 0, "processing": 1, "downloading": 2}


class PipelineItem:
    """One item on its way through the stages.

    A stage that enqueues is called as soon as the stages before it have been called; the device orders its work after
    theirs. The host waits at two places: before a stage that awaits, for the stages before it, and at the end. If
    stages fork and some of them await, each branch is a task. The object serves another item when this one has passed.

    Attributes
    ----------
    slot : Slot
    number : int
        The item's number in the pipeline, from 0.
    index : int
        The item's number in its source, from 0.
    task : asyncio.Task or None
        The task that runs `run_stages`, if stages await.
    failure : BaseException or None
        The exception that the item failed with, once that is known.
    skipped : bool
        True if a stage that awaits has failed, and its ``on_error`` skips the item.
    returned : dict
        What each stage has returned that was called, by its name, in the order of the calls.
    """

    __slots__ = ("_contents", "_ends", "_failure_by_operation", "_failures", "_gates_left", "_may_skip", "_operations",
                 "_overlap", "_plan", "_position", "_prerequisites_left", "_resources", "_saw_failure", "_start_time",
                 "_timed", "_timing_events", "failure", "index", "number", "returned", "skipped", "slot",
                 "task")  # fmt: skip

    slot: Slot
    number: int
    index: int

    def __init__(self, resources: PipelineResources, *, overlap: bool, may_skip: bool = True) -> None:
        self._resources = resources
        self._plan = resources.plan
        self._overlap = overlap
        self._may_skip = may_skip
        #: By the stage's position. A stage whose only operation is the end of its work has it here, and no entry in
        #: `_operations`.
        self._ends: list[StreamOperation[Any] | None] = [None] * len(self._plan.stages)
        #: The operations of the other stages, by position, until they are known to be done.
        self._operations: dict[int, tuple[StreamOperation[Any], ...]] = {}
        self._timing_events: dict[int, tuple[Event, Event]] = {}  # before and after the work of each timed stage
        self.returned: dict[str, Any] = {}
        self._position = 0  # of the stage that is called now, if stages await
        self._prerequisites_left: list[int] = []  # by the stage's position; where branches are tasks
        self._gates_left: set[int] = set()  # by the stage's position
        self._failures: list[BaseException] = []
        self._failure_by_operation: dict[int, Exception | None] = {}  # by the operation's id
        self._saw_failure = False  # has this object read, and so marked as seen, an operation's failure?
        self.task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        self.skipped = False

    def begin(self, slot: Slot, item: Any, index: int, start_time: float) -> None:
        """Put an item into a reserved slot. The item before it has passed without a failure."""
        resources = self._resources
        self.slot = slot
        self.number = next(resources.numbers)
        self.index = index
        self._start_time = start_time
        self._timed = self._overlap and resources.meter.begin()
        if self.task is not None:
            self.task = None
            self._gates_left.clear()
            self.skipped = False
        self._contents = resources.ring.begin(slot, item, self)

    def end(self) -> None:
        """Forget the item, which has passed: the objects that its stages have returned live no longer."""
        self.returned.clear()

    # -- what the slot asks --------------------------------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """The state of the least advanced stage that is not done; if all are done, of the most advanced stage."""
        states = self._plan.states
        unfinished = [states[position] for position in range(len(states)) if not self._is_done(position)]
        if unfinished:
            return min(unfinished, key=_PROGRESS.__getitem__)
        return max(states, key=_PROGRESS.__getitem__)

    def _is_done(self, position: int) -> bool:
        operations = self._operations_of(position)
        return self._plan.names[position] in self.returned and all(operation.done() for operation in operations)

    def _operations_of(self, position: int) -> tuple[StreamOperation[Any], ...]:
        """Return the operations of a stage, unless they are known to be done. The last one ends its work."""
        end = self._ends[position]
        return self._operations.get(position, ()) if end is None else (end,)

    def result(self, stage: str) -> Any:
        """Return what a stage has returned, with results for operations."""
        if stage not in self.returned:
            called = ", ".join(map(repr, self.returned)) or "none"
            raise InvalidArgumentError(
                f"no stage {stage!r} has returned anything for this item, only {called}: name one that comes before",
                stage=stage,
            )
        returned = self.returned[stage]
        if isinstance(returned, Replayed):
            return returned.result()
        return results_of(self._plan.stages[self._plan.names.index(stage)], returned)

    def asking_stage(self, asked: str | int) -> str:
        """Return the name of a stage that has asked the slot: that name, or the number of calls that had returned."""
        if isinstance(asked, str):
            return asked
        if asked < len(self.returned):  # a stage that enqueues returns before another one is called
            return [*self.returned][asked]
        return self._plan.names[self._position if self._plan.awaits else asked]

    def note_replaced(self, blocks: int) -> None:
        """Count the blocks that the slot has let go of, because something still held them."""
        self._resources.meter.blocks_replaced += blocks

    # -- through the stages --------------------------------------------------------------------------------------

    def enqueue_stages(self) -> bool:
        """Enqueue the work of all stages; none of them awaits. False if a stage failed; `finish` raises its failure."""
        stages, ends, returned = self._plan.stages, self._ends, self.returned
        chain = None if self._timed else self._resources.chain
        position, count = 0, len(stages)
        try:
            while position < count:
                if chain is not None:
                    try:
                        position = chain.enqueue(position, self.slot, ends, returned)
                    except BaseException as error:  # noqa: BLE001 - raised with a note
                        raise self._noted(error, chain.position)  # noqa: B904 - it has its cause
                    if position == count:
                        break
                stage = stages[position]
                if stage.name in returned:
                    self._end_stage(position, stage, returned[stage.name])
                else:
                    self._enqueue(position, stage)
                position += 1
        except BaseException as error:
            self.failure = error
            if isinstance(error, LEAVES_LOOP):
                raise
            return False
        return True

    async def run_stages(self) -> None:
        """Call all stages, each when its prerequisites allow it."""
        try:
            if self._overlap and self._plan.awaits:
                self._prerequisites_left = [len(prerequisites) for prerequisites in self._plan.prerequisites]
                await self._run_branches(self._plan.roots)
            else:
                for position in range(len(self._plan.stages)):
                    await self._run_stage(position)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failures = self._failures or [error]
            if all(isinstance(failure, _SkipItem) for failure in failures):
                self._skip()
                return
            self.failure = combine([each for each in failures if not isinstance(each, _SkipItem)], "stages of an item")
            if self.failure is error:  # else `error` is the task group's
                raise
            raise self.failure from self.failure.__cause__

    def _skip(self) -> None:
        """Leave the rest of the stages. The operations of those that were called may still run."""
        self.skipped = True
        self._failures.clear()
        self._leave_gates(range(len(self._plan.stages)))
        self._resources.meter.skipped += 1

    async def _run_branches(self, ready: Sequence[int]) -> None:
        """Run these stages, which are ready, and then each stage that becomes ready by that."""
        while ready:
            if len(ready) > 1:
                async with asyncio.TaskGroup() as group:
                    branches = [start_task(self._run_branches, [position], group=group) for position in ready]
                if any(branch.cancelled() for branch in branches):
                    raise asyncio.CancelledError  # by its stage; a task group does not raise that
                return
            try:
                await self._run_stage(ready[0])
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self._add_failure(error)
                raise
            ready = self._ready_after(ready[0])

    def _ready_after(self, position: int) -> list[int]:
        """Return the stages that become ready when this one has been called: it was the last missing prerequisite."""
        ready = []
        for successor in self._plan.successors[position]:
            self._prerequisites_left[successor] -= 1
            if not self._prerequisites_left[successor]:
                ready.append(successor)
        return ready

    async def _run_stage(self, position: int) -> None:
        """Call a stage: await its coroutine, or let it enqueue.

        The item first enters the gate of the stage: items enter in order, `Stage.concurrency` of them at a time. In a
        run with ``overlap=False``, the work of the stage is done when this returns, and its host time is measured.
        """
        stage, resources = self._plan.stages[position], self._resources
        if resources.gates:
            await resources.gates[position].enter(self.number)
        start = resources.now()
        if stage.awaits:
            with resources.scope.inside(), resources.holding(self, position):
                await self._await_stage(position, stage)
        else:
            self._enqueue(position, stage)
        if not self._overlap:
            await self._wait()
            resources.meter.add_host_time(position, resources.now() - start)
        self._leave_gates([position])
        if stage.awaits and self._overlap:
            await asyncio.sleep(0)  # the next item's host work begins before this item's next stages are enqueued

    def _leave_gates(self, positions: Iterable[int]) -> None:
        """Let the next item enter these stages."""
        if self._resources.gates:
            for position in positions:
                if position not in self._gates_left:
                    self._gates_left.add(position)
                    self._resources.gates[position].leave(self.number)

    async def finish(self) -> Any:
        """Wait until all work of the item is done, and return the last stage's result, or `SKIPPED`."""
        if self.task is not None:
            await asyncio.wait({self.task})  # `await self.task` would cancel it when this is cancelled
            if self.task.cancelled():
                raise ClosedError(f"item {self.index} of the pipeline, counted from 0, was cancelled")
            self.task.result()
        elif self.failure is not None:
            raise self.failure
        end = self._ends[-1]
        try:
            if self.skipped:
                await self._wait()
                return SKIPPED
            if end is None or self._operations or not self._plan.is_chain:
                await self._wait_for_all()
            else:
                if end.status != DONE:
                    await end
                Chain.resolve(self._ends)  # the last operation is done, and each has waited for the one before it
                if self._timing_events:
                    self._read_timing_events(range(len(self._ends)))
        except Exception as error:  # noqa: BLE001 - it, or a group with it, is raised
            failure = await self._failure_of_item(error)
            raise failure from failure.__cause__
        resources, memory = self._resources, self._contents.memory
        last = self._plan.names[-1]
        returned = self.returned[last]
        if type(returned) is StreamOperation and returned.status == DONE:
            result = returned.value
        else:
            result = self.result(last)
        if type(result) not in PLAIN and (memory.pinned or memory.buffers):
            result = await self._owned(result)
        resources.meter.add_item(resources.now() - self._start_time)
        return result

    async def _owned(self, result: Any) -> Any:
        """Return the result with copies for its parts in the slot's memory. All work of the item is done."""
        position, memory = len(self._plan.stages) - 1, self._contents.memory
        try:
            owned = own_array(result, memory)
            if owned is None:
                copies = ResultCopies(memory, self._resources.streams[position])
                owned = result
                if copies.find(result):
                    await copies.make()
                    owned = copies.owned(result)
                leak = await copies.leak([owned])
                if leak is not None:
                    raise UnsupportedError(leak)
        except Exception as error:  # noqa: BLE001 - raised with a note
            self.failure = self._noted(error, position)
            raise self.failure  # noqa: B904 - it has its cause
        self._resources.meter.results_copied += owned is not result
        return owned

    async def _wait_for_all(self) -> None:
        """Wait for the operations of all stages."""
        if self.task is None and not self._operations and self._ends.count(None) == len(self._ends):
            await asyncio.sleep(0)  # without operations to wait for, a run would never let other tasks run
        await self._wait()

    async def _failure_of_item(self, error: Exception) -> BaseException:
        """Return the failure of the item, whose operations have failed."""
        try:
            await self._wait()
        except Exception as root:  # noqa: BLE001 - returned
            error = root
        self._add_failure(error)
        self.failure = combine(self._failures, "stages of an item")
        return self.failure

    def _enqueue(self, position: int, stage: Stage) -> None:
        """Make the stage's stream wait for the prerequisites, and call a stage that enqueues."""
        plan, slot, resources = self._plan, self.slot, self._resources
        stream, queue = resources.streams[position], resources.queues[position]
        slot._stream = stream  # not the property: this is a hot path, and the type is known
        self._position = position
        start: Event | None = None
        try:
            for prerequisite in plan.prerequisites[position]:
                end = self._ends[prerequisite]
                if (
                    end is None
                    or end.status > DONE
                    or not end.submitted_at
                    or queue.obstacles
                    or len(plan.prerequisites[position]) > 1
                ):
                    self._wait_for_stages(plan.prerequisites[position], stream)
                    break
                if end.status != DONE and end.queue is not queue:
                    resources.follow(queue, end)
            if self._timed:
                start = stream.record(timing=True)
            if stage.prepare is not None:
                stage.prepare(slot)
            if position in plan.replayed:
                returned: Any = self._replay(stage, stream)
                end = returned.operation
            else:
                returned = stage.function(slot)
                end = returned
            if start is not None:
                self._timing_events[position] = start, stream.record(timing=True)
            if queue.ends_with(end):  # the usual case: the stage returns its only operation
                self._ends[position] = end
            else:
                operations = (end,) if type(end) is StreamOperation else operations_of(stage, returned) or ()
                operations = _with_end(operations, queue.end())
                if operations or start is not None:  # the timing events are read when the operations are done
                    self._operations[position] = operations
        except BaseException as error:  # noqa: BLE001 - raised with a note
            raise self._noted(error, position)  # noqa: B904 - it has its cause
        self.returned[stage.name] = returned

    def _end_stage(self, position: int, stage: Stage, returned: Any) -> None:
        """Find the operations of a stage that has been called, and has not returned its only operation."""
        try:
            operations = _with_end(operations_of(stage, returned) or (), self._resources.queues[position].end())
        except BaseException as error:  # noqa: BLE001 - raised with a note
            raise self._noted(error, position)  # noqa: B904 - it has its cause
        if operations:
            self._operations[position] = operations

    def _replay(self, stage: Stage, stream: Stream) -> Replayed:
        """Launch the stage's graph. The first item of the slot captures it."""
        memory, called = self._contents.memory, len(self.returned)
        replay = memory.replays.get(stage.name)
        if replay is None or replay.loop is not asyncio.get_running_loop():
            try:
                replay = memory.capture(stage.name, lambda: Replay(stage, self.slot, stream))
            except UnsupportedError as error:
                error.add_note(f"stage {stage.name!r} is captured, to be replayed: replay=(…) names those that can be")
                raise
            replay.asked = [key for key, asked in memory.asked.items() if asked == called]
        for key in replay.asked:
            memory.asked.setdefault(key, called)
        return replay.launch(self.slot, stream)

    def _wait_for_stages(self, positions: Sequence[int], stream: Stream) -> None:
        """Make later work of the stream wait, on the device, for the work of these stages."""
        operations = [operation for position in positions for operation in self._operations_of(position)]
        for operation in _last_of_each_stream(operations):
            wait_for(stream, operation)

    async def _await_stage(self, position: int, stage: Stage) -> None:
        """Await a stage that awaits, when the work of all stages before it is done."""
        await self._wait(self._plan.ancestors[position])
        stream = self._resources.streams[position]
        start = self._resources.now()
        slot = StageSlot(self.slot.number, self._contents, stream, stage.name)
        self._contents.views.append(slot)
        try:
            returned = await self._called(position, stage, slot)
            operations = _with_end(operations_of(stage, returned) or (), queue_of(stream).end())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised with a note
            failure = self._noted(error, position)
            if stage.on_error == "raise" or not self._may_skip or not _is_skippable(failure):
                raise failure  # noqa: B904 - it has its cause
            if callable(stage.on_error):
                stage.on_error(failure, self.slot.item)
            end = queue_of(stream).end()
            self._operations[position] = () if end is None else (end,)  # what it has enqueued before it failed
            raise _SkipItem from failure
        if self._overlap:
            at_once = min(stage.concurrency, self._resources.ring.depth)
            seconds = self._resources.now() - start
            self._resources.meter.add_host_time(position, seconds, at_once)
            if self._resources.blocking_watch is not None:
                self._resources.blocking_watch.add_time(position, seconds)
        self.returned[stage.name] = returned
        if operations:
            self._operations[position] = operations

    async def _called(self, position: int, stage: Stage, slot: Slot) -> Any:
        """Return what a stage that awaits returns, within its timeout."""
        if stage.timeout is None:
            return await self._coroutine(position, stage, slot)
        try:
            async with asyncio.timeout(stage.timeout) as limit:
                return await self._coroutine(position, stage, slot)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the stage's own
            raise TimeoutError(f"stage {stage.name!r} took more than its timeout of {stage.timeout:g} s") from error

    def _coroutine(self, position: int, stage: Stage, slot: Slot) -> Coroutine[Any, Any, Any]:
        """Return the coroutine of a stage that awaits; one that times its steps, for a suspect and for some items."""
        watch, times = self._resources.blocking_watch, self._resources.loop_times
        if watch is not None and position in watch.suspects:
            return watch.call(position, stage, slot)
        if times is not None and self._timed:
            return times.call(position, stage, slot)
        coroutine: Coroutine[Any, Any, Any] = stage.function(slot)
        return coroutine

    async def _wait(self, positions: Iterable[int] | None = None) -> None:
        """Wait until the operations of these stages, by default of all, are done, and read their timing events."""
        stages = range(len(self._ends)) if positions is None else positions
        unfinished = {position: self._operations_of(position) for position in stages}
        try:
            for position in reversed(unfinished):  # the newest first: when it is done, so are most others
                for operation in reversed(unfinished[position]):
                    if operation.status != DONE:
                        await operation
                for prerequisite in self._plan.prerequisites[position]:
                    for operation in unfinished.get(prerequisite, ()):  # done before the operation that is done now
                        if operation.status < DONE and unfinished[position]:
                            operation.queue.resolve_to(operation)
        except Exception as error:  # noqa: BLE001 - it, or its root failure, is raised
            self._saw_failure = True  # if the next wait is cancelled, `settle` reads the failure
            failure = await self._first_failure(error, unfinished)
            raise failure from failure.__cause__
        for position in unfinished:
            self._ends[position] = None
            self._operations.pop(position, None)
        if self._timing_events:
            self._read_timing_events(unfinished)

    def _read_timing_events(self, positions: Iterable[int]) -> None:
        for position in positions:
            events = self._timing_events.pop(position, None)  # None: another branch has read them
            if events is not None:
                start, end = events
                self._resources.meter.add_sample(position, start.elapsed_ms(end) * 1e-3)

    # -- failures ------------------------------------------------------------------------------------------------

    async def _first_failure(
        self, error: Exception, unfinished: Mapping[int, Sequence[StreamOperation[Any]]]
    ) -> Exception:
        """Wait for all operations, keep the failures of those that failed by themselves, and return the first one.

        If all of them were skipped, return the first `SkippedError`.
        """
        for operations in unfinished.values():
            await gather(*operations, return_exceptions=True)
        own: list[Exception] = []
        skipped: Exception | None = None
        for position in sorted(unfinished):
            failures = [failure for failure in map(self._failure_of, unfinished[position]) if failure is not None]
            for failure in failures:
                self._note(failure, position)
            not_skipped = [failure for failure in failures if not isinstance(failure, SkippedError)]
            own += not_skipped[:1]  # the stage's other operations were skipped, or have the same failure
            skipped = skipped or (failures[0] if failures else None)
        for failure in own:
            self._add_failure(failure)
        return own[0] if own else skipped or error

    def _failure_of(self, operation: StreamOperation[Any]) -> Exception | None:
        """Return the operation's failure, the same object each time: the operation makes a copy for each caller."""
        failure = self._failure_by_operation.get(operation.id)
        if failure is None:
            found = operation.exception()
            failure = self._failure_by_operation[operation.id] = found if isinstance(found, Exception) else None
        return failure

    def _add_failure(self, error: BaseException) -> None:
        if not any(each is error for each in self._failures):
            self._failures.append(error)

    def _noted(self, error: BaseException, position: int) -> BaseException:
        """Return a stage's failure with a note that names stage and item."""
        failure = failure_of(error)
        self._note(failure, position)
        return failure

    def _note(self, error: BaseException, position: int) -> None:
        note = f"in stage {self._plan.names[position]!r} of item {self.index}, counted from 0"
        if isinstance(error, DeviceFault):  # all unfinished operations fail with it
            note = f"met by item {self.index}, counted from 0; which stage faulted is not known"
        add_note(error, note)  # once, if another branch has added it

    # -- the end -------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until no work of the item runs on the host or on the device. Its task has been cancelled before."""
        if self.task is not None:
            await asyncio.wait({self.task})
            if not self.task.cancelled():
                self.task.exception()  # `run_stages` has kept it: asyncio need not report it
        self._leave_gates(range(len(self._plan.stages)))
        self._contents.memory.forget_replays()  # a replay may be what failed
        # A stage that failed or was cancelled half way may have enqueued more than it returned.
        tails = [queue_of(stream).tail() for stream in self._resources.streams]
        operations = [each for position in range(len(self._ends)) for each in self._operations_of(position)]
        for operation in [*operations, *(tail for tail in tails if tail is not None)]:
            await _wait_without_reading(operation)
            await operation.settle()  # after an abandoned operation, the device may still run
        failures = [operation.failure for operation in operations]
        unseen = self._saw_failure or any(failure is not None and not failure.delivered for failure in failures)
        await gather(*operations, return_exceptions=True)
        if self.failure is None:
            try:
                await self._wait()
            except ClosedError:
                return  # the operations were abandoned, and the code that did it has raised this
            except SkippedError as error:
                self.failure = error if unseen else None  # the root failure is an earlier item's
            except Exception as error:  # noqa: BLE001 - kept for `settle_items`
                self.failure = error


class _SkipItem(Exception):  # noqa: N818 - no error: it ends the stages of an item that is skipped
    """Raised in place of the failure of a stage that skips its item."""


def _is_skippable(failure: BaseException) -> TypeGuard[Exception]:
    return isinstance(failure, Exception) and not isinstance(failure, DeviceFault)


async def settle_items(items: list[PipelineItem], resources: PipelineResources, place: SourceLine) -> None:
    """Settle items that end early, within the device's drain timeout, and free their slots."""
    for item in items:
        if item.task is not None:
            item.task.cancel()  # once: a second cancellation would interrupt the task's cleaning up
    settling = {start_task(item.settle): item for item in items}
    if not settling:
        return
    late = await end_tasks(settling, resources_of(resources.device).deadline.left())
    for task, item in settling.items():
        # If the device was left in the meantime, nothing finds out when it has finished with the memory.
        lost = task.cancelled() or isinstance(task.exception(), ClosedError)
        resources.release(item.slot, device_may_use=lost)
    if late:
        place.warn(
            f"{len(late)} item{'s' * (len(late) != 1)} of a pipeline did not end within "
            f"{resources.device.drain_timeout} s; the memory that the device may still touch stays allocated",
            DrainTimeoutWarning,
        )
    for task in settling:
        if not task.cancelled() and not isinstance(task.exception(), ClosedError):
            task.result()  # `settle` keeps the item's failures: an exception here is a defect


async def _wait_without_reading(operation: StreamOperation[Any]) -> None:
    """Wait for an operation, without marking its failure as seen."""
    if operation.status < State.DONE:
        ended = asyncio.Event()
        operation.add_done_callback(lambda _: ended.set())
        await ended.wait()


def _last_of_each_stream(operations: Sequence[StreamOperation[Any]]) -> Sequence[StreamOperation[Any]]:
    """Return the last operation of each stream: work that waits for it waits for the stream's other operations, too."""
    last: dict[Any, StreamOperation[Any]] = {}
    for operation in sorted(operations, key=lambda each: each.id):
        last[operation.stream or operation] = operation  # if a stream has been collected, each of its operations
    return list(last.values())


def _with_end(
    operations: tuple[StreamOperation[Any], ...], end: StreamOperation[Any] | None
) -> tuple[StreamOperation[Any], ...]:
    """Return the operations and the end of the stream.

    The end covers work that the stage enqueued and did not return, and operations that the stream only waits for.

    Raises
    ------
    WrongLoopError, BusyError
        An operation cannot be waited for here: it belongs to another event loop, or was recorded into a graph.
    """
    for operation in operations:
        if operation.status < DONE:
            operation.queue.check_loop()
        if operation.status < 0:
            operation.result()
    return operations if end is None or end in operations else (*operations, end)
