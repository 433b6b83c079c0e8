"""Stream pools of a random program: leases shared and exclusive, waits that are cut short, pools that are closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import StreamPool
from ...completion._stream_queue import stream_queue
from ...errors import ClosedError, DeviceFault, StaleHandleError
from .kernels import AFFINE

if TYPE_CHECKING:
    from ..._device import Device
    from ...pool._lease import LeasedStream
    from .actions import Actions

__all__ = ["Leases"]

_STRATEGIES = ["load_balanced", "load_balanced", "round_robin", "priority", "workload"]
_WORKLOADS = [None, None, "compute", "memory", "mixed", "coordination"]


class Leases:
    """A pool of each device, which all tasks of a program share: V5, V6 and V12 of it."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions._checker
        self._pools: dict[Device, StreamPool] = {}
        self._old: list[StreamPool] = []
        self._held: dict[Any, list[LeasedStream]] = {}  # by queue
        self._checker.at_end.append(self._ended)

    def doing(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What a task may do."""
        return [self.lease, self.lease, self.lease, self.lease, self.ready, self.close]

    def _pool(self) -> StreamPool:
        actions = self._actions
        device = actions._device()
        pool = self._pools.get(device)
        if pool is None:
            least = 1 + actions.below(2)
            pool = StreamPool(
                device, least, least + actions.below(2), strategy=actions._one(_STRATEGIES),
                keep_seconds=actions._seconds(4),
            )  # fmt: skip
            self._pools[device] = pool
            self._old.append(pool)
        return pool

    async def lease(self) -> None:
        """A lease for some work; perhaps a wait for it, or the work itself, is cut short."""
        actions = self._actions
        pool, exclusive = self._pool(), actions.below(3) == 0
        workload, priority = actions._one(_WORKLOADS), actions._one(["high", "normal", "low"])
        limit = actions._seconds(4) if actions.below(3) == 0 else None
        actions.count("lease")
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(limit),
                pool.stream(workload, priority=priority, exclusive=exclusive) as stream,
            ):
                await self._use(pool, stream)

    async def ready(self) -> None:
        """A stream that has nothing to do."""
        pool, actions = self._pool(), self._actions
        if pool.has_ready() or actions.below(2):
            with contextlib.suppress(TimeoutError):
                async with await pool.any_ready(timeout=actions._seconds(4)) as stream:
                    driver = self._checker.driver
                    # What was refused half way may have left a wait there; and the pool may have been closed meanwhile.
                    # A default stream has work as long as anybody has given it some, by whatever face.
                    known = stream.device.asynchronous and not (driver.upsets.happened or stream.closed)
                    if known and not driver._machine.stream(stream_queue(stream).handle).is_idle:
                        self._checker.found(f"V2 {stream!r} was said to have nothing to do")
                    await self._use(pool, stream)
        if actions.below(4) == 0:
            pool.optimize()

    async def close(self) -> None:
        """End a pool, leased as it may be."""
        if self._actions.below(3):
            return
        pool = self._pool()
        del self._pools[pool._device]
        self._actions.count("close pool")
        await pool.aclose()

    async def _use(self, pool: StreamPool, stream: LeasedStream) -> None:
        actions, checker = self._actions, self._checker
        held = self._held.setdefault(stream_queue(stream), [])
        if held and (stream.exclusive or any(other.exclusive for other in held)):
            checker.found(f"V5 {stream!r} is lent to somebody else, too: {held!r}")
        if len(pool._places) > pool._maximum:
            checker.found(f"V12 {pool!r} has {len(pool._places)} streams, and may have {pool._maximum}")
        held.append(stream)
        try:
            for _ in range(actions.below(4)):
                self._work(stream)
                if actions.below(3) == 0:
                    await actions._pause()
        finally:
            held.remove(stream)
        if actions.below(3) == 0:
            stream.release()
            self._use_stale(stream)

    def _work(self, stream: LeasedStream) -> None:
        actions = self._actions
        target, value = actions._target(), actions.below(1 << 16)
        count = target.buffer.shape[0]
        if target.device is not stream.device:
            return
        actions._order(stream, (target, True))
        if actions.below(2):
            operation = stream.fill(target.buffer, value)
            actions._write(stream, target, operation, (), lambda: np.full(count, value, np.uint32))
        else:
            operation = stream.launch(AFFINE, 1, 32, target.buffer, count, 3, value)
            actions._write(
                stream, target, operation, (target.version,),
                lambda before: before * np.uint32(3) + np.uint32(value),
            )  # fmt: skip

    def _use_stale(self, stream: LeasedStream) -> None:
        for what in (stream.synchronize, stream.release):
            try:
                what()
            except StaleHandleError:
                continue
            except (ClosedError, DeviceFault):
                return
            self._checker.found(f"V5 a lease that had ended could be used: {what.__name__} of {stream!r}")

    def _ended(self) -> Iterator[str]:
        for pool in self._old:
            statistics = pool.statistics()
            if statistics.leases or statistics.waiting:
                yield f"V6 {pool!r} has {statistics.leases} leases and {statistics.waiting} who wait after the end"
