"""P39: a result of a `MicroBatcher` shares no memory with the slot of its batch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceFault
from aiocuda.serving import Batch, BatchError, MicroBatcher
from tests.helpers import AFFINE, SAXPY, TRAP, Latch, installed, open_peer, quickly, until
from tests.memory.others import handle as handle_of

pytestmark = pytest.mark.asyncio

WIDTH, MOST = 4, 32


class Pair(NamedTuple):
    number: int
    row: Any


@dataclasses.dataclass(frozen=True)
class Answer:
    row: Any
    name: str = "answer"


class Box:
    """An object that aiocuda knows nothing about."""

    def __init__(self, row: Any) -> None:
        self.row = row


#: What the function makes of the rows in the slot's memory, and how a client reads its row from its result.
FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an array": (lambda rows: rows, lambda result: result),
    "rows": (list, lambda result: result),
    "raw bytes": (lambda rows: [row.view(np.uint8) for row in rows], lambda result: result.view(np.float32)),
    "memoryviews": (lambda rows: [memoryview(row) for row in rows], lambda result: result),
    "tuples": (lambda rows: tuple((at, row) for at, row in enumerate(rows)), lambda result: result[1]),
    "named tuples": (lambda rows: [Pair(at, row) for at, row in enumerate(rows)], lambda result: result.row),
    "dicts": (lambda rows: [{"row": row, "best": 1} for row in rows], lambda result: result["row"]),
    "nested": (lambda rows: [{"rows": [(row, None)]} for row in rows], lambda result: result["rows"][0][0]),
    "dataclasses": (lambda rows: [Answer(row) for row in rows], lambda result: result.row),
    "unknown objects": (lambda rows: [Box(row) for row in rows], lambda result: result.row),
}


async def filled(batch: Batch[int]) -> Any:
    """Rows in the slot's memory: each has the number of its item."""
    out = batch.slot.pinned("out", (MOST, WIDTH))
    await out
    np.asarray(out)[: batch.size] = np.array(batch.items)[:, None]
    return out[: batch.size]


async def answers(batcher: MicroBatcher[int, Any], numbers: Sequence[int]) -> list[Any]:
    return await quickly(asyncio.gather(*map(batcher.submit, numbers)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("clients", [1, 8, 32, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
async def test_each_client_has_its_own_answer(device: Device, form: str, clients: int) -> None:
    """Each client reads its result when the slot has computed many other batches."""
    make, read = FORMS[form]

    async def infer(batch: Batch[int]) -> Any:
        return make(await filled(batch))

    options: Any = {"max_batch_size": MOST, "batch_wait_timeout_s": 0, "max_queued_requests": 2000}
    async with MicroBatcher(infer, **options, device=device) as batcher:
        found = [*await answers(batcher, range(clients)), *await answers(batcher, range(clients, 2 * clients))]
        await answers(batcher, [-1] * MOST)
        statistics = batcher.statistics()
    assert [list(read(result)) for result in found] == [[number] * WIDTH for number in range(2 * clients)]
    unknown = form == "unknown objects"  # they are not copied: the slot takes other memory
    assert statistics.results_copied == (0 if unknown else 2 * clients + MOST)
    assert statistics.blocks_replaced == (statistics.batches - 1 if unknown else 0)


async def test_object_that_many_results_contain_stays_one_object(device: Device) -> None:
    labels = ["cat", "dog"]

    async def infer(batch: Batch[int]) -> Any:
        rows = await filled(batch)
        return [{"labels": labels, "row": row} for row in rows]

    async with MicroBatcher(infer, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        found = await answers(batcher, range(MOST))
        assert all(result["labels"] is labels for result in found)
        assert [result["row"][0] for result in found] == list(range(MOST))


async def test_copies_are_the_receivers(device: Device) -> None:
    """They are ordinary arrays that nothing else uses; what shares no memory with the slot is passed on as it is."""
    fresh = np.arange(3)
    kept: dict[str, Any] = {"fresh": fresh, "none": None}

    async def infer(batch: Batch[int]) -> Any:
        rows = await filled(batch)
        return [(rows[0], rows[0], kept, fresh[1:])]

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        row, same, untouched, view = await quickly(batcher.submit(7))
        assert type(row) is np.ndarray
        assert row.flags.owndata
        assert row.flags.writeable
        assert same is not None
        assert untouched is kept
        assert view.base is fresh
        assert batcher.statistics().results_copied == 1


async def test_download_that_the_function_has_not_awaited(device: Device, latch: Latch) -> None:
    """The results are read when the work on the stream is done."""
    releases: list[asyncio.Task[None]] = []

    async def release() -> None:
        await latch.held()
        latch.release()

    async def infer(batch: Batch[int]) -> Any:
        out, x = batch.slot.pinned("out", MOST), batch.slot.buffer("x", MOST)
        await out
        out[:] = -1.0
        latch.hold(batch.stream)
        batch.stream.fill(x, float(batch.items[0]))
        batch.stream.download(x, out=out)
        releases.append(asyncio.create_task(release()))
        return out[: batch.size]  # of one dimension: its items are numbers

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        assert await quickly(batcher.submit(3)) == 3.0
        assert await quickly(batcher.submit(4)) == 4.0


# -- device memory ---------------------------------------------------------------------------------------------------


async def on_device(batch: Batch[int]) -> Any:
    """The numbers of the items, in a buffer of the slot."""
    source, x = batch.slot.pinned("in", MOST), batch.slot.buffer("x", MOST)
    await source
    np.asarray(source)[: batch.size] = batch.items
    batch.stream.copy(x, source)
    return x


@pytest.mark.parametrize("clients", [1, 8, 32])
async def test_slices_of_a_buffer_are_copied_in_stream_order(device: Device, clients: int) -> None:
    async def infer(batch: Batch[int]) -> Any:
        x = await on_device(batch)
        return [{"x": x[at : at + 1]} for at in range(batch.size)]

    async with MicroBatcher(infer, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        found = [*await answers(batcher, range(clients)), *await answers(batcher, range(clients, 2 * clients))]
        assert batcher.statistics().results_copied == 2 * clients
        assert batcher.statistics().blocks_replaced == 0
    async with device.stream() as stream:
        assert [await stream.download(result["x"]) for result in found] == list(range(2 * clients))


async def test_buffer_that_all_requests_get_is_copied_once(device: Device) -> None:
    async def infer(batch: Batch[int]) -> Any:
        return [await on_device(batch)] * batch.size

    async with MicroBatcher(infer, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        first, second = await answers(batcher, range(2)), await answers(batcher, range(5, 7))
    assert first[0] is first[1]
    assert first[0] is not second[0]
    async with device.stream() as stream:
        assert (await stream.download(first[0]))[:2].tolist() == [0, 1]
        assert (await stream.download(second[0]))[:2].tolist() == [5, 6]


class Foreign:
    """An array of another library over device memory, as ``__cuda_array_interface__`` describes it."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, typestr = self.buffer.shape, self.buffer.dtype.str
        return {"shape": shape, "typestr": typestr, "data": (self.buffer.address, False), "version": 3}


class ForeignByDLPack:
    """The same by DLPack."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.buffer.__dlpack__(stream=stream)


class Broken:
    """An array of another library that cannot be described."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("not on this device")


@pytest.mark.parametrize("kind", [Foreign, ForeignByDLPack])
async def test_array_of_another_library_in_device_memory_fails_its_request_alone(device: Device, kind: Any) -> None:
    async def infer(batch: Batch[int]) -> Any:
        x = await on_device(batch)
        elsewhere = batch.stream.empty(4)
        return [x[:1], [kind(x[1:2])], kind(elsewhere), Broken(), 5]

    async with MicroBatcher(infer, max_batch_size=5, device=device) as batcher:
        requests = [batcher.submit_nowait(number) for number in range(5)]
        one, bad, elsewhere, broken, last = await quickly(asyncio.gather(*requests, return_exceptions=True))
        assert isinstance(one, aiocuda.DeviceBuffer)
        assert isinstance(bad, BatchError)
        assert f"a result is a {kind.__module__}.{kind.__qualname__} in the device memory of its slot" in str(bad)
        assert "return a copy of it, `array.copy()`, or download it" in str(bad)
        assert (type(elsewhere), type(broken), last) == (kind, Broken, 5)
        assert (batcher.statistics().answered, batcher.statistics().failed) == (4, 1)


# -- other holders ---------------------------------------------------------------------------------------------------


async def test_memory_that_is_held_is_not_used_again(device: Device) -> None:
    """Views that the function has left somewhere else keep their content; their memory then goes back to its pool."""
    kept: list[tuple[Any, Any]] = []

    async def infer(batch: Batch[int]) -> Any:
        rows, x = await filled(batch), await on_device(batch)
        if batch.items[0] % 2 == 0:
            kept.append((rows.view(np.uint32), batch.slot.buffer("x")[:1]))
        assert batch.slot.buffer("x") is x  # without a shape, too
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher, device.stream() as stream:
        for number in range(6):
            await quickly(batcher.submit(number))
        assert batcher.statistics().blocks_replaced == 6
        for (rows, x), number in zip(kept, (0, 2, 4), strict=True):
            assert (rows.view(np.float32) == number).all()
            assert await stream.download(x) == [number]
        del rows, x
        kept.clear()
        for number in (1, 3, 5):
            await quickly(batcher.submit(number))
        assert batcher.statistics().blocks_replaced == 6
        await until(lambda: device.memory.statistics().live_bytes == 4 * MOST, "the replaced buffers going back")


async def test_view_that_a_running_task_holds(device: Device) -> None:
    """The function has left a task behind, which reads the memory later."""
    gate, found = asyncio.Event(), []

    async def later(rows: Any) -> None:
        await gate.wait()
        found.append(rows[0, 0])

    tasks = []

    async def infer(batch: Batch[int]) -> Any:
        tasks.append(asyncio.create_task(later(await filled(batch))))
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        for number in range(4):
            await quickly(batcher.submit(number))
        gate.set()
        await quickly(asyncio.gather(*tasks))
    assert found == [0, 1, 2, 3]


async def test_buffer_without_a_shape_after_its_memory_was_replaced(device: Device) -> None:
    kept: list[Any] = []
    shapes: list[tuple[Any, Any]] = []

    async def infer(batch: Batch[int]) -> Any:
        x = batch.slot.buffer("x", (2, 8), np.int16) if not kept else batch.slot.buffer("x")
        shapes.append((x.shape, x.dtype))
        kept.append(x)
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        for number in range(3):
            await quickly(batcher.submit(number))
    assert shapes == [((2, 8), np.int16)] * 3
    assert len({x.address for x in kept}) == 3


async def test_buffer_that_is_held_after_a_request_of_another_form(device: Device) -> None:
    """The slot no longer remembers the request: the reference of the program does not count as its own."""
    kept: list[Any] = []

    async def infer(batch: Batch[int]) -> Any:
        x = batch.slot.buffer("x", (4,) if batch.number < 2 else [4])  # the slot remembers immutable shapes alone
        await batch.stream.fill(x, batch.number)
        if batch.number == 2:
            kept.append(x)
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher, device.stream() as stream:
        for number in range(4):
            await quickly(batcher.submit(number))
        assert (await stream.download(kept[0])).tolist() == [2.0] * 4
        assert batcher.statistics().blocks_replaced == 1


async def test_buffer_that_changes_its_shape_is_let_go_of_at_once(device: Device) -> None:
    async def infer(batch: Batch[int]) -> Any:
        items = batch.items[0]
        batch.slot.buffer("x", items)
        await until(lambda: device.memory.statistics().live_bytes == 4 * items, "the old buffer going back")
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        for items in (1000, 2000, 1000):
            assert await quickly(batcher.submit(items)) == items
        assert batcher.statistics().blocks_replaced == 0


async def test_function_that_returns_nothing_of_the_slot_replaces_and_copies_nothing(device: Device) -> None:
    async def infer(batch: Batch[int]) -> Any:
        x = await on_device(batch)
        batch.stream.launch(SAXPY, 1, MOST, MOST, 2.0, x, x)
        batch.stream.download(x, out=batch.slot.pinned("out", MOST))
        scaled = await batch.stream.download(x)
        event = batch.stream.record(timing=True)
        await event
        return scaled[: batch.size] if batch.items[0] % 2 else [{"score": float(each)} for each in scaled[: batch.size]]

    async with MicroBatcher(infer, max_batch_size=MOST, max_concurrent_batches=2, device=device) as batcher:
        for first in range(60):
            await answers(batcher, range(first, first + 8))
        statistics = batcher.statistics()
    assert (statistics.results_copied, statistics.blocks_replaced) == (0, 0)


async def test_memory_of_a_graph_stays(device: Device) -> None:
    """A program that keeps a graph over the slot's memory gets that memory for each batch, whoever holds it."""
    graphs: dict[Any, Any] = {}
    kept: list[Any] = []

    async def infer(batch: Batch[int]) -> Any:
        stream, x = batch.stream, batch.slot.pinned("x", MOST, np.uint32)
        if stream not in graphs:
            await x
            buffer = batch.slot.buffer("x", MOST, np.uint32)
            async with stream.capture() as graphs[stream]:
                stream.copy(buffer, x)
                stream.launch(AFFINE, 1, MOST, buffer, MOST, 3, 1)
                stream.download(buffer, out=x)
        x[: batch.size] = batch.items
        await graphs[stream].launch(stream)
        kept.append(x)
        return x[: batch.size]

    async with MicroBatcher(infer, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        rounds = [await answers(batcher, range(first, first + 8)) for first in range(0, 80, 8)]
        assert [result for found in rounds for result in found] == [3 * number + 1 for number in range(80)]
        assert batcher.statistics().blocks_replaced == 0
        graphs.clear()
        gc.collect()
        await quickly(batcher.submit(1))
        assert batcher.statistics().blocks_replaced > 0


class Graphs:
    """A batch function of a program that keeps a graph for each stream, over the memory of the stream's slot."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make
        self.graphs: dict[Any, Any] = {}
        self.kept: list[Any] = []

    async def __call__(self, batch: Batch[int]) -> Any:
        stream, x = batch.stream, batch.slot.pinned("x", MOST, np.uint32)
        if stream not in self.graphs:
            await x
            buffer = batch.slot.buffer("x", MOST, np.uint32)
            async with stream.capture() as graph:
                stream.copy(buffer, x)
                stream.launch(AFFINE, 1, MOST, buffer, MOST, 3, 1)
                stream.download(buffer, out=x)
            self.graphs[stream] = graph, x, buffer
        x[: batch.size] = batch.items
        await self.graphs[stream][0].launch(stream)
        return [self.make(x[at : at + 1]) for at in range(batch.size)]


class Slotted:
    __slots__ = ("row",)

    def __init__(self, row: Any) -> None:
        self.row = row


def model(row: Any) -> Any:
    import pydantic

    class Model(pydantic.BaseModel):
        row: Any

    return Model(row=row)


#: Objects that hold a row, and that aiocuda does not rebuild.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "pydantic": model,
    "plain class": Box,
    "slots": Slotted,
    "namespace": lambda row: types.SimpleNamespace(row=row),
    "closure": lambda row: lambda: row,
    "default": lambda row: lambda row=row: row,
    "method": lambda row: Box(row).__repr__,
    "partial": lambda row: functools.partial(list, row),
    "generator": lambda row: (each for each in row),
    "nested": lambda row: {"box": [Box({"row": (row, 1)})]},
    "memoryview": lambda row: Box(memoryview(row)),
    "array of objects": lambda row: Box(np.array([None, Box(row)])),
}
#: Their names, as parameters.
FORMS_OF_HOLDERS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "pydantic" and not installed(name), reason="needs pydantic"))
    for name in HOLDERS
]


@pytest.mark.parametrize("clients", [1, 8])
@pytest.mark.parametrize("form", FORMS_OF_HOLDERS)
async def test_object_that_holds_memory_of_a_graph_fails_its_batch(device: Device, form: str, clients: int) -> None:
    """1 592 of 1 600 clients got the answer of another one."""
    graphs = Graphs(HOLDERS[form])
    async with MicroBatcher(graphs, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        for first in (0, 100):
            requests = [batcher.submit_nowait(first + number) for number in range(clients)]
            failures = await quickly(asyncio.gather(*requests, return_exceptions=True))
            assert [type(failure) for failure in failures] == [BatchError] * clients
            assert "`array.copy()`" in str(failures[0])
        graphs.make = np.copy
        assert await answers(batcher, range(4)) == [[1], [4], [7], [10]]
        assert batcher.statistics().failed == 2 * clients


@pytest.mark.parametrize("form", FORMS_OF_HOLDERS)
async def test_object_that_holds_a_copy_is_passed_on_beside_a_graph(device: Device, form: str) -> None:
    """The program keeps the array itself, too, in each batch, and outside of the results."""
    make = HOLDERS[form]

    def copied(row: Any) -> Any:
        graphs.kept.append(row)
        return make(np.asarray(row).copy())

    graphs = Graphs(copied)
    async with MicroBatcher(graphs, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        for first in range(0, 80, 8):
            found = await answers(batcher, range(first, first + 8))
            assert not any(isinstance(each, Exception) for each in found)
        statistics = batcher.statistics()
    assert len(graphs.kept) == 80
    assert (statistics.answered, statistics.results_copied, statistics.blocks_replaced) == (80, 0, 0)


async def test_result_that_the_function_keeps_until_the_next_one_fails_its_batch(device: Device) -> None:
    """The next batch has as many references to the memory as the one before."""

    def make(row: Any) -> Any:
        graphs.kept[:] = [Box(row)]
        return graphs.kept[0]

    graphs = Graphs(make)
    async with MicroBatcher(graphs, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        for number in range(4):
            with pytest.raises(BatchError):
                await quickly(batcher.submit(number))


async def test_object_that_holds_device_memory_of_a_graph_fails_its_batch(device: Device) -> None:
    """As a buffer, or as an array of another library."""
    graphs = Graphs(Box)

    async def infer(batch: Batch[int]) -> Any:
        await graphs(batch)
        buffer = graphs.graphs[batch.stream][2]
        return [Box(Foreign(buffer[:1]) if item else buffer[:1]) for item in batch.items]

    async with MicroBatcher(infer, max_batch_size=1, batch_wait_timeout_s=0, device=device) as batcher:
        for item in (0, 1):
            with pytest.raises(BatchError, match="put a copy into the object"):
                await quickly(batcher.submit(item))


async def test_search_of_a_large_result_ends(device: Device) -> None:
    """At most 10 000 objects are searched, and the loop runs other tasks between them."""

    def make(row: Any) -> Any:
        graphs.kept.append(row)
        return Box([Box(None) for _ in range(100_000)])

    graphs = Graphs(make)
    async with MicroBatcher(graphs, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        steps, request = 0, batcher.submit_nowait(0)
        while not request.done():
            await asyncio.sleep(0)
            steps += 1
        assert len((await request).row) == 100_000
        assert steps > 20


# -- failures --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stubborn:
    """It cannot be copied."""

    row: Any

    def __copy__(self) -> Any:
        raise ZeroDivisionError("no copies")


async def test_result_that_cannot_be_rebuilt_fails_its_request_alone(device: Device) -> None:
    async def infer(batch: Batch[int]) -> Any:
        rows = await filled(batch)
        return [rows[0], Stubborn(rows[1]), Stubborn(None), ValueError("its own")]

    async with MicroBatcher(infer, max_batch_size=4, device=device) as batcher:
        requests = [batcher.submit_nowait(number) for number in range(4)]
        row, bad, good, own = await quickly(asyncio.gather(*requests, return_exceptions=True))
    assert list(row) == [0] * WIDTH
    assert isinstance(bad, BatchError)
    assert isinstance(bad.__cause__, ZeroDivisionError)
    assert isinstance(good, Stubborn)
    assert (type(own), own.args) == (ValueError, ("its own",))


async def test_copy_that_the_driver_refuses_fails_its_batch() -> None:
    async def infer(batch: Batch[int]) -> Any:
        return [await on_device(batch)]

    async with open_peer() as (peer, device):
        async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
            peer.refuse("copy")
            with pytest.raises(aiocuda.DriverError, match="does not take this"):
                await quickly(batcher.submit(1))
            assert isinstance(await quickly(batcher.submit(2)), aiocuda.DeviceBuffer)
        assert device.statistics().in_flight == 0


async def test_fault_during_a_copy_is_the_error_of_the_batch() -> None:
    """A device fault while the results are copied closes the batcher, as one of the function's work does."""
    async with open_peer() as (peer, device):

        async def infer(batch: Batch[int]) -> Any:
            x, stream = await on_device(batch), batch.stream
            await stream.synchronize()

            def fault(*_: object) -> None:
                del peer.before["allocate"]
                stream.launch(TRAP, 1, 1)

            peer.before["allocate"] = fault  # of the memory for the copy
            return [x]

        async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
            with pytest.raises(DeviceFault):
                await quickly(batcher.submit(1))
            assert not batcher.healthy
            with pytest.raises(DeviceFault):
                await quickly(batcher.submit(2))


async def test_batcher_that_is_left_while_results_are_copied() -> None:
    """Nothing hangs, and the request has one outcome."""
    holding = asyncio.Event()
    async with open_peer() as (peer, device):
        with Latch(device) as latch:

            async def infer(batch: Batch[int]) -> Any:
                x, stream = await on_device(batch), batch.stream

                def hold(*_: object) -> None:
                    del peer.before["allocate"]
                    latch.hold(stream)
                    holding.set()

                peer.before["allocate"] = hold  # of the memory for the copy
                return [x]

            with pytest.raises(ZeroDivisionError):
                async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
                    request = batcher.submit_nowait(1)
                    await quickly(holding.wait())
                    await quickly(latch.held())
                    asyncio.get_running_loop().call_soon(latch.release)
                    raise ZeroDivisionError
            assert isinstance(await quickly(request), aiocuda.DeviceBuffer)


# -- large results ---------------------------------------------------------------------------------------------------


class Noting(np.ndarray[Any, np.dtype[Any]]):
    """An array that notes which threads have copied it."""

    threads: list[int] = []  # noqa: RUF012 - shared by all of them

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        self.threads.append(threading.get_ident())
        return super().copy(*args, **kwargs)


@pytest.mark.parametrize(("items", "on_loop"), [(1 << 10, True), (1 << 20, False)])
async def test_large_results_are_copied_on_a_thread(device: Device, items: int, on_loop: bool) -> None:
    async def infer(batch: Batch[int]) -> Any:
        out = batch.slot.pinned("out", items)
        await out
        np.asarray(out)[:] = batch.items[0]
        return [np.asarray(out).view(Noting)]

    Noting.threads.clear()
    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        found = [await quickly(batcher.submit(number)) for number in range(3)]
    assert [(array[0], array[-1]) for array in found] == [(0, 0), (1, 1), (2, 2)]
    assert all(type(array) is Noting for array in found)
    assert [thread == threading.get_ident() for thread in Noting.threads] == [on_loop] * 3


# -- PyTorch ---------------------------------------------------------------------------------------------------------


async def test_tensors_of_pytorch_are_cloned(device: Device) -> None:
    torch = pytest.importorskip("torch")

    async def infer(batch: Batch[int]) -> Any:
        rows = torch.from_numpy(np.asarray(await filled(batch)))
        if batch.items[0] % 2:
            return rows
        return [{"row": row, "T": row.t(), "fresh": torch.zeros(2)} for row in rows]

    async with MicroBatcher(infer, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
        rounds = [await answers(batcher, range(first, first + 9)) for first in range(0, 90, 9)]
        statistics = batcher.statistics()
    for first, found in zip(range(0, 90, 9), rounds, strict=True):
        rows = found if first % 2 else [result["row"] for result in found]
        assert [row.tolist() for row in rows] == [[number] * WIDTH for number in range(first, first + 9)]
    assert (statistics.results_copied, statistics.blocks_replaced) == (90, 0)


class Tensor:
    """As much of a tensor of PyTorch on a GPU as a copy needs, over a buffer of any driver."""

    is_cuda, device, nbytes = True, "cuda:0", 4
    current: str | None = None  # the handle of PyTorch's current stream

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.shape = buffer.shape
        self.cloned_on: str | None = None
        self.recorded_for: list[str] = []

    def data_ptr(self) -> int:
        return int(self.buffer.address)

    def element_size(self) -> int:
        return int(self.buffer.dtype.itemsize)

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def clone(self) -> Tensor:
        copy = Tensor(self.buffer)
        copy.cloned_on = Tensor.current
        return copy

    def record_stream(self, stream: str) -> None:
        self.recorded_for.append(stream)


@contextlib.contextmanager
def torch_stream(stream: str) -> Iterator[None]:
    Tensor.current = stream
    yield
    Tensor.current = None


async def test_tensors_in_device_memory_are_cloned_on_the_stream_of_the_slot(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This stands in for PyTorch. The test after it runs with PyTorch on a GPU."""
    cuda = types.SimpleNamespace(
        ExternalStream=lambda handle, device: f"external {handle} on {device}",
        stream=torch_stream,
        current_stream=lambda device: f"current on {device}",
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, cuda=cuda))
    given: list[Tensor] = []
    handles: list[int] = []

    async def infer(batch: Batch[int]) -> Any:
        x = await on_device(batch)
        given.append(Tensor(x[:1]))
        elsewhere = Tensor(batch.stream.empty(4))
        handles.append(handle_of(batch.stream))
        return [(given[-1], elsewhere, elsewhere)]

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        copy, elsewhere, same = await quickly(batcher.submit(1))
        assert batcher.statistics().results_copied == 1
    assert copy is not given[0]
    assert (copy.cloned_on, copy.recorded_for) == (f"external {handles[0]} on cuda:0", ["current on cuda:0"])
    assert elsewhere is same
    assert elsewhere.cloned_on is None


@pytest.mark.gpu
async def test_tensors_of_pytorch_in_device_memory_are_cloned_in_stream_order() -> None:
    torch = pytest.importorskip("torch")
    async with aiocuda.open_device(driver="cuda") as device:

        async def infer(batch: Batch[int]) -> Any:
            x = torch.from_dlpack(await on_device(batch))
            return [x[at : at + 1] for at in range(batch.size)]

        async with MicroBatcher(infer, max_batch_size=MOST, batch_wait_timeout_s=0, device=device) as batcher:
            found = [*await answers(batcher, range(32)), *await answers(batcher, range(32, 64))]
            await answers(batcher, [-1] * 32)
            assert batcher.statistics().results_copied == 96
            assert batcher.statistics().failed == 0
        assert [int(each) for each in found] == list(range(64))
        assert all(each.is_cuda for each in found)
        del found, infer
