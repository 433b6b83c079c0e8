"""A coordinator keeps nothing of nodes that have passed, once a later node has been awaited."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, Stream
from tests.helpers import AFFINE, Latch, quickly

pytestmark = pytest.mark.asyncio


async def graph(coordinator: AsyncCoordinator, stream: Stream) -> tuple[list[weakref.ref[Any]], Any]:
    """Upload, kernel and download; return weak references to objects that only the coordinator keeps, and the sink."""
    up = coordinator.upload(np.ones(8, np.uint32))
    kernel = coordinator.compute(AFFINE, 1, 32, up, 8, 3, 1, stream=stream)
    down = coordinator.download(up)
    return [weakref.ref(up), weakref.ref(kernel), weakref.ref(up.buffer)], down


async def test_awaited_graphs_are_released(coordinator: AsyncCoordinator, stream: Stream) -> None:
    held, down = await graph(coordinator, stream)
    assert (await quickly(down) == 4).all()
    del down
    await asyncio.sleep(0)
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


async def test_unfinished_nodes_are_kept(coordinator: AsyncCoordinator, stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    held, down = await graph(coordinator, stream)
    await quickly(coordinator.upload(np.ones(4)))  # which is let go, and makes the coordinator look
    await asyncio.sleep(0)
    gc.collect()
    assert held[1]() is not None
    assert held[2]() is not None
    latch.release()
    assert (await quickly(down) == 4).all()
