"""What a user writes, as a type checker sees it: `tests.typing.wheel` checks it against the wheel, and runs it."""

from __future__ import annotations

import asyncio
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import CompletionPolicy, DriverError, PipelineStats
from aiocuda.context import StepTelemetry
from aiocuda.data import (
    Batch,
    DataLoader,
    SyncArray,
    SyncBatch,
    SyncBatches,
    TensorBatch,
    sync_loader,
    sync_to_device,
    to_device,
)

SOURCE = """
extern "C" __global__ void scale(float a, const float* x, float* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
"""


def scale_on_host(a: float, x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], n: int) -> None:
    y[:n] = a * x[:n]


scale = aiocuda.Kernel("scale", source=SOURCE, host=scale_on_host)


async def verbs(device: aiocuda.Device, x: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    async with device.stream(name="left") as left, device.stream(priority="high") as right:
        assert_type(left, aiocuda.Stream)
        dx, dy = left.empty_like(x), right.empty(x.shape, np.float32)
        assert_type(dx, aiocuda.DeviceBuffer)
        assert_type(dy, aiocuda.DeviceBuffer)
        assert_type(dx.nbytes, int)

        up = left.copy(dx, x)
        assert_type(up, aiocuda.Operation[None])
        assert_type(right.wait(up), aiocuda.Operation[None])
        launched = right.launch(scale, (x.size + 255) // 256, 256, 2.0, dx, dy, x.size)
        assert_type(launched, aiocuda.Operation[None])
        assert_type(right.launch(scale, 2.0, dx, dy, x.size, n=x.size, block=128), aiocuda.Operation[None])
        assert_type(right.zeros(x.shape, x.dtype), aiocuda.DeviceBuffer)
        down = right.download(dy)
        assert_type(down, aiocuda.Operation[npt.NDArray[Any]])
        assert_type(right.record(timing=True), aiocuda.Event)

        assert_type(await aiocuda.gather(up, launched), list[None])
        assert_type(await aiocuda.gather(down, return_exceptions=True), list[npt.NDArray[Any] | BaseException])
        assert_type(await aiocuda.gather(up, launched).wait(), list[None])
        assert_type(aiocuda.wait([left, lambda: True], timeout=60), aiocuda.Operation[None])
        await aiocuda.wait([dx, down])
        async for each in aiocuda.as_completed([up, launched]):
            assert_type(await each, None)
        assert_type(await right.upload(x), aiocuda.DeviceBuffer)
        assert_type(await left.download(dx), npt.NDArray[Any])
        return await down


def names_that_are_not_listed(statistics: PipelineStats, policy: CompletionPolicy, error: Exception) -> bool:
    assert_type(statistics.utilisation, float)
    assert_type(policy.name, str)
    return isinstance(error, DriverError | aiocuda.StaleHandleError | aiocuda.errors.WrongLoopError)


async def with_asyncio(stream: aiocuda.Stream, x: npt.NDArray[np.float32]) -> None:
    buffer = await stream.upload(x)
    assert_type(await asyncio.wait_for(stream.download(buffer), 10.0), npt.NDArray[Any])
    assert_type(await asyncio.shield(stream.download(buffer)), npt.NDArray[Any])
    assert_type(await asyncio.gather(stream.fill(buffer, 0), stream.upload(x)), tuple[None, aiocuda.DeviceBuffer])
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
        task = group.create_task(stream.download(buffer).wait())
    assert_type(task.result(), npt.NDArray[Any])


async def in_steps(x: npt.NDArray[np.float32]) -> None:
    async with aiocuda.ManagedContext(driver="host", asynchronous=False) as context:
        assert_type(context, aiocuda.ManagedContext)
        assert_type(context.stream("compute"), aiocuda.Stream)
        assert_type(context.pool, aiocuda.StreamPool)
        assert_type(context.coordinator, aiocuda.AsyncCoordinator)
        config = aiocuda.StepConfig(
            {"x": x},
            lambda slot: slot.stream.launch(scale, 8, 128, 2.0, slot.buffer("x"), slot.buffer("x"), 1000),
            ["x"],
        )
        assert_type(await context.triple_buffered_step(config), StepTelemetry | None)
        for telemetry in await context.flush():
            assert_type(telemetry, StepTelemetry)
            np.testing.assert_array_equal(telemetry.outputs["x"], 2.0 * x)
        assert_type(context.statistics().streams_created, int)


async def tensors(device: aiocuda.Device, loader: DataLoader, batches: SyncBatches) -> None:
    """Never run: there need be no PyTorch. The last two arguments deliver batches of aiocuda."""
    async with DataLoader(device, range(4), batch_size=2, output="torch") as of_tensors:
        async for images, labels in of_tensors:
            assert_type((images, labels), tuple[Any, Any])
        async for batch in of_tensors.epoch(0):
            assert_type(batch, TensorBatch)
            assert_type(batch["image"], Any)
        assert_type(await anext(aiter(of_tensors)), TensorBatch)
    async for on_device in loader:
        assert_type(on_device["image"], aiocuda.DeviceBuffer)
    async with to_device([1], device, output="torch") as copied, to_device([1], device) as others:
        assert_type(await anext(aiter(copied)), TensorBatch)
        assert_type(await anext(others), Batch)
    with sync_loader(range(4), driver="host", workers=2, output="torch") as plain:
        for images, labels in plain:
            assert_type((images, labels), tuple[Any, Any])
        for tensor_batch in plain.epoch(1):
            assert_type(tensor_batch, TensorBatch)
    for held in batches:
        assert_type(held["image"], SyncArray)
    with sync_to_device([1], output="torch") as first, sync_to_device([1]) as second:
        assert_type(next(iter(first)), TensorBatch)
        assert_type(next(iter(second)), SyncBatch)
    DataLoader(device, range(4), output="jax")  # type: ignore[call-overload]
    DataLoader(device, range(4), batchsize=2)  # type: ignore[call-overload]
    sync_loader(range(4), batchsize=2, output="torch")  # type: ignore[call-overload]


async def mistakes(
    device: aiocuda.Device, stream: aiocuda.Stream, buffer: aiocuda.DeviceBuffer, context: aiocuda.ManagedContext
) -> None:
    """Never run. Each `ignore` marks a mistake that must be found; an unneeded one is an error."""
    device.stream(priority="urgent")  # type: ignore[arg-type]
    context.stream("computation")  # type: ignore[arg-type]
    stream.upload()  # type: ignore[call-arg]
    stream.download(buffer).cancel()  # type: ignore[attr-defined]
    number: int = await stream.download(buffer)  # type: ignore[assignment]
    aiocuda.open_devise(number)  # type: ignore[attr-defined]


async def main() -> None:
    x = np.arange(1000, dtype=np.float32)
    async with aiocuda.open_device(driver="host") as device:
        assert_type(device, aiocuda.Device)
        np.testing.assert_array_equal(await verbs(device, x), 2.0 * x)
        async with device.stream() as stream:
            await with_asyncio(stream, x)

    await in_steps(x)
    other = await aiocuda.open_device(driver="host")
    assert_type(other, aiocuda.Device)
    await other.aclose()


if __name__ == "__main__":
    asyncio.run(main())
