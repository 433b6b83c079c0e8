"""`AsyncCoordinator.poll`: the nodes that have finished since its last call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, StaleHandleError
from aiocuda.coordination import Node, _unpolled_nodes
from aiocuda.errors import DeviceFault, NoEventLoopError
from tests.coordination.graphs import BUMP, ITEMS
from tests.helpers import TRAP, quickly

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def test_the_first_poll_returns_the_finished_nodes_that_the_program_holds(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        held = coordinator.upload(ONES)
        download = coordinator.download(held)
        coordinator.upload(ONES)
        await quickly(coordinator.drain())
        gc.collect()
        assert coordinator.poll() == [held, download]
        assert coordinator.poll() == []


async def test_no_result_is_kept_until_the_next_poll(device: Device) -> None:
    class Big:
        """A result."""

    async with AsyncCoordinator(device) as coordinator:
        coordinator.poll()
        source = coordinator.upload(ONES)
        nodes = [coordinator.download(source), coordinator.host(Big), coordinator.host(Big)]
        await quickly(coordinator.drain())
        results = [weakref.ref(await node) for node in nodes]
        ids = [source.id, *(node.id for node in nodes)]
        held = nodes[-1]
        del nodes
        gc.collect()
        assert [result() is None for result in results] == [True, True, False]
        polled = sorted(coordinator.poll(), key=lambda node: node.id)  # the host functions may finish first
        assert [node.id for node in polled] == ids
        assert (polled[0], polled[-1]) == (source, held)
        assert type(await polled[-1]) is Big
        for node in polled[1:-1]:
            assert (node.state, node.exception()) == ("done", None)
            with pytest.raises(StaleHandleError, match=r"result of .* keep it"):
                await node


async def test_no_argument_is_kept_until_the_next_poll(device: Device) -> None:
    """Neither a buffer that the program has dropped, nor a function or its arguments."""
    async with AsyncCoordinator(device) as coordinator:
        coordinator.poll()
        held = coordinator.upload(ONES)
        upload = coordinator.upload(ONES)
        kernel = coordinator.compute(BUMP, 1, 32, upload, 1, ITEMS)

        def function(argument: object) -> None: ...

        argument = {1, 2}
        host = coordinator.host(function, argument, after=kernel)
        await quickly(coordinator.drain())
        dropped = [weakref.ref(thing) for thing in (upload.buffer, upload, function, argument)]
        upload_id = upload.id
        del upload, function, argument
        gc.collect()
        assert [thing() for thing in dropped] == [None] * len(dropped)
        polled = coordinator.poll()
        assert [node.id for node in polled] == [held.id, upload_id, kernel.id, host.id]
        assert (polled[0], polled[2], polled[3]) == (held, kernel, host)
        assert held.buffer.nbytes
        assert (polled[1].state, polled[1].done(), polled[1].exception()) == ("done", True, None)
        with pytest.raises(StaleHandleError, match=r"result of .* keep it"):
            _ = polled[1].buffer
        with pytest.raises(StaleHandleError, match="keep it"):
            await polled[1]


async def test_the_oldest_are_dropped_and_counted(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unpolled_nodes, "MOST_UNPOLLED", 3)
    async with AsyncCoordinator(device) as coordinator:
        coordinator.poll()
        nodes = []
        for _ in range(5):
            nodes.append(coordinator.upload(ONES))
            await quickly(coordinator.drain())
        assert coordinator.statistics().dropped == 2
        assert coordinator.poll() == nodes[2:]
        assert coordinator.statistics().dropped == 2


async def test_an_interrupted_function_is_returned_too(device: Device) -> None:
    def interrupt() -> None:
        raise asyncio.CancelledError

    async with AsyncCoordinator(device) as coordinator:
        coordinator.poll()
        node = coordinator.host(interrupt)
        await quickly(coordinator.drain())
        assert coordinator.poll() == [node]
        assert node.exception() is not None


async def test_a_device_fault_ends_each_node_once() -> None:
    with contextlib.suppress(DeviceFault):
        async with aiocuda.open_device(driver="host") as device, AsyncCoordinator(device, 1) as coordinator:
            coordinator.poll()
            x = coordinator.upload(np.ones(1, np.uint32))
            nodes: list[Node[Any]] = [x, coordinator.compute(TRAP, 1, 1, after=x)]
            nodes += [coordinator.download(x, after=nodes[-1]) for _ in range(3)]
            with pytest.raises(DeviceFault):
                await quickly(nodes[-1])
            polled = coordinator.poll()
            while len(polled) < len(nodes):
                await asyncio.sleep(0)
                polled += coordinator.poll()
            assert polled == sorted(polled, key=lambda node: node.id) == nodes


async def test_it_works_after_the_end_and_refuses_another_thread(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        coordinator.poll()
        node = coordinator.upload(ONES)
        with pytest.raises(NoEventLoopError):
            await asyncio.to_thread(coordinator.poll)
    assert coordinator.poll() == [node]
    assert coordinator.poll() == []
