"""The hooks of a listener are called for every operation of a device."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import aiocuda
from aiocuda import BusyError, Device, Operation, Stream
from aiocuda._device_resources import resources_of
from aiocuda.driver.host import HostDriver
from aiocuda.observe import Timeline
from aiocuda.testing import Latch
from tests.helpers import PATIENCE, in_thread, quickly
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


async def test_one_listens_at_a_time(device: Device, stream: Stream) -> None:
    first, second = Listener(timing=False), Listener(timing=False)
    with device.listen(first):
        with pytest.raises(BusyError, match=r"Listener.* listens to .* already: leave its block first"):
            with device.listen(second):
                raise AssertionError("two listen")
        await quickly(stream.synchronize())
    with pytest.raises(ZeroDivisionError), device.listen(second):
        raise ZeroDivisionError
    with device.listen(second):
        await quickly(stream.synchronize())
    assert (len(first.submitted), len(second.submitted)) == (1, 1)


async def test_the_second_of_two_concurrent_timelines_is_refused(device: Device, stream: Stream) -> None:
    timelines = [Timeline(device), Timeline(device)]
    begun = await asyncio.gather(*(one.__aenter__() for one in timelines), return_exceptions=True)
    entered = [one for one in begun if isinstance(one, Timeline)]
    assert [type(one) for one in begun if one not in entered] == [BusyError]
    (listening,) = entered
    await stream.synchronize()
    await listening.__aexit__(None)
    assert [span.kind for span in listening.spans] == ["synchronize"]


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
        with Latch(device, seconds=PATIENCE) as latch, device.listen(Listener(timing=True)):

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
@pytest.mark.parametrize("seed", [1, 94, 121, 234])
async def test_a_listener_breaks_no_invariant(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random programs in virtual time, with times for all operations. Of these seeds each lost events once."""
    listener = Listener(timing=True)
    opening = Program.open_device

    async def listened(program: Program, index: int) -> Device:
        device = await opening(program, index)
        resources_of(device).device_state.instrument = listener
        return device

    monkeypatch.setattr(Program, "open_device", listened)
    outcome = await asyncio.to_thread(simulate, seed)
    assert outcome.violations == []
    assert any(listener.timed)
