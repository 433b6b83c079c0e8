"""`aiocuda.wait`: aiocuda's own objects, functions, lists, and what is refused."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import itertools
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    NoEventLoopError,
    StaleHandleError,
    Stream,
    WrongLoopError,
)
from tests.helpers import Latch, quickly, turns

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="host") as opened:
        yield opened


@pytest_asyncio.fixture
async def stream(device: Device) -> AsyncIterator[Stream]:
    async with device.stream() as opened:
        yield opened


# -- objects of aiocuda ------------------------------------------------------------------------------------------------


def of_operation(stream: Stream) -> Any:
    return stream.fill(stream.empty(4), 1)


def of_event(stream: Stream) -> Any:
    return stream.record()


def of_stream(stream: Stream) -> Any:
    return stream


def of_buffer(stream: Stream) -> Any:
    buffer = stream.empty(4)
    stream.fill(buffer, 1)
    return buffer


def of_slice(stream: Stream) -> Any:
    return of_buffer(stream)[1:2]


def of_unified(stream: Stream) -> Any:
    buffer = stream.device.unified(4)
    stream.fill(buffer, 1)
    return buffer


def of_pinned(stream: Stream) -> Any:
    pinned = stream.device.pinned(4)
    stream.copy(stream.empty(4), pinned)
    return pinned


def of_gathering(stream: Stream) -> Any:
    return aiocuda.gather(of_operation(stream), of_operation(stream))


OWN = [of_operation, of_event, of_stream, of_buffer, of_slice, of_unified, of_pinned, of_gathering]


@pytest.mark.parametrize("made", OWN)
@pytest.mark.parametrize("limit", [None, 50])
async def test_own_object_is_waited_for(
    device: Device, stream: Stream, made: Callable[[Stream], Any], limit: float | None
) -> None:
    with Latch(device) as latch:
        latch.hold(stream)
        await latch.held()
        waiting = aiocuda.wait(made(stream), timeout=limit)
        assert isinstance(waiting, aiocuda.Operation)
        await turns()
        assert not waiting.done()
        latch.release()
        assert await quickly(waiting) is None
    assert waiting.done()
    assert waiting.exception() is None
    assert await quickly(waiting.wait()) is None


async def test_later_work_of_a_stream_is_not_waited_for(device: Device, stream: Stream) -> None:
    waiting = aiocuda.wait(stream)
    with Latch(device) as latch:
        latch.hold(stream)
        await quickly(waiting)


async def test_buffer_that_nothing_uses_is_done(stream: Stream) -> None:
    buffer = await stream.upload(np.ones(4))
    await stream.synchronize()
    assert await quickly(aiocuda.wait(buffer)) is None
    assert await quickly(aiocuda.wait([])) is None


async def test_buffer_of_a_closed_device() -> None:
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        buffer, pinned, other = stream.empty(4), device.pinned(4), stream.empty(4)
        other.free()
        with pytest.raises(StaleHandleError):
            aiocuda.wait(other)
        event = stream.record()
        event.release()
        with pytest.raises(StaleHandleError):
            aiocuda.wait(event)
    for closed in (buffer, pinned, stream):
        with pytest.raises(ClosedError):
            aiocuda.wait(closed)


async def test_event_that_was_never_recorded(device: Device) -> None:
    event = aiocuda.EventPool(device, 1).acquire_nowait()
    with pytest.raises(InvalidArgumentError, match="never recorded"):
        aiocuda.wait(event)


async def test_work_of_another_loop(device: Device, stream: Stream) -> None:
    operation, waiting = stream.synchronize(), aiocuda.wait(lambda: False)

    async def elsewhere() -> None:
        for thing in (operation, stream, stream.record, waiting, [operation]):
            with pytest.raises(WrongLoopError):
                aiocuda.wait(thing() if callable(thing) else thing)
        with pytest.raises(WrongLoopError):
            await waiting

    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_failed_operation(stream: Stream) -> None:
    def fail() -> None:
        raise ZeroDivisionError("theirs")

    failed = stream.submit(fail)
    with pytest.raises(ZeroDivisionError, match="theirs"):
        await quickly(aiocuda.wait([stream.record(), failed]))


# -- lists -------------------------------------------------------------------------------------------------------------


async def test_all_of_a_list_are_waited_for_and_the_first_failure_is_raised(device: Device, stream: Stream) -> None:
    answers: list[Any] = [False, False]

    def answer(index: int) -> Any:
        if isinstance(answers[index], Exception):
            raise answers[index]
        return answers[index]

    with Latch(device) as latch:
        latch.hold(stream)
        waiting = aiocuda.wait([functools.partial(answer, 0), (functools.partial(answer, 1), stream)])
        task = asyncio.ensure_future(waiting.wait())
        answers[1] = ValueError("second")
        await turns()
        assert not task.done()
        answers[0] = KeyError("first")
        await turns()
        assert not task.done()
        latch.release()
        with pytest.raises(KeyError, match="first"):
            await quickly(task)
    with pytest.raises(KeyError, match="first"):
        waiting.result()


async def test_done_of_a_list_asks_each(stream: Stream) -> None:
    answers = [False]
    waiting = aiocuda.wait([lambda: answers[0], lambda: True])
    assert not waiting.done()
    answers[0] = True
    assert waiting.done()
    assert waiting.state == "done"


# -- functions ---------------------------------------------------------------------------------------------------------


async def test_function_is_called_until_it_returns_true() -> None:
    answers = iter([False] * 20)
    assert await quickly(aiocuda.wait(lambda: next(answers, True))) is None


async def test_function_has_the_context_of_the_caller() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("caller")
    waiting = aiocuda.wait(lambda: variable.get() == "caller")
    variable.set("later")
    await quickly(waiting)


async def test_times_of_the_calls_in_virtual_time() -> None:
    """First after 50 µs, then more and more rarely, 5 ms apart at most: whatever the policy."""
    from aiocuda.testing import SimulatedLoop

    times: list[float] = []

    async def main() -> None:
        begun = asyncio.get_running_loop().time()

        def ask() -> bool:
            times.append(asyncio.get_running_loop().time() - begun)
            return times[-1] > 0.2

        await aiocuda.wait(ask)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: SimulatedLoop()) as runner:
            runner.run(main())

    await asyncio.to_thread(run)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 40e-6 < times[0] < 1e-3
    assert max(gaps) < 0.0062
    assert 20 < len(times) < 200


async def test_limit_of_zero_when_the_time_of_the_loop_is_zero() -> None:
    from aiocuda.testing import SimulatedLoop

    async def main() -> None:
        assert asyncio.get_running_loop().time() == 0
        waiting = aiocuda.wait(lambda: False, timeout=0)
        with pytest.raises(TimeoutError, match="within 0 s"):
            await asyncio.wait_for(waiting.wait(), 5)
        assert aiocuda.wait(lambda: False, timeout=0).done()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: SimulatedLoop()) as runner:
            runner.run(main())

    await asyncio.to_thread(run)


async def test_exception_of_a_function_goes_to_the_waiters() -> None:
    waiting = aiocuda.wait(lambda: 1 / 0 == 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await quickly(waiting)
    waiting = aiocuda.wait(lambda: next(iter([])))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await quickly(waiting)


@pytest.mark.parametrize("answer", [None, 1, 0, "yes", np.True_])
async def test_answer_that_is_no_bool(answer: object) -> None:
    with pytest.raises(InvalidTypeError, match="returns a bool"):
        await quickly(aiocuda.wait(lambda: answer))


async def test_many_functions_and_one_that_fails_do_not_disturb_each_other() -> None:
    opened = threading.Event()
    waits = [aiocuda.wait(opened.is_set) for _ in range(500)]
    failing = aiocuda.wait(lambda: {"key": True}["other"])
    tasks = [asyncio.ensure_future(one.wait()) for one in (*waits, failing)]
    with pytest.raises(KeyError):
        await quickly(tasks[-1])
    opened.set()
    await quickly(asyncio.gather(*tasks[:-1]))


async def test_ctrl_c_in_a_function_ends_its_wait_and_leaves_the_loop() -> None:
    def run() -> None:
        def ask() -> bool:
            raise KeyboardInterrupt

        async def main() -> None:
            await aiocuda.wait(ask)

        loop = asyncio.new_event_loop()
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(main())
        loop.close()

    await asyncio.to_thread(run)


# -- objects with query() or synchronize() -----------------------------------------------------------------------------


class Event:
    """An event of a library that aiocuda does not know."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        raise AssertionError("that of PyTorch returns at once")


class Blocking:
    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def synchronize(self) -> None:
        self.thread = threading.current_thread()
        self.passed.wait()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", [Event, Blocking])
async def test_object_of_an_unknown_library(kind: Any) -> None:
    thing = kind()
    waiting = aiocuda.wait(thing)
    task = asyncio.ensure_future(waiting.wait())
    await turns()
    assert not task.done()
    thing.passed.set()
    assert await quickly(task) is None


async def test_thread_of_a_wait_is_a_daemon_and_outlives_a_cancelled_wait() -> None:
    thing = Blocking()
    task = asyncio.ensure_future(aiocuda.wait(thing).wait())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)
    thread = thing.thread
    assert thread is not None
    assert thread.daemon
    assert thread.is_alive()
    thing.passed.set()
    await quickly(asyncio.to_thread(thread.join))


async def test_error_of_synchronize_goes_to_the_waiter() -> None:
    thing = Blocking()
    thing.error = OSError("theirs")
    thing.passed.set()
    with pytest.raises(OSError, match="theirs"):
        await quickly(aiocuda.wait(thing))


# -- timeouts, cancellation --------------------------------------------------------------------------------------------


async def test_timeout_names_what_was_waited_for(device: Device, stream: Stream) -> None:
    with Latch(device) as latch:
        latch.hold(stream)
        with pytest.raises(TimeoutError, match=f"{stream.name}.* has not finished within 0.01 s"):
            await quickly(aiocuda.wait(stream, timeout=0.01))
        waiting = aiocuda.wait(stream, timeout=0)
        assert waiting.done()
        with pytest.raises(TimeoutError):
            waiting.result()
        latch.release()
    with pytest.raises(TimeoutError, match=r"a numpy.* of shape \(4,\).* within 0 s"):
        await aiocuda.wait([lambda: False, Shaped(), stream], timeout=0)


class Unspeakable:
    """Its text would run code of the program, in the loop."""

    def __repr__(self) -> str:
        raise AssertionError

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__":
            raise AssertionError
        raise AttributeError(name)

    def ready(self) -> bool:
        return False

    def __call__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        raise AssertionError


class Pair(tuple):  # type: ignore[type-arg]  # noqa: SLOT001
    def __repr__(self) -> str:
        raise AssertionError


def never(*things: object) -> bool:
    return False


def answers_with(thing: object) -> object:
    return thing


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda thing: thing.ready, r"^function Unspeakable.ready has not finished"),
        (lambda thing: functools.partial(never, thing), r"^function never has not"),
        (lambda thing: functools.partial(functools.partial(Unspeakable.ready, thing)), r"^function Unspeakable.ready"),
        (lambda thing: Unspeakable(), r"^a tests\.completion\.test_wait\.Unspeakable has not"),
        (lambda thing: (thing.ready, Pair([never])), r"^\[function Unspeakable.ready, a tests.*\.Pair\] has not"),
        (lambda thing: threading.Event().is_set, r"^function Event.is_set has not"),
    ],
)
@pytest.mark.parametrize("limit", [0, 0.001])
async def test_text_of_a_timeout_runs_no_code_of_the_program(
    make: Callable[[Unspeakable], Any], text: str, limit: float
) -> None:
    with pytest.raises(TimeoutError, match=text):
        await quickly(aiocuda.wait(make(Unspeakable()), timeout=limit))


async def test_answer_that_has_no_text() -> None:
    thing = Unspeakable()
    with pytest.raises(
        InvalidTypeError, match=r"function answers_with returned a tests.*Unspeakable: a polled function"
    ):
        await quickly(aiocuda.wait(functools.partial(answers_with, thing)))


class Shaped(Event):
    """Its repr would read the device."""

    shape = (4,)
    __module__ = "numpy"

    def __repr__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: [one], lambda one: ([one],)])
@pytest.mark.parametrize("awaited", [False, True])
async def test_limit_of_a_wait_for_a_wait_is_its_own(wrapped: Callable[[Any], Any], awaited: bool) -> None:
    opened = threading.Event()
    first = aiocuda.wait(opened.is_set)
    task = asyncio.ensure_future(first.wait()) if awaited else None
    await turns(2)
    limited = aiocuda.wait(wrapped(first), timeout=0.001)
    assert limited is not first
    with pytest.raises(TimeoutError, match=r"within 0\.001 s"):
        await asyncio.wait_for(limited.wait(), 10)
    assert not first.done()
    opened.set()
    assert await quickly(first if task is None else task) is None


async def test_timeout_does_not_end_a_wait_that_is_done() -> None:
    done = aiocuda.wait(lambda: True, timeout=0)
    assert await quickly(done) is None
    assert await quickly(aiocuda.wait(lambda: True, timeout=math.inf)) is None


async def test_cancelled_wait_leaves_nothing() -> None:
    calls = []

    class Asking:
        def query(self) -> bool:
            calls.append(1)
            return False

    thing = Asking()
    gone = weakref.ref(thing)
    task = asyncio.ensure_future(aiocuda.wait(thing, timeout=3600).wait())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = len(calls)
    await turns()
    assert len(calls) == before
    del thing, task
    gc.collect()
    assert gone() is None


async def test_list_that_has_timed_out_holds_nothing() -> None:
    thing = Event()
    gone = weakref.ref(thing)
    waiting = aiocuda.wait([thing, lambda: True], timeout=0)
    with pytest.raises(TimeoutError):
        await quickly(waiting)
    del thing
    gc.collect()
    assert gone() is None
    assert waiting.done()


async def test_one_of_two_waiters_is_cancelled() -> None:
    opened = threading.Event()
    waiting = aiocuda.wait(opened.is_set)
    first, second = (asyncio.ensure_future(waiting.wait()) for _ in range(2))
    await turns()
    assert waiting.is_awaited
    first.cancel()
    await turns()
    opened.set()
    assert await quickly(second) is None
    assert first.cancelled()


async def test_wait_that_was_cancelled_can_be_awaited_again() -> None:
    opened = threading.Event()
    waiting = aiocuda.wait([opened.is_set], timeout=50)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting.wait(), 0.001)
    opened.set()
    assert await quickly(waiting) is None


# -- the operation -----------------------------------------------------------------------------------------------------


async def test_wait_is_an_operation() -> None:
    opened = threading.Event()
    with aiocuda.label("request-17"):
        waiting = aiocuda.wait(opened.is_set)
    assert (waiting.kind, waiting.state, waiting.label) == ("wait", "submitted", "request-17")
    assert (waiting.stream, waiting.kernel, waiting.nbytes, waiting.waits_for, waiting.part_of) == (None,) * 2 + (
        0, None, None,
    )  # fmt: skip
    assert "request-17" in str(waiting)
    assert "coroutine: .wait()" in repr(waiting)
    with pytest.raises(BusyError):
        waiting.result()
    seen: list[Any] = []
    waiting.add_done_callback(seen.append)
    waiting.add_done_callback(len)
    assert waiting.remove_done_callback(len) == 1
    gathered = asyncio.ensure_future(aiocuda.gather(waiting, aiocuda.wait(lambda: True)).wait())
    done = asyncio.ensure_future(waiting.settle())
    opened.set()
    assert await quickly(gathered) == [None, None]
    await quickly(done)
    assert seen == [waiting]
    assert not waiting.abandon()
    waiting.add_done_callback(seen.append)
    await turns()
    assert seen == [waiting, waiting]


async def test_abandoned_wait() -> None:
    waiting = aiocuda.wait(lambda: False)
    task = asyncio.ensure_future(waiting.wait())
    await turns()
    assert waiting.abandon()
    with pytest.raises(ClosedError, match="abandoned"):
        await quickly(task)
    assert waiting.state == "abandoned"


async def test_loop_of_waits_that_are_done_lets_others_run() -> None:
    count = 0

    async def other() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    for _ in range(100):
        await aiocuda.wait([])
    assert count >= 100
    task.cancel()


async def test_ten_thousand_waiters_of_one_wait() -> None:
    opened = threading.Event()
    waiting = aiocuda.wait(opened.is_set)
    tasks = [asyncio.ensure_future(waiting.wait()) for _ in range(10_000)]
    await turns(2)
    opened.set()
    await quickly(asyncio.gather(*tasks))


# -- what is refused ---------------------------------------------------------------------------------------------------


async def coroutine_function() -> bool:
    return True


class AsyncCall:
    async def __call__(self) -> bool:
        return True


class AsyncQuery:
    async def query(self) -> bool:
        return True


KERNEL = aiocuda.Kernel("empty", source='extern "C" __global__ void empty() {}')


@pytest.mark.parametrize(
    "x",
    [
        None, 5, 1.5, "stream", b"stream", object(), asyncio.Event(), np.ones(4), np.ones(4)[0], {}, {1}, int, Event,
        coroutine_function, AsyncCall(), AsyncQuery(), functools.partial(coroutine_function), KERNEL, [None], ((5,),),
    ],
)  # fmt: skip
async def test_invalid_types(x: object) -> None:
    with pytest.raises(InvalidTypeError, match="wait takes a stream, an event"):
        aiocuda.wait(x)


async def test_coroutines_and_futures_are_refused() -> None:
    coroutine, future = coroutine_function(), asyncio.get_running_loop().create_future()
    for thing in (coroutine, future):
        with pytest.raises(InvalidTypeError, match="wait takes a stream, an event"):
            aiocuda.wait(thing)
    coroutine.close()


async def test_invalid_timeouts() -> None:
    for timeout in (math.nan, -1):
        with pytest.raises(InvalidArgumentError, match="timeout"):
            aiocuda.wait([], timeout=timeout)
    with pytest.raises(InvalidTypeError, match="timeout"):
        aiocuda.wait([], timeout="1")  # type: ignore[arg-type]


async def test_array_without_a_stream() -> None:
    class Array:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"data": (0, False), "shape": (0,), "typestr": "<f4", "version": 3}

    with pytest.raises(InvalidTypeError, match="names no stream"):
        aiocuda.wait(Array())


async def test_stream_that_is_captured_by_aiocuda(stream: Stream) -> None:
    with stream.capture(), pytest.raises(aiocuda.UnsupportedError, match="captured"):
        aiocuda.wait(stream)


async def test_without_an_event_loop() -> None:
    with pytest.raises(NoEventLoopError, match="call it in a coroutine"):
        await asyncio.to_thread(aiocuda.wait, lambda: True)
