"""Batches on the default streams of two devices, whose handles are the same: a recording libcuda answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Stream, WrongDeviceError
from aiocuda.data import SyncBatches, sync_loader
from aiocuda.driver.cuda import CudaDriver
from tests.core.test_over_libcuda import fake, library
from tests.data.samples import FIELDS, write
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import IMPORTED
from tests.helpers import PATIENCE, block_until

__all__ = ["fake", "library"]  # fixtures

CAPTURE_IMPLICIT, NOT_FOUND = 906, 400


@pytest.fixture
def driver(fake: Fake) -> CudaDriver:
    fake.value("cuDeviceGetCount", 2)
    return CudaDriver(fake.path)


def loader(driver: CudaDriver, index: int = 0, decode: Callable[[Any, Any], None] = write) -> SyncBatches:
    return sync_loader(range(6), driver=driver, index=index, fields=FIELDS, decode=decode)


@pytest.mark.asyncio
@pytest.mark.parametrize("handle", [1, 2])
async def test_arrays_of_two_devices_are_exported(driver: CudaDriver, handle: int) -> None:
    async with AsyncExitStack() as stack:
        buffers: list[Any] = []
        for index in range(2):
            device = await stack.enter_async_context(aiocuda.open_device(index, driver=driver))
            stream = await stack.enter_async_context(device.stream())
            buffers.append(stream.empty(4, np.float32))
            await stream.synchronize()
        for _ in range(3):
            for buffer in buffers:
                assert buffer.__dlpack__(stream=handle) is not None


@pytest.mark.asyncio
@pytest.mark.parametrize("handle", [0, 1, 2])
async def test_streams_of_two_devices_are_imported(driver: CudaDriver, fake: Fake, handle: int) -> None:
    async with aiocuda.open_device(0, driver=driver) as first, aiocuda.open_device(1, driver=driver) as second:
        contexts = set()
        for device in (first, second):
            stream = Stream.from_handle(device, handle)
            assert stream.__cuda_stream__() == (0, handle)
            fake.forget()
            stream.synchronize()
            call = fake.calls("cuEventRecord")[-1]
            assert call.arguments[1] == handle
            contexts.add(call.context)
        assert len(contexts) == 2


@pytest.fixture
def both(driver: CudaDriver) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        yield [iter(stack.enter_context(loader(driver, index))) for index in range(2)]


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_batches_of_two_devices_are_given_back(driver: CudaDriver, both: list[Any], handle: int) -> None:
    for _ in range(3):
        for batches in both:
            next(batches).used_on(handle)
    for batches in both:
        batch = next(batches)
        assert batch.used_on(handle) is batch


@pytest.mark.parametrize("code", [CAPTURE_IMPLICIT, NOT_FOUND])
def test_a_batch_whose_streams_cannot_be_read_is_given_back_later(driver: CudaDriver, fake: Fake, code: int) -> None:
    go = threading.Event()

    def waits(sample: int, out: Any) -> None:
        if sample == 2:
            assert go.wait(PATIENCE)
        write(sample, out)

    with loader(driver, decode=waits) as loaded:
        batches = iter(loaded)
        next(batches).used_on(IMPORTED).used_on(1)
        block_until(lambda: len(fake.calls("cuMemcpyHtoDAsync")) == 4)  # of two fields of two batches
        loaded.statistics()  # by the loop of the loader, when it has recorded the event of that copy
        fake.answer("cuEventRecord", code, times=1)
        imported = driver.statistics()["imported"]
        next(batches)
        assert not fake.calls("cuStreamWaitEvent")
        assert driver.statistics()["imported"] == imported
        go.set()
        for _ in batches:  # the next request gives it back, and the loop frees its memory a little later
            if fake.calls("cuStreamWaitEvent"):
                break
    assert len(fake.calls("cuStreamWaitEvent")) == 2
    assert len(fake.calls("cuEventCreate")) == len(fake.calls("cuEventDestroy"))


def test_a_stream_of_another_device_is_refused_at_once(driver: CudaDriver, fake: Fake) -> None:
    with loader(driver) as loaded:
        batch = next(iter(loaded))
        fake.value("cuStreamGetDevice", 1)
        with pytest.raises(WrongDeviceError, match="is of device 1, not 0"):
            batch.used_on(IMPORTED)
