"""Code of the program that the core calls while it works on a stream, and that uses the same stream.

The tests run in the form in use, and `make slow` runs them in the other one: a compiled core must read its state again
after each call, as the core in Python does by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Operation, Stream
from aiocuda._core import BoundCall, StreamOperation, _blocks, stream_operation
from tests.completion.interrupts import sweep
from tests.helpers import AFFINE, Peer, block_until, open_peer, quickly, until

pytestmark = pytest.mark.asyncio

OPERATIONS = 6

Path = Callable[[Stream, Sequence[StreamOperation[Any]]], Awaitable[object]]


async def by_await_of_the_newest(stream: Stream, operations: Sequence[StreamOperation[Any]]) -> None:
    await operations[-1]


async def by_await_of_each(stream: Stream, operations: Sequence[StreamOperation[Any]]) -> None:
    for operation in operations:
        await operation


async def by_await_of_the_middle(stream: Stream, operations: Sequence[StreamOperation[Any]]) -> None:
    await operations[len(operations) // 2]


async def by_gather(stream: Stream, operations: Sequence[StreamOperation[Any]]) -> None:
    await aiocuda.gather(*operations)


async def by_tasks(stream: Stream, operations: Sequence[StreamOperation[Any]]) -> None:
    await asyncio.gather(*operations)


async def by_the_reactor(stream: Stream, operations: Sequence[StreamOperation[Any]]) -> None:
    called: list[object] = []
    for operation in operations:
        operation.add_done_callback(called.append)
    await until(lambda: len(called) == len(operations), "the callbacks")


async def by_poll(stream: Stream, operations: Sequence[StreamOperation[Any]]) -> None:
    stream._queue.poll()


PATHS: list[Path] = [
    by_await_of_the_newest, by_await_of_each, by_await_of_the_middle, by_gather, by_tasks, by_the_reactor, by_poll,
]  # fmt: skip


class Visitor:
    """Uses a stream when the core calls it: enqueues, polls, refuses further operations."""

    def __init__(self, stream: Stream, buffer: Any, what: str) -> None:
        self._stream = stream
        self._buffer = buffer
        self._what = what
        self._left = 3 * OPERATIONS
        self.may_close = False
        self.visits = 0
        self.enqueued: list[Operation[Any]] = []

    def visit(self, *_: object) -> None:
        self.visits += 1
        queue = self._stream._queue
        if "enqueues" in self._what and not queue.closed and self._left:
            self._left -= 1  # before: what it enqueues may call this again
            self.enqueued.append(self._stream.fill(self._buffer, self.visits))
        if "polls" in self._what:
            queue.poll()
        if "closes" in self._what and self.may_close:
            queue.rare.refuse()

    def renew(self) -> None:
        """Let the visitor enqueue again."""
        self._left = 3 * OPERATIONS
        self.enqueued.clear()


class Dropped:
    """Calls a function when it is dropped."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def enqueue_at(point: str, peer: Peer, stream: Stream, visitor: Visitor) -> list[StreamOperation[Any]]:
    """Enqueue operations that call the visitor at a point of their life."""
    buffer = stream.empty(4)
    operations = []
    for _ in range(OPERATIONS):
        if point == "the driver's call":
            peer.before["fill"] = _once(peer, visitor)
        operation = stream_operation(stream.fill(buffer, 1))
        if point == "a kept object is dropped":
            operation.keep = (operation.keep, Dropped(visitor.visit))
        elif point == "on_settled":
            operation.on_settled = visitor.visit
        operations.append(operation)
    return operations


def _once(peer: Peer, visitor: Visitor) -> Callable[..., None]:
    def before(*_: object) -> None:
        del peer.before["fill"]  # the visitor may enqueue a fill
        visitor.visit()

    return before


class Hooks:
    """A listener whose hooks call a visitor."""

    def __init__(self, visitor: Visitor, *, timing: bool) -> None:
        self.timing = timing
        self.on_submit = self.on_resolve = visitor.visit


@pytest.mark.parametrize("what", ["enqueues", "polls", "enqueues and polls", "polls and enqueues and closes"])
@pytest.mark.parametrize(
    "point", ["a kept object is dropped", "on_settled", "the driver's call", "a hook", "a hook with timing"]
)
@pytest.mark.parametrize("path", PATHS, ids=[path.__name__ for path in PATHS])
async def test_visitor_of_the_stream_loses_nothing(path: Path, point: str, what: str) -> None:
    """Each operation is done once, also those that the visitor enqueues, and the stream is idle in the end.

    A poll in the driver's call of an operation found that operation done, although the stream did not have it yet.
    """
    async with open_peer() as (peer, device):
        stream = device.stream()
        queue = stream._queue
        buffer = stream.empty(4)
        await stream.fill(buffer, 0)
        visitor = Visitor(stream, buffer, what)
        hooks = Hooks(visitor, timing="timing" in point)
        with device.listen(hooks) if "hook" in point else _nothing():
            operations = enqueue_at(point, peer, stream, visitor)
            visitor.may_close = True
            before = device.statistics()
            block_until(queue.rare.has_device_finished, "the fills")
            await quickly(path(stream, operations))
            for operation in [*operations, *visitor.enqueued]:
                assert await quickly(operation.wait()) is None
            await quickly(queue.rare.settle())
            for operation in visitor.enqueued:  # the last visits
                await quickly(operation.wait())
        assert visitor.visits >= OPERATIONS
        assert [operation.state for operation in operations] == ["done"] * OPERATIONS
        assert queue.idle
        assert device.statistics().resolved >= before.resolved
        assert device.statistics().in_flight == 0
        assert stream_operation(operations[0]).lease is None
        await quickly(stream.aclose())


class _nothing:  # noqa: N801 - in the place of a context manager
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


@pytest.mark.parametrize("verb", ["fill", "launch"])
async def test_operations_stand_in_the_order_of_their_events(verb: str) -> None:
    """The driver call of an outer operation enqueues an inner one, which reaches the device first.

    The queue had the inner operation last, so the event of the inner operation proved that the outer one was done.
    """
    kernel = aiocuda.Kernel("nothing", source='extern "C" __global__ void nothing() {}', host=lambda: None)
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        methods = {"fill": lambda: stream.fill(buffer, 1), "launch": lambda: stream.launch(kernel, 1, 1)}
        for _ in range(3):
            await quickly(methods[verb]().wait())
        recorded: list[int] = []
        peer.before["event_record"] = lambda event, _: recorded.append(event)
        nested: list[Operation[Any]] = []

        def inside(*_: object) -> None:
            del peer.before[verb]
            nested.append(methods[verb]())

        peer.before[verb] = inside
        outer = methods[verb]()
        pending = list(stream._queue.pending)
        assert pending == [*nested, outer]
        assert [operation.lease and operation.lease.handle for operation in pending] == recorded
        await quickly(aiocuda.gather(*nested, outer))


async def test_interrupted_hook_that_has_resolved_its_operation_returns_its_event_once() -> None:
    kernel = aiocuda.Kernel("nothing", source='extern "C" __global__ void nothing() {}', host=lambda: None)

    class Resolves:
        def on_submit(self, operation: Operation[None]) -> None:
            block_until(stream._queue.rare.has_device_finished, "the launch")
            with contextlib.suppress(StopIteration):
                operation.__await__().send(None)
            raise KeyboardInterrupt

    async with open_peer() as (_, device):
        stream = device.stream()
        for _ in range(3):
            await quickly(stream.launch(kernel, 1, 1).wait())
        with device.listen(Resolves()), pytest.raises(KeyboardInterrupt):
            stream.launch(kernel, 1, 1)
        idle = stream._queue.device_hot.idle_leases
        assert len(idle) == len(set(map(id, idle)))
        await quickly(stream.synchronize())


@pytest.mark.parametrize("path", [by_await_of_the_newest, by_poll], ids=["await", "poll"])
async def test_query_that_resolves_all_is_no_error(path: Path) -> None:
    """The queue was empty when the query returned, which raised an IndexError."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.fill(buffer, 0)
        operation = stream_operation(stream.fill(buffer, 1))
        block_until(stream._queue.rare.has_device_finished, "the fill")

        def query(_: object) -> None:
            del peer.before["event_query"]
            with contextlib.suppress(StopIteration):
                operation.__await__().send(None)

        peer.before["event_query"] = query
        await quickly(path(stream, [operation]))
        assert operation.state == "done"


async def test_any_limit_of_operations_is_accepted() -> None:
    async with open_peer(max_in_flight=2**80) as (_, device):
        stream = device.stream()
        await quickly(stream.fill(stream.empty(4), 1).wait())


@pytest.mark.python_core
async def test_interrupted_free_can_be_repeated() -> None:
    """Ctrl-C in a free leaves the buffer freed, or as it was."""
    async with open_peer() as (_, device):
        stream = device.stream()
        for _ in range(3):
            stream.empty(4).free()
        before = device.memory.statistics().live_bytes
        for interrupt in sweep(_blocks, least=4):
            buffer = stream.empty(4)
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                buffer.free()
            if not buffer.freed:
                buffer.free()
            assert device.memory.statistics().live_bytes == before, interrupt.where


@pytest.mark.slow
async def test_garbage_collection_at_every_allocation() -> None:
    """The collector runs at each allocation of the core, and finalisers of garbage use the stream that is in use.

    It also runs on the driver's thread, where a finaliser cannot use a stream.
    """
    loops_thread, elsewhere = threading.get_ident(), list[int]()

    def visit() -> None:
        if threading.get_ident() == loops_thread:
            visitor.visit()
        else:
            elsewhere.append(1)

    async with open_peer() as (_, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.fill(buffer, 0)
        visitor = Visitor(stream, buffer, "enqueues and polls")
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        try:
            for _ in range(40):
                visitor.renew()
                for _ in range(4):
                    garbage = Dropped(visit)
                    garbage.itself = garbage  # type: ignore[attr-defined]
                    del garbage
                operations = [stream.fill(buffer, value) for value in range(3)]
                await quickly(aiocuda.gather(*operations))
                await quickly(stream.fill(buffer, 9).wait())
        finally:
            gc.set_threshold(*threshold)
        assert visitor.visits  # in the core, between the operations
        gc.collect()
        assert visitor.visits + len(elsewhere) == 160
        await quickly(stream.synchronize())
        assert stream._queue.idle


async def test_error_of_an_await_holds_no_frame() -> None:
    """The error held itself by its own traceback, and with it all that the frames of the program held."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)

        class Held:
            pass

        async def fails() -> weakref.ref[Held]:
            held = Held()
            peer.refuse("fill")
            try:
                await stream.fill(buffer, 1)
            except aiocuda.DriverError:
                return weakref.ref(held)
            raise AssertionError

        gc.disable()
        try:
            assert (await fails())() is None
        finally:
            gc.enable()


@pytest.mark.heavy
@pytest.mark.slow
async def test_a_million_operations_leave_nothing() -> None:
    """The number of allocated blocks does not grow: launches, copies, awaits and gathers."""
    import sys

    from tests.benchmarks.host_time import IdleDriver
    from tests.benchmarks.kernels import empty

    async with aiocuda.open_device(driver=IdleDriver()) as device:
        stream, kernel = device.stream(), empty()
        pinned, buffer = device.pinned(64), stream.empty(64)
        await stream.copy(buffer, pinned)
        blocks = []
        for _ in range(5):
            for _ in range(2_500):
                await stream.launch(kernel, 1, 1)
                await stream.copy(buffer, pinned)
                await aiocuda.gather(*(stream.launch(kernel, 1, 1) for _ in range(64)))
                await asyncio.gather(*(stream.copy(buffer, pinned) for _ in range(14)))
            await stream.synchronize()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert device.statistics().submitted >= 1_000_000
        assert blocks[-1] - blocks[1] < 2_000, blocks


@pytest.mark.python_core
@pytest.mark.parametrize("line", ["pending.append(operation)", "idle = hot.idle_leases", "queue.newest_id = number"])
async def test_order_if_code_enqueues_between_two_lines(stream: Stream, line: str) -> None:
    """A signal handler, or from Python 3.12 on a finaliser, runs between two lines of the core in Python.

    Its operation reaches the device first, so it is the first of the queue: else its event would prove too much.
    """
    buffer = stream.empty(64, np.uint32)
    for _ in range(3):
        await quickly(stream.launch(AFFINE, 1, 32, buffer, 64, 1, 0))
    code = BoundCall.enqueue.__code__
    source, start = inspect.getsourcelines(BoundCall.enqueue)
    (at,) = [start + number for number, text in enumerate(source) if text.strip().startswith(line)]
    others: list[Operation[Any]] = []

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is code and event == "line" and frame.f_lineno == at and not others:
            sys.settrace(None)
            others.append(stream.launch(AFFINE, 1, 32, buffer, 64, 1, 0))
        return trace

    sys.settrace(trace)
    try:
        operation = stream.launch(AFFINE, 1, 32, buffer, 64, 1, 0)
    finally:
        sys.settrace(None)
    assert list(stream._queue.pending) == [*others, operation]  # the loop has not turned: nothing is resolved
    await quickly(stream.synchronize())
