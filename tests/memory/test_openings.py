"""One device, opened twice: its streams and its memory are one, and the openings end on their own."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Stream, WrongDeviceError
from aiocuda.completion._waiting_calls import reactors_of
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from aiocuda.memory import SizeClassResource
from tests.helpers import Latch, Peer, quickly, until
from tests.memory.others import Producer

pytestmark = pytest.mark.asyncio


async def test_memory_of_one_opening_is_used_and_freed_on_a_stream_of_another() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as one, aiocuda.open_device(driver=peer.driver) as two:
            home, foreign = one.stream(), two.stream()
            one.memory.use(SizeClassResource)
            with Latch(two) as latch:
                buffer = await home.upload(np.arange(1000, dtype=np.float32))
                latch.hold(foreign)
                await latch.held()
                content = foreign.download(buffer)
                buffer.free(foreign)
                heir = home.empty(1000)
                await quickly(home.fill(heir, -1))  # other memory, or after the download
                latch.release()
                assert np.array_equal(await quickly(content), np.arange(1000))
            heir.free()
            assert one.memory.statistics().live_bytes == 0


async def test_a_free_waits_for_what_another_opening_has_on_the_host() -> None:
    with Peer() as peer:
        async with (
            aiocuda.open_device(driver=peer.driver) as one,
            aiocuda.open_device(driver=peer.driver, max_in_flight=2) as two,
        ):
            home, foreign = one.stream(), two.stream()
            with Latch(two) as latch:
                buffer = await home.upload(np.arange(1000, dtype=np.float32))
                latch.hold(foreign)
                await latch.held()
                for _ in range(4):
                    foreign.synchronize()
                content = foreign.download(buffer)
                assert content.state == "queued"
                buffer.free(foreign)
                latch.release()
                assert np.array_equal(await quickly(content), np.arange(1000))
            await until(lambda: one.memory.statistics().live_bytes == 0 or home.empty(1).free(), "the free")


async def test_memory_of_another_device_is_freed_on_none_of_its_streams() -> None:
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(0, driver=driver) as one, aiocuda.open_device(1, driver=driver) as two:
        stream, foreign = one.stream(), two.stream()
        buffer = stream.empty(4)
        with pytest.raises(WrongDeviceError, match="another device"):
            buffer.free(foreign)
        buffer.free()
    driver.close()


@pytest.mark.parametrize("memory", ["device", "pinned"])
@pytest.mark.parametrize("where", ["on the device", "on the host"])
async def test_closing_waits_for_another_opening_that_uses_the_memory(memory: str, where: str) -> None:
    """P16: nothing is freed or unlocked while a stream of another opening uses it."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver, max_in_flight=2) as two:
            foreign = two.stream()
            one = await aiocuda.open_device(driver=peer.driver)
            home = one.stream()
            with Latch(two) as latch:
                latch.hold(foreign)
                await latch.held()
                for _ in range(4 if where == "on the host" else 0):
                    foreign.synchronize()
                target = foreign.empty(1000)
                if memory == "device":
                    source: Any = await home.upload(np.full(1000, 7, np.float32))
                else:
                    source = await one.pinned(1000)
                    source[:] = 7
                copied = foreign.copy(target, source)
                del source
                closing = asyncio.create_task(one.aclose())
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(closing), 0.06)
                latch.release()
                await quickly(closing)
                await quickly(copied)
            assert (await foreign.download(target) == 7).all()
        assert peer.fault is None


async def test_closing_waits_for_each_of_many_streams_of_another_opening() -> None:
    """From the ninth stream on, the device also removes closed streams from its record; the new one is recorded."""
    with Peer() as peer:
        two = await aiocuda.open_device(driver=peer.driver)
        one = await aiocuda.open_device(driver=peer.driver)
        home, *foreign, ninth, idle = one.stream(), *(two.stream() for _ in range(10))
        buffer = await home.upload(np.arange(4, dtype=np.float32))
        for stream in foreign:
            await stream.download(buffer)
        with Latch(two) as latch:
            latch.hold(ninth)
            await latch.held()
            content = ninth.download(buffer)
            closing = asyncio.create_task(one.aclose())
            await asyncio.sleep(0)
            for _ in range(20):
                await idle.synchronize()
            assert not closing.done()
            latch.release()
            assert (await quickly(content)).tolist() == [0, 1, 2, 3]
            await quickly(closing)
        await two.aclose()


async def test_finished_cross_device_use_delays_no_close() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as two:
            one = await aiocuda.open_device(driver=peer.driver)
            foreign = two.stream()
            stream = one.stream()
            for index in range(40):
                buffer = stream.empty(10)
                await foreign.fill(buffer, index)
                buffer.free()
            await stream.synchronize()
            assert not resources_of(one).device_state.is_used_by_others()
            await quickly(one.aclose())


async def test_stream_of_two_openings_stays_with_the_remaining_one() -> None:
    """As PyTorch's stream, or the default one: either may forget it, and it is neither destroyed nor unknown then."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as two:
            owner = two.stream()
            async with aiocuda.open_device(driver=peer.driver) as one:
                first, second = (Stream.from_handle(opened, owner) for opened in (one, two))
                await quickly(first.fill(one.unified(4), 1))
            assert first.closed
            buffer = second.empty(4, np.float32)
            second.fill(buffer, 2)
            assert (await quickly(owner.download(buffer)) == 2).all()
            await quickly(second.synchronize())


async def test_adopted_memory_is_freed_on_a_stream_of_another_opening_as_other_memory_is() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as one, aiocuda.open_device(driver=peer.driver) as two:
            home, foreign, closed = one.stream(), two.stream(), two.stream()
            await closed.aclose()
            theirs, managed = home.empty(4), one.unified(4)
            for buffer in (theirs, managed, home.adopt(Producer(home.empty(4)))):
                with pytest.raises(ClosedError):
                    buffer.free(closed)
                assert not buffer.freed
                buffer.free(foreign)
                assert buffer.freed


async def test_closing_waits_for_the_dependencies_of_the_memory() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as two:
            foreign = two.stream()
            one = await aiocuda.open_device(driver=peer.driver)
            with Latch(two) as latch:
                home = one.stream()
                buffer = home.empty(4)
                latch.hold(foreign)
                await latch.held()
                buffer.add_dependency(foreign.synchronize())
                closing = asyncio.create_task(one.aclose())
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(closing), 0.03)
                assert peer.calls["deallocate"] == 0
                with pytest.raises(ClosedError, match="being closed"):
                    buffer.add_dependency(foreign.synchronize())
                latch.release()
                await quickly(closing)
            assert peer.calls["deallocate"] == 1


async def test_what_is_known_weakly_is_forgotten() -> None:
    """P25: openings, adopted arrays, managed memory and graphs come and go, and nothing is left of them."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as stream:
            device_state, memory, reactor = resources_of(device).device_state, device.memory, stream._queue.reactor
            for _ in range(3):
                async with aiocuda.open_device(driver=peer.driver) as again, again.stream():
                    assert len(device_state.budget.device_states) == len(reactors_of(device_state.driver)) == 2
                del again
                stream.adopt(Producer(stream.empty(4)))
                device.unified(4)
                async with stream.capture():
                    stream.synchronize()
                memory.sweep(reactor)
                gc.collect()
                assert len(device_state.budget.device_states) == len(reactors_of(device_state.driver)) == 1
                assert not memory.foreign.alive
                assert not memory.managed._blocks
                assert len(reactor.sweeps) == 4  # the site's, and one for all graphs
