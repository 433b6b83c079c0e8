"""The table of stream methods: it has every method, and hooks, checker, graphs, pools and pictures read it."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import aiocuda
from aiocuda import BusyError, Device, InvalidTypeError, Stream, UnorderedAccessWarning, UnsupportedError
from aiocuda.completion import KINDS, METHODS
from aiocuda.completion._methods import Refusal
from aiocuda.device.graphs import _graph
from aiocuda.device.graphs._nodes import NODES
from aiocuda.device.streams import _stream
from aiocuda.observe import TimelineSpan
from aiocuda.observe._drawing import COLOURS, OTHER, draw
from aiocuda.observe._profiler import TRANSFERS, WORK
from aiocuda.pool import classify
from tests.helpers import Latch, quickly
from tests.stream.methods import ARGUMENTS, LABELLED, World, call, methods_of, operation_of

T = TypeVar("T")

#: Methods of the table that are no methods of `Stream`.
OF_OTHERS = {"end", "launch_graph"}


class Spy:
    """A hook that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, method: str, proceed: Callable[..., T], *args: Any) -> T:
        self.calls.append((method, args))
        return proceed(*args)


def test_table_has_each_method_that_calls_a_hook() -> None:
    source = inspect.getsource(_stream) + inspect.getsource(_graph)
    assert set(re.findall(r'_?hook\.call\(\s*"(\w+)"', source)) == set(METHODS)
    assert {name for name in METHODS if not hasattr(Stream, name)} == OF_OTHERS


def test_each_method_that_makes_operations_has_arguments_for_tests() -> None:
    assert set(ARGUMENTS) == {name for name, method in METHODS.items() if method.kind is not None} - OF_OTHERS
    assert set(LABELLED) == set(ARGUMENTS) - {"submit"}


@pytest.mark.asyncio
async def test_hook_gets_the_name_and_the_arguments_of_each_method(
    device: Device, stream: Stream, other: Stream
) -> None:
    world = await World.make(device, stream, other)
    for name in methods_of(world):
        spy = stream._hook = Spy()
        arguments = ARGUMENTS[name](world)
        getattr(stream, name)(*arguments)
        stream._hook = None
        given = inspect.signature(getattr(Stream, name)).bind(stream, *arguments)
        given.apply_defaults()
        expected = [value for key, value in given.arguments.items() if key not in ("self", "label", "unknown")]
        ((method, got),) = spy.calls
        assert method == name
        assert [*got] == ([] if name == "add_callback" else expected)  # the callback is added to what the hook returns
    await quickly(stream.synchronize())


@pytest.mark.asyncio
async def test_operations_have_the_kind_and_the_size_of_the_table(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    world = await World.make(device, stream, other)
    latch.hold(stream)
    await latch.held()
    for name, run in methods_of(world).items():
        operation, method = operation_of(run()), METHODS[name]
        assert method.kind is not None
        assert operation.kind in (method.kind.name, *method.also), name
        assert operation.nbytes == (0 if KINDS[operation.kind].size is None else world.buffer.nbytes), name
        assert classify(operation) == KINDS[operation.kind].workload, name
    latch.release()
    await quickly(stream.synchronize())


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_its_colour_and_workload(name: str) -> None:
    kind = KINDS[name]
    assert f'fill="{kind.colour or OTHER}"' in draw([TimelineSpan("a", name, 0.0, 1.0, 1)], "t")
    assert (name in WORK, name in TRANSFERS) == (kind.colour is not None, kind.size == "moved")
    if kind.workload is not None:
        assert classify(name) == kind.workload


def test_colours_differ() -> None:
    assert len({*COLOURS.values(), OTHER}) == len(COLOURS) + 1


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "wait"])  # it records no wait for other work
async def test_graph_contains_the_work_or_names_the_cure(
    device: Device, stream: Stream, other: Stream, name: str
) -> None:
    world, recorded = await World.make(device, stream, other), METHODS[name].graph
    with stream.capture() as graph:
        stream.fill(world.buffer, 1)
        if isinstance(recorded, Refusal):
            with pytest.raises(UnsupportedError, match=re.escape(f"{recorded.work} cannot be part of a graph")) as told:
                call(world, name)
            assert str(told.value).endswith(recorded.cure)
        else:
            assert call(world, name).state == "captured"
    assert len(graph) == (2 if recorded == "node" else 1)
    await quickly(graph.launch(stream))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in NODES if name != "launch"])  # whose kernel stays
async def test_node_takes_other_arguments(device: Device, stream: Stream, other: Stream, name: str) -> None:
    world = await World.make(device, stream, other)
    arguments = ARGUMENTS[name](world)
    with stream.capture() as graph:
        operation = call(world, name)
    graph.update(operation, *arguments)
    with pytest.raises(InvalidTypeError, match=rf"update of a {operation.kind} takes a .*, 7 given"):
        graph.update(operation, *arguments, *[None] * (7 - len(arguments)))
    await quickly(graph.launch(stream))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.graph is None])
async def test_capture_ends_before_what_a_graph_cannot_mean(stream: Stream, name: str) -> None:
    with stream.capture(), pytest.raises(BusyError, match="leave the `async with stream"):
        result = getattr(stream, name)()
        await result


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ARGUMENTS)
async def test_checker_reports_what_the_operation_reads_and_writes(name: str) -> None:
    accesses = {access for _, access in METHODS[name].accesses}
    assert await conflicts(name, Stream.fill, 1) == bool(accesses)
    assert await conflicts(name, Stream.download) == bool(accesses - {"reads"})


async def conflicts(name: str, earlier: Callable[..., object], *arguments: object) -> bool:
    """Return whether a method has a conflict with earlier work of another stream on the buffer."""
    async with (
        aiocuda.open_device(driver="host", check=True) as device,
        device.stream() as stream,
        device.stream() as other,
    ):
        world = await World.make(device, stream, other)
        with Latch(device) as latch, warnings.catch_warnings():
            warnings.simplefilter("ignore", UnorderedAccessWarning)
            latch.hold(other)
            await latch.held()
            earlier(other, world.buffer, *arguments)
            call(world, name)
            latch.release()
        assert device.checker is not None
        return bool(device.checker.conflicts)
