"""G2: resources and adaptors: each does its one job, also on top of the others."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    Device,
    DeviceOutOfMemory,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
    WrongDeviceError,
)
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from aiocuda.memory import (
    Adaptor,
    FailingResource,
    LimitResource,
    MemoryResource,
    PoolResource,
    ScrubbingResource,
    SizeClassResource,
    StatisticsResource,
    TrackingResource,
)
from aiocuda.memory.adaptors._sizes import size_class
from tests.helpers import Latch, Peer, Reports, open_peer, quickly, refusal, until
from tests.memory.shadow import all_adaptors

pytestmark = pytest.mark.asyncio

ADAPTORS: dict[str, Callable[[MemoryResource], MemoryResource]] = {
    "none": lambda upstream: upstream,  # the free lists
    "pool": Adaptor,
    "limit": lambda upstream: LimitResource(upstream, 1 << 30),
    "statistics": StatisticsResource,
    "tracking": TrackingResource,
    "failing": FailingResource,
    "scrubbing": lambda upstream: ScrubbingResource(upstream, on_allocate=True),
    "sizes": SizeClassResource,
    "all": all_adaptors,
}


@pytest.fixture(params=ADAPTORS)
def adapted(request: pytest.FixtureRequest, device: Device) -> Device:
    """A device with an adaptor around its pool."""
    device.memory.use(ADAPTORS[request.param])
    return device


# What holds through every adaptor


async def test_memory_is_used_and_goes_back(adapted: Device, stream: Stream, other: Stream) -> None:
    given = np.arange(1000, dtype=np.float32)
    for _ in range(3):
        buffer = await stream.upload(given)
        copied = other.empty_like(buffer)
        other.copy(copied, buffer)
        assert np.array_equal(await other.download(copied), given)
        copied.free()
        buffer.free(other)
    assert adapted.memory.statistics().live_bytes == 0
    await adapted.memory.trim()


async def test_stale_and_foreign_memory_is_refused(adapted: Device, stream: Stream) -> None:
    """Use after free, double free, another device: an error, and no other memory is touched."""
    buffer = stream.empty(1000)
    part = buffer[10:20]
    buffer.free()
    heir = stream.empty(1000)  # perhaps of the same bytes
    filled = stream.fill(heir, 3)
    for use in (
        lambda: stream.fill(buffer, 1),
        lambda: stream.fill(part, 1),
        lambda: stream.download(part),
        lambda: stream.copy(part, np.zeros(10, np.float32)),
        lambda: buffer.free(),
        lambda: part.free(),
        lambda: buffer.address,
        lambda: buffer.add_dependency(filled),
        lambda: buffer.clear_dependencies(),
    ):
        with pytest.raises(StaleHandleError, match="has been freed"):
            use()
    assert (await stream.download(heir) == 3).all()
    async with aiocuda.open_device(driver=HostDriver()) as elsewhere, elsewhere.stream() as foreign:
        for refused in (lambda: foreign.fill(heir, 1), lambda: heir.free(foreign)):
            with pytest.raises(WrongDeviceError):
                refused()
    elsewhere.driver.close()
    assert not heir.freed
    heir.free()


async def test_dropped_memory_comes_back(adapted: Device, stream: Stream) -> None:
    for _ in range(5):
        stream.fill(stream.empty(1000), 1)
        await stream.synchronize()
    gc.collect()

    def swept() -> bool:
        adapted.memory.sweep(resources_of(adapted).loop_states.here().reactor)
        return adapted.memory.statistics().live_bytes == 0

    await until(swept, "the memory")


async def test_frees_and_finalisers_wait_for_nothing(adapted: Device, stream: Stream, other: Stream) -> None:
    """A held kernel on both streams: memory is made, used, freed and dropped, also by another thread, meanwhile."""
    with Latch(adapted) as latch:
        for each in (stream, other):
            latch.hold(each)
            await latch.held()
        buffers = [each.empty(1 << 16) for each in (stream, other) for _ in range(4)]
        for index, buffer in enumerate(buffers):
            (stream, other)[index % 2].fill(buffer, index)
        buffers.pop().free(stream)
        buffers.pop().free()
        del buffer
        dropped = [buffers.pop(), buffers.pop()]
        thread = threading.Thread(target=dropped.clear)  # where the last holder goes, the finaliser runs
        thread.start()
        thread.join()
        buffers.clear()
        wakes = adapted.statistics().watchdog_wakes
        await until(lambda: adapted.statistics().watchdog_wakes > wakes + 1, "the watchdog, which sweeps")
        assert not adapted.driver.stream_query(stream._queue.handle)
        latch.release()
        await quickly(aiocuda.gather(stream.synchronize(), other.synchronize()))
    assert adapted.driver.fault is None


async def test_the_end_gives_everything_back() -> None:
    for build in ADAPTORS.values():
        with Peer() as peer:
            async with aiocuda.open_device(driver=peer.driver) as device:
                device.memory.use(build)
                async with device.stream() as closed:
                    closed.empty(5000).free()
                stream = device.stream()
                stream.empty(3000).free()
                kept = stream.empty(3000)
                await stream.fill(kept, 1)
            assert peer.calls["allocate"] == peer.calls["deallocate"] > 0
            assert peer.inner._memory._pools[0].used == 0


# Putting them in force


async def test_memory_goes_back_to_where_it_came_from(device: Device, stream: Stream) -> None:
    first = device.memory.use(StatisticsResource)
    early = stream.empty(100)
    second = device.memory.use(lambda _: StatisticsResource(PoolResource(device.driver, device.index)))
    late = stream.empty(50)
    assert device.memory.resource is second
    early.free()
    assert (first.statistics().allocations, first.statistics().deallocations) == (1, 1)
    assert (second.statistics().live_bytes, second.statistics().deallocations) == (200, 0)
    device.memory.use(lambda _: first)
    late.free()
    assert (second.statistics().live_bytes, first.statistics().deallocations) == (0, 1)


async def test_what_is_no_resource_is_refused(device: Device) -> None:
    before = device.memory.resource
    refused: list[Any] = [None, "limit", lambda upstream: None, lambda upstream: LimitResource]
    for build in refused:
        with pytest.raises(InvalidTypeError, match="resource"):
            device.memory.use(build)
    assert device.memory.resource is before
    with pytest.raises(InvalidTypeError, match="wraps a MemoryResource"):
        Adaptor(device)  # type: ignore[arg-type]  # the mistake that is meant
    wrong: Any
    for wrong in (-1, 0):
        with pytest.raises(InvalidArgumentError):
            LimitResource(before, wrong)
    for wrong in (True, 1.5, "16", np.zeros((0, 3), np.float32)):
        with pytest.raises(InvalidTypeError):
            LimitResource(before, wrong)
    for wrong in (-1, 256, True, "x"):
        with pytest.raises(InvalidArgumentError):
            ScrubbingResource(before, wrong)
    with pytest.raises(InvalidArgumentError, match="scrubs nothing"):
        ScrubbingResource(before, on_free=False)


class Wrong:
    """A resource whose `allocate` returns something else than an address."""

    def __init__(self, upstream: MemoryResource, address: object) -> None:
        self.upstream = upstream
        self.address: Any = address

    def allocate(self, nbytes: int, stream: int) -> int:
        return self.address  # type: ignore[no-any-return]

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        raise AssertionError("nothing was allocated")

    def trim(self, keep: int = 0) -> None:
        self.upstream.trim(keep)

    def release(self, stream: int) -> None:
        self.upstream.release(stream)

    def __repr__(self) -> str:
        return "<Wrong>"


@pytest.mark.parametrize(
    ("address", "error"),
    [*((wrong, InvalidTypeError) for wrong in (None, "0x1000", 4096.0, True)), (0, InvalidArgumentError),
     (-4096, InvalidArgumentError), (1 << 64, InvalidArgumentError), (1 << 70, InvalidArgumentError)],
)  # fmt: skip
@pytest.mark.parametrize("around", ["none", "limit", "statistics", "tracking"])
async def test_what_is_no_address_is_refused(address: object, error: type[Exception], around: str) -> None:
    """The error names the resource, and the device can be closed."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as stream:
            own = device.memory.resource
            device.memory.use(lambda upstream: ADAPTORS[around](Wrong(upstream, address)))
            with pytest.raises(error, match=rf"<Wrong>.* returned {re.escape(repr(address))}, which is no address"):
                stream.empty(4)
            assert device.memory.statistics().live_bytes == 0
            device.memory.use(lambda _: own)
            await stream.fill(stream.empty(4), 1)
        assert peer.calls["allocate"] == peer.calls["deallocate"] > 0


async def test_address_may_be_an_integer_of_numpy(device: Device, stream: Stream) -> None:
    class OfNumPy(Adaptor):
        def allocate(self, nbytes: int, stream: int) -> int:
            return np.int64(self.upstream.allocate(nbytes, stream))  # type: ignore[return-value]

    device.memory.use(OfNumPy)
    buffer = stream.empty(4)
    assert type(buffer.address) is int
    assert (await stream.download(await stream.upload(np.ones(4)))).tolist() == [1.0] * 4
    buffer.free()


# Size classes


async def test_size_classes_waste_little() -> None:
    for nbytes in [*range(1, 5000), *(3**power for power in range(8, 30))]:
        size = size_class(nbytes)
        assert nbytes <= size <= max(256 * -(-nbytes // 256), nbytes * 9 / 8)
        assert size_class(size) == size


async def test_what_is_freed_serves_its_stream_again_without_the_driver() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        sizes = device.memory.use(SizeClassResource)
        other.empty(1).free()
        buffer = stream.empty(1000)
        address = buffer.address
        stream.fill(buffer, 1)
        buffer.free()
        calls = peer.calls["allocate"], peer.calls["deallocate"]
        of_other = other.empty(1000)
        assert of_other.address != address
        again = stream.empty(1020)  # of the same class
        assert again.address == address
        assert sizes.kept_bytes == 256  # the other stream's first
        assert (peer.calls["allocate"], peer.calls["deallocate"]) == (calls[0] + 1, calls[1])
        await stream.download(again)


async def test_recycled_memory_is_waited_for_by_other_streams(device: Device, stream: Stream, other: Stream) -> None:
    """It was freed after held work of its stream: another stream may not use it before that has passed."""
    device.memory.use(SizeClassResource)
    with Latch(device) as latch:
        buffer = stream.empty(1000)
        latch.hold(stream)
        await latch.held()
        content = stream.download(buffer)
        stream.fill(buffer, 1)
        buffer.free()
        heir = stream.empty(1000)
        filled = other.fill(heir, 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(filled.wait(), 0.03)
        latch.release()
        await quickly(filled)
        await quickly(content)


async def test_recycled_memory_of_an_idle_stream_needs_no_wait(device: Device, stream: Stream, other: Stream) -> None:
    """Later work of its stream does not delay other streams."""
    device.memory.use(SizeClassResource)
    with Latch(device) as latch:
        stream.empty(1000).free()
        await stream.synchronize()
        stream.empty(1000).free()  # nothing is under way now
        latch.hold(stream)
        await latch.held()
        heir = stream.empty(1000)
        await quickly(other.fill(heir, 2))
        latch.release()
        await quickly(stream.synchronize())


async def test_recycled_memory_of_a_lent_stream_is_waited_for() -> None:
    """The work of other libraries in it has no operation."""
    async with open_peer() as (_, device):
        stream, other = device.stream(), device.stream()
        device.memory.use(SizeClassResource)
        buffer = stream.empty(1000)
        await stream.fill(buffer, 1)
        with Latch(device) as latch:
            latch.hold(
                stream
            )  # its kernel is loaded, and its words are pinned, which an imported stream cannot wait for
            await latch.held()
            latch.release()
            await stream.synchronize()
            async with stream.lend() as handle:
                borrowed = aiocuda.Stream.from_handle(device, handle)
                latch.hold(borrowed)
                await latch.held()
                buffer.free()
                heir = stream.empty(1000)
            filled = other.fill(heir, 2)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(filled.wait(), 0.03)
            latch.release()
            await quickly(filled)


async def test_trim_gives_back_what_is_kept(device: Device, stream: Stream) -> None:
    sizes = device.memory.use(SizeClassResource)
    for buffer in [stream.empty(1 << 18, np.uint8) for _ in range(8)]:
        buffer.free()
    assert sizes.kept_bytes == 8 << 18
    await device.memory.trim(1 << 20)
    assert sizes.kept_bytes == 1 << 20
    await stream.synchronize()
    await device.memory.trim()
    assert sizes.kept_bytes == 0
    with pytest.raises(InvalidArgumentError):
        await device.memory.trim(-1)


async def test_trim_is_off_the_loop() -> None:
    async with open_peer() as (peer, device):
        threads: list[int] = []
        peer.before["pool_trim"] = lambda *arguments: threads.append(threading.get_ident())
        stream = device.stream()
        stream.empty(1 << 20, np.uint8).free()
        await stream.synchronize()
        assert await device.memory.trim() == 1 << 20
        assert await device.memory.trim() == 0
        assert len(threads) == 2
        assert threading.get_ident() not in threads


async def test_a_stream_that_ends_leaves_nothing_kept(device: Device) -> None:
    sizes = device.memory.use(SizeClassResource)
    async with device.stream() as stream:
        stream.empty(1000).free()
        assert sizes.kept_bytes > 0
    assert sizes.kept_bytes == 0
    with pytest.raises(ZeroDivisionError):
        async with device.stream() as stream:
            stream.empty(1000).free()
            raise ZeroDivisionError
    await until(lambda: sizes.kept_bytes == 0, "the end of the stream that was left")


async def test_what_is_kept_for_a_stream_that_ends_may_be_refused() -> None:
    async with open_peer() as (peer, device):
        device.memory.use(SizeClassResource)
        with Reports() as reports:
            async with device.stream() as stream:
                stream.empty(1000).free()
                peer.refuse("deallocate")
            assert [type(failure) for failure in reports.failures] == [DriverError]


class Trimming(Adaptor):
    """Trims all memory of its device during each free."""

    trim_all: Callable[[], object] | None = None

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        if self.trim_all is not None:
            self.trim_all()
        super().deallocate(address, nbytes, stream)


async def test_resource_below_size_classes_may_trim_during_the_end_of_a_stream() -> None:
    """The end of the stream waited for itself: it holds a lock around each free of kept memory."""
    async with open_peer() as (peer, device):
        trimming = device.memory.use(Trimming)
        sizes = device.memory.use(SizeClassResource)
        allocated = peer.calls["deallocate"]
        async with device.stream() as stream:
            for buffer in [stream.empty(1000) for _ in range(3)]:
                buffer.free()
            trimming.trim_all = sizes.trim
        assert sizes.kept_bytes == 0
        assert peer.calls["deallocate"] == allocated + 3
        assert device.memory.live_bytes == 0


async def test_streams_of_a_closed_loop_leave_nothing_kept() -> None:
    async with open_peer() as (_, device):
        sizes = device.memory.use(SizeClassResource)

        streams: list[Stream] = []

        async def elsewhere() -> None:
            streams.append(device.stream())
            streams[0].empty(1000).free()

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        async with device.stream() as stream:
            await until(
                lambda: resources_of(device).loop_states.reclaim() and sizes.kept_bytes == 0, "the orphan's end"
            )
            await stream.synchronize()


# The others


async def test_limit(device: Device, stream: Stream) -> None:
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 1000))
    first = stream.empty(600, np.uint8)
    with pytest.raises(DeviceOutOfMemory, match="pass the limit of 1,000") as caught:
        stream.empty(401, np.uint8)
    error = caught.value
    assert (error.requested, error.live, limit.limit) == (401, 600, 1000)
    assert error.__dict__["limit"] == 1000
    second = stream.empty(400, np.uint8)
    first.free()
    assert limit.live_bytes == 400
    second.free()
    stream.empty(1000, np.uint8).free()


async def test_a_limit_below_a_cache_is_met_by_a_trim(device: Device, stream: Stream) -> None:
    """Cached memory is freed, and the allocation is repeated once."""
    device.memory.use(lambda upstream: SizeClassResource(LimitResource(upstream, 1 << 20)))
    for _ in range(3):
        stream.empty(1 << 19, np.uint8).free()
        stream.empty((1 << 20) - (1 << 16), np.uint8).free()


async def test_statistics_of_a_resource(device: Device, stream: Stream) -> None:
    counts = device.memory.use(lambda upstream: StatisticsResource(LimitResource(upstream, 5000)))
    buffers = [stream.empty(size, np.uint8) for size in (100, 128, 129)]
    with pytest.raises(DeviceOutOfMemory):
        stream.empty(5000, np.uint8)
    statistics = counts.statistics()
    assert (statistics.live_bytes, statistics.peak_bytes, statistics.by_class) == (357, 357, {128: 228, 256: 129})
    assert (statistics.allocations, statistics.deallocations, statistics.refusals) == (3, 0, 2)
    for buffer in buffers:
        buffer.free()
    statistics = counts.statistics()
    assert (statistics.live_bytes, statistics.peak_bytes, statistics.by_class) == (0, 357, {})
    assert statistics.deallocations == 3


async def test_tracking_names_the_line(device: Device, stream: Stream) -> None:
    tracking = device.memory.use(TrackingResource)
    small = stream.empty(10)
    line = small_line = test_tracking_names_the_line.__code__.co_firstlineno + 2
    large = [await stream.upload(np.zeros(1000, np.float32)) for _ in range(2)]
    assert [allocation.nbytes for allocation in tracking.live()] == [40, 4000, 4000]
    assert tracking.live()[0].site == f"{__file__}:{line}"
    assert tracking.report().splitlines() == [
        f"{8000:>15,} bytes in {2:>6,} blocks at {__file__}:{small_line + 2}",
        f"{40:>15,} bytes in {1:>6,} blocks at {__file__}:{small_line}",
    ]
    small.free()
    for buffer in large:
        buffer.free()
    assert tracking.live() == []


async def test_a_free_that_fails_is_still_tracked_and_counted(device: Device, stream: Stream) -> None:
    tracking = device.memory.use(
        lambda upstream: TrackingResource(FailingResource(upstream, deallocations={1}, error=refusal))
    )
    buffer = stream.empty(10)
    with pytest.raises(DriverError):
        buffer.free()
    assert [allocation.nbytes for allocation in tracking.live()] == [40]
    assert device.memory.statistics().live_bytes == 40
    assert not buffer.freed
    buffer.free()
    assert (tracking.live(), device.memory.statistics().live_bytes) == ([], 0)


@pytest.mark.parametrize("error", [None, refusal])
async def test_failures_that_are_asked_for(device: Device, stream: Stream, error: Any) -> None:
    """P24: whatever fails, nothing leaks, and the next allocation works."""
    counts = device.memory.use(StatisticsResource)
    failing = device.memory.use(lambda upstream: FailingResource(upstream, allocations={2, 3}, error=error))
    kept = stream.empty(4)
    with pytest.raises(DeviceOutOfMemory if error is None else DriverError):
        stream.upload(np.zeros(100, np.float32))
    assert failing.allocated == (3 if error is None else 2)  # no room is tried once more
    failing.allocations = ()
    assert counts.statistics().live_bytes == device.memory.statistics().live_bytes == 16
    failing.when = lambda nbytes, stream: nbytes > 1000
    with pytest.raises(DeviceOutOfMemory if error is None else DriverError):
        stream.empty(1000)
    assert (await stream.download(await stream.upload(np.ones(100, np.float32)))).sum() == 100
    kept.free()


@pytest.mark.parametrize("when", ["on_free", "on_allocate"])
async def test_scrubbed_memory_is_read_back(device: Device, stream: Stream, when: str) -> None:
    """Memory that is used again has the pattern, and not its previous content."""
    flags = {"on_free": when == "on_free", "on_allocate": when == "on_allocate"}
    device.memory.use(lambda upstream: ScrubbingResource(SizeClassResource(upstream), 0xA5, **flags))
    secret = await stream.upload(np.full(1000, 0x5EC2E7, np.uint32))
    address = secret.address
    secret.free()
    heir = stream.empty(1000, np.uint32)
    assert heir.address == address
    assert (await stream.download(heir) == 0xA5A5A5A5).all()


async def test_without_scrubbing_it_has_its_previous_content(device: Device, stream: Stream) -> None:
    """The test above could fail."""
    device.memory.use(SizeClassResource)
    secret = await stream.upload(np.full(1000, 0x5EC2E7, np.uint32))
    secret.free()
    assert (await stream.download(stream.empty(1000, np.uint32)) == 0x5EC2E7).all()


async def test_memory_that_cannot_be_scrubbed_is_not_allocated() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        counts = device.memory.use(StatisticsResource)
        device.memory.use(lambda upstream: ScrubbingResource(upstream, on_allocate=True))
        peer.refuse("fill")
        with pytest.raises(DriverError):
            stream.empty(100)
        assert counts.statistics().live_bytes == device.memory.statistics().live_bytes == 0
        stream.empty(100).free()
