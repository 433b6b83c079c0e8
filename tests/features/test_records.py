"""Records by hand: rows A7, B7 and K3 of docs/reference/features.md, on every driver."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aiocuda import (
    ClosedError,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
    StreamPool,
    WrongDeviceError,
    open_device,
)
from aiocuda.driver.host import HostDriver
from aiocuda.observe import StreamProfiler
from tests.helpers import AFFINE, quickly

pytestmark = pytest.mark.asyncio

#: Times that nothing takes, with the error for each.
BAD_SECONDS = [
    (-0.1, InvalidArgumentError),
    (math.nan, InvalidArgumentError),
    (math.inf, InvalidArgumentError),
    (10**400, InvalidArgumentError),
    (True, InvalidTypeError),
    ("1", InvalidTypeError),
    (None, InvalidTypeError),
]


async def test_memory_of_another_library_is_recorded(device: Device, stream: Stream, other: Stream) -> None:
    """A7: it counts in the stream's own figures, and in no others."""
    buffer = stream.empty(256, "u1")
    before = device.memory.statistics().live_bytes
    stream.record_memory(1000)
    stream.record_memory(24)
    found = stream.statistics()
    assert (found.live_bytes, found.peak_bytes) == (256 + 1024, 256 + 1024)
    stream.record_memory(-1000)
    buffer.free()
    found = stream.statistics()
    assert (found.live_bytes, found.peak_bytes) == (24, 256 + 1024)
    assert other.statistics().live_bytes == 0
    assert device.memory.statistics().live_bytes == before - 256
    stream.record_memory(-24)
    assert stream.statistics().live_bytes == 0


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [(-101, InvalidArgumentError), (2**63, InvalidArgumentError), (1.0, InvalidTypeError), (True, InvalidTypeError),
     ("1", InvalidTypeError), (None, InvalidTypeError)],
)  # fmt: skip
async def test_memory_that_cannot_be_is_not_recorded(stream: Stream, nbytes: Any, error: type[Exception]) -> None:
    stream.record_memory(100)
    stream.empty(4096, "u1")  # memory of our own is not released by a record
    before = stream.statistics()
    with pytest.raises(error, match="nbytes"):
        stream.record_memory(nbytes)
    assert stream.statistics() == before


async def test_memory_is_recorded_while_the_stream_can_be_used(device: Device) -> None:
    async with StreamPool(device) as pool:
        async with pool.stream() as lease:
            lease.record_memory(8)
            assert lease.statistics().live_bytes == 8
        with pytest.raises(StaleHandleError):
            lease.record_memory(8)
    stream = device.stream()
    await quickly(stream.aclose())
    with pytest.raises(ClosedError):
        stream.record_memory(8)


async def test_time_of_a_workload_is_recorded(device: Device) -> None:
    """B7: as one more lease of its workload, in the statistics and for `optimize`."""
    async with StreamPool(device, strategy="round_robin") as pool:
        for seconds in (0.25, 0.75):
            pool.record("memory", seconds)
        pool.record(AFFINE, 0.125)  # classified as for a lease
        found = pool.statistics().workloads
        assert (found["memory"].leases, found["memory"].seconds, found["memory"].p50_ms) == (2, 1.0, 500.0)
        assert (found["compute"].leases, found["compute"].seconds) == (1, 0.125)
        for _ in range(40):
            pool.record("memory", 0.1)
            pool.record("compute", 0.01)
        assert pool.optimize().after == "workload"


@pytest.mark.parametrize(("seconds", "error"), BAD_SECONDS)
async def test_time_that_cannot_be_is_not_recorded(device: Device, seconds: Any, error: type[Exception]) -> None:
    profiler = StreamProfiler(device)
    async with StreamPool(device) as pool:
        with pytest.raises(error, match="seconds"):
            pool.record("memory", seconds)
        with pytest.raises(error, match="seconds"):
            profiler.record("entry", seconds)
        assert pool.statistics().workloads == {}
    async with profiler:
        pass
    assert profiler.report().total.operations == ()


async def test_unknown_workload_and_closed_pool_are_refused(device: Device) -> None:
    async with StreamPool(device) as pool:
        with pytest.raises(InvalidArgumentError, match="bogus"):
            pool.record("bogus", 1.0)
        with pytest.raises(InvalidTypeError):
            pool.record(3, 1.0)
    with pytest.raises(ClosedError):
        pool.record("memory", 1.0)


async def test_entries_by_hand_are_in_the_report(device: Device, stream: Stream, other: Stream) -> None:
    """K3: with and without a stream; they add nothing to the busy time of the device."""
    profiler = StreamProfiler(device)
    profiler.record("tokenise", 0.5)
    async with profiler:
        await quickly(stream.launch(AFFINE, 1, 1, stream.empty(1, "u4"), 1, 1, 0).wait())
        profiler.record("library", 250.0, stream=stream)
        profiler.record("library", 750.0, stream=stream.name)
        profiler.record("elsewhere", 0.125, stream=other)
    report = profiler.report()
    of_stream = report.stream(stream)
    assert of_stream is report.stream(stream.name)
    (entry,) = [each for each in of_stream.operations if each.kind == "entry"]
    assert (entry.name, entry.count, entry.total_ms, entry.min_ms, entry.max_ms) == ("library", 2, 1e6, 250e3, 750e3)
    assert {each.name for each in of_stream.operations} == {"library", AFFINE.name}
    assert of_stream.busy_ms == of_stream.kernel_ms < 1e6
    assert {each.name for each in report.streams} == {stream.name, other.name}
    entries = {each.name: each.total_ms for each in report.total.operations if each.kind == "entry"}
    assert entries == {"library": 1e6, "elsewhere": 125.0, "tokenise": 500.0}
    assert "tokenise" in str(report)
    profiler.reset()
    assert profiler.report().total.operations == ()


async def test_entries_and_streams_that_cannot_be_are_refused(device: Device, stream: Stream) -> None:
    profiler = StreamProfiler(device)
    with pytest.raises(InvalidTypeError, match="string"):
        profiler.record(3, 1.0)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgumentError, match="empty"):
        profiler.record("", 1.0)
    with pytest.raises(InvalidTypeError, match="its name"):
        profiler.record("entry", 1.0, stream=3)  # type: ignore[arg-type]  # on purpose
    profiler.record("entry", 1.0, stream=stream)
    with pytest.raises(InvalidArgumentError, match=f"'{stream.name}'"):
        profiler.report().stream("bogus")
    with pytest.raises(InvalidTypeError, match="its name"):
        profiler.report().stream(None)  # type: ignore[arg-type]  # on purpose


async def test_stream_of_another_device_is_refused() -> None:
    driver = HostDriver(devices=2)
    async with open_device(0, driver=driver) as first, open_device(1, driver=driver) as second:
        async with second.stream() as stream:
            with pytest.raises(WrongDeviceError):
                StreamProfiler(first).record("entry", 1.0, stream=stream)
