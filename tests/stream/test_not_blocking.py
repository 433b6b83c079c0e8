"""No call waits for the device: each method is called while a kernel holds the stream.

A call that waits returns when the held kernel has ended by itself, and then `Latch.release` raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, EventPool, Operation, Stream
from tests.helpers import AFFINE, SAXPY, SPIN, Latch, quickly, turns
from tests.stream.methods import World, methods_of

pytestmark = pytest.mark.asyncio


async def test_no_verb_waits_for_the_device(device: Device, stream: Stream, other: Stream, latch: Latch) -> None:
    """Each method returns while the kernel runs: a method that waited for it would return after its end.

    The code of all kernels is on the device before, and there is room for one more stream. CUDA loads code, makes room
    for further streams and unlocks pages only while no kernel runs, and until then it delays launches of other threads.
    """
    small, large = np.zeros(100, np.float32), np.zeros(5 << 20, np.uint8)
    x, y, big = await stream.upload(small), await stream.upload(small), await stream.upload(large)
    pinned, managed = await device.pinned(100), device.unified(100)
    own, world = np.zeros(100, np.float32), await World.make(device, stream, other)
    pool = EventPool(device)
    await stream.launch(SAXPY, 1, 100, 100, 1.0, x, y)
    await device.load(SPIN)
    async with device.stream():
        pass
    latch.hold(stream)
    await latch.held()
    kept: list[Any] = []
    verbs: dict[str, Callable[[], Any]] = {
        **methods_of(world),
        "launch of another kernel": lambda: stream.launch(SPIN, 1, 1, 1),
        "large upload": lambda: stream.upload(large),
        "staged download": lambda: stream.download(x),
        "large download": lambda: stream.download(big),
        "copy between buffers": lambda: stream.copy(x, y),
        "record with timing": lambda: stream.record(timing=True),
        "record into": lambda: stream.record(event=pool.acquire_nowait()),
        "wait for it": lambda: other.wait(stream),
        "empty": lambda: stream.empty(1 << 20),
        "pinned": lambda: device.pinned(1 << 20),
        "unified": lambda: device.unified(1 << 10),
        "stream": lambda: device.stream(),
        "statistics": lambda: (device.statistics(), stream.statistics(), device.memory.statistics()),
        "free": lambda: stream.empty(100).free(),
        "free used": y.free,
        "free managed": managed.free,
        "free pinned": pinned.free,
        "abandon": lambda: stream.synchronize().abandon(),
        "handle": lambda: repr(stream),
    }
    for name, verb in verbs.items():
        kept.append(verb())
        assert latch.running == 1, f"{name} has waited for the kernel"
        await asyncio.sleep(0)
        assert latch.running == 1, f"the loop has waited for the kernel after {name}"

    enqueued = asyncio.Event()

    async def borrow() -> None:
        async with device.pin(own) as borrowed:
            stream.copy(x, borrowed)
            enqueued.set()

    borrowing = asyncio.create_task(borrow())
    await quickly(enqueued.wait())  # a stream that is being closed would refuse the copy
    closing = asyncio.create_task(stream.aclose())
    for thing in kept:
        if isinstance(thing, Stream):
            await thing.aclose()
    await turns()
    assert latch.running == 1, "the loop has waited for the kernel"
    assert not borrowing.done()
    assert not closing.done()
    latch.release()
    await quickly(closing)
    await quickly(borrowing)
    await quickly(device.drain())
    for thing in kept:
        if isinstance(thing, Operation) and thing.state != "abandoned":
            assert thing.state == "done", thing


async def test_burst_without_awaits_does_not_block(stream: Stream, latch: Latch) -> None:
    """5 000 launches while a kernel holds the stream: more than any hardware queue has places for."""
    buffer = await stream.upload(np.zeros(1, np.uint32))
    await stream.launch(AFFINE, 1, 1, buffer, 1, 1, 1)
    latch.hold(stream)
    await latch.held()
    for index in range(5000):
        stream.launch(AFFINE, 1, 1, buffer, 1, 1, 1)
        assert latch.running == 1, f"launch {index} has waited for the kernel"
        if index % 256 == 0:
            await asyncio.sleep(0)
    latch.release()
    assert (await quickly(stream.download(buffer)))[0] == 5001


async def test_latch_is_released_by_the_loop_itself(stream: Stream, device: Device) -> None:
    """Were a call to block, nothing could release what it waits for."""
    with Latch(device) as latch:
        latch.hold(stream)
        await latch.held()
        asyncio.get_running_loop().call_later(0.01, latch.release)
        buffer = stream.empty(1000)
        stream.fill(buffer, 3)
        assert (await quickly(stream.download(buffer)) == 3).all()
