"""Requests in batches: a run of a `MicroBatcher` on the host driver."""

from __future__ import annotations

import asyncio
import random

import numpy as np

import aiocuda
from aiocuda.serving import Batch, MicroBatcher

from .kernels import Watched
from .svg import Axis, Colour, Page

__all__ = ["draw"]

REQUESTS, MOST = 36, 8
GAP_S, KERNEL_S, WAIT_S = 0.0011, 0.010, 0.004
SHADES: tuple[Colour, ...] = ("blue", "orange", "green", "purple")


class _Run(Watched):
    """When each request arrived and was answered; when each batch began and ended, with the numbers of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: dict[int, float] = {}
        self.answered: dict[int, float] = {}
        self.batches: list[tuple[float, float, list[int]]] = []

    async def infer(self, batch: Batch[int]) -> list[int]:
        """The function of the batcher."""
        began = self.now()
        rows = await batch.stream.upload(np.array(batch.items, np.float32))
        await batch.stream.launch(self.kernel, 1, 1, rows, KERNEL_S)
        self.batches.append((began, self.now(), list(batch.items)))
        return list(batch.items)


async def record() -> _Run:
    """Return the run. The gaps between the requests are random, with a fixed seed."""
    run, gaps = _Run(), random.Random(5)
    async with aiocuda.open_device(driver="host") as device:
        await device.load(run.kernel)
        async with MicroBatcher(run.infer, max_batch_size=MOST, batch_wait_timeout_s=WAIT_S, device=device) as batcher:
            await batcher.submit(-1)  # opens the stream
            run.batches.clear()

            async def request(number: int) -> None:
                run.arrived[number] = run.now()
                await batcher.submit(number)
                run.answered[number] = run.now()

            run.start()
            async with asyncio.TaskGroup() as group:
                for number in range(REQUESTS):
                    group.create_task(request(number))
                    await asyncio.sleep(gaps.expovariate(1 / GAP_S))
    return run


def draw() -> str:
    """Return the picture of a run."""
    run = asyncio.run(record())
    rows = 13.0
    bottom = 150 + rows * REQUESTS
    page = Page(
        f"{REQUESTS} requests in {len(run.batches)} batches",
        "Each row is a request: it waits in the queue, and then its batch is computed. Requests that arrive while a "
        "batch runs form the next batch.",
        bottom + 76,
    )
    axis = Axis(0, max(run.answered.values()) * 1.02, 106, 694)
    page.axis(axis, 74, bottom, "time, ms")
    page.text(
        20,
        58,
        f"thin: in the queue; wide: its batch is computed; numbers: requests in a batch of at most {MOST}",
        kind="note",
    )
    page.text(20, 101, "batches")
    page.text(20, 156, "requests")
    for number, (began, ended, items) in enumerate(run.batches):
        shade = SHADES[number % len(SHADES)]
        left, right = axis.at(began), axis.at(ended)
        label = str(len(items))
        page.bar(
            left, 80, right - left, 34, shade, label=label, tooltip=f"batch of {label}: {began:.1f} to {ended:.1f} ms"
        )
        for item in items:
            y = 146 + rows * item
            page.line((axis.at(run.arrived[item]), y), (left, y), colour="grey", width=3)
            wait, total = began - run.arrived[item], run.answered[item] - run.arrived[item]
            tooltip = f"request {item}: {wait:.1f} ms in the queue, answered after {total:.1f} ms"
            page.bar(left, y - 4.5, axis.at(run.answered[item]) - left, 9, shade, tooltip=tooltip)
    return page.svg()
