"""One operation: its attributes, its states, its waiters and its callbacks."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import BusyError, ClosedError, Device, DriverError, NoEventLoopError, Operation, Stream, WrongLoopError
from aiocuda._core import State
from aiocuda.completion._progress import TRANSITIONS
from tests.helpers import SAXPY, Latch, in_thread, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_result_of_each_method(stream: Stream, other: Stream) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = await stream.upload(x)
    assert (buffer.shape, buffer.dtype) == (x.shape, x.dtype)
    out = np.empty_like(x)
    assert await stream.download(buffer, out) is out
    assert np.array_equal(out, x)
    assert np.array_equal(await stream.download(buffer), x)
    second = stream.empty_like(buffer)
    assert await stream.copy(second, buffer) is None
    assert await stream.launch(SAXPY, 1, 32, 12, 2.0, buffer, second) is None
    assert await stream.copy(out, second) is None
    assert np.array_equal(out, 3 * x)
    assert await stream.fill(second, 7) is None
    assert await stream.wait(other.fill(buffer, 1)) is None
    assert await stream.synchronize() is None
    assert (await stream.download(second) == 7).all()


async def test_repr_and_properties(stream: Stream, latch: Latch) -> None:
    buffer = stream.empty(4)
    hold = latch.hold(stream)
    fill = stream.fill(buffer, 1)
    await latch.held()
    assert hold.kind == "launch"
    assert fill.kind == "fill"
    assert fill.id > hold.id
    assert fill.stream is stream
    assert fill.state == "submitted"
    assert repr(fill) == f"<Operation {fill.id} fill on left: submitted; coroutine: .wait()>"
    assert str(fill) == f"<Operation {fill.id} fill on left: submitted>"
    latch.release()
    await quickly(fill)
    assert fill.state == "done"


async def test_kind_of_each_method(stream: Stream) -> None:
    buffer = stream.empty(4)
    array = np.empty(4, np.float32)
    kinds = [
        stream.upload(array).kind,
        stream.copy(buffer, array).kind,
        stream.copy(array, buffer).kind,
        stream.copy(stream.empty(4), buffer).kind,
        stream.fill(buffer, 0).kind,
        stream.synchronize().kind,
        stream.wait(stream.synchronize()).kind,
        stream.record().operation.kind,
        stream.add_callback(lambda operation: None).kind,
    ]
    assert kinds == ["upload", "upload", "download", "copy", "fill", "synchronize", "wait", "record", "callback"]
    await stream.synchronize()


async def test_all_waiters_get_the_same_result(stream: Stream, latch: Latch) -> None:
    buffer = stream.empty(4)
    latch.hold(stream)
    operation = stream.download(buffer)
    tasks = [asyncio.create_task(operation.wait()) for _ in range(20)]
    await latch.held()
    latch.release()
    results = await quickly(asyncio.gather(*tasks))
    assert all(result is results[0] for result in results)
    assert await operation is results[0]
    assert operation.result() is results[0]
    assert operation.exception() is None


async def test_result_of_an_unfinished_operation_raises(stream: Stream, latch: Latch) -> None:
    operation = latch.hold(stream)
    await latch.held()
    assert not operation.done()
    with pytest.raises(BusyError, match="has not finished: await it"):
        operation.result()
    with pytest.raises(BusyError, match="has not finished: await it"):
        operation.exception()
    latch.release()
    await quickly(operation)
    assert operation.result() is None


async def test_operations_resolve_in_the_order_of_their_stream(stream: Stream, latch: Latch) -> None:
    buffer, array = stream.empty(1000), np.zeros(1000, np.float32)
    latch.hold(stream)
    order: list[int] = []
    operations: list[Operation[Any]] = []
    for index in range(60):
        methods: list[Callable[[], Operation[Any]]] = [
            lambda: stream.fill(buffer, 1),
            lambda: stream.download(buffer),
            lambda: stream.upload(array),
            stream.synchronize,
        ]
        operation = methods[index % 4]()
        operation.add_done_callback(lambda finished: order.append(finished.id))
        operations.append(operation)
    await latch.held()
    assert not order
    latch.release()
    await quickly(operations[-1])
    assert all(operation.done() for operation in operations)
    await until(lambda: len(order) == 60, "the last callback")
    assert order == sorted(order)


async def test_later_operation_is_never_done_before_an_earlier_one(stream: Stream) -> None:
    small = stream.empty(16)
    large = await stream.upload(np.zeros(3 << 20, np.uint8))
    operations: list[Operation[Any]] = []
    for _ in range(4):
        operations += [stream.download(large), stream.fill(small, 1), stream.download(small)]
    while not operations[-1].done():
        states = [operation.done() for operation in operations]
        assert states == sorted(states, reverse=True)
        await asyncio.sleep(0)


class StateRecorder:
    """Records the states in which operations are seen."""

    def __init__(self) -> None:
        self.seen: dict[int, list[str]] = {}

    def record(self, *operations: Operation[Any]) -> None:
        for operation in operations:
            states = self.seen.setdefault(operation.id, [])
            if not states or states[-1] != operation.state:
                states.append(operation.state)

    def check(self) -> set[str]:
        """Check each recorded change against the table, directly or through states that were too short to be seen."""
        for states in self.seen.values():
            for before, after in itertools.pairwise(states):
                assert State[after.upper()] in _reachable(State[before.upper()]), f"{before} → {after}"
        return {state for states in self.seen.values() for state in states}


def _reachable(state: State) -> set[State]:
    found: set[State] = set()
    following = set(TRANSITIONS[state])
    while following:
        found |= following
        following = {after for before in following for after in TRANSITIONS[before]} - found
    return found


async def test_states_change_only_as_the_table_allows() -> None:
    recorder = StateRecorder()
    async with open_peer(max_in_flight=4) as (peer, device):
        stream = device.stream()
        array = np.zeros(9 << 20, np.uint8)
        buffer = stream.empty(9 << 20, np.uint8)
        small = stream.empty(16)
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            operations: list[Operation[Any]] = [stream.fill(small, each) for each in range(6)]
            operations += [stream.copy(buffer, array), stream.download(buffer), stream.download(small)]
            abandoned = stream.fill(small, 9)
            operations.append(abandoned)
            recorder.record(*operations)
            assert abandoned.abandon()
            recorder.record(*operations)
            latch.release()
        while not operations[-2].done():
            recorder.record(*operations)
            await asyncio.sleep(0)
        recorder.record(*operations)
        with peer.holding_jobs():
            landing = stream.download(buffer)
            recorder.record(landing)
            await until(lambda: landing.state == "landing", "the copy by a thread")
            recorder.record(landing)
        await landing
        recorder.record(landing)
        peer.refuse("fill")
        failing = stream.fill(small, 1)
        recorder.record(failing)
        with pytest.raises(DriverError):
            await failing
        recorder.record(failing)
    assert recorder.check() == {"queued", "staging", "submitted", "landing", "done", "failed", "abandoned"}


async def test_final_states_of_the_table() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {state for state, following in TRANSITIONS.items() if not following} == {
        State.DONE,
        State.FAILED,
        State.ABANDONED,
    }


# Callbacks


async def test_callbacks_run_once_on_the_loop_in_order(stream: Stream, latch: Latch) -> None:
    operation = latch.hold(stream)
    called: list[tuple[str, Operation[Any], asyncio.AbstractEventLoop]] = []
    for name in "abc":

        def note(finished: Operation[Any], name: str = name) -> None:
            called.append((name, finished, asyncio.get_running_loop()))

        operation.add_done_callback(note)
    await latch.held()
    assert not called
    latch.release()
    await quickly(operation)
    await asyncio.sleep(0)
    assert called == [(name, operation, asyncio.get_running_loop()) for name in "abc"]


async def test_callback_of_a_finished_operation_runs_in_the_next_iteration(stream: Stream) -> None:
    operation = stream.synchronize()
    await operation
    called: list[Operation[Any]] = []
    operation.add_done_callback(called.append)
    assert not called
    await asyncio.sleep(0)
    assert called == [operation]


async def test_removed_callback_does_not_run(stream: Stream, latch: Latch) -> None:
    operation = latch.hold(stream)
    called: list[Operation[Any]] = []
    operation.add_done_callback(called.append)
    operation.add_done_callback(called.append)
    assert operation.remove_done_callback(called.append) == 2
    assert operation.remove_done_callback(called.append) == 0
    latch.release()
    await quickly(operation)
    await asyncio.sleep(0)
    assert not called


async def test_callback_runs_in_the_context_in_which_it_was_added(stream: Stream, latch: Latch) -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number")
    seen: list[int] = []
    operation = latch.hold(stream)
    number.set(1)
    operation.add_done_callback(lambda _: seen.append(number.get()))
    number.set(2)
    context = contextvars.copy_context()
    context.run(number.set, 3)
    operation.add_done_callback(lambda _: seen.append(number.get()), context=context)
    operation.add_done_callback(lambda _: seen.append(number.get()))
    number.set(4)
    latch.release()
    await quickly(operation)
    await asyncio.sleep(0)
    assert seen == [1, 3, 2]


async def test_callback_runs_although_no_task_awaits_the_operation(stream: Stream, latch: Latch) -> None:
    called = asyncio.Event()
    latch.hold(stream)
    stream.synchronize().add_done_callback(lambda _: called.set())
    await latch.held()
    latch.release()
    await quickly(called.wait())


async def test_callback_that_raises_does_not_affect_others(stream: Stream, latch: Latch) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    operation = latch.hold(stream)

    def fail(_: Operation[Any]) -> None:
        raise ZeroDivisionError

    called: list[Operation[Any]] = []
    operation.add_done_callback(fail)
    operation.add_done_callback(called.append)
    latch.release()
    await quickly(operation)
    await asyncio.sleep(0)
    assert called == [operation]
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]


# Abandoning


async def test_abandoned_operation_wakes_its_waiters_immediately(device: Device, stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    buffer = stream.empty(4)
    operation = stream.download(buffer)
    waiter = asyncio.create_task(operation.wait())
    called: list[Operation[Any]] = []
    operation.add_done_callback(called.append)
    await latch.held()
    assert operation.abandon()
    assert operation.state == "abandoned"
    assert not operation.abandon()
    with pytest.raises(ClosedError, match="was abandoned"):
        await quickly(waiter)
    with pytest.raises(ClosedError, match="was abandoned"):
        await operation
    with pytest.raises(ClosedError, match="was abandoned"):
        operation.result()
    assert isinstance(operation.exception(), ClosedError)
    assert called == [operation]
    latch.release()
    await stream.synchronize()
    assert device.statistics().in_flight == 0


async def test_abandoning_drops_the_copy_out_and_keeps_the_order(stream: Stream, latch: Latch) -> None:
    buffer = await stream.upload(np.full(4, 3, np.float32))
    out = np.zeros(4, np.float32)
    latch.hold(stream)
    stream.fill(buffer, 5).abandon()  # the device still makes this fill
    operation = stream.download(buffer, out)
    operation.abandon()
    after = stream.download(buffer)
    await latch.held()
    latch.release()
    assert (await quickly(after) == 5).all()
    assert (out == 0).all()


async def test_finished_operation_cannot_be_abandoned(stream: Stream) -> None:
    operation = stream.synchronize()
    await operation
    assert not operation.abandon()
    assert operation.state == "done"


@pytest.mark.parametrize("nbytes", [1 << 20, 9 << 20])
async def test_target_of_an_abandoned_download_is_busy_until_the_copy_out_ends(nbytes: int) -> None:
    """A worker thread may be copying bytes from pinned memory to the array, and does not stop before its end."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        old = await stream.upload(np.full(nbytes, 1, np.uint8))
        new = await stream.upload(np.full(nbytes, 2, np.uint8))
        out = np.zeros(nbytes, np.uint8)
        with peer.holding_jobs():
            operation = stream.download(old, out)
            await until(lambda: operation.state == "landing", "landing")
            operation.abandon()
            with pytest.raises(ClosedError):
                await operation
            ticks = device.statistics().watchdog_wakes
            await until(lambda: device.statistics().watchdog_wakes > ticks + 2, "the watchdog")
            with pytest.raises(BusyError, match="is writing this"):
                stream.download(new, out)
        await stream.synchronize()
        assert (await quickly(stream.download(new, out)) == 2).all()


# Processes, loops and attributes


async def test_cannot_be_pickled_or_copied(stream: Stream) -> None:
    operation = stream.synchronize()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="belongs to this process"):
            attempt(operation)
    await operation


async def test_waiting_in_another_loop_is_refused_before_any_driver_call() -> None:
    async with open_peer() as (peer, device):
        with Latch(device) as latch:
            stream = device.stream()
            operation = latch.hold(stream)
            await latch.held()

            async def in_other_loop() -> None:
                peer.calls.clear()
                with pytest.raises(WrongLoopError, match="belongs to another event loop"):
                    await operation
                with pytest.raises(WrongLoopError):
                    await asyncio.gather(operation)
                with pytest.raises(WrongLoopError):
                    operation.add_done_callback(print)
                with pytest.raises(WrongLoopError):
                    operation.abandon()

            await asyncio.to_thread(in_thread, in_other_loop)
            latch.release()
            await quickly(operation)
        assert await asyncio.to_thread(in_thread, operation.wait) is None  # any loop can await a finished operation


async def test_operation_without_a_running_loop_is_refused(stream: Stream) -> None:

    def without_a_loop() -> None:
        with pytest.raises(NoEventLoopError, match="call from a coroutine"):
            stream.synchronize()

    await asyncio.to_thread(without_a_loop)


async def test_missing_cancel_names_abandon(stream: Stream) -> None:
    operation: Any = stream.synchronize()
    assert not hasattr(operation, "cancel")
    with pytest.raises(AttributeError, match=r"<Operation .*> has no 'cancel': .* operation\.abandon\(\)"):
        operation.cancel()
    await operation


async def test_dir_lists_no_name_of_the_library(stream: Stream) -> None:
    operation = stream.synchronize()
    assert isinstance(operation, Operation)
    internal = {"add_waiter", "extra", "is_settled", "lease", "queue", "status", "value", "waiters"}
    assert internal <= {name for kind in type(operation).__mro__ for name in vars(kind)}
    assert internal.isdisjoint(dir(Operation))
    assert internal.isdisjoint(dir(operation))
    assert {"id", "kind", "state", "done", "settle", "wait"} <= set(dir(operation))
    await operation
