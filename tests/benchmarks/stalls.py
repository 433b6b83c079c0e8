"""Rows about stalls: how long does the event loop stand still in what programs do beside a long kernel?

A call of CUDA may wait for the kernel, and hold all launches until then. So one task launches a kernel every 2 ms, on a
stream of its own: the beat. Kernels of half a second run meanwhile, with a pause after each, in which the device is
idle between two launches of the beat. Each action runs once in each run, and its figure is the longest iteration of the
loop from its begin until the kernel that runs at its end has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, Final

import numpy as np

import aiocuda
from aiocuda.data import DataLoader
from aiocuda.serving import MicroBatcher

from .figures import Measured, percentile
from .kernels import empty, nanoseconds, spin
from .loader_cases import Case, Decoder, WriteField
from .rows import STALL_LIMITS
from .runs import Runs
from .setting import Setting

__all__ = ["stalls_busy", "stalls_idle", "stalls_peers"]

#: Seconds between two launches of the beat.
BEAT: Final = 2e-3

#: Seconds between two long kernels.
PAUSE: Final = 20e-3

#: Seconds that the loop is watched for after an action, on an idle device: some calls are made later, by the watchdog.
AFTER: Final = 0.1

MIB: Final = 1 << 20


class _Actions:
    """What a program does with a device, by the names of `STALL_LIMITS`. Arrays and buffers are made before."""

    def __init__(self, setting: Setting) -> None:
        self._device = setting.device
        self._scale = setting.sizes["scale"]
        self._count = setting.count("streams")
        self._stream = setting.stream()
        self._array = np.ones(self._bytes(64), np.uint8)
        self._source, self._target = np.ones(self._bytes(256), np.uint8), np.ones(self._bytes(256), np.uint8)
        self._buffer = self._stream.empty(self._bytes(256), np.uint8)
        self._names = (f"new_{time.time_ns()}_{number}" for number in itertools.count())

    def _bytes(self, mebibytes: int) -> int:
        return max(1 << 10, round(mebibytes * MIB * self._scale))

    async def nothing(self) -> None:
        """The baseline."""

    async def pin_64mb(self) -> None:
        async with self._device.pin(self._array):
            pass

    async def pinned_1mb(self) -> None:
        await self._pinned(1)

    async def pinned_256mb(self) -> None:
        await self._pinned(256)

    async def pinned_512mb(self) -> None:
        await self._pinned(512)

    async def _pinned(self, mebibytes: int) -> None:
        memory = await self._device.pinned(self._bytes(mebibytes), np.uint8)
        memory.free()

    async def unified(self) -> None:
        """More than the 256 MiB that are kept, so that the memory goes back to CUDA."""
        buffer = self._device.unified(self._bytes(512), np.uint8)
        buffer.array[:1] = 1
        buffer.free()

    async def new_streams(self) -> None:
        streams = [self._device.stream() for _ in range(self._count)]
        for stream in streams:
            await stream.aclose()

    async def pageable_up(self) -> None:
        await self._stream.copy(self._buffer, self._source)

    async def pageable_down(self) -> None:
        await self._stream.copy(self._target, self._buffer)

    async def graph(self) -> None:
        async with self._stream.capture() as graph:
            for _ in range(3):
                self._stream.launch(empty(), 1, 1)
        await graph.launch(self._stream)

    async def pipeline(self) -> None:
        def compute(slot: Any) -> None:
            slot.stream.launch(empty(), 1, 1)

        async with aiocuda.Pipeline(self._device, [aiocuda.Stage("compute", compute)]) as pipeline:
            async for _ in pipeline.run(range(8)):
                pass

    async def loader(self) -> None:
        case = Case("memcpy", self._bytes(1), 0.0)
        async with DataLoader(
            self._device, range(16), fields={"x": (case.sample_bytes, np.uint8)}, decode=WriteField(Decoder(case)),
            batch_size=2, workers=2, executor="process",
        ) as loader:  # fmt: skip
            async for _ in loader:
                pass

    async def batcher(self) -> None:
        async def infer(batch: Any) -> Any:
            await batch.stream.launch(empty(), 1, 1)
            return batch.items

        async with MicroBatcher(infer, max_batch_size=8, device=self._device) as batcher:
            await asyncio.gather(*[batcher.submit(number) for number in range(16)])

    async def empty_4gb(self) -> None:
        self._stream.empty(self._bytes(4096), np.uint8).free()

    async def load(self) -> None:
        await self._device.load(self._new_kernel())

    async def first_launch(self) -> None:
        await self._stream.launch(self._new_kernel(), 1, 1)

    def _new_kernel(self) -> aiocuda.Kernel:
        name = next(self._names)
        return aiocuda.Kernel(name, source=f'extern "C" __global__ void {name}() {{}}', host=lambda: None)

    async def trim(self) -> None:
        await self._device.memory.trim()


async def stalls_busy(setting: Setting) -> Measured:
    """Milliseconds of the longest iteration of the loop in each action, while a kernel of 0.5 s runs.

    Figures of each action: ``…_ms``, the 99.9th percentile ``…_p999_ms``, and ``…_took_ms``, the time of the action.
    Baseline: no action. Bounds: 15 ms in the worst run, and 25 ms for 512 MB of pinned memory.
    """
    return await _measured(setting, busy=True)


async def stalls_idle(setting: Setting) -> Measured:
    """The same on an idle device, without the beat."""
    return await _measured(setting, busy=False)


async def _measured(setting: Setting, *, busy: bool) -> Measured:
    measured, runs, actions = Measured([]), Runs(), _Actions(setting)
    beat = _Beat(setting)
    await beat.prepare()
    for _ in range(setting.count("runs")):
        figures: dict[str, float] = {}
        measured.baseline.append((await beat.beside(actions.nothing, busy=busy))["ms"])
        for name in STALL_LIMITS:
            found = await beat.beside(getattr(actions, name), busy=busy)
            measured.samples.append(found["ms"])
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
        runs.add(figures)
    measured.figures.update(runs.medians() | runs.worst("lower", *[f"{name}_ms" for name in STALL_LIMITS]))
    return measured


class _Beat:
    """A long kernel, the launches beside it, and the meter of the loop."""

    def __init__(self, setting: Setting) -> None:
        self._turns = setting.turns
        self._seconds = setting.sizes["seconds"]
        self._long, self._short = setting.stream(), setting.stream()

    async def prepare(self) -> None:
        """Load the kernels, and know their durations."""
        for _ in range(5):
            await self._short.launch(empty(), 1, 1)
            await self._long.launch(spin(self._seconds), 1, 1, nanoseconds(1e-6))

    async def beside(self, action: Any, *, busy: bool) -> dict[str, float]:
        """Run an action; return the longest iteration, the 99.9th percentile, and the time of the action, in ms."""
        over = asyncio.Event()
        work = asyncio.create_task(self._run_until(over) if busy else asyncio.sleep(AFTER))
        await asyncio.sleep(5 * BEAT)
        self._turns.record()
        began = time.perf_counter()
        await action()
        took = time.perf_counter() - began
        over.set()
        await work
        longest, turns = self._turns.longest(), self._turns.recorded()
        return {"ms": longest * 1e3, "p999_ms": percentile(turns, 99.9) * 1e3, "took_ms": took * 1e3}

    async def _run_until(self, over: asyncio.Event) -> None:
        """Run long kernels one after the other, and short ones beside them, until the first one that ends then."""
        beat = asyncio.create_task(self._launch())
        while not over.is_set():
            await self._long.launch(spin(self._seconds), 1, 1, nanoseconds(self._seconds))
            await asyncio.sleep(PAUSE)
        beat.cancel()
        await asyncio.wait([beat])

    async def _launch(self) -> None:
        while True:
            self._short.launch(empty(), 1, 1)
            await asyncio.sleep(BEAT)


async def stalls_peers(setting: Setting) -> Measured:
    """Milliseconds of the longest iteration of the loop in the first copy between two devices, beside a kernel.

    The first copy enables peer access of both devices and of their pools. Baseline: the second copy. Bound: 15 ms.
    """
    nbytes = setting.count("nbytes")
    beat = _Beat(setting)
    await beat.prepare()
    async with (
        aiocuda.open_device(1, driver=setting.device.driver) as device,
        device.stream() as there,
        setting.device.stream() as here,
    ):
        source, target = there.empty(nbytes, np.uint8), here.empty(nbytes, np.uint8)
        await there.fill(source, 1)
        await here.fill(target, 0)

        async def copy() -> None:
            await here.copy(target, source)

        first, second = [await beat.beside(copy, busy=True) for _ in range(2)]
        return Measured(
            [first["ms"]], [second["ms"]], {"took_ms": first["took_ms"], "second_took_ms": second["took_ms"]}
        )
