"""The pool of managed memory: kept by size, after everything that used it, and freed on worker threads only."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    Device,
    DeviceOutOfMemory,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
    UnifiedBuffer,
)
from aiocuda.device._resources import resources_of
from aiocuda.memory import _managed
from tests.helpers import (
    PATIENCE,
    Latch,
    Peer,
    Reports,
    block_until,
    in_thread,
    jobs_done,
    open_peer,
    quickly,
    turns,
    until,
)

pytestmark = pytest.mark.asyncio


async def given_back(device: Device, live: int = 0) -> None:
    """Finalisers and frees leave memory to the next buffer or tick."""

    def swept() -> bool:
        device.unified(1, np.uint8).free()  # which looks; and is itself looked at the next time
        return device.memory.statistics().live_bytes <= live + 1

    await until(swept, "the memory to come back")


async def lent_again(device: Device, address: int, nbytes: int) -> UnifiedBuffer:
    """The buffer that has this memory next."""
    taken: list[UnifiedBuffer] = []  # or what was dropped last would be lent first

    def again() -> bool:
        taken.append(device.unified(nbytes, np.uint8))
        return taken[-1].address == address

    await until(again, "the memory")
    return taken[-1]


async def test_given_back_is_handed_out_again() -> None:
    async with open_peer() as (peer, device):
        first = device.unified(1000, np.uint8)
        address = first.address
        first.free()
        again = device.unified(2000, np.uint8)  # of the same class
        assert again.address == address
        assert peer.calls["managed_allocate"] == 1
        with pytest.raises(StaleHandleError):
            first.array  # noqa: B018 - it raises, and does not alias
        other = device.unified(2000, np.uint8)
        assert other.address != address
        del again
        gc.collect()
        assert device.unified(5000, np.uint8).address not in (address, other.address)
        assert device.unified(4096, np.uint8).address == address
        assert peer.calls["managed_allocate"] == 3
        assert peer.calls["managed_deallocate"] == 0


async def test_not_handed_out_while_anything_uses_it(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = device.unified(1000, np.uint8)
    buffer.array[:] = 7
    address = buffer.address
    latch.hold(stream)
    operation = stream.download(buffer)
    buffer.free()
    await latch.held()
    fresh = [device.unified(1000, np.uint8) for _ in range(3)]
    assert address not in [each.address for each in fresh]
    for each in fresh:
        each.array[:] = 1
    latch.release()
    assert (await quickly(operation) == 7).all()
    assert device.unified(1000, np.uint8).address == address


async def test_a_cancelled_waiter_gives_nothing_back(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = device.unified(1000, np.uint8)
    buffer.array[:] = 7
    address = buffer.address
    latch.hold(stream)
    operation = stream.download(buffer)
    waiter = asyncio.ensure_future(operation.wait())
    await latch.held()
    waiter.cancel()
    del buffer
    gc.collect()
    fresh = device.unified(1000, np.uint8)
    assert fresh.address != address
    fresh.array[:] = 1
    latch.release()
    assert (await quickly(operation) == 7).all()


async def test_live_bytes_are_what_was_asked_for(device: Device) -> None:
    buffers = [device.unified(1000, np.uint8), device.unified(3000, np.uint8)]
    statistics = device.memory.statistics()
    assert (statistics.live_bytes, statistics.peak_bytes) == (4000, 4000)
    assert statistics.by_class == {1024: 1000, 4096: 3000}
    for buffer in buffers:
        buffer.free()
    await given_back(device)


async def test_what_is_too_much_to_keep_is_freed_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_managed, "MOST_IDLE", 8192)
    async with open_peer() as (peer, device):
        threads: set[int] = set()
        peer.before["managed_deallocate"] = lambda address: threads.add(threading.get_ident())
        buffers = [device.unified(4096, np.uint8) for _ in range(5)]
        for buffer in buffers:
            buffer.free()
        device.unified(1, np.uint8)
        await until(lambda: peer.calls["managed_deallocate"] == 2, "two to be freed")
        assert threading.get_ident() not in threads
        assert device.memory.managed.idle_bytes == 8192  # one was lent again


async def test_no_more_is_freed_than_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_managed, "MOST_IDLE", 16384)
    async with open_peer() as (peer, device):
        freed: list[int] = []
        peer.before["managed_deallocate"] = freed.append
        buffers = [device.unified(nbytes, np.uint8) for nbytes in (8192, 16384, 4096)]
        addresses = [buffer.address for buffer in buffers]
        buffers.pop().free()
        buffers.pop().free()
        device.memory.look()
        await until(lambda: freed, "a free")
        assert freed == [addresses[2]]
        await jobs_done(device)  # the thread might look once more, and see the next buffer
        buffers.pop().free()
        device.memory.look()
        await until(lambda: len(freed) > 1, "a free")
        assert freed == [addresses[2], addresses[0]]


def free_several(device: Device, count: int) -> None:
    """Free so many pages, and have them swept."""
    for buffer in [device.unified(4096, np.uint8) for _ in range(count)]:
        buffer.free()
    device.memory.look()


async def test_what_comes_after_the_last_look_of_the_thread_is_freed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_managed, "MOST_IDLE", 4096)
    async with open_peer() as (peer, device):
        jobs = resources_of(device).loop_states.here().reactor.jobs
        await jobs_done(device)
        free_several(device, 3)
        while not len(jobs):
            await asyncio.sleep(0)
        block_until(lambda: not jobs.running, "the end of the thread's work")
        free_several(device, 2)  # the loop has not received that end
        await until(lambda: device.memory.managed.idle_bytes == 4096, "the frees")
        assert peer.calls["managed_deallocate"] >= 3


async def test_what_is_too_much_to_keep_is_freed_when_no_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cuMemFree`` waits for all work, and holds the launches of all threads."""
    monkeypatch.setattr(_managed, "MOST_IDLE", 4096)
    monkeypatch.setattr(_managed, "IDLE_SECONDS", PATIENCE)
    async with open_peer() as (peer, device):
        stream = device.stream()
        running: list[int] = []
        with Latch(device) as latch:
            peer.before["managed_deallocate"] = lambda address: running.append(latch.running)
            latch.hold(stream)
            await latch.held()
            free_several(device, 2)
            await turns()
            assert not running
            latch.release()
            await until(lambda: running, "the free")
        assert running == [0]


@pytest.mark.parametrize(("pages", "seconds"), [(2, 0.01), (3, PATIENCE)], ids=["its time is over", "much more waits"])
async def test_what_waits_too_long_is_freed_in_the_middle_of_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pages: int, seconds: float
) -> None:
    """On a thread, and the loop goes on."""
    monkeypatch.setattr(_managed, "MOST_IDLE", 4096)
    monkeypatch.setattr(_managed, "IDLE_SECONDS", seconds)
    caplog.set_level("INFO", "aiocuda")
    async with open_peer() as (peer, device):
        stream = device.stream()
        running: list[int] = []
        with Latch(device) as latch:
            peer.before["managed_deallocate"] = lambda address: running.append(latch.running)
            latch.hold(stream)
            await latch.held()
            free_several(device, pages)
            await until(lambda: running, "the free")
            device.unified(4096, np.uint8).array[:] = 1
            latch.release()
            await until(lambda: "no_idle_moment" in caplog.text, "the event")
        assert running[0] == 1
        assert f"no_idle_moment device={device.name} work=unified memory" in caplog.text


async def test_trim_frees_what_is_kept_when_no_work_runs() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        running: list[int] = []
        with Latch(device) as latch:
            peer.before["managed_deallocate"] = lambda address: running.append(latch.running)
            latch.hold(stream)
            await latch.held()
            free_several(device, 2)
            trimming = asyncio.create_task(device.memory.trim(timeout=None))
            await turns()
            assert not peer.calls["managed_deallocate"]
            latch.release()
            await quickly(trimming)
        assert running == [0, 0]


async def test_trim_does_not_wait_longer_than_its_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiocuda")
    async with open_peer() as (peer, device):
        stream = device.stream()
        running: list[int] = []
        with Latch(device) as latch:
            peer.before["managed_deallocate"] = lambda address: running.append(latch.running)
            latch.hold(stream)
            await latch.held()
            await quickly(device.memory.trim(timeout=PATIENCE))  # nothing that it frees waits for the device
            assert "no_idle_moment" not in caplog.text
            free_several(device, 1)
            trimming = asyncio.create_task(device.memory.trim(timeout=0.01))
            await until(lambda: running == [1], "the free")
            latch.release()
            await quickly(trimming)
        assert f"no_idle_moment device={device.name} work=trim" in caplog.text
        for wrong in (-1, "soon"):
            with pytest.raises((InvalidArgumentError, InvalidTypeError)):
                await device.memory.trim(timeout=wrong)  # type: ignore[arg-type]  # a wrong argument on purpose


async def test_another_loop_frees_what_a_closed_loop_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_managed, "MOST_IDLE", 4096)
    monkeypatch.setattr(_managed, "IDLE_SECONDS", PATIENCE)
    async with open_peer() as (peer, device):
        stream = device.stream()

        async def leave() -> None:
            free_several(device, 2)

        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            await asyncio.to_thread(in_thread, leave)
            free_several(device, 2)
            await turns()
            assert not peer.calls["managed_deallocate"]
            latch.release()
            await until(lambda: peer.calls["managed_deallocate"] == 1, "the free")


async def test_no_room_takes_a_larger_one_that_is_kept() -> None:
    async with open_peer() as (peer, device):
        large = device.unified(10_000, np.uint8)
        address = large.address
        large.free()
        peer.refuse("managed_allocate", error=lambda: DeviceOutOfMemory("no room", requested=4096, free=0))
        small = device.unified(100, np.uint8)
        assert small.address == address
        small.free()
        assert device.unified(10_000, np.uint8).address == address  # it is as large as before


async def test_no_room_at_all_gives_back_what_is_kept_and_can_be_tried_again() -> None:
    async with open_peer() as (peer, device):
        device.unified(100, np.uint8).free()
        peer.refuse("managed_allocate", error=lambda: DeviceOutOfMemory("no room", requested=16384, free=0))
        with pytest.raises(DeviceOutOfMemory) as caught:
            device.unified(10_000, np.uint8)
        assert "try again" in caught.value.__notes__[0]
        await until(lambda: peer.calls["managed_deallocate"] == 1, "the kept one to be freed")
        assert device.memory.statistics().live_bytes == 0
        device.unified(10_000, np.uint8).array[:] = 1


async def test_refused_allocation_leaves_nothing(device: Device) -> None:
    async with open_peer() as (peer, other):
        peer.refuse("managed_allocate")
        with pytest.raises(aiocuda.DriverError):
            other.unified(4)
        assert other.memory.statistics().live_bytes == 0
        other.unified(4).array[:] = 1


async def test_everything_is_freed_with_the_device() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            kept: list[Any] = [device.unified(each) for each in (1, 1000, 100_000)]
            device.unified(7).free()
            await kept[0].advise("read_mostly")
            del kept[0]
            device.unified(5)
            device.unified(5).free()
        assert peer.calls["managed_allocate"] == peer.calls["managed_deallocate"]
        assert device.memory.statistics().live_bytes == 0


async def test_loop_that_closes_leaves_its_memory_to_the_others() -> None:
    async with open_peer() as (_, device):
        addresses: list[int] = []

        async def elsewhere() -> None:
            async with device.stream() as stream:
                buffer = device.unified(1000, np.uint8)
                addresses.append(buffer.address)
                stream.fill(buffer, 1)
                buffer.free()  # and the loop ends before a sweep

        await asyncio.to_thread(in_thread, elsewhere)
        await lent_again(device, addresses[0], 1000)


async def test_freed_by_a_stream_of_another_driver(device: Device) -> None:
    async with open_peer() as (_, other), other.stream() as stream:
        buffer = device.unified(4)
        with pytest.raises(aiocuda.WrongDeviceError, match="another driver"):
            buffer.free(stream)
        buffer.array[:] = 1


async def test_threads_allocate_side_by_side() -> None:
    """No address is lent twice."""
    async with open_peer() as (_, device):

        async def churn() -> None:
            for _ in range(200):
                one, two = device.unified(100, np.uint8), device.unified(100, np.uint8)
                one.array[:], two.array[:] = 1, 2
                assert one.array[0] == 1
                one.free()
                two.free()

        with Reports() as reports:
            await asyncio.gather(*(asyncio.to_thread(in_thread, churn) for _ in range(4)))
        assert reports.failures == []
        await given_back(device)
