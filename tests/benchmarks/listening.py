"""The row of labels and listeners: their time beside a launch over a driver that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import aiocuda

from .figures import Measured
from .host_time import IdleDriver
from .kernels import empty
from .setting import Setting

__all__ = ["Hooks", "listening"]


class Hooks:
    """A listener with two hooks that do nothing."""

    def on_submit(self, operation: Any) -> None: ...

    def on_resolve(self, operation: Any, start: int, end: int) -> None: ...


async def listening(setting: Setting) -> Measured:
    """Additional ns of a launch with ``label=``, from its enqueue to its end.

    Figures: additional ns of a launch in a block of `aiocuda.label`, of one listener and of three listeners without
    timing. Each sample is the difference of two measurements one after the other.

    Baseline: a launch without label and listener, in ns. Any machine can measure it: no device takes part.
    """
    count, repeats = setting.count("launches"), setting.count("repeats")
    kernel = empty()
    measured, blocks, single, three = Measured([]), list[float](), list[float](), list[float]()
    async with aiocuda.open_device(driver=IdleDriver()) as device, device.stream() as stream:

        def plain() -> Any:
            for _ in range(count):
                last = stream.launch(kernel, 1, 1)
            return last

        def labelled() -> Any:
            for _ in range(count):
                last = stream.launch(kernel, 1, 1, label="request-17")
            return last

        async def each(launch: Callable[[], Any]) -> float:
            begin = perf_counter()
            await launch()
            return (perf_counter() - begin) / count * 1e9

        await each(plain)
        for _ in range(repeats):
            measured.baseline.append(await each(plain))
            measured.samples.append(await each(labelled) - measured.baseline[-1])
            with aiocuda.label("request-17"):
                blocks.append(await each(plain) - measured.baseline[-1])
            for samples, listeners in ((single, 1), (three, 3)):
                with ExitStack() as listening:
                    for _ in range(listeners):
                        listening.enter_context(device.listen(Hooks()))
                    samples.append(await each(plain) - measured.baseline[-1])
    measured.figures["block_ns"] = median(blocks)
    measured.figures["listener_ns"] = median(single)
    measured.figures["three_listeners_ns"] = median(three)
    return measured
