"""``python -m tests.benchmarks.wait_for_torch ROUNDS FILE``: `aiocuda.wait` for PyTorch's events on a GPU, as a report.

1. Lateness of a wait for a PyTorch event behind a kernel of 5 ms: microseconds from its end on the device to the line
   after the await. The ways alternate, with the same kernel: `aiocuda.wait`, a raw ``cuLaunchHostFunc`` whose callback
   in C writes an eventfd that the loop reads (as in `raw_waits`), `asyncio.to_thread` and a poll each
   millisecond.
2. Processor time of all threads per round with 1, 16 and 64 waiters, each with a stream, an event and a kernel of 5 ms
   of its own, for `aiocuda.wait` and `asyncio.to_thread(event.synchronize)`, without that of the launches: a round
   that sleeps until all kernels are done is subtracted.

It needs PyTorch, and ``cc`` for the callback. Limits: p50 at most 100 µs above raw; at most a third of the time.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiocuda

from . import machine, report
from .figures import Bound, percentile
from .peers.raw import ring_library
from .rows import Row

ROUNDS = int(sys.argv[1])
SECONDS = 0.005
WAITERS = (1, 16, 64)

ROW = Row(
    name="wait_for_torch",
    title="`await aiocuda.wait(event)` of PyTorch, after the end of a kernel of 5 ms; processor time of 1 to 64 waits",
    module="wait_for_torch",
    unit="µs",
    better="lower",
    baseline="a host callback in C, which writes an eventfd that the loop reads",
    bounds=(
        Bound("beyond_raw_us", at_most=100.0),
        *(Bound(f"of_to_thread_{waiters}", at_most=1 / 3) for waiters in WAITERS),
    ),
    sizes={},
    small={},
)

torch: Any = importlib.import_module("torch")
_host_func = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
_host_func.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]


def cycles_of(seconds: float) -> int:
    """Return the clock cycles for which a kernel of PyTorch sleeps so long."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return int(10_000_000 * seconds / (start.elapsed_time(end) / 1e3))


class RawCallback:
    """Awaits a stream by a host callback in C, which writes an eventfd."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ring = ctypes.cast(ring_library().ring, ctypes.c_void_p)
        self._loop.add_reader(self._descriptor, self._ready)
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self, stream: Any) -> None:
        self._waiter = self._loop.create_future()
        code = _host_func(stream.cuda_stream, self._ring, self._descriptor)
        assert code == 0, code
        await self._waiter

    def _ready(self) -> None:
        os.eventfd_read(self._descriptor)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


async def lateness(cycles: int) -> dict[str, list[float]]:
    """Return microseconds from the end of the kernel to the line after the await, of each way."""
    stream, raw = torch.cuda.Stream(), RawCallback()
    late: dict[str, list[float]] = {"wait": [], "raw": [], "to_thread": [], "asked": []}
    for turn in range(ROUNDS + 10):
        for way, found in late.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun = time.perf_counter()
            with torch.cuda.stream(stream):
                start.record()
                torch.cuda._sleep(cycles)
                end.record()
            if way == "wait":
                await aiocuda.wait(end)
            elif way == "raw":
                await raw.wait(stream)
            elif way == "to_thread":
                await asyncio.to_thread(end.synchronize)
            else:
                while not end.query():
                    await asyncio.sleep(0.001)
            took = time.perf_counter() - begun
            stream.synchronize()
            if turn >= 10:
                found.append(took * 1e6 - start.elapsed_time(end) * 1e3)
    raw.close()
    return late


async def processor(cycles: int, waiters: int) -> dict[str, float]:
    """Return milliseconds of processor time per round of each way, and the ratio of `aiocuda.wait` to threads."""
    streams = [torch.cuda.Stream() for _ in range(waiters)]
    events = [torch.cuda.Event() for _ in range(waiters)]
    slots = -(-waiters // 8) + 1  # kernels of one hardware queue run one after another

    async def round_of(way: str) -> None:
        for stream, event in zip(streams, events, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
            event.record(stream)
        if way == "wait":
            await asyncio.gather(*[aiocuda.wait(event).wait() for event in events])
        elif way == "to_thread":
            await asyncio.gather(*[asyncio.to_thread(event.synchronize) for event in events])
        else:
            await asyncio.sleep(SECONDS * slots)

    times: dict[str, list[float]] = {"nothing": [], "wait": [], "to_thread": []}
    for turn in range(max(ROUNDS // 4, 10) + 3):
        for way, found in times.items():
            begun = time.process_time()
            await round_of(way)
            spent = time.process_time() - begun
            torch.cuda.synchronize()
            if turn >= 3:
                found.append(spent)
    middle = {way: statistics.median(found) * 1e3 for way, found in times.items()}
    ratio = middle["wait"] / middle["to_thread"]
    figures = {**{f"{way}_cpu_ms": value for way, value in middle.items()}, "of_to_thread": ratio}
    return {f"{name}_{waiters}": value for name, value in figures.items()}


async def main() -> None:
    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    cycles = cycles_of(SECONDS)
    late = await lateness(cycles)
    wait, raw = late.pop("wait"), late.pop("raw")
    figures = {"beyond_raw_us": statistics.median(wait) - statistics.median(raw)}
    for way, times in late.items():
        figures |= {f"{way}_p50_us": percentile(times, 50), f"{way}_p99_us": percentile(times, 99)}
    for waiters in WAITERS:
        figures |= await processor(cycles, waiters)
    row = report.row_report(ROW, {"samples": wait, "baseline": raw, "figures": figures}, {})
    found = {
        "schema": report.SCHEMA,
        **machine.tree(),
        "command": shlex.join(["python", "-m", "tests.benchmarks.wait_for_torch", *sys.argv[1:]]),
        "driver": "cuda",
        "small": False,
        "machine": machine.describe(),
        "versions": machine.versions(),
        "seconds": time.perf_counter() - began,
        "rows": [row],
    }
    report.write(found, Path(sys.argv[2]))
    print(report.line(row))


if __name__ == "__main__":
    asyncio.run(main())
