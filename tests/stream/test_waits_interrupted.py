"""Ctrl-C during a device-side wait that no operation represents: a wait for the whole stream includes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from aiocuda import Operation, Stream
from aiocuda._core import stream_operation
from aiocuda.completion import _reactor
from aiocuda.device.streams import _joins
from aiocuda.errors import DriverError, SkippedError
from tests.completion.interrupts import QUEUE, sweep
from tests.helpers import Latch, open_peer, quickly

pytestmark = pytest.mark.asyncio


def _end(stream: Stream, _: Operation[Any]) -> object:
    return stream._queue.end()


def _follow(stream: Stream, operation: Operation[Any]) -> object:
    return stream._queue.follow(stream_operation(operation))


def _synchronize(stream: Stream, _: Operation[Any]) -> object:
    return stream.synchronize()


def _join(stream: Stream, operation: Operation[Any]) -> object:
    return _joins.join([operation.stream._queue, stream._queue])


@pytest.mark.python_core
@pytest.mark.parametrize("verb", [_end, _follow, _join, _synchronize])
async def test_interrupt_loses_no_wait(verb: Callable[[Stream, Operation[Any]], object]) -> None:
    async with open_peer() as (peer, device):
        held, stream = device.stream(), device.stream()
        for interrupt in sweep(_joins, *QUEUE, _reactor, least=3):
            if stream._queue.active:
                stream._queue.reactor.deactivate(stream._queue)  # as after a tick of the watchdog
            with Latch(device) as latch:
                latch.hold(held)
                await latch.held()
                operation = held.synchronize()
                if verb not in (_follow, _join):
                    stream._queue.follow(stream_operation(operation))
                waits = peer.calls["stream_wait"]
                with contextlib.suppress(KeyboardInterrupt), interrupt:
                    verb(stream, operation)
                told = verb not in (_follow, _join) or peer.calls["stream_wait"] > waits
                end = stream._queue.end()
                stream._queue.poll()
                assert not told or (end is not None and not end.done()), interrupt.where
            for each in (held, stream):
                with contextlib.suppress(SkippedError):  # for the interrupted one
                    await quickly(each.synchronize())


@pytest.mark.parametrize("shared", [False, True])
async def test_wait_for_a_stream_with_a_failure_is_skipped_after_later_work_too(shared: bool) -> None:
    """Memory can be allocated in the stream after the failure. The marker of the allocation has neither failed nor
    waited."""
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        block = other.empty(4)
        await other.fill(block, 0)
        async with contextlib.AsyncExitStack() as stack:
            if shared:
                await stack.enter_async_context(stream.lend())
            peer.refuse("event_record", 1)
            _failing = stream.synchronize()
            stream.empty(16)
            other.wait(stream)
            with pytest.raises(SkippedError):
                await quickly(other.fill(block, 1))
            with pytest.raises(DriverError):
                await quickly(_failing)
