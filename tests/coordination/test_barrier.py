"""StreamBarrier: parties, what breaks it, what the device does, two devices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    BrokenBarrierError,
    ClosedError,
    Device,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    SkippedError,
    StaleHandleError,
    Stream,
    StreamBarrier,
    StreamGroup,
    StreamPool,
    UnsupportedError,
    WrongDeviceError,
    WrongLoopError,
)
from aiocuda.driver.host import HostDriver
from tests.driver.several import SEVERAL_DEVICES, open_driver
from tests.helpers import SPIN, TRAP, Latch, block_until, in_thread, open_peer, quickly, until
from tests.pipeline.virtual import in_virtual_time

pytestmark = pytest.mark.asyncio


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def come(barrier: StreamBarrier, *streams: Any, **options: Any) -> asyncio.Task[float]:
    return asyncio.create_task(barrier.wait(*streams, **options))


@contextlib.asynccontextmanager
async def open_streams(device: Device, count: int) -> AsyncIterator[list[Stream]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(device.stream(name=f"s{number}")) for number in range(count)]


# What it does


async def test_all_wait_for_all(device: Device, latch: Latch) -> None:
    """F1, F2: on the host for the last party; on the device for all work that any stream was given before."""
    async with open_streams(device, 3) as streams:
        buffers = [stream.empty(4) for stream in streams]
        barrier = StreamBarrier(3)
        held = latch.hold(streams[0])
        await latch.held()
        tasks = [come(barrier, stream) for stream in streams[:2]]
        await turns()
        assert (barrier.n_waiting, barrier.parties, barrier.broken) == (2, 3, False)
        assert repr(barrier) == "<StreamBarrier: 2 of 3 have come>"
        await quickly(streams[1].fill(buffers[1], 1))  # nothing is ordered before the last party has come
        tasks.append(come(barrier, streams[2]))
        await turns()
        assert barrier.n_waiting == 0
        later = [stream.fill(buffer, 2) for stream, buffer in zip(streams, buffers, strict=True)]
        wakes = device.statistics().watchdog_wakes
        await until(lambda: device.statistics().watchdog_wakes > wakes, "a look at everything")
        assert not any(task.done() for task in tasks)
        assert not any(operation.done() for operation in later)
        latch.release()
        times = await quickly(asyncio.gather(*tasks))
        assert held.done()
        assert len(set(times)) == 1
        assert times[0] > 0
        await quickly(aiocuda.gather(*later))


async def test_time_from_the_first_arrival_to_the_last(device: Device) -> None:
    """F1: the time is that of the device, in any order of the parties on the host."""
    async with open_streams(device, 3) as streams:
        await device.load(SPIN)
        barrier = StreamBarrier(3)
        streams[1].launch(SPIN, 1, 1, 30_000_000)
        times = await quickly(asyncio.gather(*(barrier.wait(stream) for stream in streams)))
        assert times[0] >= 0.025
        assert times == [times[0]] * 3


async def test_times_between_the_arrivals_are_exact() -> None:
    """The second time the streams arrive together."""

    async def main(device: Device) -> None:
        async with open_streams(device, 3) as streams:
            await device.load(SPIN)
            barrier = StreamBarrier(3)
            streams[1].launch(SPIN, 1, 1, 30_000_000)
            for expected in (0.03, 0.0):
                times = await asyncio.gather(*(barrier.wait(stream) for stream in streams))
                assert times == pytest.approx([expected] * 3, abs=1e-4)

    await asyncio.to_thread(in_virtual_time, main)


@pytest.mark.parametrize("count", [2, 16])
async def test_steps_in_proportion_to_the_streams(count: int) -> None:
    """F1: an event each and one more, and two waits for each stream but one."""
    async with open_peer() as (peer, device), open_streams(device, count) as streams:
        with Latch(device) as latch:
            for stream in streams:
                latch.hold(stream)
            await latch.held()
            barrier = StreamBarrier(count)
            before = peer.calls.copy()
            tasks = [come(barrier, stream) for stream in streams]
            await turns()
            assert peer.calls["stream_wait"] - before["stream_wait"] == 2 * (count - 1)
            assert peer.calls["event_record"] - before["event_record"] == count + 1
            latch.release()
            await quickly(asyncio.gather(*tasks))
            del tasks
        events = device.statistics().events
        for _ in range(5):
            await quickly(asyncio.gather(*(barrier.wait(stream) for stream in streams)))
        assert device.statistics().events <= events + count + 1  # P25: they come back


async def test_groups_and_several_streams_as_parties(device: Device, latch: Latch) -> None:
    """F3: a party brings what it has; the same stream twice is one."""
    async with StreamGroup(device, 2) as group, open_streams(device, 2) as (left, right), StreamPool(device) as pool:
        barrier = StreamBarrier(3)
        latch.hold(group[1])
        await latch.held()
        async with pool.stream() as leased:
            tasks = [come(barrier, group, group[0]), come(barrier, left, right, left), come(barrier, leased)]
            await turns()
            later = [stream.fill(stream.empty(4), 1) for stream in (group[0], left, right, leased)]
            await until(lambda: barrier.n_waiting == 0, "the last party")
            assert not any(operation.done() for operation in later)
            latch.release()
            await quickly(asyncio.gather(*tasks))
            await quickly(aiocuda.gather(*later))
        assert await quickly(StreamBarrier(1).wait(group)) >= 0


async def test_parties_that_bring_no_stream() -> None:
    """It is a barrier of the host then."""
    barrier = StreamBarrier(3)
    tasks = [come(barrier) for _ in range(2)]
    await turns()
    assert barrier.n_waiting == 2
    assert await quickly(barrier.wait()) == 0.0
    assert await quickly(asyncio.gather(*tasks)) == [0.0, 0.0]


async def test_rounds_follow_one_another(device: Device) -> None:
    """F2: a party that is quick enough comes to the next round before the others have left this one."""
    rounds: list[int] = []

    async def party(stream: Stream, number: int) -> None:
        for turn in range(10):
            stream.launch(SPIN, 1, 1, 1000 * (number * turn % 7))
            await barrier.wait(stream)
            rounds.append(turn)

    async with open_streams(device, 4) as streams:
        barrier = StreamBarrier(4)
        await quickly(asyncio.gather(*(party(stream, number) for number, stream in enumerate(streams))))
    assert rounds == sorted(rounds)


@pytest.mark.parametrize(
    ("parties", "error"),
    [(0, InvalidArgumentError), (-1, InvalidArgumentError), ("2", InvalidTypeError), (True, InvalidTypeError)],
)
async def test_number_of_parties_that_is_none(parties: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        StreamBarrier(parties)


async def test_bad_input_does_not_count_as_a_party(device: Device) -> None:
    barrier = StreamBarrier(2)
    async with open_streams(device, 1) as (stream,):
        with pytest.raises(InvalidTypeError, match="not int"):
            await barrier.wait(7)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(InvalidArgumentError):
            await barrier.wait(stream, timeout=-1)
        waiting = come(barrier)
        await turns()
        with pytest.raises(InvalidTypeError, match="not int"):
            await barrier.wait(stream, 7)  # type: ignore[arg-type]  # that is the point
        assert (barrier.n_waiting, barrier.broken) == (1, False)
        await quickly(barrier.wait(stream))
        await quickly(waiting)


# What breaks it


async def refused_stream(device: Device, why: str, stack: contextlib.AsyncExitStack) -> Stream:
    """A stream that no barrier with a stream of `device` takes."""
    if why == "another loop":

        async def of_another_loop() -> Stream:
            return device.stream()

        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        return await asyncio.to_thread(loop.run_until_complete, of_another_loop())
    if why in ("another driver", "a closed device", "a device that has faulted"):
        device = await stack.enter_async_context(aiocuda.open_device(driver="host"))
    if why == "an ended lease":
        async with StreamPool(device) as pool, pool.stream() as leased:
            return leased
    stream = device.stream()
    if why == "a closed stream":
        await stream.aclose()
    elif why == "a closed device":
        await device.aclose()
    elif why == "a device that has faulted":
        with pytest.raises(DeviceFault):
            await stream.launch(TRAP, 1, 1)
    elif why == "a captured stream":
        await device.load(SPIN)
        await stack.enter_async_context(stream.capture())
        stream.launch(SPIN, 1, 1, 1)
    return stream


REFUSALS: dict[str, type[Exception]] = {
    "another driver": WrongDeviceError,
    "a closed stream": ClosedError,
    "a closed device": ClosedError,
    "a device that has faulted": DeviceFault,
    "another loop": WrongLoopError,
    "a captured stream": UnsupportedError,
    "an ended lease": StaleHandleError,
}


@pytest.mark.parametrize("why", REFUSALS)
async def test_refused_party_breaks_it_for_the_others(why: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        device = await stack.enter_async_context(aiocuda.open_device(driver="host"))
        left, stream = device.stream(), await refused_stream(device, why, stack)
        barrier = StreamBarrier(3)
        waiting = [come(barrier, left), come(barrier)]
        await turns()
        with pytest.raises(REFUSALS[why]) as refusal:
            await quickly(barrier.wait(stream))
        for task in waiting:
            with pytest.raises(BrokenBarrierError, match="was refused") as broken:
                await quickly(task)
            assert broken.value.__cause__ is refusal.value
        assert (barrier.broken, barrier.n_waiting) == (True, 0)
        with pytest.raises(BrokenBarrierError, match="reset"):
            await quickly(barrier.wait(left))
        await barrier.reset()
        await quickly(asyncio.gather(barrier.wait(left), barrier.wait(), barrier.wait()))


async def test_driver_that_refuses_an_event_breaks_it() -> None:
    async with open_peer() as (peer, device), open_streams(device, 2) as (left, right):
        barrier = StreamBarrier(2)
        waiting = come(barrier, left)
        await turns()
        peer.refuse("event_create")
        with pytest.raises(DriverError):
            await quickly(barrier.wait(right))
        with pytest.raises(BrokenBarrierError):
            await quickly(waiting)


async def test_waiting_party_of_a_faulted_device_gets_the_fault() -> None:
    """P4: a party that is refused because of the fault does not hide it from the others."""
    async with aiocuda.open_device(driver="host") as device:
        await device.load(TRAP)
        barrier = StreamBarrier(2)
        left, right = device.stream(), device.stream()
        waiting = come(barrier, left)
        await turns()
        await left.synchronize()  # nothing of it is under way
        trapped = right.launch(TRAP, 1, 1)
        block_until(lambda: device.driver.fault, "the fault")
        with pytest.raises(DeviceFault):
            await barrier.wait(right)
        with pytest.raises(DeviceFault):
            await quickly(waiting)
        assert barrier.broken
        with pytest.raises(DeviceFault):
            await quickly(trapped)


async def test_waiting_coroutine_that_python_closes_breaks_it() -> None:
    barrier = StreamBarrier(3)
    waiting = come(barrier)
    await turns()
    closed = barrier.wait()
    closed.send(None)
    closed.close()
    with pytest.raises(BrokenBarrierError):
        await quickly(waiting)


@pytest.mark.parametrize("how", ["cancelled", "timeout", "abort", "reset"])
async def test_party_that_leaves_breaks_it_for_the_others(device: Device, how: str) -> None:
    """F2: they would wait forever. Their streams continue as if no party had arrived."""
    async with open_streams(device, 2) as (left, right):
        barrier = StreamBarrier(3)
        other = come(barrier, left)
        leaving = come(barrier, right, timeout=0.005 if how == "timeout" else None)
        await turns()
        if how == "cancelled":
            leaving.cancel()
        elif how == "abort":
            await barrier.abort()
        elif how == "reset":
            await barrier.reset()
        own = {"cancelled": asyncio.CancelledError, "timeout": TimeoutError}.get(how, BrokenBarrierError)
        with pytest.raises(own):
            await quickly(leaving)
        with pytest.raises(BrokenBarrierError, match={"abort": "aborted", "reset": "reset"}.get(how, "left before")):
            await quickly(other)
        assert (barrier.broken, barrier.n_waiting) == (how != "reset", 0)
        if barrier.broken:
            with pytest.raises(BrokenBarrierError, match="reset"):
                await barrier.wait(left)
        await quickly(aiocuda.gather(left.synchronize(), right.synchronize()))
        await barrier.reset()
        assert not barrier.broken
        tasks = [come(barrier, left), come(barrier, right), come(barrier)]
        await quickly(asyncio.gather(*tasks))


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_leaving_while_the_device_is_at_work_changes_nothing_for_others(
    device: Device, latch: Latch, how: str
) -> None:
    """P7: all have come; what leaves is one await."""
    async with open_streams(device, 2) as (left, right):
        barrier = StreamBarrier(2)
        latch.hold(left)
        await latch.held()
        other, leaving = come(barrier, left), come(barrier, right, timeout=0.01 if how == "timeout" else None)
        await turns()
        assert barrier.n_waiting == 0
        if how == "cancelled":
            leaving.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else TimeoutError):
            await quickly(leaving)
        assert not other.done()
        assert not barrier.broken
        behind = right.synchronize()
        await turns()
        assert not behind.done()  # the streams are still ordered
        latch.release()
        await quickly(other)
        await quickly(behind)


async def test_cancellation_as_the_last_party_arrives(device: Device) -> None:
    async with open_streams(device, 2) as (left, right):
        barrier = StreamBarrier(2)
        first = come(barrier, left)
        await turns()
        last = come(barrier, right)
        await asyncio.sleep(0)  # it has come, and the first one has not woken
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await quickly(last) >= 0
        assert not barrier.broken


async def test_failure_before_it_reaches_all_parties() -> None:
    async with open_peer() as (peer, device), open_streams(device, 3) as streams:
        buffers = [stream.empty(4) for stream in streams]
        await aiocuda.gather(*(stream.synchronize() for stream in streams))
        peer.refuse("fill")
        failed = streams[1].fill(buffers[1], 1)
        barrier = StreamBarrier(3)
        for task in [come(barrier, stream) for stream in streams]:
            with pytest.raises(SkippedError) as caught:
                await quickly(task)
            assert isinstance(caught.value.__cause__, DriverError)
        assert not barrier.broken
        with pytest.raises(DriverError):
            await failed
        await quickly(asyncio.gather(*(barrier.wait(stream) for stream in streams)))


async def test_driver_that_refuses_the_wait() -> None:
    """The last party gets the error of the driver; the others get a `BrokenBarrierError`."""
    async with open_peer() as (peer, device), open_streams(device, 2) as (left, right):
        with Latch(device) as latch:
            barrier = StreamBarrier(2)
            latch.hold(left)
            await latch.held()
            first = come(barrier, left)
            await turns()
            peer.refuse("stream_wait")
            with pytest.raises(DriverError):
                await quickly(barrier.wait(right))
            with pytest.raises(BrokenBarrierError) as caught:
                await quickly(first)
            assert isinstance(caught.value.__cause__, DriverError)
            assert barrier.broken
            latch.release()


async def test_device_fault_reaches_the_waiting_parties() -> None:
    """P3: although the waiting party has nothing in flight."""
    async with open_peer() as (_, device):
        barrier = StreamBarrier(2)
        waiting = come(barrier, device.stream())
        await turns()

        async def fault() -> None:
            async with device.stream() as elsewhere:
                with pytest.raises(DeviceFault):
                    await elsewhere.launch(TRAP, 1, 1)

        await asyncio.to_thread(asyncio.run, fault())
        with pytest.raises(DeviceFault):
            await quickly(waiting)
        assert barrier.broken
        assert not barrier._watch.running


async def test_close_of_the_device_reaches_the_waiting_parties() -> None:
    device = await aiocuda.open_device(driver="host")
    barrier = StreamBarrier(2)
    waiting = come(barrier, device.stream())
    await turns()
    await device.aclose()
    with pytest.raises(ClosedError, match="its streams with it"):
        await quickly(waiting)


async def test_fault_after_the_barrier_reaches_all_parties() -> None:
    async with open_peer() as (_, device):
        streams = [device.stream() for _ in range(3)]
        barrier = StreamBarrier(3)
        streams[0].launch(TRAP, 1, 1)
        for task in [come(barrier, stream) for stream in streams]:
            with pytest.raises(DeviceFault):
                await quickly(task)


async def test_parties_of_one_loop() -> None:
    """P13; and parties of a closed loop do not block the barrier."""
    barrier = StreamBarrier(2)
    waiting = come(barrier)
    await turns()

    async def elsewhere() -> None:
        for use in (barrier.wait, barrier.abort, barrier.reset):
            with pytest.raises(WrongLoopError, match="one in each loop"):
                await use()

    await asyncio.to_thread(in_thread, elsewhere)
    assert barrier.n_waiting == 1
    await quickly(barrier.wait())
    await quickly(waiting)

    async def gone() -> None:
        come(barrier).add_done_callback(lambda task: None)
        await turns()
        asyncio.get_running_loop().stop()

    loop = asyncio.new_event_loop()

    def strand() -> None:
        stranded = loop.create_task(barrier.wait())
        loop.call_later(0.01, loop.stop)
        loop.run_forever()
        loop.close()
        stranded._log_destroy_pending = False  # type: ignore[attr-defined]  # that is the point
        kept.append(stranded)

    kept: list[object] = []
    await asyncio.to_thread(strand)
    assert barrier.n_waiting == 1
    await quickly(asyncio.gather(barrier.wait(), barrier.wait()))


# Two devices


@pytest_asyncio.fixture(params=SEVERAL_DEVICES)
async def two(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Device, Device]]:
    """Two devices of one driver."""
    driver = open_driver(request.param, 2)
    async with aiocuda.open_device(0, driver=driver) as first:
        async with aiocuda.open_device(1, driver=driver) as second:
            yield first, second
    driver.close()


async def test_devices_meet(two: tuple[Device, Device]) -> None:
    """F3: streams of each device first, then the devices; later work on either waits for all of both."""
    async with open_streams(two[0], 2) as here, open_streams(two[1], 2) as there:
        for device in two:
            await device.load(SPIN)
        for late in (here[1], there[1]):
            barrier = StreamBarrier(4)
            slow = late.launch(SPIN, 1, 1, 20_000_000)
            tasks = [come(barrier, stream) for stream in (*here, *there)]
            await turns()
            assert barrier.n_waiting == 0
            later = [stream.synchronize() for stream in (*here, *there)]
            for operation in later:
                await quickly(operation)
                late._queue.poll()  # that queue may not have been polled
                assert slow.done()
            (time,) = set(await quickly(asyncio.gather(*tasks)))
            assert time > 0


async def test_devices_need_few_waits_across() -> None:
    """F3: as many as there are devices, not streams."""
    async with open_peer(devices_peer()) as (peer, first):
        async with aiocuda.open_device(1, driver=peer.driver) as second:
            async with open_streams(first, 4) as here, open_streams(second, 4) as there:
                with Latch(first) as one, Latch(second) as another:
                    for latch, streams in ((one, here), (another, there)):
                        for stream in streams:
                            latch.hold(stream)
                        await latch.held()
                    across: list[Any] = []
                    machine = peer.inner._machine
                    peer.before["stream_wait"] = lambda stream, event: across.append(
                        machine.stream(stream).device != machine.event(event).device
                    )
                    barrier = StreamBarrier(2)
                    tasks = [come(barrier, *streams) for streams in (here, there)]
                    await turns()
                    assert (len(across), sum(across)) == (2 * 6 + 2, 2)
                    one.release()
                    another.release()
                    await quickly(asyncio.gather(*tasks))


def devices_peer() -> Any:
    from tests.helpers import Peer

    return Peer(HostDriver(devices=2))


async def test_streams_of_two_drivers_cannot_meet() -> None:
    async with aiocuda.open_device(driver="host") as first, aiocuda.open_device(driver="host") as second:
        async with first.stream() as here, second.stream() as there:
            barrier = StreamBarrier(2)
            with pytest.raises(WrongDeviceError, match="another driver"):
                await barrier.wait(here, there)
            with pytest.raises(BrokenBarrierError):  # immediately: the refused party does not arrive
                await quickly(barrier.wait(here))
            await barrier.reset()
            waiting = come(barrier, here)
            await turns()
            with pytest.raises(WrongDeviceError):
                await barrier.wait(there)
            with pytest.raises(BrokenBarrierError, match="another driver"):
                await quickly(waiting)
