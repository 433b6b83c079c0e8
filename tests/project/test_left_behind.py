"""Objects that are made, used with memory and closed leave nothing in their device, their pool or the process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import operator
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    EventPool,
    ManagedContext,
    Pipeline,
    Stage,
    StreamBarrier,
    StreamGroup,
    StreamPool,
    TripleBuffer,
)
from aiocuda._core._form import form
from aiocuda.data import DataLoader, to_device
from aiocuda.observe import StreamProfiler, Timeline
from aiocuda.serving import MicroBatcher
from aiocuda.testing import kernels as samples
from tests.budget import spread
from tests.helpers import AFFINE
from tests.memory.others import Interfaced, Producer

#: Does one thing, with memory, in each iteration.
Row = Callable[[Device], AsyncGenerator[None, None]]
ROWS: dict[str, tuple[Row, int]] = {}

ARRAY = np.arange(256, dtype=np.uint32)

#: Iterations of a quick run. `row` names those of a heavy run.
QUICK = 75

#: Objects of events and of the watch over the loop that come at any time.
SLACK = 40

#: Objects that an iteration may leave in a third of a heavy run, where a cache ends at 64 uses of a buffer or a graph,
#: at 64 clocks of streams, or at 256 launches of a stream. These rows have no quick run.
CACHES = dict.fromkeys(("users_of_a_buffer", "users_of_a_graph", "checked_streams", "kernels"), 2.0)


def row(times: int) -> Callable[[Row], Row]:
    """Add a row; ``times`` is the number of iterations of a heavy run."""

    def add(make: Row) -> Row:
        ROWS[make.__name__] = make, times
        return make

    return add


async def use(stream: Any) -> None:
    """Use memory of each kind: allocated, freed, dropped, uploaded and downloaded."""
    buffer = stream.empty_like(ARRAY)
    stream.copy(buffer, ARRAY)
    stream.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
    dropped = stream.upload(ARRAY)
    result = await stream.download(buffer)
    buffer.free()
    await dropped
    assert result[1] == 4
    unfinished = stream.empty_like(ARRAY)
    stream.copy(unfinished, ARRAY)
    unfinished.free()


@row(10_000)
async def streams(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with device.stream() as stream:
            await use(stream)
        yield


@row(1_200)
async def streams_whose_memory_others_use(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as other:
        while True:
            async with device.stream() as stream:
                buffer = await stream.upload(ARRAY)
                await other.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
                buffer.free(other)
            yield


@row(900)
async def groups(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with StreamGroup(device, 2) as group:
            await use(group[0])
            group[1].wait(group[0].record())
            await use(group[1])
        yield


@row(1_200)
async def barriers(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as left, device.stream() as right:
        while True:
            barrier = StreamBarrier(2)
            buffer = await left.upload(ARRAY)
            await asyncio.gather(barrier.wait(left), barrier.wait(right))
            await right.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
            buffer.free()
            yield


@row(1_200)
async def pools(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with StreamPool(device, maximum=2) as pool, pool.stream() as stream:
            await use(stream)
        yield


@row(3_000)
async def leases(device: Device) -> AsyncGenerator[None, None]:
    async with StreamPool(device, maximum=2) as pool:
        while True:
            async with pool.stream() as stream:
                await use(stream)
            yield


@row(1_200)
async def events(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream, device.stream() as other:
        pool = EventPool(device)
        while True:
            await use(stream)
            other.wait(stream.record())
            event = await pool.acquire()
            await other.record(event=event)
            event.release()
            yield


@row(1_200)
async def graphs(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream:
        while True:
            buffer = await stream.upload(ARRAY)
            async with stream.capture() as graph:
                stream.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
            graph.launch(stream)
            await stream.download(buffer)
            graph.close()
            buffer.free()
            yield


@row(1_200)
async def submitted_functions(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream:
        while True:
            buffer = await stream.upload(ARRAY)
            await stream.submit(len, buffer.shape)
            buffer.free()
            yield


@row(1_200)
async def failures(device: Device) -> AsyncGenerator[None, None]:
    async with StreamPool(device, maximum=2) as pool:
        while True:
            async with device.stream() as stream:
                stream.empty_like(ARRAY)
                with contextlib.suppress(ZeroDivisionError):
                    await stream.submit(lambda: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    await aiocuda.gather(stream.submit(lambda: 1 / 0), stream.synchronize())
            async with pool.stream() as lease:
                with contextlib.suppress(ZeroDivisionError):
                    await lease.submit(lambda: 1 / 0)
            yield


@row(1_200)
async def pinned_regions(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream:
        while True:
            array = ARRAY.copy()
            async with device.pin(array) as pinned:
                buffer = await stream.upload(pinned)
                await stream.copy(device.pinned(256, np.uint32), buffer)
                buffer.free()
            yield


@row(1_200)
async def unified_buffers(device: Device) -> AsyncGenerator[None, None]:
    if not device.properties.managed_memory:
        return
    async with device.stream() as stream:
        while True:
            unified = device.unified(256, np.uint32)
            await stream.fill(unified, 1)
            unified.free()
            await stream.fill(device.unified(256, np.uint32), 2)
            yield


@row(1_200)
async def buffers_of_other_libraries(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream, device.stream() as other:
        while True:
            buffer = await stream.upload(ARRAY)
            adopted = other.adopt(Producer(buffer))
            await other.launch(AFFINE, 1, 256, adopted, 256, 3, 1)
            adopted.free()
            described = other.adopt(Interfaced(buffer))
            await other.launch(AFFINE, 1, 256, described, 256, 3, 1)
            del adopted, described
            yield


@row(1_200)
async def lent_streams(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with device.stream() as stream:
            async with stream.lend() as handle:
                imported = aiocuda.Stream.from_handle(device, handle)
                buffer = imported.empty_like(ARRAY)
                await imported.fill(buffer, 1)
                buffer.free()
                await imported.aclose()
            await use(stream)
        yield


@row(1_200)
async def coordinators(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with AsyncCoordinator(device) as coordinator:
            buffer = await coordinator.upload(ARRAY)
            coordinator.compute(AFFINE, 1, 256, buffer, 256, 3, 1)
            assert (await coordinator.download(buffer))[1] == 4
        yield


@row(1_200)
async def nodes(device: Device) -> AsyncGenerator[None, None]:
    async with AsyncCoordinator(device) as coordinator:
        while True:
            buffer = await coordinator.upload(ARRAY)
            coordinator.compute(AFFINE, 1, 256, buffer, 256, 3, 1)
            assert (await coordinator.download(buffer))[1] == 4
            buffer.free()
            yield


@row(1_200)
async def rings(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream:
        while True:
            async with TripleBuffer(2, buffers={"x": (256, np.uint32)}, device=device) as ring, ring.slot() as slot:
                slot.enter("uploading", until=stream.copy(slot.buffer("x"), ARRAY))
                await stream.download(slot.buffer("x"))
            yield


def pipeline(device: Device) -> Pipeline:
    async def work(slot: Any) -> Any:
        buffer = slot.buffer("x", 256, np.uint32)
        slot.stream.copy(buffer, slot.item)
        slot.stream.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
        return await slot.stream.download(buffer)

    return Pipeline(device, [Stage("work", work)], depth=2)


@row(1_200)
async def pipelines(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with pipeline(device) as closed:
            await closed.execute_iteration(ARRAY)
        yield


@row(1_200)
async def runs(device: Device) -> AsyncGenerator[None, None]:
    async with pipeline(device) as shared:
        while True:
            await shared.execute_iteration(ARRAY)
            async for _ in shared.run([ARRAY, ARRAY]):
                pass
            yield


async def answer(batch: Any) -> Any:
    x = await batch.stream.upload(np.stack(batch.items))
    batch.stream.launch(AFFINE, 1, 256, x, 256, 3, 1)
    result = await batch.stream.download(x)
    x.free()
    return result


@row(1_200)
async def batchers(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with MicroBatcher(answer, max_batch_size=1, device=device) as batcher:
            await batcher.submit(ARRAY)
        yield


@row(1_200)
async def requests(device: Device) -> AsyncGenerator[None, None]:
    async with MicroBatcher(answer, max_batch_size=1, device=device) as batcher:
        while True:
            await batcher.submit(ARRAY)
            yield


@row(900)
async def batches_on_the_device(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with to_device([ARRAY, ARRAY], device) as batches:
            async for batch in batches:
                await batch.stream.launch(AFFINE, 1, 256, batch[0], 256, 3, 1)
        yield


@row(600)
async def loaders(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with DataLoader(device, ARRAY, batch_size=128, workers=1) as loader:
            async for batch in loader:
                await batch.stream.launch(AFFINE, 1, 128, batch[0], 128, 3, 1)
        yield


@row(1_200)
async def profilers(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream:
        while True:
            async with StreamProfiler(device), Timeline(device):
                await use(stream)
            yield


@row(450)
async def contexts(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with ManagedContext(driver=device.driver) as context:
            await use(context.stream("compute"))
            async with context.pool.stream() as stream:
                await use(stream)
        yield


@row(600)
async def openings(device: Device) -> AsyncGenerator[None, None]:
    while True:
        async with aiocuda.open_device(driver=device.driver) as opened, opened.stream() as stream:
            await use(stream)
        yield


@row(600)
async def loops(device: Device) -> AsyncGenerator[None, None]:
    async def use_a_stream() -> None:
        async with device.stream() as stream:
            await use(stream)

    while True:
        await asyncio.to_thread(asyncio.run, use_a_stream())
        yield


@row(1_200)
async def users_of_a_graph(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as first:
        buffer = await first.upload(ARRAY)
        async with first.capture() as graph:
            first.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
        while True:
            async with device.stream() as stream:
                await graph.launch(stream)
            yield


@row(4_500)
async def users_of_a_buffer(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as first:
        buffer = await first.upload(ARRAY)
        while True:
            async with device.stream() as stream:
                stream.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
                first.wait(stream)
                stream.wait(first.fill(buffer, 1))
            yield


@row(2_400)
async def checked_streams(device: Device) -> AsyncGenerator[None, None]:
    async with aiocuda.open_device(driver=device.driver, check=True) as checked, checked.stream() as first:
        buffer = await first.upload(ARRAY)
        while True:
            async with checked.stream() as stream:
                await use(stream)
                stream.wait(first)
                await stream.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
                first.wait(stream)
            yield


@row(1_200)
async def streams_of_a_coordinator(device: Device) -> AsyncGenerator[None, None]:
    async with AsyncCoordinator(device) as coordinator:
        while True:
            async with device.stream() as stream:
                buffer = await coordinator.upload(ARRAY, stream=stream)
                await coordinator.compute(AFFINE, 1, 256, buffer, 256, 3, 1, stream=stream)
                buffer.free()
            yield


@row(1_200)
async def tasks(device: Device) -> AsyncGenerator[None, None]:
    async def request(pool: StreamPool) -> None:
        async with pool.stream() as stream:
            await use(stream)

    async with StreamPool(device, maximum=1) as pool:
        while True:
            await asyncio.gather(*(asyncio.create_task(request(pool)) for _ in range(2)))
            yield


@row(3_600)
async def kernels(device: Device) -> AsyncGenerator[None, None]:
    async with device.stream() as stream:
        while True:
            kernel = aiocuda.Kernel(samples.AFFINE.name, source=samples.AFFINE.source, host=samples.AFFINE.host)
            buffer = await stream.upload(ARRAY)
            await stream.launch(kernel, 1, 256, buffer, 256, 3, 1)
            buffer.free()
            yield


@row(1_200)
async def parts_of_a_context(device: Device) -> AsyncGenerator[None, None]:
    async def work(slot: Any) -> Any:
        return await slot.stream.download(await slot.stream.upload(slot.item))

    async with ManagedContext(driver=device.driver) as context:
        while True:
            async with context.pipeline([Stage("work", work)], depth=1) as pipeline:
                await pipeline.execute_iteration(ARRAY)
            yield


class Left(NamedTuple):
    """What the process has."""

    objects: int
    blocks: int  # of Python's allocator: also those of objects that the garbage collector does not know
    descriptors: int
    threads: int

    @classmethod
    def in_process(cls, *, dicts: bool) -> Left:
        gc.collect()
        objects, blocks = gc.get_objects(), sys.getallocatedblocks()
        count = len(objects) if dicts else sum(type(each) is not dict for each in objects)
        return cls(count, blocks, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


async def drop_cancelled_timers() -> None:
    """Let asyncio drop its cancelled timers: it keeps up to a hundred, with their contexts."""
    loop = asyncio.get_running_loop()
    for timer in [loop.call_later(60, gc.collect) for _ in range(101)]:
        timer.cancel()
    await asyncio.sleep(0)


async def measure(make: Row, driver: Any, third: int, limits: Sequence[float]) -> list[Left]:
    """Return the growth in thirds of a run, from the second on, until one is within the limits; six thirds at most.

    What is made once is made in the first. A leak grows in each of them, the objects of a passing moment do not.
    """
    found: list[Left] = []
    async with aiocuda.open_device(driver=driver) as device, contextlib.aclosing(make(device)) as iterations:
        before: Left | None = None
        for _ in range(6):
            for _ in range(third):
                await anext(iterations)
            await drop_cancelled_timers()
            # The simulated driver keeps a clock of each stream: since Python 3.14, the collector knows such dicts, too.
            now = Left.in_process(dicts=driver != "simulated")
            if before is not None:
                found.append(Left(*map(operator.sub, now, before)))
                if len(found) > 1 and all(map(operator.le, found[-1], limits)):
                    break
            before = now
    return found


def check(name: str, driver: str, times: int) -> None:
    """Fail if each iteration leaves an object, or more memory than windows of statistics take."""
    make, third = ROWS[name][0], times // 3
    # Windows of statistics end at 4 096 entries. The simulated driver keeps a clock of each stream.
    blocks = math.inf if driver == "simulated" else 0.5 if third > 3_000 else 10.0
    limits = [SLACK + CACHES.get(name, 0.5) * third, blocks * third, 0.5 * third, 0.5 * third]
    gc.collect()
    gc.freeze()  # for good: the garbage collector does not visit the objects of other tests
    found = asyncio.run(measure(make, driver, third, limits))
    assert all(map(operator.le, found[-1], limits)), (found, limits)


@pytest.mark.parametrize("driver", ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", spread([name for name in ROWS if name not in CACHES]))
@pytest.mark.filterwarnings("ignore::aiocuda.PerformanceWarning")
def test_what_is_closed_leaves_nothing(name: str, driver: str) -> None:
    check(name, driver, QUICK)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore::aiocuda.PerformanceWarning")
def test_what_is_closed_many_times_leaves_nothing(name: str) -> None:
    check(name, "host", ROWS[name][1])


@pytest.mark.soak
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore::aiocuda.PerformanceWarning")
def test_what_is_closed_ten_thousand_times_leaves_nothing(name: str) -> None:
    check(name, "host", 10_000)


#: What is made for each request. The others are made once in a program.
OF_REQUESTS = [
    *("streams", "streams_whose_memory_others_use", "groups", "barriers", "leases", "events", "graphs"),
    *("submitted_functions", "unified_buffers", "buffers_of_other_libraries", "lent_streams", "nodes"),
    *("rings", "runs", "pipelines", "requests", "users_of_a_graph", "users_of_a_buffer", "checked_streams", "tasks"),
    *("streams_of_a_coordinator", "kernels", "parts_of_a_context"),
]
if form().name == "compiled":  # the frames of the core in Python are in the traceback, which the operation holds
    OF_REQUESTS.append("failures")


async def unreachable(name: str, driver: Any) -> Counter[str]:
    """Return the objects of aiocuda that only the garbage collector frees, by their types."""
    async with aiocuda.open_device(driver=driver) as device, contextlib.aclosing(ROWS[name][0](device)) as iterations:
        for _ in range(5):
            await anext(iterations)
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(100):
                await anext(iterations)
            gc.collect()
            types = [type(each) for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    return Counter(each.__qualname__ for each in types if each.__module__.startswith("aiocuda"))


@pytest.mark.parametrize("driver", ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", spread(OF_REQUESTS))
@pytest.mark.filterwarnings("ignore::aiocuda.PerformanceWarning")
def test_requests_leave_nothing_to_the_garbage_collector(name: str, driver: str) -> None:
    assert asyncio.run(unreachable(name, driver)) == Counter()
