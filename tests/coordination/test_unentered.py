"""Blocks that no task has entered yet: operations from their creation on."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    BusyError,
    ClosedError,
    CycleError,
    Device,
    DeviceFault,
    InvalidTypeError,
    SkippedError,
    WrongLoopError,
)
from aiocuda.coordination import Node
from tests.coordination.graphs import BUMP, ITEMS
from tests.helpers import TRAP, in_thread, quickly, turns

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def skipped_with(node: Node[Any], text: str) -> None:
    with pytest.raises(SkippedError, match=re.escape(text)) as caught:
        await quickly(node)
    assert isinstance(caught.value.__cause__, ClosedError)


async def test_later_operations_wait_for_its_bytes(device: Device) -> None:
    """A reader, a writer and an operation of another block; the content is that of the order of the calls."""
    async with AsyncCoordinator(device) as coordinator:
        buffer = await coordinator.upload(ONES)
        block = coordinator.operation("kernel", reads=[buffer], writes=[buffer])
        bumped = coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS)
        second = coordinator.operation("kernel", writes=[buffer])
        assert (block in bumped.dependencies, second.dependencies) == (True, (bumped,))
        download = coordinator.download(buffer)
        await turns(3)
        assert [node.state for node in (block, bumped, second, download)] == ["waiting"] * 4
        async with block:
            assert block.stream is not None
            block.stream.fill(buffer, 4)
        between = await quickly(bumped)
        assert between is None
        async with second:
            assert second.stream is not None
            second.stream.fill(buffer, 9)
        np.testing.assert_array_equal(await quickly(download), 9 * ONES)


async def test_its_dependencies_are_those_of_its_creation(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        async with coordinator.operation("kernel") as gate:
            block = coordinator.operation("kernel", after=gate)
            assert block.dependencies == (gate,)
            entering = asyncio.create_task(block.__aenter__())
            await turns(3)
            assert block.state == "waiting"
        await quickly(entering)
        assert block.state == "open"
        await block.__aexit__(None, None, None)


async def test_cycles_among_blocks_are_found(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        buffer = await coordinator.upload(ONES)
        first = coordinator.operation("kernel", writes=[buffer], description="a")
        second = coordinator.operation("kernel", reads=[buffer], description="b")
        third = coordinator.operation("kernel", after=second, description="c")
        with pytest.raises(CycleError, match="'a' → kernel 4 'c' → kernel 3 'b' → kernel 2 'a'"):
            coordinator.add_dependency(first, third)
        for block in (first, second, third):
            async with block:
                pass


async def test_edges_are_added_until_the_block_begins(device: Device) -> None:
    order: list[str] = []

    async with AsyncCoordinator(device) as coordinator:
        late = coordinator.host(order.append, "late")
        block = coordinator.operation("kernel")
        coordinator.add_dependency(block, late)
        async with block:
            assert late.done()
            with pytest.raises(ClosedError, match="is open: its block has begun"):
                coordinator.add_dependency(block, coordinator.upload(ONES))
        await quickly(block)
        with pytest.raises(ClosedError, match="has ended"):
            coordinator.add_dependency(block, coordinator.upload(ONES))
        withdrawn = coordinator.operation("kernel", after=coordinator.upload(ONES))
        withdrawn.abandon()
        with pytest.raises(ClosedError, match="has ended: it is abandoned"):
            coordinator.add_dependency(withdrawn, late)
        with pytest.raises(ClosedError, match="was abandoned before it was given to a stream"):
            async with withdrawn:
                pytest.fail("it was withdrawn")
        with pytest.raises(BusyError, match="has been entered before"):
            async with block:
                pytest.fail("it has ended")


async def test_the_reasons_why_an_edge_comes_too_late_are_true(device: Device) -> None:
    def fail() -> None:
        raise LookupError

    async with AsyncCoordinator(device) as coordinator:
        late = coordinator.upload(ONES)
        failed = coordinator.host(fail)
        skipped = coordinator.upload(ONES, after=failed)
        ran = coordinator.host(int)
        await quickly(coordinator.drain())
        assert isinstance(failed.exception(), LookupError)
        for node, reason in ((failed, "it is failed"), (skipped, "it is skipped"), (ran, "has ended")):
            with pytest.raises(ClosedError, match=f"{node.name} .*{reason}|: {node.state}> .*{reason}"):
                coordinator.add_dependency(node, late)


async def test_a_dropped_block_is_withdrawn(device: Device) -> None:
    """Operations that need it are skipped, by name and by its bytes; others run. The end raises an unseen failure."""
    coordinator = AsyncCoordinator(device)
    buffer, other = await coordinator.upload(ONES), await coordinator.upload(ONES)
    block = coordinator.operation("kernel", writes=[buffer], reads=[other], description="dropped")
    named, reader = coordinator.upload(ONES, after=block), coordinator.download(buffer)
    overwriting = coordinator.upload(2 * ONES, other)
    del block
    await turns(3)
    found = coordinator.statistics()
    assert (found.registered, found.abandoned, found.skipped, found.by_kind["kernel"]) == (6, 1, 2, 1)
    for node in (named, reader):
        await skipped_with(node, "kernel 3 'dropped' was dropped before a task entered its block: it never ran")
    await quickly(overwriting)
    await skipped_with(coordinator.download(buffer), "'dropped' was dropped")  # its bytes were never written
    coordinator.upload(ONES, after=coordinator.operation("kernel", description="another"))
    await turns(3)
    with pytest.raises(ClosedError, match="'another' was dropped"):
        await quickly(coordinator.aclose())


async def test_a_dropped_block_that_nothing_needs_is_no_failure(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        for _ in range(3):
            coordinator.operation("kernel")
        await turns(3)
        assert coordinator.statistics().abandoned == 3
        assert not coordinator._scheduler.unentered
        assert not coordinator._scheduler.waiting


async def test_a_block_that_is_collected_on_another_thread_is_withdrawn_on_the_loop(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        block: Any = coordinator.operation("kernel")
        node = coordinator.upload(ONES, after=block)
        told: list[int] = []
        node.add_done_callback(lambda _: told.append(threading.get_ident()))
        cycle = [block]
        cycle.append(cycle)
        del block, cycle
        await asyncio.to_thread(gc.collect)
        await skipped_with(node, "was dropped")
        await turns(3)
        assert told == [threading.get_ident()]


async def test_callbacks_get_the_block(device: Device) -> None:
    told: list[object] = []
    async with AsyncCoordinator(device) as coordinator:
        coordinator.poll()
        block = coordinator.operation("kernel")
        block.add_done_callback(told.append)
        async with block:
            pass
        await quickly(block)
        block.add_done_callback(told.append)
        await turns(3)
        assert told == [block, block]
        assert coordinator.poll() == [block]


async def test_cancelled_while_it_waits_for_its_dependencies(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        async with coordinator.operation("kernel") as gate:
            block = coordinator.operation("kernel", after=gate)
            node = coordinator.upload(ONES, after=block)
            entering = asyncio.create_task(block.__aenter__())
            await turns(3)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            assert block.state == "abandoned"
        await skipped_with(node, "was abandoned")


async def test_a_failed_dependency_skips_it_when_it_is_entered(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        failed = coordinator.host(lambda: 1 // 0)
        block = coordinator.operation("kernel", after=failed)
        await turns()
        assert block.state == "waiting"
        with pytest.raises(SkippedError):
            async with block:
                pytest.fail("it is skipped")
        assert block.state == "skipped"


async def test_a_device_fault_fails_it() -> None:
    device = await aiocuda.open_device(driver="host")
    coordinator = AsyncCoordinator(device)
    block = coordinator.operation("kernel")
    waiter = asyncio.create_task(coordinator.upload(ONES, after=block).wait())
    with pytest.raises(DeviceFault):
        await quickly(coordinator.compute(TRAP, 1, 1))
    with pytest.raises(DeviceFault):
        await quickly(waiter)
    with pytest.raises(DeviceFault):
        async with block:
            pytest.fail("the device has faulted")
    await quickly(coordinator.aclose())
    await device.aclose()


async def test_it_is_entered_on_its_loop_only_and_is_no_argument(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        block = coordinator.operation("kernel")

        async def enter() -> None:
            async with block:
                pytest.fail("it is on another loop")

        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(in_thread, enter)
        with pytest.raises(InvalidTypeError, match="fills no buffer"):
            coordinator.compute(BUMP, 1, 32, block, 1, ITEMS)
        async with block:  # the refused entry has not used it up
            pass


async def test_a_block_that_outlives_its_loop_is_dropped_silently(device: Device) -> None:
    async def make() -> Any:
        coordinator = AsyncCoordinator(device)
        return coordinator, coordinator.operation("kernel")

    coordinator, block = await asyncio.to_thread(in_thread, make)
    del block
    gc.collect()
    assert len(coordinator._scheduler.unentered) == 1  # nothing waits for it: the loop has ended
