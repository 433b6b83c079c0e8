"""The prepared calls of a group's barrier: when they are used, what fails, and what Ctrl-C leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DeviceFault,
    DriverError,
    SkippedError,
    StreamGroup,
    WrongLoopError,
)
from aiocuda.completion import _reactor
from aiocuda.device.streams import _joins
from aiocuda.driver import protocol
from aiocuda.driver.protocol import RecordedCall
from aiocuda.driver.simulated import Upset
from tests import helpers
from tests.completion.interrupts import QUEUE, sweep
from tests.helpers import Latch, Peer, open_peer, quickly
from tests.pipeline.virtual import in_virtual_time, kernel


class CountingPeer(Peer):
    """A peer that counts the barriers that are made by prepared calls."""

    def recorded_wait(self, stream: int) -> RecordedCall:
        call = super().recorded_wait(stream)

        def wait(events: Sequence[Any], event: int) -> None:
            self.calls["recorded_wait"] += 1
            call(events, event)

        return wait


@contextlib.asynccontextmanager
async def bound_group(count: int = 3, **options: Any) -> AsyncIterator[tuple[Peer, StreamGroup, Latch]]:
    """A group whose barrier has been called once, so that its calls are prepared. Each stream has then had work."""
    async with open_peer(CountingPeer(), **options) as (peer, device), StreamGroup(device, count) as group:
        await work(group)
        group.barrier()
        with Latch(device) as latch:
            latch.hold(group[0])  # its memory is not ready yet, so this kernel passes through the host queue
            await latch.held()
            latch.release()
            await work(group)
            peer.calls.clear()
            yield peer, group, latch


async def work(group: StreamGroup) -> None:
    await quickly(aiocuda.gather(*(stream.synchronize() for stream in group)))


async def nothing_passes(group: StreamGroup, latch: Latch, *, held: int = 1) -> None:
    """Check that later work of each stream waits for a held kernel in one of them."""
    latch.hold(group[held])
    await latch.held()
    recent = group[0].synchronize()  # a hub that has been idle for a while is joined without the prepared calls
    joined = group.barrier()
    later = [stream.synchronize() for stream in group]
    for _ in range(3):
        await asyncio.sleep(0.001)
    assert not any(operation.done() for operation in (joined, *later))
    latch.release()
    await quickly(aiocuda.gather(recent, joined, *later))


@pytest.mark.asyncio
@pytest.mark.parametrize("held", [0, 1, 2])
async def test_a_barrier_takes_the_prepared_calls(held: int) -> None:
    """The hub waits for the streams with unfinished work; the others wait for the hub."""
    async with bound_group() as (peer, group, latch):
        await nothing_passes(group, latch, held=held)
        assert peer.calls["recorded_wait"] == 1
        assert peer.calls["stream_wait"] == (2 if held == 0 else 3)


@contextlib.asynccontextmanager
async def _lent(group: StreamGroup, latch: Latch) -> AsyncIterator[None]:
    async with group[2].lend():
        yield


@contextlib.asynccontextmanager
async def _lent_hub(group: StreamGroup, latch: Latch) -> AsyncIterator[None]:
    async with group[0].lend():
        yield


@contextlib.asynccontextmanager
async def _observed(group: StreamGroup, latch: Latch) -> AsyncIterator[None]:
    class Listener:
        timing = True

        def on_submit(self, *arguments: object) -> None: ...

        def on_resolve(self, *arguments: object) -> None: ...

    with group[0].device.listen(Listener()):
        yield


@contextlib.asynccontextmanager
async def _after_a_wait(group: StreamGroup, latch: Latch) -> AsyncIterator[None]:
    """One stream has only waited since its last operation."""
    async with group[0].device.stream() as other:
        group[2].wait(other.synchronize())
        group.barrier()
        yield


@contextlib.asynccontextmanager
async def _marked(group: StreamGroup, latch: Latch) -> AsyncIterator[None]:
    """The newest operation of one stream is a marker, which has an `extra`."""
    latch.hold(group[2])
    await latch.held()
    group[2]._queue.submit_marker()
    group.barrier()
    latch.release()
    yield


@pytest.mark.asyncio
@pytest.mark.parametrize("state", [_lent, _lent_hub, _observed, _after_a_wait, _marked])
async def test_unusual_streams_are_joined_without_the_prepared_calls(
    state: Callable[[StreamGroup, Latch], contextlib.AbstractAsyncContextManager[None]],
) -> None:
    async with bound_group() as (peer, group, latch):
        async with state(group, latch):
            before = peer.calls["recorded_wait"]
            await nothing_passes(group, latch)
            assert peer.calls["recorded_wait"] == before == 0
        await work(group)
        await nothing_passes(group, latch)
        assert peer.calls["recorded_wait"] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("full", [0, 2])
@pytest.mark.parametrize("count", [2, 5])
async def test_full_stream_is_joined_without_the_prepared_calls(full: int, count: int) -> None:
    """The first stream has no room for the barrier. With five operations, some of them are in the host queue."""
    async with bound_group(max_in_flight=2) as (peer, group, latch):
        latch.hold(group[full])
        await latch.held()
        earlier = [group[full].synchronize() for _ in range(count - 1)]
        recent = [group[0].synchronize()] if full else []  # as in `nothing_passes`
        joined = group.barrier()
        later = [stream.synchronize() for stream in group]
        assert peer.calls["recorded_wait"] == (full == 2 and count == 2)
        for _ in range(3):
            await asyncio.sleep(0.001)
        assert not any(operation.done() for operation in (*earlier, joined, *later))
        latch.release()
        await quickly(aiocuda.gather(*earlier, *recent, joined, *later))


@pytest.mark.asyncio
async def test_barrier_of_a_checked_group() -> None:
    async with bound_group(check=True) as (peer, group, latch):
        await nothing_passes(group, latch)
        assert peer.calls["recorded_wait"] == 0


@pytest.mark.asyncio
async def test_prepared_barrier_refuses_what_a_barrier_refuses() -> None:
    async with bound_group() as (peer, group, _):

        async def elsewhere() -> None:
            group.barrier()

        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(asyncio.run, elsewhere())
        async with group[0].capture():
            with pytest.raises(BusyError):
                group.barrier()
        assert peer.calls["recorded_wait"] == peer.calls["event_record"] == 0
        await group.aclose()
        with pytest.raises(ClosedError):
            group.barrier()


@pytest.mark.asyncio
@pytest.mark.parametrize("hub_has_work", [False, True])
@pytest.mark.parametrize("call", ["stream_wait", "event_record"])
async def test_refused_call_fails_the_barrier_and_skips_later_work(call: str, hub_has_work: bool) -> None:
    async with bound_group() as (peer, group, latch):
        for held in (0, 1) if hub_has_work else (1,):
            latch.hold(group[held])
        await latch.held()
        peer.refuse(call)
        joined = group.barrier()
        later = [stream.synchronize() for stream in group]
        latch.release()
        for operation in later:
            with pytest.raises(SkippedError):
                await quickly(operation)
        with pytest.raises(DriverError, match="does not take this"):
            await quickly(joined)
        await work(group)
        await nothing_passes(group, latch)


@pytest.mark.asyncio
async def test_refused_wait_of_another_stream_is_raised() -> None:
    """The operation has been recorded, and is done when all earlier work is done."""
    async with bound_group() as (peer, group, latch):
        group[0].synchronize()
        peer.refuse("stream_wait")
        with pytest.raises(DriverError, match="does not take this"):
            group.barrier()
        await work(group)
        await nothing_passes(group, latch)


@pytest.mark.parametrize("nth", [3, 4, 5])
def test_fault_in_a_prepared_barrier(nth: int) -> None:
    """Two waits belong to the first barrier. In the second one, the first stream waits once, then the others wait."""

    async def main(device: Device) -> None:
        await device.load(kernel(1.0))
        group = StreamGroup(device, 3)
        await group.barrier()
        await work(group)
        busy = group[1].launch(kernel(1.0), 1, 1, 0)
        with pytest.raises(DeviceFault):
            group.barrier()
        with pytest.raises(DeviceFault):
            await busy
        for stream in group:
            with pytest.raises(DeviceFault):
                stream.synchronize()
        await group.aclose()

    in_virtual_time(main, upsets=[Upset("refuse", nth, "stream_wait", 719)])


@pytest.mark.python_core
@pytest.mark.asyncio
@pytest.mark.parametrize("hub_has_work", [False, True])
async def test_interrupt_of_a_prepared_barrier_loses_no_wait(hub_has_work: bool) -> None:
    async with bound_group() as (peer, group, latch):
        queues = {stream._queue.handle: stream._queue for stream in group}
        driver: Any = peer.inner
        stream_wait = driver.stream_wait
        told: list[int] = []

        def wait(stream: int, event: int) -> None:
            stream_wait(stream, event)
            told.append(stream)

        for interrupt in sweep(_joins, *QUEUE, _reactor, protocol, helpers, least=20):
            told.clear()
            for held in (0, 1) if hub_has_work else (1,):
                latch.hold(group[held])
            await latch.held()
            driver.stream_wait = wait
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                group.barrier()
            driver.stream_wait = stream_wait
            for handle in told:
                end = queues[handle].end()
                queues[handle].poll()
                assert end is not None, interrupt.where
                assert not end.done(), interrupt.where
            latch.release()
            for stream in group:
                with contextlib.suppress(SkippedError, DriverError):  # after the interrupted barrier
                    await quickly(stream.synchronize())
            await work(group)
        assert peer.calls["recorded_wait"] > 20
