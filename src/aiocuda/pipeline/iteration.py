"""Iteration: one item's way through the stages of a pipeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..completion.gather import gather
from ..completion.operation import Operation
from ..errors import ClosedError, DeviceFault, SkippedError
from ..event import Event
from ..stream import Stream
from .slot import Slot
from .stage import Stage, operations_of

if TYPE_CHECKING:
    from .track import Track

__all__ = ["Iteration"]


class _Step(NamedTuple):
    """What a stage gave to the device."""

    position: int
    operations: tuple[Operation[Any], ...]
    start: Event | None = None
    end: Event | None = None


class Iteration:
    """One item on its way.

    Stages that enqueue are called one right after the other, each behind the stage before by a wait on the device. The
    host waits before a stage that awaits, and at the end.
    """

    __slots__ = ("_began", "_left", "_overlap", "_returned", "_steps", "_track", "_weight", "failure", "index",
                 "number", "slot", "task")  # fmt: skip

    def __init__(self, track: Track, slot: Slot, item: Any, index: int, *, overlap: bool) -> None:
        self._track = track
        self.slot = slot
        self.number = next(track.numbers)  # in the pipeline
        self.index = index  # in its source
        self._overlap = overlap
        self._weight = track.meter.begin() if overlap else 0
        self._steps: list[_Step] = []  # not known to be done
        self._returned: Any = None
        self._left = 0  # stages whose turnstile it has passed
        self._began = time.perf_counter()
        #: Carries it, where there are stages that await.
        self.task: asyncio.Task[None] | None = None
        #: What it failed with, once that is known.
        self.failure: Exception | None = None
        track.ring.begin(slot, item, track.states[0])

    # -- through the stages --------------------------------------------------------------------------------------

    def enqueue(self) -> bool:
        """Through all stages; none of them awaits. False if one failed, which `finish` raises."""
        try:
            for position, stage in enumerate(self._track.stages):
                self._enqueue(position, stage)
        except Exception as error:  # noqa: BLE001 - kept for `finish`
            self.failure = error
            return False
        return True

    async def carry(self) -> None:
        """Through all stages."""
        try:
            for position, stage in enumerate(self._track.stages):
                if self._track.turnstiles:
                    await self._track.turnstiles[position].enter(self.number)
                began = time.perf_counter()
                if stage.awaits:
                    await self._call(position, stage)
                else:
                    self._enqueue(position, stage)
                if not self._overlap:
                    await self._arrive()
                    self._track.meter.stage(position, time.perf_counter() - began)
                self._leave(position)
                if stage.awaits and self._overlap:
                    await asyncio.sleep(0)  # the next item's host work begins before this one's stages are enqueued
        except Exception as error:
            self.failure = error
            raise

    def _leave(self, position: int) -> None:
        """Let the next item into a stage, and into those before it, should this one not have come so far."""
        if self._track.turnstiles:
            for turnstile in self._track.turnstiles[self._left : position + 1]:
                turnstile.leave(self.number)
        self._left = position + 1

    async def finish(self) -> Any:
        """The result, when everything is done."""
        if self.task is not None:
            await asyncio.wait({self.task})  # awaiting it would cancel it with us
            if self.task.cancelled():
                raise ClosedError(f"item {self.index} of the pipeline, counted from 0, was cancelled")
            self.task.result()
        elif self.failure is not None:
            raise self.failure
        try:
            await self._arrive()
        except Exception as error:
            self.failure = error
            raise
        self._track.meter.iteration(time.perf_counter() - self._began)
        return self._result()

    def _enqueue(self, position: int, stage: Stage) -> None:
        stream = self._track.streams[position]
        for operation in _newest(self._steps[-1].operations) if self._steps else ():
            if operation.stream is not stream and operation.state != "done":
                stream.wait(operation)  # if it has failed, this stage's work is skipped
        self.slot.stream = stream
        start = stream.record(timing=True) if self._weight else None
        try:
            self._returned = stage.function(self.slot)
            operations = operations_of(stage, self._returned)
        except Exception as error:
            self._note(error, position)
            raise
        end = stream.record(timing=True) if self._weight else None
        operations = _with_tail(operations or (), stream)
        self._steps.append(_Step(position, operations, start, end))
        self.slot.enter(self._track.states[position], operations)

    async def _call(self, position: int, stage: Stage) -> None:
        await self._arrive()
        stream = self.slot.stream = self._track.streams[position]
        self.slot.enter(self._track.states[position])
        began = time.perf_counter()
        try:
            self._returned = await stage.function(self.slot)
            operations = operations_of(stage, self._returned)
        except Exception as error:
            self._note(error, position)
            raise
        if self._overlap:
            self._track.meter.stage(position, time.perf_counter() - began)
        operations = _with_tail(operations or (), stream)
        if operations:
            self._steps.append(_Step(position, operations))
            self.slot.enter(self._track.states[position], operations)

    async def _arrive(self) -> None:
        """Wait until everything given to the device is done, results landed."""
        try:
            for step in reversed(self._steps):  # the newest first: when it is done, so are the others
                for operation in reversed(step.operations):
                    await operation
        except Exception as error:  # noqa: BLE001 - it, or what caused it, is raised
            root = await self._root(error)
            raise root from root.__cause__  # of one that was skipped: what failed before it
        for step in self._steps:
            if step.start is not None and step.end is not None:
                self._track.meter.stage(step.position, step.start.elapsed_ms(step.end) * 1e-3, self._weight)
        self._steps.clear()

    async def _root(self, error: Exception) -> Exception:
        """Of what failed, what failed by itself, and first; ``error`` is only one of them."""
        skipped: Exception | None = None
        for step in self._steps:
            await gather(*step.operations, return_exceptions=True)
            for operation in step.operations:
                failure = operation.exception()
                if not isinstance(failure, Exception):
                    continue
                self._note(failure, step.position)
                if not isinstance(failure, SkippedError):
                    return failure
                skipped = skipped or failure
        return skipped or error

    def _result(self) -> Any:
        """What the last stage returned, operations replaced by their results."""
        returned = self._returned
        if isinstance(returned, (Operation, Event)):
            return returned.result()
        if isinstance(returned, (list, tuple)) and operations_of(self._track.stages[-1], returned):
            return [one.result() for one in returned]
        return returned

    def _note(self, error: BaseException, position: int) -> None:
        if isinstance(error, DeviceFault):  # everything that was under way has it
            error.add_note(f"met by item {self.index}, counted from 0; which stage faulted is not known")
        else:
            error.add_note(f"in stage {self._track.stages[position].name!r} of item {self.index}, counted from 0")

    # -- the end -------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """It ends early: wait until nothing of it runs, on the host or on the device. Its task has been cancelled."""
        if self.task is not None:
            await asyncio.wait({self.task})
            if not self.task.cancelled():
                self.task.exception()  # `carry` has kept it: asyncio need not report it
        self._leave(len(self._track.stages) - 1)
        # A stage that failed or was cancelled half way may have enqueued more than it returned.
        tails = [stream.tail for stream in self._track.streams]
        operations = [operation for step in self._steps for operation in step.operations]
        for operation in [*operations, *(tail for tail in tails if tail is not None)]:
            await gather(operation, return_exceptions=True)
            await operation.settle()  # if it was abandoned, the device may still be at it
        if self.failure is None:
            try:
                await self._arrive()
            except (SkippedError, ClosedError):
                return  # it did nothing wrong: what went before it did
            except Exception as error:  # noqa: BLE001 - kept for whoever settles
                self.failure = error


def _newest(operations: Sequence[Operation[Any]]) -> Sequence[Operation[Any]]:
    """The last operation of each stream: what comes behind it comes behind all."""
    if len(operations) == 1:
        return operations
    newest: dict[Any, Operation[Any]] = {}
    for operation in sorted(operations, key=lambda one: one.id):
        newest[operation.stream or operation] = operation  # of a stream that nobody holds any more, each one
    return list(newest.values())


def _with_tail(operations: tuple[Operation[Any], ...], stream: Stream) -> tuple[Operation[Any], ...]:
    """With the stream's newest operation, for a stage that enqueued more than it returned."""
    tail = stream.tail
    return operations if tail is None or tail in operations else (*operations, tail)
