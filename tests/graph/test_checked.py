"""E10: the checker sees what a graph does: each launch, and the branches of a capture."""

from __future__ import annotations

import contextlib
import linecache
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Pipeline, Slot, Stage, Stream, StreamGroup, UnorderedAccessWarning
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.stream import Conflict
from tests.graph.kit import N, affine
from tests.helpers import quickly

HERE = Path(__file__).name

pytestmark = pytest.mark.parametrize("driver", [HostDriver, SimulatedDriver])


@contextlib.asynccontextmanager
async def checked(driver: Callable[[], Any]) -> AsyncIterator[tuple[Device, Stream, Stream]]:
    """A checked device with two streams. Its warnings are not shown: tests read `conflicts_of`."""
    with contextlib.closing(driver()) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnorderedAccessWarning)
        async with (
            aiocuda.open_device(driver=made, check=True) as device,
            device.stream(name="left") as left,
            device.stream(name="right") as right,
        ):
            yield device, left, right


def conflicts_of(device: Device) -> list[Conflict]:
    assert device.checker is not None
    return device.checker.conflicts


def source(place: str) -> str:
    """The line of this file at a place."""
    file, _, line = place.rpartition(":")
    assert file.endswith(HERE)
    return linecache.getline(file, int(line)).strip()


def places(device: Device) -> list[tuple[str, str]]:
    return [(source(conflict.first), source(conflict.second)) for conflict in conflicts_of(device)]


# -- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_launch_conflicts_with_unordered_work_on_its_buffers(driver: Callable[[], Any]) -> None:
    async with checked(driver) as (device, left, right):
        x, y = left.empty(N), left.empty(N)
        await left.fill(x, 0)
        await left.fill(y, 0)
        with left.capture() as graph:
            left.copy(y, x)
        right.fill(x, 1)
        graph.launch(left)  # it reads x
        right.download(y)  # it has written y
        assert places(device) == [
            ("right.fill(x, 1)", "graph.launch(left)  # it reads x"),
            ("graph.launch(left)  # it reads x", "right.download(y)  # it has written y"),
        ]
        assert [(each.first_kind, each.second_kind) for each in conflicts_of(device)] == [
            ("fill", "graph"), ("graph", "download"),
        ]  # fmt: skip


@pytest.mark.asyncio
async def test_launches_of_one_graph_are_in_order_on_all_streams(driver: Callable[[], Any]) -> None:
    """The driver runs them one after the other. So what follows one in a stream comes after all before it."""
    async with checked(driver) as (device, left, right):
        x = left.empty(N)
        with left.capture() as graph:
            left.fill(x, 1)
        graph.launch(left)
        graph.launch(right)
        right.download(x)
        assert conflicts_of(device) == []
        left.fill(x, 2)
        assert places(device) == [
            ("graph.launch(right)", "left.fill(x, 2)"),
            ("right.download(x)", "left.fill(x, 2)"),
        ]


@pytest.mark.asyncio
async def test_ordered_launches_do_not_conflict(driver: Callable[[], Any]) -> None:
    async with checked(driver) as (device, left, right), StreamGroup(device, 2) as group:
        x = left.empty(N, np.uint32)
        await left.fill(x, 0)
        with left.capture() as first:
            affine(left, x, 2, 1)
        with right.capture() as second:
            affine(right, x, 3, 1)
        right.wait(first.launch(left))
        launched = second.launch(right)
        left.wait(launched)
        left.fill(x, 1)
        left.download(x[: N // 2])
        left.record()
        group[0].wait(left)
        group.add_dependency(1, 0)
        first.launch(group[1])
        await quickly(group[1].download(x))
        assert conflicts_of(device) == []


@pytest.mark.asyncio
async def test_launch_after_an_update_has_the_new_accesses(driver: Callable[[], Any]) -> None:
    async with checked(driver) as (device, left, right):
        x, y = left.empty(N), left.empty(N)
        await left.fill(x, 0)
        await left.fill(y, 0)
        with left.capture() as graph:
            filled = left.fill(x, 1)
        graph.update(filled, y, 1)
        right.fill(x, 2)
        graph.launch(left)
        assert conflicts_of(device) == []
        right.download(y)
        assert places(device) == [("graph.launch(left)", "right.download(y)")]


@pytest.mark.asyncio
@pytest.mark.parametrize("replay", [False, True])
async def test_pipeline_that_replays_has_the_conflicts_of_its_stages(driver: Callable[[], Any], replay: bool) -> None:
    """The lines are those of the stages, and not of the call that runs the pipeline."""
    async with checked(driver) as (device, left, _):
        shared = left.empty(N)
        await left.fill(shared, 0)

        def write(slot: Slot) -> Any:
            return slot.stream.fill(shared, slot.item and 1)

        def read(slot: Slot) -> Any:
            return slot.stream.download(shared, out=slot.pinned("out", N))

        async with Pipeline(device, [Stage("write", write), Stage("read", read)], replay=replay) as pipeline:
            async for _ in pipeline.run(range(8)):
                pass
        assert set(places(device)) == {(
            "return slot.stream.download(shared, out=slot.pinned(\"out\", N))",
            "return slot.stream.fill(shared, slot.item and 1)",
        )}  # fmt: skip


# -- branches of a capture -------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_branches_of_a_capture_conflict_unless_a_wait_orders_them(driver: Callable[[], Any]) -> None:
    async with checked(driver) as (device, left, right):
        x, y = left.empty(N), left.empty(N)
        await left.fill(x, 0)
        await left.fill(y, 0)
        with left.capture() as graph:
            right.wait(left.fill(x, 1))
            right.copy(y, x)
            left.fill(x, 2)
            left.fill(y[: N // 2], 3)
            left.wait(right)
            left.download(y, out=device.pinned(N))
        assert places(device) == [
            ("right.copy(y, x)", "left.fill(x, 2)"),
            ("right.copy(y, x)", "left.fill(y[: N // 2], 3)"),
        ]
        first = conflicts_of(device)[0]
        assert (first.first_kind, first.second_kind) == ("copy", "fill")
        assert (first.first_stream, first.second_stream) == ("right", "left")
        await quickly(graph.launch(left))
        assert len(conflicts_of(device)) == 2  # a launch is one use of each buffer


@pytest.mark.asyncio
async def test_branches_that_waits_order_do_not_conflict(driver: Callable[[], Any]) -> None:
    async with checked(driver) as (device, left, right), device.stream() as third:
        x, y = left.empty(N, np.uint32), left.empty(N, np.uint32)
        await left.fill(x, 0)
        await left.fill(y, 0)
        with left.capture() as graph:
            filled = left.fill(x, 1)
            right.wait(filled)
            third.wait(filled)
            right.copy(y[: N // 2], x[: N // 2])  # both read x, and write halves of y
            third.copy(y[N // 2 :], x[N // 2 :])
            left.wait(right)
            left.wait(third)
            affine(left, x, 2, 0)
            affine(left, y, 2, 0)
        await quickly(graph.launch(left))
        right.fill(x, 5)
        assert conflicts_of(device) == []


@pytest.mark.asyncio
async def test_update_reports_a_conflict_with_another_branch(driver: Callable[[], Any]) -> None:
    async with checked(driver) as (device, left, right):
        x, y = left.empty(N), left.empty(N)
        await left.fill(x, 0)
        await left.fill(y, 0)
        with left.capture() as graph:
            start = left.fill(x, 1)
            right.wait(start)
            other = right.fill(y, 1)
            left.fill(x, 2)
            left.wait(right)
            end = left.fill(y, 3)
        graph.update(start, y, 1)
        graph.update(end, x, 1)
        assert conflicts_of(device) == []
        graph.update(other, x, 4)
        assert places(device) == [("left.fill(x, 2)", "graph.update(other, x, 4)")]


@pytest.mark.asyncio
async def test_warning_that_is_an_error_discards_the_capture(driver: Callable[[], Any]) -> None:
    async with checked(driver) as (_, left, right):
        x = left.empty(N)
        await left.fill(x, 0)
        warnings.simplefilter("error", UnorderedAccessWarning)
        with pytest.raises(UnorderedAccessWarning, match="fill on left"):
            with left.capture() as graph:
                right.wait(left.synchronize())
                right.fill(x, 1)
                left.fill(x, 2)
        assert graph.closed
        await quickly(left.fill(x, 3))
