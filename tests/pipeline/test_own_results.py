"""P39: a result of a `Pipeline` shares no memory with the slot of its item."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceFault, Operation, PinnedBuffer, Pipeline, Slot, Stage
from tests.benchmarks.steps import Steps
from tests.helpers import TRAP, Latch, installed, open_peer, quickly, until
from tests.pipeline.steps import SIZE, assert_quiet, triple, value

pytestmark = pytest.mark.asyncio

ITEMS = 8


def fill(slot: Slot) -> None:
    slot.pinned("source", SIZE, np.uint32)[:] = slot.item


def copy_in(slot: Slot) -> Operation[None]:
    return slot.stream.copy(slot.buffer("data", SIZE, np.uint32), slot.pinned("source", SIZE, np.uint32))


def copy_out(slot: Slot) -> Operation[Any]:
    return slot.stream.download(slot.buffer("data", SIZE, np.uint32), out=slot.pinned("out", SIZE, np.uint32))


def stages(*last: Stage) -> list[Stage]:
    return [Stage("upload", copy_in, prepare=fill), Stage("compute", triple), *(last or [Stage("download", copy_out)])]


async def by_run(pipeline: Pipeline) -> list[Any]:
    return [result async for result in pipeline.run(range(ITEMS))]


async def without_overlap(pipeline: Pipeline) -> list[Any]:
    return [result async for result in pipeline.run(range(ITEMS), overlap=False)]


async def gathered(pipeline: Pipeline) -> list[Any]:
    return await asyncio.gather(*map(pipeline.execute_iteration, range(ITEMS)))


async def one_by_one(pipeline: Pipeline) -> list[Any]:
    return [await pipeline.execute_iteration(item) for item in range(ITEMS)]


WAYS = (by_run, without_overlap, gathered, one_by_one)
NUMBERS = [3 * item + 1 for item in range(ITEMS)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("replay", [False, True])
async def test_results_in_pinned_memory_are_copied(device: Device, way: Any, depth: int, replay: bool) -> None:
    """The slot, its memory and its captured work serve the next item, and all results stay."""
    async with Pipeline(device, stages(), depth, replay=replay) as pipeline:
        results = await quickly(way(pipeline))
        assert list(map(value, results)) == NUMBERS
        assert all(type(result) is np.ndarray for result in results)
        statistics = pipeline.statistics()
        assert (statistics.results_copied, statistics.blocks_replaced) == (ITEMS, 0)
        assert_quiet(pipeline, streams=3)


@pytest.mark.parametrize("way", WAYS)
async def test_results_in_device_memory_are_copied(device: Device, way: Any) -> None:
    async def tail(slot: Slot) -> Any:
        return slot.buffer("data")[1:5]

    async with Pipeline(device, stages(Stage("tail", tail)), 2) as pipeline:
        results = await quickly(way(pipeline))
        assert pipeline.statistics().results_copied == ITEMS
        assert pipeline.statistics().blocks_replaced == 0
    async with device.stream() as stream:
        assert [value(await stream.download(result)) for result in results] == NUMBERS
        assert all(result.shape == (4,) for result in results)
    del results
    await until(lambda: device.memory.statistics().live_bytes == 0, "the copies going back")


async def test_results_that_share_nothing_are_passed_on(device: Device) -> None:
    """An array that a download has made, and numbers; nothing is copied, and no memory is replaced."""
    made: list[Any] = []

    def download(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("data", SIZE, np.uint32))

    async def last(slot: Slot) -> Any:
        made.append(slot.result("download"))
        return slot.item if slot.item % 2 else slot.result("download")

    async with Pipeline(device, stages(Stage("download", download), Stage("last", last))) as pipeline:
        results = await by_run(pipeline)
        assert all(results[item] is (item if item % 2 else made[item]) for item in range(ITEMS))
        assert (pipeline.statistics().results_copied, pipeline.statistics().blocks_replaced) == (0, 0)


async def test_statistics_are_restarted(device: Device) -> None:
    kept = []

    async def keep(slot: Slot) -> Any:
        kept.append(slot.pinned("source", SIZE, np.uint32))
        return slot.pinned("source", SIZE, np.uint32)

    async with Pipeline(device, stages(Stage("keep", keep)), 1) as pipeline:
        for _ in range(2):
            results = await by_run(pipeline)
            found = pipeline.statistics()
            assert found.results_copied == ITEMS
            assert found.blocks_replaced in (ITEMS, ITEMS - 1)
            pipeline.reset_statistics()
            assert (pipeline.statistics().results_copied, pipeline.statistics().blocks_replaced) == (0, 0)
        assert list(map(value, results)) == list(range(ITEMS))
        assert list(map(value, kept)) == list(range(ITEMS)) * 2


# -- other holders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replay", [[], ["upload", "compute"]])
async def test_memory_that_is_held_is_not_used_again(device: Device, way: Any, replay: list[str]) -> None:
    """A stage keeps a view of its slot's memory. A graph that was captured with the old memory is captured again."""
    kept: list[Any] = []

    async def keep(slot: Slot) -> int:
        out = slot.pinned("out", SIZE, np.uint32)
        await slot.stream.copy(out, slot.buffer("data", SIZE, np.uint32))
        kept.append((slot.item, np.asarray(out)[:2], slot.pinned("source", SIZE, np.uint32)))
        return int(slot.item)

    async with Pipeline(device, stages(Stage("keep", keep)), 2, replay=replay) as pipeline:
        assert await quickly(way(pipeline)) == list(range(ITEMS))
        assert pipeline.statistics().blocks_replaced == 2 * (ITEMS - 2)
        for item, out, source in kept:
            assert value(out) == 3 * item + 1
            assert value(source) == item


async def test_result_of_which_an_unknown_object_holds_a_part(device: Device) -> None:
    class Box:
        def __init__(self, content: Any) -> None:
            self.content = content

    async def box(slot: Slot) -> Box:
        return Box(await copy_out(slot))

    async with Pipeline(device, stages(Stage("box", box)), 2) as pipeline:
        results = await by_run(pipeline)
        assert [value(result.content) for result in results] == NUMBERS
        assert isinstance(results[0].content, PinnedBuffer)
        boxes = weakref.WeakSet(results)
        before = pipeline.statistics().blocks_replaced
        results.clear()
        gc.collect()
        assert not boxes
        async for result in pipeline.run(range(ITEMS)):
            del result
        assert pipeline.statistics().blocks_replaced - before <= 2  # the loop's last result


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


def model(row: Any) -> Any:
    import pydantic

    class Model(pydantic.BaseModel):
        row: Any

    return Model(row=row)


#: Objects that hold an array, and that aiocuda does not rebuild.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "pydantic": model,
    "plain class": Box,
    "namespace": lambda row: types.SimpleNamespace(row=row),
    "closure": lambda row: lambda: row,
}
#: Their names, as parameters.
FORMS_OF_HOLDERS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "pydantic" and not installed(name), reason="needs pydantic"))
    for name in HOLDERS
]


class Graphs:
    """The function of a stage that keeps a graph for each slot."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make
        self.graphs: dict[int, Any] = {}

    async def __call__(self, slot: Slot) -> Any:
        x = slot.pinned("x", SIZE, np.uint32)
        if slot.number not in self.graphs:
            await x
            buffer = slot.buffer("x", SIZE, np.uint32)
            async with slot.stream.capture() as graph:
                slot.stream.copy(buffer, x)
                slot.stream.copy(x, buffer)
            self.graphs[slot.number] = graph, x, buffer
        x[:] = slot.item
        await self.graphs[slot.number][0].launch(slot.stream)
        return self.make(x)


@pytest.mark.parametrize("form", FORMS_OF_HOLDERS)
async def test_object_that_holds_memory_of_a_graph_fails_its_item(device: Device, form: str) -> None:
    """The slot cannot take other memory, and the object would show the item that comes next."""
    graphs = Graphs(HOLDERS[form])
    async with Pipeline(device, [Stage("box", graphs)], 2) as pipeline:
        for way in WAYS:
            with pytest.raises(aiocuda.UnsupportedError, match=r"`array\.copy\(\)`") as caught:
                await quickly(way(pipeline))
            assert "stage 'box'" in caught.value.__notes__[-1]
        tickets = [await quickly(pipeline.submit(item)) for item in range(ITEMS)]
        for ticket in tickets:
            with pytest.raises(aiocuda.UnsupportedError):
                await quickly(ticket)
        graphs.make = lambda row: HOLDERS[form](np.asarray(row).copy())
        assert len(await quickly(by_run(pipeline))) == ITEMS
        graphs.make = list
        assert [found[0] for found in await quickly(by_run(pipeline))] == list(range(ITEMS))


# -- failures --------------------------------------------------------------------------------------------------------


class Foreign:
    """An array of another library over device memory."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, typestr = self.buffer.shape, self.buffer.dtype.str
        return {"shape": shape, "typestr": typestr, "data": (self.buffer.address, False), "version": 3}


async def test_array_of_another_library_in_device_memory_fails_its_item(device: Device) -> None:
    async def foreign(slot: Slot) -> Any:
        return [slot.item, Foreign(slot.buffer("data")[4:])] if slot.item == 2 else slot.item

    async with Pipeline(device, stages(Stage("foreign", foreign))) as pipeline:
        delivered = []
        with pytest.raises(aiocuda.UnsupportedError, match="in the device memory of its slot") as caught:
            async for result in pipeline.run(range(ITEMS)):
                delivered.append(result)  # noqa: PERF401 - those before the failure
        assert delivered == [0, 1]
        assert "item 2" in caught.value.__notes__[-1]
        assert_quiet(pipeline, streams=3)
        with pytest.raises(aiocuda.UnsupportedError, match=r"`array\.copy\(\)`"):
            await pipeline.execute_iteration(2)
        assert await by_run_but(pipeline, 2) == [0, 1, 3]
        assert_quiet(pipeline, streams=3)


async def by_run_but(pipeline: Pipeline, left_out: int) -> list[Any]:
    return [result async for result in pipeline.run(item for item in range(4) if item != left_out)]


async def test_fault_during_a_copy_ends_the_run() -> None:
    async with open_peer() as (peer, device):

        async def last(slot: Slot) -> Any:
            stream = slot.stream

            def fault(*_: object) -> None:
                del peer.before["allocate"]
                stream.launch(TRAP, 1, 1)

            if slot.item == 3:
                peer.before["allocate"] = fault  # of the memory for the copy
            return slot.buffer("data")

        async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
            with pytest.raises(DeviceFault):
                await quickly(by_run(pipeline))


async def test_consumer_that_is_cancelled_while_its_result_is_copied() -> None:
    holding = asyncio.Event()
    async with open_peer() as (peer, device):
        with Latch(device) as latch:

            async def last(slot: Slot) -> Any:
                stream = slot.stream

                def hold(*_: object) -> None:
                    del peer.before["allocate"]
                    latch.hold(stream)
                    holding.set()

                if slot.item == 1:
                    peer.before["allocate"] = hold  # of the memory for the copy
                return slot.buffer("data")

            async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
                task = asyncio.create_task(by_run(pipeline))
                await quickly(holding.wait())
                await quickly(latch.held())
                task.cancel()
                await asyncio.sleep(0)
                latch.release()
                with pytest.raises(asyncio.CancelledError):
                    await quickly(task)
                assert_quiet(pipeline, streams=3)
                assert len([result async for result in pipeline.run([0, 2])]) == 2


# -- containers ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Plain:
    view: Any
    number: int = 0
    later: Any = dataclasses.field(init=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    view: Any
    number: int = 0

    def __post_init__(self) -> None:
        assert self.number == 5  # a copy does not call it again


class Several(list[Any]):
    name = ""


class Named(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)


Make = Callable[[Any], Any]

CONTAINERS: list[tuple[Make, Make]] = [
    (lambda view: [1, view], lambda found: found[1]),
    (lambda view: (view, "text"), lambda found: found[0]),
    (lambda view: Pair(None, view), lambda found: found.right),
    (lambda view: {"a": 1, "b": {"c": [view]}}, lambda found: found["b"]["c"][0]),
    (lambda view: Plain(view), lambda found: found.view),
    (lambda view: Frozen(view, 5), lambda found: found.view),
    (lambda view: Several([view]), lambda found: found[0]),
    (lambda view: Named(a=view), lambda found: found["a"]),
    (lambda view: collections.OrderedDict(a=1, b=view), lambda found: found["b"]),
    (lambda view: collections.defaultdict(list, a=view), lambda found: found["a"]),
    (lambda view: objects(view, None), lambda found: found[0]),
    (lambda view: objects(view, None).reshape(1, 2, order="F"), lambda found: found[0, 0]),
    (lambda view: view[::-2], lambda found: found),
    (lambda view: view.reshape(-1, 2).T, lambda found: found),
    (lambda view: view[0].reshape(()), lambda found: found),
    (lambda view: view[:1].reshape(()), lambda found: found),
    (lambda view: view.view("u1, u1, u2")[0], lambda found: found["f0"]),
    (lambda view: [view.view("u1, u1, u2")], lambda found: found[0]["f0"]),
    (lambda view: view.view(np.recarray), lambda found: found),
    (lambda view: memoryview(view)[:4], lambda found: found),
    (lambda view: memoryview(view).toreadonly(), lambda found: found),
    (lambda view: np.lib.stride_tricks.as_strided(view, (2, 2), (0, 4)), lambda found: found),
    (lambda view: np.frombuffer(memoryview(view), np.uint8)[::4], lambda found: found),
    (lambda view: from_address(view), lambda found: found),
]


def objects(*things: Any) -> Any:
    array = np.empty(len(things), object)
    for at, thing in enumerate(things):
        array[at] = thing
    return array


def from_address(view: Any) -> Any:
    """An array that has only the address, as an extension makes it."""

    memory = types.SimpleNamespace()
    memory.__array_interface__ = {"data": (view.ctypes.data, False), "shape": (4,), "typestr": "<u4", "version": 3}
    return np.asarray(memory)


@pytest.mark.parametrize("number", range(len(CONTAINERS)))
async def test_containers_are_rebuilt(device: Device, number: int) -> None:
    """Their types stay, and their other contents are the same objects."""
    make, read = CONTAINERS[number]
    made: list[Any] = []

    async def last(slot: Slot) -> Any:
        made.append(type(result := make(np.asarray(slot.pinned("source", SIZE, np.uint32)))))
        return result

    async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
        results = await by_run(pipeline)
        statistics = pipeline.statistics()
    assert [value(read(result)) for result in results] == list(range(ITEMS))
    assert [type(result) for result in results] == made
    copied = 0 if isinstance(results[0], np.integer) else ITEMS
    assert (statistics.results_copied, statistics.blocks_replaced) == (copied, 0)


async def test_copies_have_the_attributes_of_their_containers(device: Device) -> None:
    other = object()

    async def last(slot: Slot) -> Any:
        view = slot.pinned("source", SIZE, np.uint32)
        several, pair = Several([view, other]), Plain(view, 7)
        several.name = "name"
        pair.later = [several, several]
        return pair

    async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
        found = await quickly(pipeline.execute_iteration(5))
        assert (found.number, value(found.view)) == (7, 5)
        assert found.later[0] is found.later[1]
        assert found.later[0].name == "name"
        assert found.later[0][0] is found.view
        assert found.later[0][1] is other
        await quickly(pipeline.execute_iteration(6))
        assert value(found.view) == 5


async def test_containers_without_a_part_are_the_same_objects(device: Device) -> None:
    constant = {"a": [1, (2, None)], "b": Frozen(None, 5)}

    async def last(slot: Slot) -> Any:
        return constant if slot.item == 0 else [slot.pinned("source", SIZE, np.uint32), constant]

    async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
        assert await pipeline.execute_iteration(0) is constant
        assert (await pipeline.execute_iteration(1))[1] is constant


async def test_dataclass_whose_field_cannot_be_read_is_passed_on(device: Device) -> None:
    @dataclasses.dataclass
    class Lazy:
        view: Any

        def __getattribute__(self, name: str) -> Any:
            if name == "view":
                raise ZeroDivisionError("not yet")
            return super().__getattribute__(name)

    async def last(slot: Slot) -> Any:
        return Lazy(slot.pinned("source", SIZE, np.uint32))

    async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
        results = await by_run(pipeline)
        assert [value(result.__dict__["view"]) for result in results] == list(range(ITEMS))
        assert pipeline.statistics().blocks_replaced == ITEMS - 1


async def test_deep_result_without_a_part_is_passed_on(device: Device) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    async def last(slot: Slot) -> Any:
        slot.pinned("source", SIZE, np.uint32)
        return deep

    async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
        assert await pipeline.execute_iteration(1) is deep


async def test_cycle_is_left_as_it_is(device: Device) -> None:
    """The memory that its original refers to is not used again."""

    async def last(slot: Slot) -> Any:
        found: list[Any] = [np.asarray(slot.pinned("source", SIZE, np.uint32))]
        found.append(found)
        return found

    async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
        results = await by_run(pipeline)
        assert pipeline.statistics().blocks_replaced == ITEMS - 1
    assert [value(result[0]) for result in results] == list(range(ITEMS))
    assert [value(result[1][0]) for result in results] == list(range(ITEMS))
    assert all(result[1] is result[1][1] is not result for result in results)


async def test_numbers_in_a_large_container_cost_no_calls(device: Device) -> None:
    numbers = [*range(1_000_000)]

    async def last(slot: Slot) -> Any:
        slot.pinned("source", SIZE, np.uint32)
        return {"numbers": numbers, "array": np.array([None] * 1000)}

    async with Pipeline(device, stages(Stage("last", last)), 1) as pipeline:
        with Steps() as steps:
            assert (await pipeline.execute_iteration(0))["numbers"] is numbers
        assert steps.total < 1000
        assert pipeline.statistics().results_copied == 0
