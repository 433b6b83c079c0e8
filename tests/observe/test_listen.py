"""The hooks of a listener are called for every operation of a device."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import aiocuda
from aiocuda import BusyError, Device, InvalidTypeError, Operation, Stream
from aiocuda.driver.host import HostDriver
from aiocuda.lowlevel import queue_of, resources_of
from aiocuda.observe import Timeline
from tests.helpers import Latch, Reports, block_until, in_thread, quickly
from tests.simulation.program import Program
from tests.simulation.run import simulate

pytestmark = pytest.mark.asyncio


class Listener:
    """Records its calls."""

    def __init__(self, *, timing: bool) -> None:
        self.timing = timing
        self.submitted: list[int] = []
        self.resolved: list[int] = []
        self.timed: list[bool] = []

    def on_submit(self, operation: Operation[Any]) -> None:
        self.submitted.append(operation.id)

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        self.resolved.append(operation.id)
        self.timed.append(bool(start and end))


@pytest.mark.parametrize("timing", [False, True])
async def test_a_listener_is_called_inside_its_block_only(device: Device, stream: Stream, timing: bool) -> None:
    listener = Listener(timing=timing)
    await stream.synchronize()
    with device.listen(listener):
        operations = [stream.synchronize() for _ in range(5)]
        await quickly(operations[-1])
    await quickly(stream.synchronize())
    assert listener.submitted == listener.resolved == [operation.id for operation in operations]
    assert listener.timed == [timing] * 5


async def test_listeners_listen_at_the_same_time(device: Device, stream: Stream) -> None:
    first, second, third = (Listener(timing=timing) for timing in (False, True, False))
    with device.listen(first):
        outer = stream.synchronize()
        with device.listen(second), device.listen(third):
            inner = stream.synchronize()
            await quickly(inner)
        with pytest.raises(ZeroDivisionError), device.listen(second):
            raise ZeroDivisionError
        last = stream.synchronize()
        await quickly(last)
    assert first.submitted == first.resolved == [outer.id, inner.id, last.id]
    assert second.submitted == third.submitted == [inner.id]
    assert second.resolved == third.resolved == [outer.id, inner.id]  # both ended in their block
    assert second.timed == [False, True]


async def test_a_listener_listens_once_at_a_time(device: Device, stream: Stream) -> None:
    listener = Listener(timing=False)
    with device.listen(listener):
        with pytest.raises(BusyError, match=r"Listener.* listens to .* already: leave its block first"):
            with device.listen(listener):
                raise AssertionError("it listens twice")
        await quickly(stream.synchronize())
    with device.listen(listener):
        await quickly(stream.synchronize())
    assert len(listener.submitted) == 2


async def test_hooks_are_optional(device: Device, stream: Stream) -> None:
    submitted: list[int] = []
    resolved: list[tuple[int, int, int]] = []

    class Submits:
        def on_submit(self, operation: Operation[Any]) -> None:
            submitted.append(operation.id)

    class Resolves:
        def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
            resolved.append((operation.id, start, end))

    with device.listen(Submits()), device.listen(Resolves()):
        operation = stream.synchronize()
        await quickly(operation)
    assert submitted == [operation.id]
    assert resolved == [(operation.id, 0, 0)]


async def test_wrong_listeners_are_refused(device: Device) -> None:
    class Neither:
        timing = True

    class NotCallable:
        on_submit = 7

    wrong: Any
    for wrong in (None, 7, "on_submit", Neither(), NotCallable(), Listener):
        with pytest.raises(InvalidTypeError, match=r"a listener is an object with a method on_submit\(operation\), "):
            with device.listen(wrong):
                raise AssertionError("it listens")


async def test_an_operation_that_ends_in_its_own_hook() -> None:
    """A hook that leads to a query of the stream: the operation resolves inside its own hook, in the same context."""
    async with aiocuda.open_device(driver=HostDriver()) as device:
        stream = device.stream()
        resolved: list[str] = []
        inside: list[bool] = []

        class Fills:
            def on_submit(self, operation: Operation[Any]) -> None:
                if operation.kind == "fill":
                    block_until(lambda: queue_of(stream).poll() or "fill" in resolved)
                    inside.append(True)

            def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
                resolved.append(operation.kind)

        buffer = stream.empty(4)
        with Reports() as reports, device.listen(Fills()):
            await quickly(stream.fill(buffer, 1))
            await quickly(stream.synchronize())
        assert reports.failures == []
        assert inside == [True]
        assert resolved.count("fill") == 1


async def test_concurrent_timelines_record_the_same_operations(device: Device, stream: Stream) -> None:
    async with Timeline(device) as first, Timeline(device) as second:
        await stream.synchronize()
    assert [[span.kind for span in each.spans if span.stream == stream.name] for each in (first, second)] == (
        [["synchronize"]] * 2
    )


async def test_a_dropped_stream_keeps_its_name(device: Device, stream: Stream) -> None:
    async with stream.lend() as handle:
        async with Timeline(device) as timeline:
            last = Stream.from_handle(device, handle).synchronize()
            gc.collect()
            await quickly(last)
    assert last.stream is None
    assert {span.stream for span in timeline.spans} == {last.stream_name} == {f"imported-{handle:#x}"}


async def test_events_of_a_closed_loop_are_returned() -> None:
    """The event before an operation is returned, too, if there is no listener at its end."""
    driver = HostDriver()
    async with aiocuda.open_device(driver=driver) as device:
        with Latch(device) as latch, device.listen(Listener(timing=True)):

            async def leave() -> None:
                stream = device.stream()
                latch.hold(stream)
                for _ in range(5):
                    stream.synchronize()
                await latch.held()
                streams.append(stream)

            streams: list[Stream] = []
            await asyncio.to_thread(in_thread, leave)
    assert driver.statistics()["events"] == 0
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 31, 94, 121, 234])
async def test_a_listener_breaks_no_invariant(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random programs in virtual time, with times for all operations. Of these seeds each lost events or hooks once."""
    listener = Listener(timing=True)
    opening = Program.open_device

    async def listened(program: Program, index: int) -> Device:
        device = await opening(program, index)
        resources_of(device).device_state.add_listener(listener)
        return device

    monkeypatch.setattr(Program, "open_device", listened)
    outcome = await asyncio.to_thread(simulate, seed)
    assert outcome.violations == []
    assert any(listener.timed)
    assert {*listener.submitted} <= {*listener.resolved}
    assert len({*listener.resolved}) == len(listener.resolved)
