"""Devices: opening, what they count, draining, closing, and leaving them by an exception."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    ClosedError,
    Device,
    DrainTimeoutWarning,
    InvalidArgumentError,
    InvalidTypeError,
    NoEventLoopError,
    Stream,
)
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from tests.helpers import PATIENCE, SAXPY, Latch, Peer, Reports, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio


# Opening


async def test_two_ways_to_open() -> None:
    async with aiocuda.open_device(driver="host") as device:
        assert isinstance(device, Device)
        assert not device.closed
    assert device.closed
    device = await aiocuda.open_device(driver="host")
    async with device as same:
        assert same is device
    assert device.closed


@pytest.mark.parametrize("index", [-1, 99, np.int64(-3)])
async def test_index_out_of_range(index: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        await aiocuda.open_device(index, driver="host")


@pytest.mark.parametrize("index", ["0", 0.0, None, True, (0,)])
async def test_index_of_a_wrong_type(index: Any) -> None:
    with pytest.raises(InvalidTypeError):
        aiocuda.open_device(index, driver="host")


async def test_index_as_numpy_counts() -> None:
    with Peer(HostDriver(devices=2)) as peer:
        async with aiocuda.open_device(np.int64(1), driver=peer.driver) as device:
            assert device.index == 1
            assert type(device.index) is int


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"driver": "metal"}, InvalidArgumentError),
        ({"driver": 7}, InvalidTypeError),
        ({"driver": None}, InvalidTypeError),
        ({"max_in_flight": 0}, InvalidArgumentError),
        ({"max_in_flight": 1.5}, InvalidTypeError),
        ({"max_in_flight": True}, InvalidTypeError),
    ],
    ids=str,
)
async def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        await aiocuda.open_device(**{"driver": "host", **options})


async def test_simulated_driver_by_its_name() -> None:
    async with aiocuda.open_device(driver="simulated") as device, device.stream() as stream:
        assert device.driver.name == "simulated"
        np.testing.assert_array_equal(await stream.download(await stream.upload(np.arange(7))), np.arange(7))


async def test_driver_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_DRIVER", "host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with aiocuda.open_device() as device:
            assert device.driver.name == "host"
    monkeypatch.setenv("AIOCUDA_DRIVER", "nonsense")
    with pytest.raises(InvalidArgumentError, match="AIOCUDA_DRIVER"):
        await aiocuda.open_device()


async def test_failed_opening_leaks_nothing() -> None:
    with Peer() as peer:
        await (await aiocuda.open_device(driver=peer.driver)).aclose()  # the driver's own threads are there
        threads = threading.active_count()
        for name in ("device_open", "open_port", "statistics"):
            peer.refuse(name, error=lambda: OSError("no more"))
            with pytest.raises(OSError, match="no more"):
                await aiocuda.open_device(driver=peer.driver)
        gc.collect()
        await until(lambda: threading.active_count() <= threads, "threads to end")
        async with aiocuda.open_device(driver=peer.driver) as device:
            await device.pinned(10)


async def test_repr_and_properties(device: Device) -> None:
    assert device.name == device.properties.name
    assert device.hardware_queues >= 1
    assert repr(device) == f"<Device {device.driver.name}:0 {device.name}>"
    assert device.policy.name == "balanced"
    with pytest.raises(TypeError, match="belongs to this process"):
        pickle.dumps(device)


async def test_drivers_that_came_and_went_leave_no_descriptors() -> None:
    async def visit() -> None:
        async with open_peer() as (_, device), device.stream() as stream:
            await stream.synchronize()

    for _ in range(3):
        await visit()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await visit()
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_what_is_left_of_a_closed_device_takes_nothing_from_the_next() -> None:
    """Ports serve one device after another: a former user of a port must not close it for its present user."""
    async with aiocuda.open_device(driver="host") as first:
        stream = first.stream()
        await stream.synchronize()
    async with aiocuda.open_device(driver="host") as second:
        other = second.stream()
        await other.synchronize()
        del first, stream  # the last to hold what the first device had
        gc.collect()
        content = np.arange(1 << 20, dtype=np.uint8)
        assert np.array_equal(await quickly(other.download(await quickly(other.upload(content)))), content)


async def test_stream_priorities(device: Device) -> None:
    least, greatest = device.driver.priority_range(device.index)
    for name, level in (("high", greatest), ("low", least)):
        async with device.stream(priority=name) as stream:  # type: ignore[arg-type]  # mypy sees a str
            assert stream.priority == name
            assert device.driver.stream_priority(stream._queue.handle) == level
    with pytest.raises(InvalidArgumentError, match="'urgent'"):
        device.stream(priority="urgent")  # type: ignore[arg-type]  # that is the point


async def test_a_streams_name_is_a_string(device: Device) -> None:
    """An array has no truth value: NumPy raised after the driver had created the stream, which was lost."""
    before = device.statistics().streams_created
    for wrong in (np.arange(3), 5, ["left"], b"left"):
        with pytest.raises(InvalidTypeError, match="a stream's name is a string, not "):
            device.stream(name=wrong)  # type: ignore[arg-type]  # that is the point
    assert device.statistics().streams_created == before
    async with device.stream(name="") as stream:
        assert stream.name.startswith("stream-")


async def test_outside_a_loop(device: Device) -> None:
    def elsewhere() -> None:
        for verb in (device.stream, lambda: device.pinned(4), lambda: device.unified(4)):
            with pytest.raises(NoEventLoopError, match=r"asyncio\.run"):
                verb()

    await asyncio.to_thread(elsewhere)


# Counts


async def test_counts_add_up(device: Device, stream: Stream, other: Stream, latch: Latch) -> None:
    latch.hold(stream)
    buffer = stream.empty(1 << 20, np.uint8)
    stream.copy(buffer, np.zeros(1 << 20, np.uint8))
    for value in range(10):
        last = stream.fill(buffer, value)
    gone = stream.download(buffer)
    await latch.held()
    gone.abandon()
    other.wait(last)
    during = device.statistics()
    assert during.in_flight == during.submitted - during.resolved - during.failed - during.abandoned > 0
    latch.release()
    await device.drain()
    after = device.statistics()
    assert after.in_flight == 0
    assert (after.failed, after.abandoned) == (0, 1)
    assert after.submitted == after.resolved + 1
    assert after.streams >= 2


async def test_counts_of_streams_that_were_closed_stay(device: Device) -> None:
    before, kept = device.statistics(), device.driver.statistics()["streams_kept"]
    for _ in range(5):
        async with device.stream() as stream:
            await stream.synchronize()
    after = device.statistics()
    assert (after.submitted - before.submitted, after.resolved - before.resolved) == (5, 5)
    assert after.streams == before.streams
    if kept == 0:  # else a stream that another library received in an earlier test serves again, each time
        assert after.streams_created == before.streams_created + 5


async def test_counts_outlive_the_device() -> None:
    async with open_peer() as (_, device):
        async with device.stream() as closed:
            await closed.synchronize()
        stream = device.stream()
        await stream.synchronize()
    assert (device.statistics().submitted, device.statistics().in_flight) == (2, 0)


async def test_what_it_is_asked_by_another_thread_while_loops_come_and_go(device: Device) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                device.statistics()
            except BaseException as error:  # noqa: BLE001 - judged below
                errors.append(error)
                return

    async def visit() -> None:
        async with device.stream() as stream:
            await stream.synchronize()

    query_guard = threading.Thread(target=ask)
    query_guard.start()
    for _ in range(20):
        await asyncio.to_thread(asyncio.run, visit())
    stop.set()
    query_guard.join()
    assert not errors


@pytest.fixture
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open devices without advice: a probe of it takes some timing events, once."""
    monkeypatch.setenv("AIOCUDA_WARN", "0")


@pytest.mark.slow
@pytest.mark.usefixtures("no_advice")
async def test_steady_state_grows_nothing(device: Device, stream: Stream, other: Stream) -> None:
    """2 000 operations of every kind, after as many to warm up: events, threads, descriptors, memory."""
    array = np.zeros(1 << 10, np.float32)
    pinned = await device.pinned(1 << 10)
    x = await stream.upload(array)

    async def work(rounds: int) -> None:
        for _ in range(rounds):
            y = stream.empty_like(x)
            up = stream.copy(y, array)
            other.wait(up)
            other.launch(SAXPY, 1, 64, 1 << 10, 1.0, x, y)
            stream.wait(other.record(timing=True))
            stream.copy(pinned, y)
            stream.fill(y, 1)
            await other.synchronize()
            await stream.download(y)

    def grown() -> tuple[int, ...]:
        gc.collect()
        statistics = device.statistics()
        return (
            statistics.events,
            statistics.threads,
            statistics.streams,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            device.memory.statistics().live_bytes >> 16,  # what was dropped last comes back with the next sweep
            len(resources_of(device).host_writes),
        )

    await work(250)
    await device.drain()
    before = grown()
    objects = len(gc.get_objects())
    await work(250)
    await device.drain()
    stream.empty(1).free()
    after = grown()
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True)), (before, after)
    assert len(gc.get_objects()) < objects + 500


# Draining and closing


async def test_drain_waits_for_everything_whatever_became_of_it() -> None:
    async with open_peer(max_in_flight=4) as (peer, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(4)
        peer.refuse("fill")
        failing = stream.fill(buffer, 1)
        for _ in range(20):
            other.synchronize()
        gone = other.synchronize()
        gone.abandon()
        await quickly(device.drain())
        assert failing.state == "failed"
        assert device.statistics().in_flight == 0
        assert isinstance(failing.exception(), aiocuda.DriverError)
        await quickly(device.drain())


async def test_normal_exit_waits_for_the_work() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        latch = Latch(device)
        hold = latch.hold(stream)
        last = stream.fill(stream.empty(4), 1)
        await latch.held()
        asyncio.get_running_loop().call_later(0.01, latch.release)
    assert (hold.state, last.state) == ("done", "done")


async def test_everything_is_given_back() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            kept = [stream.empty(100), await stream.upload(np.zeros(100)), device.unified(100)]
            await stream.launch(SAXPY, 1, 1, 1, 1.0, stream.empty(4), stream.empty(4))
            kept.append(device.pinned(100))  # type: ignore[arg-type]  # whatever it is
            event = stream.record()
            await event
            event.release()
        del kept
        assert peer.calls["stream_create"] == peer.calls["stream_destroy"]
        assert peer.calls["event_create"] == peer.calls["event_destroy"]
        assert peer.calls["allocate"] == peer.calls["deallocate"]
        assert peer.calls["managed_allocate"] == peer.calls["managed_deallocate"] == 1
        assert peer.calls["pin"] == peer.calls["unpin"]
        assert peer.inner.statistics()["streams"] == peer.inner.statistics()["events"] == 0
        assert peer.inner.pool_reserved(0) >= 0


async def test_closed_in_a_loop_that_never_used_it() -> None:
    with Peer() as peer:

        async def opened() -> Device:
            device = await aiocuda.open_device(driver=peer.driver)
            async with device.stream() as stream:
                await stream.upload(np.zeros(1 << 20))
            await device.pinned(100)
            return device

        device = await asyncio.to_thread(asyncio.run, opened())
        await quickly(device.aclose())
        assert peer.calls["pin"] == peer.calls["unpin"]
        assert peer.calls["event_create"] == peer.calls["event_destroy"]


async def test_closing_twice_and_concurrently() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        await stream.synchronize()
        await quickly(asyncio.gather(device.aclose(), device.aclose()))
        await device.aclose()
        for made, given_back in (("stream_create", "stream_destroy"), ("event_create", "event_destroy")):
            assert peer.calls[made] == peer.calls[given_back] > 0


async def test_nothing_works_after_closing() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.synchronize()
    calls = sum(peer.calls.values())
    for verb in (
        device.stream,
        lambda: device.pinned(4),
        lambda: device.unified(4),
        lambda: stream.fill(buffer, 1),
        lambda: stream.empty(4),
        lambda: stream.synchronize(),
        lambda: stream.record(),
        lambda: Stream.from_handle(device, 1),
    ):
        with pytest.raises((ClosedError, aiocuda.StaleHandleError)):
            verb()
    with pytest.raises(ClosedError):
        async with device.pin(np.zeros(4)):
            pass
    assert sum(peer.calls.values()) == calls
    assert repr(device).endswith(" closed>")
    await device.drain()


async def test_stream_outlives_its_device() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
    await stream.aclose()  # closed already
    with pytest.raises(ClosedError):
        async with stream:
            pass


async def test_closing_is_cancelled_while_it_drains() -> None:
    """The cancellation comes; what was with the device is waited for within the limit."""
    with Peer() as peer:
        device = await aiocuda.open_device(driver=peer.driver)
        stream = device.stream()
        latch = Latch(device)
        hold = latch.hold(stream)
        await latch.held()
        closing = asyncio.create_task(device.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await turns()
        assert not closing.done()
        latch.release()
        with pytest.raises(asyncio.CancelledError):
            await quickly(closing)
        assert device.closed
        assert hold.state == "done"
        assert peer.calls["stream_create"] == peer.calls["stream_destroy"]


async def test_closing_is_cancelled_while_it_gives_back() -> None:
    with Peer() as peer:
        device = await aiocuda.open_device(driver=peer.driver)
        gate = threading.Event()
        entered = threading.Event()

        def slowly(*arguments: object) -> None:
            entered.set()
            gate.wait(PATIENCE)

        await device.pinned(10)
        peer.before["unpin"] = slowly
        closing = asyncio.create_task(device.aclose())
        await asyncio.to_thread(entered.wait, 10)
        closing.cancel()
        await turns()
        assert not closing.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await quickly(closing)
        assert peer.calls["pin"] == peer.calls["unpin"]
        async with aiocuda.open_device(driver=peer.driver) as again:
            await again.pinned(10)


# Leaving by an exception


async def test_left_by_an_exception_withdraws_what_is_on_the_host() -> None:
    with Peer() as peer:
        with pytest.raises(ZeroDivisionError):
            async with aiocuda.open_device(driver=peer.driver, max_in_flight=4) as device:
                stream = device.stream()
                buffer = stream.empty(4)
                await stream.synchronize()
                latch = Latch(device)
                hold = latch.hold(stream)
                await latch.held()
                operations = [stream.fill(buffer, value) for value in range(10)]
                waiter = asyncio.create_task(operations[-1].wait())
                await asyncio.sleep(0)
                asyncio.get_running_loop().call_later(0.01, latch.release)
                raise ZeroDivisionError
        assert hold.state == "done"
        assert [operation.state for operation in operations] == ["done"] * 3 + ["abandoned"] * 7
        assert peer.calls["fill"] == 3
        with pytest.raises(ClosedError, match="abandoned"):
            await quickly(waiter)
        assert device.statistics().in_flight == 0
        assert device.closed


async def test_left_by_an_exception_while_others_drain_and_lend() -> None:
    """Markers of the library that wait on the host do not count as operations."""
    with Peer() as peer, Reports() as reports:
        with pytest.raises(ZeroDivisionError):
            async with aiocuda.open_device(driver=peer.driver, max_in_flight=2) as device:
                stream = device.stream()
                latch = Latch(device)
                latch.hold(stream)
                await latch.held()
                for _ in range(5):
                    stream.synchronize()
                draining = asyncio.create_task(device.drain())
                closing = asyncio.create_task(stream.aclose())
                await asyncio.sleep(0)
                asyncio.get_running_loop().call_later(0.005, latch.release)
                raise ZeroDivisionError
        await quickly(draining)
        await quickly(closing)
        assert device.statistics().in_flight == 0
        assert not reports.contexts


async def test_cancelled_inside() -> None:
    with Peer() as peer:
        entered: asyncio.Future[tuple[Device, Latch]] = asyncio.get_running_loop().create_future()

        async def main() -> None:
            async with aiocuda.open_device(driver=peer.driver) as device:
                stream = device.stream()
                latch = Latch(device)
                hold = latch.hold(stream)
                await latch.held()
                entered.set_result((device, latch))
                await hold

        task = asyncio.create_task(main())
        device, latch = await quickly(entered)
        task.cancel()
        await until(lambda: resources_of(device).closing, "the end to begin")
        task.cancel()  # nor does a second one hurry it
        await turns()
        assert not task.done()
        latch.release()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
        assert peer.calls["stream_create"] == peer.calls["stream_destroy"]


async def test_drain_timeout() -> None:
    """The device does not finish: after the limit it is abandoned, its memory stays allocated, with a warning."""
    with Peer() as peer:
        with (
            pytest.raises(ZeroDivisionError),
            pytest.warns(DrainTimeoutWarning, match=r"2 operations did not finish within 0\.05 s"),
        ):
            async with aiocuda.open_device(driver=peer.driver) as device:
                device.drain_timeout = 0.05
                stream = device.stream()
                latch = Latch(device)
                hold = latch.hold(stream)
                await latch.held()
                buffer = stream.empty(100)
                operation = stream.fill(buffer, 1)
                raise ZeroDivisionError
        assert device.closed
        assert (hold.state, operation.state) == ("abandoned", "abandoned")
        assert device.statistics().in_flight == 0
        del buffer, operation
        gc.collect()
        assert peer.calls["deallocate"] == 0  # parked
        latch.release()
        await until(lambda: peer.inner.stream_query(stream._queue.handle), "the held kernel")
        assert peer.fault is None
        async with aiocuda.open_device(driver=peer.driver) as again:  # and the driver serves the next device
            fresh = again.stream()
            await quickly(fresh.synchronize())
            assert (await quickly(fresh.download(await quickly(fresh.upload(np.ones(4)))))).sum() == 4


async def test_exception_of_the_block_is_what_comes_out(device: Device) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:

            async def fail() -> None:
                raise ZeroDivisionError

            group.create_task(fail())
            group.create_task(device.drain())
    assert [type(each) for each in caught.value.exceptions] == [ZeroDivisionError]


# Forgotten


async def test_unclosed_device_warns_with_its_place() -> None:
    async def forget() -> None:
        await aiocuda.open_device(driver="host")

    line = forget.__code__.co_firstlineno + 1
    with pytest.warns(
        ResourceWarning, match=rf"unclosed <Device .*opened at .*{Path(__file__).name}:{line}: use"
    ) as caught:
        await asyncio.to_thread(asyncio.run, forget())  # as long as its loop is open, that holds the device
        await until(lambda: (gc.collect(), len(caught))[1], "the warning")


async def test_unclosed_stream_warns_with_its_place(device: Device) -> None:
    stream = device.stream(name="mine")
    line = sys._getframe().f_lineno - 1
    with pytest.warns(
        ResourceWarning, match=rf"unclosed <Stream mine on .*opened at .*{Path(__file__).name}:{line}: use"
    ):
        del stream


async def test_closed_ones_do_not_warn() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        async with open_peer() as (peer, device):
            async with device.stream():
                pass
            kept = device.stream()
            imported = Stream.from_handle(device, peer.inner.stream_handle(kept._queue.handle))
            del imported
        del kept, device
        gc.collect()
    assert [str(warning.message) for warning in told] == []


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 3])
async def test_interpreter_ends_with_work_in_flight(exit_code: int) -> None:
    """Within the deadline, with its own exit code, and without a word."""
    program = f"""
        import asyncio, sys
        import aiocuda
        from aiocuda.testing.kernels import SPIN

        spin = aiocuda.Kernel(SPIN.name, source=SPIN.source, host=SPIN.host)

        async def main():
            global device, stream
            device = await aiocuda.open_device(driver="host")
            stream = device.stream()
            await stream.launch(spin, 1, 1, 1)
            stream.launch(spin, 1, 1, 200_000_000).add_done_callback(print)
            stream.download(stream.empty(1 << 22))

        asyncio.run(main())
        sys.exit({exit_code})
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert (process.returncode, out, err) == (exit_code, b"", b"")


@pytest.mark.slow
async def test_interpreter_does_not_wait_for_ever() -> None:
    program = """
        import asyncio
        import aiocuda
        from aiocuda.testing import Latch

        async def main():
            global device, stream, latch
            device = await aiocuda.open_device(driver="host")
            device.drain_timeout = 0.3
            stream = device.stream()
            latch = Latch(device, seconds=120)
            latch.hold(stream)
            await latch.held()

        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert (process.returncode, out, err) == (0, b"", b"")


async def test_opened_twice_it_has_one_budget() -> None:
    """Notifiers and places in the hardware queues are the device's, however often it is opened."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as one, aiocuda.open_device(driver=peer.driver) as other:
            assert resources_of(one).device_state.tokens is resources_of(other).device_state.tokens
            assert len(resources_of(one).device_state.tokens) == peer.driver.notifier_limit(0)
            alone = resources_of(one).device_state.hot.limit
            streams = [device.stream() for device in (one, other) for _ in range(128)]
            assert resources_of(one).device_state.hot.limit == resources_of(other).device_state.hot.limit < alone
            assert resources_of(one).device_state.hot.limit * len(streams) <= 900 * one.hardware_queues
            assert one.statistics().streams == 128
        async with aiocuda.open_device(driver=peer.driver) as again:
            assert resources_of(again).device_state.hot.limit == alone
            assert len(resources_of(again).device_state.tokens) == peer.driver.notifier_limit(0)
