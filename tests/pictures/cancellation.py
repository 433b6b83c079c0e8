"""A cancelled await: a run on the host driver, in which one of two waiters gives up."""

from __future__ import annotations

import asyncio

import aiocuda
from aiocuda import Operation

from .kernels import Watched
from .runs import described
from .svg import Axis, Page

__all__ = ["draw"]

SIZE = 1 << 14
KERNEL_S, TIMEOUT_S, NEXT_S = 0.040, 0.015, 0.012


class _Run(Watched):
    """The moments of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, float] = {}
        self.is_reused = False


async def record() -> _Run:
    """Return the run."""
    run = _Run()
    async with aiocuda.open_device(driver="host") as device, device.stream(name="a") as stream:
        await device.load(run.kernel)
        await stream.launch(run.kernel, 1, 1, stream.empty(1), 0.0)  # starts the threads of the driver
        run.start()
        x = stream.empty(SIZE)
        address = x.address
        operation = stream.launch(run.kernel, 1, 1, x, KERNEL_S)
        del x  # the operation keeps the memory

        async def impatient(operation: Operation[None]) -> None:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await operation
            except TimeoutError:
                run.moments["gave up"] = run.now()

        async def patient(operation: Operation[None]) -> None:
            await operation
            run.moments["result"] = run.now()

        await asyncio.gather(impatient(operation), patient(operation))
        del operation
        y = stream.empty(SIZE)
        run.moments["y"] = run.now()
        run.is_reused = y.address == address
        await stream.launch(run.kernel, 1, 1, y, NEXT_S)
        run.moments["end"] = run.now()
    return run


def draw() -> str:
    """Return the picture of a run."""
    run = described(record, lambda run: run.is_reused and "gave up" in run.moments and len(run.spans) == 2)
    page = Page(
        "Cancelling an await does not cancel the work",
        "Task A stops waiting at its time-out. The kernel goes on, task B gets the result, and the memory is used "
        "again only after the kernel.",
        376,
    )
    axis = Axis(0, run.moments["end"] * 1.05, 128, 690)
    page.axis(axis, 60, 306, "time, ms")
    gave_up, result, again, end = (axis.at(run.moments[name]) for name in ("gave up", "result", "y", "end"))
    for name, top in (("task A", 66), ("task B", 118), ("stream", 176), ("memory", 240)):
        page.text(20, top + 25, name)
    page.line((axis.left, 86), (gave_up, 86), colour="purple", width=4)
    page.cross(gave_up, 86, "red")
    page.text(gave_up + 14, 91, f"TimeoutError at {run.moments['gave up']:.0f} ms: only this await ends")
    page.line((axis.left, 138), (result, 138), colour="purple", width=4)
    page.dot(result, 138, "green")
    page.text(result + 12, 143, f"result, {run.moments['result']:.0f} ms", size=14)
    (began, ended), (next_began, next_ended) = run.spans
    page.bar(axis.at(began), 176, axis.at(ended) - axis.at(began), 40, "blue", label="the kernel goes on, to its end")
    page.bar(axis.at(next_began), 176, axis.at(next_ended) - axis.at(next_began), 40, "green", label="next")
    page.line((gave_up, 94), (gave_up, 172), colour="red", dashed=True)
    page.box(axis.left, 240, result - axis.left, 40, "blue")
    page.text((axis.left + result) / 2, 265, "x: dropped, held by the kernel", anchor="middle")
    page.box(again, 240, end - again, 40, "green")
    page.text((again + end) / 2, 265, "y, same place", anchor="middle", size=14)
    return page.svg()
