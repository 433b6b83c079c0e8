"""The row of the host's own time: verbs over a driver that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import aiocuda
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import RecordedCall

from .figures import Measured
from .kernels import empty
from .setting import Setting


class IdleDriver(HostDriver):
    """A driver whose launches, copies, records and waits return at once. Every event is done."""

    def launcher(self, *arguments: Any) -> Callable[[Sequence[Any]], None]:
        return _nothing

    def recorded_launch(self, *arguments: Any) -> RecordedCall:
        return _nothing

    def recorded_upload(self, *arguments: Any) -> RecordedCall:
        return _nothing

    def recorded_download(self, *arguments: Any) -> RecordedCall:
        return _nothing

    def recorded_wait(self, stream: int) -> RecordedCall:
        return _nothing

    def waiter(self, streams: Sequence[int]) -> Callable[[int], None]:
        return _nothing

    def recorder(self, stream: int) -> Callable[[int], None]:
        return _nothing

    def event_record(self, event: int, stream: int) -> None:
        return None

    def event_query(self, event: int) -> bool:
        return True

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return 0.001

    def stream_wait(self, stream: int, event: int) -> None:
        return None

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        return None

    def download(self, stream: int, target: int, source: int, nbytes: int) -> None:
        return None


def _nothing(*_: object) -> None:
    return None


async def host_time(setting: Setting) -> Measured:
    """µs of a launch over a driver that does nothing.

    Figures: µs of a copy, of `empty` + `free`, of an item of a pipeline of three stages and of one of four, and of a
    barrier over 16 streams with work.

    Baseline: the two calls of the driver. Any machine can measure it: no device takes part.
    """
    count, repeats = setting.count("launches"), setting.count("repeats")
    measured, copies, frees, items = Measured([]), list[float](), list[float](), list[float]()
    items_of_four, barriers = list[float](), list[float]()
    kernel = empty()
    async with aiocuda.open_device(driver=IdleDriver()) as device, device.stream() as stream:
        pinned, buffer = device.pinned(4096), stream.empty(4096)
        driver: Any = device.driver
        launch, record = driver.launcher(), driver.recorder(0)
        stages = [aiocuda.Stage(name, lambda slot: slot.stream.launch(kernel, 1, 1)) for name in ("a", "b", "c", "d")]
        async with aiocuda.Pipeline(device, stages[:3], 5) as pipeline, aiocuda.Pipeline(device, stages, 5) as of_four:
            for _ in range(repeats):
                measured.samples.append(await _each(stream, count, lambda: stream.launch(kernel, 1, 1)))
                copies.append(await _each(stream, count, lambda: stream.copy(buffer, pinned)))
                frees.append(await _each(stream, count, lambda: stream.empty(4096).free()))
                begin = perf_counter()
                for _ in range(count):
                    launch(())
                    record(0)
                measured.baseline.append((perf_counter() - begin) / count * 1e6)
                items.append(await _items(pipeline, count))
                items_of_four.append(await _items(of_four, count))
        async with aiocuda.StreamGroup(device, 16) as group:
            for _ in range(repeats):
                barriers.append(await _barrier(group, max(1, count // 16)))
    figures = {
        "copy_us": copies, "empty_free_us": frees, "item_us": items, "item_of_four_us": items_of_four,
        "barrier_us": barriers,
    }  # fmt: skip
    for name, samples in figures.items():
        measured.figures[name] = median(samples)
    return measured


async def _items(pipeline: aiocuda.Pipeline, count: int) -> float:
    """Return µs of each of ``count`` items."""
    begin = perf_counter()
    async for _ in pipeline.run(range(count)):
        pass
    return (perf_counter() - begin) / count * 1e6


async def _barrier(group: aiocuda.StreamGroup, count: int) -> float:
    """Return µs of each of ``count`` calls of `barrier`. Before each call, each stream gets a launch."""
    took, kernel = 0.0, empty()
    for _ in range(count):
        launches = [stream.launch(kernel, 1, 1) for stream in group]
        begin = perf_counter()
        joined = group.barrier()
        took += perf_counter() - begin
        await aiocuda.gather(*launches, joined)
    return took / count * 1e6


async def _each(stream: aiocuda.Stream, count: int, call: Callable[[], object]) -> float:
    """Return µs of each of ``count`` calls. The stream is empty before and after them.

    The final await finds its event done and does not suspend: after a sleep of the loop's thread, calls take 1.5 times
    as long for 200 µs.
    """
    begin = perf_counter()
    for _ in range(count):
        call()
    took = perf_counter() - begin
    await stream.launch(empty(), 1, 1)
    return took / count * 1e6
