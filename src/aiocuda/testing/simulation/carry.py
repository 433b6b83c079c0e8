"""A pipeline of a random program: items go round in slots, and V10 is looked at where they do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._device import Device
from ...completion._operation import Operation
from ...kernels import Kernel
from ...pipeline import Pipeline, Stage
from .check import Checker

if TYPE_CHECKING:
    from .actions import Actions

__all__ = ["carry"]


async def carry(actions: Actions, device: Device, checker: Checker, kernel: Kernel) -> None:
    """Up, through a kernel and down again."""
    depth, count = 1 + actions.below(3), 1 + actions.below(6)
    size = 64
    begun = returned = 0  # a slot is busy until the result after its own is asked for

    def up(slot: Any) -> Operation[Any]:
        nonlocal begun
        begun += 1
        if begun - returned > depth:
            checker.found(f"V10 {begun - returned} slots of {depth} are busy")
        operation: Operation[Any] = slot.stream.copy(slot.buffer("x", size, np.uint32), slot.item)
        return operation

    def compute(slot: Any) -> Operation[Any]:
        operation: Operation[Any] = slot.stream.launch(kernel, 1, 32, slot.buffer("x", size, np.uint32), size, 3, 1)
        return operation

    def down(slot: Any) -> Operation[Any]:
        operation: Operation[Any] = slot.stream.download(slot.buffer("x", size, np.uint32))
        return operation

    items = [actions._values(size) for _ in range(count)]
    pipeline = Pipeline(device, [Stage("up", up), Stage("compute", compute), Stage("down", down)], depth=depth)
    actions.operations += 3 * count
    index = 0
    async with contextlib.aclosing(pipeline.run(items)) as results:
        async for result in results:
            if not np.array_equal(result, items[index] * np.uint32(3) + np.uint32(1)):
                checker.found(f"V10 result {index} of a pipeline is not that of its item")
            index += 1
            if actions.below(12) == 0:
                break
            await actions._pause()
            returned = index
