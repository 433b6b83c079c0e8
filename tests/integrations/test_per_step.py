"""M2: the steps of a coroutine in a state of their own, without PyTorch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, InvalidTypeError, Stream
from aiocuda.integrations._per_step import per_step
from aiocuda.lowlevel import end_step, flushed, queue_of
from tests.helpers import Latch, quickly, until
from tests.integrations.interleavings import DEFAULT, Entered, MistakeError, Thread, run

SEEDS = range(1000)


def test_no_coroutine_sees_the_state_of_another() -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        thread = run(seed, per_step)
        assert thread.violations == [], f"seed {seed}"
        seen |= thread.seen
    expected = {"pause", "iterator", "nested", "raise", "closed", "thrown", "failed", "returned True"}
    assert seen == expected


def hold(enter: Callable[[], AbstractContextManager[object]]) -> Callable[[Any], Any]:
    """Keep the state across the awaits, as a plain ``with`` block does."""

    def decorate(function: Any) -> Any:
        async def held(*args: Any) -> Any:
            with enter():
                return await function(*args)

        return held

    return decorate


class Forgetful(Entered):
    """It enters the same state before each step: a change that the coroutine has made is lost."""

    def __exit__(self, *exc: object) -> None:
        own = self._own
        super().__exit__(*exc)
        self._own = own


def test_state_held_across_an_await_is_found() -> None:
    violations = sum(bool(run(seed, hold).violations) for seed in SEEDS)
    assert violations > 900


def test_forgotten_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integrations.interleavings.Entered", Forgetful)
    assert any(run(seed, per_step).violations for seed in SEEDS)


@pytest.mark.asyncio
async def test_tasks_of_an_event_loop() -> None:
    """With cancellation, `asyncio.gather` and a bystander that sees the default only."""
    thread = Thread()

    @per_step(lambda: Entered(thread, "own"))
    async def work(changed: str) -> str:
        thread.check("own", "begin")
        thread.stream = changed
        try:
            for _ in range(20):
                await asyncio.sleep(0)
                thread.check(changed, "after an await")
        except asyncio.CancelledError:
            thread.check(changed, "cancelled")
            await asyncio.sleep(0)
            thread.check(changed, "after the cancellation")
            raise
        return changed

    async def bystander() -> None:
        for _ in range(30):
            thread.check(DEFAULT, "bystander")
            await asyncio.sleep(0)

    cancelled = asyncio.create_task(work("cancelled"))
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(cancelled.cancel))
    results = await quickly(asyncio.gather(work("a"), work("b"), bystander(), cancelled, return_exceptions=True))
    assert results[:3] == ["a", "b", None]
    assert isinstance(results[3], asyncio.CancelledError)
    assert thread.violations == []


def test_decorated_function_is_still_a_coroutine_function() -> None:
    async def work(x: int, *, y: str = "") -> None:
        """Do it."""

    decorated = per_step(lambda: Entered(Thread(), "own"))(work)
    assert inspect.iscoroutinefunction(decorated)
    assert inspect.signature(decorated) == inspect.signature(work)
    assert (decorated.__qualname__, decorated.__doc__) == (work.__qualname__, "Do it.")


@pytest.mark.parametrize("wrong", [lambda: None, 7, functools.partial(print)])
def test_only_coroutine_functions_are_decorated(wrong: Any) -> None:
    with pytest.raises(InvalidTypeError, match="takes a coroutine function, `async def`"):
        per_step(lambda: Entered(Thread(), "own"))(wrong)


def test_generator_functions_are_refused() -> None:
    async def numbers() -> Any:
        yield 1

    with pytest.raises(InvalidTypeError, match="takes a coroutine function"):
        per_step(lambda: Entered(Thread(), "own"))(numbers)


@pytest.mark.asyncio
async def test_coroutine_gets_the_error_of_leaving_its_state() -> None:
    """At its await, so that its ``finally`` blocks run; what it awaited is not awaited."""

    class Refusing(Entered):
        refuses = True

        def __exit__(self, *exc: object) -> None:
            super().__exit__(*exc)
            if self.refuses and exc[0] is None:
                raise MistakeError

    thread = Thread()
    state = Refusing(thread, "own")

    @per_step(lambda: state)
    async def work() -> str:
        with pytest.raises(MistakeError):
            await asyncio.get_running_loop().create_future()
        thread.check("own", "after the refusal")
        state.refuses = False
        await asyncio.sleep(0)
        return "done"

    assert await quickly(work()) == "done"
    assert thread.violations == []
    assert thread.stream == DEFAULT


@pytest.mark.asyncio
async def test_failed_coroutine_leaves_no_reference_cycle() -> None:
    @per_step(lambda: Entered(Thread(), "own"))
    async def work() -> None:
        await asyncio.sleep(0)
        raise MistakeError

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(MistakeError) as caught:
                await work()
            del caught
        await asyncio.sleep(0)
        kept = [thing for thing in gc.get_objects() if type(thing) is MistakeError]
        assert kept == []
    finally:
        gc.enable()


class Entering(Entered):
    """A state that cannot be entered in one of its steps."""

    refused = -1

    def __enter__(self) -> None:
        self.refused -= 1
        if self.refused == 0:
            raise MistakeError
        super().__enter__()


@pytest.mark.asyncio
async def test_state_that_cannot_be_entered_for_the_first_step() -> None:
    state = Entering(Thread(), "own")
    state.refused = 1
    begun: list[int] = []

    @per_step(lambda: state)
    async def work() -> None:
        begun.append(1)

    with pytest.raises(MistakeError):
        await work()
    assert begun == []
    gc.collect()  # a coroutine that was never awaited warns


@pytest.mark.asyncio
async def test_coroutine_gets_the_error_of_entering_its_state() -> None:
    thread = Thread()
    state = Entering(thread, "own")
    state.refused = 2

    @per_step(lambda: state)
    async def work() -> str:
        with pytest.raises(MistakeError):
            await asyncio.sleep(0)
        thread.check(DEFAULT, "without its state")
        await asyncio.sleep(0)
        thread.check("own", "the next step")
        return "done"

    assert await quickly(work()) == "done"
    assert thread.violations == []


@pytest.mark.asyncio
async def test_closed_coroutine_whose_state_cannot_be_entered_is_closed() -> None:
    state = Entering(Thread(), "own")
    state.refused = 2
    closed: list[int] = []

    @per_step(lambda: state)
    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append(1)

    coroutine = work()
    coroutine.send(None)
    with pytest.raises(MistakeError):
        coroutine.close()
    assert closed == [1]


@pytest.mark.asyncio
async def test_an_error_that_was_handled_is_not_held_during_the_next_await() -> None:
    class Big:
        """What the frames of an error may hold."""

    seen: list[weakref.ref[Big]] = []

    async def fail() -> None:
        big = Big()
        seen.append(weakref.ref(big))
        await asyncio.sleep(0)
        raise MistakeError

    @per_step(lambda: Entered(Thread(), "own"))
    async def work() -> bool:
        with contextlib.suppress(MistakeError):
            await asyncio.create_task(fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gc.collect()
        return seen[0]() is None

    assert await quickly(work())


# -- beside the host queue of a stream ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_step_begins_when_nothing_of_the_stream_is_on_the_host(device: Device, stream: Stream) -> None:
    queue = queue_of(stream)
    seen: list[bool] = []

    @per_step(lambda: Entered(Thread(), "own"), before=lambda: flushed(queue))
    async def work() -> None:
        await asyncio.sleep(0)
        seen.append(bool(queue.rare.host_queue.entries))

    with Latch(device) as latch:
        held = latch.hold(stream)
        await latch.held()
        upload = stream.upload(np.zeros(1 << 20))  # pageable: copied in chunks, which the host queue holds
        assert queue.rare.host_queue.entries
        task = asyncio.create_task(work())
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen == []
        latch.release()
        await quickly(task)
    assert seen == [False]
    await quickly(asyncio.gather(held, upload))


@pytest.mark.asyncio
async def test_cancellation_arrives_when_the_step_begins(device: Device, stream: Stream) -> None:
    """The coroutine may enqueue work as it is cancelled: that must not overtake the work on the host."""
    queue = queue_of(stream)
    seen: list[bool] = []
    begun = asyncio.Event()

    @per_step(lambda: Entered(Thread(), "own"), before=lambda: flushed(queue))
    async def work() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            seen.append(bool(queue.rare.host_queue.entries))
            raise

    with Latch(device) as latch:
        task = asyncio.create_task(work())
        await begun.wait()
        latch.hold(stream)
        await latch.held()
        upload = stream.upload(np.zeros(1 << 20))
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert seen == []
        latch.release()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
    assert seen == [False]
    await quickly(upload)


@pytest.mark.asyncio
async def test_close_does_not_wait(device: Device, stream: Stream) -> None:
    queue = queue_of(stream)
    thread = Thread()
    closed: list[str] = []

    @per_step(lambda: Entered(thread, "own"), before=lambda: flushed(queue))
    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append(thread.stream)

    coroutine = work()
    coroutine.send(None)
    coroutine.close()
    assert closed == ["own"]
    assert thread.stream == DEFAULT


@pytest.mark.asyncio
async def test_coroutine_goes_on_while_other_tasks_keep_the_stream_busy(device: Device, stream: Stream) -> None:
    """Its turn comes in the order of the host queue, also if that never becomes empty."""
    queue = queue_of(stream)
    steps: list[int] = []

    @per_step(lambda: Entered(Thread(), "own"), before=lambda: flushed(queue))
    async def work() -> None:
        for number in range(5):
            steps.append(number)
            await asyncio.sleep(0)

    async def produce() -> None:
        while len(steps) < 5:
            await stream.submit(lambda: None)

    await quickly(asyncio.gather(work(), *[produce() for _ in range(64)]))
    assert steps == list(range(5))


@pytest.mark.asyncio
async def test_steps_add_one_marker(device: Device, stream: Stream, latch: Latch) -> None:
    """`end_step` marks the end of the stream, so that its close waits for work that no operation represents."""
    queue = queue_of(stream)
    held = latch.hold(stream)
    await quickly(latch.held())
    before = len(queue.pending)
    for _ in range(1000):
        end_step(queue)
    assert len(queue.pending) == before + 1
    operation = stream.synchronize()
    end_step(queue)
    assert len(queue.pending) == before + 3
    latch.release()
    await quickly(aiocuda.gather(held, operation))
    await until(lambda: queue.idle)
