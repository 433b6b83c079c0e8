"""Stream pools in a random program: shared and exclusive leases, waits that time out, and pools that are closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from aiocuda import StreamPool
from aiocuda.errors import ClosedError, DeviceFault, StaleHandleError
from tests.simulation import internals
from tests.simulation.kernels import AFFINE

if TYPE_CHECKING:
    from aiocuda import Device
    from aiocuda._base._types import Priority
    from aiocuda._core import Ring
    from aiocuda.pool._lease import LeasedStream
    from aiocuda.pool._strategy import StrategyName
    from aiocuda.pool._workload import Workload
    from tests.simulation.actions import Actions

__all__ = ["StreamPoolActions"]

_STRATEGIES: Final[tuple[StrategyName, ...]] = ("load_balanced", "load_balanced", "round_robin", "priority", "workload")
_WORKLOADS: Final[tuple[Workload | None, ...]] = (None, None, "compute", "memory", "mixed", "coordination")
_PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")


class StreamPoolActions:
    """Actions with one stream pool per device, which all tasks of a program share. Checks V2, V5, V6 and V12."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker
        self._pools: dict[Device, StreamPool] = {}
        self._all_pools: list[StreamPool] = []
        self._leases: dict[Ring, list[LeasedStream]] = {}
        self._checker.final_checks.append(self._check_end)

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return [self.lease, self.lease, self.lease, self.lease, self.lease_ready, self.close]

    def _pool(self) -> StreamPool:
        actions = self._actions
        device = actions.device()
        pool = self._pools.get(device)
        if pool is None:
            minimum = 1 + actions.below(2)
            pool = StreamPool(
                device, minimum, minimum + actions.below(2), strategy=actions.choose(_STRATEGIES),
                keep_seconds=actions.seconds(4),
            )  # fmt: skip
            self._pools[device] = pool
            self._all_pools.append(pool)
        return pool

    async def lease(self) -> None:
        """Lease a stream and use it. The wait for it, or the work, may time out."""
        actions = self._actions
        pool, exclusive = self._pool(), actions.below(3) == 0
        workload, priority = actions.choose(_WORKLOADS), actions.choose(_PRIORITIES)
        limit = actions.seconds(4) if actions.below(3) == 0 else None
        actions.count("lease")
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(limit),
                pool.stream(workload, priority=priority, exclusive=exclusive) as stream,
            ):
                await self._use(pool, stream)

    async def lease_ready(self) -> None:
        """Lease a stream that has no work, or wait until there is one."""
        pool, actions = self._pool(), self._actions
        if pool.has_ready() or actions.below(2):
            with contextlib.suppress(TimeoutError):
                async with await pool.any_ready(timeout=actions.seconds(4)) as stream:
                    self._check_ready(stream)
                    await self._use(pool, stream)
        if actions.below(4) == 0:
            pool.optimize()

    def _check_ready(self, stream: LeasedStream) -> None:
        driver = self._checker.driver
        # A refused call may have left a wait in the stream; the pool may have been closed; and a default
        # stream also has the work that was enqueued through its other names.
        may_be_busy = driver.upsets.happened or stream.closed or not stream.device.asynchronous
        if not may_be_busy and not internals.is_idle(driver, stream):
            self._checker.report(f"V2 {stream!r} was leased as ready, and it has work")

    async def close(self) -> None:
        """Close a pool, even if streams of it are leased."""
        if self._actions.below(3):
            return
        pool = self._pool()
        del self._pools[internals.pool_device(pool)]
        self._actions.count("close pool")
        await pool.aclose()

    async def _use(self, pool: StreamPool, stream: LeasedStream) -> None:
        actions, checker = self._actions, self._checker
        leases = self._leases.setdefault(internals.queue_of_stream(stream), [])
        if leases and (stream.exclusive or any(other.exclusive for other in leases)):
            checker.report(f"V5 {stream!r} is leased twice, and one lease is exclusive: {leases!r}")
        size, maximum = internals.pool_size(pool)
        if size > maximum:
            checker.report(f"V12 {pool!r} has {size} streams, and its maximum is {maximum}")
        leases.append(stream)
        try:
            for _ in range(actions.below(4)):
                self._write(stream)
                if actions.below(3) == 0:
                    await actions.pause()
        finally:
            leases.remove(stream)
        if actions.below(3) == 0:
            stream.release()
            self._use_released(stream)

    def _write(self, stream: LeasedStream) -> None:
        actions = self._actions
        target, value = actions.target(), actions.below(1 << 16)
        count = target.buffer.shape[0]
        if target.device is not stream.device:
            return
        actions.wait_for_users(stream, (target, True))
        if actions.below(2):
            operation = stream.fill(target.buffer, value)
            actions.note_write(stream, target, operation, (), lambda: np.full(count, value, np.uint32))
        else:
            operation = stream.launch(AFFINE, 1, 32, target.buffer, count, 3, value)
            actions.note_write(
                stream, target, operation, (target.version,),
                lambda before: before * np.uint32(3) + np.uint32(value),
            )  # fmt: skip

    def _use_released(self, stream: LeasedStream) -> None:
        for method in (stream.synchronize, stream.release):
            try:
                method()
            except StaleHandleError:
                continue
            except (ClosedError, DeviceFault):
                return
            self._checker.report(f"V5 a released lease could be used: {method.__name__} of {stream!r}")

    def _check_end(self) -> Iterator[str]:
        for pool in self._all_pools:
            statistics = pool.statistics()
            if statistics.leases or statistics.waiting:
                yield f"V6 {pool!r} has {statistics.leases} leases and {statistics.waiting} waiters after the end"
