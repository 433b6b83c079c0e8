"""What the device has done behind it, in another stream, says that an operation is done: nobody need ask."""

from __future__ import annotations

import pytest

from aiocuda.completion._stream_queue import stream_operation
from tests.helpers import block_until, open_peer

pytestmark = pytest.mark.asyncio


async def test_it_and_all_in_front_of_it_are_resolved_without_a_query() -> None:
    """And nothing behind it, though that is done, too: of that nobody knows."""
    async with open_peer() as (peer, device):
        first, second = device.stream(), device.stream()
        block, other = first.empty(64), second.empty(64)
        before, it, behind = (first.fill(block, value) for value in range(3))
        second.wait(it)
        after = second.fill(other, 1)
        for stream in (first, second):  # the loop does not turn meanwhile: nothing is resolved
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fills")  # noqa: B023 - called here
        asked = peer.calls["event_query"]
        first._queue.resolve_to(stream_operation(it))
        assert (before.state, it.state, behind.state, after.state) == ("done", "done", "submitted", "submitted")
        assert peer.calls["event_query"] == asked
        await after
        await behind
        assert device.statistics().in_flight == 0


async def test_what_is_still_on_the_host_stays_there() -> None:
    async with open_peer(max_in_flight=1) as (_, device):
        stream = device.stream()
        block = stream.empty(64)
        await stream.fill(block, 0)
        there, here = stream.fill(block, 1), stream.fill(block, 2)
        assert here.state == "queued"
        stream._queue.resolve_to(stream_operation(here))
        assert (there.state, here.state) == ("submitted", "queued")
        await here
