"""M1: functions of other libraries as operations of a stream."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    DeviceBuffer,
    DeviceFault,
    InvalidArgumentError,
    InvalidTypeError,
    SkippedError,
    Stream,
    UnorderedAccessWarning,
)
from aiocuda.completion._stream_queue import stream_queue
from aiocuda.completion._submission import SubmissionPace
from aiocuda.driver.host import HostDriver
from aiocuda.lowlevel import submit_call
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import AFFINE, PATIENCE, Latch, Peer, Reports, open_peer, quickly, until

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST")


@pytest.mark.asyncio
async def test_result_is_the_return_value(device: Device, stream: Stream) -> None:
    def add(a: int, *, b: int) -> int:
        return a + b

    operation = stream.submit(add, 1, b=2)
    assert await quickly(operation) == 3
    assert (operation.kind, operation.stream) == ("submit", stream)


@pytest.mark.asyncio
async def test_function_is_called_in_the_order_of_the_stream(stream: Stream, latch: Latch) -> None:
    """On a GPU at once, because it only enqueues; on other drivers after the earlier work, because it computes."""
    called: list[int] = []
    held = latch.hold(stream)
    await latch.held()
    operations = [stream.submit(called.append, number) for number in range(2)]
    assert not operations[0].done()
    assert called == ([0, 1] if stream.device.driver.name == "cuda" else [])
    latch.release()
    await quickly(aiocuda.gather(held, *operations))
    assert called == [0, 1]


@pytest.mark.asyncio
async def test_other_operations_keep_their_order(device: Device, stream: Stream) -> None:
    buffer = stream.empty(4, np.uint32)
    seen: list[Any] = []
    stream.fill(buffer, 1)
    stream.submit(seen.append, 1)
    stream.launch(AFFINE, 1, 4, buffer, 4, 3, 1)
    stream.submit(seen.append, 2)
    assert (await quickly(stream.download(buffer))).tolist() == [4] * 4
    assert seen == [1, 2]


@pytest.mark.asyncio
async def test_at_most_submit_ahead_are_on_the_device(device: Device, latch: Latch) -> None:
    called: list[int] = []
    async with device.stream(submit_ahead=3) as stream:
        latch.hold(stream)
        await latch.held()
        operations = [stream.submit(called.append, number) for number in range(10)]
        if device.driver.name == "cuda":
            assert called == [0, 1, 2]
        latch.release()
        await quickly(aiocuda.gather(*operations))
    assert called == list(range(10))


@pytest.mark.asyncio
@pytest.mark.parametrize("ahead", [0, -1])
async def test_submit_ahead_is_positive(device: Device, ahead: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"submit_ahead is at least 1, not {ahead}"):
        device.stream(submit_ahead=ahead)


@pytest.mark.asyncio
async def test_coroutine_functions_are_refused(stream: Stream) -> None:
    async def work() -> None:
        pass

    with pytest.raises(InvalidTypeError, match="is a coroutine function: submit the parts between its awaits"):
        stream.submit(work)
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match="submit takes a function that enqueues work, not 7"):
        stream.submit(wrong)


@pytest.mark.asyncio
async def test_an_exception_fails_this_operation_and_skips_later_ones(device: Device, stream: Stream) -> None:
    error = ValueError("no")

    def fail() -> None:
        raise error

    buffer = stream.empty(4)
    failing, later = stream.submit(fail), stream.fill(buffer, 1)
    with pytest.raises(ValueError, match="no") as caught:
        await quickly(failing)
    assert caught.value is error
    with pytest.raises(SkippedError):
        await quickly(later)
    assert device.driver.fault is None
    await quickly(stream.fill(buffer, 2))
    assert (await quickly(stream.download(buffer))).tolist() == [2] * 4


@pytest.mark.asyncio
async def test_a_fault_of_another_device_is_not_latched(device: Device, stream: Stream) -> None:
    def fail() -> None:
        raise DeviceFault("of another device", code=719)

    with pytest.raises(RuntimeError, match="this device has not faulted") as caught:
        await quickly(stream.submit(fail))
    assert isinstance(caught.value.__cause__, DeviceFault)
    assert device.driver.fault is None


@pytest.mark.asyncio
@pytest.mark.parametrize("signal", [asyncio.CancelledError, StopIteration])
async def test_signals_of_coroutines_become_errors(stream: Stream, signal: type[BaseException]) -> None:
    def fail() -> None:
        raise signal

    with pytest.raises(RuntimeError, match=f"raised {signal.__name__}"):
        await quickly(stream.submit(fail))


class LeavingError(BaseException):
    """An error that is no `Exception`, and does not leave the loop."""


@pytest.mark.asyncio
async def test_other_base_exceptions_reach_the_waiter(device: Device, stream: Stream) -> None:
    def fail() -> None:
        raise LeavingError

    operation, later = stream.submit(fail), stream.synchronize()
    with pytest.raises(LeavingError):
        await quickly(operation)
    with pytest.raises(SkippedError):
        await quickly(later)


@pytest.mark.asyncio
async def test_other_base_exceptions_of_a_function_that_waited_on_the_host() -> None:
    def fail() -> None:
        raise LeavingError

    async with open_peer() as (peer, device):
        stream = stream_of_a_gpu(peer, device)
        stream_queue(stream).reactor.submission_pace.add(1.0)
        operation, later = stream.submit(fail), stream.synchronize()
        with pytest.raises(LeavingError):
            await quickly(operation)
        with pytest.raises(SkippedError):
            await quickly(later)


@pytest.mark.asyncio
async def test_lent_stream_does_not_wait_for_the_next_iteration() -> None:
    """On a stream that others use nothing may wait on the host."""
    async with open_peer() as (peer, device):
        stream = stream_of_a_gpu(peer, device)
        async with stream.lend():
            stream_queue(stream).reactor.submission_pace.add(1.0)
            assert await quickly(stream.submit(lambda: 1)) == 1


def test_function_is_dropped_if_its_loop_is_closed() -> None:
    """On a driver that runs functions on its threads."""
    driver, release, arguments = HostDriver(), threading.Event(), [Tracked()]
    seen = weakref.ref(arguments[0])
    opened: list[Any] = []

    async def submit() -> None:
        opened.append(await aiocuda.open_device(driver=driver))
        opened.append(opened[0].stream())
        opened[1].submit(lambda x: release.wait(PATIENCE), arguments.pop())

    async def close() -> None:
        await opened[0].aclose()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(submit())
    loop.close()
    release.set()
    asyncio.run(close())
    (work,) = [work for key, work in driver.registry.items() if key[0] == "host_work"]
    assert not work._functions
    driver.close()
    opened.clear()
    gc.collect()
    assert seen() is None


def stream_of_a_gpu(peer: Peer, device: Device) -> Stream:
    """Return a stream that calls submitted functions on the loop's thread, as on a GPU."""
    peer.wants_image = True
    try:
        return device.stream()
    finally:
        peer.wants_image = False


@pytest.mark.asyncio
async def test_stream_methods_raise_inside_the_function() -> None:
    """On a GPU. A driver that has no GPU calls the function on a thread, where they raise `NoEventLoopError`."""
    async with open_peer() as (peer, device):
        stream, other = stream_of_a_gpu(peer, device), device.stream()
        buffer = stream.empty(4)
        for method in (lambda: stream.fill(buffer, 1), lambda: other.synchronize(), lambda: device.stream()):
            with pytest.raises(BusyError, match=r"inside a function of Stream\.submit"):
                await quickly(stream.submit(method))
        assert await quickly(stream.submit(lambda: 1)) == 1


@pytest.mark.asyncio
async def test_context_variables_of_the_caller_are_visible(stream: Stream) -> None:
    async def request(name: str) -> str:
        REQUEST.set(name)
        return await stream.submit(REQUEST.get)

    names = [f"r{number}" for number in range(20)]
    assert await quickly(asyncio.gather(*map(request, names))) == names


class Tracked:
    """An object with weak references."""


@pytest.mark.asyncio
async def test_arguments_and_result_are_held_until_the_device_has_finished(stream: Stream, latch: Latch) -> None:
    argument, held = Tracked(), latch.hold(stream)
    await latch.held()
    seen = weakref.ref(argument)
    operation = stream.submit(lambda x: None, argument)
    del argument
    assert seen() is not None
    latch.release()
    await quickly(aiocuda.gather(held, operation))
    await until(lambda: seen() is None)


@pytest.mark.asyncio
async def test_a_failed_function_keeps_its_arguments_until_its_work_has_passed() -> None:
    """It may have enqueued work that uses them."""
    async with open_peer() as (peer, device):
        stream, latch, argument = stream_of_a_gpu(peer, device), Latch(device), Tracked()
        latch.hold(stream)
        await latch.held()
        seen = weakref.ref(argument)

        def fail(x: Tracked) -> None:
            raise KeyError(1)

        operation = stream.submit(fail, argument)
        del argument
        await asyncio.sleep(0)
        assert not operation.done()
        assert seen() is not None
        latch.release()
        with pytest.raises(KeyError):
            await quickly(operation)


@pytest.mark.asyncio
async def test_buffers_count_as_read_and_written() -> None:
    async with aiocuda.open_device(driver="host", check=True) as device:
        stream, other = device.stream(), device.stream()
        buffer = await quickly(stream.upload(np.arange(4)))
        submitted = stream.submit(shape_of, buffer)
        with pytest.warns(UnorderedAccessWarning, match="submit on stream-0"):
            read = other.download(buffer)
        assert await quickly(submitted) == (4,)
        await quickly(read)
        other.wait(stream.submit(shape_of, x=buffer))
        await quickly(other.fill(buffer, 1))  # in order: no warning


@pytest.mark.asyncio
async def test_not_during_a_capture(stream: Stream) -> None:
    with stream.capture():
        with pytest.raises(aiocuda.UnsupportedError, match="capture its work by the library"):
            stream.submit(lambda: None)


@pytest.mark.asyncio
async def test_ctrl_c_in_the_function_leaves_the_loop_and_fails_the_operation() -> None:
    found: list[BaseException | None] = []

    async def main() -> None:
        async with open_peer() as (peer, device):
            stream = stream_of_a_gpu(peer, device)
            operations = []

            def interrupt() -> None:
                raise KeyboardInterrupt

            try:
                operations.append(stream.submit(interrupt))
            finally:
                pending = stream.tail
                assert pending is not None
                await until(pending.done)
                found.append(pending.exception())

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    assert isinstance(found[0], KeyboardInterrupt)


def test_ctrl_c_on_a_thread_of_the_driver_leaves_the_loop_and_fails_the_operation() -> None:
    found: list[aiocuda.Operation[None]] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
            found.append(stream.submit(interrupt))
            await stream.synchronize()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert isinstance(found[0].exception(), KeyboardInterrupt)


def test_a_function_that_holds_the_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with open_peer() as (peer, device):
            stream = stream_of_a_gpu(peer, device)
            for _ in range(3):
                await quickly(stream.submit(hold_the_loop))

    asyncio.run(main())
    (record,) = caplog.records
    assert record.getMessage().startswith("submission_slow function=hold_the_loop stream=stream-0 seconds=")


@pytest.mark.asyncio
async def test_functions_take_a_limited_time_of_each_iteration_of_the_loop() -> None:
    """The others are called in later iterations, in order, and other tasks run in between."""
    called: list[int] = []

    def hold(number: int) -> None:
        time.sleep(0.001)  # noqa: TID251 - a function that enqueues for so long
        called.append(number)

    async with open_peer() as (peer, device):
        streams = [stream_of_a_gpu(peer, device) for _ in range(40)]
        operations = [stream.submit(hold, number) for number, stream in enumerate(streams)]
        counts = [len(called)]
        while len(called) < len(streams):
            await asyncio.sleep(0)
            counts.append(len(called))
        await quickly(aiocuda.gather(*operations))
    assert called == list(range(40))
    assert max(after - before for before, after in itertools.pairwise([0, *counts])) <= 8


def test_short_functions_need_no_callback_at_the_end_of_the_iteration() -> None:
    callbacks: list[Any] = []
    loop: Any = SimpleNamespace(call_soon=callbacks.append)
    pace = SubmissionPace(loop)
    for _ in range(4):
        pace.add(1e-4)
    assert not callbacks
    for _ in range(46):
        assert not pace.is_used_up
        pace.add(1e-4)
    assert len(callbacks) == 1
    assert pace.is_used_up


@pytest.mark.asyncio
async def test_operation_that_waited_for_the_next_iteration_is_watched() -> None:
    """Otherwise the watchdog finds its end, milliseconds late."""
    async with open_peer() as (peer, device):
        first, second = stream_of_a_gpu(peer, device), stream_of_a_gpu(peer, device)
        stream_queue(first).reactor.submission_pace.add(1.0)
        assert first.submit(lambda: 1).state == "queued"
        with Latch(device) as latch:
            held = latch.hold(second)
            operation = second.submit(lambda: 2)
            waiting = asyncio.ensure_future(operation.wait())
            await until(lambda: operation.state == "submitted")
            assert stream_queue(second).watch.attended
            latch.release()
            assert await quickly(waiting) == 2
            await quickly(held)


@pytest.mark.asyncio
async def test_function_that_waited_is_called_when_the_one_before_is_done() -> None:
    """Not in the middle of its resolution."""
    async with open_peer() as (peer, device):
        peer.wants_image = True
        stream = device.stream(submit_ahead=1)
        peer.wants_image = False
        operations: list[aiocuda.Operation[Any]] = [stream.submit(lambda: 1)]
        operations.append(stream.submit(lambda: operations[0].seen_state))
        assert await quickly(operations[1]) == "done"


@pytest.mark.asyncio
async def test_result_lives_no_longer_than_its_operation() -> None:
    """The count of unfinished functions holds none."""
    async with open_peer() as (peer, device):
        stream = stream_of_a_gpu(peer, device)
        results = [weakref.ref(await quickly(stream.submit(Tracked))) for _ in range(3)]
        assert [result() for result in results] == [None] * 3


@pytest.mark.asyncio
async def test_integration_gets_the_results_that_are_wanted() -> None:
    """When the device has finished; neither None, nor the result of an abandoned operation."""
    got: list[int] = []
    async with open_peer() as (peer, device):
        stream, latch = stream_of_a_gpu(peer, device), Latch(device)
        latch.hold(stream)
        await latch.held()
        calls = [lambda value=value: value for value in (1, None, 2, 3)]
        operations = [submit_call(stream, call, "call", got.append, (), {}) for call in calls]
        operations[2].abandon()
        assert not got
        latch.release()
        await quickly(stream.synchronize())
    assert got == [1, 3]


@pytest.mark.asyncio
async def test_ctrl_c_in_a_paced_function_loses_no_other() -> None:
    pace = SubmissionPace(asyncio.get_running_loop())
    pumped: list[int] = []

    class Queue:
        def __init__(self, number: int) -> None:
            self.rare = self.host_queue = self
            self.number = number

        def attend(self) -> None:
            pass

        def pump(self) -> None:
            pumped.append(self.number)
            pace.add(1e-3)
            if self.number == 1:
                raise ZeroDivisionError

    with Reports() as reports:
        pace.add(1.0)
        queues: list[Any] = [Queue(number) for number in range(7)]
        assert pace.is_used_up
        for queue in queues:
            pace.put_off(queue)
        await until(lambda: len(pumped) == 7)
    assert pumped == list(range(7))
    assert [type(context["exception"]) for context in reports.contexts] == [ZeroDivisionError]


def shape_of(x: DeviceBuffer) -> tuple[int, ...]:
    return x.shape


def hold_the_loop() -> None:
    time.sleep(0.01)  # noqa: TID251 - it is the mistake that the event reports


def test_the_same_in_virtual_time() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        driver = SimulatedDriver(7)
        async with aiocuda.open_device(driver=driver) as device:
            async with device.stream() as stream:
                buffer = stream.empty(4)
                for number in range(20):
                    stream.submit(seen.append, number)
                    stream.fill(buffer, number)
                await stream.synchronize()
        driver.close()
        return seen

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(main()) == list(range(20))
