"""Rows 53 to 55, 62 and 63: graphs of operations, groups of given streams, and pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    BusyError,
    ClosedError,
    CycleError,
    InvalidArgumentError,
    InvalidTypeError,
    Pipeline,
    Stage,
    StaleHandleError,
    StreamGroup,
    StreamPool,
    TripleBuffer,
    WrongDeviceError,
)
from tests.bad_input.case import Case, World, each_of

_BUFFERS: Any = {"x": (4, np.uint32)}

_BAD_BUFFERS: tuple[tuple[str, Any, type[Exception], str], ...] = (
    ("{}", {}, InvalidArgumentError, "is empty"),
    ("[]", [], InvalidTypeError, "not []"),
    ("'x'", "x", InvalidTypeError, "not 'x'"),
    ("{'x': 4}", {"x": 4}, InvalidTypeError, "'x' has 4"),
    ("{'x': (4,)}", {"x": (4,)}, InvalidTypeError, "'x' has (4,)"),
    ("{7: …}", {7: (4, "u4")}, InvalidTypeError, "not 7"),
    ("of shape -1", {"x": (-1, "u4")}, InvalidArgumentError, "-1"),
    ("of shape '4'", {"x": ("4", "u4")}, InvalidTypeError, "'4'"),
    ("of dtype q9", {"x": (4, "q9")}, InvalidTypeError, "q9"),
    ("of objects", {"x": (4, object)}, InvalidTypeError, "Python objects"),
)


def _ring_of(world: World, buffers: Any) -> TripleBuffer:
    return TripleBuffer(buffers=buffers, device=world.device)


async def _ring(world: World) -> TripleBuffer:
    return world.holding(_ring_of(world, _BUFFERS))


def _buffer(*arguments: Any) -> Callable[[World, TripleBuffer], Any]:
    """Return the verb that asks the first slot of a ring for a buffer."""

    def ask(_: World, ring: TripleBuffer) -> Any:
        slot = ring.upload_slot()
        assert slot is not None
        return slot.buffer(*arguments)

    return ask


def _use(method: str) -> Callable[[World, TripleBuffer], Any]:
    return lambda _, ring: getattr(ring, method)()


async def _closed_ring(world: World) -> TripleBuffer:
    ring = _ring_of(world, _BUFFERS)
    await ring.aclose()
    return ring


async def _two(world: World) -> Any:
    """Two operations of a coordinator: the second waits for the first, and both wait for a third one without end."""
    coordinator = world.holding(AsyncCoordinator(world.device))
    gate = coordinator.operation("kernel", description="gate")
    first = coordinator.host(int, after=gate, description="first")
    second = coordinator.host(int, after=first, description="second")
    return coordinator, gate, first, second


async def _done(world: World) -> Any:
    coordinator = world.holding(AsyncCoordinator(world.device))
    first = coordinator.host(int, description="first")
    second = coordinator.host(int, description="second")
    await coordinator.drain()
    return coordinator, first, second


async def _group(world: World) -> StreamGroup:
    group = world.holding(StreamGroup(world.device, ("up", "work", "down")))
    group.add_dependency("work", "up")
    group.add_dependency("down", "work")
    return group


async def _closed_stream(world: World) -> list[Any]:
    stream = world.device.stream(name="gone")
    await stream.aclose()
    return [world.stream, stream]


async def _ended_lease(world: World) -> list[Any]:
    pool = world.holding(StreamPool(world.device, maximum=1))
    async with pool.stream() as lease:
        pass
    return [world.stream, lease]


def _nothing(slot: object) -> None: ...


def _wrong(slot: object) -> int:
    return 7


def _set_priority(node: Any, priority: Any) -> None:
    node.priority = priority


async def _node_of_closed(world: World) -> Any:
    async with AsyncCoordinator(world.device) as closed:
        node = closed.host(int)
    return world.holding(AsyncCoordinator(world.device)), node


async def _completed(things: Any) -> Any:
    return [thing async for thing in aiocuda.as_completed(things)]


def _recorded(world: World) -> Any:
    return world.stream.record()


async def _collective(world: World) -> Any:
    """A coordinator; two buffers that are apart; one that overlaps both; a shorter one."""
    base = world.stream.empty(30)
    return world.holding(AsyncCoordinator(world.device)), base[:10], base[10:20], base[5:15], base[20:25]


async def _closed(world: World) -> AsyncCoordinator:
    coordinator = AsyncCoordinator(world.device)
    await coordinator.aclose()
    return coordinator


def _stages(world: World) -> Pipeline:
    return Pipeline(world.device, [Stage("up", _nothing), Stage("down", _nothing)])


async def _closed_pipeline(world: World) -> Pipeline:
    pipeline = _stages(world)
    await pipeline.aclose()
    return pipeline


CASES = [
    Case(
        53,
        "cycle of a coordinator",
        lambda _, made: made[0].add_dependency(made[2], made[3]),
        CycleError,
        "second",
        _two,
    ),
    Case(
        53,
        "self edge of a coordinator",
        lambda _, made: made[0].add_dependency(made[2], made[2]),
        CycleError,
        "first",
        _two,
    ),
    Case(53, "cycle of a group", lambda _, group: group.add_dependency("up", "down"), CycleError, "work", _group),
    Case(53, "self edge of a group", lambda _, group: group.add_dependency("up", "up"), CycleError, "up", _group),
    Case(
        54,
        "node of another coordinator as a buffer",
        lambda world, made: AsyncCoordinator(world.device).download(made[1]),
        InvalidArgumentError,
        "another coordinator",
        _done,
    ),
    Case(
        54,
        "node of another coordinator as the dependent",
        lambda world, made: AsyncCoordinator(world.device).add_dependency(made[2], made[1]),
        InvalidArgumentError,
        "another coordinator",
        _two,
    ),
    Case(
        54,
        "node of a closed coordinator",
        lambda _, made: made[0].host(int, after=made[1]),
        ClosedError,
        "has been closed",
        _node_of_closed,
    ),
    Case(
        54,
        "edge after the start",
        lambda _, made: made[0].add_dependency(made[2], made[1]),
        ClosedError,
        "second",
        _done,
    ),
    Case(
        53,
        "cycle of blocks",
        lambda _, made: made[0].add_dependency(made[1], made[2]),
        CycleError,
        "gate",
        _two,
    ),
    Case(54, "no accesses", lambda _, made: made[0].operation("kernel", reads=7), InvalidTypeError, "reads", _done),
    Case(54, "block of no kind", lambda _, made: made[0].operation("launch"), InvalidArgumentError, "launch", _done),
    Case(54, "block after the end", lambda _, closed: closed.operation("kernel"), ClosedError, "closed", _closed),
    Case(
        54, "unknown priority", lambda _, made: _set_priority(made[3], "urgent"), InvalidArgumentError, "urgent", _two
    ),
    Case(54, "priority 0", lambda _, made: _set_priority(made[3], 0), InvalidArgumentError, "0", _two),
    Case(54, "priority after the end", lambda _, made: _set_priority(made[2], "low"), BusyError, "second", _done),
    Case(54, "closed coordinator", lambda _, coordinator: coordinator.host(int), ClosedError, "closed", _closed),
    *(
        Case(54, f"collective: {name}", call, error, text, _collective)
        for name, call, error, text in (
            ("no buffers", lambda _, made: made[0].all_reduce([]), InvalidArgumentError, "empty"),
            ("one buffer", lambda _, made: made[0].all_reduce(made[1]), InvalidTypeError, "several"),
            ("twice", lambda _, made: made[0].all_reduce([made[1], made[1]]), InvalidArgumentError, "twice"),
            ("overlap", lambda _, made: made[0].reduce(made[1:3], made[3]), InvalidArgumentError, "overlap"),
            ("shapes", lambda _, made: made[0].broadcast(made[1], [made[4]]), InvalidArgumentError, "shapes differ"),
            (
                "dtypes",
                lambda _, made: made[0].broadcast(made[1], [made[2].view("int32")]),
                InvalidTypeError,
                "dtypes differ",
            ),
            ("operation", lambda _, made: made[0].all_reduce(made[1:3], "mean"), InvalidArgumentError, "'mean'"),
            ("number", lambda _, made: made[0].broadcast(made[1], [7]), InvalidTypeError, "int"),
        )
    ),
    Case(54, "no node", lambda _, made: made[0].host(int, after=7), InvalidTypeError, "7", _done),
    *(
        Case(
            row,
            f"given {name}",
            lambda world, streams: StreamGroup(world.device, streams),
            error,
            says,
            given,
            devices=devices,
        )
        for row, name, given, error, says, devices in (
            (
                30,
                "stream of another device",
                lambda world: [world.stream, world.distant],
                WrongDeviceError,
                "distant",
                2,
            ),
            (37, "closed stream", lambda world: _closed_stream(world), ClosedError, "gone", 1),
            (37, "lease that has ended", lambda world: _ended_lease(world), StaleHandleError, "has ended", 1),
            (39, "handle", lambda world: [world.stream, 4096], InvalidTypeError, "4096", 1),
            (39, "None", lambda world: {"a": world.stream, "b": None}, InvalidTypeError, "None", 1),
            (39, "name of a number", lambda world: {7: world.stream}, InvalidTypeError, "7", 1),
            (55, "stream twice", lambda world: [world.stream, world.stream], InvalidArgumentError, "'0'", 1),
            (
                55,
                "stream by two names",
                lambda world: {"a": world.stream, "b": world.stream},
                InvalidArgumentError,
                "'a'",
                1,
            ),
            (64, "list without streams", lambda _: [], InvalidArgumentError, "[]", 1),
            (64, "mapping without streams", lambda _: {}, InvalidArgumentError, "[]", 1),
        )
    ),
    Case(
        55,
        "priority of given streams",
        lambda world, _: StreamGroup(world.device, [world.stream], priority="low"),
        InvalidArgumentError,
        "'low'",
    ),
    *(
        Case(54, f"as_completed of {name}", lambda _, things: _completed(things), InvalidTypeError, says, given)
        for name, given, says in (
            ("None", lambda _: None, "None"),
            ("text", lambda _: "left", "'left'"),
            ("numbers", lambda _: [1, 2], "int"),
            ("a buffer", lambda world: [world.buffer], "DeviceBuffer"),
            ("a pinned buffer", lambda world: [world.device.pinned(4)], "PinnedBuffer"),
            ("a stream", lambda world: [world.stream], "Stream"),
            ("lists", lambda _: [[]], "list"),
            ("an event", _recorded, "put it into a list"),
            ("a future", lambda _: [asyncio.get_running_loop().create_future()], "asyncio.as_completed"),
        )
    ),
    Case(55, "operations", lambda _, event: _completed([event, event]), InvalidArgumentError, "twice", _recorded),
    Case(55, "streams of a group", lambda world, _: StreamGroup(world.device, ("a", "a")), InvalidArgumentError, "'a'"),
    Case(
        55,
        "stages",
        lambda world, _: Pipeline(world.device, [Stage("a", _nothing), Stage("a", _nothing)]),
        InvalidArgumentError,
        "'a'",
    ),
    *(
        Case(
            62,
            f"depth {depth}",
            each_of(lambda world, depth: Pipeline(world.device, [Stage("a", _nothing)], depth), depth),
            InvalidArgumentError,
            str(depth),
        )
        for depth in (0, -1, 10**9)
    ),
    *(
        Case(
            62,
            f"ring of {depth}",
            each_of(lambda _, depth: TripleBuffer(depth), depth),
            InvalidArgumentError,
            str(depth),
        )
        for depth in (0, 10**9)
    ),
    Case(62, "depth True", lambda *_: TripleBuffer(True), InvalidTypeError, "True"),
    Case(62, "depth 3.0", lambda *_: TripleBuffer(3.0), InvalidTypeError, "3.0"),  # type: ignore[arg-type]
    *(
        Case(62, f"buffers {name}", each_of(_ring_of, buffers), error, says)
        for name, buffers, error, says in _BAD_BUFFERS
    ),
    Case(
        62, "buffers without a device", lambda *_: TripleBuffer(buffers=_BUFFERS), InvalidArgumentError, "device=device"
    ),
    Case(
        62,
        "device without buffers",
        lambda world, _: TripleBuffer(device=world.device),
        InvalidArgumentError,
        "for its buffers only: name them",
    ),
    Case(
        62,
        "buffers on no device",
        lambda *_: TripleBuffer(buffers=_BUFFERS, device=7),  # type: ignore[arg-type]
        InvalidTypeError,
        "not on 7",
    ),
    *(
        Case(62, f"slot.buffer{arguments}", _buffer(*arguments), error, says, _ring)
        for arguments, error, says in (
            (("y",), InvalidArgumentError, "no buffer 'y', only 'x': add it to TripleBuffer(buffers=…)"),
            (("x", 5), InvalidArgumentError, "has shape (4,) and dtype uint32, not (5,) and float32: leave both out"),
            (("x", 4, "i4"), InvalidArgumentError, "dtype uint32, not (4,) and int32"),
            (("x", -1, "u4"), InvalidArgumentError, "-1"),
            (("x", 4, "q9"), InvalidTypeError, "q9"),
            ((7,), InvalidTypeError, "not 7"),
        )
    ),
    *(
        Case(62, f"closed ring, {name}", _use(name), ClosedError, "this triple buffer has been closed", _closed_ring)
        for name in ("acquire", "reserve", "upload_slot", "compute_slot", "download_slot", "advance", "__aenter__")
    ),
    Case(
        62,
        "overlap with one slot",
        lambda world, _: Pipeline(world.device, [Stage("a", _nothing)], 1).run([1], overlap=True),
        InvalidArgumentError,
        "depth 1",
    ),
    *(
        Case(
            62,
            f"order {order!r}",
            each_of(lambda world, order: _stages(world).set_order(order), order),
            error,
            says,
        )
        for order, error, says in (
            ("up", InvalidTypeError, "'up'"),
            (None, InvalidTypeError, "None"),
            ((), InvalidArgumentError, "'up' 0 times"),
            (("up",), InvalidArgumentError, "'down' 0 times"),
            (("up", "down", "up"), InvalidArgumentError, "'up' 2 times"),
            (("up", "down", "left"), InvalidArgumentError, "'left'"),
            (("down", 7), InvalidArgumentError, "7"),
        )
    ),
    Case(
        62,
        "order of a closed pipeline",
        lambda _, pipeline: pipeline.set_order(("down", "up")),
        ClosedError,
        "closed",
        _closed_pipeline,
    ),
    Case(62, "submit to a closed pipeline", lambda _, one: one.submit(1), ClosedError, "closed", _closed_pipeline),
    Case(62, "no stage", lambda world, _: Pipeline(world.device, []), InvalidArgumentError, "at least one stage"),
    Case(63, "no function", lambda *_: Stage("a", 7), InvalidTypeError, "int"),  # type: ignore[arg-type]
    Case(
        63,
        "returns what cannot be awaited",
        lambda world, _: Pipeline(world.device, [Stage("wrong", _wrong)]).execute_iteration(1),
        InvalidTypeError,
        "'wrong'",
        reaches=True,
    ),
]

__all__ = ["CASES", "aiocuda"]
