"""Groups of given streams in a random program: of the device, leased and imported; some end before the group."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocuda import Operation, Stream, StreamGroup, StreamPool
from aiocuda.errors import BusyError, ClosedError, CycleError, DeviceFault, StaleHandleError
from tests.simulation import internals

if TYPE_CHECKING:
    from aiocuda import Device, DeviceBuffer
    from aiocuda._base._types import Priority
    from aiocuda.pool import LeasedStream
    from tests.simulation.actions import Actions

__all__ = ["GivenGroupActions"]

_PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")


class GivenGroupActions:
    """Actions that group existing streams. Checks V5 and V9."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return 3 * [self.use_given]

    async def use_given(self) -> None:
        """Enqueue work through streams that are in a group for a while, and through the same objects afterwards."""
        actions = self._actions
        actions.count("given group")
        device = actions.device()
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._use_given(device, stack)
            except Exception as error:
                # Recorded here: if the task is cancelled while the streams are closed, it raises the cancellation.
                self._checker.errors.record(error)
                raise

    async def _use_given(self, device: Device, stack: contextlib.AsyncExitStack) -> None:
        actions = self._actions
        streams: list[Stream] = [
            await stack.enter_async_context(device.stream(actions.choose(_PRIORITIES)))
            for _ in range(1 + actions.below(3))
        ]
        lease: LeasedStream | None = None
        if actions.below(3):
            pool = await stack.enter_async_context(StreamPool(device, maximum=1))
            lease = await stack.enter_async_context(pool.stream())
            streams.append(lease)
        if actions.below(4) == 0 and device.asynchronous:  # the default stream is not imported
            foreign = await stack.enter_async_context(device.stream())
            streams.append(Stream.from_handle(device, internals.stream_handle(foreign)))
        buffers = {stream: stream.empty(16, np.uint32) for stream in streams}
        before = {stream: internals.hook_of(stream) for stream in streams}
        group = StreamGroup(device, streams)
        try:
            await self._use_group(group, buffers, lease)
        finally:
            await group.aclose()
        for stream in streams:
            if not stream.closed and internals.hook_of(stream) is not before[stream]:
                self._checker.report(f"V9 {group!r} has ended, and {stream!r} still waits for its prerequisites")
        await self._use_group(None, {stream: buffers[stream] for stream in streams if not stream.closed}, None)

    async def _use_group(
        self, group: StreamGroup | None, buffers: dict[Stream, DeviceBuffer], lease: LeasedStream | None
    ) -> None:
        actions = self._actions
        streams = list(buffers)
        prerequisites: dict[Stream, list[Stream]] = {stream: [] for stream in streams}
        # By stream: the operations that the next operation must come after.
        last: dict[Stream, list[Operation[Any]]] = {stream: [] for stream in streams}
        for _ in range(4 + actions.below(12)):
            stream, choice = actions.choose(streams), actions.below(12)
            if lease is not None and lease.returned and (stream is lease or choice == 2):
                self._use_ended(lease if stream is lease or group is None else group)
            elif choice < 2 and group is not None:
                other = actions.choose(streams)
                if other is not lease or not lease.returned:
                    with contextlib.suppress(CycleError):
                        group.add_dependency(stream, other)
                        prerequisites[stream].append(other)
            elif choice == 3 and lease is not None and not lease.returned:
                lease.release()
            elif choice == 4:
                await actions.pause()
            else:
                with contextlib.suppress(BusyError):  # an imported stream holds nothing on the host
                    if choice == 2 and group is not None:
                        operation = group.barrier()
                        self._checker.expect_after(
                            operation, [each for of_stream in last.values() for each in of_stream]
                        )
                        last = {each: [operation] for each in streams}
                        continue
                    operation = actions.follow(stream.fill(buffers[stream], choice))
                    earlier = [each for other in (stream, *prerequisites[stream]) for each in last[other]]
                    self._checker.expect_after(operation, earlier)
                    last[stream] = [operation]

    def _use_ended(self, thing: LeasedStream | StreamGroup) -> None:
        """Use a lease that has ended, or a group that has it."""
        try:
            if isinstance(thing, StreamGroup):
                thing.barrier()
            else:
                thing.synchronize()
        except (StaleHandleError, ClosedError, DeviceFault):
            return
        self._checker.report(f"V5 {thing!r} could be used after the end of its lease")
