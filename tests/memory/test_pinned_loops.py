"""Pinned memory that another loop than its maker's waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DriverError, PinnedBuffer
from aiocuda._base._wakeups import Wakes
from aiocuda.memory._region import Region
from tests.helpers import PATIENCE, Peer, in_thread, quickly, turns, until


class Shared:
    """A device and a pinned buffer that its maker's loop has not seen locked yet."""

    def __init__(self) -> None:
        self.peer = Peer()
        self.lock = threading.Event()
        self.peer.before["pin"] = lambda *arguments: self.lock.wait(PATIENCE)
        self.uploaders: list[int] = []
        self.peer.before["upload"] = lambda *arguments: self.uploaders.append(threading.get_ident())
        self.device: Device
        self.buffer: PinnedBuffer


def shared_with(other: Any, *, maker_stays: bool) -> Shared:
    """Open the device in one loop, which stays or is closed, and run the other one beside it or after it."""
    shared = Shared()

    async def make() -> None:
        shared.device = await aiocuda.open_device(driver=shared.peer.driver)
        shared.buffer = shared.device.pinned(1024)
        shared.buffer[:] = 7
        if maker_stays:
            await quickly(asyncio.to_thread(in_thread, lambda: other(shared)))
            await shared.device.aclose()

    asyncio.run(make())
    if not maker_stays:
        in_thread(lambda: other(shared))
    shared.peer.inner.close()
    return shared


@pytest.mark.parametrize("maker_stays", [True, False])
def test_a_copy_is_submitted_by_its_own_loop(maker_stays: bool) -> None:
    threads: list[int] = []

    async def copy(shared: Shared) -> None:
        threads.append(threading.get_ident())
        stream = shared.device.stream()
        buffer = stream.empty(1024)
        operation = stream.copy(buffer, shared.buffer)
        assert operation.state == "queued"
        asyncio.get_running_loop().call_later(0.01, shared.lock.set)
        await quickly(operation)
        assert set(shared.uploaders) == set(threads)
        assert (await stream.download(buffer) == 7).all()
        if maker_stays:
            await stream.aclose()
        else:
            await shared.device.aclose()

    shared_with(copy, maker_stays=maker_stays)


@pytest.mark.parametrize("maker_stays", [True, False])
def test_an_await_wakes_its_own_loop(maker_stays: bool) -> None:
    async def wait(shared: Shared) -> None:
        asyncio.get_running_loop().set_debug(True)  # a future of this loop refuses other threads
        waiting = asyncio.ensure_future(_awaited(shared.buffer))
        await asyncio.sleep(0)
        assert not waiting.done()
        shared.lock.set()
        await quickly(waiting)
        if not maker_stays:
            await shared.device.aclose()

    shared_with(wait, maker_stays=maker_stays)


def test_memory_that_cannot_be_locked_fails_in_both_loops() -> None:
    def refused(*arguments: object) -> None:
        raise DriverError("no page can be locked", code=1, call="cuMemHostRegister")

    async def copy(shared: Shared) -> None:
        shared.peer.before["pin"] = refused
        buffer = shared.device.pinned(300_000)
        stream = shared.device.stream()
        for _ in range(2):
            with pytest.raises(DriverError, match="no page can be locked"):
                await quickly(stream.copy(stream.empty(300_000), buffer))
        with pytest.raises(DriverError, match="no page can be locked"):
            await quickly(_awaited(buffer))
        await stream.aclose()
        shared.lock.set()

    shared_with(copy, maker_stays=True)


async def _awaited(buffer: PinnedBuffer) -> PinnedBuffer:
    return await buffer


@pytest.mark.asyncio
async def test_a_freed_array_is_not_written_any_more(device: Device) -> None:
    buffer = await device.pinned(16)
    view = buffer[:4]
    buffer.free()
    with pytest.raises(ValueError, match="read-only"):
        buffer[:] = 1
    stream = device.stream()
    for verb in (
        lambda: stream.download(stream.empty(16), out=buffer),
        lambda: stream.copy(stream.empty(4), view),
        lambda: stream.copy(view, stream.empty(4)),
    ):
        with pytest.raises(aiocuda.StaleHandleError, match=r"of shape \(16,\) float32 .*has been freed"):
            verb()
    await stream.aclose()


@pytest.mark.asyncio
async def test_what_is_locked_while_it_is_asked_for_is_not_missed() -> None:
    """The thread notifies all waiters; a waiter that is added at that moment is notified by one of the two."""
    told = []

    def race() -> None:
        region = Region(None, 0, 0)
        start = threading.Barrier(2)
        peer: Any = SimpleNamespace(pin=lambda *arguments: start.wait(), registry={}, now=time.monotonic)
        thread = threading.Thread(target=region.lock, args=(peer,))
        thread.start()
        start.wait()
        region.when_locked(lambda: told.append(1), asyncio.get_running_loop())
        region.when_locked(lambda: told.append(2))
        thread.join()

    for _ in range(200):
        race()
    await until(lambda: len(told) == 400, "all to be told")
    assert np.bincount(told).tolist() == [0, 200, 200]


@pytest.mark.asyncio
async def test_an_error_in_what_waits_for_a_lock_concerns_no_later_wake() -> None:
    """Ctrl-C in the last callback left an entry that raised `IndexError` in each later iteration of the loop."""
    loop, called = asyncio.get_running_loop(), []

    def interrupted() -> None:
        called.append("interrupted")
        raise ZeroDivisionError

    def woken() -> bool:
        called.append("woken")
        return False

    region = Region(None, 0, 0)
    region.when_locked(interrupted, loop)
    peer: Any = SimpleNamespace(pin=lambda *arguments: None, registry={}, now=time.monotonic)
    errors = []
    loop.set_exception_handler(lambda _, report: errors.append(type(report["exception"])))
    try:
        region.lock(peer)
        await turns(5)
        Wakes.of(loop).wake(woken)
        await turns(5)
    finally:
        loop.set_exception_handler(None)
    assert errors == [ZeroDivisionError]
    assert called == ["interrupted", "woken"]
