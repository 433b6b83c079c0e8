"""A device that is closed while it works: each task that waits for it, in any loop, is woken."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device, DrainTimeoutWarning, Kernel, Operation
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from tests.helpers import PATIENCE, Latch, Peer, Reports, in_thread, open_peer, quickly, until, until_gone

pytestmark = pytest.mark.asyncio


@contextlib.asynccontextmanager
async def closed_while_working(peer: Peer | None = None, **options: Any) -> AsyncIterator[tuple[Peer, Device, Latch]]:
    """Open a device and leave its block by an exception, while a kernel runs longer than ``drain_timeout``."""
    with Peer() if peer is None else contextlib.nullcontext(peer) as opened:
        device = await aiocuda.open_device(driver=opened.driver, **options)
        device.drain_timeout = 0.02
        latch = Latch(device)
        with pytest.raises(ZeroDivisionError), pytest.warns(DrainTimeoutWarning):
            async with device:
                stream = device.stream()  # a variable, as for all streams here: a dropped stream warns
                latch.hold(stream)
                await latch.held()
                yield opened, device, latch
                raise ZeroDivisionError
        latch.release()


async def test_waiters_of_operations_get_an_error() -> None:
    called: list[str] = []
    async with closed_while_working() as (_, device, latch):
        stream = device.stream()
        hold = latch.hold(stream)
        later = stream.synchronize()
        later.add_done_callback(lambda operation: called.append(operation.state))
        waiters = [asyncio.create_task(operation.wait()) for operation in (hold, later, later)]
        gathering = asyncio.ensure_future(_gather(hold, later))
        await asyncio.sleep(0)
    for waiter in (*waiters, gathering):
        with pytest.raises(ClosedError, match="abandoned"):
            await quickly(waiter)
    assert called == ["abandoned"]
    assert device.statistics().in_flight == 0


async def _gather(*operations: Operation[Any]) -> list[Any]:
    return await aiocuda.gather(*operations)


async def test_waiters_for_the_end_of_work_are_woken() -> None:
    """P6: `settle` promises that the device has finished. After the close that cannot be known, so it raises."""
    async with closed_while_working() as (_, device, latch):
        stream = device.stream()
        hold = latch.hold(stream)
        settling = asyncio.create_task(hold.settle())
        ends = [asyncio.create_task(each) for each in (stream.aclose(), device.aclose(), device.drain())]
        await asyncio.sleep(0)
    await quickly(asyncio.gather(*ends))
    with pytest.raises(ClosedError, match="what it may touch stays in use"):
        await quickly(settling)


async def test_settle_waits_for_the_device_although_its_marker_is_withdrawn() -> None:
    """The marker is still on the host when it is withdrawn, and the device is still working."""
    with Peer() as peer:
        with pytest.raises(ZeroDivisionError):
            async with aiocuda.open_device(driver=peer.driver, max_in_flight=1) as device:
                stream = device.stream()
                latch = Latch(device)
                hold = latch.hold(stream)
                await latch.held()
                hold.abandon()
                stream.synchronize()
                settling = asyncio.create_task(hold.settle())
                await asyncio.sleep(0)

                async def release() -> None:
                    wakes = device.statistics().watchdog_wakes
                    await until(lambda: device.statistics().watchdog_wakes > wakes + 1, "the watchdog")
                    assert not settling.done()
                    latch.release()

                releasing = asyncio.create_task(release())
                raise ZeroDivisionError
        await quickly(settling)
        await quickly(releasing)


async def test_waiters_in_another_loop_get_an_error() -> None:
    """The other loop wakes them itself, because a future that another thread sets wakes no task."""
    errors: list[BaseException | str] = []
    entered = threading.Event()

    async def work(device: Device, latch: Latch) -> None:
        stream = device.stream()
        hold = latch.hold(stream)
        hold.add_done_callback(lambda operation: errors.append(threading.current_thread().name))
        entered.set()
        try:
            await asyncio.wait_for(hold.wait(), PATIENCE)
        except ClosedError as error:
            errors.append(error)

    async with closed_while_working() as (_, device, latch):
        thread = threading.Thread(target=in_thread, args=(lambda: work(device, latch),), name="other loop")
        thread.start()
        await asyncio.to_thread(entered.wait, PATIENCE)
    await asyncio.to_thread(thread.join, PATIENCE)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [str, ClosedError]
    assert errors[0] != threading.current_thread().name
    assert device.statistics().in_flight == 0


async def test_waiters_for_a_thread_get_an_error() -> None:
    gate = threading.Event()
    with Peer() as peer, Reports() as reports:
        async with closed_while_working(peer) as (_, device, _):
            waiting = asyncio.create_task(device.offload(gate.wait, PATIENCE))
            cancelled = asyncio.create_task(device.offload(gate.wait, PATIENCE))
            await asyncio.sleep(0)
            cancelled.cancel()
        with pytest.raises(ClosedError, match="before a thread had done this"):
            await quickly(waiting)
        gate.set()
        with pytest.raises(ClosedError):
            await device.offload(print)
        assert not reports.contexts


async def test_copy_out_that_ends_after_the_close() -> None:
    """The end of the copy-out comes to a queue that no reactor watches."""
    gate = threading.Event()
    with Reports() as reports:
        async with closed_while_working() as (peer, device, _):
            stream = device.stream()
            buffer = await stream.upload(np.zeros(10 << 20, np.uint8))
            offload = peer.inner.offload
            peer.__dict__["offload"] = lambda work, port, tag: offload(lambda: (gate.wait(PATIENCE), work()), port, tag)
            download = asyncio.create_task(stream.download(buffer).wait())
            await until(lambda: resources_of(device).loop_states.here().reactor.jobs.running, "the copy-out")
        with pytest.raises(ClosedError):
            await quickly(download)
        gate.set()
        assert not reports.contexts


# A pinned array


@pytest.mark.parametrize("owned", [False, True])
async def test_pinned_array_outlives_its_device(owned: bool) -> None:
    """The end of its block unlocks the array, although the device is closed."""
    with Peer() as peer:
        array = np.ones(4096, np.float32)
        device = await aiocuda.open_device(driver="host" if owned else peer.driver)
        async with device.stream() as stream, device.pin(array) as pinned:
            await stream.upload(pinned)
            closing = asyncio.create_task(device.aclose())
            await quickly(closing)
        if not owned:
            assert peer.calls["pin"] == peer.calls["unpin"]


async def test_pinned_array_of_a_device_that_was_closed_while_it_worked() -> None:
    """The end of the block cannot wait for the device, so it raises. The array stays locked and alive."""
    ended = asyncio.Event()
    array = np.ones(4096, np.float32)
    alive = weakref.ref(array)

    async def use(device: Device, latch: Latch) -> None:
        nonlocal array
        async with device.pin(array) as pinned:
            stream = device.stream()
            buffer = stream.empty(4096)
            latch.hold(stream)
            stream.copy(buffer, pinned)
            del pinned, array
            await ended.wait()

    async with closed_while_working() as (peer, device, latch):
        task = asyncio.create_task(use(device, latch))
        await until(lambda: peer.calls["pin"] and peer.calls["upload"], "the copy")
    ended.set()
    with pytest.raises(ClosedError, match="stays locked"):
        await quickly(task)
    del device, task
    gc.collect()
    assert alive() is not None
    assert peer.calls["unpin"] == 0


# Closing


async def test_second_close_waits_for_the_first() -> None:
    async with open_peer() as (peer, device):
        gate, entered = threading.Event(), threading.Event()
        await device.pinned(10)

        def slowly(*arguments: object) -> None:
            entered.set()
            gate.wait(PATIENCE)

        peer.before["unpin"] = slowly
        first = asyncio.create_task(device.aclose())
        await asyncio.to_thread(entered.wait, PATIENCE)
        second = asyncio.create_task(device.aclose())
        third = asyncio.create_task(asyncio.to_thread(in_thread, device.aclose))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not first.done()
        assert not second.done()
        assert not third.done()
        gate.set()
        await quickly(second)
        assert peer.calls["pin"] == peer.calls["unpin"]
        await quickly(asyncio.gather(first, third))


# Loops that were closed


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
async def test_orphan_is_reclaimed_once() -> None:
    """One loop reclaims it. The other loops find that this has begun, and do nothing."""
    async with open_peer() as (peer, device):
        entered, gate = threading.Event(), threading.Event()
        destroyed: list[int] = []

        async def leave_stream_open() -> None:
            device.stream().synchronize()

        await asyncio.to_thread(asyncio.run, leave_stream_open())

        def slowly(stream: int) -> None:
            destroyed.append(stream)
            entered.set()
            gate.wait(PATIENCE)

        peer.before["stream_destroy"] = slowly
        loop_states = resources_of(device).loop_states
        first = threading.Thread(target=loop_states.reclaim)
        first.start()
        await asyncio.to_thread(entered.wait, PATIENCE)
        assert not loop_states.reclaim()  # not reclaimed yet, and the other thread does it
        gate.set()
        await asyncio.to_thread(first.join, PATIENCE)
        del peer.before["stream_destroy"]
        await until(loop_states.reclaim, "the thread that locks staging memory for the closed loop")
        assert len(destroyed) == 1
        assert device.statistics().streams == 0


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
async def test_orphan_that_the_driver_does_not_destroy() -> None:
    """The error is reported. It does not stop the other orphans, and no unrelated call raises it."""
    contexts: list[dict[str, Any]] = []
    async with open_peer() as (peer, device):

        async def leave_stream_open() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: contexts.append(context))
            for _ in range(3):
                device.stream().synchronize()

        await asyncio.to_thread(asyncio.run, leave_stream_open())
        peer.refuse("stream_destroy")
        await quickly(device.drain())
        async with device.stream() as stream:
            await quickly(stream.synchronize())
        assert len(contexts) == 1
        assert peer.calls["stream_destroy"] == 4


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
async def test_loops_closed_while_a_kernel_is_loaded_are_collected() -> None:
    async with open_peer(Peer(HostDriver())) as (_, device):
        loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

        async def leave_stream_open() -> None:
            loops.append(weakref.ref(asyncio.get_running_loop()))
            kernel = Kernel("k", source='extern "C" __global__ void k(int n) {}', host=lambda n: None)
            device.stream().launch(kernel, 1, 1, 1)

        for _ in range(5):
            await asyncio.to_thread(asyncio.run, leave_stream_open())
        await quickly(device.drain())
        await until_gone(loops)
        assert not any(state.loading for state in resources_of(device).loop_states)
