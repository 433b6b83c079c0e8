"""`device.memory.free_all` in a random program: all live buffers of a stream, which other streams use as well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aiocuda.errors import BusyError, ClosedError, DeviceFault, StaleHandleError
from tests.simulation import internals

if TYPE_CHECKING:
    from aiocuda import Stream
    from tests.simulation.actions import Actions
    from tests.simulation.buffers import TrackedBuffer

__all__ = ["FreedStreamActions"]


class FreedStreamActions:
    """Actions that free all buffers of a stream. Checks V5, and V4 and V11 with the driver."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return 2 * [self.free_all]

    async def free_all(self) -> None:
        """Allocate buffers that all tasks use on a new stream, and free them by one call in the middle of that."""
        actions = self._actions
        async with actions.device().stream() as stream:
            for _ in range(1 + actions.below(3)):
                actions.new_buffer(stream, 16 if actions.below(2) else 300)
            for _ in range(1 + actions.below(3)):
                await actions.pause()
                self._free_all(stream)
                actions.new_buffer(stream, 16)

    def _free_all(self, stream: Stream) -> None:
        actions = self._actions
        mine = [tracked for tracked in actions.buffers if tracked.home is stream]
        for tracked in mine:
            self._use_elsewhere(tracked)
        others = [tracked for tracked in actions.buffers if tracked.home is not stream and not tracked.buffer.freed]
        exported = internals.has_exported(stream)
        actions.count("free all")
        try:
            freed = stream.device.memory.free_all(stream)
        except BusyError as error:
            if hasattr(error, "code"):
                raise  # the driver has refused a call
            if not exported or any(tracked.buffer.freed for tracked in mine):
                self._checker.report(f"P27 {stream!r} was refused, and holds no export, or buffers have been freed")
            return
        finally:  # the driver may have refused the free of one of them
            actions.buffers[:] = [tracked for tracked in actions.buffers if not tracked.buffer.freed]
        if any(not tracked.buffer.freed for tracked in mine) or freed < sum(each.buffer.nbytes for each in mine):
            self._checker.report(f"V5 {stream!r} has {len(mine)} buffers, and only {freed} bytes were freed")
        if any(tracked.buffer.freed for tracked in others):
            self._checker.report(f"V5 buffers of other streams were freed with those of {stream!r}")
        if mine and actions.below(3) == 0:
            actions.count("stale")
            try:
                stream.fill(mine[0].buffer, 1)
            except (StaleHandleError, ClosedError, DeviceFault):
                return
            self._checker.report("V5 a buffer that was freed with its stream could be used")

    def _use_elsewhere(self, tracked: TrackedBuffer) -> None:
        """Write a buffer in another stream, which the free has to wait for."""
        actions, value, count = self._actions, self._actions.below(1 << 16), tracked.buffer.shape[0]
        other = actions.stream(tracked.device)
        actions.wait_for_users(other, (tracked, True))
        operation = other.fill(tracked.buffer, value)
        actions.note_write(other, tracked, operation, (), lambda: np.full(count, value, np.uint32))
