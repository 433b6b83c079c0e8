"""What `aiocuda.wait` uses ends with its loop: descriptors, threads, streams and loops stay constant."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import aiocuda
from aiocuda.completion import _wait
from aiocuda.completion._event_watch import EventWatch
from aiocuda.driver.cuda._driver import CudaDriver
from tests.core.test_over_libcuda import NOT_READY, fake, library
from tests.driver.cuda.fake import Fake
from tests.helpers import UVLOOP, quickly, until

__all__ = ["fake", "library"]  # fixtures

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")

#: Loops of a test: one after another.
MANY = 1000


class Stream:
    """A stream of any library."""

    def __init__(self, handle: int = 0x5EED0) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@pytest.fixture
def driver(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    made = CudaDriver(fake.path)
    monkeypatch.setattr(_wait, "_cuda", [made])
    yield made
    fake.release()


async def some_waits() -> None:
    asked = iter([False, True])
    await aiocuda.wait([Stream(), Stream(0), lambda: next(asked, True)])


async def waits_that_are_left() -> None:
    """Waits that nobody awaits, that were cancelled, and that tasks await when the loop ends."""
    aiocuda.wait(Stream())
    for thing in (Stream(), lambda: False):
        task = asyncio.ensure_future(aiocuda.wait(thing).wait())
        await asyncio.sleep(0)
        task.cancel()
    await some_waits()


def by_run() -> None:
    asyncio.run(some_waits())


def by_run_with_waits_that_are_left() -> None:
    asyncio.run(waits_that_are_left())


def by_runner() -> None:
    with asyncio.Runner() as runner:
        runner.run(some_waits())
        runner.run(some_waits())


def by_uvloop() -> None:
    with asyncio.Runner(loop_factory=UVLOOP) as runner:
        runner.run(some_waits())


def closed_by_hand() -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(some_waits())
    loop.close()


def uvloop_closed_by_hand() -> None:
    assert UVLOOP is not None
    loop = UVLOOP()
    loop.run_until_complete(some_waits())
    loop.close()


def with_generators_by_hand() -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(some_waits())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(some_waits())
    loop.close()


def stopped_and_dropped() -> None:
    """The loop is never closed. Its own warning is the program's."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(some_waits())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del loop
        gc.collect()


def in_a_thread() -> None:
    thread = threading.Thread(target=by_run)
    thread.start()
    thread.join()


KINDS = [
    by_run, by_run_with_waits_that_are_left, by_runner, closed_by_hand, with_generators_by_hand, in_a_thread,
    *([] if UVLOOP is None else [by_uvloop, uvloop_closed_by_hand]),
]  # fmt: skip


def in_use(driver: CudaDriver) -> dict[str, int]:
    gc.collect()
    counts = driver.statistics()
    loops = sum(isinstance(each, asyncio.AbstractEventLoop) for each in gc.get_objects())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "loops": loops,
        **{name: counts[name] for name in ("streams", "imported", "notifiers", "events")},
    }  # fmt: skip


def constant(driver: CudaDriver, run: Callable[[], None], times: int, most: int = 0) -> None:
    """Run loops, and compare what is in use. So many threads, and notifiers and events of loops before, may be more."""
    for _ in range(3):
        run()
    before = in_use(driver)
    for _ in range(times):
        run()
    after = in_use(driver)
    for name in ("notifiers", "events", "threads"):
        assert after.pop(name) <= before.pop(name) + most
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("run", KINDS)
def test_a_thousand_loops_in_a_row(driver: CudaDriver, fake: Fake, run: Callable[[], None]) -> None:
    constant(driver, run, MANY)


@pytest.mark.slow
def test_loops_that_are_never_closed(driver: CudaDriver, fake: Fake) -> None:
    constant(driver, stopped_and_dropped, 100)


@pytest.mark.slow
def test_loops_of_several_threads(driver: CudaDriver, fake: Fake) -> None:
    def run() -> None:
        threads = [threading.Thread(target=by_run_with_waits_that_are_left) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run()
    before = in_use(driver)
    for _ in range(20):
        run()
    after = in_use(driver)
    for name in ("notifiers", "events"):
        del after[name], before[name]
    # Of as many ports as loops have lived at one time.
    assert after.pop("descriptors") <= before.pop("descriptors") + 8 * 3
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("first", ["wait", "device"])
def test_loops_with_an_open_device(driver: CudaDriver, fake: Fake, first: str) -> None:
    """It shares the notifiers of the waits."""

    async def main() -> None:
        if first == "wait":
            await some_waits()
        async with aiocuda.open_device(driver=driver, streams_ahead=0) as device, device.stream() as stream:
            await aiocuda.wait([stream, Stream()])
        await some_waits()

    constant(driver, lambda: asyncio.run(main()), 200, most=8)  # threads of the driver


def test_loops_with_notifiers(driver: CudaDriver, fake: Fake) -> None:
    """A notifier that is armed when the loop ends goes to the next loop."""

    async def main() -> None:
        fake.answer("cuEventQuery", NOT_READY)
        fake.hold()
        fake.forget()  # its log holds a limited number of calls
        task = asyncio.ensure_future(aiocuda.wait(Stream()).wait())
        await until(lambda: fake.calls("cuLaunchHostFunc"))
        fake.answer("cuEventQuery", 0)
        fake.release()
        await quickly(task)

    constant(driver, lambda: asyncio.run(main()), 50, most=24)  # as many as can be armed


def test_loop_that_ends_while_a_task_waits(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)

    async def main() -> None:
        main.tasks = [  # type: ignore[attr-defined]
            asyncio.ensure_future(aiocuda.wait(thing).wait()) for thing in (Stream(), lambda: False)
        ]
        watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
        await until(lambda: watch._notifiers.armed)  # also by the loop before

    def run() -> None:
        fake.hold()
        fake.forget()
        asyncio.run(main())
        fake.release()

    constant(driver, run, 20, most=24)  # as many as can be armed: `hold` may come before they have been released
    assert all(task.cancelled() for task in main.tasks)  # type: ignore[attr-defined]


def test_wait_in_a_generator_that_ends_with_the_loop(driver: CudaDriver, fake: Fake) -> None:
    ended = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await some_waits()
            await asyncio.sleep(0)
            await some_waits()
            ended.append(True)

    async def main() -> None:
        main.kept = numbers()  # type: ignore[attr-defined]
        async for _ in main.kept:  # type: ignore[attr-defined]
            break
        await some_waits()

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asyncio.run(main())

    constant(driver, run, 20)
    assert len(ended) == 23


def test_loop_is_collected_with_its_waits(driver: CudaDriver, fake: Fake) -> None:
    loop = asyncio.new_event_loop()

    async def main() -> Any:
        await some_waits()
        return aiocuda.wait(Stream())

    loop.run_until_complete(main())
    gone = weakref.ref(loop)
    loop.close()
    del loop
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child(driver: CudaDriver, fake: Fake) -> None:
    """CUDA does not work in it. Functions are asked, also where the parent's loop has a poller."""

    async def in_child() -> None:
        await quickly(aiocuda.wait(lambda: True))
        with pytest.raises(aiocuda.errors.ForkedProcessError):
            aiocuda.wait(Stream())

    async def main() -> int:
        await some_waits()
        kept = aiocuda.wait(Stream())
        child = os.fork()
        if child == 0:
            try:
                code = 1
                asyncio._set_running_loop(None)
                threading.Thread(target=lambda: (asyncio.run(in_child()), results.append(0))).start()
                for thread in threading.enumerate():
                    if thread is not threading.current_thread() and not thread.daemon:
                        thread.join()
                del kept
                gc.collect()
                code = results[0]
            finally:
                os._exit(code)
        await some_waits()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222 - a child of a few milliseconds

    results: list[int] = []
    assert asyncio.run(main()) == 0
