"""Batches without a GPU, in other libraries: copies in host memory."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    DeviceBuffer,
    DeviceFault,
    InvalidArgumentError,
    StaleHandleError,
    UnsupportedError,
)
from aiocuda.data import DataLoader, sync_loader, to_device
from aiocuda.driver.host import HostDriver
from aiocuda.memory._staging import SMALL_BYTES
from aiocuda.memory.interchange._dlpack import CPU, CUDA, EXTENSION, host_array, read
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.data.samples import FIELDS, refuses_fives, write
from tests.helpers import TRAP, Latch, quickly

Import = Callable[[Any], Any]


def by_torch(array: Any) -> Any:
    return importlib.import_module("torch").from_dlpack(array).numpy()


@pytest.fixture(params=["numpy", "torch"])
def taken(request: pytest.FixtureRequest) -> Import:
    """The function by which a library takes an array; it returns a NumPy array over the library's memory."""
    if request.param == "numpy":
        return np.from_dlpack
    pytest.importorskip("torch")
    return by_torch


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="host") as opened:
        yield opened


def large(sample: int) -> dict[str, Any]:
    """An array that is uploaded in parts, and a number."""
    return {"x": np.full(SMALL_BYTES + 1, sample, np.int32), "y": sample}


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"fields": FIELDS, "decode": write}, {"decode": large}], ids=["fields", "stacked"])
async def test_batches_of_a_loader(device: Device, taken: Import, options: Any) -> None:
    async with DataLoader(device, range(1, 20), batch_size=3, **options) as loader:
        async for batch in loader:
            wanted = [int(number) for number in batch.indices]
            x, y = taken(batch["x"]), taken(batch["y"])
            assert (x.shape, x.dtype) == (batch["x"].shape, batch["x"].dtype)
            assert x.reshape(len(wanted), -1)[:, 0].tolist() == [number + 1 for number in wanted]
            assert y.reshape(-1)[0] in (wanted[0] + 1, 2 * (wanted[0] + 1))


@pytest.mark.asyncio
async def test_a_batch_without_some_samples_is_complete(device: Device, taken: Import) -> None:
    """Its rows are uploaded in several copies."""
    options: Any = {"fields": FIELDS, "decode": refuses_fives, "on_error": "skip"}
    async with DataLoader(device, range(20), batch_size=20, workers=2, **options) as loader:
        async for batch in loader:
            assert taken(batch["y"]).tolist() == [2 * each for each in range(20) if each % 5]


@pytest.mark.asyncio
async def test_batches_of_another_loader(device: Device, taken: Import) -> None:
    source = [(np.full((2, 3), number, np.float32), number, np.arange(SMALL_BYTES)) for number in range(9)]
    async with to_device(source, device) as batches:
        numbers = []
        async for x, number, large in batches:
            assert taken(x).tolist() == [[float(taken(number))] * 3] * 2
            assert (taken(large) == source[0][2]).all()
            numbers.append(int(taken(number)))
        assert numbers == list(range(9))


def test_batches_of_a_synchronous_loader(taken: Import) -> None:
    with sync_loader(range(6), fields=FIELDS, decode=write, batch_size=2, driver="host") as batches:
        found = []
        for batch in batches:
            assert batch["y"].__dlpack_device__() == (CPU, 0)
            found.append(taken(batch["y"]))
            with pytest.raises(UnsupportedError, match="exported as a copy: drop copy=False"):
                np.from_dlpack(batch["y"], copy=False)
        assert [each.tolist() for each in found] == [[0, 2], [4, 6], [8, 10]]
        assert batches.statistics().kept == 0
        with pytest.raises(StaleHandleError):
            taken(batch["y"])
    assert [each.tolist() for each in found] == [[0, 2], [4, 6], [8, 10]]


def test_the_call_that_an_error_recommends_succeeds() -> None:
    with sync_loader(range(2), fields=FIELDS, decode=write, batch_size=2, driver="host") as batches:
        array = next(iter(batches))["y"]
        with pytest.raises(TypeError, match=r"use array\.to_host\(\), or torch\.from_dlpack\(array\)"):
            np.asarray(array)
        assert array.to_host().tolist() == np.from_dlpack(cast("Any", array)).tolist() == [0, 2]


@pytest.mark.asyncio
async def test_a_copy_belongs_to_its_consumer(device: Device, taken: Import) -> None:
    """It outlives the batch, and writing to it does not reach the batch."""
    async with DataLoader(device, range(4), fields=FIELDS, decode=write, batch_size=2) as loader:
        iterator = aiter(loader)
        batch = await anext(iterator)
        copy, again = taken(batch["y"]), taken(batch["y"])
        copy += 1
        assert (await batch.stream.download(batch["y"])).tolist() == again.tolist() == [0, 2]
        await anext(iterator)
        assert loader.statistics().kept == 0
        with pytest.raises(StaleHandleError, match="has been freed"):
            taken(batch["y"])
    assert device.memory.statistics().live_bytes == 0
    await device.aclose()
    assert copy.tolist() == [1, 3]


@pytest.mark.asyncio
async def test_views_and_dtypes(device: Device) -> None:
    dtypes = ["?", "i1", "u2", "i8", "f2", "f8", "c8", "c16"]
    parts = {name: np.arange(24).reshape(4, 6).astype(name) for name in dtypes}
    parts |= {"none": np.zeros((3, 0), np.float32), "one": np.array(7)}
    async with to_device([parts], device) as batches:
        batch = await anext(batches)
        for name, part in parts.items():
            found = np.from_dlpack(cast("Any", batch[name]))
            assert (found.dtype, found.shape, found.tolist()) == (part.dtype, part.shape, part.tolist())
        assert np.from_dlpack(cast("Any", batch["u2"][1:3])).tolist() == parts["u2"][1:3].tolist()
        assert np.from_dlpack(cast("Any", batch["i8"][1].reshape(2, 3))).tolist() == [[6, 7, 8], [9, 10, 11]]
        for version in (None, (1, 0)):
            tensor = read(batch["f8"].__dlpack__(max_version=version))
            assert (tensor.device_type, tensor.device_id, tensor.read_only) == (CPU, 0, False)
            assert (tensor.dtype.name, tensor.shape) == ("float64", (4, 6))


@pytest.mark.asyncio
async def test_bfloat16(device: Device) -> None:
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    async with to_device([np.array([1.5, -2.0], dtype)], device) as batches:
        (buffer,) = await anext(batches)
        found, _ = host_array(buffer)
        assert (found.dtype, found.astype(np.float32).tolist()) == (dtype, [1.5, -2.0])


@pytest.mark.asyncio
async def test_what_is_requested(device: Device) -> None:
    async with to_device([np.arange(3)], device) as batches:
        (buffer,) = await anext(batches)
        assert buffer.__dlpack_device__() == (CPU, 0)
        for options in ({}, {"copy": True}, {"dl_device": (CPU, 0)}, {"copy": None, "max_version": (1, 0)}):
            assert read(buffer.__dlpack__(**cast("Any", options))).device_type == CPU
        refused: list[tuple[Any, str]] = [
            ({"copy": False}, "is exported as a copy: drop copy=False"),
            ({"dl_device": (CUDA, 0)}, r"a copy in host memory .*, and was asked for on CUDA .*: move the copy there"),
        ]
        for options, message in refused:
            with pytest.raises(UnsupportedError, match=message) as caught:
                buffer.__dlpack__(**cast("Any", options))
            assert isinstance(caught.value, BufferError)


@pytest.mark.asyncio
async def test_a_batch_that_an_operation_uses_is_not_copied(device: Device, taken: Import) -> None:
    async with to_device([np.arange(3)], device) as batches, device.stream() as stream:
        batch = await anext(batches)
        (buffer,) = batch
        with Latch(device) as latch:
            latch.hold(stream)
            await quickly(latch.held())
            filled = stream.fill(buffer, 7)
            with pytest.raises(BusyError, match=r"fill.* uses this buffer, and its consumer would read it now: await"):
                taken(buffer)
            latch.release()
            await quickly(filled)
        assert taken(buffer).tolist() == [7, 7, 7]
        batch.used_on(stream)
        stream.fill(buffer[:1], 8)
        await quickly(stream.synchronize())
        assert taken(buffer).tolist() == [8, 7, 7]


@pytest.mark.asyncio
async def test_other_buffers_are_refused_with_the_cure(device: Device, taken: Import) -> None:
    cure = r"is not CUDA's memory, and no other library can use it: `await stream\.download\(buffer\)` is a NumPy array"
    async with device.stream() as stream:
        buffers: list[DeviceBuffer] = [await stream.upload(np.ones(4)), stream.empty(4), device.unified(4)]
        for buffer in buffers:
            assert buffer.__dlpack_device__() == (EXTENSION, 0)
            with pytest.raises(UnsupportedError, match=cure) as caught:
                taken(buffer)
            assert isinstance(caught.value, BufferError)
        assert (await stream.download(buffers[0])).tolist() == [1] * 4


@pytest.mark.asyncio
async def test_a_stream_adopts_the_buffer_itself(device: Device) -> None:
    async with to_device([np.arange(3)], device) as batches, device.stream() as stream:
        (buffer,) = await anext(batches)
        adopted = stream.adopt(buffer)
        assert cast("Any", adopted).address == buffer.address
        await stream.fill(cast("Any", adopted), 5)
        assert np.from_dlpack(cast("Any", buffer)).tolist() == [5, 5, 5]


@pytest.mark.asyncio
async def test_an_object_of_another_library_over_a_batch(device: Device) -> None:
    """Its host memory is uploaded. It is no target: what is written to a copy is lost."""

    class Theirs:
        def __init__(self, buffer: Any) -> None:
            self.__dlpack_device__ = buffer.__dlpack_device__

        def __dlpack__(self, **options: Any) -> Any:
            return buffer.__dlpack__(**options)

    async with to_device([np.arange(3)], device) as batches, device.stream() as stream:
        (buffer,) = await anext(batches)
        assert (await stream.download(await stream.upload(cast("Any", Theirs(buffer))))).tolist() == [0, 1, 2]
        with pytest.raises(InvalidArgumentError, match=r"the target array of shape .* is read-only"):
            await stream.download(buffer, cast("Any", Theirs(buffer)))


@pytest.mark.asyncio
async def test_a_fault_is_raised(taken: Import) -> None:
    async with aiocuda.open_device(driver=HostDriver()) as device:
        batches = to_device([np.arange(3)], device)
        (buffer,) = await anext(batches)
        stream = device.stream()
        with pytest.raises(DeviceFault):
            await stream.launch(TRAP, 1, 1)
        with pytest.raises(DeviceFault):
            taken(buffer)


def test_in_virtual_time() -> None:
    async def main() -> None:
        async with (
            aiocuda.open_device(driver=SimulatedDriver(seed=1)) as device,
            DataLoader(device, range(8), fields=FIELDS, decode=write, batch_size=2, workers=2) as loader,
        ):
            found = [np.from_dlpack(cast("Any", batch["y"])).tolist() async for batch in loader]
            assert list(itertools.chain(*found)) == list(range(0, 16, 2))

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
