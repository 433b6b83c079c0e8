"""The operations of a stream that are still on the host: the limit, the gates, imported streams and lent streams."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, ClosedError, Device, DeviceFault, InvalidTypeError, Kernel, Operation, Stream
from aiocuda.completion._stream_queue import stream_queue
from aiocuda.testing.kernels import AFFINE as AFFINE_SAMPLE
from tests.helpers import AFFINE, SAXPY, TRAP, Latch, Peer, block_until, open_peer, quickly, turns, until
from tests.memory.others import handle as handle_of

pytestmark = pytest.mark.asyncio


async def warm_up(latch: Latch, stream: Stream) -> None:
    """Load the latch's kernel and pin its words, so that the next hold is submitted immediately."""
    latch.hold(stream)
    await latch.held()
    latch.release()
    await stream.synchronize()


@pytest.mark.parametrize("limit", [1, 2, 4, 64])
async def test_stream_accepts_operations_up_to_its_limit(limit: int) -> None:
    async with open_peer(max_in_flight=limit) as (_, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            operations: list[Operation[Any]] = [latch.hold(stream)]
            operations += [stream.fill(buffer, value) for value in range(2 * limit)]
            states = [operation.state for operation in operations]
            assert states == ["submitted"] * limit + ["queued"] * (limit + 1)
            await latch.held()
            latch.release()
            await quickly(aiocuda.gather(*operations))
        assert (await stream.download(buffer) == 2 * limit - 1).all()


async def test_limit_is_divided_among_the_streams() -> None:
    """A hardware queue blocks its caller at about 1 021 entries, and several streams use the same hardware queue."""
    async with open_peer() as (_, device):
        streams = [device.stream() for _ in range(128)]
        room = 900 * device.hardware_queues // 128
        assert room < 400
        stream = streams[-1]
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            operations = [stream.fill(buffer, 1) for _ in range(400)]
            assert sum(operation.state == "submitted" for operation in operations) == room - 1
            for each in streams[:-1]:
                await each.aclose()
            latch.release()
            await quickly(aiocuda.gather(*operations))


async def test_queued_operations_are_submitted_although_no_task_awaits_them() -> None:
    async with open_peer(max_in_flight=4) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            for value in range(100):
                stream.fill(buffer, value)
            assert peer.calls["fill"] == 3
            latch.release()
        await until(lambda: peer.calls["fill"] == 100, "the last fill")
        await until(lambda: device.statistics().in_flight == 0, "the end")
        assert (await stream.download(buffer) == 99).all()


async def test_operations_beyond_the_limit_keep_their_order(stream: Stream) -> None:
    buffer = await stream.upload(np.zeros(1, np.uint32))
    expected = 0
    for index in range(2000):
        stream.launch(AFFINE, 1, 1, buffer, 1, 3, index)
        expected = (expected * 3 + index) % 2**32
    assert (await quickly(stream.download(buffer)))[0] == expected


async def test_enqueue_polls_and_makes_room() -> None:
    """A coroutine that only enqueues, and never lets the loop run, still submits all operations."""
    async with open_peer(max_in_flight=4) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.fill(buffer, 0)
        peer.calls.clear()
        for value in range(8):
            stream.fill(buffer, value)
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fill")
        assert peer.calls["fill"] == 8
        await stream.synchronize()


# Waits for operations that are still on the host


async def test_wait_for_a_queued_operation() -> None:
    async with open_peer(max_in_flight=4) as (_, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            for value in range(10):
                last = stream.fill(buffer, value)
            assert last.state == "queued"
            wait = other.wait(last)
            result = other.download(buffer)
            assert (wait.state, result.state) == ("queued", "queued")
            latch.release()
            assert (await quickly(result) == 9).all()


async def test_chain_of_waits_over_full_streams() -> None:
    async with open_peer(max_in_flight=2) as (_, device):
        streams = [device.stream() for _ in range(6)]
        buffer = await streams[0].upload(np.zeros(1, np.uint32))
        with Latch(device) as latch:
            await warm_up(latch, streams[0])
            latch.hold(streams[0])
            expected = 0
            for index in range(60):
                stream = streams[index % 6]
                stream.wait(streams[(index - 1) % 6])
                stream.launch(AFFINE, 1, 1, buffer, 1, 5, index)
                expected = (expected * 5 + index) % 2**32
            last = streams[59 % 6]
            result = last.download(buffer)
            latch.release()
            assert (await quickly(result))[0] == expected


@pytest.mark.slow
async def test_streams_that_wait_for_each_other_thousands_of_times() -> None:
    """One pump leads to the next one: as nested calls they would exceed Python's limit of recursion."""
    async with open_peer(max_in_flight=400) as (_, device):
        left, right = device.stream(), device.stream()
        buffer = await left.upload(np.zeros(1, np.uint32))
        with Latch(device) as latch:
            latch.hold(left)
            await latch.held()
            expected = 0
            for index in range(1500):
                right.wait(left.launch(AFFINE, 1, 1, buffer, 1, 5, index))
                left.wait(right.launch(AFFINE, 1, 1, buffer, 1, 3, index))
                expected = ((expected * 5 + index) * 3 + index) % 2**32
            result = left.download(buffer)
            latch.release()
            assert (await quickly(result))[0] == expected


async def test_wait_for_an_operation_that_is_abandoned_while_it_is_queued() -> None:
    async with open_peer(max_in_flight=2) as (_, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            stream.fill(buffer, 1)
            queued = stream.fill(buffer, 2)
            result = other.wait(queued)
            assert queued.abandon()
            download = other.download(buffer)
            latch.release()
            await quickly(result)
            assert (await quickly(download) == 2).all()  # the order is kept


async def test_operations_behind_the_same_gate_ask_it_only_when_it_may_have_opened() -> None:
    """A hundred functions that wait for one place cost one question each, not one for each enqueue of another."""

    class Gate:
        is_open, asked = False, 0

        def ready(self, operation: Operation[Any]) -> bool:
            self.asked += 1
            return self.is_open

        def failure(self) -> None:
            return None

    async with open_peer() as (_, device):
        stream, latch, gate = device.stream(), Latch(device), Gate()
        queue = stream_queue(stream)
        latch.hold(stream)
        await latch.held()
        operations = [queue.rare.enqueue_gated("wait", gate, None, ()) for _ in range(100)]
        assert gate.asked == 1
        gate.is_open = True
        queue.rare.host_queue.pump()
        assert gate.asked == 101
        latch.release()
        await quickly(aiocuda.gather(*operations))


async def test_first_launch_waits_for_its_kernel_and_later_operations_wait_for_the_launch(stream: Stream) -> None:
    kernel = Kernel(AFFINE_SAMPLE.name, source=AFFINE_SAMPLE.source, host=AFFINE_SAMPLE.host)  # not loaded yet
    buffer = await stream.upload(np.ones(4, np.uint32))
    launch = stream.launch(kernel, 1, 4, buffer, 4, 5, 1)
    result = stream.download(buffer)
    assert launch.state == "queued"
    assert (await quickly(result) == 6).all()
    assert stream.launch(kernel, 1, 4, buffer, 4, 5, 1).state != "queued"
    await stream.synchronize()


async def test_kernel_that_cannot_be_loaded_fails_its_launch(stream: Stream) -> None:
    async with open_peer() as (peer, device):
        own_stream = device.stream()
        kernel = Kernel(AFFINE_SAMPLE.name, source=AFFINE_SAMPLE.source, host=AFFINE_SAMPLE.host)
        buffer = own_stream.empty(4, np.uint32)
        peer.refuse("load")
        with pytest.raises(aiocuda.DriverError):
            await quickly(own_stream.launch(kernel, 1, 4, buffer, 4, 5, 1))
        assert await quickly(own_stream.launch(kernel, 1, 4, buffer, 4, 5, 1)) is None  # loads it again


async def test_fault_while_a_kernel_is_loaded_fails_its_launch() -> None:
    """The launch waits for the load of its kernel. Only the load meets the fault."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream, other = device.stream(), device.stream()
            buffer = stream.empty(4, np.uint32)
            await stream.launch(AFFINE, 1, 4, buffer, 4, 1, 0)
            kernel = Kernel(AFFINE_SAMPLE.name, source=AFFINE_SAMPLE.source, host=AFFINE_SAMPLE.host)
            with Latch(device) as latch:
                await warm_up(latch, stream)
                await asyncio.to_thread(TRAP.load, peer.driver, 0)

                def fault_first(*arguments: object) -> None:
                    function = TRAP.loaded(peer.driver, 0)
                    assert function is not None
                    peer.inner.launcher(other._queue.handle, function, (1, 1, 1), (1, 1, 1), 0)([])
                    block_until(lambda: peer.inner.fault, "the fault")

                peer.before["load"] = fault_first
                launch = stream.launch(kernel, 1, 4, buffer, 4, 5, 1)
                later = stream.download(buffer)
                for operation in (launch, later):
                    with pytest.raises(DeviceFault):
                        await quickly(operation)


async def test_fault_raised_by_a_load_fails_its_launch() -> None:
    """The fault fails all operations before the error of the load arrives."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            buffer = stream.empty(4, np.uint32)
            kernel = Kernel(AFFINE_SAMPLE.name, source=AFFINE_SAMPLE.source, host=AFFINE_SAMPLE.host)

            def fault(*arguments: object) -> None:
                raise DeviceFault("the device has faulted", code=719, device=0, operation=None)

            peer.before["load"] = fault
            launch = stream.launch(kernel, 1, 4, buffer, 4, 5, 1)
            with pytest.raises(DeviceFault):
                await quickly(launch)


# Streams of other libraries


async def test_imported_stream_keeps_the_order_of_its_owner() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        imported = Stream.from_handle(device, peer.inner.stream_handle(stream._queue.handle))
        buffer = await stream.upload(np.ones(1, np.uint32))
        await stream.launch(AFFINE, 1, 1, buffer, 1, 3, 0)  # loads the kernel: an imported stream cannot wait for that
        expected = 3
        for index in range(1, 20):
            (imported if index % 2 else stream).launch(AFFINE, 1, 1, buffer, 1, 3, index)
            expected = (expected * 3 + index) % 2**32
        assert (await imported.download(buffer))[0] == expected
        await imported.aclose()
        assert await stream.fill(buffer, 0) is None  # closing the imported stream does not destroy it


@pytest.mark.parametrize("handle", ["7", 7.0, None, True, object()])
async def test_handle_of_a_wrong_type_is_refused(device: Device, handle: Any) -> None:
    with pytest.raises(InvalidTypeError, match="is an integer"):
        Stream.from_handle(device, handle)


async def test_wait_for_a_raw_handle_is_refused(stream: Stream) -> None:
    with pytest.raises(InvalidTypeError, match="from_handle"):
        stream.wait(7)  # type: ignore[arg-type]  # a wrong argument on purpose


async def test_imported_stream_never_queues_operations() -> None:
    async with open_peer(max_in_flight=4) as (peer, device):
        stream, other = device.stream(), device.stream()
        imported = Stream.from_handle(device, peer.inner.stream_handle(stream._queue.handle))
        buffer = other.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(imported)
            for value in range(3):
                imported.fill(buffer, value)
            with pytest.raises(BusyError, match="await what it depends on, then try again"):
                imported.fill(buffer, 9)
            with pytest.raises(BusyError):
                imported.record()
            latch.hold(other)
            for _ in range(5):
                queued = other.synchronize()
            assert queued.state == "queued"
            latch.release()
            await quickly(queued)
            await until(lambda: imported._queue.idle, "the end")
            kernel = Kernel(AFFINE_SAMPLE.name, source=AFFINE_SAMPLE.source, host=AFFINE_SAMPLE.host)
            data = stream.empty(4, np.uint32)
            with pytest.raises(BusyError):
                imported.launch(kernel, 1, 4, data, 4, 1, 1)
            await until(lambda: kernel.loaded(peer.driver, 0), "the kernel")
            assert await imported.launch(kernel, 1, 4, data, 4, 1, 1) is None
        assert device.statistics().in_flight == 0
        await imported.aclose()


async def test_wait_for_an_imported_stream_includes_the_work_of_others() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        imported = Stream.from_handle(device, peer.inner.stream_handle(stream._queue.handle))
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)  # the imported stream does not track this operation
            await latch.held()
            waiting = other.wait(imported)
            synchronize = imported.synchronize()
            await turns()
            assert not waiting.done()
            assert not synchronize.done()
            latch.release()
            await quickly(waiting)
            await quickly(synchronize)
        await imported.aclose()


async def test_buffer_of_an_imported_stream_is_allocated_after_the_work_of_others() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        imported = Stream.from_handle(device, peer.inner.stream_handle(stream._queue.handle))
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            await latch.held()
            buffer = imported.empty(100)
            fill = other.fill(buffer, 3)
            await turns()
            assert peer.fault is None
            assert not fill.done()
            latch.release()
            await quickly(fill)
        await imported.aclose()


# Lent streams


async def test_lent_stream_has_no_operation_on_the_host() -> None:
    async with open_peer(max_in_flight=4) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            operations = [stream.fill(buffer, value) for value in range(10)]
            asyncio.get_running_loop().call_later(0.005, latch.release)
            async with stream.lend() as handle:
                assert all(operation.state != "queued" for operation in operations)
                assert isinstance(handle, int)
                assert handle == handle_of(stream)
                with pytest.raises(BusyError, match=r"device\.pinned"):
                    stream.upload(np.zeros(1 << 20))
        await stream.upload(np.zeros(1 << 20))  # allowed again
        assert peer.fault is None


async def test_lender_waits_for_the_work_of_the_borrower() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            async with stream.lend():
                borrower = Stream.from_handle(device, peer.inner.stream_handle(stream._queue.handle))
                latch.hold(borrower)
                await latch.held()
            assert stream.synchronize().state == "submitted"
            result = other.wait(stream)
            await turns()
            assert not result.done()
            latch.release()
            await quickly(result)
            await borrower.aclose()
        assert await stream.fill(buffer, 1) is None


async def test_no_operation_is_queued_between_the_flush_and_the_loan() -> None:
    """Another task enqueues a copy of many chunks at the moment when the queue becomes empty."""
    async with open_peer() as (_, device):
        stream = device.stream()
        array = np.zeros(6 << 20, np.uint8)
        first = stream.upload(array)
        found: list[bool] = []

        async def borrow() -> None:
            async with stream.lend():
                found.append(not stream._queue.rare.host_queue.entries)

        async def upload() -> Operation[Any]:
            while first.state in ("queued", "staging"):
                await asyncio.sleep(0)
            return stream.upload(array)

        uploading, borrowing = asyncio.create_task(upload()), asyncio.create_task(borrow())
        second = None
        try:
            second = await quickly(uploading)
        except BusyError:
            pass  # the stream was lent first
        await quickly(borrowing)
        assert found == [True]
        if second is not None:
            await quickly(second)


async def test_two_overlapping_loans() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        await stream.upload(np.zeros(1 << 20))
        first, second = stream.lend(), stream.lend()
        await first.__aenter__()
        await second.__aenter__()
        await first.__aexit__(None, None, None)
        with pytest.raises(BusyError):
            stream.upload(np.zeros(1 << 20))  # still lent
        with pytest.raises(BusyError, match="is lent"):
            await stream.aclose()
        await second.__aexit__(None, None, None)
        await stream.upload(np.zeros(1 << 20))
        streams = device.statistics().streams
        await stream.aclose()
        assert device.statistics().streams == streams - 1  # the stream of this library was destroyed


async def test_stream_is_not_imported_while_operations_are_queued() -> None:
    async with open_peer(max_in_flight=2) as (_, device):
        stream = device.stream()
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            operations = [stream.synchronize() for _ in range(4)]
            with pytest.raises(BusyError, match=r"stream\.lend\(\)"):
                Stream.from_handle(device, stream)
            latch.release()
            await quickly(operations[-1])
        Stream.from_handle(device, stream)
        await stream.aclose()
        with pytest.raises(ClosedError):
            Stream.from_handle(device, stream)


async def test_arguments_of_a_queued_launch_are_kept_alive(stream: Stream) -> None:
    x, y = await stream.upload(np.ones(8, np.float32)), await stream.upload(np.ones(8, np.float32))
    for _ in range(1000):
        stream.launch(SAXPY, 1, 8, 8, 1.0, x, y)
    result = stream.download(y)
    del x, y
    assert (await quickly(result) == 1001).all()
