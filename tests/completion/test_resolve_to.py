"""`resolve_to`: finished work of another stream shows that an operation is done, so it is resolved without a query."""

from __future__ import annotations

import pytest

from aiocuda._core import stream_operation
from tests.helpers import block_until, open_peer

pytestmark = pytest.mark.asyncio


async def test_operation_and_all_earlier_ones_are_resolved_without_a_query() -> None:
    """Later operations are done, too, but only a query would show that."""
    async with open_peer() as (peer, device):
        first, second = device.stream(), device.stream()
        block, other = first.empty(64), second.empty(64)
        before, middle, later = (first.fill(block, value) for value in range(3))
        second.wait(middle)
        after = second.fill(other, 1)
        for stream in (first, second):  # the loop does not run here, so nothing is resolved
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fills")  # noqa: B023 - called here
        queries = peer.calls["event_query"]
        first._queue.resolve_to(stream_operation(middle))
        states = [operation.seen_state for operation in (before, middle, later, after)]
        assert states == ["done", "done", "submitted", "submitted"]
        assert peer.calls["event_query"] == queries
        await after
        await later
        assert device.statistics().in_flight == 0


async def test_queued_operation_is_not_resolved() -> None:
    async with open_peer(max_in_flight=1) as (_, device):
        stream = device.stream()
        block = stream.empty(64)
        await stream.fill(block, 0)
        submitted, queued = stream.fill(block, 1), stream.fill(block, 2)
        assert queued.state == "queued"
        stream._queue.resolve_to(stream_operation(queued))
        assert (submitted.state, queued.state) == ("submitted", "queued")
        await queued
