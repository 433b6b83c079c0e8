"""Streams of others: what they call ours, and what we call theirs."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, ClosedError, InvalidTypeError, Kernel, StaleHandleError, Stream, UnsupportedError
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from tests.helpers import AFFINE, Latch, jobs_done, open_peer, quickly, until
from tests.memory.others import handle as handle_of

pytestmark = pytest.mark.asyncio


class Foreign(HostDriver):
    """A driver whose handles of streams differ from those that other libraries get, as CUDA's do."""

    def __init__(self) -> None:
        super().__init__()
        self.imported: Counter[int] = Counter()

    def stream_handle(self, stream: int) -> int:
        return stream if self.imported[stream] else super().stream_handle(stream) + 0x7F00_0000

    def stream_has_handle(self, stream: int, handle: int) -> bool:
        return super().stream_has_handle(stream, handle - 0x7F00_0000)

    def stream_import(self, device: int, handle: int) -> int:
        try:
            self._machine.streams[handle] = self._machine.stream(handle - 0x7F00_0000)
        except StaleHandleError:
            raise StaleHandleError(f"{handle} is no CUDA stream", handle=handle) from None
        self.imported[handle] += 1
        return handle

    def stream_destroy(self, stream: int) -> None:
        if self.imported[stream]:
            self.imported[stream] -= 1
            if not self.imported[stream]:
                del self.imported[stream], self._machine.streams[stream]
        else:
            super().stream_destroy(stream)


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    driver = Foreign()
    yield driver
    driver.close()


@pytest.mark.parametrize("driver", ["host", "simulated"])
async def test_stream_without_a_gpu_is_no_stream_of_cuda(driver: Any) -> None:
    """The handles 1 and 2 are CUDA's default streams."""
    async with aiocuda.open_device(driver=driver) as device:
        for _ in range(3):
            stream = device.stream()
            await jobs_done(device)  # a thread that locks staging memory calls the driver, too
            before = device.driver.statistics()
            with pytest.raises(
                UnsupportedError, match=rf"{stream.name} .* {driver} driver .*driver='cuda'.*from_handle"
            ):
                stream.__cuda_stream__()
            assert device.driver.statistics() == before  # it is not exported: it is destroyed at its end
            async with stream.lend() as handle:
                borrowers = [Stream.from_handle(device, handle), Stream.from_handle(device, stream)]
                for borrower in borrowers:
                    buffer = borrower.empty(4, np.uint32)
                    await borrower.fill(buffer, 3)
                    buffer.free()
            await stream.aclose()
            with pytest.raises(ClosedError):
                stream.__cuda_stream__()


async def test_loan_gives_the_handle_that_other_libraries_use(foreign: Foreign) -> None:
    async with aiocuda.open_device(driver=foreign) as device, device.stream() as stream:
        await stream.upload(np.zeros(1 << 20))
        async with stream.lend() as handle:
            assert handle == foreign.stream_handle(stream._queue.handle) != stream._queue.handle
            assert handle == handle_of(stream)
            borrower = Stream.from_handle(device, handle)
            assert handle == handle_of(borrower)
            await device.load(AFFINE)
            buffer = borrower.empty(4, np.uint32)
            borrower.fill(buffer, 3)
            await borrower.launch(AFFINE, 1, 1, buffer, 4, 2, 1)
            assert (await borrower.download(buffer) == 7).all()
            await borrower.aclose()
        assert (await stream.download(buffer) == 7).all()
        with pytest.raises(StaleHandleError):
            Stream.from_handle(device, stream._queue.handle)


async def test_a_stream_that_is_closed_is_forgotten_by_the_driver(foreign: Foreign) -> None:
    async with aiocuda.open_device(driver=foreign) as device, device.stream() as stream:
        handle = foreign.stream_handle(stream._queue.handle)
        first, second = Stream.from_handle(device, handle), Stream.from_handle(device, handle)
        await first.aclose()
        assert foreign.imported == {handle: 1}  # it was imported twice
        assert await quickly(second.fill(second.empty(4), 1)) is None
        await second.aclose()
        assert not foreign.imported
        third = Stream.from_handle(device, handle)
        assert await quickly(third.synchronize()) is None
    assert not foreign.imported


async def test_dropped_imported_streams_do_not_accumulate(foreign: Foreign) -> None:
    async with aiocuda.open_device(driver=foreign) as device, device.stream() as stream:
        handle = foreign.stream_handle(stream._queue.handle)
        for _ in range(50):
            imported = Stream.from_handle(device, handle)
            await imported.fill(imported.empty(4), 1)
            del imported
        gc.collect()
        assert len(resources_of(device).loop_states.here().queues) <= 3


async def test_one_that_is_dropped_with_work_in_flight_is_watched_to_its_end(foreign: Foreign) -> None:
    async with aiocuda.open_device(driver=foreign) as device, device.stream() as stream:
        handle = foreign.stream_handle(stream._queue.handle)
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            last = Stream.from_handle(device, handle).synchronize()
            gc.collect()
            Stream.from_handle(device, handle)
            assert len(resources_of(device).loop_states.here().queues) == 3
            latch.release()
            await quickly(last)


async def test_a_fresh_kernel_is_loaded_first() -> None:
    async with open_peer() as (peer, device):
        kernel = Kernel("fresh", source="__global__ void fresh(int n);", host=lambda n: None)
        owner = device.stream()
        await owner.upload(np.zeros(1 << 20))
        stream = Stream.from_handle(device, peer.inner.stream_handle(owner._queue.handle))
        with peer.holding_jobs():
            with pytest.raises(BusyError, match=r"await device\.load\(kernel\)"):
                stream.launch(kernel, 1, 1, 1)
            loading = asyncio.create_task(device.load(kernel))
            await asyncio.sleep(0)
            assert not loading.done()
        await quickly(loading)
        assert await quickly(stream.launch(kernel, 1, 1, 1)) is None
        assert stream.statistics().operations == 1
        with pytest.raises(InvalidTypeError, match=r"an aiocuda\.Kernel"):
            await device.load("fresh")  # type: ignore[arg-type]  # that is refused
        await stream.aclose()


async def test_a_small_copy_while_no_pinned_memory_is_free_for_it() -> None:
    async with open_peer() as (peer, device):
        owner = device.stream()
        stream = Stream.from_handle(device, peer.inner.stream_handle(owner._queue.handle))
        buffer = stream.empty(4)
        staging = resources_of(device).loop_states.here().staging
        taken: list[int] = []
        await until(lambda: taken or taken.extend(iter(staging.take_small, None)) or taken, "the slab to be locked")
        with pytest.raises(BusyError, match="none is free now"):
            stream.copy(buffer, np.ones(4, np.float32))
        for each in taken:
            staging.return_small(each)
        assert await quickly(stream.copy(buffer, np.ones(4, np.float32))) is None
        with pytest.raises(BusyError, match="between the chunks"):
            stream.upload(np.zeros(1 << 20))
