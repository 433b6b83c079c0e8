"""`Batch` and `SyncBatch` as mappings. Those of the fields 0, 1, … can be unpacked like a tuple."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceBuffer, InvalidTypeError
from aiocuda.data import Batch, DataLoader, SyncArray, SyncBatch, sync_loader, to_device
from aiocuda.driver.host import HostDriver
from tests.data.samples import FIELDS, write


def pair(sample: int) -> tuple[Any, Any]:
    return np.full(3, sample, np.float32), sample


def check_positional(batch: Mapping[Any, Any], of: type) -> None:
    """A batch of a float field and an integer field, which have no names."""
    x, y = batch
    assert (type(x), x.shape, x.dtype) == (of, (2, 3), np.float32)
    assert (type(y), y.shape, y.dtype) == (of, (2,), np.int64)
    for left, right in [batch]:
        assert (left.shape, right.shape) == ((2, 3), (2,))
    shapes = {0: (2, 3), 1: (2,)}
    assert [each.shape for each in batch.values()] == [(2, 3), (2,)]
    assert list(batch.keys()) == [0, 1]
    assert {field: each.shape for field, each in batch.items()} == shapes
    assert {field: each.shape for field, each in dict(batch).items()} == shapes
    assert {field: each.shape for field, each in {**batch}.items()} == shapes
    assert (len(batch), 0 in batch, 1 in batch, 2 in batch, x in batch) == (2, True, True, False, False)
    assert batch.get(2) is None
    match batch:
        case {0: found, **rest}:
            assert found.shape == (2, 3)
            assert list(rest) == [1]
        case _:
            pytest.fail("a batch matches the pattern of a mapping")
    assert "samples, 0, 1>" in repr(batch)
    for refused in (pickle.dumps, copy.copy):
        with pytest.raises(InvalidTypeError, match="belongs to this process"):
            refused(batch)


PAIR = [((3,), np.float32), ((), np.int64)]


def unpacks(sample: int, out: Any) -> None:
    x, y = out
    x[...], y[...] = sample, 2 * sample
    assert out[0] is x
    assert list(out.keys()) == [0, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("decode", [unpacks, None])
async def test_fields_without_names_unpack_in_decode_and_in_the_batch(decode: Any, check: bool) -> None:
    source = range(4) if decode else [pair(sample) for sample in range(4)]
    async with aiocuda.open_device(driver="host", check=check) as device:
        async with DataLoader(device, source, fields=PAIR, decode=decode, batch_size=4) as loader:
            async for x, y in loader:
                assert (x.shape, x.dtype, y.shape, y.dtype) == ((4, 3), np.float32, (4,), np.int64)
            batch = await anext(aiter(loader))
            expected = [0, 2, 4, 6] if decode else [0, 1, 2, 3]
            assert (await batch.stream.download(batch[1])).tolist() == expected


@pytest.mark.parametrize("name", ["float", "to", "cuda", "numpy", "permute"])
def test_an_array_of_a_plain_loop_lacks_the_methods_of_tensors(name: str) -> None:
    with sync_loader(range(2), driver=HostDriver(), fields=FIELDS, decode=write) as batches:
        array = next(iter(batches))["x"]
        assert not hasattr(array, name)
        with pytest.raises(AttributeError, match=rf"SyncArray.* has no '{name}': torch\.from_dlpack\(array\)"):
            getattr(array, name)


@pytest.mark.parametrize(
    "use", [lambda x: x / 2, lambda x: 2 * x, lambda x: x[0], lambda x: bool(x), lambda x: list(x), lambda x: x < 1]
)
def test_an_array_of_a_plain_loop_refuses_operators(use: Any) -> None:
    with sync_loader(range(2), driver=HostDriver(), fields=FIELDS, decode=write) as batches:
        with pytest.raises(InvalidTypeError, match=r"is device memory: compute with torch\.from_dlpack"):
            use(next(iter(batches))["x"])


def check_named(batch: Mapping[Any, Any]) -> None:
    assert list(batch) == list(batch.keys()) == list(FIELDS)
    assert [(field, each.shape[1:]) for field, each in batch.items()] == [("x", (2, 3)), ("y", ())]
    assert [each.shape[1:] for each in batch.values()] == [(2, 3), ()]
    assert dict(batch).keys() == {**batch}.keys() == FIELDS.keys()
    assert ("x" in batch, 0 in batch) == (True, False)
    assert "samples, x, y>" in repr(batch)


@pytest.mark.asyncio
async def test_a_batch_without_names_yields_its_buffers(device: Device) -> None:
    async with DataLoader(device, range(4), decode=pair, batch_size=2) as loader:
        numbers = []
        async for x, y in loader:
            numbers.append((await loader_values(device, x), await loader_values(device, y)))
        assert numbers == [([[0] * 3, [1] * 3], [0, 1]), ([[2] * 3, [3] * 3], [2, 3])]
        batch: Batch = await anext(aiter(loader))
        check_positional(batch, DeviceBuffer)
        assert batch == dict(batch)
        assert next(iter(batch)) is batch[0]


async def loader_values(device: Device, buffer: DeviceBuffer) -> Any:
    async with device.stream() as stream:
        return (await stream.download(buffer)).tolist()


@pytest.mark.asyncio
async def test_a_batch_of_another_loader_without_names_yields_its_buffers(device: Device) -> None:
    def source() -> Iterator[Any]:
        yield np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
        yield (np.ones(4),)

    async with to_device(source(), device) as batches:
        check_positional(await anext(batches), DeviceBuffer)
        (only,) = await anext(batches)
        assert only.shape == (4,)


@pytest.mark.asyncio
@pytest.mark.parametrize("names", [(1, 0), (0, 2), (False, True), ("0", "1")])
async def test_other_numbers_are_names(device: Device, names: tuple[Any, Any]) -> None:
    async with to_device([dict(zip(names, (np.zeros(1), np.ones(1)), strict=True))], device) as batches:
        async for batch in batches:
            assert list(batch) == list(names)
            assert [type(each) for each in batch] == [type(each) for each in names]


@pytest.mark.asyncio
async def test_a_batch_with_names_yields_the_names(device: Device) -> None:
    async with DataLoader(device, range(4), fields=FIELDS, decode=write, batch_size=2) as loader:
        check_named(await anext(aiter(loader)))


def test_a_synchronous_batch_is_iterated_like_an_asynchronous_one() -> None:
    with sync_loader(range(4), decode=pair, batch_size=2, driver="host") as batches:
        found = [(x.to_host().tolist(), y.to_host().tolist()) for x, y in batches]
        assert found == [([[0] * 3, [1] * 3], [0, 1]), ([[2] * 3, [3] * 3], [2, 3])]
        batch: SyncBatch = next(iter(batches))
        check_positional(batch, SyncArray)
    with sync_loader(range(4), fields=FIELDS, decode=write, batch_size=2, driver="host") as batches:
        check_named(next(iter(batches)))
