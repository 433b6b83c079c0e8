"""Hooks that do what they should not, and operations that end in unusual ways: each is resolved once."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import gc
import weakref
from collections import Counter
from typing import Any

import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, InvalidTypeError, Kernel, Operation, Stream
from aiocuda.driver.host import HostDriver
from aiocuda.errors import DrainTimeoutWarning
from aiocuda.lowlevel import resources_of
from tests.completion.test_interrupted_resolution import fault, watchdog_tick
from tests.helpers import Latch, Reports, block_until, in_thread, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio

WAITS = Kernel("waits", source='extern "C" __global__ void waits() {}', host=lambda: None)


class Counts:
    """Counts the calls of each hook by the id of the operation."""

    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self.submitted: Counter[int] = Counter()
        self.resolved: Counter[int] = Counter()
        self.kinds: list[str] = []

    def on_submit(self, operation: Operation[Any]) -> None:
        self.submitted[operation.id] += 1

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        self.resolved[operation.id] += 1
        self.kinds.append(operation.kind)


async def test_operations_of_a_closed_loop_are_resolved() -> None:
    async with aiocuda.open_device(driver=HostDriver()) as device:
        counts, streams = Counts(timing=True), []
        with Latch(device) as latch, device.listen(counts):

            async def leave() -> None:
                stream = device.stream()
                streams.append(stream)
                latch.hold(stream)
                for _ in range(5):
                    stream.synchronize()
                await latch.held()

            await asyncio.to_thread(in_thread, leave)
            here = device.stream()
            await quickly(here.synchronize())  # the watchdog of this loop finds the closed one
            await until(lambda: len(counts.resolved) >= 6, "the end of the operations")
            assert counts.submitted.keys() <= counts.resolved.keys()
        assert {*counts.resolved.values()} == {1}


async def test_operations_of_a_device_that_is_left_at_work_are_resolved() -> None:
    with contextlib.closing(HostDriver()) as driver:
        counts = Counts()
        device = await aiocuda.open_device(driver=driver)
        device.drain_timeout = 0.01
        latch = Latch(device)
        with device.listen(counts), pytest.warns(DrainTimeoutWarning):
            with pytest.raises(ZeroDivisionError):
                async with device:
                    stream = device.stream()
                    latch.hold(stream)
                    await latch.held()
                    stream.synchronize()
                    raise ZeroDivisionError
            assert counts.submitted.keys() <= counts.resolved.keys()
            assert {*counts.resolved.values()} == {1}
        latch.release()


@pytest.mark.parametrize("hook", ["on_submit", "on_resolve"])
async def test_a_listener_whose_repr_raises_is_removed(device: Device, stream: Stream, hook: str) -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise OverflowError("no name")

        def fail(self, *arguments: object) -> None:
            raise ZeroDivisionError

    listener: Any = Hostile()
    setattr(listener, hook, listener.fail)
    with Reports() as reports, device.listen(listener):
        await quickly(stream.fill(stream.empty(4), 1))
        await quickly(stream.synchronize())
    assert [type(each) for each in reports.failures] == [ZeroDivisionError]
    assert "Hostile" in reports.contexts[0]["message"]


async def test_attributes_of_a_listener_are_read_once(device: Device, stream: Stream) -> None:
    """Another listener that begins or ends does not read them again."""
    reads: list[str] = []

    class Reads:
        @property
        def timing(self) -> bool:
            reads.append("timing")
            assert len(reads) == 1
            return False

        def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
            assert (start, end) == (0, 0)

    with Reports() as reports, device.listen(Reads()):
        with device.listen(Counts()):
            await quickly(stream.synchronize())
        await quickly(stream.synchronize())
    assert reads == ["timing"]
    assert reports.contexts == []


async def test_a_collection_that_ends_a_block_while_another_listener_begins(device: Device) -> None:
    """The collector closes a forgotten block of `listen` inside `add_listener`."""
    blocks = [device.listen(Counts())]
    blocks[0].__enter__()

    class Collects(Counts):
        @property
        def on_follow(self) -> None:
            blocks.clear()
            gc.collect()

    with device.listen(Collects()):
        listeners = resources_of(device).device_state.hot.listeners
        assert listeners is not None
        assert len(listeners.all) == 1
    assert resources_of(device).device_state.hot.listeners is None


async def test_coroutine_functions_are_no_hooks(device: Device) -> None:
    class Coroutine:
        async def on_submit(self, operation: Operation[Any]) -> None:
            """Never awaited."""

    with pytest.raises(InvalidTypeError, match=r"on_submit.* is a coroutine function, and hooks are not awaited"):
        with device.listen(Coroutine()):
            raise AssertionError("it listens")


async def test_a_hook_that_is_interrupted_returns_its_events() -> None:
    with contextlib.closing(HostDriver()) as driver:
        async with aiocuda.open_device(driver=driver) as device:
            stream = device.stream()

            class Interrupts:
                timing = True

                def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
                    raise KeyboardInterrupt

            counts = Counts()
            with device.listen(Interrupts()), device.listen(counts):
                operation = stream.synchronize()
                block_until(lambda: driver.stream_query(stream._queue.handle))
                with pytest.raises(KeyboardInterrupt):
                    stream._queue.poll()
                await quickly(operation)
                assert counts.submitted == counts.resolved == {operation.id: 1}
                assert not operation.is_awaited
        assert driver.statistics()["events"] == 0


async def test_a_hook_that_finds_a_fault() -> None:
    """The fault fails the operations that the same pass was about to resolve."""
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        found: list[BaseException] = []

        class Finds(Counts):
            def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
                super().on_resolve(operation, start, end)
                if not found:
                    found.append(ZeroDivisionError())
                    fault(peer)
                    other._queue.poll()

        finds = Finds()
        with Reports() as reports, Latch(device) as latch, device.listen(finds):
            latch.hold(other)
            await latch.held()
            other.synchronize()
            operations = [stream.synchronize() for _ in range(3)]
            block_until(lambda: peer.inner.stream_query(stream._queue.handle))
            stream._queue.poll()
            with pytest.raises(aiocuda.DeviceFault):
                await quickly(operations[-1])
        assert reports.contexts == []
        assert {*finds.resolved.values()} == {1}
        assert finds.submitted.keys() <= finds.resolved.keys()


async def test_an_interrupt_in_a_hook_during_a_fault_leaves_no_operation_behind() -> None:
    """All operations are on the host: no query of their stream would find the fault again."""
    async with open_peer() as (peer, device):
        stream = device.stream()

        class Interrupts:
            def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
                raise KeyboardInterrupt

        with Reports(), peer.holding_jobs():
            operations = [stream.launch(WAITS, 1, 1), stream.synchronize(), stream.synchronize()]
            with device.listen(Interrupts()):
                fault(peer)
                with pytest.raises(KeyboardInterrupt):
                    watchdog_tick(device)
            watchdog_tick(device)
            assert all(isinstance(each.exception(), aiocuda.DeviceFault) for each in operations)


async def test_a_node_keeps_no_context(device: Device) -> None:
    """Context variables of the task that has registered a node are free when the node has ended in any way."""
    big: contextvars.ContextVar[Any] = contextvars.ContextVar("big")
    gone: list[weakref.ref[Any]] = []

    class Big:
        """A large object of a request."""

    async def register(coordinator: AsyncCoordinator, latch: Latch) -> list[Any]:
        gone.append(weakref.ref(value := Big()))
        big.set(value)
        first = coordinator.host(len, "")
        failing = coordinator.host(lambda: 1 / 0, after=first)
        skipped = coordinator.compute(WAITS, 1, 1, after=failing)
        withdrawn = coordinator.host(len, "", after=first)
        withdrawn.abandon()
        return [first, failing, skipped, withdrawn]

    async with AsyncCoordinator(device) as coordinator:
        with Latch(device) as latch:
            nodes = await asyncio.create_task(register(coordinator, latch))
            await asyncio.gather(*(quickly(each) for each in nodes), return_exceptions=True)
            await turns()
            assert all(each.context is None for each in nodes)


async def test_a_bracket_that_is_refused_at_its_end_takes_its_label_back(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        async with device.stream() as stream, device.stream() as other:
            with pytest.raises(aiocuda.ClosedError):
                async with coordinator.operation("kernel", stream=stream, label="inner"):
                    await stream.aclose()
            assert other.synchronize().label is None


async def test_a_label_of_an_enumeration(stream: Stream) -> None:
    class Hostile(enum.StrEnum):
        REQUEST = "request-17"

        def __repr__(self) -> str:
            raise OverflowError

        __str__ = __repr__

    with aiocuda.label(Hostile.REQUEST):
        operation = stream.synchronize()
    assert (operation.label, stream.synchronize(label=Hostile.REQUEST).label) == ("request-17", "request-17")
    assert type(operation.label) is str
    assert "request-17" in repr(operation)
