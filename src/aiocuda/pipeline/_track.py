"""Track: what all iterations of a pipeline share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from asyncio import _get_running_loop
from typing import Self

from .._device import Device
from .._shutdown import all_ended, hurried, to_the_end
from ..errors import ClosedError, DeviceFault
from ..stream import Stream
from ._meter import Meter
from ._ordered_gate import OrderedGate
from ._plan import Plan
from ._ring import TripleBuffer
from ._slot import Slot

__all__ = ["Track"]


class Track:
    """The stages, and for each one its turnstile and, while somebody needs it, its stream; the ring and the meter."""

    def __init__(self, device: Device, plan: Plan, depth: int) -> None:
        self.device = device
        self.plan = plan
        #: Items pass each stage in order, and so one at a time. Where no stage awaits they cannot do otherwise.
        self.turnstiles = [OrderedGate() for _ in plan.stages] if plan.awaits else []
        self.now = device.driver.now
        self.ring = TripleBuffer(depth, now=self.now)
        self.meter = Meter(plan, depth)
        #: By the stage's position; stages of one group have the same.
        self.streams: list[Stream] = []
        self.numbers = itertools.count()
        self._users = 0
        self._lost = False  # something did not leave the device in time
        self._stuck: list[Stream] = []  # streams that could not be closed: they end with the device

    def release(self, slot: Slot, *, lost: bool = False) -> None:
        """The slot is free; or the device holds on to its memory, and another slot takes its place."""
        if lost:
            self._lost = True
            self.ring.replace(slot)
        else:
            self.ring.release(slot)

    def free_buffers(self) -> None:
        """Free slots let go of their memory. On an idle device nothing else would come by to give it back."""
        self.ring.free_buffers()
        if not self.device.closed:
            with contextlib.suppress(ClosedError, DeviceFault):
                reactor = self.device._loop_state().reactor
                self.device.memory.sweep(reactor)
                self.device._graphs.sweep(reactor)

    async def __aenter__(self) -> Self:
        """One stream for each group of stages, as long as anybody is in such a block."""
        if not self._users:
            await self._open()
        self._users += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._users -= 1
        if not self._users:
            streams, self.streams = list(dict.fromkeys(self.streams)), []
            self.meter.forget_events()
            if _get_running_loop() is not None:  # else it has gone, and its generators with it: nothing can be awaited
                self._lost = self._lost or hurried()
                await to_the_end(self._close(streams))

    async def _open(self) -> None:
        names, streams = self.plan.names, dict[int, Stream]()
        try:
            for group in self.plan.groups:
                stream = self.device.stream(name="+".join(names[position] for position in group))
                streams.update(dict.fromkeys(group, stream))
        except BaseException:
            await self._close(list(dict.fromkeys(streams.values())))
            raise
        self.streams = [streams[position] for position in range(len(names))]

    async def _close(self, streams: list[Stream]) -> None:
        if not streams:
            return
        closing = {asyncio.get_running_loop().create_task(_close_stream(stream)): stream for stream in streams}
        await all_ended(closing, 0.0 if self._lost else self.device._patience.left())
        self._stuck += [stream for stream in streams if not stream.closed]
        for task in closing:
            if not task.cancelled():
                task.result()


async def _close_stream(stream: Stream) -> None:
    with contextlib.suppress(DeviceFault):  # the run has told of it, and the device closes what is left
        await stream.aclose()
