"""Groups and barriers of a random program: streams that wait for each other, parties that leave, and V9 looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import StreamBarrier, StreamGroup
from ...completion._operation import Operation
from ...coordination import GroupStream
from ...errors import BrokenBarrierError, CycleError
from .heard import PlannedError

if TYPE_CHECKING:
    from ...stream import Stream
    from .actions import Actions

__all__ = ["Meetings"]


class Meetings:
    """What tasks of a program do with several streams at once."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions._checker

    def doing(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What a task may do."""
        return [self.meet, self.group]

    # -- a barrier -----------------------------------------------------------------------------------------------

    async def meet(self) -> None:
        """Parties come to a barrier, some of them too late, or not at all."""
        actions = self._actions
        parties = 1 + actions.below(4)
        barrier = StreamBarrier(parties)
        actions.count("barrier")
        for _ in range(1 + actions.below(2)):
            come: list[Operation[Any]] = []
            leaves = actions.below(3) == 0
            streams = [actions._stream() for _ in range(parties)]
            tasks = [asyncio.ensure_future(self._party(barrier, stream, come)) for stream in streams]
            try:
                if leaves:
                    await actions._pause()
                    if actions.below(2):
                        await barrier.abort()
                    else:
                        actions._one(tasks).cancel()
                        await barrier.abort()  # where he had not come yet, nobody else knows
                await asyncio.wait(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                errors = [error for task in tasks if not task.cancelled() and (error := task.result()) is not None]
            own = [error for error in errors if not isinstance(error, BrokenBarrierError)]
            if own or (errors and not leaves):
                raise (own or errors)[0]
            await barrier.reset()

    async def _party(self, barrier: StreamBarrier, stream: Stream, come: list[Operation[Any]]) -> Exception | None:
        """What it failed with: if the loop goes, nobody is left to ask the task for it."""
        actions = self._actions
        try:
            if actions.below(2):
                await actions._pause()
            come.append(self._work(stream))
            await barrier.wait(stream, timeout=actions._seconds(5) if actions.below(6) == 0 else None)
        except Exception as error:  # noqa: BLE001 - it is raised by who has sent the party
            self._checker.heard.error(error)
            await barrier.abort()  # who does not come tells the others
            return error
        if len(come) != barrier.parties:
            self._checker.found(f"V9 {barrier!r} of {barrier.parties} has let a party go, and {len(come)} had come")
        late = [operation for operation in come if operation.failure is None and not self._checker.is_done(operation)]
        if late and self._checker.driver.fault is None:
            self._checker.found(f"V9 {barrier!r} has let a party go, and {late[0]!r} is not done")
        return None

    def _work(self, stream: Stream) -> Operation[Any]:
        return self._actions._keep(stream.synchronize())

    # -- a group -------------------------------------------------------------------------------------------------

    async def group(self) -> None:
        """Streams with standing dependencies, and work in them."""
        actions = self._actions
        actions.count("group")
        async with StreamGroup(actions._device(), 2 + actions.below(3)) as group:
            try:
                await self._within(group)
            except Exception as error:
                self._checker.heard.error(error)  # he is told here, also if he is cancelled while the group ends
                raise

    async def _within(self, group: StreamGroup) -> None:
        actions = self._actions
        streams = list(group)
        buffers = {stream: stream.empty(16, np.uint32) for stream in streams}
        behind: dict[GroupStream, list[GroupStream]] = {stream: [] for stream in streams}
        tails: dict[GroupStream, list[Operation[Any]]] = {stream: [] for stream in streams}
        for _ in range(4 + actions.below(16)):
            stream, what = actions._one(streams), actions.below(12)
            if what < 2:
                self._depend(group, behind, stream, actions._one(streams))
            elif what == 2:
                operation = group.barrier()
                self._checker.behind(operation, [tail for each in tails.values() for tail in each])
                tails = {each: [operation] for each in streams}
            elif what == 3:
                await self._run(group)
            elif what == 4:
                await actions._pause()
            else:
                operation = stream.fill(buffers[stream], what)
                before = [tail for each in (stream, *behind[stream]) for tail in tails[each]]
                self._checker.behind(operation, before)
                tails[stream] = [operation]

    def _depend(
        self, group: StreamGroup, behind: dict[GroupStream, list[GroupStream]], one: GroupStream, other: GroupStream
    ) -> None:
        seen, left = {other}, [other]
        while left:
            for each in behind[left.pop()]:
                if each not in seen:
                    seen.add(each)
                    left.append(each)
        try:
            group.add_dependency(one, other)
        except CycleError:
            if one not in seen:
                self._checker.found(f"P27 {one.name} cannot depend on {other.name}, which does not depend on it")
            return
        if one in seen:
            self._checker.found(f"P27 {one.name} and {other.name} depend on each other")
        behind[one].append(other)

    async def _run(self, group: StreamGroup) -> None:
        """One function over all streams, which may fail in one of them."""
        fails = group[self._actions.below(len(group))] if self._actions.below(2) else None

        async def work(stream: GroupStream) -> str:
            await stream.synchronize()
            if stream is fails:
                raise PlannedError("in one stream")
            return stream.name

        try:
            names = await group.run(work)
        except ExceptionGroup as errors:
            _, others = errors.split(PlannedError)
            if others is not None:  # of the device, say
                raise others from None
        except PlannedError as error:
            if fails is None or fails.name not in str(getattr(error, "__notes__", "")):
                self._checker.found(f"P22 {error!r} of {fails!r} does not say where: {error.__notes__!r}")
        else:
            if fails is not None or tuple(names) != group.names:
                self._checker.found(f"P22 {fails!r} has failed, and {names!r} came of it")
