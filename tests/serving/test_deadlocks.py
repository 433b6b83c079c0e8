"""A batch function that awaits its own batcher: it gets `DeadlockError` if no place can become free, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiocuda import DeadlockError, Device, Pipeline, Slot, Stage
from aiocuda.serving import Batch, DeadlineError, MicroBatcher
from tests.helpers import quickly, turns, until

pytestmark = pytest.mark.asyncio


async def in_a_task_group(request: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await request

    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(wait())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return task.result()


async def by_wait(request: Awaitable[Any]) -> Any:
    task = asyncio.ensure_future(request)
    await asyncio.wait({task})
    return task.result()


async def in_a_task_of_a_task(request: Awaitable[Any]) -> Any:
    return await asyncio.gather(in_a_task_group(request))


async def in_anyio(request: Awaitable[Any]) -> Any:
    anyio = pytest.importorskip("anyio")
    found: list[Any] = []

    async def wait() -> None:
        found.append(await request)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return found[0]


#: Ways in which a function may wait for a call of `submit`.
WAYS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "await": lambda request: request,
    "task": lambda request: asyncio.create_task(request),
    "gather": lambda request: asyncio.gather(request, asyncio.sleep(0)),
    "wait_for": lambda request: asyncio.wait_for(request, None),
    "wait_for with a limit": lambda request: asyncio.wait_for(request, 1e6),
    "wait": by_wait,
    "shield": lambda request: asyncio.shield(request),
    "task group": in_a_task_group,
    "task of a task": in_a_task_of_a_task,
    "anyio": in_anyio,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("places", [1, 2])
async def test_batch_that_awaits_its_batcher_fails_when_all_places_are_held_so(way: str, places: int) -> None:
    """Item n awaits item n - 1. It waited for ever."""

    async def countdown(batch: Batch[int]) -> list[int]:
        (number,) = batch.items
        if number:
            await WAYS[way](batcher.submit(number - 1))
        return batch.items

    batcher = MicroBatcher(countdown, max_batch_size=1, batch_wait_timeout_s=0, max_concurrent_batches=places)
    async with batcher:
        assert await quickly(batcher.submit(places - 1)) == places - 1
        with pytest.raises(
            DeadlockError, match=r"that batch .* awaits of <MicroBatcher .* use another batcher"
        ) as caught:
            await quickly(batcher.submit(places))
        assert len(caught.value.path) >= places
        assert await quickly(batcher.submit(0)) == 0
        await turns(3)
        statistics = batcher.statistics()
        assert (statistics.queued, statistics.running) == (0, 0)


async def test_function_goes_on_after_the_error() -> None:
    async def infer(batch: Batch[int]) -> list[Any]:
        if batch.items[0] == 0:
            return batch.items
        with pytest.raises(DeadlockError):
            await batcher.submit(0)
        return ["refused"]

    async with MicroBatcher(infer, max_batch_size=1, batch_wait_timeout_s=0) as batcher:
        assert await quickly(batcher.submit(1)) == "refused"


async def test_requests_that_no_batch_awaits_are_not_refused() -> None:
    later: list[Any] = []
    hold = asyncio.Event()

    async def infer(batch: Batch[int]) -> list[int]:
        if batch.items[0] == 1:
            later.append(batcher.submit_nowait(10))
            later.append(asyncio.create_task(batcher.submit(20)))
            later[-1].add_done_callback(set[Any]().discard)
            await hold.wait()
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, batch_wait_timeout_s=0) as batcher:
        first = batcher.submit_nowait(1)
        await until(lambda: len(later) == 2)
        await turns(5)
        hold.set()
        assert await quickly(asyncio.gather(first, *later)) == [1, 10, 20]


async def test_request_with_a_deadline_is_not_refused() -> None:
    async def infer(batch: Batch[int]) -> list[int]:
        if batch.items[0]:
            with pytest.raises(DeadlineError):
                await batcher.submit(0, deadline_s=0.02)
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, batch_wait_timeout_s=0) as batcher:
        assert await quickly(batcher.submit(1)) == 1


async def test_batch_that_still_works_ends_the_wait_of_the_other() -> None:
    hold = asyncio.Event()

    async def infer(batch: Batch[int]) -> list[int]:
        if batch.items[0] == 1:
            assert await batcher.submit(0) == 0
        elif batch.items[0] == 2:
            await hold.wait()
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, batch_wait_timeout_s=0, max_concurrent_batches=2) as batcher:
        works, waits = batcher.submit_nowait(2), batcher.submit_nowait(1)
        await turns(10)
        assert not waits.done()
        hold.set()
        assert await quickly(asyncio.gather(works, waits)) == [2, 1]


async def test_two_batchers_that_await_each_other() -> None:
    async def there(batch: Batch[int]) -> list[Any]:
        return [await second.submit(item) for item in batch.items]

    async def back(batch: Batch[int]) -> list[Any]:
        return [await first.submit(item) for item in batch.items]

    async with (
        MicroBatcher(there, max_batch_size=1, batch_wait_timeout_s=0) as first,
        MicroBatcher(back, max_batch_size=1, batch_wait_timeout_s=0) as second,
    ):
        with pytest.raises(DeadlockError) as caught:
            await quickly(first.submit(1))
        assert len(caught.value.path) == 2


async def test_batcher_and_pipeline_that_await_each_other(device: Device) -> None:
    async def ask(slot: Slot) -> Any:
        return await batcher.submit(slot.item)

    async def infer(batch: Batch[int]) -> list[Any]:
        return [await pipeline.execute_iteration(item) for item in batch.items]

    async with (
        Pipeline(device, [Stage("ask", ask)], 2) as pipeline,
        MicroBatcher(infer, max_batch_size=1, batch_wait_timeout_s=0) as batcher,
    ):
        with pytest.raises(DeadlockError, match="in batch 0"):
            await quickly(pipeline.execute_iteration(1))
