"""Ctrl-C at each place while listeners are notified: each operation is resolved once for each listener left."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest

from aiocuda import Device, Operation
from aiocuda.device._resources import resources_of
from tests.completion.interrupts import QUEUE, Interrupt, sweep
from tests.completion.test_interrupted_resolution import fault, watchdog_tick
from tests.helpers import Latch, Reports, block_until, open_peer, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.python_core, pytest.mark.slow]


class Counts:
    """Counts the calls of each hook by the id of the operation."""

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.submitted: Counter[int] = Counter()
        self.resolved: Counter[int] = Counter()

    def on_submit(self, operation: Operation[Any]) -> None:
        self.submitted[operation.id] += 1

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        self.resolved[operation.id] += 1


def check(interrupt: Interrupt, device: Device, listeners: list[Counts], operations: list[Operation[Any]]) -> int:
    """Check the calls of the listeners that are left. Return their number."""
    device_state = resources_of(device).device_state
    left = [each for each in listeners if device_state.hot.listeners is not None and each in device_state.hot.listeners]
    for listener in left:
        assert listener.resolved.keys() >= {each.id for each in operations}, interrupt.where
        assert {*listener.resolved.values()} == {1}, interrupt.where
        assert {*listener.submitted.values()} <= {1}, interrupt.where
    assert device_state.hot.starts == {}, interrupt.where
    return len(left)


@pytest.mark.parametrize("timing", [False, True])
async def test_interrupt_while_listeners_are_notified_of_the_end(timing: bool) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        removed = 0
        for interrupt in sweep(*QUEUE, least=50):
            listeners = [Counts(timing), Counts(False)]
            with contextlib.ExitStack() as stack:
                for each in listeners:
                    stack.enter_context(device.listen(each))
                with Latch(device) as latch:
                    latch.hold(stream)
                    await latch.held()
                    operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(3)]
                    operations[1].abandon()
                block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the device")
                with contextlib.suppress(KeyboardInterrupt), interrupt:
                    stream._queue.poll()
                watchdog_tick(device)
                await turns(3)
                removed += len(listeners) - check(interrupt, device, listeners, operations)
        assert removed  # an interrupt in a hook removes its listener


async def test_interrupt_while_listeners_are_notified_of_a_fault() -> None:
    for interrupt in sweep(*QUEUE, least=50):
        with Reports():
            async with open_peer(max_in_flight=3) as (peer, device):
                stream = device.stream()
                buffer = stream.empty(4)
                listeners = [Counts(True), Counts(False)]
                with contextlib.ExitStack() as stack, Latch(device) as latch:
                    for each in listeners:
                        stack.enter_context(device.listen(each))
                    latch.hold(stream)
                    await latch.held()
                    operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(4)]
                    operations[0].abandon()
                    fault(peer)
                    with contextlib.suppress(KeyboardInterrupt), interrupt:
                        stream._queue.poll()
                    watchdog_tick(device)
                    assert all(each.done() for each in operations), interrupt.where
                    check(interrupt, device, listeners, operations)
                    for operation in operations:
                        operation.exception()  # the device block does not raise what was read
