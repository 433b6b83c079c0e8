"""M3: CuPy on streams of aiocuda. On a GPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import BusyError, Device, InvalidTypeError, Operation, Stream, UnsupportedError
from aiocuda.lowlevel import queue_of
from tests.helpers import quickly
from tests.integrations.libraries import library, requires
from tests.project.tree import ROOT

cupy = library("cupy")
if TYPE_CHECKING:
    from aiocuda.integrations import cupy as ours
else:
    ours = library("aiocuda.integrations.cupy")

pytestmark = [pytest.mark.gpu, requires("cupy")]

BUSY = 4096


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="cuda") as opened:
        yield opened


@pytest_asyncio.fixture
async def stream(device: Device) -> AsyncIterator[Stream]:
    async with device.stream() as opened:
        yield opened


def handle_of(stream: Stream) -> int:
    queue = queue_of(stream)
    return queue.driver.stream_handle(queue.handle)


def busy(x: Any) -> Any:
    """Enqueue some milliseconds of work."""
    for _ in range(4):
        x = x @ x / BUSY
    return x


@pytest.mark.asyncio
async def test_function_runs_on_our_stream_after_the_work_of_the_caller(stream: Stream) -> None:
    x = cupy.zeros(1 << 20, cupy.float32)
    theirs = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with theirs:
        busy(cupy.ones((BUSY, BUSY), cupy.float32))
        x.fill(7)
        operation = ours.submit(stream, lambda x: (cupy.cuda.get_current_stream().ptr, x.sum()), x)
        assert cupy.cuda.get_current_stream() == theirs
    handle, total = await quickly(operation)
    assert handle == handle_of(stream)
    assert float(total) == 7.0 * (1 << 20)
    assert ours.device_of(stream) == cupy.cuda.Device(0)


@pytest.mark.asyncio
async def test_memory_of_a_dropped_result_is_reused_after_its_use(stream: Stream) -> None:
    totals = []
    for number in range(50):
        result = await quickly(ours.submit(stream, cupy.full, 1 << 20, float(number), cupy.float32))
        busy(cupy.ones((1024, 1024), cupy.float32))
        totals.append(result.sum())
        del result
    assert [float(total) for total in totals] == [float(number) * (1 << 20) for number in range(50)]


@pytest.mark.asyncio
async def test_wait_for_arrays_streams_and_events(device: Device) -> None:
    x = cupy.ones((BUSY, BUSY), cupy.float32)
    theirs, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()
    waits: list[tuple[Callable[[], Operation[None]], Any]] = [
        (lambda: ours.wait(x), cupy.cuda.Stream.null),
        (lambda: ours.wait(), cupy.cuda.Stream.null),
        (lambda: ours.wait(theirs), theirs),
        (lambda: ours.wait(event), theirs),
    ]
    for wait, stream in waits:
        with stream:
            busy(x)
            event.record(stream)
        operation = wait()
        assert not operation.done()
        await quickly(operation)
        assert event.done
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match="wait takes a stream, an event, a tensor"):
        ours.wait(wrong)


@pytest.mark.asyncio
async def test_each_coroutine_has_its_own_stream(device: Device) -> None:
    default = cupy.cuda.get_current_stream()

    async def work(stream: Stream) -> None:
        for _ in range(50):
            assert cupy.cuda.get_current_stream().ptr == handle_of(stream)
            await asyncio.sleep(0)

    async def bystander() -> None:
        for _ in range(80):
            assert cupy.cuda.get_current_stream() == default
            await asyncio.sleep(0)

    streams = [device.stream() for _ in range(4)]
    await quickly(asyncio.gather(bystander(), *[ours.on(stream)(work)(stream) for stream in streams]))
    assert cupy.cuda.get_current_stream() == default
    for stream in streams:
        await stream.aclose()


@pytest.mark.asyncio
async def test_with_block_of_a_stream_contains_no_await(stream: Stream) -> None:
    @ours.on(stream)
    async def work() -> str:
        with pytest.raises(BusyError, match="contains an await"):
            with cupy.cuda.Stream(non_blocking=True):
                await asyncio.sleep(0)
        assert cupy.cuda.get_current_stream().ptr == handle_of(stream)
        await asyncio.sleep(0)
        return "done"

    default = cupy.cuda.get_current_stream()
    assert await quickly(work()) == "done"
    assert cupy.cuda.get_current_stream() == default


@pytest.mark.asyncio
async def test_replay(stream: Stream) -> None:
    theirs = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(1000, cupy.float32)
    with theirs:
        cupy.add(x, 1, out=x)
        theirs.synchronize()
        theirs.begin_capture()
        cupy.add(x, 1, out=x)
        graph = theirs.end_capture()
    await quickly(aiocuda.gather(*[ours.replay(stream, graph) for _ in range(5)]))
    assert (x.get() == 6).all()


@pytest.mark.asyncio
async def test_capture_of_the_caller_is_refused(stream: Stream) -> None:
    theirs = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(4, cupy.float32)
    with theirs:
        cupy.add(x, 1, out=x)
        theirs.synchronize()
        theirs.begin_capture()
        try:
            with pytest.raises(BusyError, match="CuPy's current stream is being captured"):
                ours.submit(stream, cupy.ones, 3)
            cupy.add(x, 1, out=x)
        finally:
            graph = theirs.end_capture()
    await quickly(ours.replay(stream, graph))
    assert (x.get() == 2).all()


@pytest.mark.asyncio
async def test_host_driver_is_refused() -> None:
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        uses: list[Callable[[], object]] = [
            lambda: ours.submit(stream, print), lambda: ours.on(stream), lambda: ours.device_of(stream),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(UnsupportedError, match="CuPy computes on a GPU, and stream-0 belongs"):
                use()


PYTHON_HOST_FUNCTIONS = """
import asyncio, cupy, numpy as np, aiocuda
from aiocuda.integrations import cupy as ours

async def main():
    called = []
    async with aiocuda.open_device(driver="cuda") as device:
        streams = [device.stream() for _ in range(4)]
        theirs = cupy.cuda.Stream(non_blocking=True)
        x = cupy.ones(1 << 16, cupy.float32)
        cupy.cuda.Device().synchronize()
        array = np.ones(1 << 16, np.float32)
        for round_ in range(300):
            theirs.launch_host_func(called.append, round_)
            operations = [ours.submit(stream, cupy.add, x, 1) for stream in streams]
            operations += [stream.upload(array) for stream in streams]
            await aiocuda.gather(*operations)
            await ours.wait(theirs)
        assert called == list(range(300)), len(called)
    print("done")

asyncio.run(main())
"""


@pytest.mark.slow
def test_python_host_functions_beside_aiocuda_that_releases_the_gil() -> None:
    finished = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PYTHON_HOST_FUNCTIONS],
        cwd=ROOT,
        env={**os.environ, "AIOCUDA_GIL": "release"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.stdout == "done\n", finished.stderr[-3000:]


@pytest.mark.asyncio
async def test_results_are_numpy_equal(stream: Stream) -> None:
    array = np.random.default_rng(1).random(1000, np.float32)
    result = await quickly(ours.submit(stream, lambda: cupy.sqrt(cupy.asarray(array))))
    np.testing.assert_allclose(result.get(), np.sqrt(array), rtol=1e-6)
