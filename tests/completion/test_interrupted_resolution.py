"""Ctrl-C at each place while operations are resolved costs at most one waiter, the one that was being woken."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceFault, DriverError, Operation, SkippedError
from aiocuda._base import _wakeups
from aiocuda._core import stream_operation
from aiocuda.device._resources import resources_of
from tests.completion.interrupts import QUEUE, Interrupt, sweep
from tests.helpers import Latch, Peer, Reports, block_until, open_peer, quickly, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.python_core, pytest.mark.slow]

MODULES = *QUEUE, _wakeups

#: Functions in which an interrupt costs the waiter that was just taken out of the list.
WAKING = "StreamOperation._wake", "StreamOperation.wake_waiters", "Waiters.pop"


class Waiters:
    """Tasks, a `gather` and callbacks that wait for three operations."""

    def __init__(self, one: Operation[Any], two: Operation[Any], three: Operation[Any]) -> None:
        self.called: list[str] = []
        self.tasks = [asyncio.create_task(each.wait()) for each in (one, two, two, three)]
        self.tasks.append(asyncio.create_task(self._gather(one, two, three)))
        self._last = three

    async def begin(self) -> None:
        await asyncio.sleep(0)
        for name in ("first", "second", "third"):
            self._last.add_done_callback(lambda _, name=name: self.called.append(name))  # type: ignore[misc]

    async def _gather(self, *operations: Operation[Any]) -> None:
        await aiocuda.gather(*operations, return_exceptions=True)

    async def lost(self) -> int:
        """Return the number of waiters that were not woken although everything has finished.

        Check that none was woken twice.
        """
        await turns()
        assert len(set(self.called)) == len(self.called)
        assert self.called == sorted(self.called)
        lost = 3 - len(self.called)
        for task in self.tasks:
            lost += not task.done()
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return lost


def watchdog_tick(device: Device) -> None:
    """Run one tick of the watchdog."""
    reactor = resources_of(device).loop_states.here().reactor
    if reactor._watchdog is not None:
        reactor._watchdog.cancel()
    reactor._watch()


def check(interrupt: Interrupt, lost: int, operations: list[Operation[Any]], device: Device) -> None:
    assert lost <= 1, interrupt.where
    assert not lost or (interrupt.where is not None and interrupt.where.startswith(WAKING))
    assert all(stream_operation(each).is_settled for each in operations), interrupt.where
    assert device.statistics().in_flight == 0, interrupt.where


async def test_interrupt_while_finished_operations_are_resolved() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        for interrupt in sweep(*MODULES, least=50):
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(4)]
                operations.append(stream.download(buffer))
                operations[3].abandon()
                waiters = Waiters(operations[0], operations[1], operations[4])
                await waiters.begin()
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the device")
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                stream._queue.poll()
            watchdog_tick(device)
            check(interrupt, await waiters.lost(), operations, device)
            assert (operations[4].result() == 3).all()


async def test_interrupt_in_resolve_to() -> None:
    """`resolve_to` resolves operations without a query.

    A pipeline calls it when later work of another stream is done.
    """
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        for interrupt in sweep(*MODULES, least=50):
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(4)]
                operations.append(stream.download(buffer))
                operations[3].abandon()
                waiters = Waiters(operations[0], operations[1], operations[4])
                await waiters.begin()
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the device")
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                stream._queue.resolve_to(stream_operation(operations[4]))
            watchdog_tick(device)
            check(interrupt, await waiters.lost(), operations, device)
            assert (operations[4].result() == 3).all()


async def test_interrupt_in_linger() -> None:
    """An await that lingers resolves the only operation of a stream, which has other waiters, too."""
    async with open_peer(Peer(polls_freely=True)) as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        for at in range(1, 40):
            interrupt = Interrupt(at, *MODULES)
            only = stream.fill(buffer, at)
            called: list[Any] = []
            only.add_done_callback(called.append)
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the device")
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                stream._queue.linger(stream_operation(only))
            watchdog_tick(device)
            await asyncio.sleep(0)
            check(interrupt, 1 - len(called), [only], device)


async def test_interrupt_in_abandon() -> None:
    """An operation is abandoned completely or not at all.

    Waiters that the interrupt left are woken in their turn.
    """
    async with open_peer() as (_, device):
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        for interrupt in sweep(*MODULES, least=10):
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(3)]
                waiters = Waiters(operations[0], operations[1], operations[2])
                await waiters.begin()
                with contextlib.suppress(KeyboardInterrupt), interrupt:
                    for each in operations[::-1]:
                        each.abandon()
            await quickly(stream.synchronize())
            check(interrupt, await waiters.lost(), operations, device)


async def test_interrupt_while_the_host_queue_is_pumped() -> None:
    async with open_peer(max_in_flight=4) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        for interrupt in sweep(*MODULES, least=50):
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(6)]
                assert [each.state for each in operations] == ["submitted"] * 3 + ["queued"] * 3
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the device")
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                stream._queue.poll()
            with contextlib.suppress(DriverError, SkippedError):  # the operation that was being submitted
                await quickly(stream.synchronize())
            assert all(each.done() for each in operations), interrupt.where


async def test_interrupt_while_a_fault_fails_all_operations() -> None:
    for interrupt in sweep(*MODULES, least=50):
        with Reports():
            async with open_peer(max_in_flight=4) as (peer, device):
                stream, other = device.stream(), device.stream()
                buffer = stream.empty(4)
                with Latch(device) as latch:
                    latch.hold(stream)
                    latch.hold(other)
                    await latch.held()
                    operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(6)]
                    assert [each.state for each in operations] == ["submitted"] * 3 + ["queued"] * 3
                    operations += [other.synchronize(), stream.synchronize()]
                    operations[1].abandon()
                    waiters = Waiters(operations[0], operations[2], operations[5])
                    await waiters.begin()
                    fault(peer)
                    with contextlib.suppress(KeyboardInterrupt), interrupt:
                        stream._queue.poll()
                    watchdog_tick(device)
                    check(interrupt, await waiters.lost(), operations, device)
                for each in operations[2:]:
                    assert isinstance(each.exception(), DeviceFault), interrupt.where


def fault(peer: Peer) -> None:
    """Let the device fault immediately, on this thread."""
    with peer.inner._lock:
        peer.inner._fail(719, 0, "a fault of the test", ZeroDivisionError())
