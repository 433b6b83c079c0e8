"""Stages that return what is not of their pipeline's device, loop or driver: it is ordered, or refused."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiocuda
from aiocuda import BusyError, Device, Operation, Pipeline, Slot, Stage, WrongDeviceError, WrongLoopError
from aiocuda.driver.host import HostDriver
from tests.helpers import PATIENCE, SPIN, open_peer

pytestmark = pytest.mark.asyncio

MS = 1_000_000


def spin(nanoseconds: int) -> Callable[[Slot], Operation[None]]:
    return lambda slot: slot.stream.launch(SPIN, 1, 1, nanoseconds)


@contextlib.contextmanager
def elsewhere(device: Device) -> Iterator[Operation[None]]:
    """An operation of another loop, which is held until the block ends: the loop does not query the device."""
    made: list[Operation[None]] = []
    ready, released = threading.Event(), threading.Event()

    async def main() -> None:
        async with device.stream() as stream:
            made.append(stream.launch(SPIN, 1, 1, 1))
            ready.set()
            released.wait(PATIENCE)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield made[0]
    finally:
        released.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("last", [False, True])
async def test_an_operation_of_another_loop_is_refused_and_left_to_that(last: bool) -> None:
    """P13. Its stream's operations were resolved from here, in the middle of whatever that loop did."""
    async with open_peer() as (_, device):
        await device.load(SPIN)
        with elsewhere(device) as operation:
            own: list[Operation[None]] = []

            def foreign(slot: Slot) -> list[Operation[None]]:
                own.append(spin(5 * MS)(slot))
                return [operation, own[-1]] if last else [operation]

            stages = [Stage("foreign", foreign), *([] if last else [Stage("behind", spin(5 * MS))])]
            async with Pipeline(device, stages) as pipeline:
                with pytest.raises(WrongLoopError) as caught:
                    async for _ in pipeline.run(range(5)):
                        pass
                assert caught.value.__notes__ == ["in stage 'foreign' of item 0, counted from 0"]
                assert (pipeline.ring.busy, [each.state for each in own]) == (0, ["done"] * len(own))
            assert not operation.done()


async def test_an_operation_of_another_driver_is_refused_where_the_device_would_wait_for_it() -> None:
    """Its event handle means another event in this driver: later work would have waited for that event."""
    async with open_peer() as (_, device), aiocuda.open_device(driver=HostDriver()) as other:
        await device.load(SPIN)
        await other.load(SPIN)
        async with other.stream() as stream, device.stream() as own:
            stages = [Stage("foreign", lambda slot: stream.launch(SPIN, 1, 1, 5 * MS)), Stage("behind", spin(1))]
            event = own.record()
            async with Pipeline(device, stages) as pipeline:
                with pytest.raises(WrongDeviceError, match="another driver"):
                    async for _ in pipeline.run(range(5)):
                        pass
                assert pipeline.ring.busy == 0
            await event


async def test_what_was_recorded_into_a_graph_is_refused() -> None:
    async with open_peer() as (_, device):
        await device.load(SPIN)
        own: list[Operation[None]] = []

        def captured(slot: Slot) -> Operation[Any]:
            own.append(spin(5 * MS)(slot))
            with slot.stream.capture():
                return spin(1)(slot)

        async with Pipeline(device, [Stage("captured", captured)]) as pipeline:
            with pytest.raises(BusyError, match="recorded into a graph") as caught:
                async for _ in pipeline.run(range(5)):
                    pass
            assert caught.value.__notes__ == ["in stage 'captured' of item 0, counted from 0"]
            assert (pipeline.ring.busy, [each.state for each in own]) == (0, ["done"] * len(own))
