"""Strategies: which stream a lease gets, and how its workload is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocuda import Device, InvalidArgumentError, InvalidTypeError, StreamPool
from aiocuda.pool import LeasedStream, NewStream, Offer, Place, classify
from aiocuda.testing import SimulatedDriver
from tests.helpers import AFFINE, SAXPY, SPIN, Latch, until
from tests.pool.test_streams import latch

__all__ = ["latch"]

pytestmark = pytest.mark.asyncio


@pytest.fixture
def simulated_driver(aiocuda_seed: int) -> Any:
    driver = SimulatedDriver(aiocuda_seed)
    yield driver
    driver.close()


async def names(pool: StreamPool, count: int, *workload: Any, **wish: Any) -> list[str]:
    """The streams of leases that are taken and returned one after the other."""
    found = []
    for _ in range(count):
        async with pool.stream(*workload, **wish) as stream:
            found.append(stream.name)
    return found


async def test_round_robin_uses_streams_in_turn(device: Device) -> None:
    async with StreamPool(device, 3, 3, strategy="round_robin") as pool:
        assert await names(pool, 7) == [f"pool-{number % 3}" for number in range(7)]


async def test_round_robin_skips_exclusive_streams(device: Device) -> None:
    async with StreamPool(device, 3, 3, strategy="round_robin") as pool:
        await names(pool, 3)
        async with pool.stream(exclusive=True) as alone:
            assert alone.name == "pool-0"
            assert await names(pool, 4) == ["pool-1", "pool-2", "pool-1", "pool-2"]


async def test_load_balanced_chooses_the_shortest_predicted_time(device: Device, latch: Latch) -> None:
    """By the predicted time, not the number of operations; without a prediction, by their number."""
    async with StreamPool(device, 2, 2) as pool, pool.stream() as left, pool.stream() as right:
        assert left.name != right.name
        await device.load(SPIN)
        for nanoseconds, grid in ((20_000_000, 1), (1_000_000, 2)):
            for _ in range(3):  # its times are learned
                await left.launch(SPIN, grid, 1, nanoseconds)
        for stream in (left, right):
            latch.hold(stream)
        await latch.held()
        left.launch(SPIN, 1, 1, 1000)  # predicted: 20 ms
        for _ in range(2):  # on a busy machine, 1 ms is learned as up to 10
            right.launch(SPIN, 2, 1, 1000)
        assert await names(pool, 2) == [right.name] * 2
        for _ in range(60):
            right.launch(SPIN, 2, 1, 1000)
        assert await names(pool, 2) == [left.name] * 2
        latch.release()


async def test_priority_keeps_streams_for_high_work(device: Device, latch: Latch) -> None:
    async with StreamPool(device, 1, 4, strategy="priority") as pool:
        busy = []
        for _ in range(6):
            async with pool.stream() as stream:
                latch.hold(stream)
                busy.append(stream.name)
        assert len(set(busy)) == 3  # the fourth is kept
        async with pool.stream(priority="high") as high:
            assert high.name not in busy
            assert high.priority == "high"
            latch.hold(high)
        assert set(await names(pool, 4)) <= set(busy)  # not even while it has the least to do
        assert await names(pool, 2, priority="high") == [high.name] * 2
        async with pool.stream(exclusive=True, priority="high"):
            assert set(await names(pool, 2, priority="high")) <= set(busy)  # better than to wait
        latch.release()


@pytest.mark.parametrize("strategy", ["round_robin", "load_balanced", "priority", "workload"])
async def test_pool_of_one_stream_serves_all(device: Device, strategy: Any) -> None:
    async with StreamPool(device, 1, 1, strategy=strategy) as pool:
        for priority in ("low", "high", "normal"):
            assert await names(pool, 2, "memory", priority=priority) == ["pool-0"] * 2
            assert await names(pool, 2, "compute", priority=priority) == ["pool-0"] * 2
        assert pool.statistics().streams == 1


async def test_workload_separates_copies_from_kernels(device: Device, latch: Latch) -> None:
    async with StreamPool(device, 1, 4, strategy="workload") as pool:
        held: dict[str, list[str]] = {"memory": [], "compute": []}
        for workload, streams in held.items():
            for _ in range(4):
                async with pool.stream(workload) as stream:
                    latch.hold(stream)
                    streams.append(stream.name)
        assert len(set(held["memory"])) == len(set(held["compute"])) == 2
        assert not set(held["memory"]) & set(held["compute"])
        assert (await names(pool, 1, SAXPY))[0] in held["compute"]
        assert (await names(pool, 1, "upload"))[0] in held["memory"]
        latch.release()


async def test_idle_stream_for_copies_takes_a_kernel(device: Device, latch: Latch) -> None:
    """Instead of letting it wait for another kernel."""
    async with StreamPool(device, 1, 2, strategy="workload") as pool:
        (memory,) = await names(pool, 1, "memory")
        async with pool.stream("compute") as stream:
            latch.hold(stream)
            assert stream.name != memory
        assert await names(pool, 1, "compute") == [memory]
        latch.release()


async def test_custom_strategy(device: Device) -> None:
    class Newest:
        name = "newest"
        offers: list[Offer]

        def __init__(self) -> None:
            self.offers = []

        def choose(self, offer: Offer) -> Place | NewStream | None:
            self.offers.append(offer)
            return NewStream("low") if offer.room else max(offer.free, key=lambda place: place.number, default=None)

    strategy = Newest()
    async with StreamPool(device, 1, 2, strategy=strategy) as pool:
        assert await names(pool, 3, SAXPY, priority="high") == ["pool-0", "pool-1", "pool-1"]
        offer = strategy.offers[-1]
        assert (offer.workload, offer.priority, offer.room, len(offer.free)) == ("compute", "high", 0, 2)
        assert pool.strategy is strategy
        assert pool.statistics().strategy == "newest"
        assert pool.optimize()[:2] == ("newest", "newest")
        async with pool.stream() as stream:
            assert stream.priority == "low"


async def test_classify(device: Device) -> None:
    """B6."""
    async with device.stream() as stream:
        buffer = stream.empty(4)
        upload = stream.copy(buffer, np.ones(4, np.float32))
        found = {
            "kernel": classify(SAXPY),
            "upload": classify(upload),
            "launch": classify(stream.launch(SAXPY, 1, 4, 4, 1.0, buffer, buffer)),
            "fill": classify(stream.fill(buffer, 1)),
            "event": classify(stream.record()),
            "synchronize": classify(stream.synchronize()),
        }
    assert found == {
        "kernel": "compute",
        "upload": "memory",
        "launch": "compute",
        "fill": "memory",
        "event": "coordination",
        "synchronize": "coordination",
    }
    assert [classify(name) for name in ("download", "prefetch", "copy", "wait", "mixed")] == [
        "memory",
        "memory",
        "memory",
        "coordination",
        "mixed",
    ]
    assert classify(["upload", SAXPY]) == "mixed"
    assert classify(["upload", "wait", "download"]) == "memory"
    assert classify([]) == "coordination"
    with pytest.raises(InvalidArgumentError, match="'uplaod' is no workload"):
        classify("uplaod")
    for nothing in (7, None, b"upload", np.ones(3)):
        with pytest.raises(InvalidTypeError):
            classify(nothing)


async def test_workload_of_a_lease_is_found_from_its_operations(device: Device) -> None:
    """B6, B3: its duration is recorded under that workload, even if the operations were not awaited."""

    async def copies(stream: LeasedStream) -> None:
        await stream.upload(np.ones(4, np.float32))

    async def kernels(stream: LeasedStream) -> None:
        stream.launch(SPIN, 1, 1, 2_000_000)

    async def both(stream: LeasedStream) -> None:
        buffer = await stream.upload(np.ones(4, np.float32))
        await stream.launch(SAXPY, 1, 4, 4, 1.0, buffer, buffer)

    async def order(stream: LeasedStream) -> None:
        await stream.synchronize()

    async with StreamPool(device) as pool:
        await device.load(SPIN)
        for use in (copies, kernels, both, order):
            async with pool.stream() as stream:
                await use(stream)
        async with pool.stream("mixed") as stream:
            await copies(stream)
        await until(lambda: "compute" in pool.statistics().workloads, "the kernel's end")
    found = pool.statistics().workloads
    assert {workload: figures.leases for workload, figures in found.items()} == {
        "compute": 1,
        "memory": 1,
        "mixed": 2,
        "coordination": 1,
    }
    assert found["compute"].average_ms >= 2
    assert found["compute"].seconds * 1e3 == pytest.approx(found["compute"].p99_ms)


async def test_too_short_a_record_changes_nothing(device: Device) -> None:
    async with StreamPool(device, strategy="round_robin") as pool:
        assert pool.optimize() == ("round_robin", "round_robin", 0.0, 0.0)
        for _ in range(31):
            async with pool.stream() as stream:
                await stream.fill(stream.empty(4), 1)
        before, after, memory, compute = pool.optimize()
        assert (before, after, compute) == ("round_robin", "round_robin", 0.0)
        assert memory > 0
        async with pool.stream() as stream:
            await stream.fill(stream.empty(4), 1)
        assert pool.optimize().after == pool.strategy.name == "workload"
        assert pool.statistics().workloads == {}  # the record of the other strategy is not used


async def test_record_of_mixed_leases_changes_nothing(device: Device) -> None:
    """These are the usual leases of a service; a few leases with only copies or kernels must not decide."""
    async with StreamPool(device, strategy="load_balanced") as pool:
        for number in range(60):
            async with pool.stream() as stream:
                buffer = await stream.upload(np.ones(4, np.uint32))
                if number % 20:
                    await stream.launch(AFFINE, 1, 32, buffer, 4, 3, 1)
        found = pool.statistics().workloads
        assert (found["mixed"].leases, found["memory"].leases) == (57, 3)
        assert pool.optimize()[:2] == ("load_balanced", "load_balanced")


async def test_record_with_priorities_changes_nothing(device: Device) -> None:
    """A strategy without priorities would let critical requests wait."""
    async with StreamPool(device, strategy="load_balanced") as pool:
        for number in range(40):
            async with pool.stream(priority="normal" if number else "high") as stream:
                await stream.fill(stream.empty(4), 1)
        assert pool.optimize()[:2] == ("load_balanced", "load_balanced")
