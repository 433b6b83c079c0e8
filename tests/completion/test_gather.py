"""`aiocuda.gather` behaves as `asyncio.gather`, with one waiter."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    BusyError,
    ClosedError,
    Device,
    DeviceFault,
    DriverError,
    InvalidTypeError,
    Pipeline,
    SkippedError,
    Slot,
    Stage,
    Stream,
    WrongLoopError,
)
from aiocuda.completion import Gathering
from tests.helpers import TRAP, Latch, Reports, block_until, in_thread, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_results_have_the_order_of_the_arguments(stream: Stream, other: Stream) -> None:
    buffers = [await stream.upload(np.full(4, value, np.float32)) for value in range(5)]
    downloads = [(stream if value % 2 else other).download(buffers[value]) for value in (3, 1, 4, 0, 2)]
    event = other.record()
    results = await aiocuda.gather(*downloads, event)
    assert [None if result is None else int(result[0]) for result in results] == [3, 1, 4, 0, 2, None]


async def test_gather_of_nothing() -> None:
    assert await aiocuda.gather() == []
    assert await aiocuda.gather(return_exceptions=True) == []


async def test_gather_of_one_operation_several_times(stream: Stream, latch: Latch) -> None:
    hold = latch.hold(stream)
    gathering = asyncio.ensure_future(_await(aiocuda.gather(hold, hold, hold)))
    await latch.held()
    latch.release()
    assert await quickly(gathering) == [None, None, None]


async def _await(gathering: object) -> object:
    return await gathering  # type: ignore[misc]  # the result of `gather`


async def test_gather_can_be_awaited_again(stream: Stream) -> None:
    gathering = aiocuda.gather(stream.synchronize(), stream.synchronize())
    assert await gathering == [None, None]
    assert await gathering == [None, None]


async def test_gather_accepts_only_operations_and_events(stream: Stream) -> None:
    async def coroutine() -> None: ...

    waiting = coroutine()
    with pytest.raises(InvalidTypeError, match=r"asyncio\.gather"):
        aiocuda.gather(stream.synchronize(), waiting)  # type: ignore[call-overload]  # a wrong argument on purpose
    waiting.close()
    with pytest.raises(InvalidTypeError, match="list"):
        aiocuda.gather([stream.synchronize()])  # type: ignore[call-overload]  # a wrong argument on purpose
    await stream.synchronize()


async def test_first_failure_is_raised_immediately_and_the_others_continue() -> None:
    async with open_peer() as (peer, device):
        stream, held = device.stream(), device.stream()
        with Latch(device) as latch:
            hold = latch.hold(held)
            await latch.held()
            peer.refuse("fill")
            failing = stream.fill(stream.empty(4), 1)
            with pytest.raises(DriverError):
                await quickly(_await(aiocuda.gather(hold, failing)))
            assert not hold.done()
            latch.release()
            assert await quickly(hold) is None


async def test_failure_that_was_enqueued_first_is_raised() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            peer.refuse("fill")
            failing = stream.fill(stream.empty(4), 1)
            skipped = stream.synchronize()
            gathering = asyncio.ensure_future(_await(aiocuda.gather(skipped, failing)))
            await asyncio.sleep(0)
            latch.release()
            with pytest.raises(DriverError):
                await quickly(gathering)


async def test_return_exceptions() -> None:
    async with open_peer() as (peer, device):
        stream, held = device.stream(), device.stream()
        with Latch(device) as latch:
            hold = latch.hold(held)
            abandoned = held.synchronize()
            abandoned.abandon()
            await latch.held()
            peer.refuse("fill")
            failing = stream.fill(stream.empty(4), 1)
            skipped = stream.synchronize()
            gathering = asyncio.ensure_future(
                _await(aiocuda.gather(hold, failing, skipped, abandoned, return_exceptions=True))
            )
            await until(failing.done, "the failure")
            assert not gathering.done()  # gather waits for all of them
            latch.release()
            outcomes = await quickly(gathering)
        assert [type(each) for each in outcomes] == [type(None), DriverError, SkippedError, ClosedError]


async def test_cancelling_gather_cancels_only_that_wait(device: Device, stream: Stream, latch: Latch) -> None:
    hold = latch.hold(stream)
    fill = stream.fill(stream.empty(4), 1)
    second = asyncio.create_task(fill.wait())
    gathering = asyncio.ensure_future(_await(aiocuda.gather(hold, fill)))
    await latch.held()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert (hold.state, fill.state) == ("submitted", "submitted")
    latch.release()
    assert await quickly(second) is None
    assert device.statistics().abandoned == 0


async def test_gather_under_a_timeout(stream: Stream, latch: Latch) -> None:
    hold = latch.hold(stream)
    await latch.held()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await aiocuda.gather(hold, stream.synchronize())
    latch.release()
    assert await quickly(hold) is None


async def test_operation_abandoned_while_it_is_gathered(stream: Stream, latch: Latch) -> None:
    hold = latch.hold(stream)
    gathering = asyncio.ensure_future(_await(aiocuda.gather(hold, stream.synchronize())))
    await latch.held()
    hold.abandon()
    with pytest.raises(ClosedError):
        await quickly(gathering)
    latch.release()
    await stream.synchronize()


async def test_failure_that_gather_did_not_raise_is_reported() -> None:
    """`gather` raises one failure. The failure of the other stream has no other reader."""
    with Reports() as reports, pytest.raises(DriverError):
        async with open_peer() as (peer, device):
            one, two = device.stream(), device.stream()
            peer.refuse("fill", times=2)
            failing = [one.fill(one.empty(4), 1), two.fill(two.empty(4), 1)]
            with pytest.raises(DriverError):
                await quickly(_await(aiocuda.gather(*failing)))
            await one.aclose()
            await two.aclose()
            del failing, one, two
            gc.collect()
    assert len(reports.failures) == 1


@pytest.mark.parametrize("return_exceptions", [False, True])
async def test_gather_that_finds_a_fault_first(return_exceptions: bool) -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        await asyncio.to_thread(TRAP.load, peer.driver, 0)
        with Latch(device) as latch, Latch(device) as before:
            latch.hold(other)
            before.hold(stream)
            await latch.held()
            await before.held()
            operations = [other.synchronize(), stream.launch(TRAP, 1, 1), stream.synchronize(), other.synchronize()]
            before.release()  # not earlier: a stream refuses operations after the fault
            block_until(lambda: peer.inner.fault, "the fault")
            gathering = _await(aiocuda.gather(*operations, return_exceptions=return_exceptions))
            if return_exceptions:
                outcomes = await quickly(gathering)
                assert [type(each) for each in outcomes] == [DeviceFault] * 4
            else:
                with pytest.raises(DeviceFault):
                    await quickly(gathering)


async def test_gather_in_another_loop(stream: Stream, latch: Latch) -> None:
    hold = latch.hold(stream)
    gathering = aiocuda.gather(hold)
    await latch.held()

    async def in_other_loop() -> None:
        with pytest.raises(WrongLoopError):
            await gathering

    await asyncio.to_thread(in_thread, in_other_loop)
    latch.release()
    assert await quickly(_await(gathering)) == [None]


# -- the methods that asyncio's functions call -------------------------------------------------------------------------


async def test_a_gathering_is_done_when_all_are(stream: Stream, other: Stream, latch: Latch) -> None:
    hold, early = latch.hold(stream), other.synchronize()
    gathering = aiocuda.gather(hold, early)
    told: list[Any] = []
    for _ in range(2):
        gathering.add_done_callback(told.append)
    await early
    await latch.held()
    assert not gathering.done()
    assert "2 operations: unfinished; coroutine: .wait()" in repr(gathering)
    for ask in (gathering.result, gathering.exception):
        with pytest.raises(BusyError, match="has not finished: await it"):
            ask()
    latch.release()
    await quickly(hold)
    await asyncio.sleep(0)
    assert told == [gathering, gathering]
    assert (gathering.done(), gathering.result(), gathering.exception()) == (True, [None, None], None)
    assert not gathering.cancelled()
    gathering.add_done_callback(told.append)
    await asyncio.sleep(0)
    assert told == 3 * [gathering]


@pytest.mark.parametrize("return_exceptions", [False, True])
async def test_a_gathering_is_done_at_the_first_failure_unless_failures_are_returned(return_exceptions: bool) -> None:
    async with open_peer() as (peer, device):
        stream, held = device.stream(), device.stream()
        with Latch(device) as latch:
            hold = latch.hold(held)
            await latch.held()
            peer.refuse("fill")
            failing = stream.fill(stream.empty(4), 1)
            gathering = aiocuda.gather(hold, failing, return_exceptions=return_exceptions)
            told: list[Any] = []
            gathering.add_done_callback(told.append)
            await until(failing.done, "the failure")
            await asyncio.sleep(0)
            assert (gathering.done(), bool(told)) == 2 * (not return_exceptions,)
            if return_exceptions:
                latch.release()
                await until(lambda: told, "the callback")
                results = gathering.result()
                assert [type(each) for each in results] == [type(None), DriverError]
                assert gathering.exception() is None
            else:
                assert not hold.is_awaited
                assert isinstance(gathering.exception(), DriverError)
                with pytest.raises(DriverError):
                    gathering.result()
                latch.release()
            await quickly(hold)


async def test_removed_callbacks_are_not_called_and_leave_nothing(stream: Stream, latch: Latch) -> None:
    hold = latch.hold(stream)
    gathering = aiocuda.gather(hold, hold)
    told: list[Any] = []

    def second(found: object) -> None:
        told.append("second")

    for function in (told.append, second, second):
        gathering.add_done_callback(function)
    assert gathering.remove_done_callback(told.append) == 1
    assert gathering.remove_done_callback(told.append) == 0
    assert hold.is_awaited
    assert gathering.remove_done_callback(second) == 2
    await latch.held()
    assert not hold.is_awaited
    gathering.add_done_callback(second)
    latch.release()
    await quickly(hold)
    await asyncio.sleep(0)
    assert told == ["second"]


async def test_callback_of_a_gathering_has_the_context_of_its_caller(stream: Stream) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    seen = asyncio.get_running_loop().create_future()
    variable.set("caller")
    gathering = aiocuda.gather(stream.synchronize())
    gathering.add_done_callback(lambda _: seen.set_result(variable.get()))
    variable.set("later")
    assert await quickly(seen) == "caller"


async def test_gathering_of_nothing_is_done(stream: Stream) -> None:
    gathering: Gathering[list[Any]] = aiocuda.gather()
    told: list[Any] = []
    gathering.add_done_callback(told.append)
    await asyncio.sleep(0)
    assert (gathering.done(), gathering.result(), told) == (True, [], [gathering])


async def test_wait_of_a_gathering_is_a_coroutine(stream: Stream) -> None:
    waiting = aiocuda.gather(stream.synchronize()).wait()
    assert inspect.iscoroutine(waiting)
    assert await waiting == [None]


async def test_callback_of_a_gathering_in_another_loop(stream: Stream, latch: Latch) -> None:
    hold = latch.hold(stream)
    await latch.held()
    gathering = aiocuda.gather(hold)

    async def in_other_loop() -> None:
        with pytest.raises(WrongLoopError):
            gathering.add_done_callback(print)

    await asyncio.to_thread(in_thread, in_other_loop)
    for wrong in (None, "print"):
        with pytest.raises(InvalidTypeError, match="a callback is a function"):
            gathering.add_done_callback(wrong)  # type: ignore[arg-type]  # on purpose
    assert not hold.is_awaited
    latch.release()


# -- other objects with callbacks ------------------------------------------------------------------------------------


def _double(slot: Slot) -> Any:
    if slot.item < 0:
        raise ZeroDivisionError
    return slot.stream.upload(np.full(4, 2 * slot.item))


async def test_gather_takes_tickets_nodes_and_gatherings(device: Device, stream: Stream) -> None:
    async with Pipeline(device, [Stage("double", _double)], 2) as pipeline, AsyncCoordinator(device) as coordinator:
        tickets = [await pipeline.submit(item) for item in range(5)]
        node = coordinator.upload(np.arange(3))
        gathering = aiocuda.gather(*tickets, stream.record(), node, aiocuda.gather(stream.synchronize()))
        assert "of 8 operations, nodes and tickets: unfinished; coroutine: .wait()" in repr(gathering)
        called: list[Any] = []
        gathering.add_done_callback(called.append)
        gathering.add_done_callback(called.remove)
        assert gathering.remove_done_callback(called.remove) == 1
        *uploads, event, uploaded, inner = await quickly(gathering)
        assert [(await stream.download(each))[0] for each in uploads] == [0, 2, 4, 6, 8]
        assert (event, uploaded, inner) == (None, None, [None])
        await asyncio.sleep(0)
        assert called == [gathering]
        assert gathering.done()
        assert gathering.exception() is None
        assert gathering.result()[5:] == [None, None, [None]]
        assert len(await quickly(gathering.wait())) == 8
        assert await quickly(asyncio.gather(gathering.wait(), aiocuda.gather(tickets[0]).wait()))


async def test_gather_of_tickets_raises_the_first_failure(device: Device) -> None:
    async with Pipeline(device, [Stage("double", _double)], 2) as pipeline:
        tickets = [await pipeline.submit(item) for item in (1, -1, 2)]
        gathering = aiocuda.gather(*tickets)
        with pytest.raises(ZeroDivisionError):
            await quickly(gathering)
        assert isinstance(gathering.exception(), ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            gathering.result()
        again = aiocuda.gather(*tickets)
        assert again.done()
        assert isinstance(again.exception(), ZeroDivisionError)
        first, failure, last = await quickly(aiocuda.gather(*tickets, return_exceptions=True))
        assert (first.shape, type(failure), last.shape) == ((4,), ZeroDivisionError, (4,))


async def test_cancelling_a_gather_of_tickets_cancels_only_that_wait(device: Device, latch: Latch) -> None:
    def hold(slot: Slot) -> Any:
        latch.hold(slot.stream)
        return slot.stream.synchronize()

    async with Pipeline(device, [Stage("hold", hold)], 2) as pipeline:
        ticket = await pipeline.submit(1)
        gathering = aiocuda.gather(ticket)
        with pytest.raises(BusyError):
            gathering.result()
        waiting = asyncio.ensure_future(gathering.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not gathering.done()
        latch.release()
        assert await quickly(gathering) == [None]
