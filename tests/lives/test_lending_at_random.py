"""Random tasks borrow slots of a ring, work on random streams, and leave at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, ClosedError, Device, Operation, Slot, TripleBuffer
from aiocuda.coordination import Node
from tests.helpers import turns
from tests.pipeline.virtual import in_virtual_time, kernel

SIZE, TASKS, ITEMS = 16, 6, 12


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_no_task_finds_the_bytes_of_another_one(seed: int, given: bool) -> None:
    chance, read, nodes = random.Random(seed), 0, list[tuple[Node[Any], int]]()

    async def main(device: Device) -> None:
        streams = [device.stream() for _ in range(4)]

        async def item(ring: TripleBuffer, number: int) -> None:
            """Fill the slot's buffer and read it again, on one stream; perhaps leave other work unfinished."""
            nonlocal read
            async with ring.slot(number) as slot:
                stream = slot.stream = chance.choice(streams)
                buffer = slot.buffer("x", SIZE, np.uint32)
                await delay()
                stream.launch(kernel(chance.random()), 1, 1, 0)
                stream.fill(buffer, number)
                found = stream.download(buffer)
                await delay()
                assert set((await found).tolist()) == {number}
                read += 1
                if chance.random() < 0.3:
                    coordinator.compute(kernel(chance.random()), 1, 1, 0)
                    nodes.append((coordinator.download(buffer), number))
                leave(slot, stream.fill(buffer, 0))

        def leave(slot: Slot, operation: Operation[Any]) -> None:
            if chance.random() < 0.5:
                slot.enter("processing", until=operation)
            if chance.random() < 0.3:
                operation.abandon()

        async def delay() -> None:
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 1e-3)

        async def borrow(ring: TripleBuffer, first: int) -> None:
            for number in range(first, first + ITEMS):
                with contextlib.suppress(TimeoutError, ZeroDivisionError):
                    async with asyncio.timeout(chance.choice([None, 1e-3 * chance.random(), 5e-3])):
                        await item(ring, 1 + number)
                        if chance.random() < 0.2:
                            raise ZeroDivisionError

        buffers = {"x": (SIZE, np.uint32)}
        async with contextlib.AsyncExitStack() as stack:
            for stream in streams:
                await stack.enter_async_context(stream)
            ring = TripleBuffer(3, buffers=buffers, device=device) if given else TripleBuffer(3)
            coordinator = await stack.enter_async_context(AsyncCoordinator(device, max_in_flight=1))
            async with ring:
                await asyncio.gather(*(borrow(ring, ITEMS * task) for task in range(TASKS)))
                await coordinator.drain()
            await device.drain()
            await turns()
            assert set(ring.states) == {"free"}

    in_virtual_time(main, seed)
    assert read > 5
    assert nodes
    for node, number in nodes:
        assert set(node.result().tolist()) <= {number, 0}


@pytest.mark.parametrize("seed", range(20))
def test_tasks_that_wait_for_slots_get_them_after_one_advance(seed: int) -> None:
    """Also where operations are abandoned or end before they are named, and where tasks are cancelled."""
    chance, found = random.Random(seed), list[tuple[Operation[Any], int]]()

    async def main(device: Device) -> None:
        async with (
            device.stream() as one, device.stream() as two,
            TripleBuffer(3, buffers={"x": (SIZE, np.uint32)}, device=device) as ring,
        ):  # fmt: skip
            ring.advance()

            async def items(first: int) -> None:
                for number in range(first, first + ITEMS):
                    slot = await ring.acquire(number)
                    stream = chance.choice([one, two])
                    stream.launch(kernel(chance.random()), 1, 1, 0)
                    stream.fill(slot.buffer("x"), number)
                    operation = stream.download(slot.buffer("x"))
                    if chance.random() < 0.2:
                        operation.abandon()
                    if chance.random() < 0.2:
                        await stream.synchronize()
                    found.append((operation, number))
                    slot.enter("downloading", until=operation)
                    if chance.random() < 0.3:
                        with contextlib.suppress(ClosedError, BaseExceptionGroup):
                            ring.advance()
                    if chance.random() < 0.1:
                        waiting = asyncio.create_task(ring.reserve())
                        await asyncio.sleep(0)
                        waiting.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            ring.release(await waiting)

            await asyncio.gather(*(items(ITEMS * task) for task in range(TASKS)))

    in_virtual_time(main, seed)
    assert len(found) == TASKS * ITEMS
    for operation, number in found:
        if operation.state == "done":
            assert set(operation.result().tolist()) == {number}
