"""Bytes of host memory are written by one copy at a time, however they are named."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, Device, Stream
from aiocuda.memory._host_writes import FEW, HostWrites
from tests.helpers import Latch, quickly

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("kind", ["pageable", "pinned"])
@pytest.mark.parametrize("part", [np.s_[:100], np.s_[:1], np.s_[99:], np.s_[30:50], np.s_[:31], np.s_[49:]], ids=str)
async def test_overlapping_targets(
    device: Device, stream: Stream, other: Stream, latch: Latch, kind: str, part: slice
) -> None:
    out: Any = np.zeros(100, np.uint8) if kind == "pageable" else await device.pinned(100, np.uint8)
    whole = part in (np.s_[:1], np.s_[99:])  # these lie in all of it; the others over its middle
    first, second = (out if whole else out[30:50]), out[part]
    buffer = await stream.upload(np.arange(100, dtype=np.uint8))
    latch.hold(stream)
    writing = stream.copy(first, buffer[: len(first)])
    await latch.held()
    for on in (stream, other):
        with pytest.raises(BusyError, match=r"is writing this .* array, or part of it: await it first"):
            on.copy(second, buffer[: len(second)])
        with pytest.raises(BusyError):
            on.copy(memoryview(second).cast("B"), buffer[: len(second)])  # the same bytes by another name
    latch.release()
    await quickly(writing)
    await quickly(other.copy(second, buffer[: len(second)]))


async def test_targets_side_by_side(device: Device, stream: Stream, other: Stream, latch: Latch) -> None:
    out = np.zeros(100, np.uint8)
    buffer = await stream.upload(np.arange(100, dtype=np.uint8))
    latch.hold(stream)
    parts = list(range(0, 100, 10))
    random.Random(0).shuffle(parts)
    copies = [
        on.copy(out[start : start + 10], buffer[start : start + 10])
        for start, on in zip(parts, itertools.cycle((stream, other)), strict=False)
    ]
    for operation in copies[1::2]:
        await quickly(operation)
    with pytest.raises(BusyError):
        other.copy(out, buffer)
    latch.release()
    for operation in copies:
        await quickly(operation)
    assert np.array_equal(out, np.arange(100))
    await quickly(other.copy(out, buffer))


async def test_what_has_failed_or_been_dropped_writes_nothing(stream: Stream, latch: Latch) -> None:
    out = np.zeros(100, np.uint8)
    buffer = await stream.upload(np.ones(100, np.uint8))
    latch.hold(stream)
    abandoned = stream.copy(out[:50], buffer[:50])
    abandoned.abandon()
    with pytest.raises(BusyError):  # the device may still be at it
        stream.copy(out[40:], buffer[40:])
    await latch.held()
    latch.release()
    await quickly(stream.synchronize())
    assert await quickly(stream.download(buffer, out)) is out


async def test_arrays_are_not_held(stream: Stream) -> None:
    buffer = await stream.upload(np.ones(1 << 20, np.uint8))
    out = np.zeros(1 << 20, np.uint8)
    await stream.download(buffer, out)
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None


class Copy:
    """As much of an operation as is asked here."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.is_settled = False


async def test_as_a_plain_search_would_answer() -> None:
    """Random ranges, written and passed in random order, against a list of all of them."""
    rng = random.Random(1)
    host_writes, held = HostWrites(), dict[Any, tuple[int, int]]()
    busy = 0
    for number in range(5_000):
        start, nbytes = rng.randrange(4_000), rng.choice([1, 2, 16, 64, 300])
        expected = {copy for copy, (low, high) in held.items() if low < start + nbytes and start < high}
        found: Any = host_writes.writer(start, nbytes)
        assert found in expected if expected else found is None
        if found is None:
            copy: Any = Copy(number)
            host_writes.add(start, nbytes, copy)
            held[copy] = (start, start + nbytes)
        else:
            busy += 1
        if rng.random() < 0.4 and held:
            copy = rng.choice(list(held))
            copy.is_settled = rng.random() < 0.5  # else it is gone altogether
            del held[copy]
        del found, expected
        copy = None
        assert len(host_writes) == len(held)
    assert 500 < busy < 4_500


@pytest.mark.parametrize("pass_on", [lambda copy: setattr(copy, "is_settled", True), lambda copy: None])
async def test_what_has_passed_is_forgotten(pass_on: Callable[[Any], object]) -> None:
    host_writes = HostWrites()
    for number in range(100 * FEW):
        copy: Any = Copy(number)
        host_writes.add(number * 8, 8, copy)
        pass_on(copy)
    del copy
    assert len(host_writes._writes) <= FEW
    assert len(host_writes) == 0


@pytest.mark.parametrize("nbytes", [400, 1 << 20])
async def test_an_array_that_is_being_written_is_not_read(
    device: Device, stream: Stream, other: Stream, latch: Latch, nbytes: int
) -> None:
    """The host reads it immediately, or in chunks; the download is copied out when the device is done."""
    source = await stream.upload(np.full(nbytes, 7, np.uint8))
    array = np.zeros(2 * nbytes, np.uint8)
    target = other.empty(nbytes, np.uint8)
    latch.hold(stream)
    await latch.held()
    landing = stream.download(source, out=array[:nbytes])
    for reader in (stream, other):
        for part in (array[:nbytes], array[nbytes - 1 : 2 * nbytes - 1]):
            with pytest.raises(
                BusyError, match=rf"Operation {landing.id} download .*await it before the array is read"
            ):
                reader.copy(target, part)
            with pytest.raises(BusyError):
                reader.upload(part)
    free = other.copy(target, array[nbytes:])
    latch.release()
    await quickly(free)
    await quickly(landing)
    await other.copy(target, array[:nbytes])
    assert (await other.download(target) == 7).all()


async def test_a_pinned_array_is_read_in_the_order_of_the_stream(device: Device, stream: Stream) -> None:
    source, target = await stream.upload(np.full(100, 7, np.uint8)), stream.empty(100, np.uint8)
    array = await device.pinned(100, np.uint8)
    stream.download(source, out=array)
    stream.copy(target, array)
    assert (await stream.download(target) == 7).all()


async def test_host_writes_belong_to_the_process(device: Device, stream: Stream, latch: Latch) -> None:
    """Not a device's: two of them could write one array."""
    source = await stream.upload(np.full(100, 7, np.uint8))
    array = np.zeros(100, np.uint8)
    latch.hold(stream)
    await latch.held()
    landing = stream.download(source, out=array)
    async with aiocuda.open_device(driver="host") as another, another.stream() as elsewhere:
        buffer = elsewhere.empty(100, np.uint8)
        with pytest.raises(BusyError, match="await it first"):
            elsewhere.download(buffer, out=array)
        with pytest.raises(BusyError):
            elsewhere.copy(buffer, array)
        latch.release()
        await quickly(landing)
        await elsewhere.copy(buffer, array)
        assert (await elsewhere.download(buffer, out=array) == 7).all()
