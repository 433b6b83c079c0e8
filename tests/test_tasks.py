"""Tasks of the library, with task factories of programs."""

from __future__ import annotations

import asyncio
import contextvars
import gc

import pytest

from aiocuda._base._shutdown import finish_shielded, finish_within
from aiocuda._base._tasks import start_task
from tests.task_factories import each_factory, factory_of_tasks

NUMBER: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)


async def add(number: int) -> tuple[int, int]:
    await asyncio.sleep(0)
    NUMBER.set(NUMBER.get() + number)
    return number, NUMBER.get()


@pytest.mark.asyncio
@each_factory
async def test_a_task_runs_with_each_factory(factory: str) -> None:
    with factory_of_tasks(factory):
        task = start_task(add, 1, name="the name")
        assert await task == (1, 1)
        assert not isinstance(task, asyncio.Task) or task.get_name() == "the name"
        assert NUMBER.get() == 0  # a copy of the context
        async with asyncio.TaskGroup() as group:
            tasks = [start_task(add, number, group=group) for number in range(3)]
        assert [task.result() for task in tasks] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.asyncio
@each_factory
async def test_a_task_runs_in_a_copy_of_the_given_context(factory: str) -> None:
    context = contextvars.copy_context()
    context.run(NUMBER.set, 10)
    with factory_of_tasks(factory):
        assert await start_task(add, 1, context=context) == (1, 11)
        assert await context.run(start_task, add, 2, context=context) == (2, 12)  # also inside of it
    assert (NUMBER.get(), context[NUMBER]) == (0, 10)


@pytest.mark.asyncio
@each_factory
async def test_work_is_finished_with_each_factory(factory: str) -> None:
    with factory_of_tasks(factory):
        assert await finish_shielded(add(1)) == (1, 1)
        assert await finish_within(60.0, add(1)) == ("done", None)


@pytest.mark.asyncio
@each_factory
async def test_a_task_that_is_cancelled_before_its_first_step_leaves_no_coroutine(factory: str) -> None:
    with factory_of_tasks(factory):
        task = start_task(add, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    del task
    gc.collect()  # a coroutine that was never awaited warns


@pytest.mark.asyncio
async def test_work_that_is_cancelled_before_it_begins_leaves_no_coroutine() -> None:
    known = asyncio.all_tasks()

    asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() - known])
    with pytest.raises(asyncio.CancelledError):
        await finish_shielded(add(1))
    gc.collect()


@pytest.mark.asyncio
async def test_a_task_of_a_group_that_has_ended_leaves_no_coroutine() -> None:
    async with asyncio.TaskGroup() as group:
        pass
    with pytest.raises(RuntimeError, match="is finished"):
        start_task(add, 1, group=group)
    gc.collect()


def test_without_a_loop_no_coroutine_is_left() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        start_task(add, 1)
    gc.collect()
