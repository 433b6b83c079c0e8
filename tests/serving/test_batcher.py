"""Rows O1 to O5: batches, outcomes, deadlines, overload, priorities and faults of a `MicroBatcher`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AiocudaError,
    BusyError,
    ClosedError,
    Device,
    DeviceFault,
    Kernel,
    NoEventLoopError,
    QueueFullError,
    WrongLoopError,
)
from aiocuda.serving import Batch, BatchError, DeadlineError, MicroBatcher, OverloadedError
from tests.helpers import SAXPY, TRAP, FaultListener, Reports, in_thread, quickly, turns, until
from tests.task_factories import each_factory, factory_of_tasks

pytestmark = pytest.mark.asyncio


async def doubled(batch: Batch[int]) -> list[int]:
    return [2 * item for item in batch.items]


class Held:
    """A function that notes its batches, and returns when the test lets it."""

    def __init__(self, result: Callable[[Batch[Any]], Any] = lambda batch: batch.items) -> None:
        self.batches: list[Batch[Any]] = []
        self.gate = asyncio.Event()
        self.result = result

    async def __call__(self, batch: Batch[Any]) -> Any:
        self.batches.append(batch)
        await self.gate.wait()
        return self.result(batch)

    @property
    def items(self) -> list[list[Any]]:
        return [batch.items for batch in self.batches]


async def outcomes(requests: Sequence[Awaitable[Any]]) -> list[Any]:
    return await quickly(asyncio.gather(*requests, return_exceptions=True))  # type: ignore[no-any-return]


# -- eight failures of other batchers --------------------------------------------------------------------------------


async def test_cancelled_request_does_not_stop_the_batcher() -> None:
    """Ray Serve 41199: setting the result of a cancelled future ended the loop that makes batches."""
    held = Held()
    async with MicroBatcher(held, max_batch_size=4, batch_wait_timeout_s=0) as batcher:
        tasks = [asyncio.ensure_future(batcher.submit(item)) for item in range(4)]
        await until(lambda: held.batches)
        tasks[1].cancel()
        held.gate.set()
        first, second, *others = await outcomes(tasks)
        assert (first, *others) == (0, 2, 3)
        assert isinstance(second, asyncio.CancelledError)
        assert await quickly(batcher.submit(7)) == 7


async def test_request_that_arrives_while_a_batch_ends_is_served() -> None:
    """Ray Serve 42705: a request that arrived between two checks waited forever."""

    async def answer(batch: Batch[int]) -> list[int]:
        asyncio.get_running_loop().call_soon(late.append, batcher.submit_nowait(1) if not late else None)
        return batch.items

    late: list[Any] = []
    async with MicroBatcher(answer, max_batch_size=1) as batcher:
        assert await quickly(batcher.submit(0)) == 0
        await until(lambda: late)
        assert await quickly(late[0]) == 1


async def test_batcher_goes_on_when_all_requests_of_a_batch_are_cancelled() -> None:
    """Ray Serve 50046: a batched deployment hung when its requests were cancelled."""
    held = Held()
    async with MicroBatcher(held, max_batch_size=2, batch_wait_timeout_s=0) as batcher:
        for _ in range(3):
            tasks = [asyncio.ensure_future(batcher.submit(item)) for item in range(2)]
            await until(lambda: held.batches)
            for task in tasks:
                task.cancel()
            assert [type(one) for one in await outcomes(tasks)] == [asyncio.CancelledError] * 2
            held.gate.set()
            assert await quickly(batcher.submit(5)) == 5
            held.gate.clear()
            held.batches.clear()
        assert batcher.statistics().cancelled == 6


async def test_failing_weight_is_the_error_of_its_item_alone() -> None:
    """Ray Serve 66140: after an exception of the sizing function, all later requests hung."""

    def weight(item: Any) -> int:
        if item is None:
            raise ZeroDivisionError("no weight")
        return int(item)

    async with MicroBatcher(doubled, max_batch_size=8, weight=weight) as batcher:
        good, bad = batcher.submit(1), batcher.submit(None)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError, match="no weight"):
            await quickly(bad)
        assert await quickly(good) == 2
        assert batcher.statistics().accepted == 1


async def test_weight_of_the_items_limits_a_batch() -> None:
    """BentoML 3859: the limit of a batch counted requests, whatever their size."""
    held = Held()
    async with MicroBatcher(held, max_batch_size=8, weight=len) as batcher:
        requests = [batcher.submit_nowait("x" * length) for length in (3, 4, 2, 6, 8)]
        held.gate.set()
        await outcomes(requests)
    assert [[len(item) for item in items] for items in held.items] == [[3, 4], [2, 6], [8]]
    assert [batch.weight for batch in held.batches] == [7, 8, 8]


async def test_wait_of_zero_serves_a_single_request() -> None:
    """LitServe 238: with a batch_timeout of 0 a request was never answered."""
    async with MicroBatcher(doubled, max_batch_size=8, batch_wait_timeout_s=0) as batcher:
        assert await quickly(batcher.submit(21)) == 42
        assert batcher.statistics().sizes == {1: 1}


async def test_deadline_passes_while_a_batch_runs() -> None:
    """Triton 7512: the timeout of a waiting request took effect after the running batch."""
    held = Held()
    async with MicroBatcher(held, max_batch_size=1, batch_wait_timeout_s=0) as batcher:
        running = batcher.submit_nowait(1)
        await until(lambda: held.batches)
        with pytest.raises(DeadlineError, match=r"deadline of 0\.01 s has passed") as caught:
            await quickly(batcher.submit(2, deadline_s=0.01))
        assert (caught.value.deadline_s, caught.value.predicted_s) == (0.01, None)
        assert isinstance(caught.value, TimeoutError)
        assert not running.done()
        held.gate.set()
        assert await quickly(running) == 1
    assert held.items == [[1]]
    assert batcher.statistics().missed_deadlines == 1


# -- batches ---------------------------------------------------------------------------------------------------------


async def test_requests_of_one_iteration_are_one_batch() -> None:
    async with MicroBatcher(doubled, max_batch_size=64, batch_wait_timeout_s=0) as batcher:
        assert await outcomes([batcher.submit(item) for item in range(20)]) == [2 * item for item in range(20)]
        assert batcher.statistics().sizes == {20: 1}


async def test_operations_of_a_batch_have_the_labels_of_its_requests() -> None:
    labels: list[str | None] = []

    async def fill(batch: Batch[int]) -> list[int]:
        labels.append(batch.stream.synchronize().label)
        return batch.items

    async def request(item: int, label: str | None) -> int:
        if label is None:
            return await batcher.submit(item)
        with aiocuda.label(label):
            return await batcher.submit(item)

    async with aiocuda.open_device(driver="host") as device:
        async with MicroBatcher(fill, max_batch_size=4, batch_wait_timeout_s=0, device=device) as batcher:
            named = [request(number, label) for number, label in enumerate(("a", "b", "a", None))]
            assert await asyncio.gather(*named) == [0, 1, 2, 3]
            assert await batcher.submit(4) == 4
    assert labels == ["a, b", None]


async def test_several_batches_run_at_a_time() -> None:
    held = Held()
    async with MicroBatcher(held, max_batch_size=1, max_concurrent_batches=3) as batcher:
        requests = [batcher.submit_nowait(item) for item in range(5)]
        await until(lambda: len(held.batches) == 3)
        await turns()
        assert held.items == [[0], [1], [2]]
        assert (batcher.statistics().queued, batcher.statistics().running) == (2, 3)
        held.gate.set()
        assert await outcomes(requests) == list(range(5))


async def test_padded_is_the_next_bucket() -> None:
    held = Held()
    held.gate.set()
    async with MicroBatcher(held, max_batch_size=20, buckets=[32, 1, 8]) as batcher:
        for count in (1, 2, 8, 9, 20):
            await outcomes([batcher.submit(item) for item in range(count)])
    assert [(batch.size, batch.padded) for batch in held.batches] == [(1, 1), (2, 8), (8, 8), (9, 32), (20, 32)]
    assert [batch.number for batch in held.batches] == list(range(5))
    assert repr(held.batches[3]) == "<Batch 3: 9 items, weight 9, padded to 32>"


async def test_stream_and_slot_stay_with_a_place(device: Device) -> None:
    seen: list[tuple[Any, Any]] = []

    async def saxpy(batch: Batch[float]) -> Any:
        seen.append((batch.stream, batch.slot.buffer("y", 8).address))
        x = batch.slot.pinned("x", 8)
        await x
        np.asarray(x)[: batch.size] = batch.items
        y = batch.slot.buffer("y", 8)
        await batch.stream.copy(y, x)
        batch.stream.launch(SAXPY, 1, 32, 8, 2.0, y, y)
        return (await batch.stream.download(y))[: batch.size]

    async with MicroBatcher(saxpy, max_batch_size=8, device=device) as batcher:
        for first in (0.0, 10.0):
            assert await outcomes([batcher.submit(first + item) for item in range(8)]) == [
                3 * (first + item) for item in range(8)
            ]
        assert seen[0][0] is seen[1][0]
        assert seen[0][1] == seen[1][1]
        assert device.statistics().streams == 1
    assert device.statistics().streams == 0
    await device.drain()
    assert device.statistics().in_flight == 0


async def test_place_is_free_when_its_stream_has_finished(device: Device) -> None:
    """Work that the function has not awaited belongs to its batch."""
    finished: list[bool] = []

    async def launch(batch: Batch[int]) -> list[int]:
        finished.append(batch.stream.tail is None)
        batch.stream.add_callback(lambda _: finished.append(True))
        return batch.items

    async with MicroBatcher(launch, max_batch_size=1, device=device) as batcher:
        for item in range(3):
            assert await quickly(batcher.submit(item)) == item
            assert len(finished) == 2 * item + 2
    assert all(finished)


# -- outcomes --------------------------------------------------------------------------------------------------------


async def test_one_bad_item_fails_alone() -> None:
    bad = ValueError("bad")

    async def check(batch: Batch[int]) -> list[int | BaseException]:
        return [bad if item < 0 else item for item in batch.items]

    async with MicroBatcher(check, max_batch_size=4) as batcher:
        one, two, three, four = await outcomes([batcher.submit(item) for item in (1, -1, 3, -2)])
        assert (one, three) == (1, 3)
        assert two is bad
        assert four is not bad
        assert (type(four), four.args, four.__cause__) == (ValueError, ("bad",), bad)
        assert (batcher.statistics().answered, batcher.statistics().failed) == (2, 2)


class Odd(Exception):  # noqa: N818 - an exception as programs have them
    """An exception that cannot be copied."""

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")


class Unprintable(Odd):
    def __str__(self) -> str:
        raise SystemError

    __repr__ = __str__


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), Odd(code=1), Unprintable(code=1), asyncio.CancelledError()])
async def test_each_request_of_a_failed_batch_gets_an_exception_of_its_own(error: BaseException) -> None:
    async def fail(batch: Batch[int]) -> list[int]:
        raise error

    async with MicroBatcher(fail, max_batch_size=3) as batcher:
        failures = await outcomes([batcher.submit(item) for item in range(3)])
        assert len({id(failure) for failure in failures}) == 3
        for failure in failures:
            assert type(failure) is (ZeroDivisionError if type(error) is ZeroDivisionError else BatchError)
            cause = failure.__cause__
            assert cause is not None
            assert cause is error or cause.__cause__ is error
        assert [type(one) for one in await outcomes([batcher.submit(4)])] == [type(failures[0])]


async def test_notes_of_an_exception_are_not_shared() -> None:
    async def fail(batch: Batch[int]) -> list[int]:
        error = ValueError("x")
        error.add_note("from the function")
        raise error

    async with MicroBatcher(fail, max_batch_size=2) as batcher:
        one, two = await outcomes([batcher.submit(item) for item in range(2)])
    one.add_note("mine")
    assert two.__notes__ == ["from the function"]


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([1], "returned 1 results: it has to return one result, or one exception, for each of the 2 items"),
        ([1, 2, 3], "If the others are padding, return results[: batch.size]"),
        (None, "NoneType"),
        ("ab", "str"),
        ({1: 1, 2: 2}, "dict"),
        ((item for item in range(2)), "generator"),
        (np.array(1.0), "ndarray"),
    ],
)
async def test_another_number_of_results_fails_the_batch(results: Any, text: str) -> None:
    async def wrong(batch: Batch[int]) -> Any:
        return results

    async with MicroBatcher(wrong, max_batch_size=2) as batcher:
        failures = await outcomes([batcher.submit(item) for item in range(2)])
        assert [type(failure) for failure in failures] == [BatchError] * 2
        assert text in str(failures[0])


async def test_awaitable_in_place_of_the_results_has_its_cure_in_the_error() -> None:
    async def forgets_await(batch: Batch[int]) -> Any:
        return asyncio.get_running_loop().create_future()

    async with MicroBatcher(forgets_await, max_batch_size=2) as batcher:
        with pytest.raises(BatchError, match="await it inside the function"):
            await batcher.submit(1)


async def test_results_may_be_rows_of_an_array() -> None:
    async def rows(batch: Batch[int]) -> Any:
        return np.arange(6).reshape(3, 2)

    async with MicroBatcher(rows, max_batch_size=3) as batcher:
        found = await outcomes([batcher.submit(item) for item in range(3)])
    assert [row.tolist() for row in found] == [[0, 1], [2, 3], [4, 5]]


async def test_failure_of_a_cancelled_caller_is_not_reported() -> None:
    held = Held(lambda batch: 1 / 0)
    with Reports() as reports:
        async with MicroBatcher(held, max_batch_size=1) as batcher:
            task = asyncio.ensure_future(batcher.submit(1))
            await until(lambda: held.batches)
            held.gate.set()
            await until(lambda: batcher.statistics().failed)
            del task
            other = asyncio.ensure_future(batcher.submit(2))
            await until(lambda: len(held.batches) == 2)
            asyncio.get_running_loop().call_soon(other.cancel)
            await outcomes([other])
        gc.collect()
        assert not [report for report in reports.contexts if "retrieved" in report["message"]][1:]


async def test_function_has_the_context_of_the_task_that_entered_the_batcher() -> None:
    name = contextvars.ContextVar("name", default="nobody")
    seen = []

    async def note(batch: Batch[int]) -> list[int]:
        seen.append(name.get())
        name.set("of a batch")
        return batch.items

    name.set("of the batcher")
    async with MicroBatcher(note, max_batch_size=1) as batcher:
        name.set("of a request")
        await quickly(batcher.submit(1))
        await quickly(batcher.submit(2))
        assert name.get() == "of a request"
    assert seen == ["of the batcher"] * 2


async def test_requests_are_not_kept_after_their_outcome() -> None:
    class Thing:
        pass

    async def thing(batch: Batch[Any]) -> list[Any]:
        return [Thing() for _ in batch.items]

    async with MicroBatcher(thing, max_batch_size=1) as batcher:
        item = Thing()
        alive = [weakref.ref(item), weakref.ref(await quickly(batcher.submit(item)))]
        del item
        await turns(3)
        gc.collect()
        assert [one() for one in alive] == [None, None]


# -- deadlines and overload ------------------------------------------------------------------------------------------


async def test_deadline_in_a_running_batch_discards_the_result() -> None:
    held = Held()
    async with MicroBatcher(held, max_batch_size=2, batch_wait_timeout_s=0) as batcher:
        one, two = batcher.submit_nowait(1), batcher.submit_nowait(2, deadline_s=0.02)
        await until(lambda: held.batches)
        with pytest.raises(DeadlineError):
            await quickly(two)
        held.gate.set()
        assert await quickly(one) == 1
    assert batcher.statistics().missed_deadlines == 1


async def test_request_whose_deadline_passed_while_the_loop_was_blocked_is_in_no_batch() -> None:
    async with MicroBatcher(doubled, max_batch_size=8, batch_wait_timeout_s=0) as batcher:
        one, two = batcher.submit_nowait(1), batcher.submit_nowait(2, deadline_s=0.0)
        assert await quickly(one) == 2
        with pytest.raises(DeadlineError):
            await quickly(two)
        assert batcher.statistics().sizes == {1: 1}


async def test_expired_requests_leave_the_queue_256_in_an_iteration() -> None:
    async with MicroBatcher(doubled, max_batch_size=8, batch_wait_timeout_s=0, max_queued_requests=2000) as batcher:
        late = [batcher.submit_nowait(item, deadline_s=0.0) for item in range(1000)]
        request = batcher.submit_nowait(21)
        queued = [batcher.statistics().queued]
        while queued[-1]:
            await asyncio.sleep(0)
            queued.append(batcher.statistics().queued)
        # Both the batch that begins and the timer of the deadlines remove so many.
        assert all(0 < before - after <= 512 for before, after in itertools.pairwise(queued))
        assert await quickly(request) == 42
        assert {type(one) for one in await outcomes(late)} == {DeadlineError}
        assert batcher.statistics().sizes == {1: 1}


async def test_close_waits_for_requests_that_have_expired_and_are_in_no_batch() -> None:
    batcher = MicroBatcher(doubled, max_batch_size=2000, batch_wait_timeout_s=0, max_queued_requests=2000)
    async with batcher:
        late = [batcher.submit_nowait(item, deadline_s=0.0) for item in range(1000)]
    assert all(isinstance(request.exception(), DeadlineError) for request in late)
    assert batcher.statistics().missed_deadlines == 1000


async def test_answered_requests_with_a_far_deadline_leave_nothing() -> None:
    async with MicroBatcher(doubled, max_batch_size=4, batch_wait_timeout_s=0) as batcher:
        held = batcher.submit_nowait(1, deadline_s=60.0)
        for _ in range(300):
            await outcomes([batcher.submit_nowait(item, deadline_s=60.0) for item in range(4)])
        assert await held == 2
        first = batcher.submit_nowait(1, deadline_s=60.0)
        assert batcher._deadlines is not None
        assert len(list(batcher._deadlines)) <= 4
        assert len(batcher._deadlines._order) <= 72
        assert await first == 2


async def test_full_queue_refuses_immediately() -> None:
    held = Held()
    async with MicroBatcher(held, max_batch_size=1, max_queued_requests=3) as batcher:
        first = batcher.submit_nowait(0)
        await until(lambda: held.batches)
        waiting = [batcher.submit_nowait(item) for item in range(3)]
        for submit in (batcher.submit, batcher.submit_nowait):
            with pytest.raises(OverloadedError, match="3 requests wait") as caught:
                submit(9) if submit is batcher.submit_nowait else await quickly(submit(9))
            assert isinstance(caught.value, QueueFullError)
            assert caught.value.queued == 3
            assert 0 < caught.value.retry_after_s < 100
        waiting[1].cancel()
        await turns(2)
        again = batcher.submit_nowait(10)  # the cancelled request has left the queue
        held.gate.set()
        await outcomes([first, *waiting, again])
        assert batcher.statistics().overloaded == 2


async def test_priorities_are_served_in_order() -> None:
    held = Held()
    async with MicroBatcher(held, max_batch_size=2) as batcher:
        first = [batcher.submit_nowait(item) for item in "xx"]
        await until(lambda: held.batches)
        waiting = [
            batcher.submit_nowait(name, priority=priority)  # type: ignore[arg-type]
            for name, priority in [
                ("l1", "low"), ("n1", "normal"), ("c1", "critical"), ("z1", "cleanup"), ("n2", "normal"),
                ("h1", "high"), ("l2", "low"), ("c2", "critical"),
            ]
        ]  # fmt: skip
        held.gate.set()
        await outcomes([*first, *waiting])
    assert held.items[1:] == [["c1", "c2"], ["h1", "n1"], ["n2", "l1"], ["l2", "z1"]]


async def test_low_priority_is_overtaken_at_most_256_times() -> None:
    served: list[str] = []

    async def note(batch: Batch[str]) -> list[str]:
        served.extend(batch.items)
        if "cleanup" not in served:
            # There is always a critical request that waits.
            requests.extend(batcher.submit_nowait("critical", priority="critical") for _ in range(2))
        return batch.items

    async with MicroBatcher(note, max_batch_size=1) as batcher:
        requests = [batcher.submit_nowait("first", priority="critical")]
        requests.append(batcher.submit_nowait("cleanup", priority="cleanup"))
        await until(lambda: "cleanup" in served)
        await outcomes(requests)
    assert 250 <= served.index("cleanup") <= 257


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
async def test_every_request_gets_the_fault(wrapped: bool) -> None:
    async def fault(batch: Batch[int]) -> list[int]:
        if wrapped:
            async with asyncio.TaskGroup() as group:
                group.create_task(batch.stream.launch(TRAP, 1, 1).wait())
        await batch.stream.launch(TRAP, 1, 1)
        raise AssertionError

    async with aiocuda.open_device(driver="host") as device:
        async with MicroBatcher(fault, max_batch_size=2, device=device) as batcher:
            assert batcher.healthy
            failures = await outcomes([batcher.submit(item) for item in range(7)])
            assert [type(failure) for failure in failures[2:]] == [DeviceFault] * 5
            assert len({id(failure) for failure in failures}) == 7
            assert not batcher.healthy
            with pytest.raises(DeviceFault):
                batcher.submit_nowait(1)
            assert batcher.statistics().queued == 0


async def test_fault_of_the_device_outside_of_the_batcher_makes_it_unhealthy() -> None:
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        async with MicroBatcher(doubled, max_batch_size=2, device=device) as batcher:
            with pytest.raises(DeviceFault):
                await stream.launch(TRAP, 1, 1)
            assert not batcher.healthy
            with pytest.raises(DeviceFault):
                await quickly(batcher.submit(1))


async def test_waiting_requests_get_the_fault_while_the_function_waits_for_something_else() -> None:
    held = Held()
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        async with MicroBatcher(held, max_batch_size=1, device=device) as batcher:
            running, waiting = batcher.submit_nowait(1), batcher.submit_nowait(2)
            await until(lambda: held.batches)
            with pytest.raises(DeviceFault):
                await stream.launch(TRAP, 1, 1)
            assert isinstance((await outcomes([waiting]))[0], DeviceFault)
            assert not running.done()
            held.gate.set()
            assert isinstance((await outcomes([running]))[0], DeviceFault)  # its stream has failed


async def test_failed_work_that_was_not_awaited_fails_its_batch(device: Device) -> None:
    async def leave(batch: Batch[int]) -> list[int]:
        if batch.items == [0]:
            batch.stream.launch(BROKEN, 1, 1)
        return batch.items

    async with MicroBatcher(leave, max_batch_size=1, device=device) as batcher:
        failed = (await outcomes([batcher.submit(0)]))[0]
        assert isinstance(failed, AiocudaError)
        assert "does_not_compile" in str(failed) + str(failed.__cause__)
        assert await quickly(batcher.submit(1)) == 1  # the stream is usable


BROKEN = Kernel("does_not_compile", source='extern "C" __global__ void does_not_compile() { this is no C }')


# -- open and close --------------------------------------------------------------------------------------------------


async def test_closing_completes_accepted_requests_and_refuses_new_ones() -> None:
    held = Held()
    batcher: MicroBatcher[int, int]
    async with MicroBatcher(held, max_batch_size=2, batch_wait_timeout_s=9) as batcher:
        requests = [batcher.submit_nowait(item) for item in range(5)]
        closing = asyncio.ensure_future(batcher.aclose())
        again = asyncio.ensure_future(batcher.aclose())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError, match="closed"):
            batcher.submit_nowait(9)
        await until(lambda: held.batches)
        assert not again.done()
        held.gate.set()
        await outcomes([closing, again])
        assert [request.result() for request in requests] == list(range(5))
    assert held.items == [[0, 1], [2, 3], [4]]


async def test_leaving_by_an_exception_fails_what_waits_and_completes_what_runs() -> None:
    held = Held()
    with pytest.raises(ZeroDivisionError):
        async with MicroBatcher(held, max_batch_size=1) as batcher:
            running, waiting = batcher.submit_nowait(1), batcher.submit_nowait(2)
            await until(lambda: held.batches)
            asyncio.get_running_loop().call_later(0.01, held.gate.set)
            raise ZeroDivisionError
    assert running.result() == 1
    assert isinstance(waiting.exception(), ClosedError)


async def test_cancelled_close_leaves() -> None:
    held = Held()
    batcher: MicroBatcher[int, int] = MicroBatcher(held, max_batch_size=1)
    async with batcher:
        running, waiting = batcher.submit_nowait(1), batcher.submit_nowait(2)
        await until(lambda: held.batches)
        closing = asyncio.ensure_future(batcher.aclose())
        await turns(3)
        closing.cancel()
        await until(waiting.done)
        assert isinstance(waiting.exception(), ClosedError)
        held.gate.set()
        assert await quickly(running) == 1
        assert isinstance((await outcomes([closing]))[0], asyncio.CancelledError)


async def test_device_that_closes_first_fails_the_requests(device: Device) -> None:
    async def compute(batch: Batch[int]) -> Any:
        return list(await batch.stream.download(await batch.stream.upload(np.array(batch.items))))

    async with MicroBatcher(compute, max_batch_size=1, device=device) as batcher:
        assert await quickly(batcher.submit(1)) == 1
        await device.aclose()
        assert isinstance((await outcomes([batcher.submit(2)]))[0], ClosedError)


async def test_batcher_is_used_inside_its_block_once_and_in_one_loop() -> None:
    batcher = MicroBatcher(doubled, max_batch_size=1)
    with pytest.raises(BusyError, match="async with"):
        batcher.submit_nowait(1)
    await batcher.aclose()
    with pytest.raises(ClosedError, match="make another one"):
        await batcher.__aenter__()
    async with MicroBatcher(doubled, max_batch_size=1) as batcher:
        with pytest.raises(BusyError, match="entered once"):
            await batcher.__aenter__()

        async def elsewhere() -> None:
            with pytest.raises(WrongLoopError):
                await batcher.submit(1)

        def without_a_loop() -> None:
            with pytest.raises(NoEventLoopError, match="run_coroutine_threadsafe"):
                batcher.submit_nowait(1)

        in_thread(elsewhere)
        await asyncio.to_thread(without_a_loop)
        assert inspect.iscoroutinefunction(batcher.submit)
        assert not inspect.iscoroutinefunction(batcher.submit_nowait)
        assert repr(batcher) == "<MicroBatcher 0 queued, 0 of 1 batches running>"


# -- statistics ------------------------------------------------------------------------------------------------------


# -- odd exceptions, odd closes --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818 - raised on purpose
    """An exception that refuses every attribute, also ``__cause__``."""


class Textless(Exception):  # noqa: N818 - raised on purpose
    def __copy__(self) -> Textless:
        raise ValueError("no copy")

    def __repr__(self) -> str:
        raise GeneratorExit


@pytest.mark.parametrize(
    ("error", "first", "others"),
    [
        (StopIteration(1), RuntimeError, RuntimeError),
        (asyncio.CancelledError(), RuntimeError, RuntimeError),
        (Frozen(), Frozen, BatchError),
        (Textless(), Textless, BatchError),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_exception_that_is_returned_several_times_reaches_each_request(
    error: BaseException, first: type[BaseException], others: type[BaseException]
) -> None:
    async def fail(batch: Batch[int]) -> list[BaseException]:
        return [error] * batch.size

    batcher: MicroBatcher[int, int]
    async with MicroBatcher(fail, max_batch_size=3) as batcher:
        found = await outcomes([batcher.submit_nowait(item) for item in range(3)])
    assert [type(each) for each in found] == [first, others, others]
    assert len({id(each) for each in found}) == 3


async def test_failed_batch_whose_exception_has_no_text_fails_its_requests() -> None:
    async def fail(batch: Batch[int]) -> list[int]:
        raise Textless

    async with MicroBatcher(fail, max_batch_size=2) as batcher:
        for each in await outcomes([batcher.submit_nowait(item) for item in range(2)]):
            assert isinstance(each, BatchError)
            assert "raised Textless" in str(each)


async def test_result_that_claims_to_be_an_exception_is_a_result() -> None:
    class Claims:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:  # as a mock with a spec
            return ValueError

    claims = Claims()

    async def answer(batch: Batch[int]) -> list[Any]:
        return [claims, *batch.items[1:]]

    async with MicroBatcher(answer, max_batch_size=2) as batcher:
        found = await outcomes([batcher.submit_nowait(item) for item in range(2)])
    assert found[0] is claims
    assert found[1] == 1


async def test_function_cannot_close_its_batcher() -> None:
    async def close(batch: Batch[int]) -> list[int]:
        await batcher.aclose()
        return batch.items

    async def leave(batch: Batch[int]) -> list[int]:
        await batcher.__aexit__(ValueError)
        return batch.items

    for function in (close, leave):
        async with MicroBatcher(function, max_batch_size=1) as batcher:
            with pytest.raises(BusyError, match="close it outside of them"):
                await quickly(batcher.submit(1))
            with pytest.raises(BusyError, match="close it outside of them"):
                await quickly(batcher.submit(1))  # it is still open


@pytest.mark.parametrize("use", ["aclose", "block"])
async def test_function_cannot_close_its_stream(device: Device, use: str) -> None:
    """Every later batch failed: its stream was closed."""

    async def infer(batch: Batch[str]) -> list[str]:
        if batch.items == ["close"]:
            if use == "aclose":
                await batch.stream.aclose()
            else:
                async with batch.stream:
                    pass
        await batch.stream.synchronize()
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        with pytest.raises(BusyError, match="is closed by its batcher, which still needs it: use it without `async wi"):
            await quickly(batcher.submit("close"))
        assert await quickly(batcher.submit("next")) == "next"


async def test_batcher_is_closed_in_its_loop() -> None:
    async with MicroBatcher(doubled, max_batch_size=1) as batcher:
        with pytest.raises(WrongLoopError, match="another event loop"):
            in_thread(batcher.aclose)
        assert await quickly(batcher.submit(2)) == 4


async def test_close_beside_many_waiting_requests_does_not_block_the_loop() -> None:
    """It waited for all of them with one `asyncio.wait`, which adds and removes a callback for each in one step."""
    held = Held()
    async with MicroBatcher(held, max_batch_size=64, max_queued_requests=20_000) as batcher:
        requests = [batcher.submit_nowait(item) for item in range(10_000)]
        closing = asyncio.ensure_future(batcher.aclose())
        await turns(3)
        assert sum(len(request._callbacks) > 1 for request in requests) == 1
        held.gate.set()
        assert await outcomes(requests) == list(range(10_000))
        await quickly(closing)


# -- exceptions of the program's classes -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class PrefixError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")
        self.name = name


class SlotError(Exception):
    __slots__ = ("__hidden", "code")

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = self.__hidden = code

    @property
    def hidden(self) -> int:
        return self.__hidden


async def test_exception_that_refuses_attributes_is_the_cause_of_a_batch_error() -> None:
    """A generator of contextlib sets ``__traceback__``: the requests got `FrozenInstanceError` instead."""

    async def fail(batch: Batch[int]) -> list[int]:
        raise error

    error = FrozenError(7)
    async with MicroBatcher(fail, max_batch_size=2) as batcher:
        for failure in await outcomes([batcher.submit(item) for item in range(2)]):
            assert isinstance(failure, BatchError)
            assert failure.__cause__ is error


async def test_copied_exception_has_the_text_and_the_attributes_of_the_original() -> None:
    async def fail(batch: Batch[int]) -> list[int]:
        raise errors[batch.number]

    errors: list[Exception] = [PrefixError("model"), SlotError("no", 7)]
    async with MicroBatcher(fail, max_batch_size=2) as batcher:
        for failure in await outcomes([batcher.submit(item) for item in range(2)]):
            assert (type(failure), str(failure), failure.name) == (PrefixError, "no model", "model")
        for failure in await outcomes([batcher.submit(item) for item in range(2)]):
            assert (type(failure), str(failure), failure.code, failure.hidden) == (SlotError, "no", 7, 7)


# -- callers that end ------------------------------------------------------------------------------------------------


async def test_coroutine_that_ends_in_another_way_withdraws_its_request() -> None:
    held = Held()
    async with MicroBatcher(held, max_batch_size=1) as batcher:
        first = batcher.submit_nowait(0)
        await until(lambda: held.batches)
        thrown, closed = batcher.submit(1), batcher.submit(2)
        for coroutine in (thrown, closed):
            coroutine.send(None)
        with pytest.raises(asyncio.CancelledError):
            thrown.throw(asyncio.CancelledError())
        closed.close()
        await turns(2)
        assert batcher.statistics().cancelled == 2
        held.gate.set()
        assert await quickly(first) == 0
    assert held.items == [[0]]


@pytest.mark.parametrize("raises", [True, False])
async def test_failed_request_is_freed_without_a_collection(raises: bool) -> None:
    class Thing:
        pass

    async def fail(batch: Batch[Thing]) -> list[Exception]:
        if raises:
            raise ZeroDivisionError
        return [ZeroDivisionError() for _ in batch.items]

    batcher: MicroBatcher[Thing, Exception]
    async with MicroBatcher(fail, max_batch_size=1, batch_wait_timeout_s=0) as batcher:
        item = Thing()
        alive = weakref.ref(item)
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(ZeroDivisionError):  # `pytest.raises` makes a cycle of its own
                await batcher.submit(item)
            del item
            await turns(3)
            assert alive() is None
        finally:
            gc.enable()


async def test_batch_whose_requests_were_all_cancelled_is_not_counted() -> None:
    async with MicroBatcher(doubled, max_batch_size=2) as batcher:
        for request in [batcher.submit_nowait(item) for item in range(2)]:
            request.cancel()
        await turns(5)
        found = batcher.statistics()
        assert (found.cancelled, found.batches, found.sizes) == (2, 0, {})


async def test_healthy_changes_nothing_when_another_thread_reads_it() -> None:
    """It failed the waiting requests on the thread that read it."""

    def read(_: DeviceFault) -> None:
        reader = threading.Thread(target=lambda: seen.append((batcher.healthy, batcher.statistics().queued)))
        reader.start()
        reader.join()

    held = Held()
    seen: list[tuple[bool, int]] = []
    listener = FaultListener(read)  # before the batcher's own one
    try:
        async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
            async with MicroBatcher(held, max_batch_size=1, device=device) as batcher:
                requests = [batcher.submit_nowait(item) for item in range(3)]
                await until(lambda: held.batches)
                with pytest.raises(DeviceFault):
                    await stream.launch(TRAP, 1, 1)
                held.gate.set()
                assert [type(one) for one in await outcomes(requests)] == [DeviceFault] * 3
    finally:
        listener.stop()
    assert seen == [(False, 2)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
async def test_eager_tasks_of_many_batches_are_not_nested() -> None:
    async def answer(batch: Batch[int]) -> list[int]:
        if batch.number == 0:
            await gate.wait()
        return batch.items

    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    try:
        async with MicroBatcher(answer, max_batch_size=1, max_queued_requests=2000) as batcher:
            requests = [batcher.submit_nowait(item) for item in range(2000)]
            gate.set()
            assert await outcomes(requests) == list(range(2000))
    finally:
        loop.set_task_factory(before)


@each_factory
async def test_each_task_factory_serves_more_batches_than_places(factory: str) -> None:
    with factory_of_tasks(factory):
        async with MicroBatcher(doubled, max_batch_size=1, max_concurrent_batches=2) as batcher:
            requests = [batcher.submit_nowait(number) for number in range(10)]
            assert [await request for request in requests] == [2 * number for number in range(10)]
            assert await batcher.submit(10) == 20
        assert batcher.statistics().running == 0
