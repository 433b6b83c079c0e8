"""Bugs that random programs on the simulated driver have found, each with the few steps that reproduce it.

The tests use no seeds, because the meaning of a seed changes when the programs change. Docstrings describe the bug.
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
    AsyncCoordinator,
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
from aiocuda.device._resources import resources_of
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.driver.simulated._choices import SeededChoices
from aiocuda.driver.simulated._upset import Upsets
from aiocuda.memory._staging import LEAST_CHUNK_BYTES
from aiocuda.testing import SimulatedLoop, kernels
from tests.helpers import AFFINE, SPIN, TRAP

#: The duration, in nanoseconds, of a kernel that takes much longer than everything else.
LONG = 10_000_000


class LeaveError(Exception):
    """An exception that leaves the block of a device or stream."""


def simulated(
    main: Callable[[Device, SimulatedDriver], Awaitable[None]], *upsets: Upset, **options: Any
) -> SimulatedDriver:
    """Run ``main`` on a simulated device without random decisions.

    Check that it broke no rule, and return its driver.
    """
    driver = SimulatedDriver(None, upsets=upsets)

    async def opened() -> None:
        async with aiocuda.open_device(driver=driver, **options) as device:
            await device.load(SPIN)
            await main(device, driver)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []
    return driver


def test_finished_chunk_resolves_no_operation_that_was_not_queried() -> None:
    """A finished chunk refills the queue. To find room, the refill polled the queue again, inside the first pass.

    The inner pass resolved the operations that the outer pass had counted. The outer pass then resolved new ones.
    """

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            queue = stream._queue
            buffer = stream.empty(4)
            await stream.fill(buffer, 0)
            for _ in range(2):
                arguments = queue.handle, buffer.address, b"\x01\x00\x00\x00", 4
                queue.rare.submit_chunk(driver.fill, arguments, None, queue.rare.host_queue.pump, None)
            later = stream.launch(SPIN, 1, 1, LONG)
            assert later.state == "queued"
            driver.advance_time(1e-3)  # both chunks are done, but not yet queried
            queue.poll()
            assert later.state == "submitted"
            await later
            assert driver.now() > LONG / 1e9

    simulated(main, max_in_flight=1)


def test_zero_duration_operations_carry_no_timing_information() -> None:
    """An event before a kernel was found done 7 ms late, so the kernel was expected to end 7 ms too late.

    In a pipeline with stages of 5 ms, each item that events timed was resolved up to 4 ms late.
    """

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream, device.stream() as other:
            for _ in range(8):
                stream.wait(other.launch(SPIN, 1, 1, LONG))
                await stream.launch(SPIN, 1, 1, LONG)
            start = driver.now()
            stream.wait(other.launch(SPIN, 1, 1, LONG))
            event = stream.record()
            waiting = asyncio.create_task(stream.launch(SPIN, 1, 1, LONG).wait())
            await asyncio.sleep(0)
            driver.advance_time(1.7 * LONG / 1e9)
            stream._queue.poll()
            assert event.done()
            _, expected, _ = stream._queue.outlook.find(stream._queue)
            assert expected == pytest.approx(start + 2 * LONG / 1e9, abs=1e-3)
            await waiting

    simulated(main)


def test_buffer_of_a_withdrawn_copy_outlives_its_chunks() -> None:
    """A withdrawn copy counted as settled, but the device still had some of its chunks."""
    drivers: list[SimulatedDriver] = []

    async def main(device: Device, driver: SimulatedDriver) -> None:
        drivers.append(driver)
        stream, owner = device.stream(), device.stream()
        array = np.ones(48 * LEAST_CHUNK_BYTES, np.uint8)
        buffer = owner.empty_like(array)
        operation = stream.copy(buffer, array)
        buffer.free()  # takes effect after the copy
        while not stream._queue.pending:
            await asyncio.sleep(10e-6)
        assert operation.state == "staging"
        raise LeaveError

    with pytest.raises(LeaveError):
        simulated(main, Upset("slow", 1, seconds=1.0))
    (driver,) = drivers
    assert (driver.fault, driver.violations) == (None, [])


def test_wait_for_a_skipped_operation_waits_for_all_earlier_work() -> None:
    """A skipped operation has no event. After its failure was read, nothing else kept the streams in order."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as one, device.stream() as other, device.stream() as third:
            start = driver.now()
            one.launch(SPIN, 1, 1, LONG)
            failed = other.launch(SPIN, 1, 1, 1)  # refused
            one.wait(failed)
            skipped = one.synchronize()
            with pytest.raises(InvalidArgumentError, match="launch: refused"):
                await failed  # read: every stream is usable again
            third.wait(skipped)
            await third.synchronize()
            assert driver.now() - start > LONG / 1e9
            with pytest.raises(SkippedError):
                await skipped

    simulated(main, Upset("refuse", 2, "launch", 1))


def test_stream_that_waits_for_its_own_skipped_operation_adds_no_marker() -> None:
    """A marker was before the wait's event in the stream, and after it in the queue: the wait was done before its
    event."""

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


def test_fault_settles_an_abandoned_operation_in_the_queue() -> None:
    """It never settled, so its array stayed in use."""
    array = np.zeros(16, np.float32)

    async def faults(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
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
def test_dropped_event_with_a_withdrawn_record_is_destroyed(before: str) -> None:
    """Its lease was not returned: the event still existed after the device was closed."""
    drivers: list[SimulatedDriver] = []

    async def main(device: Device, driver: SimulatedDriver) -> None:
        drivers.append(driver)
        stream = device.stream()
        kernel = SPIN if before == "runs" else Kernel("spin", source=kernels.SPIN.source, host=lambda nanoseconds: None)
        stream.launch(kernel, 1, 1, LONG)
        event = stream.record()
        assert event.operation.state == "queued"
        del event
        raise LeaveError

    with pytest.raises(LeaveError):
        simulated(main, max_in_flight=1)
    assert drivers[0].statistics()["events"] == 0


@pytest.mark.parametrize("idle", [True, False])
def test_other_stream_waits_for_an_allocation(idle: bool) -> None:
    """An allocation on an idle stream got no event, because it takes no time. CUDA requires an event."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as one, device.stream() as other:
            if not idle:
                one.launch(SPIN, 1, 1, LONG)
            buffer = one.empty(16)
            assert driver.violations == []
            await other.fill(buffer, 1)
            assert driver.violations == []

    simulated(main)


def test_target_of_a_withdrawn_copy_stays_alive() -> None:
    """Its address was used for another array.

    That array was then refused, because the copy still counted as a write to that address.
    """

    async def main(device: Device, driver: SimulatedDriver) -> None:
        other = device.stream()
        buffer = await other.upload(np.ones(16, np.float32))
        with pytest.raises(LeaveError):
            async with device.stream() as stream:
                running = stream.launch(SPIN, 1, 1, LONG)
                withdrawn = stream.download(buffer)  # on the host, because the device takes one operation
                assert withdrawn.state == "queued"
                raise LeaveError
        assert not running.done() or running.state == "abandoned"
        for array in [np.zeros(16, np.float32) for _ in range(50)]:
            other.copy(buffer, array)
        await other.synchronize()
        await other.aclose()

    simulated(main, max_in_flight=1)


def test_dependant_is_skipped_even_if_the_failure_was_read_before_its_turn() -> None:
    """P18: the dependant was in a queue when the failure was read. It then ran on bytes that were never written."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream, device.stream() as other:
            buffer = stream.empty(4)
            stream.launch(SPIN, 1, 1, LONG // 10)
            refused = stream.fill(buffer, 1)
            for _ in range(2):
                other.launch(SPIN, 1, 1, 5 * LONG)  # the queue is full for a long time
            other.wait(refused)
            dependant = other.download(buffer)
            with pytest.raises(InvalidArgumentError):
                await refused
            with pytest.raises(SkippedError) as skipped:
                await dependant
            assert isinstance(skipped.value.__cause__, InvalidArgumentError)

    simulated(main, Upset("refuse", 1, "fill", 1), max_in_flight=1)


def test_launch_after_a_skipped_launch_waits_for_the_allocation() -> None:
    """P16: the skipped launch counted as a use of the other stream's buffer, so the next launch did not wait for it."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        await device.load(AFFINE)
        async with device.stream() as stream, device.stream() as owner:
            own = stream.empty(16, np.uint32)
            owner.launch(SPIN, 1, 1, LONG)
            other = owner.empty(16, np.uint32)  # exists after the kernel has ended
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
    """Run ``main`` on two simulated devices without random decisions.

    Close both, check the rules, return the driver.
    """
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


def test_close_waits_for_a_copy_of_its_memory_in_a_stream_of_another_device() -> None:
    """The device freed its memory after the work of its own streams, while the copy still used it."""

    async def main(first: Device, second: Device, driver: SimulatedDriver) -> None:
        async with first.stream() as stream, second.stream() as other:
            source, target = other.empty(4, np.uint32), stream.empty(4, np.uint32)
            await other.fill(source, 7)
            stream.launch(SPIN, 1, 1, LONG)
            copied = stream.copy(target, source)
            closing = asyncio.ensure_future(second.aclose())
            await asyncio.sleep(1e-3)
            with pytest.raises(ClosedError, match="simulated 1 is being closed"):
                stream.copy(source, target)
            await closing
            assert copied.done()
            assert driver.now() > LONG / 1e9
            assert (await stream.download(target) == 7).all()

    two_devices(main)


def test_close_waits_for_a_queued_use_of_its_pinned_memory_in_another_device() -> None:
    """The memory was unlocked, and the copy waited forever until it would be locked."""

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


def test_close_waits_for_a_copy_of_its_memory_that_a_closed_loop_has_left() -> None:
    """No loop resolves that copy, so the close queries the driver."""
    driver = SimulatedDriver(None, devices=2)
    devices: list[Device] = []

    async def begin() -> None:
        devices.extend([await aiocuda.open_device(index, driver=driver) for index in range(2)])
        first, second = devices
        await first.load(SPIN)
        stream = first.stream()
        source, target = second.stream().empty(4, np.uint32), stream.empty(4, np.uint32)
        stream.launch(SPIN, 1, 1, LONG)
        stream.copy(target, source)
        await asyncio.sleep(0)

    async def end() -> None:
        for device in reversed(devices):  # the device of the copying stream is closed last
            await device.aclose()

    loop = SimulatedLoop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the streams are not closed
        loop.run_until_complete(begin())
        loop.close()
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(end())
    assert driver.now() > LONG / 1e9
    assert driver.violations == []


def test_close_waits_for_a_copy_of_its_memory_in_a_device_that_was_closed_while_it_worked() -> None:
    """No loop watches the streams of that device any more, so the close queries the driver."""

    async def main(first: Device, second: Device, driver: SimulatedDriver) -> None:
        stream = first.stream()
        source, target = second.stream().empty(4, np.uint32), stream.empty(4, np.uint32)
        stream.launch(SPIN, 1, 1, LONG)
        stream.copy(target, source)
        first.drain_timeout = 1e-3
        with pytest.warns(DrainTimeoutWarning), pytest.raises(LeaveError):
            async with first:
                raise LeaveError
        assert driver.now() < LONG / 1e9
        await second.aclose()
        assert driver.now() > LONG / 1e9

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the streams are not closed
        two_devices(main)


def test_fault_of_one_device_immediately_fails_the_others_of_the_loop() -> None:
    """The streams of the other device made driver calls until its watchdog found the fault."""

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
        warnings.simplefilter("ignore", ResourceWarning)  # the streams are not closed
        assert two_devices(main).refused == ["event_query"]  # the query that found the fault


def test_loop_that_is_closed_while_a_device_opens_gets_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback of the driver's thread raised an error in unrelated code."""
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


def test_pipeline_raises_the_cause_of_a_skipped_stage() -> None:
    """The wait between two stages was refused, and the raised error had no cause."""

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


def test_device_can_be_closed_on_another_loop_while_its_threads_are_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call informed the driver of the new loop, so the time of that loop ran on without the driver."""
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


def test_fault_in_work_of_a_closed_loop_calls_no_callback() -> None:
    """One device reclaims the work of that loop and finds the fault, while the other device still has such work."""
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
        warnings.simplefilter("ignore", ResourceWarning)  # the streams are not closed
        loop.run_until_complete(begin())
        driver.upsets = Upsets([Upset("refuse", 1, "event_query", 700)])
        loop.close()
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(end())
        kept.clear()
    assert driver.upsets.happened == {"refuse 700": 1}
    assert driver.violations == []


def test_pipeline_that_is_collected_after_its_loop_starts_no_task() -> None:
    """It started a task on a loop that does not run. The task kept the run, its slots and their events alive."""

    async def main() -> Pipeline:
        async with aiocuda.open_device(driver="host") as device:
            pipeline = Pipeline(device, [Stage("up", lambda slot: slot.stream.synchronize())])
            await pipeline.__aenter__()
        return pipeline

    end = asyncio.run(main())._resources.__aexit__(None, None, None)
    with pytest.raises(StopIteration):
        end.send(None)


def test_operation_that_is_never_submitted_drops_its_arguments() -> None:
    """A device kept a marker of a closed loop, and so the task that waited for it, with all its variables."""

    class Held:
        def call(self) -> None:
            raise AssertionError

    async def main(device: Device, driver: SimulatedDriver) -> None:
        array = np.zeros(LEAST_CHUNK_BYTES, np.uint8)
        held = [Held(), Held()]
        references = [weakref.ref(each) for each in held]
        async with device.stream() as other:
            with pytest.raises(LeaveError):
                async with device.stream() as closed:
                    closed.copy(closed.empty_like(array), array)
                    withdrawn = closed._queue.enqueue("call", None, held[0].call, ())
                    other.wait(withdrawn)
                    skipped = other._queue.enqueue("call", None, held[1].call, ())
                    held.clear()
                    assert (withdrawn.state, skipped.state) == ("queued", "queued")
                    raise LeaveError
            with pytest.raises(SkippedError):
                await skipped
            assert withdrawn.state == "abandoned"
            gc.collect()  # drop the tracebacks of the coroutines
            assert [each() for each in references] == [None, None]

    simulated(main)


def test_refused_event_raises_an_error_without_a_context() -> None:
    """The context of the error kept its frames alive, and with them two timing events of a closed device."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            with pytest.raises(UnsupportedError) as raised:
                stream.record(timing=True)
            assert raised.value.__context__ is None
            await stream.record(timing=True)

    simulated(main, Upset("refuse", 1, "event_create", code=801))


def test_fault_found_by_a_wait_in_a_lent_stream_is_raised_by_the_wait() -> None:
    """To find room, the wait queried the driver and found the fault.

    It was then enqueued in a queue that had failed.
    """

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
    assert driver.refused == []  # no call was made after the fault


def test_wait_for_a_chain_of_two_kinds_is_not_overslept_for_ever() -> None:
    """A launch behind another stream is of another kind than one that waits for nothing.

    The prediction of a chain of both was too long, and no pass learned from operations of different kinds: each wait
    slept past the end, here by 0.6 ms of 2.
    """
    took: list[float] = []

    async def main(device: Device, driver: SimulatedDriver) -> None:
        for _ in range(12):
            async with AsyncCoordinator(device, streams=2, max_in_flight=80) as coordinator:

                def spin(*after: Any) -> Any:
                    return coordinator.compute(SPIN, 1, 1, 50_000, after=after)

                await spin()
                await asyncio.gather(spin(), spin())
                began = driver.now()
                last = spin()
                for _ in range(20):
                    last = spin(spin(last), spin(last))
                await last
                took.append(driver.now() - began)

    simulated(main)
    assert max(took[6:]) < 1.05 * took[0]
