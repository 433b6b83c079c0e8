"""Operations that the driver refuses: their errors, the operations that are skipped, reports and recovery."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import numpy as np
import pytest

import aiocuda
from aiocuda import AiocudaError, DeviceOutOfMemory, DriverError, Kernel, Operation, SkippedError
from aiocuda.driver.host import HostDriver
from aiocuda.testing.kernels import HOLD
from tests.helpers import PATIENCE, SAXPY, Latch, Peer, Reports, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_refused_call_fails_the_operation_and_does_not_raise() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        peer.refuse("fill")
        operation = stream.fill(buffer, 1)
        with pytest.raises(DriverError, match="does not take this") as caught:
            await operation
        assert (caught.value.code, caught.value.call) == (1, "cuSomething")
        assert operation.state == "failed"
        assert isinstance(operation.exception(), DriverError)
        with pytest.raises(DriverError):
            operation.result()


@pytest.mark.parametrize("name", ["upload", "download", "copy", "fill", "prefetch", "launch", "event_record"])
async def test_refusal_of_each_method(name: str) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        x, y = await stream.upload(np.ones(4, np.float32)), await stream.upload(np.ones(4, np.float32))
        managed = device.unified(4)
        await stream.launch(SAXPY, 1, 4, 4, 1.0, x, y)  # now the kernel is loaded
        peer.refuse(name)
        methods: dict[str, Any] = {
            "upload": lambda: stream.upload(np.ones(4, np.float32)),
            "download": lambda: stream.download(x),
            "copy": lambda: stream.copy(x, y),
            "fill": lambda: stream.fill(x, 1),
            "prefetch": lambda: stream.prefetch(managed),
            "launch": lambda: stream.launch(SAXPY, 1, 4, 4, 1.0, x, y),
            "event_record": stream.synchronize,
        }
        failing = methods[name]()
        later = stream.synchronize()
        with pytest.raises(DriverError):
            await quickly(failing)
        with pytest.raises(SkippedError) as caught:
            await quickly(later)
        assert isinstance(caught.value.__cause__, DriverError)
        await quickly(stream.fill(x, 2))
        assert (await quickly(stream.download(x)) == 2).all()
        assert device.statistics().in_flight == 0
        assert device.statistics().failed == 2


@pytest.mark.parametrize("nbytes", [1 << 20, 9 << 20])
@pytest.mark.parametrize("direction", ["upload", "download"])
async def test_refused_chunk_fails_its_copy(direction: str, nbytes: int) -> None:
    """A copy of any number of chunks fails with the driver's own error."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        array = np.zeros(nbytes, np.uint8)
        buffer = await stream.upload(array)
        peer.refuse(direction)
        operation: Operation[Any] = stream.upload(array) if direction == "upload" else stream.download(buffer)
        with pytest.raises(DriverError, match="does not take this"):
            await quickly(operation)
        assert (await quickly(stream.download(buffer)) == 0).all()
        assert device.statistics().in_flight == 0


async def test_all_later_operations_of_the_stream_are_skipped() -> None:
    async with open_peer(max_in_flight=4) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            before = [stream.fill(buffer, 1), stream.fill(buffer, 2)]
            peer.refuse("fill")
            failing = stream.fill(buffer, 3)
            later = [stream.fill(buffer, value) for value in range(10)]  # without the failure, these would be queued
            await asyncio.sleep(0)
            calls = peer.calls["fill"]
            later.append(stream.fill(buffer, 4))
            assert peer.calls["fill"] == calls  # the driver got no call
            assert not failing.done()  # the earlier operations are not done either
            latch.release()
        await quickly(aiocuda.gather(*before))
        await until(lambda: later[-1].done(), "the last one")
        for operation in later:
            with pytest.raises(SkippedError, match=rf"was not run: <Operation {failing.id} fill on ") as caught:
                await operation
            assert isinstance(caught.value.__cause__, DriverError)
        with pytest.raises(DriverError):
            await failing
        assert (await stream.download(buffer) == 2).all()


async def test_queue_limit_does_not_change_which_operations_fail() -> None:
    """The same program fails in the same way with room for all operations, and with room for two."""
    outcomes = []
    for limit in (400, 2):
        async with open_peer(max_in_flight=limit) as (peer, device):
            stream = device.stream()
            buffer = stream.empty(4)
            await stream.synchronize()
            count = iter(range(100))

            def fail_third(*arguments: object, count: Any = count) -> None:
                if next(count) == 2:
                    raise DeviceOutOfMemory("no room", requested=1, live=0, reserved=0, free=0)

            peer.before["fill"] = fail_third
            with Latch(device) as latch:
                latch.hold(stream)
                operations = [stream.fill(buffer, value) for value in range(6)]
                await latch.held()
                latch.release()
            outcomes.append([type(each) for each in await quickly(aiocuda.gather(*operations, return_exceptions=True))])
    nothing = type(None)
    assert outcomes == [[nothing, nothing, DeviceOutOfMemory, SkippedError, SkippedError, SkippedError]] * 2


async def test_stream_works_again_after_its_failure_was_read() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        peer.refuse("fill")
        failing = stream.fill(buffer, 1)
        skipped = stream.fill(buffer, 2)
        await until(skipped.done, "the end")
        assert isinstance(skipped.exception(), SkippedError)
        assert await quickly(stream.fill(buffer, 4)) is None  # reading the `SkippedError` counts, too
        assert isinstance(failing.exception(), DriverError)


async def test_reading_the_state_does_not_count_as_reading_the_failure() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        peer.refuse("fill")
        failing = stream.fill(buffer, 1)
        await until(failing.done, "the failure")
        assert (failing.done(), failing.state, "failed" in repr(failing)) == (True, "failed", True)
        with pytest.raises(SkippedError):
            await stream.fill(buffer, 2)
        assert await stream.fill(buffer, 3) is None


async def test_failure_does_not_affect_other_streams() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(4)
        peer.refuse("fill")
        failing = stream.fill(buffer, 1)
        assert await quickly(other.fill(other.empty(4), 1)) is None
        with pytest.raises(DriverError):
            await failing


@pytest.mark.parametrize("kind", ["operation", "event", "stream"])
async def test_waits_of_other_streams_for_a_failed_operation_are_skipped(kind: str) -> None:
    async with open_peer() as (peer, device):
        stream, other, third = device.stream(), device.stream(), device.stream()
        buffer, target = stream.empty(4), other.empty(4)
        peer.refuse("fill")
        failing = stream.fill(buffer, 1)
        event = stream.record()
        waiting = other.wait(cast("Any", {"operation": failing, "event": event, "stream": stream}[kind]))
        later = other.fill(target, 1)
        last = third.wait(later)
        for operation in (waiting, later, last):
            with pytest.raises(SkippedError) as caught:
                await quickly(operation)
            assert isinstance(caught.value.__cause__, DriverError)
        assert await quickly(other.fill(target, 1)) is None  # the failure was read
        assert await quickly(third.synchronize()) is None
        assert await quickly(stream.synchronize()) is None
        del failing


async def test_stream_can_fail_twice() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        for _ in range(2):
            peer.refuse("fill")
            failing = stream.fill(buffer, 1)
            with pytest.raises(DriverError):
                await quickly(failing)
        assert await quickly(stream.fill(buffer, 1)) is None


async def test_refused_operation_releases_its_memory() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(1 << 16)
        array = np.zeros(1 << 16, np.float32)
        peer.refuse("upload")
        with pytest.raises(DriverError):
            await quickly(stream.copy(buffer, array))
        del buffer
        gc.collect()
        stream.empty(16).free()
        await until(lambda: device.memory.statistics().live_bytes == 0, "the memory")


# Reports of failures that no caller reads


async def test_unread_failure_is_reported_once() -> None:
    with Reports() as reports, pytest.raises(DriverError):
        async with open_peer() as (peer, device):
            stream = device.stream()
            peer.refuse("fill")
            operations = [stream.fill(stream.empty(4), 1) for _ in range(5)]
            await until(operations[-1].done, "the end")
            del operations
            await stream.aclose()
            del stream
            gc.collect()
    gc.collect()
    assert [type(failure) for failure in reports.failures] == [DriverError]
    assert "the failure of <Operation" in reports.contexts[0]["message"]
    assert "was never retrieved" in reports.contexts[0]["message"]


async def test_unread_failure_is_reported_without_the_garbage_collector() -> None:
    with Reports() as reports:
        gc.disable()
        try:
            with pytest.raises(DriverError):
                async with open_peer() as (peer, device):
                    stream = device.stream()
                    peer.refuse("fill")
                    stream.fill(stream.empty(4), 1)
                    await stream.aclose()
                    del stream
            assert len(reports.failures) == 1
        finally:
            gc.enable()


@pytest.mark.parametrize("how", ["await", "result", "exception", "gather", "skipped"])
async def test_failure_that_was_read_is_not_reported(how: str) -> None:
    with Reports() as reports:
        async with open_peer() as (peer, device):
            stream = device.stream()
            peer.refuse("fill")
            failing = stream.fill(stream.empty(4), 1)
            skipped = stream.synchronize()
            await until(skipped.done, "the end")
            if how == "await":
                with pytest.raises(DriverError):
                    await failing
            elif how == "result":
                with pytest.raises(DriverError):
                    failing.result()
            elif how == "exception":
                assert isinstance(failing.exception(), DriverError)
            elif how == "gather":
                assert isinstance((await aiocuda.gather(failing, return_exceptions=True))[0], DriverError)
            else:
                with pytest.raises(SkippedError):
                    await skipped
            await stream.aclose()
            del failing, skipped, stream
        gc.collect()
        assert not reports.contexts


async def test_failure_is_reported_after_its_only_waiter_was_cancelled() -> None:
    with Reports() as reports, pytest.raises(DriverError):
        async with open_peer() as (peer, device):
            stream = device.stream()
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                peer.refuse("fill")
                waiter = asyncio.create_task(stream.fill(stream.empty(4), 1).wait())
                await asyncio.sleep(0)
                waiter.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiter
                latch.release()
            del waiter, latch
    del stream
    gc.collect()
    assert len(reports.failures) == 1


async def test_unread_failure_is_reported_after_its_loop_was_closed() -> None:
    """asyncio's futures do the same: a closed loop still has an exception handler."""
    contexts: list[dict[str, Any]] = []
    kept: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: contexts.append(context))
        with Peer() as peer:
            device = await aiocuda.open_device(driver=peer.driver)
            stream = device.stream()
            peer.refuse("fill")
            kept.append(stream.fill(stream.empty(4), 1))
            await until(kept[0].done, "the failure")
            await device.aclose()

    await asyncio.to_thread(asyncio.run, main())
    assert not contexts
    kept.clear()
    gc.collect()
    assert [type(context["exception"]) for context in contexts] == [DriverError]


async def test_each_reader_gets_a_separate_error() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.refuse("fill")
        failing = stream.fill(stream.empty(4), 1)
        errors: list[AiocudaError] = []
        for _ in range(3):
            with pytest.raises(DriverError) as caught:
                await failing
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 3
        assert len({(type(each), each.args, each.code) for each in errors}) == 1  # type: ignore[attr-defined]


# Work that the driver has accepted before the error


async def test_operation_without_an_event_holds_its_memory_until_the_device_has_finished() -> None:
    """The driver has accepted the kernel and refused to record its event, so the device still uses the memory."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            latch.release()
            await stream.synchronize()
            peer.refuse("event_record")
            hold = latch.hold(stream)
            await latch.held()
            ticks = device.statistics().watchdog_wakes
            await until(lambda: device.statistics().watchdog_wakes > ticks + 2, "the watchdog")
            assert not hold.done()  # the device still uses its memory
            latch.release()
        with pytest.raises(DriverError):
            await quickly(hold)
        assert await quickly(stream.synchronize()) is None


async def test_interrupt_between_the_calls_of_a_launch_waits_for_the_kernel() -> None:
    """Ctrl-C comes after the launch and before its event is recorded: the kernel runs, and the stream waits for it."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:  # now the kernel is loaded, and the words are pinned
            latch.hold(stream)
            await latch.held()
            latch.release()
            await stream.synchronize()
            words = device.pinned(2, "u4")
            words[:] = 0
            await words
            hold = Kernel(HOLD.name, source=HOLD.source, host=HOLD.host)
            await asyncio.to_thread(hold.load, peer.driver, 0)
            peer.refuse("event_record", error=KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                stream.launch(hold, 1, 1, words, int(PATIENCE * 1e9))
            later = stream.fill(stream.empty(4), 1)
            before = device.statistics()
            await until(lambda: device.statistics().watchdog_wakes > before.watchdog_wakes + 2, "the watchdog")
            assert device.statistics().resolved == before.resolved
            assert not later.done()
            words[:] = 1
            await quickly(later)
        assert device.statistics().in_flight == 0


async def test_refused_queries_do_not_block_waiters() -> None:
    with Reports() as reports:
        async with open_peer() as (peer, device):
            stream = device.stream()
            with Latch(device) as latch:
                latch.hold(stream)
                operation = stream.fill(stream.empty(4), 1)
                waiter = asyncio.create_task(operation.wait())
                await latch.held()
                peer.refuse("event_query", times=3)
                await until(lambda: peer.calls["event_query"] > 6, "queries")
                latch.release()
            await asyncio.wait({waiter}, timeout=PATIENCE)
            assert waiter.done()
        assert all(isinstance(failure, DriverError) for failure in reports.failures)


async def test_failure_of_an_abandoned_operation_skips_later_ones() -> None:
    async with open_peer(max_in_flight=2) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.synchronize()
        with Latch(device) as latch:
            latch.hold(stream)
            stream.fill(buffer, 0)
            await latch.held()
            abandoned = stream.fill(buffer, 1)
            assert abandoned.state == "queued"
            assert abandoned.abandon()
            later = stream.fill(buffer, 2)
            peer.refuse("fill")
            latch.release()
            with pytest.raises(SkippedError):
                await quickly(later)
        assert await quickly(stream.fill(buffer, 3)) is None
        assert device.statistics().in_flight == 0


async def test_statistics_of_a_stream_ignore_skipped_operations() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.fill(buffer, 0)
        peer.refuse("fill")
        operations = [stream.fill(buffer, 1) for _ in range(5)]
        await until(operations[-1].done, "the end")
        assert isinstance(operations[0].exception(), DriverError)
        assert stream.statistics().p99_ms < 60_000
        assert stream.statistics().average_ms < 60_000
        assert stream.statistics().operations == 6


async def test_allocation_beyond_the_memory_raises_and_does_not_poison_the_stream() -> None:
    async with open_peer(Peer(HostDriver(memory=1 << 20))) as (_, device):
        stream = device.stream()
        held = stream.empty(1 << 19, np.uint8)
        with pytest.raises(DeviceOutOfMemory) as caught:
            stream.empty(1 << 20, np.uint8)
        assert caught.value.requested == 1 << 20
        assert caught.value.live == 1 << 19
        assert "524,288 live" in str(caught.value)
        assert await stream.fill(held, 1) is None
        held.free()
        assert stream.empty(1 << 20, np.uint8).nbytes == 1 << 20
