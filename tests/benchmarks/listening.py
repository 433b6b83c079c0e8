"""The row of labels and listeners: their time beside a launch over a driver that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
    timing. Each round measures all cases, each round in another order, and each case begins with launches that are not
    measured: the interpreter adapts its bytecode to the case before. A sample is the difference to the launch without
    label and listener in the same round.

    Baseline: a launch without label and listener, in ns. Any machine can measure it: no device takes part.
    """
    count, warmup, repeats = setting.count("launches"), setting.count("warmup"), setting.count("repeats")
    kernel = empty()
    async with aiocuda.open_device(driver=IdleDriver()) as device, device.stream() as stream:

        def plain(number: int) -> Any:
            for _ in range(number):
                last = stream.launch(kernel, 1, 1)
            return last

        def labelled(number: int) -> Any:
            for _ in range(number):
                last = stream.launch(kernel, 1, 1, label="request-17")
            return last

        def listeners(number: int) -> ExitStack:
            listening = ExitStack()
            for _ in range(number):
                listening.enter_context(device.listen(Hooks()))
            return listening

        async def each(launches: Callable[[int], Any]) -> float:
            await launches(warmup)
            begin = perf_counter()
            await launches(count)
            return (perf_counter() - begin) / count * 1e9

        cases: dict[str, tuple[Callable[[int], Any], Callable[[], AbstractContextManager[object]]]] = {
            "plain": (plain, nullcontext),
            "label": (labelled, nullcontext),
            "block_ns": (plain, lambda: aiocuda.label("request-17")),
            "listener_ns": (plain, lambda: listeners(1)),
            "three_listeners_ns": (plain, lambda: listeners(3)),
        }
        order, samples = list(cases), {case: list[float]() for case in cases}
        for _ in range(repeats):
            for case in order:
                launches, block = cases[case]
                with block():
                    samples[case].append(await each(launches))
            order.append(order.pop(0))
    baseline = samples.pop("plain")
    further = {
        case: [sample - before for sample, before in zip(taken, baseline, strict=True)]
        for case, taken in samples.items()
    }
    return Measured(further.pop("label"), baseline, {case: median(taken) for case, taken in further.items()})
