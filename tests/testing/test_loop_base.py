"""`SimulatedLoop` behaves like asyncio's loop, apart from time and order, and refuses some methods."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import logging
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiocuda._base._clock import running_clock
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.testing import SimulatedLoop
from tests.task_factories import each_factory, factory_of_tasks

# -- tasks, contexts, asynchronous generators ----------------------------------------------------------------------


def test_context_goes_along(loop: SimulatedLoop) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    context = contextvars.copy_context()
    context.run(variable.set, 1)
    seen: list[int] = []

    def look() -> None:
        seen.append(variable.get())

    async def task() -> None:
        look()

    async def main() -> None:
        loop.call_soon(look, context=context)
        loop.call_later(0.001, look, context=context)
        loop.call_soon_threadsafe(look, context=context)
        await asyncio.sleep(0.002)
        await loop.create_task(task(), context=context)
        variable.set(2)
        await asyncio.to_thread(look)
        await loop.run_in_executor(None, look)

    loop.run_until_complete(main())
    assert seen == [1, 1, 1, 1, 2, 0]


def test_tasks_are_numbered_by_the_loop(loop: SimulatedLoop) -> None:
    async def main() -> list[str]:
        tasks = [loop.create_task(asyncio.sleep(0), name=name) for name in (None, "mine", None)]
        await asyncio.gather(*tasks)
        return [task.get_name() for task in tasks]

    assert loop.run_until_complete(main()) == ["Task-2", "mine", "Task-4"]


def test_task_factory_makes_the_tasks(loop: SimulatedLoop) -> None:
    made: list[dict[str, Any]] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(options)
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> str:
        await loop.create_task(asyncio.sleep(0), context=context)
        task = loop.create_task(asyncio.sleep(0), name="named")
        await task
        return str(task.get_name())

    context = contextvars.copy_context()
    loop.set_task_factory(factory)
    assert loop.get_task_factory() is factory
    assert loop.run_until_complete(main()) == "named"
    assert made == [{}, {"context": context}, {}]
    with pytest.raises(TypeError, match="must be a callable or None"):
        loop.set_task_factory(1)  # type: ignore[arg-type]
    loop.set_task_factory(None)


if sys.version_info >= (3, 12):

    def test_eager_tasks_start_immediately(loop: SimulatedLoop) -> None:
        ran: list[str] = []

        async def child() -> None:
            ran.append("child")

        async def main() -> None:
            task = loop.create_task(child(), name="eager")
            ran.append(f"main {task.done()} {task.get_name()}")

        loop.set_task_factory(asyncio.eager_task_factory)
        loop.run_until_complete(main())
        assert ran == ["child", "main True eager"]

    def test_run_takes_it() -> None:
        async def main() -> type:
            return type(asyncio.get_running_loop())

        assert asyncio.run(main(), loop_factory=SimulatedLoop) is SimulatedLoop


def test_asynchronous_generators_are_shut_down_in_order(runner: asyncio.Runner) -> None:
    closed: list[int] = []

    async def numbers(number: int) -> AsyncIterator[int]:
        try:
            yield number
        finally:
            await asyncio.sleep(0)
            closed.append(number)

    async def main() -> None:
        for number in range(20):
            generator = numbers(number)
            kept.append(generator)
            await anext(generator)

    kept: list[AsyncIterator[int]] = []
    runner.run(main())
    runner.close()
    assert closed == list(range(20))


def test_asynchronous_generator_that_is_dropped_is_closed(loop: SimulatedLoop) -> None:
    closed: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.append("closed")

    async def main() -> None:
        async for _ in numbers():
            break
        gc.collect()
        await asyncio.sleep(0.001)

    loop.run_until_complete(main())
    assert closed == ["closed"]
    assert sys.get_asyncgen_hooks() == (None, None)


# -- no threads ----------------------------------------------------------------------------------------------------


def test_executor_is_a_later_turn(loop: SimulatedLoop) -> None:
    def look() -> tuple[int, Any]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return threading.get_ident(), running_clock()

    async def main() -> None:
        assert await asyncio.to_thread(look) == (threading.get_ident(), loop.clock)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await loop.run_in_executor(None, next, iter(()))
        ran: list[int] = []
        future = loop.run_in_executor(None, ran.append, 1)
        future.cancel()
        await asyncio.sleep(0.001)
        assert ran == []
        await loop.shutdown_default_executor()
        with pytest.raises(RuntimeError, match="Executor shutdown has been called"):
            loop.run_in_executor(None, print)

    loop.run_until_complete(main())


def test_other_threads_are_refused(loop: SimulatedLoop) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(NotImplementedError, match="has no threads; pass None"):
            loop.run_in_executor(pool, print)
        with pytest.raises(NotImplementedError, match="set_default_executor: a simulated loop has no threads"):
            loop.set_default_executor(pool)
        with pytest.raises(RuntimeError, match=r"from thread 'ThreadPool.*: a simulated loop has no threads"):
            pool.submit(loop.call_soon_threadsafe, print).result()


def test_loop_belongs_to_the_thread_that_runs_it(loop: SimulatedLoop) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(loop.run_until_complete, asyncio.sleep(0)).result()
        with pytest.raises(RuntimeError, match="from thread 'MainThread'"):
            loop.call_soon_threadsafe(print)


REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("add_reader", (0, print), "use the simulated driver"),
    ("remove_writer", (0,), "use the simulated driver"),
    ("create_connection", (None, "localhost", 80), r"use an asyncio\.Queue"),
    ("getaddrinfo", ("localhost", 80), r"use an asyncio\.Queue"),
    ("sock_recv", (None, 1), r"use an asyncio\.Queue"),
    ("subprocess_exec", (None, "true"), "use a coroutine in its place"),
    ("add_signal_handler", (2, print), r"use signal\.signal"),
]


@pytest.mark.parametrize(("name", "arguments", "cure"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_unsupported_method_is_refused(loop: SimulatedLoop, name: str, arguments: tuple[Any, ...], cure: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name}: .*{cure}"):
        getattr(loop, name)(*arguments)


def test_every_method_of_asyncio_is_defined() -> None:
    for name, value in vars(asyncio.AbstractEventLoop).items():
        if callable(value) and not name.startswith("__"):
            assert getattr(SimulatedLoop, name) is not value, name


# -- errors, debugging ---------------------------------------------------------------------------------------------


def test_exception_handler_runs_in_the_context_of_the_task(loop: SimulatedLoop) -> None:
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: told.append(context))
    assert loop.get_exception_handler() is not None
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert [type(context["exception"]) for context in told] == [ZeroDivisionError]
    with pytest.raises(TypeError, match="A callable object or None is expected, got 1"):
        loop.set_exception_handler(1)  # type: ignore[arg-type]


def test_errors_are_logged_without_a_handler(loop: SimulatedLoop, caplog: pytest.LogCaptureFixture) -> None:
    def fail(loop: object, context: object) -> None:
        raise KeyError("the handler's own")

    loop.call_exception_handler({"message": "plain", "thing": 1})
    loop.set_exception_handler(fail)
    loop.call_exception_handler({"message": "with a handler that fails"})
    assert [record.getMessage().splitlines() for record in caplog.records] == [
        ["plain", "thing: 1"],
        ["Unhandled error in exception handler", "context: {'message': 'with a handler that fails'}"],
    ]
    assert caplog.records[1].exc_info is not None
    assert caplog.records[1].exc_info[0] is KeyError


def test_debug_mode_logs_place_and_duration(loop: SimulatedLoop, caplog: pytest.LogCaptureFixture) -> None:
    def dawdle() -> None:
        loop.clock.spend(200_000_000)
        raise ZeroDivisionError

    loop.set_debug(True)
    assert loop.get_debug()
    loop.call_soon(dawdle)
    loop.call_soon(loop.stop)
    with caplog.at_level(logging.WARNING):
        loop.run_forever()
    failed, slow = (record.getMessage() for record in caplog.records)
    assert "Exception in callback" in failed
    assert "Object created at (most recent call last):" in failed
    assert "dawdle" in slow
    assert slow.endswith("took 0.200 seconds of virtual time")


def test_debug_mode_refuses_what_is_no_callback(loop: SimulatedLoop) -> None:
    async def coroutine() -> None: ...

    loop.set_debug(True)
    with pytest.raises(TypeError, match=r"coroutines cannot be used with call_soon\(\)"):
        loop.call_soon(coroutine)
    with pytest.raises(TypeError, match=r"a callable object was expected by call_later\(\), got 1"):
        loop.call_later(0, 1)  # type: ignore[arg-type]
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="in another thread"):
        pool.submit(loop.call_soon, print).result()


def test_debug_mode_tracks_origins_while_it_runs(loop: SimulatedLoop) -> None:
    async def main() -> list[int]:
        depths = []
        for enabled in (True, False, True):
            loop.set_debug(enabled)
            depths.append(sys.get_coroutine_origin_tracking_depth())
        return depths

    assert loop.run_until_complete(main()) == [10, 0, 10]
    assert sys.get_coroutine_origin_tracking_depth() == 0


@each_factory
def test_each_task_factory_serves_objects_in_virtual_time(loop: SimulatedLoop, factory: str) -> None:
    async def answer(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(1.0)
        return batch.items

    async def main() -> list[int]:
        with factory_of_tasks(factory):
            async with MicroBatcher(answer, max_batch_size=2) as batcher:
                requests = [batcher.submit_nowait(number) for number in range(6)]
                return [await request for request in requests]

    assert loop.run_until_complete(main()) == list(range(6))
