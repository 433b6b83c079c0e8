"""`aiocuda.wait` for objects of other libraries, on the CUDA driver: a recording libcuda answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

import aiocuda
from aiocuda import DeviceFault, UnsupportedError
from aiocuda._base._wakeups import MOST_PER_TURN
from aiocuda.completion import _wait
from aiocuda.completion._event_watch import EventWatch
from aiocuda.driver.cuda._driver import CudaDriver
from tests.core.test_over_libcuda import ILLEGAL_ADDRESS, NOT_READY, fake, library
from tests.driver.cuda.fake import Fake
from tests.helpers import Reports, quickly, turns, until

__all__ = ["fake", "library"]  # fixtures

pytestmark = pytest.mark.asyncio

STREAM, OTHER, EVENT = 0x5EED0, 0x5EED8, 0xE7E90
CAPTURE_IMPLICIT = 906


class Stream:
    """A stream of any library."""

    def __init__(self, handle: int = STREAM) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@pytest.fixture
def driver(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    made = CudaDriver(fake.path)
    monkeypatch.setattr(_wait, "_cuda", [made])
    yield made
    fake.release()


async def started(*waits: Any) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(one.wait()) for one in waits]
    await turns(2)
    return tasks


async def test_event_is_recorded_before_the_call_returns(driver: CudaDriver, fake: Fake) -> None:
    waiting = aiocuda.wait(Stream())
    record = fake.only("cuEventRecord")
    assert record.arguments[1] == STREAM
    assert await quickly(waiting) is None
    assert fake.calls("cuEventQuery")[-1].starts(record.arguments[0])
    assert not driver.statistics()["imported"]
    assert not fake.calls("cuMemAllocFromPoolAsync")
    assert not fake.calls("cuStreamCreateWithPriority")


@pytest.mark.parametrize("handle", [0, 1])
async def test_default_stream_is_that_of_the_current_device(driver: CudaDriver, fake: Fake, handle: int) -> None:
    await quickly(aiocuda.wait(Stream(handle)))
    record = fake.only("cuEventRecord")
    assert record.arguments[1] == 1  # CU_STREAM_LEGACY
    assert record.context


async def test_device_of_a_stream_is_asked_for(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuDeviceGetCount", 3)
    fake.value("cuStreamGetDevice", 2)
    fake.value("cuCtxGetDevice", 1)
    await quickly(aiocuda.wait(Stream()))
    assert list(driver.open_devices) == [2]
    fake.push(77)
    await quickly(aiocuda.wait(Stream(0)))
    assert list(driver.open_devices) == [2, 1]


async def test_waits_of_one_call_and_one_stream_share_an_event(driver: CudaDriver, fake: Fake) -> None:
    await quickly(aiocuda.wait([Stream(), Stream(OTHER), Stream()]))
    assert len(fake.calls("cuEventRecord")) == 2


async def test_each_call_records_an_event(driver: CudaDriver, fake: Fake) -> None:
    """In one iteration of the loop, too: PyTorch may have enqueued work between the calls."""
    first, second = aiocuda.wait(Stream()), aiocuda.wait(Stream())
    events = [call.arguments[0] for call in fake.calls("cuEventRecord")]
    assert len(set(events)) == 2
    await quickly(asyncio.gather(first.wait(), second.wait()))


async def test_notifier_ends_a_wait(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    (task,) = await started(aiocuda.wait(Stream()))
    await until(lambda: fake.calls("cuLaunchHostFunc"))
    assert not task.done()
    fake.answer("cuEventQuery", 0)
    fake.release()
    assert await quickly(task) is None


async def test_waits_of_one_stream_have_one_notifier_and_end_in_order(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    ended: list[int] = []
    waits = [aiocuda.wait(Stream()) for _ in range(50)]
    for number, one in enumerate(waits):
        one.add_done_callback(functools.partial(lambda number, _: ended.append(number), number))
    await until(lambda: fake.calls("cuLaunchHostFunc"))
    await turns()
    assert len(fake.calls("cuLaunchHostFunc")) == 1
    fake.answer("cuEventQuery", 0)
    await until(lambda: len(ended) == 50)
    assert ended == list(range(50))


async def test_later_wait_of_a_stream_is_asked_when_the_earlier_one_is_given_up(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    first, second = await started(aiocuda.wait(Stream()), aiocuda.wait(Stream()))
    await until(lambda: fake.calls("cuLaunchHostFunc"))
    first.cancel()
    await turns()
    fake.answer("cuEventQuery", 0)
    assert await quickly(second) is None
    assert first.cancelled()


async def test_lost_notifier_delays_nothing(driver: CudaDriver, fake: Fake) -> None:
    """The alarm queries, and the notifier is used again when it comes at last."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    (task,) = await started(aiocuda.wait(Stream()))
    await until(lambda: fake.calls("cuLaunchHostFunc"))
    fake.answer("cuEventQuery", 0)
    assert await quickly(task) is None
    fake.release()


async def test_more_streams_than_notifiers(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    tasks = await started(*[aiocuda.wait(Stream(STREAM + 8 * number)) for number in range(60)])
    await until(lambda: len(fake.calls("cuLaunchHostFunc")) == 24)
    await turns()
    fake.answer("cuEventQuery", 0)
    await quickly(asyncio.gather(*tasks))


async def test_turn_of_the_loop_queries_a_limited_number_of_streams(driver: CudaDriver, fake: Fake) -> None:
    """The others are queried in the next turns."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    streams = 3 * MOST_PER_TURN
    tasks = await started(*[aiocuda.wait(Stream(STREAM + 16 * number)) for number in range(streams)])
    watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
    await until(lambda: not watch._spinning)
    most = 0
    queried: set[int] = set()
    while len(queried) < streams:
        fake.forget()
        await asyncio.sleep(0)
        events = [call.arguments[0] for call in fake.calls("cuEventQuery")]
        most = max(most, len(events))
        queried.update(events)
    assert 0 < most <= MOST_PER_TURN + 1  # that of the watchdog
    fake.answer("cuEventQuery", 0)
    await quickly(asyncio.gather(*tasks))


async def test_ctrl_c_while_the_timer_queries(driver: CudaDriver, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other streams are still queried, where no notifier comes."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    query = driver.event_query
    unfinished: list[int] = []
    interrupted: list[int] = []

    def interrupt(event: int) -> bool:
        if not interrupted:
            interrupted.append(event)
            raise KeyboardInterrupt
        return event not in unfinished and query(event)

    async def main() -> list[asyncio.Task[None]]:
        waits: list[Any] = [aiocuda.wait(Stream(STREAM + 16 * number)) for number in range(3)]
        unfinished.append(waits[0].lease.handle)
        tasks = await started(*waits)
        await until(lambda: len(fake.calls("cuLaunchHostFunc")) == 3)
        return tasks

    def run() -> None:
        loop = asyncio.new_event_loop()
        tasks = loop.run_until_complete(main())
        monkeypatch.setattr(driver, "event_query", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.sleep(10))
        fake.answer("cuEventQuery", 0)
        loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks[1:]), 10))
        unfinished.clear()
        loop.run_until_complete(asyncio.wait_for(tasks[0], 10))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    await asyncio.to_thread(run)


async def test_event_of_another_library_is_waited_for_without_a_stream(driver: CudaDriver, fake: Fake) -> None:
    watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
    waiting = watch.after_event(driver.event_import(0, EVENT), EVENT, None)
    assert waiting.done()
    assert [call.arguments[0] for call in fake.calls("cuEventQuery")] == [EVENT]
    assert not driver.events
    assert not fake.calls("cuEventDestroy")
    assert not fake.calls("cuEventRecord")


async def test_event_that_is_recorded_again_meanwhile(driver: CudaDriver, fake: Fake) -> None:
    """The notifier was armed for the recording of the call: queries now say that a later one is not done."""
    watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    waiting = watch.after_event(driver.event_import(0, EVENT), EVENT, None)
    assert fake.calls("cuStreamWaitEvent")[-1].arguments[1] == EVENT
    (task,) = await started(waiting)
    await turns()
    assert not task.done()
    fake.release()
    assert await quickly(task) is None
    assert not driver.events


async def test_cancelled_wait_leaves_nothing(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    for _ in range(5):
        tasks = await started(*[aiocuda.wait(Stream()) for _ in range(4)])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks, task
        await turns(2)
        gc.collect()
    assert driver.statistics()["events"] == 4
    assert not EventWatch.of(driver, 0, asyncio.get_running_loop()).is_used
    before = len(fake.calls("cuEventQuery"))
    await turns()
    assert len(fake.calls("cuEventQuery")) == before


async def test_timeout(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    with pytest.raises(TimeoutError, match=r"^a tests.*\.Stream has not finished within 0.01 s"):
        await aiocuda.wait(Stream(), timeout=0.01)


def made(driver: CudaDriver, kind: str) -> Any:
    """Return a wait."""
    if kind == "an event":
        watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
        return watch.after_event(driver.event_import(0, EVENT), EVENT, None)
    return aiocuda.wait([Stream(), lambda: True] if kind == "a list" else Stream())


@pytest.mark.parametrize("kind", ["a stream", "an event", "a list", "cancelled", "cancelled and kept"])
@pytest.mark.parametrize("opened", [False, True], ids=["alone", "beside a device"])
async def test_waits_that_are_given_up_behind_one_kernel_hold_one_notifier(
    driver: CudaDriver, fake: Fake, caplog: pytest.LogCaptureFixture, kind: str, opened: bool
) -> None:
    kept = []
    async with contextlib.AsyncExitStack() as stack:
        if opened:
            await stack.enter_async_context(aiocuda.open_device(driver=driver))
        pool = EventWatch.of(driver, 0, asyncio.get_running_loop())._notifiers
        fake.answer("cuEventQuery", NOT_READY)
        fake.hold()
        (first,) = await started(made(driver, kind))
        await until(lambda: pool.armed)
        first.cancel()
        await turns(2)
        del first  # its traceback holds the wait
        before = in_use(driver)
        for _ in range(100):
            waiting = made(driver, kind)
            if "cancelled" not in kind:
                waiting.limit(0.003)
            if kind == "cancelled and kept":
                kept.append(waiting)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting.wait(), 0.003 if "cancelled" in kind else None)
            del waiting
            fake.forget()  # its log holds a limited number of calls
        after = in_use(driver)
        assert after.pop("events") <= before.pop("events") + len(kept) + 1  # that of the last wait
        assert after == before
        assert len(pool.armed) == 1
        assert not pool.quarantined
        assert not [record.message for record in caplog.records if "notification_lost" in record.message]
        fake.release()
        await until(lambda: not pool.armed)
        assert await quickly(made(driver, kind)) is None  # by its notifier alone
        assert fake.calls("cuLaunchHostFunc")


def in_use(driver: CudaDriver) -> dict[str, int]:
    gc.collect()
    counts = driver.statistics()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0,
        **{name: counts[name] for name in ("streams", "imported", "notifiers", "events")},
    }


async def test_wait_behind_one_that_was_given_up_ends_by_a_notifier(driver: CudaDriver, fake: Fake) -> None:
    """It gets one when that of the earlier wait has come."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    first, second = await started(aiocuda.wait(Stream()), aiocuda.wait(Stream()))
    await until(lambda: fake.calls("cuLaunchHostFunc"))
    first.cancel()
    await turns()
    assert len(fake.calls("cuLaunchHostFunc")) == 1
    assert not second.done()
    fake.release()
    assert await quickly(second) is None
    assert len(fake.calls("cuLaunchHostFunc")) == 2


async def test_notifier_that_stays_out_after_its_event_is_replaced(driver: CudaDriver, fake: Fake) -> None:
    watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
    fake.hold()
    for _ in range(2):
        fake.answer("cuEventQuery", NOT_READY)
        (task,) = await started(aiocuda.wait(Stream()))
        await until(lambda: len(watch._notifiers.armed) == 1)
        fake.answer("cuEventQuery", 0)
        assert await quickly(task) is None
        await until(lambda: not watch._notifiers.armed)
    assert len(watch._notifiers.quarantined) == 2
    assert len(watch._budget.tokens) == 24
    fake.release()
    await until(lambda: not watch._notifiers.quarantined)


# -- faults ------------------------------------------------------------------------------------------------------------


async def test_fault_is_raised_in_every_waiter(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    tasks = await started(*[aiocuda.wait(Stream(STREAM + 8 * number)) for number in range(4)])
    unawaited = aiocuda.wait(Stream())
    fake.answer("cuEventQuery", ILLEGAL_ADDRESS)
    for task in tasks:
        with pytest.raises(DeviceFault, match="700"):
            await quickly(task)
    for waiting in (unawaited, aiocuda.wait):
        with pytest.raises(DeviceFault):
            await quickly(waiting(Stream()) if callable(waiting) else waiting)


async def test_fault_that_another_call_has_found(driver: CudaDriver, fake: Fake) -> None:
    """No notification comes. The timer sees the fault."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    (task,) = await started(aiocuda.wait(Stream()))
    await until(lambda: fake.calls("cuLaunchHostFunc"))
    fake.answer("cuStreamQuery", ILLEGAL_ADDRESS)
    stream = driver.stream_create(0, 0)
    with pytest.raises(DeviceFault):
        driver.stream_query(stream)
    with pytest.raises(DeviceFault):
        await quickly(task)


async def test_event_of_a_faulted_context_that_reports_success(
    driver: CudaDriver, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    waiting = aiocuda.wait(Stream())
    query = driver.event_query

    def succeed(event: int) -> bool:
        fake.answer("cuEventQuery", ILLEGAL_ADDRESS)
        with pytest.raises(DeviceFault):
            query(event)
        return True

    monkeypatch.setattr(driver, "event_query", succeed)
    with pytest.raises(DeviceFault):
        await quickly(waiting)


async def test_refused_query_fails_the_wait(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    (task,) = await started(aiocuda.wait(Stream()))
    fake.answer("cuEventQuery", 2)
    with pytest.raises(aiocuda.AiocudaError):
        await quickly(task)


@pytest.mark.parametrize("code", [2, ILLEGAL_ADDRESS])
async def test_refused_begin_of_queries_reaches_the_waiters_and_keeps_the_timer(
    driver: CudaDriver, fake: Fake, code: int
) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    with Reports() as reports:
        (task,) = await started(aiocuda.wait(Stream()))
        await until(lambda: fake.calls("cuLaunchHostFunc"))
        fake.answer("cuThreadExchangeStreamCaptureMode", code)
        expected = DeviceFault if code == ILLEGAL_ADDRESS else aiocuda.AiocudaError
        with pytest.raises(expected, match="cuThreadExchangeStreamCaptureMode"):
            await asyncio.wait_for(task, 10)
        with pytest.raises(expected, match="cuThreadExchangeStreamCaptureMode"):
            await asyncio.wait_for(aiocuda.wait(Stream()).wait(), 10)
        waiting = None if code == ILLEGAL_ADDRESS else aiocuda.wait(Stream())
        fake.answer("cuThreadExchangeStreamCaptureMode", 0)
        if waiting is not None:
            (task,) = await started(waiting)
            await turns()
            fake.answer("cuEventQuery", 0)  # the timer asks: no notifier comes
            assert await asyncio.wait_for(task, 10) is None
    assert not reports.contexts


@pytest.mark.parametrize("code", [2, ILLEGAL_ADDRESS])
async def test_refused_end_of_queries(
    driver: CudaDriver, fake: Fake, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A fault ends all waits; any other refusal is reported, and the timer goes on."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    query = driver.event_query
    refusals: list[int] = []

    def refuse_then(event: int) -> bool:
        if len(refusals) == 1:
            fake.answer("cuThreadExchangeStreamCaptureMode", code, times=1)
            refusals.append(code)
        return query(event)

    monkeypatch.setattr(driver, "event_query", refuse_then)
    with Reports() as reports:
        tasks = await started(*[aiocuda.wait(Stream(STREAM + 8 * number)) for number in range(3)])
        await until(lambda: len(fake.calls("cuLaunchHostFunc")) == 3)
        refusals.append(0)
        await until(lambda: len(refusals) == 2)
        fake.answer("cuEventQuery", 0)
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    if code == ILLEGAL_ADDRESS:
        assert all(isinstance(end, DeviceFault) for end in ends)
        assert not reports.contexts
    else:
        assert ends == [None] * 3
        assert len(reports.contexts) == 1


# -- captures ----------------------------------------------------------------------------------------------------------


async def test_stream_that_is_captured(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuStreamIsCapturing", 1)
    for handle in (STREAM, 0):
        with pytest.raises(UnsupportedError, match="captured into a graph"):
            aiocuda.wait(Stream(handle))
    fake.value("cuStreamIsCapturing", 0)
    fake.answer("cuStreamIsCapturing", CAPTURE_IMPLICIT)
    with pytest.raises(UnsupportedError, match="captured into a graph"):
        aiocuda.wait(Stream(0))
    assert not fake.calls("cuEventRecord")


async def test_queries_end_no_capture_of_another_library(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY, times=3)
    fake.capture_mode(0)
    await quickly(aiocuda.wait(Stream()))
    names = [call.name for call in fake.calls() if call.name in ("cuEventQuery", "cuThreadExchangeStreamCaptureMode")]
    assert names[0] == names[-1] == "cuThreadExchangeStreamCaptureMode"
    assert fake.capture_mode() == 0


# -- beside a device that the program opens ----------------------------------------------------------------------------


async def test_closing_a_device_neither_delays_nor_ends_a_wait(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    async with aiocuda.open_device(driver=driver):
        (task,) = await started(aiocuda.wait(Stream()))
        await until(lambda: fake.calls("cuLaunchHostFunc"))
    assert not task.done()
    fake.answer("cuEventQuery", 0)
    fake.release()
    assert await quickly(task) is None


async def test_notifiers_of_waits_go_to_a_device_and_back(driver: CudaDriver, fake: Fake) -> None:
    """A notifier that is still armed when its loop ends neither is lost nor disturbs its next user."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.hold()
    (task,) = await started(aiocuda.wait(Stream()))
    await until(lambda: fake.calls("cuLaunchHostFunc"))
    task.cancel()
    await turns()
    EventWatch.of(driver, 0, asyncio.get_running_loop()).close()
    fake.answer("cuEventQuery", 0)
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        fake.release()
        await quickly(stream.synchronize())
        fake.answer("cuEventQuery", NOT_READY, times=30)
        await quickly(stream.synchronize())
    assert await quickly(aiocuda.wait(Stream())) is None


async def test_wait_that_was_made_before_the_end_of_the_generators(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    waiting, polled = aiocuda.wait(Stream()), aiocuda.wait(lambda: True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    (task,) = await started(waiting)
    fake.answer("cuEventQuery", 0)
    assert await quickly(task) is None
    assert await quickly(polled) is None
    assert await quickly(aiocuda.wait([Stream(), lambda: True])) is None


@pytest.mark.parametrize("things", [Stream(), [Stream(OTHER), Stream()]], ids=["stream", "list"])
@pytest.mark.parametrize("call", ["await", "callback"])
async def test_wait_that_could_not_begin_is_awaited_again(
    driver: CudaDriver, fake: Fake, monkeypatch: pytest.MonkeyPatch, things: Any, call: str
) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    waiting = aiocuda.wait(things, timeout=50)
    loop = asyncio.get_running_loop()
    EventWatch.of(driver, 0, loop).close()

    def refuse(*arguments: object) -> None:
        raise OSError("the system watches no more descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "add_reader", refuse)
        with pytest.raises(OSError, match="no more descriptors"):
            if call == "await":
                await quickly(waiting)
            else:
                waiting.add_done_callback(print)
    assert not waiting.is_awaited
    assert await quickly(waiting) is None  # by its notifier


async def test_refused_notifier_is_reported_once_and_delays_nothing(driver: CudaDriver, fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    fake.answer("cuLaunchHostFunc", 2)
    with Reports() as reports:
        tasks = await started(*[aiocuda.wait(Stream(STREAM + 8 * number)) for number in range(3)])
        await until(lambda: reports.contexts)
        await turns()
        fake.answer("cuEventQuery", 0)
        await quickly(asyncio.gather(*tasks))
    assert len(reports.contexts) == 1


async def test_notifier_that_was_refused_once(driver: CudaDriver, fake: Fake) -> None:
    """Later waits have one."""
    fake.answer("cuEventQuery", NOT_READY)
    fake.answer("cuLaunchHostFunc", 2, times=1)
    with Reports() as reports:
        assert await asyncio.wait_for(aiocuda.wait(Stream()).wait(), 10) is None
        assert await asyncio.wait_for(aiocuda.wait(Stream(OTHER)).wait(), 10) is None
    assert len(reports.contexts) == 1


class LoopWithoutReaders(asyncio.SelectorEventLoop):
    """As loops of other packages, and asyncio's proactor loop."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


def in_a_loop_without_readers(main: Any) -> None:
    loop = LoopWithoutReaders()
    try:
        loop.run_until_complete(main)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def test_loop_that_cannot_watch_descriptors(driver: CudaDriver, fake: Fake) -> None:
    """Its timers ask."""
    fake.answer("cuEventQuery", NOT_READY, times=100)

    async def main() -> None:
        asked = iter([False] * 3)
        await quickly(aiocuda.wait([Stream(), lambda: next(asked, True)]))

    await asyncio.to_thread(in_a_loop_without_readers, main())
    assert not fake.calls("cuLaunchHostFunc")


async def test_wait_shares_the_notifiers_of_a_device_that_is_open(driver: CudaDriver, fake: Fake) -> None:
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        await stream.synchronize()
        fake.hold()
        fake.answer("cuEventQuery", NOT_READY)
        (task,) = await started(aiocuda.wait(Stream()))
        other = asyncio.ensure_future(stream.synchronize().wait())
        await until(lambda: len(fake.calls("cuLaunchHostFunc")) == 2)
        watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
        assert watch._notifiers is stream._queue.reactor.notifier_pool
        fake.answer("cuEventQuery", 0)
        fake.release()
        await quickly(asyncio.gather(task, other))
        await until(lambda: not watch._notifiers.armed)
    fake.answer("cuEventQuery", NOT_READY)
    fake.forget()
    assert await quickly(aiocuda.wait(Stream())) is None  # by its notifier alone
    assert fake.calls("cuLaunchHostFunc")


async def test_device_that_is_opened_later_shares_the_notifiers_of_waits(driver: CudaDriver, fake: Fake) -> None:
    await quickly(aiocuda.wait(Stream()))
    watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
    for _ in range(3):
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            assert stream._queue.reactor.notifier_pool is watch._notifiers
            async with aiocuda.open_device(driver=driver) as second, second.stream() as other:
                assert other._queue.reactor.notifier_pool is not watch._notifiers
            fake.hold()
            fake.answer("cuEventQuery", NOT_READY)
            (task,) = await started(aiocuda.wait(Stream()))
            await until(lambda: watch._notifiers.armed)
            fake.answer("cuEventQuery", 0, times=0)
        fake.release()
        await quickly(task)
        assert await quickly(aiocuda.wait(lambda: not watch._notifiers.armed)) is None


async def test_device_without_streams_of_its_own_shares_nothing(driver: CudaDriver, fake: Fake) -> None:
    await quickly(aiocuda.wait(Stream()))
    watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
    async with aiocuda.open_device(driver=driver, asynchronous=False) as device, device.stream() as stream:
        assert stream._queue.reactor.notifier_pool is not watch._notifiers
        assert await quickly(aiocuda.wait(Stream())) is None


async def test_loop_that_is_closed_with_a_device_and_waits(driver: CudaDriver, fake: Fake) -> None:
    """Each way, the notifiers go to the next loop."""
    pools = []

    async def main(first: str) -> None:
        if first == "wait":
            await aiocuda.wait(Stream())
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            await stream.synchronize()
            await aiocuda.wait(Stream())
            watch = EventWatch.of(driver, 0, asyncio.get_running_loop())
            pools.append(id(watch._notifiers))

    def run(first: str) -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main(first))
        loop.close()
        gc.collect()

    for first in ("wait", "device", "wait", "device"):
        await asyncio.to_thread(run, first)
    assert len(set(pools)) == 1
