"""Awaits that a cancellation does not interrupt, and their time limits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

import aiocuda
from aiocuda._base._shutdown import end_tasks, finish_shielded, finish_within, must_end_now
from tests.helpers import Latch, Reports, quickly, until

pytestmark = pytest.mark.asyncio


class Work:
    """Something that ends when it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.ended = False
        self._error = error

    async def run(self) -> str:
        self.begun.set()
        await self.gate.wait()
        self.ended = True
        if self._error is not None:
            raise self._error
        return "done"


async def cancelled_twice(task: asyncio.Task[Any], work: Work) -> None:
    await quickly(work.begun.wait())
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    assert not work.ended


@pytest.mark.parametrize("as_task", [False, True])
async def test_the_result_comes_at_the_end(as_task: bool) -> None:
    work = Work()
    work.gate.set()
    coroutine: Coroutine[Any, Any, str] = work.run()
    assert await finish_shielded(asyncio.create_task(coroutine) if as_task else coroutine) == "done"
    failing = Work(ValueError())
    failing.gate.set()
    with pytest.raises(ValueError):  # noqa: PT011 - it is that very one
        await finish_shielded(failing.run())


async def test_a_cancellation_comes_after_the_end() -> None:
    work = Work()
    task = asyncio.create_task(finish_shielded(work.run()))
    await cancelled_twice(task, work)
    work.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)
    assert work.ended


async def test_cancellation_is_never_another_error_and_is_reported() -> None:
    """P22"""
    error = ValueError("while cancelled")
    work = Work(error)
    with Reports() as reports:
        task = asyncio.create_task(finish_shielded(work.run()))
        await cancelled_twice(task, work)
        work.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
        del task
        await until(lambda: (gc.collect(), reports.failures)[1], "the report")  # from 3.13 on it takes a turn more
        assert reports.failures == [error]


async def test_work_that_ends_within_its_time() -> None:
    work = Work()
    work.gate.set()
    assert await finish_within(3600.0, work.run()) == ("done", None)
    failing = Work(ValueError())
    failing.gate.set()
    with pytest.raises(ValueError):  # noqa: PT011 - it is that very one
        await finish_within(3600.0, failing.run())


async def test_work_that_does_not_end_within_its_time_is_cancelled() -> None:
    work = Work()
    assert await quickly(finish_within(0.01, work.run())) == ("late", None)
    await asyncio.sleep(0)
    work.gate.set()
    await asyncio.sleep(0)
    assert not work.ended


async def test_work_that_another_task_cancelled_did_not_end() -> None:
    """As asyncio does it to every task when a program ends."""
    work = Work()
    others = asyncio.all_tasks()
    waiting = asyncio.create_task(finish_within(3600.0, work.run()))
    await quickly(work.begun.wait())
    (inner,) = asyncio.all_tasks() - others - {waiting}
    inner.cancel()
    assert await quickly(waiting) == ("interrupted", None)


async def test_a_cancellation_while_work_has_its_time_is_handed_over() -> None:
    work = Work()
    task = asyncio.create_task(finish_within(3600.0, work.run()))
    await cancelled_twice(task, work)
    work.gate.set()
    ended, cancelled = await quickly(task)
    assert ended == "done"
    assert isinstance(cancelled, asyncio.CancelledError)


async def test_a_cancellation_while_a_failing_work_has_its_time_is_never_another_error() -> None:
    """P22"""
    error = ValueError("while cancelled")
    work = Work(error)
    with Reports() as reports:
        task = asyncio.create_task(finish_within(3600.0, work.run()))
        await cancelled_twice(task, work)
        work.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
        del task
        gc.collect()
        assert reports.failures == [error]


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_cancellation_while_a_device_is_left_by_an_exception(in_time: bool) -> None:
    """P22: it comes when the device has been left, with the exception as its context, and is not lost."""
    left, caught = ValueError("why the device is left"), []
    leaving = asyncio.Event()

    async def use() -> None:
        try:
            async with aiocuda.open_device(driver="host") as device:
                device.drain_timeout = 3600.0 if in_time else 0.05
                stream = device.stream()
                latch.append(Latch(device))
                latch[0].hold(stream)
                await latch[0].held()
                leaving.set()
                raise left
        except ValueError as error:
            caught.append(error)

    latch: list[Latch] = []
    task = asyncio.create_task(use())
    await quickly(leaving.wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    if in_time:
        latch[0].release()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await quickly(task)
    else:
        with pytest.warns(aiocuda.DrainTimeoutWarning), pytest.raises(asyncio.CancelledError) as cancelled:
            await quickly(task)
        latch[0].release()
    assert caught == []
    contexts: list[BaseException] = []
    error: BaseException | None = cancelled.value
    while error is not None:
        contexts.append(error)
        error = error.__context__
    assert left in contexts


async def test_who_was_torn_out_of_one_end_gets_no_time_for_the_next() -> None:
    """A loop that ends cancels all tasks once; the end that it stops often has others after it."""

    async def ends() -> tuple[list[str], bool]:
        with contextlib.suppress(asyncio.CancelledError):
            await finish_shielded(Work().run())
        return [(await finish_within(3600.0, Work().run()))[0] for _ in range(2)], must_end_now()

    others = asyncio.all_tasks()
    task = asyncio.create_task(ends())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for each in asyncio.all_tasks() - others:
        each.cancel()
    assert await quickly(task) == (["interrupted", "interrupted"], True)
    assert not must_end_now()


class Slow(Work):
    """One that takes a few turns of the loop to end, once it has been cancelled."""

    async def run(self) -> str:
        try:
            return await super().run()
        except asyncio.CancelledError:
            for _ in range(3):
                await asyncio.sleep(0)
            self.ended = True
            raise


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_all_have_ended_by_themselves_or_by_cancellation(how: str) -> None:
    quick, failing, slow = Work(), Work(ZeroDivisionError()), [Slow(), Slow()]
    works = [slow[0], quick, failing, slow[1]]
    with Reports() as reports:
        tasks = [asyncio.create_task(work.run()) for work in works]
        for work in (quick, failing):
            work.gate.set()
        waiting = asyncio.create_task(end_tasks(tasks, 0.01 if how == "late" else None))
        if how == "late":
            assert await quickly(waiting) == {tasks[0], tasks[3]}
        else:
            await until(lambda: quick.ended and failing.ended)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await quickly(waiting)
        assert all(work.ended for work in works)
        assert [task.cancelled() for task in tasks] == [True, False, False, True]
        assert await end_tasks(tasks[1:3], 0.0) == await end_tasks([]) == set()
        del tasks, waiting
        gc.collect()
        assert reports.contexts == []  # the waiting task reads their failures
