"""E8, E9: failures: which nodes are skipped, which run, and which waiters get the failure."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    BusyError,
    ClosedError,
    CompileError,
    Device,
    DeviceFault,
    DeviceOutOfMemory,
    DriverError,
    EventPool,
    Kernel,
    SkippedError,
)
from aiocuda.driver.host import HostDriver
from tests.coordination.graphs import BLEND, BUMP, ITEMS, BodyError
from tests.coordination.test_deadlock import INSTANTLY, check_often
from tests.helpers import LATCH, TRAP, Latch, Peer, Reports, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def fail(coordinator: AsyncCoordinator, **accesses: object) -> aiocuda.coordination.Bracket:
    bracket = coordinator.operation("kernel", description="the first", **accesses)  # type: ignore[arg-type]
    with pytest.raises(BodyError):
        async with bracket:
            raise BodyError("body")
    return bracket


async def test_dependants_by_data_and_by_name_are_skipped_with_the_root_cause(coordinator: AsyncCoordinator) -> None:
    buffer, other = (coordinator.compute_stream.empty(ITEMS, np.uint32) for _ in range(2))
    await quickly(asyncio.create_task(fail(coordinator, writes=[buffer])))
    reader = coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS)
    second = coordinator.upload(ONES, other, after=reader)
    third = coordinator.download(other)
    unrelated = coordinator.download(coordinator.upload(ONES))
    for node in (reader, second, third):
        with pytest.raises(SkippedError, match="'the first' failed before it: body") as caught:
            await quickly(node)
        assert isinstance(caught.value.__cause__, BodyError)
        assert node.state == "skipped"
    np.testing.assert_array_equal(await unrelated, ONES)
    found = coordinator.statistics()
    assert (found.failed, found.skipped) == (1, 3)


async def test_edges_that_only_order_skip_nothing(coordinator: AsyncCoordinator) -> None:
    """Write-after-read after a failed reader, and a full overwrite of the bytes of a failed writer."""
    up = coordinator.upload(ONES)
    source, target = up.buffer, coordinator.compute_stream.empty(ITEMS, np.uint32)
    await asyncio.create_task(fail(coordinator, reads=[source], writes=[target]))
    after_read = coordinator.upload(2 * ONES, source)
    overwritten = coordinator.compute(BLEND, 1, 32, target, source, source, ITEMS, writes=[target])
    np.testing.assert_array_equal(await quickly(coordinator.download(target)), 8 * ONES)
    assert await after_read is source
    assert await overwritten is None


async def test_half_an_overwrite_leaves_the_other_half_spoiled(coordinator: AsyncCoordinator) -> None:
    buffer = coordinator.compute_stream.empty(ITEMS, np.uint32)
    await asyncio.create_task(fail(coordinator, writes=[buffer]))
    coordinator.upload(ONES[:4], buffer[:4])
    np.testing.assert_array_equal(await quickly(coordinator.download(buffer[:4])), ONES[:4])
    with pytest.raises(SkippedError):
        await quickly(coordinator.download(buffer[3:5]))


async def test_order_is_kept_across_skipped_nodes(
    coordinator: AsyncCoordinator, stream: aiocuda.Stream, latch: Latch
) -> None:
    """Held reader, skipped writer, overwriter: the last waits for the first, with nothing between them."""
    up = coordinator.upload(ONES)
    await coordinator.compute(BUMP, 1, 32, up, 0, ITEMS)
    broken = await asyncio.create_task(fail(coordinator))
    latch.hold(stream)
    await latch.held()
    reader = coordinator.download(up, stream=stream)
    skipped = coordinator.compute(BUMP, 1, 32, up, 1, ITEMS, after=broken)
    over = coordinator.upload(9 * ONES, up.buffer)
    assert not skipped.done()  # a node finishes after all its prerequisites
    assert over.state == "submitted"
    latch.release()
    np.testing.assert_array_equal(await quickly(reader), 5 * ONES)
    with pytest.raises(SkippedError):
        await quickly(skipped)
    np.testing.assert_array_equal(await quickly(coordinator.download(up)), 9 * ONES)


async def test_refused_submission_fails_its_own_operation_only() -> None:
    async with open_peer() as (peer, device):
        await device.load(BUMP)
        async with AsyncCoordinator(device, streams=1) as coordinator:
            good, bad = (coordinator.upload(ONES) for _ in range(2))
            await good, await bad
            await coordinator.compute(BUMP, 1, 32, good, 0, ITEMS)
            peer.refuse("launch")
            refused = coordinator.compute(BUMP, 1, 32, bad, 1, ITEMS)
            behind = coordinator.compute(BUMP, 1, 32, bad, 1, ITEMS)
            beside = coordinator.compute(BUMP, 1, 32, good, 1, ITEMS)  # on the same stream
            np.testing.assert_array_equal(await quickly(coordinator.download(good)), 26 * ONES)
            assert beside.stream is refused.stream
            with pytest.raises(SkippedError) as caught:
                await quickly(behind)
            assert isinstance(caught.value.__cause__, DriverError)
            with pytest.raises(DriverError):
                await quickly(refused)


async def test_order_is_kept_across_a_launch_that_is_refused_after_its_kernel_was_loaded() -> None:
    """Held reader, refused writer, overwriter. Found by the random programs (V2)."""
    async with open_peer() as (peer, device), device.stream() as stream, AsyncCoordinator(device) as coordinator:
        cold = aiocuda.Kernel("cold", source="__global__ void cold(unsigned* x) {}", host=lambda x: None)
        with Latch(device) as latch:
            up = coordinator.upload(ONES)
            await up
            latch.hold(stream)
            await latch.held()
            reader = coordinator.download(up, stream=stream)
            refused = coordinator.compute(cold, 1, 1, up)  # it waits on the host for its kernel
            over = coordinator.upload(9 * ONES, up.buffer)
            peer.refuse("launch")
            await until(lambda: over.state == "submitted")
            for _ in range(5):
                await asyncio.sleep(0)
            assert not over.done()
            latch.release()
            np.testing.assert_array_equal(await quickly(reader), ONES)
            await quickly(over)
            with pytest.raises(DriverError):
                await quickly(refused)


async def test_no_room_for_an_upload_is_its_failure() -> None:
    with contextlib.closing(HostDriver(memory=1 << 20)) as driver:
        async with aiocuda.open_device(driver=driver) as device, AsyncCoordinator(device) as coordinator:
            up = coordinator.upload(np.zeros(1 << 21, np.uint8))
            kernel = coordinator.compute(BUMP, 1, 32, up, 1, ITEMS)
            fine = coordinator.download(coordinator.upload(ONES))
            with pytest.raises(SkippedError) as caught:
                await quickly(kernel)
            assert isinstance(caught.value.__cause__, DeviceOutOfMemory)
            with pytest.raises(DeviceOutOfMemory):
                up.buffer  # noqa: B018 - looked at
            np.testing.assert_array_equal(await quickly(fine), ONES)


async def test_event_that_is_recorded_behind_a_kernel_being_loaded_is_no_deadlock() -> None:
    """Until it is recorded, a task must act; then its record waits on the host, and nothing is in flight."""
    loaded = threading.Event()
    async with open_peer() as (peer, device), device.stream() as stream:
        peer.before["load"] = lambda *_: loaded.wait(LATCH)
        async with AsyncCoordinator(device, deadlock_timeout=INSTANTLY) as coordinator:
            recorded = EventPool(device).acquire_nowait()
            behind = asyncio.create_task(coordinator.upload(ONES, after=recorded).wait())
            await turns(3)
            buffer = stream.empty(ITEMS, np.uint32)
            stream.launch(BUMP, 1, 32, buffer, 1, ITEMS)
            stream.record(event=recorded)
            check_often(coordinator)
            loaded.set()
            await quickly(behind)
            assert coordinator.statistics().deadlocks == 0


async def test_compile_error_is_a_failure_like_others() -> None:
    def refuse(*arguments: object) -> None:
        raise CompileError("no such thing", log="")

    async with open_peer() as (peer, device), AsyncCoordinator(device, streams=1) as coordinator:
        kernel = Kernel("broken", source="__global__ void broken(int* x) {}", host=lambda x: None)
        up, other = coordinator.upload(np.ones(4, np.int32)), coordinator.upload(ONES)
        await device.load(BUMP)
        await up, await other
        peer.before["load"] = refuse
        compiled = coordinator.compute(kernel, 1, 1, up)
        beside = coordinator.compute(BUMP, 1, 32, other, 1, ITEMS)  # on the same stream
        behind = coordinator.download(up)
        with pytest.raises(CompileError):
            await quickly(compiled)
        with pytest.raises(SkippedError):
            await quickly(behind)
        await quickly(beside)
        assert beside.stream is compiled.stream
        np.testing.assert_array_equal(await quickly(coordinator.download(other)), 6 * ONES)


async def test_unrelated_work_passes_a_kernel_that_is_being_compiled() -> None:
    """It waits for nothing but its own stream, so no other failure skips it."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as opened, AsyncCoordinator(opened) as coordinator:
            up = coordinator.upload(ONES)
            await coordinator.download(up)  # memory to stage by is there
            with peer.holding_jobs():
                kernel = coordinator.compute(BUMP, 1, 32, up, 1, ITEMS)
                behind = coordinator.download(up)
                beside = coordinator.download(coordinator.upload(ONES))
                await quickly(beside)
                assert (kernel.state, behind.state) == ("queued", "waiting")
            np.testing.assert_array_equal(await quickly(behind), 6 * ONES)


async def test_failing_host_function_skips_its_dependents(coordinator: AsyncCoordinator) -> None:
    def stage() -> None:
        raise BodyError("stage")

    node = coordinator.host(stage, description="stage")
    behind = coordinator.upload(ONES, after=node)
    with pytest.raises(SkippedError, match="'stage' failed"):
        await quickly(behind)
    with pytest.raises(BodyError):
        await node


async def test_one_unread_failure_is_raised_at_the_end(device: Device) -> None:
    def stage() -> None:
        raise BodyError("stage")

    with pytest.raises(BodyError, match="stage"):
        async with AsyncCoordinator(device) as coordinator:
            coordinator.upload(ONES, after=coordinator.host(stage))


async def test_several_failures_come_as_one_group(device: Device) -> None:
    def stage(number: int) -> None:
        raise BodyError(number)

    with pytest.raises(ExceptionGroup) as caught:
        async with AsyncCoordinator(device) as coordinator:
            for number in range(3):
                coordinator.upload(ONES, after=coordinator.host(stage, number))
            coordinator.upload(ONES)
    assert sorted(error.args[0] for error in caught.value.exceptions) == [0, 1, 2]
    assert coordinator.statistics().done == 1


async def test_a_failure_that_leaves_the_block_brings_the_others_along(device: Device) -> None:
    def stage(number: int) -> None:
        raise BodyError(number)

    with pytest.raises(ExceptionGroup) as caught:
        async with AsyncCoordinator(device) as coordinator:
            first, second = (coordinator.host(stage, number) for number in range(2))
            await coordinator.drain()
            await first
    assert [error.args[0] for error in caught.value.exceptions] == [0, 1]
    assert second.done()


async def test_cancellation_is_never_turned_into_another_error(device: Device) -> None:
    def stage() -> None:
        raise BodyError("stage")

    started = asyncio.Event()

    async def work() -> None:
        async with AsyncCoordinator(device) as coordinator:
            coordinator.host(stage)
            await coordinator.drain()
            started.set()
            await asyncio.Event().wait()

    with Reports() as reports:
        task = asyncio.create_task(work())
        await quickly(started.wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [type(failure) for failure in reports.failures] == [BodyError]


async def test_cancelled_bracket_skips_its_dependents(coordinator: AsyncCoordinator) -> None:
    inside = asyncio.Event()
    bracket = coordinator.operation("kernel")

    async def body() -> None:
        async with bracket:
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await inside.wait()
    behind = coordinator.upload(ONES, after=bracket)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(SkippedError) as caught:
        await quickly(behind)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    with pytest.raises(ClosedError, match="was left by CancelledError"):
        await quickly(bracket)  # this task was not cancelled
    assert bracket.state == "abandoned"


async def test_coordinator_of_a_closed_device() -> None:
    """Its nodes have finished; it can be closed, and refuses new nodes."""
    async with aiocuda.open_device(driver="host") as gone:
        coordinator = AsyncCoordinator(gone)
        up = coordinator.upload(ONES)
        inside = coordinator.operation("kernel")
        await inside.__aenter__()
        behind = coordinator.upload(ONES, after=inside)
    assert await up is up.buffer
    with pytest.raises(ClosedError):
        coordinator.upload(ONES)
    with pytest.raises(ClosedError):
        await inside.__aexit__(None, None, None)
    with pytest.raises(SkippedError):
        await quickly(behind)
    await quickly(coordinator.aclose())


async def test_unread_failure_is_raised_once(device: Device) -> None:
    def stage() -> None:
        raise BodyError("stage")

    async with AsyncCoordinator(device) as coordinator:
        node = coordinator.host(stage)
        behind = coordinator.upload(ONES, after=node)
        with pytest.raises(SkippedError):
            await quickly(behind)  # delivers both failures
    assert node.state == "failed"


async def test_device_fault_fails_all_nodes_and_wakes_all_waiters() -> None:
    """Submitted nodes, nodes that wait for a place, and nodes that wait for a bracket that is never left."""
    with contextlib.closing(HostDriver()) as driver, Reports():
        device = await aiocuda.open_device(driver=driver)
        coordinator = AsyncCoordinator(device, max_in_flight=2)
        bracket = coordinator.operation("kernel")
        await bracket.__aenter__()
        behind = coordinator.upload(ONES, after=bracket)
        nodes = [coordinator.compute(TRAP, 1, 1) for _ in range(4)]
        told = await quickly(asyncio.gather(*nodes, behind, return_exceptions=True))
        assert [type(error) for error in told] == [DeviceFault] * 5
        with pytest.raises(DeviceFault):
            coordinator.upload(ONES)
        with pytest.raises(DeviceFault):
            await bracket.__aexit__(None, None, None)
        await quickly(coordinator.aclose())  # all failures were delivered
        await device.aclose()
        del nodes, behind, bracket, coordinator, told
        gc.collect()


async def test_a_stream_that_was_closed_before_its_turn_came(device: Device) -> None:
    """The operation fails with the error of a closed stream, and not with the driver's error for an unknown handle."""
    async with AsyncCoordinator(device) as coordinator:
        mine = device.stream(name="mine")
        with Latch(device) as latch:
            latch.hold(coordinator.upload_stream)
            await quickly(latch.held())
            up = coordinator.upload(ONES)
            gate = coordinator.host(lambda: None)  # waits on the host, and so do its dependents
            node = coordinator.download(up, after=gate, stream=mine)
            await mine.aclose()
            latch.release()
            with pytest.raises(ClosedError, match="stream 'mine' has been closed"):
                await quickly(node)


async def test_edge_to_a_failed_node_skips_a_ready_node(device: Device) -> None:
    """E8: all its prerequisites were waitable, so only a place was missing; then it gets one more prerequisite."""
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        with Latch(device) as latch:
            latch.hold(coordinator.upload_stream)
            await quickly(latch.held())
            coordinator.upload(ONES)  # has the place
            gone, node, other = (coordinator.upload(ONES) for _ in range(3))
            assert gone.abandon()
            coordinator.add_dependency(node, gone)
            with pytest.raises(SkippedError, match="was not run"):
                await quickly(node)
            assert node.state == "skipped"
            latch.release()
            await quickly(other)


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_function_of_the_host_that_is_left_ends(device: Device, turns: int) -> None:
    """P1: also one that was to begin in the next turn of the loop."""
    with contextlib.suppress(ZeroDivisionError):
        async with AsyncCoordinator(device) as coordinator:
            node = coordinator.host(asyncio.Event().wait)
            behind = coordinator.upload(ONES, after=node)
            for _ in range(turns):
                await asyncio.sleep(0)
            raise ZeroDivisionError
    with pytest.raises(ClosedError, match="was left by CancelledError before its end"):
        await quickly(node)
    with pytest.raises(ClosedError):
        await quickly(behind)


async def test_block_that_ends_by_a_fault_makes_no_more_driver_calls() -> None:
    """P4: it has nothing to mark its end with."""
    with contextlib.suppress(DeviceFault):
        async with open_peer() as (peer, device):
            coordinator = AsyncCoordinator(device)
            bracket = coordinator.operation("kernel")
            with pytest.raises(DeviceFault):
                async with bracket:
                    assert bracket.stream is not None
                    try:
                        await quickly(bracket.stream.launch(TRAP, 1, 1))
                    finally:
                        before = [peer.calls[verb] for verb in ("event_create", "event_record")]
            assert [peer.calls[verb] for verb in ("event_create", "event_record")] == before
            with pytest.raises(DeviceFault):
                await quickly(bracket)


async def test_dependents_of_an_operation_abandoned_on_the_host_finish() -> None:
    """P1: it was skipped, and finishes after all its prerequisites, also those in the host queue of its stream."""
    fresh = Kernel("fresh", source='extern "C" __global__ void fresh() {}', host=lambda: None)
    async with open_peer() as (peer, device), AsyncCoordinator(device) as coordinator, device.stream() as mine:
        buffer = mine.empty(ITEMS, np.uint32)
        failed = await fail(coordinator)
        told: list[object] = []
        with peer.holding_jobs():
            mine.launch(fresh, 1, 1)  # waits until it is loaded
            behind = mine.fill(buffer, 1)
            assert behind.abandon()
            node = coordinator.upload(ONES, after=[behind, failed])
            node.add_done_callback(told.append)
            await until(lambda: not mine._queue.pending, "the stream has done what it has")
            assert told == []
        await until(lambda: told == [node], "the callback")
        assert node.state == "skipped"


@pytest.mark.parametrize("verb", ["upload", "compute", "download", "bracket"])
async def test_stream_that_is_captured_takes_no_operation_of_a_coordinator(device: Device, verb: str) -> None:
    """The operation became part of the graph, and the coordinator waited for its end, without end."""
    await device.load(BUMP)
    async with device.stream() as stream:
        buffer = await stream.upload(ONES)
        async with AsyncCoordinator(device) as coordinator:
            with stream.capture() as graph:
                stream.fill(buffer, 1)
                with pytest.raises(BusyError, match=r"is being captured.*leave the `async with stream.capture"):
                    if verb == "bracket":
                        async with coordinator.operation("kernel", stream=stream):
                            raise AssertionError
                    elif verb == "upload":
                        await coordinator.upload(ONES, buffer, stream=stream)
                    elif verb == "compute":
                        await coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS, stream=stream)
                    else:
                        await coordinator.download(buffer, stream=stream)
            await quickly(coordinator.drain())
            assert "1 operations" in repr(graph)
            await quickly(coordinator.upload(ONES, buffer, stream=stream).wait())
