"""The coordinator: rows E1 to E10 of docs/reference/features.md, on every driver; more of it in tests/coordination."""

from __future__ import annotations

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, Device, Stream
from aiocuda.coordination._node import KINDS, PRIORITIES
from tests.coordination.graphs import BUMP, ITEMS
from tests.helpers import quickly

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def test_what_was_registered_can_be_read(device: Device, stream: Stream) -> None:
    """E1: kind, priority, stream, dependencies, description, and when it was registered and given."""
    async with AsyncCoordinator(device) as coordinator:
        first = coordinator.upload(ONES)
        for kind in KINDS[:-1]:
            for priority in PRIORITIES:
                node = coordinator.compute(
                    BUMP, 1, 32, first, 1, ITEMS, kind=kind, priority=priority, stream=stream, description="bump"
                )
                assert (node.kind, node.priority, node.stream, node.description) == (kind, priority, stream, "bump")
                assert first.id < node.id
                assert 0 < node.registered_at
        await quickly(node)
        assert node.registered_at <= node.given_at
        async with coordinator.operation("all-reduce", after=[node], description="ours") as bracket:
            behind = coordinator.download(first, after=bracket)
            assert behind.dependencies[-1] is bracket or bracket in behind.dependencies
        assert bracket.name.endswith("'ours'")
        await quickly(behind)
        assert (node.operation is not None and node.operation.stream) is stream


async def test_streams_polling_waiting_and_draining(device: Device) -> None:
    """E3: the verbs, the streams, `poll`, `wait` and `drain`."""
    async with AsyncCoordinator(device) as coordinator:
        up = coordinator.upload(ONES)
        kernel = coordinator.compute(BUMP, 1, 32, up, 1, ITEMS, after=[up])
        down = coordinator.download(up, after=kernel)
        np.testing.assert_array_equal(await quickly(coordinator.wait(down)), 6 * ONES)
        assert up.stream is coordinator.upload_stream
        assert kernel.stream is coordinator.compute_stream
        assert down.stream is coordinator.download_stream
        assert coordinator.poll() <= 3  # some of it may have been seen before
        assert coordinator.statistics().done == 3
        assert coordinator.poll() == 0
        nodes = [coordinator.download(up) for _ in range(5)]
        await quickly(coordinator.drain())
        assert all(node.done() for node in nodes)


async def test_classes_are_stream_priorities(device: Device) -> None:
    """E4: critical and high, normal, low and cleanup."""
    async with AsyncCoordinator(device) as coordinator:
        found = []
        for priority in PRIORITIES:
            node = coordinator.upload(ONES, priority=priority)
            await quickly(node)
            assert node.stream is not None
            found.append(node.stream.priority)
    assert found == ["high", "high", "normal", "low", "low"]


async def test_figures(device: Device) -> None:
    """E7: totals by state and by kind, and what it cost."""
    async with AsyncCoordinator(device) as coordinator:
        for _ in range(40):
            up = coordinator.upload(ONES)
            coordinator.compute(BUMP, 1, 32, up, 1, ITEMS)
        with pytest.raises(ZeroDivisionError):
            async with coordinator.operation("reduction", writes=[up.buffer]):
                raise ZeroDivisionError
        skipped = coordinator.download(up)
        await coordinator.drain()
        found = coordinator.statistics()
        assert found.by_kind == {"transfer": 41, "kernel": 40, "reduction": 1}
        assert (found.registered, found.done, found.failed, found.skipped) == (82, 80, 1, 1)
        assert (found.waiting, found.in_flight, found.abandoned, found.deadlocks) == (0, 0, 0, 0)
        assert 0 < found.average_overhead < 0.1
        assert skipped.state == "skipped"
