"""``python -m tests.benchmarks.steps``: the Python calls of the hot paths above the driver, over an idle driver.

Every call of a function in a file of the package counts, except those of the drivers. The driver finishes all work
at once, so that no await suspends: the numbers are the same in each run.
"""

from __future__ import annotations

import asyncio
import collections
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import numpy as np

import aiocuda
from aiocuda.completion._reactor import Reactor
from aiocuda.serving import Batch, MicroBatcher

from .host_time import IdleDriver

__all__ = ["Steps", "count_steps"]

PACKAGE = os.path.dirname(aiocuda.__file__)
DRIVERS = os.path.join(PACKAGE, "driver")
WATCHDOG = Reactor._watch.__code__

#: Items of a pipeline before the count, so that few of them are timed; and items that are counted.
WARM_ITEMS, ITEMS = 1024, 64

#: Functions that are submitted at once. All but two of them wait on the host.
FUNCTIONS = 64

#: Requests of a batcher. The last one is counted.
REQUESTS = 16


class CountedDriver(IdleDriver):
    """An idle driver in whose time every look at the clock takes 100 ns: the calls are the same on each machine."""

    wants_image = False  # not a property: `count_steps` sets it

    def __init__(self) -> None:
        super().__init__()
        self._time = 0.0

    def now(self) -> float:
        self._time += 1e-7
        return self._time


def _nothing() -> None:
    """Do nothing."""


class Steps:
    """A context manager that counts the calls inside its block.

    Attributes
    ----------
    calls : Counter
        The number of calls, by the file's path in the package and the function's qualified name.
    """

    def __init__(self) -> None:
        self.calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self._is_watchdog = False  # it runs by time, more often on a busy machine

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is WATCHDOG:
            self._is_watchdog = event == "call"
        elif self._is_watchdog:
            return
        elif event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(DRIVERS):
            self.calls[os.path.relpath(code.co_filename, PACKAGE), code.co_qualname] += 1

    @property
    def total(self) -> int:
        """The number of all calls."""
        return self.calls.total()


async def count_steps() -> dict[str, tuple[Steps, int]]:
    """Return, for each path, its steps and the number of times that it was taken."""
    counted: dict[str, tuple[Steps, int]] = {}
    kernel: Any = aiocuda.Kernel("k", source='extern "C" __global__ void k(float *x) {}', host=lambda x: None)
    driver = CountedDriver()
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        driver.wants_image = True  # the stream calls submitted functions as on a GPU
        of_functions = device.stream()
        driver.wants_image = False
        buffer, pinned = stream.empty(64), device.pinned(64)
        array, uploads = np.zeros(64, np.float32), list[aiocuda.Operation[aiocuda.DeviceBuffer]]()
        paths: dict[str, Callable[[], object]] = {
            "copy from pinned memory": lambda: stream.copy(buffer, pinned),
            "launch": lambda: stream.launch(kernel, 1, 1, buffer),
            "empty and free": lambda: stream.empty(64).free(),
            "upload of a small array": lambda: uploads.append(stream.upload(array)),
            "submit": lambda: of_functions.submit(_nothing),
        }
        for name, path in paths.items():
            for _ in range(5):
                path()
                await aiocuda.gather(stream.synchronize(), of_functions.synchronize())
            while uploads:
                uploads.pop().result().free()  # for the next one
            with Steps() as steps:
                path()
            counted[name] = steps, 1
        for _ in range(3):
            with Steps() as steps:
                await aiocuda.gather(*[of_functions.submit(_nothing) for _ in range(FUNCTIONS)])
        counted["submit of one of many"] = steps, FUNCTIONS
        async with aiocuda.AsyncCoordinator(device) as coordinator:
            for _ in range(5):
                await coordinator.compute(kernel, 1, 1, buffer)
            with Steps() as steps:
                operation = coordinator.compute(kernel, 1, 1, buffer)
            counted["coordinator.compute"] = steps, 1
            await operation
        outputs = [device.pinned(64) for _ in range(3)]
        stages = [
            aiocuda.Stage("up", lambda slot: slot.stream.copy(slot.buffer("x", 64), pinned)),
            aiocuda.Stage("go", lambda slot: slot.stream.launch(kernel, 1, 1, slot.buffer("x", 64))),
            aiocuda.Stage("down", lambda slot: slot.stream.copy(outputs[slot.number], slot.buffer("x", 64))),
        ]
        async with aiocuda.Pipeline(device, stages, depth=3) as pipeline:
            async for _ in pipeline.run(range(WARM_ITEMS)):
                pass
            with Steps() as steps:
                async for _ in pipeline.run(range(ITEMS)):
                    pass
        counted["item of three stages"] = steps, ITEMS

        async def answer(batch: Batch[int]) -> list[int]:
            return batch.items

        async with MicroBatcher(answer, max_batch_size=1, device=device) as batcher:
            for item in range(REQUESTS):
                with Steps() as steps:
                    await batcher.submit(item)
        counted["request of a batcher"] = steps, 1
    return counted


def main() -> None:
    """Print the steps."""
    for name, (steps, times) in asyncio.run(count_steps()).items():
        print(f"{name}: {steps.total / times:.1f} calls, {len({file for file, _ in steps.calls})} files")
        for (file, function), count in sorted(steps.calls.items(), key=lambda entry: -entry[1]):
            if count >= times / 2:
                print(f"    {count / times:5.2f}  {file}  {function}")


if __name__ == "__main__":
    main()
