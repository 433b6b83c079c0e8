"""A new priority of a waiting node."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, BusyError, Device, InvalidArgumentError, NoEventLoopError
from aiocuda.coordination._ready_queue import RISES_AFTER
from tests.coordination.graphs import ITEMS
from tests.helpers import quickly

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def test_a_node_that_waits_for_another_one_gets_its_place_by_the_new_priority(device: Device) -> None:
    async with AsyncCoordinator(device, 1) as coordinator:
        async with coordinator.operation("kernel") as gate:
            first = coordinator.upload(ONES, after=gate)
            second = coordinator.upload(ONES, after=gate)
            second.priority = "high"
        await quickly(coordinator.drain())
        assert second.given_at < first.given_at


async def test_ageing_counts_from_the_registration(device: Device) -> None:
    """What has overtaken the node before its priority was set counts afterwards, in parts of a rank, too."""
    async with AsyncCoordinator(device, 1) as coordinator, coordinator.operation("kernel"):
        old: Any = coordinator.upload(ONES, priority="cleanup")
        ready = old.scheduler.ready
        overtaking = [coordinator.upload(ONES, priority="critical") for _ in range(3 * RISES_AFTER)]

        def overtake(count: int) -> None:
            for _ in range(count):
                node: Any = overtaking.pop()
                ready.remove(node)
                ready.served(node)
                node.phase = 0  # it waits: `leave` withdraws it
                old.scheduler.prerequisites_met((node,))

        overtake(RISES_AFTER + 10)
        assert (old.priority, old.rank) == ("cleanup", 3)
        old.priority = "low"
        assert (old.priority, old.rank) == ("low", 2)
        overtake(RISES_AFTER - 11)
        assert old.rank == 2
        overtake(1)
        assert old.rank == 1
        old.priority = "critical"
        assert old.rank == 0
        old.priority = "cleanup"
        assert (old.priority, old.rank) == ("cleanup", 2)


async def test_it_is_too_late_once_the_node_has_begun(device: Device) -> None:
    began, ends = asyncio.Event(), asyncio.Event()

    async def function() -> None:
        began.set()
        await ends.wait()

    async with AsyncCoordinator(device) as coordinator:
        host = coordinator.host(function)
        await began.wait()
        with pytest.raises(BusyError, match="runs already: only an operation that waits"):
            host.priority = "high"
        upload = coordinator.upload(ONES)
        with pytest.raises(BusyError, match=r"has been given to a stream|has ended"):
            upload.priority = "high"
        async with coordinator.operation("kernel") as bracket:
            with pytest.raises(BusyError, match="is open"):
                bracket.priority = "high"
        abandoned = coordinator.upload(ONES, after=host)
        abandoned.abandon()
        with pytest.raises(BusyError, match="has ended: it is abandoned"):
            abandoned.priority = "high"
        ends.set()
        await quickly(host)
        with pytest.raises(BusyError, match="has ended"):
            host.priority = "high"


async def test_bad_priorities_and_other_threads_are_refused(device: Device) -> None:
    async with AsyncCoordinator(device, 1) as coordinator, coordinator.operation("kernel"):
        node: Any = coordinator.upload(ONES)
        for bad in ("urgent", 1, None, ["high"]):
            with pytest.raises(InvalidArgumentError, match="priority is one of critical, high, normal, low, cleanup"):
                node.priority = bad

        def set_priority() -> None:
            node.priority = "high"

        with pytest.raises(NoEventLoopError):
            await asyncio.to_thread(set_priority)
        assert node.priority == "normal"
