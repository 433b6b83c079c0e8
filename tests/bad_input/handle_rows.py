"""Rows 31 to 40, 56 to 61, 64, 65, 70 to 72: objects that have ended, belong elsewhere, or are out of bounds."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    EventPool,
    InvalidArgumentError,
    InvalidTypeError,
    QueueFullError,
    StaleHandleError,
    Stream,
    StreamBarrier,
    StreamGroup,
    StreamPool,
)
from aiocuda.memory import LimitResource, PoolResource
from tests.bad_input.case import KERNEL, Case, World, each_of


def _freed(world: World) -> Any:
    buffer = world.stream.empty(4)
    buffer.free()
    return buffer


async def _closed(world: World) -> Stream:
    stream: Stream = world.device.stream(name="gone")
    await stream.aclose()
    return stream


async def _closed_pool(world: World) -> StreamPool:
    pool = StreamPool(world.device)
    await pool.aclose()
    return pool


def _released(world: World) -> Any:
    event = world.stream.record()
    event.release()
    return event


async def _lease(pool: StreamPool) -> None:
    async with pool.stream():
        pass


async def _lent(world: World) -> EventPool:
    pool = EventPool(world.device, 1)
    pool._kept = pool.acquire_nowait()  # type: ignore[attr-defined]  # as long as the pool
    return pool


_HANDLES: dict[str, Callable[[World], Any]] = {
    "device": lambda world: world.device,
    "stream": lambda world: world.stream,
    "event": lambda world: world.stream.record(),
    "operation": lambda world: world.stream.synchronize(),
    "buffer": lambda world: world.buffer,
    "unified": lambda world: world.managed,
    "graph": lambda world: _graph(world),
    "coordinator": lambda world: world.holding(AsyncCoordinator(world.device)),
    "stream pool": lambda world: world.holding(StreamPool(world.device)),
    "event pool": lambda world: EventPool(world.device),
    "group": lambda world: world.holding(StreamGroup(world.device, 1)),
    "barrier": lambda world: StreamBarrier(2),
    "pipeline": lambda world: aiocuda.Pipeline(world.device, [aiocuda.Stage("one", lambda slot: None)]),
    "context": lambda world: _context(world),
    "ring": lambda world: aiocuda.TripleBuffer(),
}


def _act(act: Callable[[Any], Any]) -> Callable[[World, Any], Any]:
    return lambda _, thing: act(thing)


async def _context(world: World) -> Any:
    return world.holding(await aiocuda.ManagedContext(driver=world.driver))


async def _graph(world: World) -> Any:
    with world.stream.capture() as graph:
        world.stream.fill(world.buffer, 1)
    return await graph  # a thread builds it, and calls the driver


CASES = [
    Case(31, "-1", lambda *_: aiocuda.open_device(-1), InvalidArgumentError, "-1"),
    Case(
        31,
        "99",
        lambda world, _: aiocuda.open_device(99, driver=world.driver),
        InvalidArgumentError,
        "99",
        reaches=True,
    ),
    Case(31, "'0'", lambda *_: aiocuda.open_device("0"), InvalidTypeError, "'0'"),  # type: ignore[arg-type]
    *(
        Case(32, name, verb, StaleHandleError, "has been freed", _freed)
        for name, verb in {
            "download": lambda world, gone: world.stream.download(gone),
            "fill": lambda world, gone: world.stream.fill(gone, 1),
            "copy": lambda world, gone: world.stream.copy(gone, np.zeros(4, np.float32)),
            "copy from": lambda world, gone: world.stream.copy(world.buffer[:4], gone),
            "launch": lambda world, gone: world.stream.launch(KERNEL, 1, 32, gone, 4, 1.0),
            "address": lambda _, gone: gone.address,
            "slice": lambda world, gone: world.stream.download(gone[1:]),
        }.items()
    ),
    Case(33, "free", lambda _, gone: gone.free(), StaleHandleError, "has been freed", _freed),
    *(
        Case(35, name, verb, StaleHandleError, "released", _released)
        for name, verb in {
            "wait": lambda world, event: world.stream.wait(event),
            "await": lambda _, event: event.wait(),
            "record": lambda world, event: world.stream.record(event=event),
            "release": lambda _, event: event.release(),
            "handle": lambda _, event: event.handle,
        }.items()
    ),
    *(
        Case(
            36,
            name,
            verb,
            InvalidArgumentError,
            "never recorded",
            lambda world: EventPool(world.device).acquire_nowait(),
        )
        for name, verb in {
            "wait": lambda world, event: world.stream.wait(event),
            "await": lambda _, event: event.wait(),
            "done": lambda _, event: event.done(),
        }.items()
    ),
    *(
        Case(37, name, verb, ClosedError, "gone", _closed)
        for name, verb in {
            "fill": lambda world, gone: gone.fill(world.buffer, 1),
            "empty": lambda _, gone: gone.empty(4),
            "record": lambda _, gone: gone.record(),
            "synchronize": lambda _, gone: gone.synchronize(),
            "launch": lambda world, gone: gone.launch(KERNEL, 1, 32, world.buffer, 4, 1.0),
            "upload": lambda _, gone: gone.upload(np.zeros(4)),
        }.items()
    ),
    Case(37, "stream of a closed pool", lambda _, pool: _lease(pool), ClosedError, "pool", _closed_pool),
    Case(39, "handle as a stream", lambda world, _: world.stream.wait(4096), InvalidTypeError, "from_handle"),
    Case(39, "handle of a group", lambda world, _: StreamBarrier(1).wait(4096), InvalidTypeError, "int"),  # type: ignore[arg-type]
    Case(39, "str as a handle", lambda world, _: Stream.from_handle(world.device, "7"), InvalidTypeError, "'7'"),
    *(
        Case(64, name, verb, InvalidArgumentError, says)
        for name, verb, says in (
            ("streams 0", lambda world, _: StreamPool(world.device, 0), "0"),
            ("streams -1", lambda world, _: StreamPool(world.device, -1), "-1"),
            ("streams 10**9", lambda world, _: StreamPool(world.device, 1, 10**9), str(10**9)),
            ("least above most", lambda world, _: StreamPool(world.device, 3, 2), "minimum=3"),
            ("events 0", lambda world, _: EventPool(world.device, 0), "0"),
            ("events -1", lambda world, _: EventPool(world.device, -1), "-1"),
            ("events 10**9", lambda world, _: EventPool(world.device, 10**9), str(10**9)),
            ("timing 0", lambda world, _: EventPool(world.device, timing=0), "timing is from 1"),
            ("plain -1", lambda world, _: EventPool(world.device, plain=-1), "-1"),
            ("plain above limit", lambda world, _: EventPool(world.device, 4, plain=5), "plain is from 1 to 4"),
            ("group of 0", lambda world, _: StreamGroup(world.device, 0), "0"),
            ("group of 10**9", lambda world, _: StreamGroup(world.device, 10**9), str(10**9)),
            ("parties 0", lambda *_: StreamBarrier(0), "0"),
            ("in flight 0", lambda world, _: AsyncCoordinator(world.device, 0), "0"),
            ("in flight 10**9", lambda world, _: AsyncCoordinator(world.device, 10**9), str(10**9)),
            ("max_in_flight 0", lambda *_: aiocuda.open_device(max_in_flight=0), "0"),
            ("streams_ahead -1", lambda *_: aiocuda.open_device(streams_ahead=-1), "at least 0, not -1"),
            ("memory limit -1", lambda world, _: LimitResource(PoolResource(world.driver, 0), -1), "-1"),
        )
    ),
    *(
        Case(64, name, verb, InvalidTypeError, says)
        for name, verb, says in (
            ("streams 2.0", lambda world, _: StreamPool(world.device, 2.0), "2.0"),  # type: ignore[arg-type]
            ("timing True", lambda world, _: EventPool(world.device, timing=True), "True"),
            ("plain 2.0", lambda world, _: EventPool(world.device, plain=2.0), "2.0"),  # type: ignore[arg-type]
            ("events True", lambda world, _: EventPool(world.device, True), "True"),
            ("streams_ahead 6.4", lambda *_: aiocuda.open_device(streams_ahead=6.4), "6.4"),  # type: ignore[arg-type]
            ("streams_ahead True", lambda *_: aiocuda.open_device(streams_ahead=True), "True"),
            ("parties '2'", lambda *_: StreamBarrier("2"), "'2'"),  # type: ignore[arg-type]
        )
    ),
    *(
        Case(65, f"{where} {value!r}", each_of(verb, value), error, repr(value))
        for value, error in (
            (-1, InvalidArgumentError),
            (math.nan, InvalidArgumentError),
            (-math.inf, InvalidArgumentError),
            ("1", InvalidTypeError),
            (True, InvalidTypeError),
        )
        for where, verb in (
            ("barrier", lambda world, value: StreamBarrier(1).wait(world.stream, timeout=value)),
            ("any_ready", lambda world, value: StreamPool(world.device).any_ready(timeout=value)),
            ("keep_seconds", lambda world, value: StreamPool(world.device, keep_seconds=value)),
        )
    ),
    Case(71, "event", lambda _, pool: pool.acquire_nowait(), QueueFullError, "all 1 events are lent", _lent),
    *(
        Case(72, f"{how} of {name}", _act(act), InvalidTypeError, "pickled", make)
        for name, make in _HANDLES.items()
        for how, act in (("pickle", pickle.dumps), ("deepcopy", copy.deepcopy), ("copy", copy.copy))
    ),
]


__all__ = ["CASES"]
