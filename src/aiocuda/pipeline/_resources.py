"""PipelineResources: what all items of a pipeline share. OrderedGate: keeps items in order where stages await."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from asyncio import _get_running_loop
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Self

from .._base._deadlock import HOLDER, Holder
from .._base._host_use import HostUse
from .._base._scope import Scope
from .._base._shutdown import end_tasks, finish_shielded, must_end_now
from .._base._tasks import start_task
from ..device import Device
from ..errors import ClosedError, DeviceFault
from ..lowlevel import Chain, Queue, owned, queue_of, resources_of
from ..stream import Stream
from ._advice import HostTimes
from ._blocking import BlockingWatch, LoopTimes
from ._meter import Meter
from ._plan import Plan
from ._ring import PipelineRing
from ._slot import Slot

if TYPE_CHECKING:
    from ._item import PipelineItem

__all__ = ["OrderedGate", "PipelineResources"]


class PipelineResources:
    """What all items of a pipeline share. As an asynchronous context manager it keeps the streams open.

    Attributes
    ----------
    device : Device
    plan : Plan
    ring : PipelineRing
    meter : Meter
    now : callable
        The driver's clock, in seconds.
    gates : list of OrderedGate
        By the stage's position: items enter a stage in order, as many at a time as the stage's concurrency. Empty if
        no stage awaits: then items cannot overtake each other.
    streams : list of Stream
        By the stage's position; stages of one group have the same stream. Empty while no block has them open.
    queues : list of Queue
        The queues of these streams.
    follow : callable
        Makes later work of a queue wait, on the device, for an operation of another of these queues.
    chain : Chain or None
        Calls the stages of an item that is not timed; None if the plan is not plain, or the device is checked.
    numbers : iterator of int
        Numbers of items, from 0.
    holders : dict of Holder to tuple
        For each stage that is awaited now, its item and the stage's position.
    blocking_watch : BlockingWatch or None
        Finds stages that block the loop; None if no stage awaits, or without advice.
    host_use : HostUse
        Measures what runs use of the host.
    scope : Scope
        That of the pipeline. It is bound to a loop while the streams are open.
    loop_times : LoopTimes or None
        The time for which stages have the event loop; None if no stage awaits, or in virtual time.
    """

    __slots__ = ("_closings", "_device_is_late", "_is_real", "_unclosed", "_users", "blocking_watch", "chain",
                 "device", "follow", "gates", "holders", "host_use", "loop_times", "meter", "now", "numbers",
                 "plan", "queues", "ring", "scope", "streams")  # fmt: skip

    def __init__(self, device: Device, plan: Plan, depth: int, scope: Scope) -> None:
        self.device = device
        self.scope = scope
        self.now = device.driver.now
        self.ring = PipelineRing(depth, now=self.now)
        self.streams: list[Stream] = []
        self.queues: list[Queue] = []
        self.follow = resources_of(device).follow
        self.chain: Chain | None = None
        self.blocking_watch: BlockingWatch | None = None
        self.host_use = HostUse()
        self.holders: dict[Holder, tuple[PipelineItem, int]] = {}
        self._is_real = self.now is time.monotonic  # nothing of the host is measured in virtual time
        self._plan_items(plan)
        self._users = 0  # blocks that have the streams open
        self._closings = 0  # ends of the last block that close streams now
        self._device_is_late = False  # it did not finish with some memory in time
        self._unclosed: list[Stream] = []  # streams that could not be closed: they end with the device

    def _plan_items(self, plan: Plan) -> None:
        """Make what is kept for each stage, by its position."""
        self.plan = plan
        self.gates = [OrderedGate(stage.concurrency) for stage in plan.stages] if plan.awaits else []
        self.numbers = itertools.count()
        self.meter = Meter(plan)
        self.loop_times = LoopTimes(len(plan.stages)) if plan.awaits and self._is_real else None

    def replan(self, plan: Plan) -> None:
        """Replace the plan by one of the same stages and groups. No item may be in flight. The statistics restart."""
        streams = dict(zip(self.plan.names, self.streams, strict=False))  # none, if they are not open
        self._plan_items(plan)
        self.reset_statistics()
        self.ring.forget_replays()
        if streams:
            self.streams[:] = [streams[name] for name in plan.names]
            self._connect()

    def begin_run(self) -> None:
        """Measure the use of the host until `end_run`."""
        if self._is_real:
            self.host_use.start(asyncio.get_running_loop() if self._probes_gil else None)

    def end_run(self) -> None:
        """The run has ended."""
        self.host_use.stop()

    def host_times(self) -> HostTimes | None:
        """Return what runs use of the host; None in virtual time."""
        if not self._is_real:
            return None
        loop = [0.0] * len(self.plan.stages) if self.loop_times is None else self.loop_times.typical_seconds()
        period = self.ring.busy_seconds / max(1, self.meter.items)
        load = self.host_use.load()
        return HostTimes(load._replace(seconds=load.seconds or 1e-9), loop, period, self._probes_gil)

    @property
    def _probes_gil(self) -> bool:
        """True if functions of the program may run in threads."""
        return self.plan.awaits or not self.device.driver.polls_freely

    @property
    def advises(self) -> bool:
        """True if the program gets advice: not in virtual time, and not if `AIOCUDA_WARN` is 0."""
        return resources_of(self.device).device_state.advises and self._is_real

    def reset_statistics(self) -> None:
        """Restart all times and counts."""
        self.meter.reset()
        self.ring.reset_statistics()
        self.host_use.reset()
        if self.loop_times is not None:
            self.loop_times.reset()

    def release(self, slot: Slot, *, device_may_use: bool = False) -> None:
        """Release the slot of an item that has ended early. If the device is late, a new one takes its place."""
        if device_may_use:
            self._device_is_late = True
            self.ring.replace(slot)
        else:
            self.ring.release(slot)

    @contextlib.contextmanager
    def holding(self, item: PipelineItem, position: int) -> Iterator[None]:
        """Await a stage of an item in a block: if it waits for another item of the pipeline, that may be a deadlock."""
        holder = Holder(f"stage {self.plan.names[position]!r} of item {item.index}, counted from 0,")
        token = HOLDER.set(holder)
        self.holders[holder] = item, position
        try:
            yield
        finally:
            holder.task = None
            del self.holders[holder]
            with contextlib.suppress(ValueError):  # a coroutine of a closed loop ends in another context
                HOLDER.reset(token)

    def blocked_by(self, stuck: Collection[asyncio.Task[Any]]) -> tuple[float, set[PipelineItem]]:
        """Return what is blocked if none of these tasks goes on: all items after a number, and some items before it.

        Items enter each stage in order, so an item cannot pass an earlier one that does not leave its stage.
        """
        items: dict[int, list[PipelineItem]] = {}  # by the position of the stage that they are in
        for holder, (item, position) in self.holders.items():
            if holder.is_stuck(stuck):
                items.setdefault(position, []).append(item)
        last = math.inf
        for position, found in items.items():
            numbers = [item.number for item in found]
            if self.plan.successors[position]:
                last = min(last, *numbers)
            elif len(found) >= self.plan.stages[position].concurrency:
                last = min(last, max(numbers))
        return last, {item for found in items.values() for item in found}

    def free_buffers(self) -> None:
        """Release the memory of free slots. The sweeps return it now: an idle device makes no other call for that."""
        self.ring.free_buffers()
        if not self.device.closed:
            with contextlib.suppress(ClosedError, DeviceFault):
                reactor = resources_of(self.device).open_reactor()
                self.device.memory.sweep(reactor)
                resources_of(self.device).graphs.sweep(reactor)

    def end_late(self) -> None:
        """The device will not finish in time: close the streams without waiting."""
        self._device_is_late = True

    async def __aenter__(self) -> Self:
        """Open one stream for each group of stages, if no other block has them open."""
        if not self._users:
            await self._open_streams()
        self._users += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._users -= 1
        if not self._users:
            streams = list(dict.fromkeys(self.streams))
            self.streams.clear()
            self.queues, self.chain = [], None
            if _get_running_loop() is not None:  # without a loop, a generator is collected: it cannot await
                self._device_is_late = self._device_is_late or must_end_now()
                self._closings += 1
                try:
                    await finish_shielded(self._close_streams(streams))
                finally:
                    self._closings -= 1
                    self._unbind()
            else:
                self._unbind()

    def _unbind(self) -> None:
        if not (self._users or self._closings):
            self.scope.unbind()

    async def _open_streams(self) -> None:
        self.scope.bind()
        names, streams = self.plan.names, dict[int, Stream]()
        try:
            for group in self.plan.stream_groups:
                name = "+".join(names[position] for position in group)
                stream = owned(self.device.stream(name=name), closed_by="its pipeline")
                streams.update(dict.fromkeys(group, stream))
        except BaseException:
            await self._close_streams(list(dict.fromkeys(streams.values())))
            self._unbind()
            raise
        self.streams.extend(streams[position] for position in range(len(names)))
        self._connect()

    def _connect(self) -> None:
        """Find what follows from the plan and the open streams."""
        self.queues = [queue_of(stream) for stream in self.streams]
        resources = resources_of(self.device)
        self.follow = resources.follow
        self.chain = None
        if self.plan.is_plain and resources.checker is None:
            functions = [stage.function for stage in self.plan.stages]
            self.chain = Chain(self.plan.names, functions, self.streams, self.queues)
        if self.plan.awaits and self.advises:
            self.blocking_watch = BlockingWatch(resources.open_reactor().guard)

    async def _close_streams(self, streams: list[Stream]) -> None:
        if not streams:
            return
        closing = {start_task(_close_stream, stream): stream for stream in streams}
        await end_tasks(closing, 0.0 if self._device_is_late else resources_of(self.device).deadline.left())
        self._unclosed += [stream for stream in streams if not stream.closed]
        for task in closing:
            if not task.cancelled():
                task.result()


async def _close_stream(stream: Stream) -> None:
    with contextlib.suppress(DeviceFault):  # the run has raised it, and the device closes the stream
        await owned(stream).aclose()


class OrderedGate:
    """A gate that numbers enter in order, 0, 1, 2 …, whatever order they arrive in; at most ``width`` are inside.

    Each number must leave once, even if it has not entered: a number that does not leave blocks all later ones.
    """

    __slots__ = ("_inside", "_left_early", "_next", "_waiters", "_width")

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self._inside = 0
        self._next = 0  # the number that enters next
        self._left_early: set[int] = set()  # without entering
        self._waiters: dict[int, asyncio.Future[None]] = {}

    async def enter(self, number: int) -> None:
        """Wait until all smaller numbers have entered or left, and fewer than ``width`` are inside."""
        while number != self._next or self._inside == self._width:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[number] = waiter
            try:
                await waiter
            finally:
                self._waiters.pop(number, None)
        self._inside += 1
        self._advance()

    def leave(self, number: int) -> None:
        """Let a waiting number enter in place of this one."""
        if number < self._next:
            self._inside -= 1
            self._wake_next()
        elif number > self._next:
            self._left_early.add(number)
        else:
            self._advance()

    def _advance(self) -> None:
        self._next += 1
        while self._next in self._left_early:
            self._left_early.discard(self._next)
            self._next += 1
        self._wake_next()

    def _wake_next(self) -> None:
        waiter = self._waiters.get(self._next) if self._inside < self._width else None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
