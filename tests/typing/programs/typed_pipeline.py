"""A pipeline of three stages, with types of its items and results, and one without."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import Pipeline, Slot, Stage
from aiocuda.pipeline import PipelineRun, PipelineStats, Ticket

WIDTH = 8

double = aiocuda.Kernel(
    "twice",
    source='extern "C" __global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }',
    host=lambda x, n: x.__imul__(2),
)


def upload(slot: Slot) -> aiocuda.Operation[None]:
    slot.pinned("rows", WIDTH)[:] = slot.item
    return slot.stream.copy(slot.buffer("x", WIDTH), slot.pinned("rows", WIDTH))


def compute(slot: Slot) -> aiocuda.Operation[None]:
    return slot.stream.launch(double, slot.buffer("x"), WIDTH, n=WIDTH)


async def download(slot: Slot) -> float:
    return float((await slot.stream.download(slot.buffer("x"))).sum())


def stages() -> list[Stage]:
    return [Stage("upload", upload), Stage("compute", compute), Stage("download", download)]


Row = npt.NDArray[np.float32]


async def typed(device: aiocuda.Device, rows: list[Row]) -> list[float]:
    pipeline: Pipeline[Row, float] = Pipeline(device, stages())
    async with pipeline as entered:
        assert_type(entered, Pipeline[Row, float])
        run = pipeline.run(rows)
        assert_type(run, PipelineRun[float])
        async with contextlib.aclosing(run) as results:
            found = [result async for result in results]
        tickets = [await pipeline.submit(row) for row in rows]
        assert_type(tickets, list[Ticket[float]])
        assert_type(await tickets[0], float)
        assert_type(tickets[0].result(), float)
        assert found == assert_type(await aiocuda.gather(*tickets), list[float])
        async for ticket in aiocuda.as_completed(tickets):
            assert_type(ticket, Ticket[float])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(tickets[0].wait())
        assert_type(task.result(), float)
        assert_type(await pipeline.execute_iteration(rows[0]), float)
        assert_type(pipeline.statistics(), PipelineStats)
    return found


async def untyped(device: aiocuda.Device, rows: list[Row]) -> list[Any]:
    async with Pipeline(device, stages(), depth=2) as pipeline:
        assert_type(pipeline, Pipeline[Any, Any])
        assert_type(await (await pipeline.submit(rows[0])), Any)
        return [result async for result in pipeline.run(rows)]


async def main() -> None:
    rows = [np.full(WIDTH, number, np.float32) for number in range(5)]
    expected = [2.0 * WIDTH * number for number in range(5)]
    async with aiocuda.open_device(driver="host") as device:
        assert await typed(device, rows) == expected
        assert await untyped(device, rows) == expected
        async with Pipeline[Row, float](device, stages()) as pipeline:
            assert_type(await pipeline.execute_iteration(rows[1]), float)
