"""Groups of streams: row C5 of docs/reference/features.md, on every driver."""

from __future__ import annotations

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device, Stream, StreamGroup, StreamPool
from tests.helpers import Latch, quickly, until

pytestmark = pytest.mark.asyncio


async def test_group_of_given_streams_neither_owns_nor_closes_them(device: Device, latch: Latch) -> None:
    """C5: of the device, leased and imported, with different priorities, by the objects that the program has."""
    x = np.ones(4, np.float32)
    async with (
        device.stream("high") as up,
        device.stream("low") as other,
        device.stream() as free,
        StreamPool(device, maximum=1) as pool,
        pool.stream() as lease,
    ):
        imported = Stream.from_handle(device, other)
        buffer, ours, theirs = up.empty(4), lease.empty(4), other.empty(4)
        await aiocuda.gather(lease.fill(ours, 0), up.copy(buffer, x))  # the first upload makes its staging buffer
        async with StreamGroup(device, {"up": up, "work": lease, "theirs": imported}) as group:
            assert group.names == ("up", "work", "theirs")
            assert [*group] == [group["up"], group[1], group[imported]] == [up, lease, imported]
            assert [stream.priority for stream in (up, other)] == ["high", "low"]
            group.add_dependency("work", "up")
            group.add_dependency(imported, lease)
            latch.hold(up)
            await latch.held()
            up.copy(buffer, x)
            behind = [lease.copy(ours, buffer), imported.copy(theirs, ours)]
            joined = group.barrier()
            await quickly(free.synchronize())
            assert not any(operation.done() for operation in [*behind, joined])
            latch.release()
            await quickly(aiocuda.gather(*behind, joined))
            assert (await other.download(theirs)).tolist() == [1, 1, 1, 1]
            latch.hold(up)
            await latch.held()  # the end of the group waits for nothing
        assert not any(stream.closed for stream in (up, lease, imported))
        await quickly(lease.fill(ours, 2))  # and the dependency has ended with the group
        with pytest.raises(ClosedError, match="this group has been closed"):
            group.barrier()
        latch.release()
        await quickly(up.synchronize())


async def test_given_stream_that_ends_before_the_group(device: Device, latch: Latch) -> None:
    """C5: what depends on it waits for its earlier work, and not for that of the next lease."""
    async with StreamPool(device, maximum=1) as pool, device.stream() as work:
        lease = await pool.stream()
        await quickly(lease.synchronize())
        async with StreamGroup(device, [lease, work]) as group:
            group.add_dependency(1, 0)
            latch.hold(lease)
            await latch.held()
            lease.release()
            behind = work.synchronize()
            async with pool.stream() as following:
                await until(lambda: device.statistics().in_flight == 2, "the two streams")
                assert not behind.done()
                latch.release()
                await quickly(behind)
                latch.hold(following)
                await latch.held()
                await quickly(work.synchronize())
                latch.release()
        assert not work.closed
