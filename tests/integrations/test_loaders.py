"""Batches of data loaders in PyTorch and CuPy, on a GPU: no later batch overwrites what their streams still read."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.data import DataLoader, sync_loader, to_device
from tests.helpers import until
from tests.integrations.libraries import library, requires

torch = library("torch")
cupy = library("cupy")

pytestmark = [pytest.mark.gpu, requires("torch")]

WIDTH = 1 << 16
FIELDS: dict[str, Any] = {"x": ((WIDTH,), np.float32)}

#: Clock cycles of a kernel that keeps a stream busy for about 2 ms.
SLOW = 4_000_000


def decode(sample: int, out: Any) -> None:
    out["x"][...] = sample


def options(**others: Any) -> dict[str, Any]:
    return {"fields": FIELDS, "decode": decode, "batch_size": 2, "workers": 2, **others}


@pytest.mark.asyncio
@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_tensors_on_a_slow_stream_see_their_own_batch(executor: str) -> None:
    """Each sum is computed behind a slow kernel, when later batches have long been requested."""
    sums = []
    side = torch.cuda.Stream()
    async with aiocuda.open_device(driver="cuda") as device:
        async with DataLoader(device, range(80), **options(executor=executor)) as loader:
            async for batch in loader:
                with torch.cuda.stream(side):
                    tensor = torch.from_dlpack(batch["x"])
                    torch.cuda._sleep(SLOW)
                    sums.append(tensor.double().mean(1))
                del tensor
            side.synchronize()
            assert [value for each in sums for value in each.tolist()] == list(range(80))
            assert loader.statistics().kept == 0
        del sums


@pytest.mark.asyncio
async def test_a_stream_that_is_named_is_waited_for() -> None:
    """The tensor is taken on one stream and used on another one, which `used_on` names."""
    sums = []
    side = torch.cuda.Stream()
    async with aiocuda.open_device(driver="cuda") as device:
        async with DataLoader(device, range(60), **options()) as loader:
            async for batch in loader:
                tensor = torch.from_dlpack(batch["x"])
                with torch.cuda.stream(side):
                    torch.cuda._sleep(SLOW)
                    sums.append(tensor.double().mean(1))
                batch.used_on(side.cuda_stream)
                del tensor
            side.synchronize()
            assert [value for each in sums for value in each.tolist()] == list(range(60))


@pytest.mark.asyncio
async def test_a_tensor_that_lives_on_keeps_its_batch() -> None:
    async with aiocuda.open_device(driver="cuda") as device:
        async with DataLoader(device, range(40), **options()) as loader:
            tensors = [torch.from_dlpack(batch["x"]) async for batch in loader]
            assert [value for each in tensors for value in each.mean(1).tolist()] == list(range(40))
            assert loader.statistics().kept == 20
            live = device.memory.statistics().live_bytes
            tensors.clear()
            gc.collect()
            async for _ in loader:
                pass
        assert live >= 40 * WIDTH * 4
        await until(lambda: device.memory.statistics().live_bytes == 0, "the memory of the kept batches")


@pytest.mark.asyncio
async def test_batches_of_pytorch_are_uploaded() -> None:
    """Pinned tensors, which the device reads directly, and others."""
    data = torch.utils.data.TensorDataset(torch.arange(64).repeat(256, 1).T.float(), torch.arange(64))
    for pin in (True, False):
        loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=pin)
        async with aiocuda.open_device(driver="cuda") as device, to_device(loader, device) as batches:
            found, labels = [], []
            async for batch in batches:
                found += torch.from_dlpack(batch[0]).mean(1).tolist()
                labels += torch.from_dlpack(batch[1]).tolist()
        assert found == labels == list(range(64))


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("on_side", [False, True])
def test_a_plain_loop_sees_its_own_batches(executor: str, on_side: bool) -> None:
    sums = []
    side = torch.cuda.Stream() if on_side else torch.cuda.current_stream()
    with sync_loader(range(80), driver="cuda", **options(executor=executor)) as batches:
        for batch in batches:
            with torch.cuda.stream(side):
                tensor = torch.from_dlpack(batch["x"])
                torch.cuda._sleep(SLOW)
                sums.append(tensor.double().mean(1))
            del tensor
        side.synchronize()
        assert [value for each in sums for value in each.tolist()] == list(range(80))
        assert batches.statistics().kept == 0


def test_a_plain_loop_that_trains_on_the_default_stream() -> None:
    """A model, its optimizer and `loss.item()`; the last tensor is dropped in the block."""
    model = torch.nn.Linear(WIDTH, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    losses = []
    with sync_loader(range(20), driver="cuda", **options()) as batches:
        for _ in range(2):
            for batch in batches:
                x = torch.from_dlpack(batch["x"])
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                del x, loss
            gc.collect()
    assert len(losses) == 20
    assert all(np.isfinite(losses))


def test_a_plain_loop_requests_a_batch_while_its_stream_is_captured() -> None:
    """No event is recorded in the graph: the memory waits until the capture has ended."""
    side = torch.cuda.Stream()
    with sync_loader(range(12), driver="cuda", **options()) as batches:
        iterator = iter(batches)
        batch = next(iterator)
        with torch.cuda.stream(side):
            tensor = torch.from_dlpack(batch["x"])
        still = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        del tensor
        with torch.cuda.graph(graph, stream=side):
            still += 1
            later = next(iterator)
        graph.replay()
        torch.cuda.synchronize()
        assert still.tolist() == [1.0] * 4
        assert torch.from_dlpack(later["x"])[:, 0].tolist() == [2, 3]
        assert [each.number for each in iterator] == [2, 3, 4, 5]


@pytest.mark.asyncio
@requires("cupy")
async def test_arrays_of_cupy_see_their_own_batch() -> None:
    sums = []
    stream = cupy.cuda.Stream(non_blocking=True)
    async with aiocuda.open_device(driver="cuda") as device:
        async with DataLoader(device, range(60), **options()) as loader:
            async for batch in loader:
                with stream:
                    array = cupy.from_dlpack(batch["x"])
                    for _ in range(20):
                        array = array * 1.0
                    sums.append(array.mean(1))
                del array
            stream.synchronize()
            assert [value for each in sums for value in each.tolist()] == list(range(60))
