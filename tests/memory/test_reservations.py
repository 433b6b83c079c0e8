"""H6: adaptors count unified memory, refuse it, and leave everything as it was when one of them refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, DeviceFault, DeviceOutOfMemory, DriverError, InvalidTypeError, Stream
from aiocuda.memory import (
    Adaptor,
    Allocation,
    FailingResource,
    LimitResource,
    MemoryResource,
    Reservation,
    ScrubbingResource,
    SizeClassResource,
    StatisticsResource,
    TrackingResource,
)
from tests.helpers import TRAP, Latch, Reports, in_thread, open_peer, quickly, refusal, until
from tests.memory.test_managed import given_back

pytestmark = pytest.mark.asyncio


class Mine:
    """A resource with the four methods of `MemoryResource` only."""

    def __init__(self, upstream: MemoryResource) -> None:
        self.upstream = upstream
        self.allocate, self.deallocate = upstream.allocate, upstream.deallocate
        self.trim, self.release = upstream.trim, upstream.release


class Odd(Adaptor):
    """Raises what a test requires, or returns something else than a reservation."""

    reserving: BaseException | None = None
    unreserving: BaseException | None = None
    result: Any = None

    def reserve(self, nbytes: int, kind: str) -> Reservation:
        if self.reserving is not None:
            raise self.reserving
        return super().reserve(nbytes, kind) if self.result is None else self.result

    def unreserve(self, reservation: Reservation) -> None:
        super().unreserve(reservation)
        if self.unreserving is not None:
            raise self.unreserving


async def test_a_limit_counts_kept_memory_as_free(device: Device) -> None:
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    for _ in range(3):
        buffer = device.unified(1000, np.uint8)
        with pytest.raises(DeviceOutOfMemory, match="pass the limit of 1,000") as caught:
            device.unified(1, np.uint8)
        assert (caught.value.requested, caught.value.live) == (1, 1000)
        assert limit.live_bytes == 1000
        buffer.free()
    assert device.unified(0, np.uint8).nbytes == 0
    await until(lambda: device.memory.statistics().live_bytes == limit.live_bytes == 0, "the memory")
    assert device.memory.managed.idle_bytes > 0


async def test_memory_in_use_is_live(device: Device, stream: Stream, latch: Latch) -> None:
    """A cancelled wait and a free return no reservation before the device has finished."""
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    buffer = device.unified(1000, np.uint8)
    latch.hold(stream)
    operation = stream.fill(buffer, 1)
    waiter = asyncio.ensure_future(operation.wait())
    await latch.held()
    waiter.cancel()
    buffer.free()
    with pytest.raises(DeviceOutOfMemory):
        stream.empty(1, np.uint8)
    assert limit.live_bytes == 1000
    latch.release()
    await quickly(operation)
    stream.empty(1000, np.uint8).free()


async def test_a_limit_below_a_cache_is_met_by_a_trim(device: Device, stream: Stream) -> None:
    sizes = device.memory.use(lambda upstream: SizeClassResource(LimitResource(upstream, 1 << 20)))
    stream.empty(1 << 19, np.uint8).free()
    assert sizes.kept_bytes == 1 << 19
    device.unified(1 << 20, np.uint8).free()
    assert sizes.kept_bytes == 0


@pytest.mark.parametrize("error", [None, refusal])
async def test_a_lower_adaptor_refuses(device: Device, error: Any) -> None:
    """The adaptors above it count nothing, and the next allocation works."""
    failing = device.memory.use(lambda upstream: FailingResource(upstream, allocations={2, 3}, error=error))
    tracking = device.memory.use(TrackingResource)
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1 << 20))
    counts = device.memory.use(StatisticsResource)
    kept = device.unified(10, np.uint8)
    with pytest.raises(DeviceOutOfMemory if error is None else DriverError):
        device.unified(20, np.uint8)
    assert failing.allocated == (3 if error is None else 2)
    failing.allocations = ()
    other = device.unified(30, np.uint8)
    assert [allocation.nbytes for allocation in tracking.live()] == [10, 30]
    assert counts.statistics()[:5] == (40, 40, 2, 0, 2 if error is None else 1)
    assert limit.live_bytes == device.memory.statistics().live_bytes == 40
    kept.free()
    other.free()
    await until(lambda: device.memory.statistics().live_bytes == limit.live_bytes == 0, "the memory")
    assert (counts.statistics().live_bytes, tracking.live()) == (0, [])


async def test_a_condition_sees_stream_0(device: Device, stream: Stream) -> None:
    device.memory.use(lambda upstream: FailingResource(upstream, when=lambda nbytes, stream: stream == 0))
    stream.empty(10).free()
    with pytest.raises(DeviceOutOfMemory):
        device.unified(10)


@pytest.mark.parametrize("error", [DeviceOutOfMemory("full"), DriverError("odd"), KeyboardInterrupt()])
async def test_a_refusal_of_the_driver_returns_the_reservation(error: BaseException) -> None:
    async with open_peer() as (peer, device):
        tracking = device.memory.use(TrackingResource)
        limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
        peer.refuse("managed_allocate", error=lambda: error)
        with pytest.raises(type(error)):
            device.unified(1000, np.uint8)
        assert (limit.live_bytes, tracking.live()) == (0, [])
        device.unified(1000, np.uint8)


async def test_tracking_names_the_line(device: Device, stream: Stream) -> None:
    tracking = device.memory.use(TrackingResource)
    buffers = [device.unified(16, np.uint8), stream.empty(8, np.uint8)]
    site = f"{__file__}:{test_tracking_names_the_line.__code__.co_firstlineno + 2}"
    address = buffers[1].address
    unified, plain = tracking.live()
    assert unified == Allocation(0, 16, 0, site, "unified")
    assert plain == Allocation(address, 8, stream._queue.handle, site, "device")
    assert tracking.report() == f"{24:>15,} bytes in {2:>6,} blocks at {site}"
    again = device.unified(16, np.uint8)
    buffers[0].free()
    await given_back(device, live=24)
    assert sorted(allocation.nbytes for allocation in tracking.live() if allocation.nbytes > 1) == [8, 16]
    again.free()


async def test_a_reservation_goes_back_to_the_resource_of_its_allocation(device: Device) -> None:
    before = device.memory.resource
    old = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    buffer = device.unified(600, np.uint8)
    new = device.memory.use(lambda _: LimitResource(before, 1000))
    other = device.unified(700, np.uint8)
    assert (old.live_bytes, new.live_bytes) == (600, 700)
    buffer.free()
    await until(lambda: device.memory.statistics().live_bytes == 700, "the memory")
    assert (old.live_bytes, new.live_bytes) == (0, 700)
    other.free()


async def test_resources_without_reserve_are_passed_over(device: Device, stream: Stream) -> None:
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    device.memory.use(Mine)
    counts = device.memory.use(lambda upstream: StatisticsResource(ScrubbingResource(upstream)))
    buffer = device.unified(600, np.uint8)
    assert (limit.live_bytes, counts.statistics().live_bytes) == (600, 600)
    buffer.free()
    device.memory.use(lambda _: Mine(MemoryOnly()))
    device.unified(5000, np.uint8).free()
    await until(lambda: device.memory.statistics().live_bytes == limit.live_bytes == 0, "the memory")


class MemoryOnly(Mine):
    """The lowest resource of a chain: it wraps nothing."""

    def __init__(self) -> None:
        self.allocate = self.deallocate = self.trim = self.release = lambda *arguments: 0  # type: ignore[assignment]


@pytest.mark.parametrize("result", [7, "seven"])
async def test_another_result_is_named(device: Device, result: object) -> None:
    odd = device.memory.use(Odd)
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    odd.result = result
    with pytest.raises(InvalidTypeError, match=f"reserve of <Odd on .*> returned {result!r}, which is no Reservation"):
        device.unified(10)
    assert limit.live_bytes == device.memory.statistics().live_bytes == 0


async def test_a_base_exception_of_user_code_reserves_nothing(device: Device) -> None:
    odd = device.memory.use(Odd)
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    odd.reserving = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        device.unified(10)
    assert limit.live_bytes == device.memory.statistics().live_bytes == 0


async def test_an_error_of_unreserve_is_reported_and_the_memory_used_again(device: Device) -> None:
    odd = device.memory.use(Odd)
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    buffer = device.unified(1000, np.uint8)
    odd.unreserving = ValueError("mine")
    buffer.free()
    with Reports() as reports:
        await until(lambda: device.memory.statistics().live_bytes == 0, "the memory")
    assert reports.failures == [odd.unreserving]
    odd.unreserving = None
    assert limit.live_bytes == 0
    device.unified(1000, np.uint8).free()


async def test_the_end_of_the_device_returns_all() -> None:
    async with open_peer() as (_, device):
        limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
        buffer = device.unified(1000, np.uint8)
    assert limit.live_bytes == 0
    assert not buffer.freed


async def test_after_a_fault_it_stays_live() -> None:
    """The device may still access the memory."""
    async with open_peer() as (_, device):
        limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
        stream = device.stream()
        buffer = device.unified(1000, np.uint8)
        with pytest.raises(DeviceFault):
            await quickly(stream.launch(TRAP, 1, 1))
        del buffer
        assert limit.live_bytes == 1000


async def test_loops_of_two_threads_share_a_limit(device: Device) -> None:
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1 << 20))

    async def allocate() -> None:
        for _ in range(20):
            device.unified(500, np.uint8).free()

    await quickly(asyncio.gather(*(asyncio.to_thread(in_thread, allocate) for _ in range(2))))
    await until(lambda: device.memory.statistics().live_bytes == limit.live_bytes == 0, "the memory")
