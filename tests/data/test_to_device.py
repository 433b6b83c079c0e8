"""`to_device`: the batches of another loader."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, ClosedError, Device, InvalidArgumentError, InvalidTypeError, StaleHandleError
from aiocuda.data import Batch, DeviceBatches, to_device
from aiocuda.driver.host import HostDriver
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.data.test_without_copies import NotesUploads
from tests.helpers import LATCH, PATIENCE, quickly, until

Pair = collections.namedtuple("Pair", "image label")  # noqa: PYI024 - the form without types


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any


class Tensor:
    """A tensor of another library: it has `__dlpack__` and nothing else."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def images(number: int) -> np.ndarray[Any, Any]:
    return np.full((2, 3), number, np.float32)


async def contents(batch: Batch) -> dict[Any, Any]:
    return {name: (await batch.stream.download(buffer)).tolist() for name, buffer in batch.items()}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda n: {"image": images(n), "label": np.int32(n)}, ["image", "label"]),
        (lambda n: (images(n), n), [0, 1]),
        (lambda n: [images(n), [n, n]], [0, 1]),
        (lambda n: Pair(images(n), n), ["image", "label"]),
        (lambda n: Sample(images(n), n), ["image", "label"]),
        (images, [0]),
        (lambda n: {"image": Tensor(images(n)), "label": Tensor(np.array([n]))}, ["image", "label"]),
        (lambda n: {"image": np.full((3, 2), n, np.float32).T, "label": True}, ["image", "label"]),
    ],
    ids=["dict", "tuple", "list", "named", "dataclass", "array", "tensors", "transposed"],
)
async def test_batches_of_every_form_arrive(device: Device, made: Any, names: list[Any]) -> None:
    async with to_device((made(number) for number in range(5)), device) as batches:
        numbers = []
        async for batch in batches:
            assert list(batch.keys()) == names
            assert (await contents(batch))[names[0]] == images(batch.number).tolist()
            assert batch[names[0]].dtype == np.float32
            numbers.append(batch.number)
        assert numbers == list(range(5))


@pytest.mark.asyncio
async def test_a_source_is_read_ahead_on_a_thread_and_no_further_than_depth(device: Device) -> None:
    begun: list[int] = []
    threads = set()

    def source() -> Iterator[Any]:
        for number in range(20):
            begun.append(number)
            threads.add(threading.get_ident())
            yield images(number)

    async with to_device(source(), device, depth=2) as batches:
        for number in range(10):
            batch = await anext(batches)
            assert batch.number == number
            while len(begun) < number + 3:  # the batch in hand, and two ahead
                await asyncio.sleep(0.001)
            assert len(begun) == number + 3
    assert threading.get_ident() not in threads
    assert len(threads) == 1


@pytest.mark.asyncio
async def test_an_asynchronous_source_is_read_on_the_loop(device: Device) -> None:
    closed = []

    async def source() -> AsyncIterator[Any]:
        try:
            for number in range(100):
                await asyncio.sleep(0)
                yield {"x": images(number)}
        finally:
            closed.append(True)

    async with to_device(source(), device) as batches:
        async for batch in batches:
            assert (await contents(batch))["x"] == images(batch.number).tolist()
            if batch.number == 6:
                break
    assert closed == [True]


@pytest.mark.asyncio
async def test_the_end_closes_a_generator_and_its_thread(device: Device) -> None:
    closed = threading.Event()

    def source() -> Iterator[Any]:
        try:
            while True:
                yield images(1)
        finally:
            closed.set()

    batches = to_device(source(), device)
    batch = await anext(batches)
    await batches.aclose()
    await batches.aclose()
    assert await asyncio.to_thread(closed.wait, PATIENCE)
    with pytest.raises(StaleHandleError):
        batch.keep()
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


@pytest.mark.asyncio
async def test_without_a_block_the_last_batch_ends_it(device: Device) -> None:
    before = {thread.name for thread in threading.enumerate()}
    numbers = [batch.number async for batch in to_device([images(1), images(2)], device)]
    assert numbers == [0, 1]
    while {thread.name for thread in threading.enumerate() if "to-device" in thread.name} - before:
        await asyncio.sleep(0.001)
    assert device.memory.statistics().live_bytes == 0


@pytest.mark.asyncio
async def test_an_error_of_the_source_comes_after_the_batches_before_it(device: Device) -> None:
    def source() -> Iterator[Any]:
        yield images(0)
        yield images(1)
        raise OSError("the disk is gone")

    numbers = []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        async for batch in to_device(source(), device):
            numbers.append(batch.number)  # noqa: PERF401 - the loop raises
    assert numbers == [0, 1]
    assert "at sample 2" in caught.value.__notes__[0]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("words", r"field 'text' of a batch is no array of numbers but str"),
        (np.array(["a", "b"]), r"field 'text' of a batch is no array of numbers but ndarray .*is text.*leave it out"),
        ([object()], r"field 'text' of a batch is no array of numbers"),
        (None, r"field 'text' of a batch is no array of numbers but NoneType"),
    ],
)
async def test_a_field_without_numbers_is_refused_by_its_name(device: Device, value: Any, message: str) -> None:
    with pytest.raises(InvalidTypeError, match=message) as caught:
        async for _ in to_device([{"x": images(0), "text": value}], device):
            pass
    assert "in batch 0 of the source, counted from 0" in caught.value.__notes__


@pytest.mark.asyncio
async def test_arrays_on_the_device_are_refused(device: Device) -> None:
    async with device.stream() as stream:
        buffer = stream.empty(3)
        with pytest.raises(InvalidTypeError, match="is on the device already"):
            async for _ in to_device([buffer], device):
                pass


@pytest.mark.asyncio
async def test_a_batch_is_valid_until_the_next_one_unless_it_is_kept(device: Device) -> None:
    async with to_device((images(number) for number in range(6)), device) as batches:
        first = (await anext(batches)).keep()
        second = await anext(batches)
        third = await anext(batches)
        assert (await contents(first))[0] == images(0).tolist()
        with pytest.raises(StaleHandleError):
            second.keep()
        first.free()
        with pytest.raises(StaleHandleError):
            first.used_on(third.stream)


@pytest.mark.asyncio
async def test_a_cancelled_request_loses_no_batch(device: Device) -> None:
    gate = threading.Event()

    def source() -> Iterator[Any]:
        for number in range(3):
            gate.wait(LATCH)
            yield images(number)

    async with to_device(source(), device) as batches:
        request = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="each batch goes to one task"):
            await anext(batches)
        request.cancel()
        await asyncio.wait({request})
        assert request.cancelled()
        gate.set()
        assert [batch.number async for batch in batches] == [0, 1, 2]


@pytest.mark.asyncio
async def test_closing_ends_the_wait_for_a_batch(device: Device) -> None:
    gate = threading.Event()

    def source() -> Iterator[Any]:
        gate.wait(LATCH)
        yield images(0)

    batches = to_device(source(), device)
    request = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(batches.aclose())
    with pytest.raises(ClosedError, match="closed while a task waited"):
        await quickly(request)
    gate.set()
    await closing


# -- iterated again --------------------------------------------------------------------------------------------------


class Again:
    """Six batches for each iteration."""

    def __init__(self) -> None:
        self.begun = 0
        self.closed = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        try:
            for number in range(6):
                yield images(number)
        finally:
            self.closed += 1


class AgainAsynchronously(Again):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in Again.__iter__(self):
            await asyncio.sleep(0)
            yield each


class Resets:
    """An iterator that begins again after its end, as those of DALI do."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Resets:
        return self

    def __next__(self) -> Any:
        if self._next == 6:
            self._next = 0
            raise StopIteration
        self._next += 1
        return images(self._next - 1)


def generated() -> Iterator[Any]:
    yield from Again()


async def generated_asynchronously() -> AsyncIterator[Any]:
    for each in Again():
        yield each


SOURCES: dict[str, Any] = {
    "list": lambda: list(Again()),
    "iterable": Again,
    "asynchronous": AgainAsynchronously,
}
ITERATORS: dict[str, Any] = {
    "generator": generated,
    "asynchronous generator": generated_asynchronously,
    "list_iterator": lambda: iter(list(Again())),
}


async def first_items(batches: Any, most: int = 99) -> list[int]:
    """The numbers in the images of the next batches."""
    found: list[int] = []
    async for batch in batches:
        found.append(int((await contents(batch))[0][0][0]))
        if len(found) == most:
            break
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("source", [*SOURCES.values(), Resets], ids=[*SOURCES, "resets"])
async def test_each_async_for_iterates_the_source(device: Device, source: Any) -> None:
    streams = device.statistics().streams
    batches = to_device(source(), device)
    for _ in range(3):
        assert await first_items(batches) == [0, 1, 2, 3, 4, 5]
        assert device.statistics().streams == streams
        assert device.memory.statistics().live_bytes == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
async def test_after_break_a_source_is_iterated_from_its_start(device: Device, source: Any) -> None:
    read = source()
    async with to_device(read, device) as batches:
        left = aiter(batches)
        assert await first_items(left, 3) == [0, 1, 2]
        assert [batch.number async for batch in batches] == list(range(6))
        assert await first_items(batches, 2) == [0, 1]
        assert await first_items(batches, 2) == [0, 1]
        with pytest.raises(ClosedError, match="another `async for` over the same batches was begun"):
            await anext(left)
    assert device.memory.statistics().live_bytes == 0
    if source is Again:
        while read.closed < 4:
            await asyncio.sleep(0.001)
        assert read.begun == 4


@pytest.mark.asyncio
@pytest.mark.parametrize("source", ITERATORS.values(), ids=ITERATORS)
async def test_after_break_an_iterator_goes_on_with_the_batches_read_ahead(device: Device, source: Any) -> None:
    async with to_device(source(), device) as batches:
        assert await first_items(batches, 3) == [0, 1, 2]
        assert await first_items(batches, 1) == [3]
        assert await first_items(batches) == [4, 5]


@pytest.mark.asyncio
async def test_a_cancelled_iteration_loses_no_batch_of_an_iterator(device: Device) -> None:
    gate, reading = threading.Event(), threading.Event()

    def source() -> Iterator[Any]:
        reading.set()
        gate.wait(LATCH)
        yield from Again()

    async with to_device(source(), device) as batches:
        request = asyncio.ensure_future(first_items(batches))
        await until(reading.is_set)
        request.cancel()
        await asyncio.wait({request})
        gate.set()
        assert await first_items(batches) == [0, 1, 2, 3, 4, 5]


@pytest.mark.asyncio
@pytest.mark.parametrize("source", ITERATORS.values(), ids=ITERATORS)
async def test_an_iterator_that_has_ended_is_refused(device: Device, source: Any) -> None:
    batches = to_device(source(), device)
    assert await first_items(batches) == [0, 1, 2, 3, 4, 5]
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"is an iterator that has ended: pass an object that can be"):
            await first_items(batches)
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


@pytest.mark.asyncio
@pytest.mark.parametrize("source", [generated, generated_asynchronously])
async def test_a_generator_that_ended_before_is_refused(device: Device, source: Any) -> None:
    read = source()
    assert len(await first_items(to_device(read, device))) == 6
    with pytest.raises(InvalidArgumentError, match="generator, is an iterator that has ended"):
        await first_items(to_device(read, device))


@pytest.mark.asyncio
async def test_a_generator_that_has_failed_has_ended(device: Device) -> None:
    def source() -> Iterator[Any]:
        yield images(0)
        raise OSError("the disk is gone")

    batches = to_device(source(), device)
    with pytest.raises(OSError, match="the disk is gone"):
        await first_items(batches)
    with pytest.raises(InvalidArgumentError, match="of type generator, is an iterator that has ended"):
        await first_items(batches)


@pytest.mark.asyncio
async def test_a_source_that_has_failed_is_iterated_again(device: Device) -> None:
    failures = [OSError("the disk was busy")]

    class Fails:
        def __iter__(self) -> Iterator[Any]:
            yield images(0)
            if failures:
                raise failures.pop()
            yield images(1)

    batches = to_device(Fails(), device)
    with pytest.raises(OSError, match="the disk was busy"):
        await first_items(batches)
    assert await first_items(batches) == [0, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("source", [[], (), iter([])])
async def test_a_source_without_batches(device: Device, source: Any) -> None:
    batches = to_device(source, device)
    assert await first_items(batches) == []
    if isinstance(source, Iterator):
        with pytest.raises(InvalidArgumentError, match="has ended"):
            await first_items(batches)
    else:
        assert await first_items(batches) == []


@pytest.mark.asyncio
async def test_an_async_for_goes_on_behind_anext(device: Device) -> None:
    """The first batch is taken to learn its shape."""
    async with to_device(Again(), device) as batches:
        assert (await anext(batches)).number == 0
        assert await first_items(batches, 2) == [1, 2]
        assert (await anext(batches)).number == 3
        iteration = aiter(batches)
        assert (await anext(iteration)).number == 0
        assert await first_items(iteration) == [1, 2, 3, 4, 5]
        for ended in (iteration, batches):
            with pytest.raises(StopAsyncIteration):
                await anext(ended)


@pytest.mark.asyncio
async def test_an_iteration_that_has_ended_stays_ended(device: Device) -> None:
    batches = to_device(Again(), device)
    ended, other = aiter(batches), aiter(batches)
    assert await first_items(ended) == [0, 1, 2, 3, 4, 5]
    assert await first_items(other, 1) == [0]
    assert await first_items(ended) == []
    await batches.aclose()


@pytest.mark.asyncio
async def test_two_iterations_at_a_time(device: Device) -> None:
    gate = threading.Event()

    class Waits:
        def __iter__(self) -> Iterator[Any]:
            gate.wait(LATCH)
            yield from Again()

    async with to_device(Waits(), device) as batches:
        left, right = aiter(batches), aiter(batches)
        request = asyncio.ensure_future(anext(left))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="each batch goes to one task"):
            await anext(right)
        gate.set()
        assert (await request).number == 0
        assert (await anext(right)).number == 0
        with pytest.raises(ClosedError, match="another `async for`"):
            await anext(left)
        assert await first_items(right) == [1, 2, 3, 4, 5]


@pytest.mark.asyncio
async def test_an_iteration_whose_beginning_is_cancelled(device: Device) -> None:
    """It waits for the end of the one before, which takes its time."""
    gate, reading = threading.Event(), threading.Event()

    class Waits:
        def __iter__(self) -> Iterator[Any]:
            yield images(0)
            reading.set()
            gate.wait(LATCH)
            yield images(1)

    async with to_device(Waits(), device) as batches:
        left = aiter(batches)
        assert await first_items(left, 1) == [0]
        await until(reading.is_set)
        request = asyncio.ensure_future(first_items(batches))
        await asyncio.sleep(0)
        request.cancel()
        gate.set()
        await asyncio.wait({request})
        assert request.cancelled()
        with pytest.raises(ClosedError):
            await anext(left)
        assert await first_items(batches) == [0, 1]


# -- arrays, arguments, the device -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_device_reads_pinned_arrays_directly() -> None:
    driver = NotesUploads()
    async with aiocuda.open_device(driver=driver) as device:
        array = await device.pinned((4, 1024), np.int64)
        array[...] = 7
        async with to_device([array], device) as batches:
            batch = await anext(batches)
            assert (await contents(batch))[0] == np.asarray(array).tolist()
    assert [(source, nbytes) for source, nbytes in driver.uploads] == [(array.ctypes.data, array.nbytes)]


def test_statistics_have_the_batches_and_the_times() -> None:
    """In virtual time: the source takes 2 s for a batch, the consumer 3 s."""

    class Source:
        async def __aiter__(self) -> AsyncIterator[Any]:
            for number in range(4):
                await asyncio.sleep(2)
                yield images(number)

    async def main(device: Device) -> None:
        async with to_device(Source(), device, depth=1) as batches:
            assert batches.statistics().batches == 0
            assert batches.statistics().throughput == 0.0
            async for _ in batches:
                await asyncio.sleep(3)
            found = batches.statistics()
            await asyncio.sleep(100)
            assert batches.statistics() == found
        assert found.batches == 4
        assert found.nbytes == 4 * images(0).nbytes
        assert found.kept == 0
        assert found.source_seconds == pytest.approx(8, abs=0.1)
        assert found.consumer_seconds == pytest.approx(12, abs=0.1)
        assert found.waited_seconds == pytest.approx(2, abs=0.1)
        assert found.wall_seconds == pytest.approx(14, abs=0.1)
        assert found.throughput == found.batches / found.wall_seconds

    async def opened() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(seed=0)) as device:
            await main(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())


@pytest.mark.asyncio
async def test_a_length_is_that_of_the_source(device: Device) -> None:
    assert len(to_device([1, 2, 3], device)) == 3
    with pytest.raises(InvalidTypeError, match="has no length"):
        len(to_device(iter([1]), device))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda device: to_device(cast("Any", 3), device), InvalidTypeError, "a source of samples has"),
        (lambda device: to_device({"a": 1}, device), InvalidTypeError, "not a dict: pass a list"),
        (lambda _: to_device([], cast("Any", "cuda:0")), InvalidTypeError, r"takes an aiocuda\.Device, not "),
        (lambda device: to_device([], device, depth=0), InvalidArgumentError, "depth is at least 1, not 0"),
        (lambda device: to_device([], device, depth=cast("Any", 1.5)), InvalidTypeError, "depth"),
    ],
)
async def test_wrong_arguments_are_refused(device: Device, call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(device)


@pytest.mark.asyncio
async def test_the_device_may_be_closed_first() -> None:
    async with aiocuda.open_device(driver=HostDriver()) as device:
        batches: DeviceBatches = to_device((images(number) for number in range(9)), device)
        await anext(batches)
    with pytest.raises(aiocuda.ClosedError):
        async for _ in batches:
            pass
    await batches.aclose()


@pytest.mark.asyncio
async def test_a_loader_of_pytorch_arrives(device: Device) -> None:
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.arange(20).reshape(10, 2).float(), torch.arange(10))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    async with to_device(loader, device) as batches:
        assert len(batches) == 3
        found = [await contents(batch) async for batch in batches]
    assert [row for batch in found for row in batch[0]] == dataset.tensors[0].tolist()
    assert [row for batch in found for row in batch[1]] == list(range(10))
