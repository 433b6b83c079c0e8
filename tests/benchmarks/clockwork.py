"""A device that only keeps the time: it measures the cost and the lateness of a pipeline's Python code, without a GPU.

A command starts after its stream's previous command, its waits and its engine's last command, and ends when its
duration has passed. There are no threads, and no bytes move; a driver method costs a few dictionary look-ups. So on any
machine the time of an item is the library's time.

``python -m tests.benchmarks.clockwork`` prints the cost of an item with three stages; with ``--profile tottime``, a
profile.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np

import aiocuda
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import CopyNode, KernelNode, Node

from .kernels import nanoseconds, spin

#: Seconds that the engine of a copy takes for a byte: one of so many bytes takes so many nanoseconds.
SECONDS_PER_BYTE = 1e-9


#: Items that are timed together.
BLOCK = 60


class Clockwork(HostDriver):
    """The host driver's memory and code; streams and events by arithmetic. One device."""

    polls_freely: Any = True  # type: ignore[misc]  # as on a GPU

    def __init__(self) -> None:
        super().__init__()
        self._free: dict[str, float] = defaultdict(float)  # when each engine has done what it was given
        self._ends: dict[int, float] = defaultdict(float)  # and each stream
        self._recorded: dict[int, float] = {}
        self._durations: dict[int, float] = {}
        self._nodes: dict[int, tuple[Node, ...]] = {}

    def _work(self, engine: str, begin: float, seconds: float) -> float:
        begin = max(begin, self._free[engine])
        end = self._free[engine] = begin + seconds
        return end

    def _give(self, stream: int, engine: str, seconds: float) -> None:
        self._calls += 1
        self._ends[stream] = self._work(engine, max(self._ends[stream], perf_counter()), seconds)

    now = staticmethod(perf_counter)

    def notifier_limit(self, device: int) -> int:
        return 0

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._give(stream, "upload", nbytes * SECONDS_PER_BYTE)

    def download(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._give(stream, "download", nbytes * SECONDS_PER_BYTE)

    def fill(self, stream: int, target: int, pattern: bytes, count: int) -> None:
        self._give(stream, "compute", 0.0)

    def launcher(self, stream: int, function: int, *how: Any) -> Callable[[Sequence[Any]], None]:
        seconds = self._functions[function].seconds or 0.0
        return lambda values: self._give(stream, "compute", seconds)

    def stream_wait(self, stream: int, event: int) -> None:
        self._calls += 1
        self._ends[stream] = max(self._ends[stream], self._recorded.get(event, 0.0))

    def event_record(self, event: int, stream: int) -> None:
        self._calls += 1
        self._recorded[event] = max(self._ends[stream], perf_counter())

    def recorder(self, stream: int) -> Callable[[int], None]:
        return partial(self.event_record, stream=stream)

    def event_query(self, event: int) -> bool:
        self._calls += 1
        return self._recorded.get(event, 0.0) <= perf_counter()

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return (self._recorded[end] - self._recorded[start]) * 1e3

    def stream_query(self, stream: int) -> bool:
        return self._ends[stream] <= perf_counter()

    def stream_synchronize(self, stream: int) -> None:
        while not self.stream_query(stream):
            pass

    def graph_build(self, device: int, nodes: Sequence[Node]) -> int:
        graph = super().graph_build(device, nodes)
        self._nodes[graph] = tuple(nodes)
        return graph

    def graph_launch(self, stream: int, graph: int) -> None:
        self._calls += 1
        began = max(self._ends[stream], perf_counter())
        ends: list[float] = []
        for node in self._nodes[graph]:
            begin = max((ends[one] for one in node.after), default=began)
            if isinstance(node, CopyNode):
                ends.append(self._work(node.kind, begin, node.nbytes * SECONDS_PER_BYTE))
            elif isinstance(node, KernelNode):
                ends.append(self._work("compute", begin, self._functions[node.function].seconds or 0.0))
            else:
                ends.append(begin)
        self._ends[stream] = max(ends, default=began)


class Figures(NamedTuple):
    """Of an iteration, in µs."""

    processor: float  #: processor time, of the best of many blocks of items: what it takes undisturbed
    whole: float  #: time


async def measure(
    ms: Sequence[float], items: int, depth: int, *, replay: bool = False, profile: cProfile.Profile | None = None
) -> Figures:
    """Three stages that take so many milliseconds each."""
    driver = Clockwork()
    up, compute, down = ms
    kernel = spin(compute * 1e-3)
    async with aiocuda.open_device(driver=driver) as device:
        source = await device.pinned(max(1, round(up * 1e6)), np.uint8)
        targets = [await device.pinned(max(1, round(down * 1e6)), np.uint8) for _ in range(depth)]

        def upload(slot: aiocuda.Slot) -> Any:
            return slot.stream.copy(slot.buffer("up", source.nbytes, np.uint8), source)

        def launch(slot: aiocuda.Slot) -> Any:
            return slot.stream.launch(kernel, 1, 1, nanoseconds(compute * 1e-3))

        def download(slot: aiocuda.Slot) -> Any:
            return slot.stream.copy(targets[slot.number], slot.buffer("down", targets[slot.number].nbytes, np.uint8))

        stages = [aiocuda.Stage("up", upload), aiocuda.Stage("compute", launch), aiocuda.Stage("down", download)]
        async with aiocuda.Pipeline(device, stages, depth, replay=replay) as pipeline:
            async for _ in pipeline.run(range(BLOCK)):
                pass
            blocks: list[float] = []
            began, before = perf_counter(), process_time()
            if profile is not None:
                profile.enable()
            count = 0
            async for _ in pipeline.run(range(items)):
                count += 1
                if not count % BLOCK:
                    now = process_time()
                    blocks.append(now - before)
                    before = now
            if profile is not None:
                profile.disable()
            figures = Figures(min(blocks) / BLOCK * 1e6, (perf_counter() - began) / items * 1e6)
    driver.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.clockwork", description=__doc__)
    parser.add_argument("--ms", type=float, nargs=3, default=(0.0, 0.0, 0.0), metavar=("UP", "COMPUTE", "DOWN"))
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--profile", metavar="COLUMN", help="what took the time, sorted by tottime or cumtime")
    given = parser.parse_args()
    best = [asyncio.run(measure(given.ms, given.items, given.depth, replay=given.replay)) for _ in range(3)]
    processor, whole = map(min, zip(*best, strict=True))
    print(f"{processor:.1f} µs of the processor, {whole:.1f} µs in all")
    if given.profile:
        profile = cProfile.Profile()
        asyncio.run(measure(given.ms, given.items, given.depth, replay=given.replay, profile=profile))
        pstats.Stats(profile).sort_stats(given.profile).print_stats(50)


if __name__ == "__main__":
    main()
