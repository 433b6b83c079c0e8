"""The life of a block of device memory: a run on the host driver, with the addresses of three buffers."""

from __future__ import annotations

import asyncio

import aiocuda

from .kernels import Watched
from .runs import described
from .svg import Axis, Page

__all__ = ["draw"]

SIZE = 1 << 14
SOON_S, NEXT_S = 0.008, 0.006
LONG_A_S, LONG_B_S, LATER_S = 0.025, 0.040, 0.015


class _Run(Watched):
    """The moments of the calls, and which buffers have the memory of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, float] = {}
        self.same = {"y": False, "z": False}

    @property
    def is_described(self) -> bool:
        """True if both kernels read x when it was freed, and y has the memory of x before they ended."""
        if len(self.spans) != 3 or self.same != {"y": True, "z": False}:
            return False
        (a_began, a_ended), (b_began, b_ended), (y_began, _) = self.spans
        return (
            max(a_began, b_began) < self.calls["x.free()"] and self.calls["y = a.empty()"] < a_ended < b_ended < y_began
        )


async def record() -> _Run:
    """Return the run."""
    run = _Run()
    async with aiocuda.open_device(driver="host") as device:
        async with device.stream(name="a") as a, device.stream(name="b") as b:
            await device.load(run.kernel)
            for stream in (a, b):  # starts the threads of the driver
                await stream.launch(run.kernel, 1, 1, stream.empty(1), 0.0)
            run.start()
            x = a.empty(SIZE)
            address = x.address
            run.calls["x = a.empty()"] = run.now()
            a.launch(run.kernel, 1, 1, x, LONG_A_S)
            b.launch(run.kernel, 1, 1, x, LONG_B_S)
            await asyncio.sleep(SOON_S)
            x.free()
            run.calls["x.free()"] = run.now()
            await asyncio.sleep(NEXT_S)
            y, z = a.empty(SIZE), b.empty(SIZE)
            run.calls["y = a.empty()"] = run.now()
            run.same = {"y": y.address == address, "z": z.address == address}
            await a.launch(run.kernel, 1, 1, y, LATER_S)
    return run


def draw() -> str:
    """Return the picture of a run."""
    run = described(record, lambda run: run.is_described)
    page = Page(
        "A block of memory changes its owner while it is in use",
        "Buffer x is freed while two kernels read it. Buffer y of the same stream gets its memory immediately, and the "
        "kernel of y begins only after both. Buffer z of the other stream gets other memory.",
        466,
    )
    (a_began, a_ended), (b_began, b_ended), (y_began, y_ended) = run.spans
    empty, free, again = run.calls.values()
    axis = Axis(0, y_ended * 1.04, 128, 690)
    page.axis(axis, 112, 356, "time, ms")
    for row, (moment, label) in enumerate(((empty, "x = a.empty()"), (free, "x.free()"), (again, "y = a.empty()"))):
        x, y = axis.at(moment), 64.0 + 20 * row
        page.line((x, y + 4), (x, 292), colour="purple", width=2)
        page.text(x + 6, y + 6, label, size=14, bold=True)
    page.text(20, 70, "the host")
    for name, top in (("stream a", 130.0), ("stream b", 184.0), ("block 1", 254.0), ("block 2", 308.0)):
        page.text(20, top + 24, name)

    def span(began: float, ended: float) -> tuple[float, float]:
        return axis.at(began), axis.at(ended) - axis.at(began)

    for (began, ended), top, label in (
        ((a_began, a_ended), 130.0, "reads x"),
        ((y_began, y_ended), 130.0, "works on y"),
        ((b_began, b_ended), 184.0, "reads x"),
    ):
        left, width = span(began, ended)
        page.bar(left, top, width, 38, "blue" if label == "reads x" else "green", label=label)
    page.arrow((axis.at(b_ended), 188), (axis.at(b_ended), 166), colour="blue")
    left, width = span(empty, free)
    page.box(left, 254, width, 38, "blue")
    page.text(left + width / 2, 278, "x", anchor="middle", bold=True)
    left, width = span(free, again)
    page.box(left, 254, width, 38, "grey")
    left, width = span(again, y_ended)
    page.box(left, 254, width, 38, "green")
    page.text(left + width / 2, 278, "y: the memory of x", anchor="middle", bold=True)
    page.box(left, 308, width, 38, "orange")
    page.text(left + width / 2, 332, "z = b.empty(): other memory", anchor="middle", bold=True)
    page.text(20, 450, "No call waited: stream a waits for stream b on the device, before it uses y.", kind="note")
    page.text(20, 428, "Grey: freed, and still read by both kernels.", kind="note")
    return page.svg()
