"""Pinned memory: as arrays, as memory that devices read directly, and its owners."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    DeviceFault,
    DeviceOutOfMemory,
    DrainTimeoutWarning,
    InvalidArgumentError,
    InvalidTypeError,
    PinnedBuffer,
    StaleHandleError,
    Stream,
)
from aiocuda.device import _loop_state
from aiocuda.device._resources import resources_of
from tests.helpers import PATIENCE, SAXPY, TRAP, Latch, Peer, in_thread, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio


async def test_is_an_array(device: Device) -> None:
    pinned = device.pinned((3, 4), np.float64)
    assert isinstance(pinned, np.ndarray)
    assert (pinned.shape, pinned.dtype, pinned.nbytes) == ((3, 4), np.dtype(np.float64), 96)
    assert pinned.address == pinned.__array_interface__["data"][0]
    assert await pinned is pinned
    assert repr(pinned) == "<PinnedBuffer shape=(3, 4) dtype=float64 host, pinned>"
    pinned[:] = np.arange(12).reshape(3, 4)
    assert pinned.sum() == 66
    assert type(pinned + 1) is np.ndarray
    assert type(pinned[0, 0]) is np.float64
    assert type(np.sqrt(pinned)) is np.ndarray
    assert isinstance(pinned[1:], PinnedBuffer)
    assert np.array_equal(pickle.loads(pickle.dumps(pinned)), pinned)


async def test_computing_in_place_leaves_it_pinned(device: Device, stream: Stream) -> None:
    pinned = device.pinned(4)
    before = pinned
    pinned[:] = 1
    pinned += 1
    pinned *= 3
    np.add(pinned, 1, out=pinned)
    assert pinned is before
    assert np.array_equal(await stream.download(await stream.upload(pinned)), [7] * 4)


async def test_copies_go_without_staging() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        pinned = await device.pinned(1 << 20, np.uint8)
        pinned[:] = 3
        buffer = stream.empty(1 << 20, np.uint8)
        offloaded = peer.calls["offload"]
        assert await stream.copy(buffer, pinned) is None
        await stream.fill(buffer[: 1 << 10], 4)
        assert await stream.download(buffer, pinned) is pinned
        assert (peer.calls["upload"], peer.calls["download"]) == (1, 1)
        assert peer.calls["offload"] == offloaded
        assert (pinned[: 1 << 10] == 4).all()
        assert (pinned[1 << 10 :] == 3).all()


@pytest.mark.parametrize("kind", ["pinned", "unified"])
async def test_more_than_the_host_has(device: Device, kind: str) -> None:
    with pytest.raises(DeviceOutOfMemory, match=f"{1 << 47:,}") as caught:
        getattr(device, kind)(1 << 47, np.uint8)  # more than an address has bits for
    assert caught.value.requested == 1 << 47
    pinned = await device.pinned(4)
    pinned[:] = 1
    assert (pinned == 1).all()


async def test_slices_are_pinned_too(stream: Stream, device: Device) -> None:
    pinned = await device.pinned((4, 5), np.int32)
    pinned[:] = 0
    buffer = await stream.upload(np.arange(5, dtype=np.int32))
    assert await stream.download(buffer, pinned[2]) is not None
    assert np.array_equal(pinned[2], np.arange(5))
    assert not pinned[[0, 1, 3]].any()
    assert np.array_equal(await stream.download(await stream.upload(pinned[1:3])), pinned[1:3])
    with pytest.raises(InvalidArgumentError, match="C-contiguous"):
        stream.upload(pinned[:, 1])


async def test_kernel_takes_it_in_place_of_a_buffer(stream: Stream, device: Device) -> None:
    x, y = device.pinned(100), device.pinned(100)
    x[:], y[:] = 1, 2
    await quickly(stream.launch(SAXPY, 1, 128, 100, 3.0, x, y))
    assert (y == 5).all()
    await quickly(stream.launch(SAXPY, 1, 128, 50, 1.0, x[50:], y[50:]))
    assert (y[:50] == 5).all()
    assert (y[50:] == 6).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
async def test_of_few_bytes_or_none(device: Device, stream: Stream, shape: tuple[int, ...]) -> None:
    pinned = device.pinned(shape)
    assert pinned.shape == shape
    pinned[...] = 4
    back = await stream.download(await stream.upload(pinned))
    assert np.array_equal(back, pinned)
    pinned.free()


async def test_bad_sizes(device: Device) -> None:
    for shape in (-1, 2**64, (2**40, 2**40)):
        with pytest.raises(InvalidArgumentError):
            device.pinned(shape)
    for wrong in (1.5, "4", None, True):
        with pytest.raises(InvalidTypeError):
            device.pinned(wrong)  # type: ignore[arg-type]  # that is the point


# Owners


async def test_free_and_after(device: Device, stream: Stream) -> None:
    pinned = device.pinned(100)
    buffer = stream.empty(100)
    cast("PinnedBuffer", pinned[10:]).free()  # a slice frees the whole
    assert "freed" in repr(pinned)
    for verb in (
        pinned.free,
        lambda: stream.copy(buffer, pinned),
        lambda: stream.download(buffer, pinned),
        lambda: stream.launch(SAXPY, 1, 32, 100, 1.0, pinned, buffer),
    ):
        with pytest.raises(StaleHandleError, match="has been freed"):
            verb()


async def test_memory_is_used_again(device: Device) -> None:
    first = await device.pinned(1000)
    address = first.address
    first.free()
    second = device.pinned(900)
    assert second.address == address
    del first, second
    gc.collect()
    assert device.pinned(1000).address == address


@pytest.mark.parametrize("how", ["freed", "dropped"])
async def test_memory_is_not_used_again_while_a_copy_is_under_way(
    device: Device, stream: Stream, latch: Latch, how: str
) -> None:
    pinned = await device.pinned(1000)
    pinned[:] = 5
    address = pinned.address
    buffer = stream.empty(1000)
    latch.hold(stream)
    stream.copy(buffer, pinned)
    await latch.held()
    if how == "freed":
        pinned.free()
    else:
        del pinned
        gc.collect()
    fresh = device.pinned(1000)
    fresh[:] = -1
    assert fresh.address != address
    latch.release()
    assert (await quickly(stream.download(buffer)) == 5).all()


@pytest.mark.parametrize(
    "view", [np.asarray, lambda array: array.view(np.ndarray), lambda array: array[3:], memoryview]
)
async def test_each_view_holds_the_memory(device: Device, view: Any) -> None:
    pinned = await device.pinned(1000)
    pinned[:] = 5
    kept = view(pinned)
    del pinned
    gc.collect()
    fresh = device.pinned(1000)
    fresh[:] = -1
    assert (np.asarray(kept) == 5).all()


async def test_copy_of_it_is_an_array_like_any_other(device: Device, stream: Stream) -> None:
    pinned = await device.pinned(100)
    pinned[:] = 5
    copied = pinned.copy()
    with pytest.raises(StaleHandleError, match="copy of a pinned one"):
        copied.free()  # NumPy's copy is of the same class
    assert "freed" not in repr(pinned)
    with pytest.raises(InvalidTypeError, match="not pinned"):
        stream.launch(SAXPY, 1, 32, 100, 1.0, copied, pinned)
    assert (await stream.download(await stream.upload(copied)) == 5).all()


async def test_outlives_its_device_as_an_array() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            pinned = await device.pinned(1000)
            pinned[:] = 5
        assert (pinned == 5).all()
        with pytest.raises(StaleHandleError):
            pinned.free()
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            assert (await stream.download(await stream.upload(pinned)) == 5).all()  # staged, like any other


@pytest.mark.parametrize("busy", [False, True])
async def test_everything_locked_is_unlocked_when_the_device_closes(busy: bool) -> None:
    """However early: its own ring is being locked from the moment it is opened."""
    with Peer() as peer:
        for _ in range(20):
            async with aiocuda.open_device(driver=peer.driver) as device:
                if busy:
                    device.pinned(5000)
            assert peer.calls["pin"] == peer.calls["unpin"]


async def test_region_of_a_closed_loop_is_locked_nevertheless() -> None:
    """No loop is left to be notified that it is locked: the next user must not wait for ever."""
    async with open_peer() as (peer, device):
        gate = threading.Event()

        async def elsewhere() -> None:
            await device.stream().synchronize()
            peer.before["pin"] = lambda *arguments: gate.wait(PATIENCE)
            device.pinned(3000)

        with pytest.warns(ResourceWarning):
            await asyncio.to_thread(in_thread, elsewhere)
            gc.collect()
        del peer.before["pin"]
        gate.set()
        stream = device.stream()
        pinned = device.pinned(3000)
        pinned[:] = 7
        assert (await quickly(stream.download(await quickly(stream.upload(pinned)))) == 7).all()


# An array of the caller


async def test_own_array_is_read_and_written_directly() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        own = np.arange(1 << 18, dtype=np.float32)
        await stream.synchronize()
        async with device.pin(own) as pinned:
            assert pinned.address == own.__array_interface__["data"][0]
            buffer = stream.empty_like(own)
            offloaded = peer.calls["offload"]
            stream.copy(buffer, pinned)
            await stream.fill(buffer[:100], -1)
            await stream.download(buffer, pinned)
            assert peer.calls["offload"] == offloaded
            assert (own[:100] == -1).all()
            assert np.array_equal(own[100:], np.arange(100, 1 << 18))
        assert peer.calls["pin"] - peer.calls["unpin"] == 1  # the device's own ring
        with pytest.raises(StaleHandleError):
            stream.copy(buffer, pinned)


async def test_end_of_the_block_waits_until_no_device_uses_it(device: Device, stream: Stream, latch: Latch) -> None:
    own = np.arange(1000, dtype=np.float32)
    buffer = stream.empty_like(own)
    left = asyncio.Event()

    async def use() -> None:
        async with device.pin(own) as pinned:
            latch.hold(stream)
            stream.copy(buffer, pinned)
            await latch.held()
        left.set()

    task = asyncio.create_task(use())
    await until(lambda: latch.running, "the held kernel")
    for _ in range(3):  # cancelling it does not help
        task.cancel()
        await turns()
    assert not task.done()
    assert not left.is_set()
    latch.release()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)
    own[:] = -1
    assert np.array_equal(await stream.download(buffer), np.arange(1000))


async def test_end_of_the_block_unlocks_when_no_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlocking waits for all work, and holds the launches of all threads."""
    monkeypatch.setattr(_loop_state, "IDLE_SECONDS", PATIENCE)
    async with open_peer() as (peer, device):
        stream = device.stream()
        running: list[int] = []
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            peer.before["unpin"] = lambda address: running.append(latch.running)

            async def use() -> None:
                async with device.pin(np.zeros(1000)):
                    pass

            task = asyncio.create_task(use())
            await turns()
            task.cancel()
            await turns()
            assert not task.done()
            assert not running
            latch.release()
            with pytest.raises(asyncio.CancelledError):
                await quickly(task)
            assert running == [0]


async def test_end_of_the_block_unlocks_in_the_middle_of_work_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_loop_state, "IDLE_SECONDS", 0.01)
    caplog.set_level("INFO", "aiocuda")
    async with open_peer() as (peer, device):
        stream = device.stream()
        running: list[int] = []
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            peer.before["unpin"] = lambda address: running.append(latch.running)

            async def use() -> None:
                async with device.pin(np.zeros(1000)):
                    pass

            task = asyncio.create_task(use())
            await until(lambda: running == [1], "the call")
            latch.release()
            await quickly(task)
        assert f"no_idle_moment device={device.name} work=pin" in caplog.text


async def test_array_stays_locked_and_alive_if_its_loop_is_closed_before_an_idle_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other memory at its address would be locked already."""
    monkeypatch.setattr(_loop_state, "IDLE_SECONDS", PATIENCE)
    async with open_peer() as (_, device):
        stream = device.stream()
        arrays: list[weakref.ref[Any]] = []

        async def leave() -> None:
            array = np.zeros(1000)
            arrays.append(weakref.ref(array))
            pin = device.pin(array)
            await pin.__aenter__()
            del array
            ending = asyncio.ensure_future(pin.__aexit__(None, None, None))
            await turns()
            assert not ending.done()

        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            await asyncio.to_thread(in_thread, leave)  # which cancels the end
            resources_of(device).loop_states.reclaim()  # which drops what the loop has waited for
            gc.collect()
            assert arrays[0]() is not None
            latch.release()


async def test_cancelled_while_it_is_being_locked() -> None:
    async with open_peer() as (peer, device):
        own = np.zeros(1000)

        async def use() -> None:
            async with device.pin(own):
                raise AssertionError("it was cancelled before")

        with peer.holding_jobs():
            task = asyncio.create_task(use())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
        async with device.pin(own):  # it is not locked any more
            pass
    assert peer.calls["pin"] == peer.calls["unpin"]


async def test_array_cannot_be_pinned_twice(device: Device) -> None:
    own = np.zeros(1000)
    async with device.pin(own):
        with pytest.raises(BusyError):
            async with device.pin(own):
                pass
    async with device.pin(own):
        pass


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (np.zeros((4, 4))[:, ::2], InvalidArgumentError),
        (np.zeros(0), InvalidArgumentError),
        (np.array([object()]), InvalidTypeError),
        (b"bytes", InvalidTypeError),
        ([1.0], InvalidTypeError),
        (None, InvalidTypeError),
    ],
    ids=["strided", "empty", "objects", "bytes", "list", "None"],
)
async def test_what_cannot_be_pinned(device: Device, given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        async with device.pin(given):
            pass


async def test_read_only_array_can_be_read(device: Device, stream: Stream) -> None:
    own = np.arange(100, dtype=np.float32)
    own.flags.writeable = False
    async with device.pin(own) as pinned:
        buffer = await stream.upload(pinned)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            stream.download(buffer, pinned)


# Latches of several kinds


async def test_held_kernels_share_pinned_words(stream: Stream, other: Stream, device: Device) -> None:
    with Latch(device) as one, Latch(device) as two:
        first, second = one.hold(stream), two.hold(other)
        await one.held()
        await two.held()
        one.release()
        await quickly(first)
        assert not second.done()
        two.release()
        await quickly(second)


def is_mapped(address: int) -> bool:
    """Return whether this process has memory at an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
@pytest.mark.parametrize("end", ["closed", "left with work", "faulted"])
async def test_memory_that_a_lost_device_may_still_use_is_never_freed(end: str) -> None:
    """It may still copy into it, when the program has dropped the device and all arrays."""
    with Peer() as peer:
        device = await aiocuda.open_device(driver=peer.driver)
        stream = device.stream()
        pinned = await device.pinned(1 << 20, np.uint8)
        address = pinned.address
        if end == "left with work":
            device.drain_timeout = 0.05
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                with pytest.warns(DrainTimeoutWarning), pytest.raises(ZeroDivisionError):
                    async with device:
                        raise ZeroDivisionError
            del latch
        else:
            if end == "faulted":
                with pytest.raises(DeviceFault):
                    await quickly(stream.launch(TRAP, 1, 1))
            await quickly(device.aclose())
        assert pinned.freed
        del device, stream, pinned
        gc.collect()
        assert is_mapped(address) is (end != "closed")
