"""Random programs of collectives and unified memory over 1 to 4 simulated devices, in virtual time, against NumPy.

``python -m tests.coordination.simulation [--seeds N] [--first S]``: exit 1 and a line ``seed S: C1 …`` at a violation.

====  ==========================================================================================================
C1    every buffer has the bytes that the collectives and kernels before it wrote, in the order of their calls
C2    every node ends; without an injected failure, it succeeds
C3    after a failure or a withdrawal, the coordinator and its streams take new work, unless the device has faulted
C4    nothing is left: no stream, no byte of device memory
C5    the nodes deliver a fault: the loop is told of none. A refused call may be that of a marker, which no task reads
====  ==========================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import AsyncCoordinator, Device, DeviceBuffer, UnifiedBuffer
from aiocuda.coordination import Node, _collectives
from aiocuda.coordination._reductions import OPERATIONS
from aiocuda.driver.protocol import Driver
from aiocuda.driver.simulated._upset import Upsets
from aiocuda.errors import AiocudaError, DeviceFault, SkippedError
from aiocuda.testing import SimulatedDriver, Upset
from tests.helpers import AFFINE
from tests.random_programs import check, command, run_in_virtual_time

__all__ = ["CHUNK", "Program", "run", "run_over"]

_Array = npt.NDArray[Any]

#: Items of a buffer, and bytes of a chunk: a buffer has up to seven chunks, and an uneven last one.
ITEMS, CHUNK = 853, 128

TROUBLES = (None, None, None, "refused", "refused", "abandoned", "faulted")

DTYPES = ("uint32", "int16", "float16", "float32", "float64")


class Program:
    """One program: buffers on all devices, and what they must contain.

    Attributes
    ----------
    simulated : SimulatedDriver or None
        The driver that refuses calls and has faults. Without it, programs have other troubles.
    """

    def __init__(self, seed: int, simulated: SimulatedDriver | None, items: int = ITEMS) -> None:
        self.chance = random.Random(f"aiocuda collectives {seed}")
        self.simulated = simulated
        self.items = items
        self.dtype = np.dtype(self.chance.choice(DTYPES))
        self.buffers: list[DeviceBuffer] = []
        self.arrays: list[_Array] = []
        self.nodes: list[Node[Any]] = []
        self.trouble: str | None = None

    def array(self) -> _Array:
        """Return an array of random values."""
        if self.dtype.kind == "f":
            return np.array([self.chance.randrange(1, 9) / 7 for _ in range(self.items)], self.dtype)
        return np.array([self.chance.randrange(250) for _ in range(self.items)], self.dtype)

    async def run(self, devices: list[Device]) -> None:
        """Open the devices' buffers, run the collectives, and compare."""
        for _ in range(self.chance.choice((2, 3, 5, 12))):
            device = self.chance.choice(devices)
            async with device.stream() as stream:
                self.arrays.append(self.array())
                if self.chance.random() < 0.2:
                    self.buffers.append(self.chance.choice(devices).unified(self.items, self.dtype))
                    await stream.copy(self.buffers[-1], self.arrays[-1])
                else:
                    self.buffers.append(await stream.upload(self.arrays[-1]))
        await devices[0].load(AFFINE)
        verb = ""
        trouble = self.trouble = self.chance.choice(TROUBLES)
        if self.simulated is None and trouble in ("refused", "faulted"):
            trouble = self.trouble = "abandoned"
        async with AsyncCoordinator(devices[0], max_in_flight=self.chance.choice((1, 2, 64))) as coordinator:
            if trouble == "refused":
                await coordinator.all_reduce(await self.others(devices))  # loads a kernel
                verb = self.chance.choice(("copy", "copy_peer", "launch", "stream_wait", "event_record", "allocate"))
                self.upset(Upset("refuse", self.chance.randrange(1, 10), verb, 801))
            elif trouble == "faulted":
                self.upset(Upset("fault", self.chance.randrange(1, 60), code=719))
            for _ in range(self.chance.randrange(1, 7)):
                try:
                    self.collective(coordinator)
                except DeviceFault:
                    break
                if self.chance.random() < 0.2 and trouble is None:
                    await self.nodes[-1]
                elif self.chance.random() < 0.2:
                    await cancelled_wait(self.nodes[-1])
                elif self.chance.random() < 0.3 and trouble == "abandoned":
                    self.chance.choice(self.nodes).abandon()
            if trouble is not None:
                with contextlib.suppress(AiocudaError, BaseExceptionGroup):
                    await coordinator.drain()
                for node in self.nodes:
                    check("C2", node.done(), f"{node!r} has not ended")
                errors = [error for node in self.nodes if (error := node.exception()) is not None]
                roots = [error for error in errors if not isinstance(error, SkippedError)]
                if trouble == "refused" and verb != "event_record":
                    check("C3", len(roots) <= 1, f"one refused call has failed {len(roots)} nodes: {roots}")
                if self.simulated is not None and self.simulated.fault is not None:
                    return
                self.upset()
                if verb == "event_record":  # perhaps of a marker: the next node on its stream delivers that
                    await self.take_failures(coordinator, devices)
                self.overwrite(coordinator)
            await coordinator.drain()
            for node in self.nodes:
                error = node.exception()
                check("C2" if trouble is None else "C3", error is None, f"{node!r}: {error!r}")
        for buffer, array in zip(self.buffers, self.arrays, strict=True):
            async with buffer.device.stream() as stream:
                found = await stream.download(buffer)
            check("C1", found.tobytes() == array.tobytes(), f"{self.dtype}: {found} is not {array}")

    def upset(self, *upsets: Upset) -> None:
        """Let the driver refuse a call or have a fault; without an argument, no more."""
        if self.simulated is not None:
            self.simulated.upsets = Upsets(upsets)

    async def others(self, devices: list[Device]) -> list[DeviceBuffer]:
        found: list[DeviceBuffer] = []
        for device in devices:
            async with device.stream() as stream:
                found.append(await stream.upload(self.array()))
        return found

    async def take_failures(self, coordinator: AsyncCoordinator, devices: list[Device]) -> None:
        """Use all streams of collectives once, and receive the failures that they still have."""
        buffers = await self.others(devices)
        for priority in ("high", "normal"):
            for _ in range(2):
                node = coordinator.all_reduce(buffers, priority=priority)
                await asyncio.gather(node.wait(), return_exceptions=True)

    @staticmethod
    def is_usable(buffer: DeviceBuffer, coordinator: AsyncCoordinator) -> bool:
        """True for memory of the coordinator's device, and for unified memory."""
        return isinstance(buffer, UnifiedBuffer) or buffer.device is coordinator.device

    def overwrite(self, coordinator: AsyncCoordinator) -> None:
        """Write all buffers anew: what the failed nodes have written is not known."""
        self.nodes.clear()
        self.arrays = [self.array() for _ in self.arrays]
        for buffer, array in zip(self.buffers, self.arrays, strict=True):
            if self.is_usable(buffer, coordinator):
                self.nodes.append(coordinator.upload(array, buffer))
            else:
                stage = coordinator.upload(array)
                self.nodes.append(coordinator.broadcast(stage, [buffer]))
        self.collective(coordinator)

    def collective(self, coordinator: AsyncCoordinator) -> None:
        """Register a collective, or a kernel that changes one of its buffers, and note its result."""
        chosen = self.chance.sample(range(len(self.buffers)), self.chance.randrange(2, len(self.buffers) + 1))
        operation = self.chance.choice(list(OPERATIONS))
        buffers, arrays = [self.buffers[index] for index in chosen], [self.arrays[index] for index in chosen]
        priority = self.chance.choice(("high", "normal", "normal"))
        options: dict[str, Any] = {"priority": priority}
        kind = self.chance.randrange(4)
        if kind == 0:
            self.nodes.append(coordinator.broadcast(buffers[0], buffers[1:], **options))
            for index in chosen[1:]:
                self.arrays[index] = arrays[0]
        elif kind == 1:
            target = self.chance.randrange(len(self.buffers))
            self.nodes.append(coordinator.reduce(buffers, self.buffers[target], operation, **options))
            self.arrays[target] = combined(arrays, operation)
        elif kind == 2:
            self.nodes.append(coordinator.all_reduce(buffers, operation, **options))
            result = combined(arrays, operation)
            for index in chosen:
                self.arrays[index] = result
        elif self.dtype == np.uint32 and self.is_usable(buffers[0], coordinator):
            self.nodes.append(coordinator.compute(AFFINE, 1, 32, buffers[0], self.items, 3, 1, **options))
            self.arrays[chosen[0]] = arrays[0] * np.uint32(3) + np.uint32(1)
        else:
            self.collective(coordinator)


async def cancelled_wait(node: Node[Any]) -> None:
    """Cancel a task that waits for a node, which changes nothing."""
    task = asyncio.ensure_future(node.wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def combined(arrays: list[_Array], operation: str) -> _Array:
    """Combine arrays in their order; float16 in float32."""
    dtype = arrays[0].dtype
    wide = [array.astype(np.float32) if dtype == np.float16 else array for array in arrays]
    total = wide[0]
    with np.errstate(all="ignore"):
        for array in wide[1:]:
            total = OPERATIONS[operation](total, array)
        return total.astype(dtype)


async def run_over(program: Program, driver: Driver, count: int) -> None:
    """Run a program over the first devices of a driver."""
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    with contextlib.suppress(DeviceFault):
        async with contextlib.AsyncExitStack() as stack:
            devices = [await stack.enter_async_context(aiocuda.open_device(k, driver=driver)) for k in range(count)]
            await program.run(devices)
            for buffer in program.buffers:
                buffer.free()
            program.nodes.clear()  # they hold the buffers of uploads
            gc.collect()
            for device in (*devices, *devices):  # memory of one may wait for work of another
                await device.drain()
            for device in devices:
                left = device.statistics().streams, device.memory.statistics().live_bytes
                check("C4", left == (0, 0), f"{device!r} has {left[0]} streams and {left[1]} bytes that nothing frees")
    driver.close()
    gc.collect()
    check("C5", not reported or program.trouble == "refused", f"{reported}")


async def _main(seed: int) -> None:
    count = 1 + seed % 4
    driver = SimulatedDriver(seed, devices=count)
    await run_over(Program(seed, driver), driver, count)


def run(seed: int) -> None:
    """Run the program of a seed. In every fourth, buffers are too small for several parts and chunks."""
    _collectives.CHUNK, _collectives.PART = (CHUNK, CHUNK // 16) if seed // 4 % 4 else (CHUNK * 1000, CHUNK * 1000)
    run_in_virtual_time(_main(seed), "C2")


def main(arguments: list[str] | None = None) -> int:
    return command(run, "tests.coordination.simulation", __doc__ or "", arguments)


if __name__ == "__main__":
    sys.exit(main())
