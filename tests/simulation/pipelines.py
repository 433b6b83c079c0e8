"""Pipelines of a random program: V10 is checked while items move through the slots."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocuda import Device, Operation, Pipeline, Stage
from tests.simulation.kernels import AFFINE

if TYPE_CHECKING:
    from tests.simulation.actions import Actions

__all__ = ["run_pipeline"]

_SIZE = 64


async def run_pipeline(actions: Actions, device: Device) -> None:
    """Upload some items, run a kernel on each and download them; perhaps leave before the end."""
    checker = actions.checker
    depth, count = 1 + actions.below(3), 1 + actions.below(6)
    # A slot is busy until the result after its own is asked for.
    started = returned = 0

    def upload(slot: Any) -> Operation[Any]:
        nonlocal started
        started += 1
        if started - returned > depth:
            checker.report(f"V10 {started - returned} slots of {depth} are busy")
        operation: Operation[Any] = slot.stream.copy(slot.buffer("x", _SIZE, np.uint32), slot.item)
        return operation

    def compute(slot: Any) -> Operation[Any]:
        operation: Operation[Any] = slot.stream.launch(AFFINE, 1, 32, slot.buffer("x", _SIZE, np.uint32), _SIZE, 3, 1)
        return operation

    def download(slot: Any) -> Operation[Any]:
        operation: Operation[Any] = slot.stream.download(slot.buffer("x", _SIZE, np.uint32))
        return operation

    items = [actions.values(_SIZE) for _ in range(count)]
    stages = [Stage("up", upload), Stage("compute", compute), Stage("down", download)]
    pipeline = Pipeline(device, stages, depth=depth)
    actions.operation_count += 3 * count
    index = 0
    async with contextlib.aclosing(pipeline.run(items)) as results:
        async for result in results:
            if not np.array_equal(result, items[index] * np.uint32(3) + np.uint32(1)):
                checker.report(f"V10 result {index} of a pipeline does not belong to item {index}")
            index += 1
            if actions.below(12) == 0:
                break
            await actions.pause()
            returned = index
