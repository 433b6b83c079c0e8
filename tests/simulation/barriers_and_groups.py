"""Barriers and stream groups in a random program: streams that wait for each other, and parties that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocuda import Operation, StreamBarrier, StreamGroup
from aiocuda.errors import BrokenBarrierError, CycleError
from tests.simulation import internals
from tests.simulation.error_log import PlannedError

if TYPE_CHECKING:
    from aiocuda import Stream
    from tests.simulation.actions import Actions

__all__ = ["BarrierAndGroupActions"]


class BarrierAndGroupActions:
    """Actions that use several streams together. Checks V9, P22 and P27."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return [self.use_barrier, self.use_group]

    # -- a barrier -----------------------------------------------------------------------------------------------

    async def use_barrier(self) -> None:
        """Let the parties of a barrier arrive, some of them too late or not at all. Perhaps twice."""
        actions = self._actions
        parties = 1 + actions.below(4)
        barrier = StreamBarrier(parties)
        actions.count("barrier")
        for _ in range(1 + actions.below(2)):
            arrived: list[Operation[Any]] = []
            breaks = actions.below(3) == 0
            streams = [actions.stream() for _ in range(parties)]
            tasks = [asyncio.ensure_future(self._arrive(barrier, stream, arrived)) for stream in streams]
            try:
                if breaks:
                    await self._break(barrier, tasks)
                await asyncio.wait(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                errors = [error for task in tasks if not task.cancelled() and (error := task.result()) is not None]
            others = [error for error in errors if not isinstance(error, BrokenBarrierError)]
            if others or (errors and not breaks):
                raise (others or errors)[0]
            await barrier.reset()

    async def _break(self, barrier: StreamBarrier, tasks: list[asyncio.Task[Exception | None]]) -> None:
        actions = self._actions
        await actions.pause()
        if actions.below(2):
            await barrier.abort()
        else:
            actions.choose(tasks).cancel()
            await barrier.abort()  # a party that is cancelled before it arrives does not break the barrier itself

    async def _arrive(self, barrier: StreamBarrier, stream: Stream, arrived: list[Operation[Any]]) -> Exception | None:
        """Arrive at the barrier. Return the error: if the loop is closed, nothing retrieves a task's exception."""
        actions = self._actions
        try:
            if actions.below(2):
                await actions.pause()
            arrived.append(actions.follow(stream.synchronize()))
            await barrier.wait(stream, timeout=actions.seconds(5) if actions.below(6) == 0 else None)
        except Exception as error:  # noqa: BLE001 - `use_barrier` raises it
            self._checker.errors.record(error)
            await barrier.abort()  # so that the other parties do not wait for this one
            return error
        if len(arrived) != barrier.parties:
            self._checker.report(f"V9 {barrier!r} of {barrier.parties} opened when {len(arrived)} parties had arrived")
        unfinished = [
            operation
            for operation in arrived
            if not (internals.has_failed(operation) or self._checker.is_device_done(operation))
        ]
        if unfinished and self._checker.driver.fault is None:
            self._checker.report(f"V9 {barrier!r} opened, and {unfinished[0]!r} is not done")
        return None

    # -- a group -------------------------------------------------------------------------------------------------

    async def use_group(self) -> None:
        """Enqueue work in a group of streams with standing dependencies."""
        actions = self._actions
        actions.count("group")
        async with StreamGroup(actions.device(), 2 + actions.below(3)) as group:
            try:
                await self._use_group(group)
            except Exception as error:
                # Recorded here: if the task is cancelled while the group is closed, it raises the cancellation.
                self._checker.errors.record(error)
                raise

    async def _use_group(self, group: StreamGroup) -> None:
        actions = self._actions
        streams = list(group)
        buffers = {stream: stream.empty(16, np.uint32) for stream in streams}
        dependencies: dict[Stream, list[Stream]] = {stream: [] for stream in streams}
        # By stream: the operations that the next operation must come after.
        last: dict[Stream, list[Operation[Any]]] = {stream: [] for stream in streams}
        for _ in range(4 + actions.below(16)):
            stream, choice = actions.choose(streams), actions.below(12)
            if choice < 2:
                self._add_dependency(group, dependencies, stream, actions.choose(streams))
            elif choice == 2:
                operation = group.barrier()
                self._checker.expect_after(operation, [each for of_stream in last.values() for each in of_stream])
                last = {each: [operation] for each in streams}
            elif choice == 3:
                await self._run_on_all(group)
            elif choice == 4:
                await actions.pause()
            else:
                operation = stream.fill(buffers[stream], choice)
                before = [each for other in (stream, *dependencies[stream]) for each in last[other]]
                self._checker.expect_after(operation, before)
                last[stream] = [operation]

    def _add_dependency(
        self,
        group: StreamGroup,
        dependencies: dict[Stream, list[Stream]],
        stream: Stream,
        other: Stream,
    ) -> None:
        """Let a stream depend on another one, unless that makes a cycle: then the group must refuse."""
        needed_by_other, left = {other}, [other]
        while left:
            for each in dependencies[left.pop()]:
                if each not in needed_by_other:
                    needed_by_other.add(each)
                    left.append(each)
        is_cycle = stream in needed_by_other
        try:
            group.add_dependency(stream, other)
        except CycleError:
            if not is_cycle:
                self._checker.report(f"P27 {stream.name} may not depend on {other.name}, and that would be no cycle")
            return
        if is_cycle:
            self._checker.report(f"P27 {stream.name} and {other.name} depend on each other")
        dependencies[stream].append(other)

    async def _run_on_all(self, group: StreamGroup) -> None:
        """Run one function on all streams of a group. It may fail on one of them."""
        fails = group[self._actions.below(len(group))] if self._actions.below(2) else None

        async def work(stream: Stream) -> str:
            await stream.synchronize()
            if stream is fails:
                raise PlannedError("in one stream")
            return stream.name

        try:
            names = await group.run(work)
        except ExceptionGroup as errors:
            _, others = errors.split(PlannedError)
            if others is not None:  # for example a device fault
                raise others from None
        except PlannedError as error:
            if fails is None or fails.name not in str(getattr(error, "__notes__", "")):
                self._checker.report(f"P22 {error!r} does not name its stream, {fails!r}: {error.__notes__!r}")
        else:
            if fails is not None or tuple(names) != group.names:
                self._checker.report(f"P22 the function failed on {fails!r}, and the group returned {names!r}")
