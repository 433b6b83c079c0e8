"""A process that loses its GPU on purpose, and tells as JSON what its operations heard of it.

``python cuda_child.py KIND`` runs one kernel that faults, with operations pending on several streams in front of it,
behind it and beside it. An independent thread asks the driver every millisecond and notes when it first answers an
error: from then on every operation has 100 ms.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import json
import sys
import threading
import time
from typing import Any

from cuda.bindings import driver as cuda

import aiocuda

STREAMS = 8
EACH = 40

SPIN = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""

FAULTS = {
    "illegal": 'extern "C" __global__ void fault(float* p) { p[1ull << 40] = 1.0f; }',
    "misaligned": 'extern "C" __global__ void fault(float* p) { *(volatile float*)((char*)p + 1) = 1.0f; }',
    "trap": 'extern "C" __global__ void fault(float* p) { asm volatile("trap;"); }',
    "graph": 'extern "C" __global__ void fault(float* p) { asm volatile("trap;"); }',  # launched as part of one
    "assert": 'extern "C" __global__ void fault(float* p) { if (p) __assertfail("!p", "fault.cu", 1, "fault", 1); }',
}


class Poller(threading.Thread):
    """Asks a stream every millisecond, beside the library and without it."""

    def __init__(self, handle: int) -> None:
        super().__init__(daemon=True)
        self._handle = handle
        self.first_seen: float | None = None
        self.code = 0

    def run(self) -> None:
        while self.first_seen is None:
            (code,) = cuda.cuStreamQuery(self._handle)
            if int(code) not in (0, 600):
                self.first_seen = time.monotonic()
                self.code = int(code)
            time.sleep(0.001)  # noqa: TID251 - the period that the promise is measured with


async def run(kind: str) -> dict[str, Any]:
    """What happened."""
    spin = aiocuda.Kernel("spin", source=SPIN)
    fault = aiocuda.Kernel("fault", source=FAULTS[kind])
    heard: list[tuple[float, str, int]] = []
    beside: list[tuple[float, str, int]] = []
    device = await aiocuda.open_device(driver="cuda")
    streams = [device.stream() for _ in range(STREAMS)]
    buffer = streams[0].empty(1024)
    for stream in streams:
        await stream.launch(spin, 1, 1, 1000)
    # Loading code waits until the device is idle, so it must be there before anything is held.
    await asyncio.get_running_loop().run_in_executor(None, fault.load, device.driver, 0)
    faulty = device.stream()
    if kind == "assert":  # its first launch makes room for what it prints, which waits for the device as well
        await faulty.launch(fault, 1, 1, faulty.empty(0))
    launch = functools.partial(faulty.launch, fault, 1, 1, buffer)
    if kind == "graph":
        async with faulty.capture() as graph:
            faulty.launch(spin, 1, 1, 1000)
            faulty.launch(fault, 1, 1, buffer)
        launch = functools.partial(graph.launch, faulty)
    poller = Poller(device.driver.stream_handle(streams[0]._lane.handle))

    async def wait(operation: Any, told: list[tuple[float, str, int]]) -> None:
        try:
            await operation
        except aiocuda.DeviceFault as error:
            told.append((time.monotonic(), "fault", error.code))
        else:
            told.append((time.monotonic(), "success", 0))

    operations = []
    for stream in streams:
        stream.launch(spin, 1, 1, 3_000_000_000)  # holds them back until the fault, reported 0.2 s late, has come
        operations += [stream.launch(spin, 1, 1, 1000) for _ in range(EACH)]
    tasks = [asyncio.create_task(wait(operation, heard)) for operation in operations[::2]]
    await asyncio.sleep(0)
    poller.start()
    begun = time.monotonic()
    # The hardware may signal an event behind the faulting kernel before it reports the fault, so what happens in this
    # stream is told apart: nobody else's operations may succeed.
    culprit = launch()
    during = asyncio.create_task(wait(faulty.synchronize(), beside))
    await asyncio.wait([*tasks, during])
    await wait(operations[1], heard)  # after the fault
    ended = time.monotonic()
    await asyncio.get_running_loop().run_in_executor(None, poller.join, 10)

    calls = device.driver.statistics()["calls"]
    refused = 0
    for stream in streams:
        for verb in (lambda s=stream: s.launch(spin, 1, 1, 1000), lambda s=stream: s.empty(4), stream.synchronize):
            try:
                verb()
            except aiocuda.DeviceFault:
                refused += 1
    silent = device.driver.statistics()["calls"] == calls
    leaving = time.monotonic()
    await device.aclose()
    left = time.monotonic()
    outcomes = [type(operation.exception()).__name__ for operation in operations]
    assert poller.first_seen is not None
    return {
        "kind": kind,
        "code": poller.code,
        "codes": sorted({code for _, _, code in heard}),
        "awaited": len(heard),
        "succeeded": sum(what == "success" for _, what, _ in heard) + outcomes.count("NoneType"),
        "outcomes": sorted(set(outcomes)),
        "pending": len(operations),
        "culprit": f"{culprit.state}, what came behind it: {beside[0][1]}",
        "first_seen_ms": (poller.first_seen - begun) * 1e3,
        "last_raised_ms": (max(when for when, _, _ in heard) - begun) * 1e3,
        "in_all_ms": (ended - begun) * 1e3,
        "refused": refused,
        "no_driver_call": silent,
        "leaving_ms": (left - leaving) * 1e3,
        "in_flight": device.statistics().in_flight,
    }


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.dump_traceback_later(50, exit=True)
    sys.stdout.write(json.dumps(asyncio.run(run(sys.argv[1]))) + "\n")
