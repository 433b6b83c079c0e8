"""A process that loses its device on purpose and reports as JSON how its operations ended.

``python -m tests.faults.fault_child --kind trap --during pipeline --driver cuda`` runs one kernel that faults, while a
thousand operations are pending on sixteen streams. An independent thread queries the driver every millisecond and
records when the driver first returns an error: from then on every waiter has 100 ms. ``--driver host`` does the same
without a GPU, with a host implementation that raises.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import fcntl
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import IO, Any

import numpy as np

import aiocuda
from aiocuda import AsyncCoordinator, Device, Kernel, Operation, Pipeline, Stage, Stream
from aiocuda.driver.protocol import CompiledKernel
from aiocuda.pipeline import Slot
from aiocuda.testing.kernels import SPIN
from tests.faults.fault_kernels import FAULTS, fault_kernel, spoil

STREAMS, EACH = 16, 64

#: Seconds after which the process is ended, and for which streams are held that no fault sets free.
LIMIT, HELD = 60, 120

#: The other work at the time of the fault. "graph" is the work that faults.
DURING = ("nothing", "graph", "pipeline", "staging", "capture", "loops", "coordinator")


class Poller(threading.Thread):
    """Asks a stream every millisecond, beside the library and without it."""

    def __init__(self, device: Device, stream: Stream) -> None:
        super().__init__(daemon=True)
        if device.driver.name == "cuda":
            from cuda.bindings import driver as cuda

            handle = device.driver.stream_handle(stream._queue.handle)
            self._ask: Callable[[], int] = lambda: int(cuda.cuStreamQuery(handle)[0])
        else:
            self._ask = lambda: getattr(device.driver.fault, "code", 0)
        self.first_seen: float | None = None
        self.code = 0

    def run(self) -> None:
        while self.first_seen is None:
            code = self._ask()
            if code not in (0, 600):
                self.first_seen = time.monotonic()
                self.code = code
            time.sleep(0.001)  # noqa: TID251 - the period that the promise is measured with


class Ear:
    """The waits of the process, and when each of them ended with which error."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Task[None]] = []
        self.heard: list[tuple[str, float, BaseException | None]] = []

    async def wait(self, name: str, awaitable: Any) -> None:
        """Await it, and note how that ended."""
        error: BaseException | None = None
        try:
            await awaitable
        except Exception as caught:  # noqa: BLE001 - whatever it is, it is told
            error = caught
        self.heard.append((name, time.monotonic(), error))

    def begin(self, name: str, awaitable: Any) -> None:
        self.waiting.append(asyncio.create_task(self.wait(name, awaitable)))


class Scene:
    """A device with streams that are held, and a kernel that waits for the word to fault."""

    def __init__(self, device: Device, kind: str, during: str) -> None:
        self.device = device
        self.kind = kind
        self.during = during
        self.ear = Ear()
        self.spin = Kernel(SPIN.name, source=SPIN.source, host=SPIN.host)
        self.fault = fault_kernel(kind)
        self.threads: list[threading.Thread] = []

    async def prepare(self) -> None:
        """Load all code, and set the kernel that faults waiting at its gate, where nothing can keep it from its place.

        Whatever the device must be idle for is done before that: loading code, building graphs, locking pages.
        """
        device = self.device
        if self.kind == "instruction" and device.driver.name == "cuda":
            compiled = device.driver.compile
            driver: Any = device.driver
            driver.compile = lambda index, source: _spoiled(compiled(index, source), source.name)
        await device.load(self.spin)
        await device.load(self.fault)
        self.streams = [device.stream() for _ in range(STREAMS)]
        self.faulty = device.stream()
        self.buffer = self.faulty.empty(1024)
        self.words = await device.pinned(2, np.uint32)
        await self.faulty.fill(self.buffer, 0)
        for stream in self.streams:
            await stream.launch(self.spin, 1, 1, 1000)
        if self.kind == "assert":  # its first launch makes room for what it prints, which waits for the device
            self.words[:] = 1
            await self.faulty.launch(self.fault, 1, 1, self.words, self.faulty.empty(0), 0)
        self.words[:] = 0
        go_on: Callable[[], Awaitable[None]] = await getattr(self, f"_{self.during}")()
        arguments = (self.words, self.buffer, int(HELD * 1e9))
        if self.during == "graph":
            async with self.faulty.capture() as graph:
                self.faulty.launch(self.spin, 1, 1, 1000)
                self.faulty.launch(self.fault, 1, 1, *arguments)
            self.culprit = graph.launch(self.faulty)
        else:
            self.culprit = self.faulty.launch(self.fault, 1, 1, *arguments)
        while self.words[0] == 0:  # a kernel notifies no task
            await asyncio.sleep(0.001)
        await go_on()

    def fill(self) -> list[Operation[Any]]:
        """A thousand operations after kernels that run until the fault."""
        operations: list[Operation[Any]] = []
        for stream in self.streams:
            block = stream.empty(1024)
            stream.launch(self.spin, 1, 1, int(HELD * 1e9))
            for _ in range(EACH // 2):
                operations += [stream.launch(self.spin, 1, 1, 1000), stream.fill(block, 1)]
        return operations

    # The other work: prepared first, then started

    async def _nothing(self) -> Callable[[], Awaitable[None]]:
        return _idle

    _graph = _nothing

    async def _pipeline(self) -> Callable[[], Awaitable[None]]:
        def upload(slot: Slot) -> Operation[Any]:
            return slot.stream.copy(slot.buffer("x", 4096), slot.pinned("x", 4096))

        def compute(slot: Slot) -> Operation[Any]:
            return slot.stream.launch(self.spin, 1, 1, 100_000)

        def download(slot: Slot) -> Operation[Any]:
            return slot.stream.download(slot.buffer("x", 4096), out=slot.pinned("y", 4096))

        stages = [Stage("upload", upload), Stage("compute", compute), Stage("download", download)]
        pipeline = Pipeline(self.device, stages)

        async def run(source: Iterable[int]) -> None:
            async for _ in pipeline.run(source):
                pass

        await run(range(5))

        async def begin() -> None:
            self.ear.begin("pipeline", run(iter(int, 1)))

        return begin

    async def _staging(self) -> Callable[[], Awaitable[None]]:
        stream = self.device.stream()
        large = np.ones(24 << 20, np.uint8)

        async def run(times: int) -> None:
            for _ in range(times):
                await stream.download(await stream.upload(large))

        await run(2)

        async def begin() -> None:
            self.ear.begin("staging", run(1 << 30))

        return begin

    async def _capture(self) -> Callable[[], Awaitable[None]]:
        recorded, replayed = self.device.stream(), self.device.stream()
        block = replayed.empty(1024)
        async with replayed.capture() as graph:
            replayed.fill(block, 2)
            replayed.launch(self.spin, 1, 1, 50_000)

        async def record() -> None:
            """In the middle of it when the fault comes; what it has recorded then comes to nothing."""
            async with recorded.capture():
                while True:
                    recorded.launch(self.spin, 1, 1, 1000)
                    await asyncio.sleep(0.005)

        async def replay(times: int) -> None:
            for _ in range(times):
                await graph.launch(replayed)

        await replay(3)

        async def begin() -> None:
            self.ear.begin("capture", record())
            self.ear.begin("replay", replay(1 << 30))

        return begin

    async def _loops(self) -> Callable[[], Awaitable[None]]:
        ready, go, held = (threading.Semaphore(0) for _ in range(3))

        async def work(name: str) -> None:
            streams = [self.device.stream() for _ in range(2)]
            free = self.device.stream()
            await free.launch(self.spin, 1, 1, 1000)
            ready.release()
            await asyncio.to_thread(go.acquire)
            ear = Ear()
            for stream in streams:
                stream.launch(self.spin, 1, 1, int(HELD * 1e9))
                for _ in range(10):
                    ear.begin(name, stream.launch(self.spin, 1, 1, 1000))

            async def run() -> None:
                while True:
                    await free.launch(self.spin, 1, 1, 20_000)

            ear.begin(name, run())
            await asyncio.sleep(0)
            held.release()
            await asyncio.wait(ear.waiting)
            self.ear.heard.extend(ear.heard)

        for number in range(3):
            thread = threading.Thread(target=lambda name=f"loop {number}": asyncio.run(work(name)), daemon=True)
            self.threads.append(thread)
            thread.start()
        for _ in self.threads:
            await asyncio.to_thread(ready.acquire)

        async def begin() -> None:
            for _ in self.threads:
                go.release()
            for _ in self.threads:
                await asyncio.to_thread(held.acquire)

        return begin

    async def _coordinator(self) -> Callable[[], Awaitable[None]]:
        array = np.ones(4096, np.float32)

        async def run(times: int) -> None:
            async with AsyncCoordinator(self.device) as coordinator:
                for _ in range(times):
                    x = coordinator.upload(array)
                    y = coordinator.compute(self.spin, 1, 1, 20_000, after=(x,))
                    await coordinator.download(x, after=(y,))

        await run(3)

        async def begin() -> None:
            self.ear.begin("coordinator", run(1 << 30))

        return begin


async def _idle() -> None:
    """No other work."""


def _spoiled(compiled: CompiledKernel, name: str) -> CompiledKernel:
    return compiled._replace(image=spoil(compiled.image)) if name == "fault" else compiled


def root(error: BaseException | None) -> str:
    """The root failures of an error: all members of a group; the cause of a skipped operation."""
    if isinstance(error, BaseExceptionGroup):
        return " and ".join(sorted({root(each) for each in error.exceptions}))
    if isinstance(error, aiocuda.SkippedError) and error.__cause__ is not None:
        return f"skipped: {root(error.__cause__)}"
    return f"DeviceFault {error.code}" if isinstance(error, aiocuda.DeviceFault) else repr(error)


def turn(path: str) -> IO[str]:
    """Of several processes only one at a time has its fault: the driver loses some of those that coincide."""
    file = open(path, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


async def run(kind: str, during: str, driver: Any, path: str) -> dict[str, Any]:
    """What happened, in this process's turn."""
    device = await aiocuda.open_device(driver=driver)
    with await asyncio.to_thread(turn, path):
        return await play(device, kind, during)


async def play(device: Device, kind: str, during: str) -> dict[str, Any]:
    """Run the fault and return the report."""
    loop_errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: loop_errors.append(str(context)))
    scene = Scene(device, kind, during)
    await scene.prepare()
    ear = scene.ear
    operations = scene.fill()
    told: list[Operation[Any]] = []
    for operation in operations[::3]:
        ear.begin("before", operation)
    for operation in operations[1::3]:
        operation.add_done_callback(told.append)
    beside = Ear()  # the faulting stream: the hardware may signal an event there before it reports the fault
    beside.begin("behind the fault", scene.faulty.synchronize())
    await asyncio.sleep(0)
    done_before = sum(operation.done() for operation in operations)
    poller = Poller(device, scene.streams[0])
    poller.start()
    scene.words[1] = 1
    begun = time.monotonic()
    sampled = iter(operations[2::9])
    while device.driver.fault is None:
        ear.begin("meanwhile", next(sampled, operations[2]))
        await asyncio.sleep(0.002)
    await asyncio.wait([*ear.waiting, *beside.waiting])
    for thread in scene.threads:
        await asyncio.to_thread(thread.join)
    await asyncio.to_thread(poller.join, 10)
    ended = time.monotonic()
    for operation in operations[2::3]:
        await ear.wait("after", operation)
    after = time.monotonic() - ended

    calls = device.driver.statistics()["calls"]
    refused = 0
    for stream in scene.streams:
        verbs: list[Callable[[], object]] = [
            functools.partial(stream.launch, scene.spin, 1, 1, 1000),
            functools.partial(stream.empty, 4),
            stream.synchronize,
        ]
        for verb in verbs:
            try:
                verb()
            except aiocuda.DeviceFault:
                refused += 1
    silent = device.driver.statistics()["calls"] == calls
    leaving = time.monotonic()
    await device.aclose()
    left = time.monotonic()
    assert poller.first_seen is not None
    waits: dict[str, list[float]] = {}
    for name, when, _ in ear.heard:
        if name != "after":
            waits.setdefault(name, []).append((when - begun) * 1e3)
    return {
        "kind": kind,
        "during": during,
        "code": poller.code,
        "pending": len(operations),
        "done_before": done_before,
        "awaited": {name: sum(each[0] == name for each in ear.heard) for name in sorted({e[0] for e in ear.heard})},
        "heard": sorted({f"{root(error)}" for _, _, error in ear.heard}),
        "outcomes": sorted({type(operation.exception()).__name__ for operation in operations}),
        "called_back": len(told),
        "culprit": f"{scene.culprit.state}, what came behind it: {root(beside.heard[0][2])}",
        "first_seen_ms": round((poller.first_seen - begun) * 1e3, 1),
        "last_raised_ms": {name: round(max(each), 1) for name, each in waits.items()},
        "after_ms": round(after * 1e3, 1),
        "refused": refused,
        "no_driver_call": silent,
        "leaving_ms": round((left - leaving) * 1e3, 1),
        "in_flight": device.statistics().in_flight,
        "loop_errors": loop_errors,
    }


async def build() -> None:
    """Compile all that the children launch, into the cache."""
    async with aiocuda.open_device(driver="cuda") as device:
        for kernel in (Kernel(SPIN.name, source=SPIN.source, host=SPIN.host), *map(fault_kernel, FAULTS)):
            await device.load(kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(FAULTS), default="trap")
    parser.add_argument("--during", choices=DURING, default="nothing")
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--turn", default=os.devnull, help="a file that whoever is to have its fault locks")
    parser.add_argument("--build", action="store_true", help="compile the kernels and do nothing else")
    arguments = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    if arguments.build:
        asyncio.run(build())
        return
    told = asyncio.run(run(arguments.kind, arguments.during, arguments.driver, arguments.turn))
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
