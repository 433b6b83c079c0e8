"""StreamGroup over streams that the program gives: dependencies through the given objects, and both ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    CycleError,
    Device,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    SkippedError,
    StaleHandleError,
    Stream,
    StreamGroup,
    StreamPool,
    WrongDeviceError,
    WrongLoopError,
)
from aiocuda.completion import METHODS
from aiocuda.driver.host import HostDriver
from tests.helpers import TRAP, Latch, in_thread, open_peer, quickly, until
from tests.stream.methods import ARGUMENTS, World, methods_of

pytestmark = pytest.mark.asyncio


async def passes(stream: Stream, device: Device, latch: Latch, held: Stream) -> bool:
    """Return whether new work of a stream passes while another stream is held."""
    latch.hold(held)
    await latch.held()
    work = stream.synchronize()
    async with device.stream() as free:
        await quickly(free.synchronize())
        wakes = device.statistics().watchdog_wakes
        await until(lambda: device.statistics().watchdog_wakes > wakes, "a look at everything")
    passed = work.done()
    latch.release()
    await quickly(work)
    await quickly(held.synchronize())
    return passed


# Dependencies


@pytest.mark.parametrize("verb", [name for name in ARGUMENTS if METHODS[name].submits])
async def test_any_verb_of_the_given_object_waits(device: Device, latch: Latch, verb: str) -> None:
    """C5: for a lease, and so for the hook of each given stream."""
    async with device.stream() as first, StreamPool(device, maximum=1) as pool, pool.stream() as second:
        run = methods_of(await World.make(device, second, first)).get(verb)
        if run is None:
            return  # the device has no such method
        async with StreamGroup(device, [first, second]) as group:
            group.add_dependency(second, first)
            latch.hold(first)
            await latch.held()
            waiting = run()
            async with device.stream() as free:
                await quickly(free.synchronize())
                wakes = device.statistics().watchdog_wakes
                await until(lambda: device.statistics().watchdog_wakes > wakes, "a look at everything")
            assert not waiting.done()
            latch.release()
            await quickly(waiting.wait())


async def test_failure_of_a_given_stream_skips_what_depends_on_it() -> None:
    async with open_peer() as (peer, device), device.stream() as first, device.stream() as second:
        one, two = first.empty(4), second.empty(4)
        await second.synchronize()
        async with StreamGroup(device, [first, second]) as group:
            group.add_dependency(second, first)
            peer.refuse("fill")
            failed = first.fill(one, 1)
            await until(failed.done, "the failure")
            with pytest.raises(SkippedError):
                await quickly(second.fill(two, 1))
            with pytest.raises(DriverError):
                await failed
            await quickly(second.fill(two, 1))


async def test_cycle_has_the_names_in_the_group(device: Device) -> None:
    async with device.stream(name="x") as one, device.stream(name="x") as two:
        async with StreamGroup(device, {"a": one, "b": two}) as group:
            group.add_dependency("b", "a")
            with pytest.raises(CycleError, match="a cannot depend on b: a → b → a"):
                group.add_dependency(one, two)
            assert group.names == ("a", "b")


async def test_barrier_run_and_callbacks_over_given_streams(device: Device, latch: Latch) -> None:
    told: list[Stream] = []
    async with device.stream("high") as one, StreamPool(device, maximum=1) as pool, pool.stream() as two:
        async with StreamGroup(device, {"one": one, "two": two}) as group:
            latch.hold(two)
            await latch.held()
            joined, later = group.barrier(), one.synchronize()
            await until(lambda: device.statistics().in_flight >= 3, "all that is not held")
            assert not any(operation.done() for operation in (joined, later))
            latch.release()
            await quickly(later)
            assert await quickly(group.run(lambda stream: stream)) == [one, two]
            with pytest.raises(ZeroDivisionError) as caught:
                await group.run(lambda stream: 1 // (stream is one))
            assert caught.value.__notes__ == ["in stream 'two' of a group of 2"]
            await quickly(aiocuda.gather(*group.add_callback(lambda operation: told.append(operation.stream))))
            await until(lambda: len(told) == 2, "both callbacks")
            with pytest.raises(Left):
                await group.run(_leave)
        assert not any(stream.closed for stream in (one, two))
        await quickly(aiocuda.gather(one.synchronize(), two.synchronize()))


class Left(BaseException):
    """What no library catches as an error."""


def _leave(stream: Stream) -> None:
    if stream.priority == "high":
        raise Left


# The end of the group


@pytest.mark.parametrize("how", ["close", "exception", "cancelled"])
async def test_dependencies_end_with_the_group(device: Device, latch: Latch, how: str) -> None:
    async with device.stream() as first, device.stream() as second:
        group = StreamGroup(device, [first, second])
        group.add_dependency(second, first)
        assert not await passes(second, device, latch, first)
        if how == "close":
            await group.aclose()
            await group.aclose()
        elif how == "exception":
            with pytest.raises(ZeroDivisionError):
                async with group:
                    raise ZeroDivisionError
        else:
            task = asyncio.create_task(_hold_open(group))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await passes(second, device, latch, first)
        uses: list[Callable[[], Any]] = [
            group.barrier,
            lambda: group.add_dependency(0, 1),
            lambda: group.add_callback(print),
            lambda: group.run(print),
            group.__aenter__,
        ]
        for use in uses:
            with pytest.raises(ClosedError, match="this group has been closed: make another one"):
                await use()


async def _hold_open(group: StreamGroup) -> None:
    async with group:
        await asyncio.Event().wait()


@pytest.mark.parametrize("first_end", [0, 1])
async def test_groups_that_share_a_stream_end_in_any_order(device: Device, latch: Latch, first_end: int) -> None:
    async with device.stream() as one, device.stream() as two, device.stream() as shared:
        before = shared._hook
        groups = [StreamGroup(device, [one, shared]), StreamGroup(device, [two, shared])]
        for group in groups:
            group.add_dependency(1, 0)
        assert not await passes(shared, device, latch, one)
        assert not await passes(shared, device, latch, two)
        await groups[first_end].aclose()
        assert await passes(shared, device, latch, (one, two)[first_end])
        assert not await passes(shared, device, latch, (two, one)[first_end])
        await groups[1 - first_end].aclose()
        assert await passes(shared, device, latch, (two, one)[first_end])
        assert shared._hook is before


async def test_group_that_ends_inside_a_capture(device: Device, latch: Latch) -> None:
    async with device.stream() as first, device.stream() as second:
        buffer = second.empty(4)
        group = StreamGroup(device, [first, second])
        group.add_dependency(second, first)
        with second.capture() as graph:
            second.fill(buffer, 2)
            await group.aclose()
        assert await passes(second, device, latch, first)
        await quickly(graph.launch(second))
        for _ in range(3):  # the ended hooks do not pile up
            async with StreamGroup(device, [first, second]):
                pass
        assert await passes(second, device, latch, first)


async def test_captured_stream_is_refused_and_no_hook_stays(device: Device) -> None:
    async with device.stream() as first, device.stream() as second:
        before, buffer = first._hook, second.empty(4)
        with second.capture():
            with pytest.raises(BusyError, match="is being captured: leave the"):
                StreamGroup(device, [first, second])
            second.fill(buffer, 1)
        assert first._hook is before


async def test_unclosed_group_of_given_streams_warns(device: Device) -> None:
    async with device.stream() as first:
        group = StreamGroup(device, [first])
        with pytest.warns(ResourceWarning, match="unclosed group, opened at .*test_given_streams"):
            del group
            gc.collect()


# The end of a given stream


async def test_closed_stream_stays_in_the_group(device: Device, latch: Latch) -> None:
    async with device.stream() as second:
        first = device.stream(name="first")
        async with StreamGroup(device, [first, second]) as group:
            group.add_dependency(second, first)
            latch.hold(first)
            await latch.held()
            closing = asyncio.create_task(first.aclose())
            await asyncio.sleep(0)
            behind = second.synchronize()
            async with device.stream() as free:
                await quickly(free.synchronize())
            assert not behind.done()
            latch.release()
            await quickly(behind)
            await quickly(closing)
            await quickly(second.synchronize())
            for use in (group.barrier, lambda: group.add_dependency(first, second), lambda: group.add_callback(print)):
                with pytest.raises(ClosedError, match="first"):
                    use()
            assert first in [*group]


async def test_lease_that_ends_stays_in_the_group(device: Device, latch: Latch) -> None:
    async with StreamPool(device, maximum=1) as pool, device.stream() as other:
        lease = await pool.stream()
        group = StreamGroup(device, {"lease": lease, "other": other})
        group.add_dependency("lease", "other")
        lease.release()
        for use in (group.barrier, lambda: group.add_dependency("other", "lease"), lease.synchronize):
            with pytest.raises(StaleHandleError, match="has ended: the stream may be leased"):
                use()
        async with pool.stream() as following:
            assert await passes(following, device, latch, other)  # the next lease has no dependency
        await group.aclose()
        with pytest.raises(StaleHandleError):
            lease.synchronize()


async def test_group_and_its_device_fault() -> None:
    async with open_peer() as (_, device):
        streams = device.stream(), device.stream()
        group = StreamGroup(device, streams)
        group.add_dependency(1, 0)
        with pytest.raises(DeviceFault):
            await quickly(streams[0].launch(TRAP, 1, 1))
        uses: list[Callable[[], Any]] = [
            streams[1].synchronize,
            group.barrier,
            lambda: group.add_dependency(1, 0),
            lambda: StreamGroup(device, streams),
        ]
        for use in uses:
            with pytest.raises(DeviceFault):
                use()
        await group.aclose()


async def test_group_closes_after_its_device() -> None:
    async with aiocuda.open_device(driver="host") as device:
        group = StreamGroup(device, [device.stream()])
    with pytest.raises(ClosedError):
        group.barrier()
    await group.aclose()


# What is refused


async def test_streams_that_cannot_be_given(device: Device) -> None:
    async with StreamPool(device, maximum=1) as pool, device.stream(name="good") as good, pool.stream() as lease:
        same, ended = await pool.stream(), await pool.stream()
        closed = device.stream(name="closed")
        await closed.aclose()
        before = good._hook
        refused: list[tuple[Any, type[Exception], str]] = [
            ([], InvalidArgumentError, "at least one stream"),
            ({}, InvalidArgumentError, "at least one stream"),
            ([good, good], InvalidArgumentError, "in the group as '0' already"),
            ({"a": good, "b": good}, InvalidArgumentError, "in the group as 'a' already"),
            ([lease, same], InvalidArgumentError, "two leases of it"),
            ([good, closed], ClosedError, "closed"),
            ([good, 7], InvalidTypeError, "this is 7"),
            ([good, None], InvalidTypeError, "this is None"),
            ({"a": good, "b": "b"}, InvalidTypeError, "this is 'b'"),
            ({1: good}, InvalidTypeError, "not 1"),
            ({"a": 4096}, InvalidTypeError, "from_handle"),
            ([pool.stream()], InvalidTypeError, "await pool.stream"),
        ]
        for streams, error, says in refused:
            with pytest.raises(error, match=says):
                StreamGroup(device, streams)
        with pytest.raises(InvalidArgumentError, match="given streams keep their own"):
            StreamGroup(device, [good], priority="high")
        ended.release()
        with pytest.raises(StaleHandleError, match="request a new lease"):
            StreamGroup(device, [good, ended])
        assert good._hook is before
        same.release()


async def test_streams_of_a_checked_or_synchronous_device() -> None:
    """A dependency counts as an order for the checker. Default streams are several, although they are one of CUDA."""
    async with aiocuda.open_device(driver="host", check=True) as device:
        async with device.stream() as first, StreamPool(device) as pool, pool.stream() as second:
            buffer = first.empty(4)
            async with StreamGroup(device, [first, second]) as group:
                group.add_dependency(second, first)
                first.fill(buffer, 1)
                assert (await second.download(buffer)).tolist() == [1, 1, 1, 1]
    async with aiocuda.open_device(driver="host", asynchronous=False) as device:
        async with device.stream() as first, device.stream() as other, StreamGroup(device, [first, other]) as group:
            group.add_dependency(other, first)
            first.upload(np.ones(4))
            await quickly(other.synchronize())
            await quickly(group.barrier())


async def test_stream_of_another_device_is_refused() -> None:
    driver = HostDriver(devices=2)
    try:
        async with aiocuda.open_device(0, driver=driver) as one, aiocuda.open_device(1, driver=driver) as two:
            streams = one.stream(), two.stream()
            with pytest.raises(WrongDeviceError, match="make a group for each device"):
                StreamGroup(one, streams)
    finally:
        driver.close()


async def test_streams_of_another_loop_are_refused(device: Device) -> None:
    async with device.stream() as stream:
        before = stream._hook
        group = StreamGroup(device, [stream])

        async def elsewhere() -> None:
            with pytest.raises(WrongLoopError):
                StreamGroup(device, [stream])
            uses: list[Callable[[], Any]] = [
                group.barrier, lambda: group.add_dependency(0, 0), lambda: group.run(print), group.aclose,
            ]  # fmt: skip
            for use in uses:
                with pytest.raises(WrongLoopError, match="this group belongs to another event loop"):
                    await use()

        await asyncio.to_thread(in_thread, elsewhere)
        assert stream._hook is not before
        await quickly(group.barrier())
        await group.aclose()
        assert stream._hook is before
        await quickly(stream.upload(np.ones(4, np.float32)))
