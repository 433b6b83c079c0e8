"""The names of operations in errors and faults."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocuda import DeviceFault, DriverError, SkippedError
from tests.helpers import TRAP, Latch, Peer, open_peer, quickly

pytestmark = pytest.mark.asyncio


async def test_skipped_operation_names_the_reason() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        peer.refuse("fill")
        buffer = stream.empty(4)
        failing, behind = stream.fill(buffer, 1), stream.synchronize()
        with pytest.raises(
            SkippedError, match=rf"Operation {failing.id} fill .*: the driver does not take this"
        ) as caught:
            await quickly(behind)
        assert isinstance(caught.value.__cause__, DriverError)
        with pytest.raises(DriverError):
            await quickly(failing)


@pytest.mark.parametrize("polls", [True, False])
async def test_fault_names_the_operation_of_the_program(polls: bool) -> None:
    """The fault names neither a chunk of the operation nor a marker."""
    for verb in ("empty", "upload", "download", "settle", "nothing"):
        async with open_peer(Peer(polls_freely=polls)) as (_, device):
            stream, other = device.stream(), device.stream()
            large = await other.upload(np.zeros(32 << 20, np.uint8))
            fault = other.launch(TRAP, 1, 1)
            with Latch(device):
                kept: Any = None
                if verb == "empty":
                    stream.synchronize()
                    kept = stream.empty(4)
                elif verb == "upload":
                    kept = stream.upload(np.zeros(32 << 20, np.uint8))
                elif verb == "download":
                    kept = stream.download(large)
                elif verb == "settle":
                    kept = asyncio.create_task(stream.synchronize().settle())
            with pytest.raises(DeviceFault) as caught:
                await quickly(fault)
            assert caught.value.operation is not None
            assert "step" not in caught.value.operation
            if isinstance(kept, asyncio.Task):
                await quickly(kept)


async def test_a_refused_chunk_is_called_by_its_copy() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(32 << 20, np.uint8)
        peer.refuse("upload", 100)
        copy = stream.copy(buffer, np.zeros(32 << 20, np.uint8))
        behind = stream.synchronize()
        with pytest.raises(SkippedError, match=f"Operation {copy.id} upload .* failed before it"):
            await quickly(behind)
        with pytest.raises(DriverError):
            await quickly(copy)


async def test_a_refused_marker_is_called_by_its_stream() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        peer.refuse("event_record")
        stream._queue.submit_marker()  # as for a barrier
        with pytest.raises(SkippedError, match=f"the work of {stream.name} failed before it: the driver does not"):
            await quickly(stream.synchronize())
