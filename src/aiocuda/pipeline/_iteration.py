"""Iteration: one item's way through the stages of a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._user_code import LEAVES_LOOP, failure_of
from ..completion._gather import gather
from ..completion._operation import DONE, Operation
from ..coordination._joining import follow
from ..errors import ClosedError, DeviceFault, InvalidArgumentError, SkippedError, UnsupportedError
from ..stream import Stream
from ._failures import combine
from ._replay import Replay, Replayed
from ._slot import Slot, SlotState
from ._stage import Stage, operations_of, results_of

if TYPE_CHECKING:
    from .._event import Event
    from ._track import Track

__all__ = ["Iteration"]

_ADVANCE: dict[SlotState, int] = {"uploading": 0, "processing": 1, "downloading": 2}


class Iteration:
    """One item on its way.

    Stages that enqueue are called as soon as those before them have been, behind them by waits on the device. The host
    waits before a stage that awaits, for what comes before that, and at the end. Where stages fork, and some of them
    await, each branch is a task.
    """

    __slots__ = ("_began", "_failures", "_given", "_marks", "_missing", "_overlap", "_passed", "_plan", "_returned",
                 "_timed", "_told", "_track", "_untold", "failure", "index", "number", "slot", "task")  # fmt: skip

    def __init__(self, track: Track, slot: Slot, item: Any, index: int, began: float, *, overlap: bool) -> None:
        self._track = track
        self._plan = track.plan
        self.slot = slot
        self.number = next(track.numbers)  # in the pipeline
        self.index = index  # in its source
        self._overlap = overlap
        self._timed = overlap and track.meter.begin()
        #: What each stage, by its position, gave to the device, as long as it is not known to be done.
        self._given: dict[int, tuple[Operation[Any], ...]] = {}
        self._marks: dict[int, tuple[Event, Event]] = {}  # timing events around that
        self._returned: dict[str, Any] = {}  # by the stage's name
        self._missing: list[int] = []  # stages still to pass before each one
        self._passed: set[int] = set()  # stages whose turnstile it has left
        self._failures: list[BaseException] = []
        self._told: dict[int, Exception | None] = {}  # what operations failed with, by id
        self._untold = False  # has a failure been read here, whoever is to hear of it?
        self._began = began
        #: Carries it, where there are stages that await.
        self.task: asyncio.Task[None] | None = None
        #: What it failed with, once that is known.
        self.failure: BaseException | None = None
        track.ring.begin(slot, item, carrier=self)

    # -- what its slot is asked ----------------------------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """That of the least advanced stage which is not done; once all are, of the most advanced one."""
        states = self._plan.states
        left = [states[position] for position in range(len(states)) if not self._is_done(position)]
        return min(left, key=_ADVANCE.__getitem__) if left else max(states, key=_ADVANCE.__getitem__)

    def _is_done(self, position: int) -> bool:
        given = self._given.get(position, ())
        return self._plan.names[position] in self._returned and all(operation.done() for operation in given)

    def result(self, stage: str) -> Any:
        """What a stage has returned, operations replaced by their results."""
        if stage not in self._returned:
            called = ", ".join(map(repr, self._returned)) or "none"
            raise InvalidArgumentError(
                f"no stage {stage!r} has returned anything for this item, only {called}: name one that comes before",
                stage=stage,
            )
        returned = self._returned[stage]
        if isinstance(returned, Replayed):
            return returned.result()
        return results_of(self._plan.stages[self._plan.names.index(stage)], returned)

    # -- through the stages --------------------------------------------------------------------------------------

    def enqueue(self) -> bool:
        """Through all stages; none of them awaits. False if one failed, which `finish` raises."""
        try:
            for position, stage in enumerate(self._plan.stages):
                self._enqueue(position, stage)
        except BaseException as error:
            self.failure = error  # for `finish`
            if isinstance(error, LEAVES_LOOP):
                raise
            return False
        return True

    async def carry(self) -> None:
        """Through all stages."""
        try:
            if self._overlap and self._plan.awaits:
                self._missing = [len(before) for before in self._plan.before]
                await self._walk(self._plan.roots)
            else:
                for position in range(len(self._plan.stages)):
                    await self._pass(position)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = combine(self._failures or [error], "stages of an item")
            if self.failure is error:  # else it is the branches' group
                raise
            raise self.failure from self.failure.__cause__

    async def _walk(self, ready: Sequence[int]) -> None:
        """Through stages that nothing is missing for, and through those that this lets go on."""
        while ready:
            if len(ready) > 1:
                async with asyncio.TaskGroup() as group:
                    branches = [group.create_task(self._walk([position])) for position in ready]
                if any(branch.cancelled() for branch in branches):
                    raise asyncio.CancelledError  # by its stage: the group says nothing of it
                return
            try:
                await self._pass(ready[0])
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self._fail(error)
                raise
            ready = self._ready_behind(ready[0])

    def _ready_behind(self, position: int) -> list[int]:
        ready = []
        for behind in self._plan.behind[position]:
            self._missing[behind] -= 1
            if not self._missing[behind]:
                ready.append(behind)
        return ready

    async def _pass(self, position: int) -> None:
        stage = self._plan.stages[position]
        if self._track.turnstiles:
            await self._track.turnstiles[position].enter(self.number)
        began = self._track.now()
        if stage.awaits:
            await self._call(position, stage)
        else:
            self._enqueue(position, stage)
        if not self._overlap:
            await self._arrive()
            self._track.meter.stage(position, self._track.now() - began)
        self._leave([position])
        if stage.awaits and self._overlap:
            await asyncio.sleep(0)  # the next item's host work begins before this one's stages are enqueued

    def _leave(self, positions: Iterable[int]) -> None:
        """Let the next item into these stages."""
        if self._track.turnstiles:
            for position in positions:
                if position not in self._passed:
                    self._passed.add(position)
                    self._track.turnstiles[position].leave(self.number)

    async def finish(self) -> Any:
        """The result, when everything is done."""
        if self.task is not None:
            await asyncio.wait({self.task})  # awaiting it would cancel it with us
            if self.task.cancelled():
                raise ClosedError(f"item {self.index} of the pipeline, counted from 0, was cancelled")
            self.task.result()
        elif self.failure is not None:
            raise self.failure
        elif not self._given:
            await asyncio.sleep(0)  # there is nothing to wait for: item after item, nobody else would have a turn
        try:
            await self._arrive()
        except Exception as error:  # noqa: BLE001 - it, or the others with it, is raised
            self._fail(error)
            self.failure = combine(self._failures, "stages of an item")
            raise self.failure from self.failure.__cause__
        self._track.meter.iteration(self._track.now() - self._began)
        last = self._plan.names[-1]
        returned = self._returned[last]
        return returned.result() if type(returned) is Operation else self.result(last)

    def _enqueue(self, position: int, stage: Stage) -> None:
        plan, slot, stream = self._plan, self.slot, self._track.streams[position]
        slot._stream = stream
        try:
            if plan.before[position]:
                for operation in self._to_wait_for(plan.before[position]):
                    _follow(stream, operation)
            start = stream.record(timing=True) if self._timed else None
            if stage.prepare is not None:
                stage.prepare(slot)
            if position in plan.replayed:
                returned: Any = self._replay(stage, stream)
                given: tuple[Operation[Any], ...] = (returned.operation,)
            else:
                returned = stage.function(slot)
                given = (returned,) if type(returned) is Operation else operations_of(stage, returned) or ()
            if start is not None:
                self._marks[position] = start, stream.record(timing=True)
            end = stream._queue.end()
            if len(given) != 1 or given[0] is not end:
                given = _with_end(given, end)
        except BaseException as error:  # noqa: BLE001 - raised with a note
            raise self._noted(error, position)  # noqa: B904 - it knows its cause
        self._returned[stage.name] = returned
        if given or start is not None:  # its timing events are looked at with it
            self._given[position] = given

    def _replay(self, stage: Stage, stream: Stream) -> Replayed:
        replays = self.slot.replays
        replay = replays.get(stage.name)
        if replay is None or replay.loop is not stream._queue.loop:
            try:
                replay = replays[stage.name] = Replay(stage, self.slot, stream)
            except UnsupportedError as error:
                error.add_note(f"stage {stage.name!r} is captured, to be replayed: replay=(…) names those that can be")
                raise
        return replay.launch(self.slot, stream)

    def _to_wait_for(self, before: Sequence[int]) -> Sequence[Operation[Any]]:
        """The last operation of each stream that these stages used."""
        given = self._given.get(before[0], ())
        if len(before) == 1 and len(given) <= 1:
            return given
        return _newest([operation for one in before for operation in self._given.get(one, ())])

    async def _call(self, position: int, stage: Stage) -> None:
        await self._arrive(self._plan.ancestors[position])
        stream = self._track.streams[position]
        began = self._track.now()
        try:
            returned = await stage.function(self.slot.seen_from(stream))
            given = _with_end(operations_of(stage, returned) or (), stream._queue.end())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised with a note
            raise self._noted(error, position)  # noqa: B904 - it knows its cause
        if self._overlap:
            self._track.meter.stage(position, self._track.now() - began)
        self._returned[stage.name] = returned
        if given:
            self._given[position] = given

    async def _arrive(self, positions: Iterable[int] | None = None) -> None:
        """Wait until what stages, all of them by default, gave to the device is done, results landed."""
        if positions is None:
            given = self._given.copy()
        else:
            given = {one: self._given[one] for one in self._given if one in positions}
        ahead = False  # is the host? Else it is better to ask: that finds the next items' work done, too
        try:
            for position in reversed(given):  # the newest first: when it is done, so are most others
                for operation in reversed(given[position]):
                    if operation.status != DONE:
                        await operation
                        ahead = bool(operation.queue.pending)
                for before in self._plan.before[position] if ahead else ():
                    for operation in given.get(before, ()):  # the device did it before what is done now
                        if operation.status < DONE:
                            operation.queue.resolve_to(operation)
        except Exception as error:  # noqa: BLE001 - it, or what caused it, is raised
            self._untold = True  # if this is cancelled now, `settle` comes to it
            failure = await self._cause(error, given)
            raise failure from failure.__cause__  # which says what it was skipped for
        for position in given:
            if self._given.pop(position, None) is not None and self._marks:  # else another branch has seen to it
                marks = self._marks.pop(position, None)
                if marks is not None:
                    self._track.meter.device(position, self.number, *marks)

    async def _cause(self, error: Exception, given: Mapping[int, Sequence[Operation[Any]]]) -> Exception:
        """Of what failed, what failed by itself, and first; ``error`` is only one of them. All of it is kept."""
        for operations in given.values():
            await gather(*operations, return_exceptions=True)
        own: list[Exception] = []
        skipped: Exception | None = None
        for position in sorted(given):
            failures = [failure for failure in map(self._failure_of, given[position]) if failure is not None]
            for failure in failures:
                self._note(failure, position)
            itself = [failure for failure in failures if not isinstance(failure, SkippedError)]
            own += itself[:1]  # the others of its stage were skipped, or tell of the same
            skipped = skipped or (failures[0] if failures else None)
        for failure in own:
            self._fail(failure)
        return own[0] if own else skipped or error

    def _failure_of(self, operation: Operation[Any]) -> Exception | None:
        """What it failed with, the same each time: an operation tells each who asks in a copy of his own."""
        failure = self._told.get(operation.id)
        if failure is None:
            found = operation.exception()
            failure = self._told[operation.id] = found if isinstance(found, Exception) else None
        return failure

    def _fail(self, error: BaseException) -> None:
        if not any(one is error for one in self._failures):
            self._failures.append(error)

    def _noted(self, error: BaseException, position: int) -> BaseException:
        """A stage's failure, with a note that names stage and item."""
        failure = failure_of(error)
        self._note(failure, position)
        return failure

    def _note(self, error: BaseException, position: int) -> None:
        note = f"in stage {self._plan.names[position]!r} of item {self.index}, counted from 0"
        if isinstance(error, DeviceFault):  # everything that was under way has it
            note = f"met by item {self.index}, counted from 0; which stage faulted is not known"
        if note not in getattr(error, "__notes__", ()):  # another branch may have said so
            error.add_note(note)

    # -- the end -------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """It ends early: wait until nothing of it runs, on the host or on the device. Its task has been cancelled."""
        if self.task is not None:
            await asyncio.wait({self.task})
            if not self.task.cancelled():
                self.task.exception()  # `carry` has kept it: asyncio need not report it
        self._leave(range(len(self._plan.stages)))
        self.slot.forget_replays()  # perhaps it was one of those that failed
        # A stage that failed or was cancelled half way may have enqueued more than it returned.
        tails = [stream.tail for stream in self._track.streams]
        operations = [operation for given in self._given.values() for operation in given]
        for operation in [*operations, *(tail for tail in tails if tail is not None)]:
            await _ended(operation)
            await operation.settle()  # if it was abandoned, the device may still be at it
        failures = [operation.failure for operation in operations]
        untold = self._untold or any(failure is not None and not failure.delivered for failure in failures)
        await gather(*operations, return_exceptions=True)
        if self.failure is None:
            try:
                await self._arrive()
            except ClosedError:
                return  # whoever has abandoned it knows
            except SkippedError as error:
                self.failure = error if untold else None  # it did nothing wrong: what went before it did
            except Exception as error:  # noqa: BLE001 - kept for whoever settles
                self.failure = error


async def _ended(operation: Operation[Any]) -> None:
    """Wait for it alone, and leave what became of it for others to read."""
    if not operation.done():
        ended = asyncio.Event()
        operation.add_done_callback(lambda _: ended.set())
        await ended.wait()


def _newest(operations: Sequence[Operation[Any]]) -> Sequence[Operation[Any]]:
    """The last operation of each stream: what comes behind it comes behind all."""
    newest: dict[Any, Operation[Any]] = {}
    for operation in sorted(operations, key=lambda one: one.id):
        newest[operation.stream or operation] = operation  # of a stream that nobody holds any more, each one
    return list(newest.values())


def _follow(stream: Stream, operation: Operation[Any]) -> None:
    """What the stream is given from now on waits for it. If it has failed, that is skipped."""
    queue = stream._queue
    if operation.queue is queue or operation.status == DONE:
        return
    if operation.queue.reactor is not queue.reactor or (operation.extra is not None and operation.failure is not None):
        stream.wait(operation)  # which refuses what belongs to another loop, or another driver
        return
    if queue.closed:
        queue.check()
    if type(stream) is Stream:
        queue.follow(operation)  # no operation of its own, which nobody would read
    else:
        follow(queue, operation)


def _with_end(operations: tuple[Operation[Any], ...], end: Operation[Any] | None) -> tuple[Operation[Any], ...]:
    """With what stands for all of its stream: what the stage enqueued and did not return, and what it only waits for.

    Raises
    ------
    WrongLoopError, BusyError
        One that nobody could wait for here: it is under way in another event loop, or recorded into a graph.
    """
    for operation in operations:
        if operation.status < DONE:
            operation.queue.check_loop()
        if operation.status < 0:
            operation.result()
    return operations if end is None or end in operations else (*operations, end)
