"""What random programs on the simulated driver found in the foundation, each as the few steps that it takes.

Without seeds: what a seed does changes with the programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DeviceFault,
    DrainTimeoutWarning,
    InvalidArgumentError,
    Kernel,
    Pipeline,
    SkippedError,
    Stage,
    UnsupportedError,
)
from aiocuda._device_resources import resources_of
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.driver.simulated._choices import SeededChoices
from aiocuda.driver.simulated._upset import Upsets
from aiocuda.memory._staging import LEAST_CHUNK_BYTES
from aiocuda.testing import SimulatedLoop, kernels
from tests.helpers import AFFINE, SPIN, TRAP

#: Nanoseconds of a kernel that is long beside everything else.
LONG = 10_000_000


class LeftError(Exception):
    """The device is left by an exception."""


def simulated(
    main: Callable[[Device, SimulatedDriver], Awaitable[None]], *upsets: Upset, **options: Any
) -> SimulatedDriver:
    """Run it on a device of a driver that decides nothing by chance. The driver, which saw no rule broken."""
    driver = SimulatedDriver(None, upsets=upsets)

    async def opened() -> None:
        async with aiocuda.open_device(driver=driver, **options) as device:
            await device.load(SPIN)
            await main(device, driver)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []
    return driver


def test_letting_go_of_a_chunk_resolves_nothing_that_was_not_asked_about() -> None:
    """That refills the queue, which asks for room: it polled the queue inside of the pass that let go.

    The inner pass resolved what the outer one had counted, and the outer one then what had just been submitted.
    """

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            queue = stream._queue
            buffer = stream.empty(4)
            await stream.fill(buffer, 0)
            for _ in range(2):
                arguments = queue.handle, buffer.address, b"\x01\x00\x00\x00", 4
                queue.submit_chunk(driver.fill, arguments, None, queue.host_queue.pump, None)
            behind = stream.launch(SPIN, 1, 1, LONG)
            assert behind.state == "queued"
            driver.advance_time(1e-3)  # both chunks have passed, and nobody has looked
            queue.poll()
            assert behind.state == "submitted"
            await behind
            assert driver.now() > LONG / 1e9

    simulated(main, max_in_flight=1)


def test_what_takes_no_time_says_nothing_of_when_the_next_one_began() -> None:
    """An event in front of a kernel was seen done 7 ms late, and so the kernel was expected 7 ms later than it ended.

    In a pipeline of 5 ms stages each item that is timed by events was told up to 4 ms late.
    """

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream, device.stream() as other:
            for _ in range(8):
                stream.wait(other.launch(SPIN, 1, 1, LONG))
                await stream.launch(SPIN, 1, 1, LONG)
            began = driver.now()
            stream.wait(other.launch(SPIN, 1, 1, LONG))
            event = stream.record()
            waiting = asyncio.create_task(stream.launch(SPIN, 1, 1, LONG).wait())
            await asyncio.sleep(0)
            driver.advance_time(1.7 * LONG / 1e9)
            stream._queue.poll()
            assert event.done()
            _, expected, _ = stream._queue.awaited()
            assert expected == pytest.approx(began + 2 * LONG / 1e9, abs=1e-3)
            await waiting

    simulated(main)


def test_buffer_of_a_withdrawn_copy_outlives_its_chunks() -> None:
    """A copy of which some chunks are with the device was said to have passed when it was withdrawn."""
    drivers: list[SimulatedDriver] = []

    async def main(device: Device, driver: SimulatedDriver) -> None:
        drivers.append(driver)
        stream, home = device.stream(), device.stream()
        array = np.ones(48 * LEAST_CHUNK_BYTES, np.uint8)
        buffer = home.empty_like(array)
        operation = stream.copy(buffer, array)
        buffer.free()  # once the copy has passed
        while not stream._queue.pending:
            await asyncio.sleep(10e-6)
        assert operation.state == "staging"
        raise LeftError

    with pytest.raises(LeftError):
        simulated(main, Upset("slow", 1, seconds=1.0))
    (driver,) = drivers
    assert (driver.fault, driver.violations) == (None, [])


def test_waiting_for_what_was_skipped_waits_for_what_stands_before_it() -> None:
    """It has no event of its own, and once its failure was delivered nothing else kept the streams in order."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as one, device.stream() as other, device.stream() as third:
            began = driver.now()
            one.launch(SPIN, 1, 1, LONG)
            failed = other.launch(SPIN, 1, 1, 1)  # refused
            one.wait(failed)
            skipped = one.synchronize()
            with pytest.raises(InvalidArgumentError, match="launch: refused"):
                await failed  # delivered: every stream is usable again
            third.wait(skipped)
            await third.synchronize()
            assert driver.now() - began > LONG / 1e9
            with pytest.raises(SkippedError):
                await skipped

    simulated(main, Upset("refuse", 2, "launch", 1))


def test_stream_that_waits_for_what_it_has_skipped_itself_marks_nothing() -> None:
    """The mark came in front of the wait's own event and behind it in the queue: the wait was done before its event."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream, device.stream() as other:
            stream.launch(SPIN, 1, 1, LONG)
            failed = other.launch(SPIN, 1, 1, 1)  # refused
            stream.wait(failed)
            skipped = stream.synchronize()
            with pytest.raises(InvalidArgumentError, match="launch: refused"):
                await failed
            waiting = stream.wait(skipped)
            events = [driver._machine.events[each.lease.handle] for each in stream._queue.pending if each.lease]
            assert len(events) == 2  # of the kernel and of the wait
            await waiting

    simulated(main, Upset("refuse", 2, "launch", 1))


def test_abandoned_operation_in_the_queue_passes_with_a_fault() -> None:
    """It stayed "not passed" for ever, and so its array in use."""
    array = np.zeros(16, np.float32)

    async def faults(device: Device, driver: SimulatedDriver) -> None:
        stream = device.stream()
        buffer = stream.empty_like(array)
        running = stream.launch(TRAP, 1, 1)
        download = stream.download(buffer, out=array)
        assert download.state == "queued"
        assert download.abandon()
        with pytest.raises(DeviceFault):
            await running
        await download.settle()

    async def uses(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            await stream.download(await stream.upload(np.ones(16, np.float32)), out=array)

    simulated(faults, max_in_flight=1)
    simulated(uses)
    assert (array == 1).all()


@pytest.mark.parametrize("before", ["runs", "is being loaded"])
def test_event_that_is_dropped_and_whose_record_is_withdrawn_goes_back(before: str) -> None:
    """Nobody gave its lease back: the event was still there when the device had been closed."""
    drivers: list[SimulatedDriver] = []

    async def main(device: Device, driver: SimulatedDriver) -> None:
        drivers.append(driver)
        stream = device.stream()
        kernel = SPIN if before == "runs" else Kernel("spin", source=kernels.SPIN.source, host=lambda nanoseconds: None)
        stream.launch(kernel, 1, 1, LONG)
        event = stream.record()
        assert event.operation.state == "queued"
        del event
        raise LeftError

    with pytest.raises(LeftError):
        simulated(main, max_in_flight=1)
    assert drivers[0].statistics()["events"] == 0


@pytest.mark.parametrize("idle", [True, False])
def test_another_stream_comes_behind_an_allocation(idle: bool) -> None:
    """On an idle stream it had no event behind it, since it takes no time; by CUDA's rules it needs one."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as one, device.stream() as other:
            if not idle:
                one.launch(SPIN, 1, 1, LONG)
            buffer = one.empty(16)
            assert driver.violations == []
            await other.fill(buffer, 1)
            assert driver.violations == []

    simulated(main)


def test_array_that_a_withdrawn_copy_claims_stays_until_the_claim_goes() -> None:
    """Its address went to somebody else's array, which then was refused for a claim that was not its own."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        other = device.stream()
        buffer = await other.upload(np.ones(16, np.float32))
        with pytest.raises(LeftError):
            async with device.stream() as stream:
                running = stream.launch(SPIN, 1, 1, LONG)
                withdrawn = stream.download(buffer)  # on the host: one operation is with the device
                assert withdrawn.state == "queued"
                raise LeftError
        assert not running.done() or running.state == "abandoned"
        for array in [np.zeros(16, np.float32) for _ in range(50)]:
            other.copy(buffer, array)
        await other.synchronize()
        await other.aclose()

    simulated(main, max_in_flight=1)


def test_dependant_is_skipped_though_the_failure_was_read_before_its_turn() -> None:
    """P18: it stood in a queue when somebody read the failure, and then ran on what had never been written."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream, device.stream() as other:
            buffer = stream.empty(4)
            stream.launch(SPIN, 1, 1, LONG // 10)
            refused = stream.fill(buffer, 1)
            for _ in range(2):
                other.launch(SPIN, 1, 1, 5 * LONG)  # the head of its queue for long
            other.wait(refused)
            dependant = other.download(buffer)
            with pytest.raises(InvalidArgumentError):
                await refused
            with pytest.raises(SkippedError) as skipped:
                await dependant
            assert isinstance(skipped.value.__cause__, InvalidArgumentError)

    simulated(main, Upset("refuse", 1, "fill", 1), max_in_flight=1)


def test_launch_behind_a_skipped_one_waits_for_the_allocation_again() -> None:
    """P16: the skipped launch had taken its wait for another stream's allocation along, and passed for a use."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        await device.load(AFFINE)
        async with device.stream() as stream, device.stream() as home:
            own = stream.empty(16, np.uint32)
            home.launch(SPIN, 1, 1, LONG)
            other = home.empty(16, np.uint32)  # there when the kernel has ended
            refused = stream.fill(own, 1)
            skipped = stream.launch(AFFINE, 1, 32, other, 16, 1, 1)
            with pytest.raises(InvalidArgumentError):
                await refused
            with pytest.raises(SkippedError):
                await skipped
            await stream.launch(AFFINE, 1, 32, other, 16, 1, 1)

    simulated(main, Upset("refuse", 1, "fill", 1))


# Two devices


def two_devices(main: Callable[[Device, Device, SimulatedDriver], Awaitable[None]], **options: Any) -> SimulatedDriver:
    """Run it on both devices of a driver that decides nothing by chance, which main closes if nothing faults."""
    driver = SimulatedDriver(None, devices=2)

    async def opened() -> None:
        first = await aiocuda.open_device(0, driver=driver, **options)
        second = await aiocuda.open_device(1, driver=driver, **options)
        for device in (first, second):
            await device.load(SPIN)
            await device.load(TRAP)
        await main(first, second, driver)
        for device in (first, second):
            await device.aclose()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []
    return driver


def test_device_is_not_closed_while_another_ones_stream_copies_its_memory() -> None:
    """Its memory went back behind its own streams, and the copy still used it."""

    async def main(first: Device, second: Device, driver: SimulatedDriver) -> None:
        async with first.stream() as stream, second.stream() as other:
            lent, taken = other.empty(4, np.uint32), stream.empty(4, np.uint32)
            await other.fill(lent, 7)
            stream.launch(SPIN, 1, 1, LONG)
            copied = stream.copy(taken, lent)
            closing = asyncio.ensure_future(second.aclose())
            await asyncio.sleep(1e-3)
            with pytest.raises(ClosedError, match="simulated 1 is being closed"):
                stream.copy(lent, taken)
            await closing
            assert copied.done()
            assert driver.now() > LONG / 1e9
            assert (await stream.download(taken) == 7).all()

    two_devices(main)


def test_device_is_not_closed_while_another_ones_stream_is_to_use_its_pinned_memory() -> None:
    """It was unlocked, and the copy waited for ever for it to be locked."""

    async def main(first: Device, second: Device, driver: SimulatedDriver) -> None:
        async with first.stream() as stream:
            buffer = stream.empty(4, np.uint32)
            await stream.fill(buffer, 7)
            array = second.pinned(4, np.uint32)
            await array
            for _ in range(2):
                stream.launch(SPIN, 1, 1, LONG)
            copied = stream.copy(array, buffer)
            assert copied.state == "queued"
            await second.aclose()
            assert copied.done()
            assert (array == 7).all()

    two_devices(main, max_in_flight=1)


def test_device_is_closed_behind_copies_of_its_memory_that_a_loop_has_left() -> None:
    """Nobody resolves them there: the driver is asked."""
    driver = SimulatedDriver(None, devices=2)
    devices: list[Device] = []

    async def begin() -> None:
        devices.extend([await aiocuda.open_device(index, driver=driver) for index in range(2)])
        first, second = devices
        await first.load(SPIN)
        stream = first.stream()
        lent, taken = second.stream().empty(4, np.uint32), stream.empty(4, np.uint32)
        stream.launch(SPIN, 1, 1, LONG)
        stream.copy(taken, lent)
        await asyncio.sleep(0)

    async def end() -> None:
        for device in reversed(devices):  # the other one, whose stream it is, comes last
            await device.aclose()

    loop = SimulatedLoop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the streams
        loop.run_until_complete(begin())
        loop.close()
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(end())
    assert driver.now() > LONG / 1e9
    assert driver.violations == []


def test_device_is_closed_behind_copies_of_its_memory_in_a_device_that_was_left_at_work() -> None:
    """Nobody watches that one's streams any more: the driver is asked."""

    async def main(first: Device, second: Device, driver: SimulatedDriver) -> None:
        stream = first.stream()
        lent, taken = second.stream().empty(4, np.uint32), stream.empty(4, np.uint32)
        stream.launch(SPIN, 1, 1, LONG)
        stream.copy(taken, lent)
        first.drain_timeout = 1e-3
        with pytest.warns(DrainTimeoutWarning), pytest.raises(LeftError):
            async with first:
                raise LeftError
        assert driver.now() < LONG / 1e9
        await second.aclose()
        assert driver.now() > LONG / 1e9

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the streams
        two_devices(main)


def test_fault_of_one_device_is_known_to_all_of_the_loop_at_once() -> None:
    """The other device's streams went on calling the driver until its watchdog came round."""

    async def main(first: Device, second: Device, driver: SimulatedDriver) -> None:
        stream, other = first.stream(), second.stream()
        buffer = other.empty(4)
        running = other.launch(SPIN, 1, 1, LONG)
        with pytest.raises(DeviceFault):
            await stream.launch(TRAP, 1, 1)
        assert running.done()
        with pytest.raises(DeviceFault):
            other.fill(buffer, 1)
        with pytest.raises(DeviceFault):
            await running

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the streams
        assert two_devices(main).refused == ["event_query"]  # the one that found it


def test_loop_that_is_closed_while_a_device_opens_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver's thread had to say was an error in whatever ran by then."""
    monkeypatch.setattr(SeededChoices, "job_ns", lambda self: LONG)
    driver = SimulatedDriver(None)

    async def opened() -> int:
        async with aiocuda.open_device(driver=driver) as device:
            return device.index

    loop = SimulatedLoop()
    task = loop.create_task(opened())
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert not task.done()
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(opened()) == 0


def test_pipeline_says_what_its_stage_was_skipped_for() -> None:
    """The wait between two stages was refused, and what was raised for it named no cause."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        stages = [
            Stage("up", lambda slot: slot.stream.copy(slot.buffer("x", 4, np.uint32), slot.item)),
            Stage("down", lambda slot: slot.stream.download(slot.buffer("x", 4, np.uint32))),
        ]
        pipeline = Pipeline(device, stages)
        with pytest.raises(BusyError, match="refused"):
            async for _ in pipeline.run([np.ones(4, np.uint32)]):
                raise AssertionError
        await pipeline.aclose()

    simulated(main, Upset("refuse", 1, "stream_wait", 802))


def test_device_is_closed_on_another_loop_though_its_threads_had_only_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was called that told the driver of the new loop, whose time went on without it."""
    monkeypatch.setattr(SeededChoices, "job_ns", lambda self: LONG)
    driver = SimulatedDriver(None)
    loop = SimulatedLoop()

    async def opened() -> Device:
        return await aiocuda.open_device(driver=driver)

    device = loop.run_until_complete(opened())
    loop.close()
    assert resources_of(device).loop_states.blocking()
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(asyncio.wait_for(device.aclose(), 1.0))


def test_fault_in_what_a_closed_loop_has_left_tells_nobody_there() -> None:
    """One device takes back what that loop left on it, and the other one has not come to that."""
    driver = SimulatedDriver(None, devices=2)
    devices: list[Device] = []
    kept: list[object] = []

    async def begin() -> None:
        devices.extend([await aiocuda.open_device(index, driver=driver) for index in range(2)])
        for device in devices:
            await device.load(SPIN)
            stream = device.stream()
            operation = stream.launch(SPIN, 1, 1, LONG)
            operation.add_done_callback(print)
            kept.extend((stream, operation))

    async def end() -> None:
        for device in devices:
            await device.aclose()

    loop = SimulatedLoop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the streams
        loop.run_until_complete(begin())
        driver.upsets = Upsets([Upset("refuse", 1, "event_query", 700)])
        loop.close()
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(end())
        kept.clear()
    assert driver.upsets.happened == {"refuse 700": 1}
    assert driver.violations == []


def test_pipeline_that_is_collected_without_its_loop_begins_nothing() -> None:
    """It began a task on a loop that nobody runs, and that kept the run, its slots and their events."""

    async def main() -> Pipeline:
        async with aiocuda.open_device(driver="host") as device:
            pipeline = Pipeline(device, [Stage("up", lambda slot: slot.stream.synchronize())])
            await pipeline.__aenter__()
        return pipeline

    end = asyncio.run(main())._resources.__aexit__(None, None, None)
    with pytest.raises(StopIteration):
        end.send(None)


def test_what_leaves_the_queue_unsubmitted_holds_nothing_that_it_was_to_be_called_with() -> None:
    """Of a loop that was closed a device kept a marker so, and that the task that waited for it, with all it had."""

    class Held:
        def call(self) -> None:
            raise AssertionError

    async def main(device: Device, driver: SimulatedDriver) -> None:
        array = np.zeros(LEAST_CHUNK_BYTES, np.uint8)
        held = [Held(), Held()]
        gone = [weakref.ref(each) for each in held]
        async with device.stream() as other:
            with pytest.raises(LeftError):
                async with device.stream() as left:
                    left.copy(left.empty_like(array), array)
                    withdrawn = left._queue.enqueue("call", None, held[0].call, ())
                    other.wait(withdrawn)
                    skipped = other._queue.enqueue("call", None, held[1].call, ())
                    held.clear()
                    assert (withdrawn.state, skipped.state) == ("queued", "queued")
                    raise LeftError
            with pytest.raises(SkippedError):
                await skipped
            assert withdrawn.state == "abandoned"
            gc.collect()  # the coroutines' tracebacks
            assert [each() for each in gone] == [None, None]

    simulated(main)


def test_refusal_of_an_event_has_no_error_of_ours_for_its_context() -> None:
    """What it was raised in kept all that its frames had: two timing events, beyond the device."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            with pytest.raises(UnsupportedError) as raised:
                stream.record(timing=True)
            assert raised.value.__context__ is None
            await stream.record(timing=True)

    simulated(main, Upset("refuse", 1, "event_create", code=801))


def test_fault_that_is_found_by_who_looks_for_room_in_a_stream_on_loan_is_raised_there() -> None:
    """What was about to be enqueued was put where all had just been failed, and the driver called for it again."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as other, device.stream() as stream:
            first = other.synchronize()
            found: list[object] = []
            with pytest.raises(DeviceFault):
                async with stream.lend():
                    before = stream.synchronize()
                    enqueued = stream._queue.enqueued
                    with contextlib.suppress(DeviceFault):
                        found.append(stream.wait(first))
                    found += [before.state, stream._queue.enqueued - enqueued, stream._queue.idle]
            assert found == ["failed", 0, True]

    driver = simulated(main, Upset("refuse", 1, "event_query", code=719))
    assert driver.refused == []  # by then it had said what there was to say
