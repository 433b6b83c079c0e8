"""Frees that the driver refuses: nothing is lost, and they are repeated."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

from aiocuda import DriverError, StaleHandleError
from aiocuda.device._resources import resources_of
from aiocuda.memory import Adaptor, MemoryResource
from tests.helpers import PATIENCE, Latch, Reports, open_peer, quickly, refusal

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("verb", ["deallocate", "stream_wait"])
async def test_a_free_that_is_refused_may_be_tried_again(verb: str) -> None:
    async with open_peer() as (peer, device):
        device.memory.use(Adaptor)  # without the free lists
        stream, other = device.stream(), device.stream()
        buffer = await stream.upload(np.ones(100, np.float32))
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            other.fill(buffer, 2)
            live = device.memory.statistics().live_bytes
            peer.refuse(verb)
            with pytest.raises(DriverError):
                buffer.free()
            assert not buffer.freed
            assert device.memory.statistics().live_bytes == live
            assert stream.statistics().live_bytes == 400
            latch.release()
            assert (await stream.download(buffer)).shape == (100,)
            await other.synchronize()
        buffer.free()
        assert device.memory.statistics().live_bytes == live - 400
        with pytest.raises(StaleHandleError):
            buffer.free()


async def test_one_block_that_is_refused_does_not_take_the_others_with_it() -> None:
    async with open_peer() as (peer, device):
        device.memory.use(Adaptor)  # without the free lists
        stream = device.stream()
        before = device.memory.statistics().live_bytes
        buffers = [await stream.upload(np.ones(100, np.float32)) for _ in range(5)]
        stubborn = buffers[1].address
        refusing = True

        def refuse(address: int, stream: int) -> None:
            if refusing and address == stubborn:
                raise refusal()

        peer.before["deallocate"] = refuse
        with Reports() as reports:
            del buffers
            gc.collect()
            small = stream.empty(1)  # sweeps, and does not answer for it
            assert device.memory.statistics().live_bytes == before + 404
            for _ in range(3):
                await stream.fill(small, 1)
                device.memory.sweep(resources_of(device).loop_states.here().reactor)
            assert len(reports.failures) == 1  # once is enough
            assert isinstance(reports.failures[0], DriverError)
            refusing = False
            device.memory.sweep(resources_of(device).loop_states.here().reactor)
        assert device.memory.statistics().live_bytes == before + 4


class Refusing(Adaptor):
    """Refuses the first free of each block, and allocates the same address again."""

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self.kept: list[int] = []
        self.refuses = True

    def allocate(self, nbytes: int, stream: int) -> int:
        self.refuses = True
        return self.kept.pop() if self.kept else super().allocate(nbytes, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        if self.refuses:
            self.refuses = False
            raise refusal()
        self.kept.append(address)


async def test_each_block_that_is_refused_is_reported_also_at_the_same_address() -> None:
    async with open_peer() as (_, device), device.stream() as stream:
        device.memory.use(Refusing)
        addresses = set()
        with Reports() as reports:
            for _ in range(3):
                buffer = await stream.upload(np.ones(100, np.float32))
                addresses.add(buffer.address)
                del buffer
                gc.collect()
                for _ in range(2):  # the first free is refused
                    device.memory.sweep(resources_of(device).loop_states.here().reactor)
            assert (len(addresses), len(reports.failures)) == (1, 3)


async def test_deferred_frees_go_on_although_one_is_refused() -> None:
    async with open_peer(max_in_flight=2) as (peer, device):
        stream = device.stream()
        before = device.memory.statistics().live_bytes
        with Latch(device) as latch, Reports() as reports:
            latch.hold(stream)
            await latch.held()
            before = device.memory.statistics().live_bytes
            stream.synchronize()
            buffers = [stream.empty(100) for _ in range(4)]
            for buffer in buffers:
                stream.fill(buffer, 1)  # still on the host: its block waits in limbo
                buffer.free()
            peer.refuse("deallocate")
            latch.release()
            await quickly(stream.synchronize())
            device.memory.sweep(resources_of(device).loop_states.here().reactor)
            device.memory.sweep(resources_of(device).loop_states.here().reactor)
            assert device.memory.statistics().live_bytes == before
            assert len(reports.failures) <= 1


async def test_two_threads_make_one_stream_of_our_own() -> None:
    async with open_peer() as (peer, device):
        barrier = threading.Barrier(2, timeout=PATIENCE)
        made = peer.calls["stream_create"]
        peer.before["stream_create"] = lambda *arguments: threading.Event().wait(0.01)

        def spare() -> int:
            barrier.wait()
            return device.memory._stream_of_our_own()

        first, second = await asyncio.gather(asyncio.to_thread(spare), asyncio.to_thread(spare))
        assert first == second
        assert peer.calls["stream_create"] == made + 1
