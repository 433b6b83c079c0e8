"""`Device.ping` and `Device.fault`: a sign of life of the device, and its fault."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import aiocuda
from aiocuda import ClosedError, Device, DeviceFault, DriverError, InvalidArgumentError, InvalidTypeError, Stream
from aiocuda._base._faults import FAULTS
from aiocuda.device._open_devices import OPEN_DEVICES
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import PATIENCE, SPIN, TRAP, FaultListener, Latch, in_thread, open_peer, quickly, turns

#: Seconds after which a ping of a held device gives up.
SOON = 0.05

MS = 1_000_000


@contextlib.asynccontextmanager
async def held(device: Device) -> AsyncIterator[Latch]:
    """Hold a stream of the device until the latch is released."""
    async with device.stream() as stream:
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            yield latch


@pytest_asyncio.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def one_stream(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """A device whose streams are all its default stream: a held stream is a device that does not answer."""
    async with aiocuda.open_device(driver=request.param, asynchronous=False) as device:
        yield device


@pytest.mark.asyncio
async def test_ping_returns_its_seconds(device: Device) -> None:
    assert 0.0 <= await device.ping(PATIENCE) < PATIENCE
    assert await quickly(device.ping(None)) >= 0.0
    assert await quickly(device.ping(timeout_s=float("inf"))) >= 0.0


@pytest.mark.asyncio
async def test_ping_does_not_wait_for_a_held_stream(device: Device, stream: Stream, latch: Latch) -> None:
    held = latch.hold(stream)
    await latch.held()
    await device.ping(timeout_s=PATIENCE)
    assert not held.done()
    latch.release()
    await held


@pytest.mark.asyncio
async def test_device_that_does_not_answer_is_a_timeout_and_can_answer_later(one_stream: Device) -> None:
    async with held(one_stream) as latch:
        with pytest.raises(TimeoutError, match=r"has not answered within 0\.05 s"):
            await one_stream.ping(SOON)
        with pytest.raises(TimeoutError):
            await one_stream.ping(SOON)
        waiting = asyncio.create_task(one_stream.ping(PATIENCE))
        await turns(3)
        assert not waiting.done()
        latch.release()
        assert await waiting < PATIENCE
    assert await one_stream.ping(PATIENCE) < PATIENCE


@pytest.mark.asyncio
async def test_pings_that_time_out_hold_one_event(one_stream: Device) -> None:
    async with held(one_stream) as latch:
        for _ in range(2):  # the first one makes the stream
            with pytest.raises(TimeoutError):
                await one_stream.ping(0.001)
        before = one_stream.statistics()
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await one_stream.ping(0.001)
        late = await asyncio.gather(*(one_stream.ping(0.001) for _ in range(200)), return_exceptions=True)
        assert {type(error) for error in late} == {TimeoutError}
        after = one_stream.statistics()
        assert (after.events, after.streams, after.submitted) == (before.events, before.streams, before.submitted)
        latch.release()


@pytest.mark.asyncio
async def test_pings_grow_nothing(device: Device) -> None:
    await device.ping(PATIENCE)
    before = device.statistics()
    for _ in range(50):
        await asyncio.gather(*(device.ping(PATIENCE) for _ in range(4)))
    after = device.statistics()
    assert (after.events, after.streams, after.threads) == (before.events, before.streams, before.threads)
    assert after.in_flight == 0


@pytest.mark.asyncio
async def test_cancelled_ping_leaves_the_others(one_stream: Device) -> None:
    async with held(one_stream) as latch:
        first, second = (asyncio.create_task(one_stream.ping(PATIENCE)) for _ in range(2))
        await turns(3)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        latch.release()
        await quickly(second)


@pytest.mark.asyncio
async def test_answer_that_came_while_the_loop_was_blocked_is_in_time() -> None:
    async with open_peer() as (peer, device):
        await device.ping(PATIENCE)
        silent = True
        answer = peer.inner.event_query
        peer.__dict__["event_query"] = lambda event: not silent and answer(event)

        def block() -> None:
            """Block the loop longer than the ping waits, in the iteration in which it begins; the device answers."""
            nonlocal silent
            threading.Event().wait(2 * SOON)
            silent = False

        ping = asyncio.create_task(device.ping(SOON))
        asyncio.get_running_loop().call_soon(block)
        await ping


@pytest.mark.asyncio
async def test_event_that_was_reached_before_the_ping_proves_nothing() -> None:
    async with open_peer() as (peer, device):
        await device.ping(PATIENCE)
        answer = peer.inner.event_query
        peer.__dict__["event_query"] = lambda event: False
        with pytest.raises(TimeoutError):
            await device.ping(0.01)
        peer.__dict__["event_query"] = answer
        events = peer.calls["event_record"]
        await device.ping(PATIENCE)
        assert peer.calls["event_record"] == events + 1


@pytest.mark.asyncio
async def test_each_loop_has_a_ping_of_its_own(device: Device) -> None:
    await device.ping(PATIENCE)
    streams = device.statistics().streams

    async def other_loop() -> int:
        await asyncio.gather(*(device.ping(PATIENCE) for _ in range(3)))
        return device.statistics().streams

    assert await asyncio.to_thread(in_thread, other_loop) == streams + 1
    await device.ping(PATIENCE)
    assert device.statistics().streams <= streams + 1


@pytest.mark.asyncio
async def test_closed_device_raises() -> None:
    async with aiocuda.open_device(driver="host") as device:
        await device.ping(PATIENCE)
        closing = asyncio.create_task(device.aclose())
        await turns(1)
        with pytest.raises(ClosedError):
            await device.ping(PATIENCE)
        await closing
    with pytest.raises(ClosedError):
        await device.ping(PATIENCE)


@pytest.mark.asyncio
async def test_ping_waiting_at_a_forced_close_ends() -> None:
    async with aiocuda.open_device(driver="host", asynchronous=False) as device:
        device.drain_timeout = 0.01
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            ping = asyncio.create_task(device.ping(PATIENCE))
            await turns(3)
            with pytest.warns(aiocuda.DrainTimeoutWarning):
                await device.__aexit__(ValueError, ValueError(), None)
            with pytest.raises(ClosedError):
                await quickly(ping)


@pytest.mark.asyncio
async def test_fault_reaches_pings_and_is_an_attribute() -> None:
    heard: list[DeviceFault] = []
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        assert device.fault is None
        assert OPEN_DEVICES.fault() is None
        listener = FaultListener(heard.append)
        try:
            with pytest.raises(DeviceFault):
                await stream.launch(TRAP, 1, 1)
        finally:
            listener.stop()
        assert isinstance(device.fault, DeviceFault)
        assert [fault.code for fault in heard] == [device.fault.code]
        assert OPEN_DEVICES.fault() is device.fault
        assert FAULTS.of_process is None  # the host driver can be opened again
        with pytest.raises(DeviceFault):
            await device.ping(PATIENCE)
    assert OPEN_DEVICES.fault() is None


@pytest.mark.asyncio
async def test_refused_event_is_the_pings_error_and_the_next_ping_works() -> None:
    async with open_peer() as (peer, device):
        await device.ping(PATIENCE)
        peer.refuse("event_record")
        with pytest.raises(DriverError):
            await device.ping(PATIENCE)
        assert await device.ping(PATIENCE) < PATIENCE


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1.0, InvalidArgumentError),
        (float("nan"), InvalidArgumentError),
        ("1", InvalidTypeError),
        (True, InvalidTypeError),
    ],
)
async def test_wrong_timeouts_are_refused(value: Any, error: type[Exception]) -> None:
    async with aiocuda.open_device(driver="host") as device:
        with pytest.raises(error, match="timeout_s"):
            await device.ping(value)
        assert device.statistics().streams == 0


def test_ping_in_virtual_time() -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(None), asynchronous=False) as device:
            await device.load(SPIN)
            stream = device.stream()
            stream.launch(SPIN, 1, 1, 3_000 * MS)
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(TimeoutError):
                await device.ping()
            assert loop.time() - began == pytest.approx(1.0, abs=1e-3)
            assert await device.ping(None) == pytest.approx(2.0, abs=1e-2)
        async with aiocuda.open_device(driver=SimulatedDriver(None)) as device:
            await device.load(SPIN)
            stream = device.stream()
            busy = stream.launch(SPIN, 1, 1, 3_000 * MS)
            assert await device.ping() < 0.01
            assert not busy.done()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
