"""Tickets of `Pipeline.submit`: they overlap, hold no slot, and each gets the outcome of its item."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DeviceFault,
    InvalidTypeError,
    Operation,
    Pipeline,
    Slot,
    Stage,
    WrongLoopError,
)
from aiocuda.pipeline import Ticket
from aiocuda.testing import SimulatedDriver, SimulatedLoop, Upset
from tests.helpers import AFFINE, Latch, in_thread, quickly, turns, until
from tests.pipeline.steps import SIZE, assert_quiet, down, held, stages, triple, up, value, values
from tests.pipeline.virtual import in_virtual_time, three
from tests.task_factories import each_factory, factory_of_tasks


async def echo(slot: Slot) -> Any:
    return slot.item


class Held:
    """A pipeline whose only stage awaits the test."""

    def __init__(self, device: Device, depth: int = 2) -> None:
        self.released = asyncio.Event()
        self.begun: list[Any] = []
        self.pipeline = Pipeline(device, [Stage("wait", self._wait, concurrency=depth)], depth)

    async def _wait(self, slot: Slot) -> Any:
        self.begun.append(slot.item)
        await self.released.wait()
        if isinstance(slot.item, Exception):
            raise slot.item
        return slot.item


@pytest_asyncio.fixture
async def reported() -> AsyncIterator[list[dict[str, Any]]]:
    """What the loop's exception handler has received."""
    found: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(context))
    yield found
    loop.set_exception_handler(None)


# -- overlap and slots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "milliseconds"), [(3, 5.1), (1, 9.0)])
def test_plain_loop_overlaps(depth: int, milliseconds: float) -> None:
    async def main(device: Device) -> float:
        async with Pipeline(device, three((2, 5, 2)), depth) as pipeline:
            for ticket in [await pipeline.submit(number) for number in range(3)]:
                await ticket
            loop = asyncio.get_running_loop()
            began = loop.time()
            tickets = [await pipeline.submit(number) for number in range(50)]
            for ticket in tickets:
                await ticket
            assert pipeline.statistics().peak_busy_slots == depth
            return (loop.time() - began) / 50 * 1e3

    assert in_virtual_time(main) == pytest.approx(milliseconds, abs=0.05)


@pytest.mark.asyncio
async def test_device_begins_inside_the_call(device: Device) -> None:
    """Without a turn of the loop in between: a program that computes next leaves the device with work."""
    async with Pipeline(device, stages()) as pipeline:
        ticket = await pipeline.submit(1)
        assert device.statistics().in_flight
        assert value(await quickly(ticket)) == 4


@pytest.mark.asyncio
async def test_any_order_and_any_number_of_times(device: Device) -> None:
    async with Pipeline(device, stages(), 2) as pipeline:
        tickets = [await pipeline.submit(number) for number in range(5)]
        assert [ticket.index for ticket in tickets] == list(range(5))
        found = [value(await quickly(ticket)) for ticket in (*reversed(tickets), *tickets)]
    assert found == [13, 10, 7, 4, 1, 1, 4, 7, 10, 13]
    assert_quiet(pipeline)


@pytest.mark.asyncio
async def test_slot_is_free_though_no_ticket_is_awaited(device: Device) -> None:
    async with Pipeline(device, stages(), 2) as pipeline:
        tickets = [await quickly(pipeline.submit(number)) for number in range(7)]
        await quickly(until(lambda: pipeline.ring.busy == 0, "the last items"))
        assert all(ticket.done() for ticket in tickets)
        assert [value(ticket.result()) for ticket in tickets] == [3 * number + 1 for number in range(7)]


@pytest.mark.asyncio
async def test_call_waits_for_a_slot_only(device: Device) -> None:
    one = Held(device)
    async with one.pipeline as pipeline:
        first, second = await quickly(pipeline.submit(1)), await quickly(pipeline.submit(2))
        third = asyncio.create_task(pipeline.submit(3))
        await turns(9)
        assert (third.done(), first.done(), one.begun, pipeline.ring.busy) == (False, False, [1, 2], 2)
        one.released.set()
        ticket = await quickly(third)
        assert [await quickly(each) for each in (ticket, second, first)] == [3, 2, 1]


@pytest.mark.asyncio
async def test_cancelled_call_takes_no_slot(device: Device) -> None:
    one = Held(device)
    async with one.pipeline as pipeline:
        tickets = [await pipeline.submit(1), await pipeline.submit(2)]
        waiting = [asyncio.create_task(pipeline.submit(number)) for number in (3, 4)]
        await turns(3)
        waiting[0].cancel()
        one.released.set()
        tickets.append(await quickly(waiting[1]))
        assert [await quickly(ticket) for ticket in tickets] == [1, 2, 4]
        assert one.begun == [1, 2, 4]
        assert waiting[0].cancelled()
    assert_quiet(pipeline)


@pytest.mark.asyncio
async def test_cancelled_in_the_turn_in_which_it_gets_its_slot(device: Device) -> None:
    one = Held(device, 1)
    async with one.pipeline as pipeline:
        ticket = await pipeline.submit(1)
        waiting = asyncio.create_task(pipeline.submit(2))
        await turns(3)
        ticket.add_done_callback(lambda _: waiting.cancel())
        one.released.set()
        assert await quickly(ticket) == 1
        await quickly(asyncio.wait({waiting}))
        assert await quickly(await quickly(pipeline.submit(3))) == 3
    assert_quiet(pipeline)


@pytest.mark.asyncio
async def test_cancelling_an_await_does_not_cancel_the_item(device: Device) -> None:
    one = Held(device)
    async with one.pipeline as pipeline:
        ticket = await pipeline.submit(1)
        waiting = [asyncio.create_task(ticket.wait()) for _ in range(3)]
        await turns(3)
        waiting[1].cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ticket
        one.released.set()
        assert await quickly(asyncio.gather(waiting[0], waiting[2])) == [1, 1]
        assert waiting[1].cancelled()
        assert await ticket == 1


@pytest.mark.asyncio
async def test_without_a_block_the_streams_are_open_until_the_last_item_has_ended(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    tickets = [await pipeline.submit(number) for number in range(4)]
    assert [value(await quickly(ticket)) for ticket in tickets] == [1, 4, 7, 10]
    assert_quiet(pipeline)
    assert await values(pipeline, range(2)) == [1, 4]  # right after the last ticket: nothing is in flight
    await pipeline.aclose()


@pytest.mark.asyncio
async def test_many_slots_leave_the_loop_its_turns(device: Device) -> None:
    """Where no call waits for a slot, the loop runs others after 16 items. A call cancelled there has no item."""
    one = Held(device, 100)
    tickets: list[Ticket] = []

    async def submit(count: int) -> None:
        for number in range(count):
            tickets.append(await one.pipeline.submit(number))  # noqa: PERF401 - those before a cancellation are kept

    async with one.pipeline as pipeline:
        task = asyncio.create_task(submit(50))
        await turns(1)
        assert (len(tickets), pipeline.ring.busy) == (15, 16)
        task.cancel()
        await quickly(until(lambda: pipeline.ring.busy == 15, "the end of the item of the cancelled call"))
        await quickly(submit(50))
        one.released.set()
        assert await quickly(asyncio.gather(*tickets)) == [*range(15), *range(50)]
    assert task.cancelled()


# -- what a ticket is ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_like_an_operation(device: Device) -> None:
    one = Held(device)
    told: list[Ticket] = []
    async with one.pipeline as pipeline:
        first, second = await pipeline.submit(1), await pipeline.submit(2)
        assert repr(first) == "<Ticket of item 0: begun; coroutine: .wait()>"
        assert not first.cancelled()
        for ask in (first.result, first.exception):
            with pytest.raises(BusyError, match="has not finished: await it"):
                ask()
        with pytest.raises(InvalidTypeError, match="neither true nor false"):
            bool(first)
        with pytest.raises(AttributeError, match="its item goes on"):
            first.cancel()  # type: ignore[attr-defined]  # it has none
        with pytest.raises(InvalidTypeError, match="a callback is a function"):
            first.add_done_callback(None)  # type: ignore[arg-type]
        for _ in range(2):
            first.add_done_callback(told.append)
        assert first.remove_done_callback(told.append) == 2
        first.add_done_callback(told.append)
        done = asyncio.create_task(_wait({first, second}))
        one.released.set()
        assert await quickly(asyncio.gather(first, second)) == [1, 2]
        assert await quickly(done) == {first, second}
        async with asyncio.TaskGroup() as group:
            waited = group.create_task(first.wait())
        assert (waited.result(), first.result(), first.exception(), repr(first)) == (
            1, 1, None, "<Ticket of item 0: done>",
        )  # fmt: skip
        second.add_done_callback(told.append)
        assert told == [first]
        await turns(1)
        assert told == [first, second]


async def _wait(tickets: set[Any]) -> set[Any]:
    return (await asyncio.wait(tickets))[0]


@pytest.mark.asyncio
async def test_ticket_holds_no_slot_and_no_item(device: Device) -> None:
    pipeline = Pipeline(device, [Stage("echo", echo)])
    ticket = await pipeline.submit(7)
    await quickly(ticket)
    await pipeline.aclose()
    found = gc.get_referents(ticket)
    assert not any(isinstance(each, (Slot, Pipeline)) for each in found)


@pytest.mark.asyncio
async def test_in_another_loop(device: Device) -> None:
    one = Held(device)
    async with one.pipeline as pipeline:
        ticket = await pipeline.submit(1)

        async def elsewhere() -> int:
            for attempt in (ticket.wait(), pipeline.submit(2)):
                with pytest.raises(WrongLoopError):
                    await attempt
            with pytest.raises(WrongLoopError):
                ticket.add_done_callback(print)
            return 1

        assert in_thread(elsewhere) == 1
        one.released.set()
        assert await quickly(ticket) == 1

        async def later() -> Any:
            return ticket.done(), await ticket

        assert in_thread(later) == (True, 1)


# -- the results -----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_result_in_the_memory_of_the_slot_is_copied(device: Device) -> None:
    def to_pinned(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("data", SIZE, np.uint32), out=slot.pinned("result", SIZE, np.uint32))

    async with Pipeline(device, [Stage("up", up), Stage("down", to_pinned)], depth=1) as pipeline:
        tickets = [await quickly(pipeline.submit(number)) for number in range(4)]
        assert [value(await quickly(ticket)) for ticket in tickets] == [0, 1, 2, 3]
        assert pipeline.statistics().results_copied == 4


@pytest.mark.asyncio
async def test_forked_stages(device: Device) -> None:
    async def join(slot: Slot) -> int:
        return value(slot.result("down")) + int(slot.result("beside"))

    async def beside(slot: Slot) -> int:
        await asyncio.sleep(0)
        return 100 * int(slot.item)

    forked = [Stage("up", up), Stage("compute", triple), Stage("down", down), Stage("beside", beside, after=()),
              Stage("join", join, after=("down", "beside"))]  # fmt: skip
    async with Pipeline(device, forked) as pipeline:
        tickets = [await quickly(pipeline.submit(number)) for number in range(6)]
        assert [await quickly(ticket) for ticket in tickets] == [103 * number + 1 for number in range(6)]


@pytest.mark.asyncio
async def test_replayed_stages(device: Device) -> None:
    def fill(slot: Slot) -> None:
        slot.pinned("source", SIZE, np.uint32)[:] = slot.item

    def send(slot: Slot) -> Operation[Any]:
        return slot.stream.copy(slot.buffer("data", SIZE, np.uint32), slot.pinned("source", SIZE, np.uint32))

    def receive(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("data", SIZE, np.uint32), out=slot.pinned("result", SIZE, np.uint32))

    replayed = [Stage("up", send, prepare=fill), Stage("compute", triple), Stage("down", receive)]
    async with Pipeline(device, replayed, 2, replay=True) as pipeline:
        tickets = [await quickly(pipeline.submit(number)) for number in range(6)]
        assert [value(await quickly(ticket)) for ticket in tickets] == [3 * number + 1 for number in range(6)]


@pytest.mark.asyncio
async def test_buffer_of_an_enqueued_upload_is_the_result_of_its_stage(device: Device, latch: Latch) -> None:
    """Also of a stage that returns several operations. Other results are available when the work is done."""

    def upload(slot: Slot) -> Any:
        latch.hold(slot.stream)
        return [slot.stream.upload(np.full(SIZE, slot.item, np.uint32)) for _ in range(2)]

    def compute(slot: Slot) -> Operation[None]:
        buffer, other = slot.result("upload")
        assert buffer is not other
        with pytest.raises(BusyError):
            slot.result("earlier")
        return slot.stream.launch(AFFINE, 4, 256, buffer, SIZE, 3, 1)

    def download(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.result("upload")[0])

    def earlier(slot: Slot) -> Operation[None]:
        latch.hold(slot.stream)
        return slot.stream.fill(slot.buffer("other", SIZE, np.uint32), 0)

    given = [Stage("earlier", earlier), Stage("upload", upload), Stage("compute", compute), Stage("down", download)]
    async with Pipeline(device, given) as pipeline:
        ticket = await quickly(pipeline.submit(5))
        await quickly(held(latch))
        assert not ticket.done()
        latch.release()
        assert value(await quickly(ticket)) == 16


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_failure_reaches_its_ticket_and_frees_the_slot(device: Device) -> None:
    def fragile(slot: Slot) -> Operation[None]:
        if slot.item == 1:
            raise ArithmeticError("item 1 cannot be computed")
        return triple(slot)

    async with Pipeline(device, [Stage("up", up), Stage("fragile", fragile), Stage("down", down)], 1) as pipeline:
        tickets = [await quickly(pipeline.submit(number)) for number in range(3)]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="item 1 cannot") as caught:
                await quickly(tickets[1])
        assert caught.value.__notes__ == ["in stage 'fragile' of item 1, counted from 0"]
        assert tickets[1].exception() is caught.value
        assert [value(await quickly(tickets[number])) for number in (0, 2)] == [1, 7]
        assert pipeline.ring.busy == 0
    assert_quiet(pipeline)


@pytest.mark.asyncio
@pytest.mark.parametrize("awaits", [False, True])
async def test_interrupt_leaves_the_loop_once_and_reaches_the_ticket(awaits: bool) -> None:
    tickets: list[Ticket] = []

    def stop(slot: Slot) -> None:
        raise SystemExit(3)

    async def stop_later(slot: Slot) -> None:
        stop(slot)

    async def main() -> None:
        async with aiocuda.open_device(driver="host") as device:
            async with Pipeline(device, [Stage("stop", stop_later if awaits else stop)]) as pipeline:
                tickets.append(await pipeline.submit(1))
                await asyncio.sleep(1)

    with pytest.raises(SystemExit):
        in_thread(main)
    assert all(isinstance(ticket.exception(), SystemExit) for ticket in tickets)
    assert len(tickets) == awaits


@pytest.mark.asyncio
async def test_ticket_that_is_dropped_with_a_failure_is_reported(
    device: Device, reported: list[dict[str, Any]]
) -> None:
    one = Held(device, 3)
    error, read = ValueError("nobody reads this"), ValueError("read")
    async with one.pipeline as pipeline:
        await pipeline.submit(error)
        ticket = await pipeline.submit(read)
        await pipeline.submit(3)
        one.released.set()
        await quickly(until(lambda: pipeline.ring.busy == 0, "the items"))
        assert ticket.exception() is read
        del ticket
        gc.collect()
        await turns(2)
    assert [(context["message"], context["exception"]) for context in reported] == [
        ("aiocuda: the failure of item 0 of a pipeline was never retrieved", error)
    ]


@pytest.mark.asyncio
async def test_skipped_item_is_not_reported_beside_the_one_that_has_failed(
    device: Device, reported: list[dict[str, Any]], latch: Latch
) -> None:
    """The function of an operation raises; the operations after it in its stream are skipped."""

    def fail() -> None:
        raise ZeroDivisionError

    def work(slot: Slot) -> Operation[Any]:
        latch.hold(slot.stream)
        return slot.stream.submit(fail) if slot.item == 0 else slot.stream.submit(int)

    async with Pipeline(device, [Stage("work", work)]) as pipeline:
        tickets = [await pipeline.submit(number) for number in range(2)]
        latch.release()
        for ticket in tickets:
            await quickly(until(ticket.done, "a ticket"))
        del tickets, ticket
        gc.collect()
        await turns(2)
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


@pytest.mark.parametrize("seed", range(8))
def test_device_fault_reaches_every_ticket(seed: int) -> None:
    async def main(device: Device) -> None:
        pipeline = Pipeline(device, three((2, 5, 2)), 3)
        tickets = [await pipeline.submit(number) for number in range(3)]
        found = await quickly(asyncio.gather(*tickets, return_exceptions=True))
        assert any(isinstance(each, DeviceFault) for each in found)
        assert isinstance(found[-1], DeviceFault)
        assert pipeline.ring.busy == 0
        with pytest.raises(DeviceFault):
            await (await pipeline.submit(4))

    async def run() -> None:
        driver = SimulatedDriver(seed, bandwidth=1e6, latency=0.0, upsets=[Upset("fault", 1 + seed)])
        with contextlib.suppress(DeviceFault):
            async with aiocuda.open_device(driver=driver) as device:
                await main(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(run())


# -- beside runs, and the end ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_during_a_run_it_is_refused_and_the_other_way_round(device: Device) -> None:
    one = Held(device)
    async with one.pipeline as pipeline:
        run = pipeline.run(range(2))
        first = asyncio.create_task(anext(run))
        await turns(3)
        with pytest.raises(BusyError, match="another run of this pipeline has not ended"):
            await pipeline.submit(1)
        one.released.set()
        await quickly(first)
        await run.aclose()
        one.released.clear()
        ticket = await pipeline.submit(1)
        with pytest.raises(BusyError, match="1 items of submit or execute_iteration are in flight"):
            await anext(pipeline.run(range(2)))
        one.released.set()
        assert await quickly(ticket) == 1


@pytest.mark.asyncio
async def test_end_completes_tickets_and_calls_that_wait(device: Device) -> None:
    one = Held(device, 1)
    async with one.pipeline as pipeline:
        ticket = await pipeline.submit(1)
        waiting = asyncio.create_task(pipeline.submit(2))
        await turns(3)
        closing = asyncio.create_task(pipeline.aclose())
        await turns(3)
        with pytest.raises(ClosedError):
            await pipeline.submit(3)
        one.released.set()
        await quickly(closing)
        assert (ticket.result(), waiting.result().result()) == (1, 2)
        assert_quiet(pipeline)


@pytest.mark.asyncio
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("pause", [0, 5])
async def test_exception_in_the_block_fails_tickets(
    device: Device, latch: Latch, reported: list[dict[str, Any]], awaits: bool, pause: int
) -> None:
    one = Held(device)

    def hold(slot: Slot) -> None:
        latch.hold(slot.stream)

    pipeline = one.pipeline if awaits else Pipeline(device, [Stage("hold", hold)], 2)
    asyncio.get_running_loop().call_later(0.02, latch.release)
    with pytest.raises(ZeroDivisionError):
        async with pipeline:
            tickets = [await pipeline.submit(1), await pipeline.submit(2)]
            waiting = asyncio.create_task(pipeline.submit(3))
            await turns(pause)
            raise ZeroDivisionError
    for ticket in tickets:
        with pytest.raises(ClosedError, match=f"item {ticket.index} of the pipeline"):
            await ticket
    if pause:
        with pytest.raises(ClosedError):
            await quickly(waiting)
    else:
        waiting.cancel()
        await asyncio.wait({waiting})
    del tickets
    gc.collect()
    assert reported == []
    assert set(pipeline.ring.states) == {"free"}


@pytest.mark.asyncio
async def test_all_tasks_are_cancelled_before_their_first_step(device: Device) -> None:
    async with Pipeline(device, stages(), 2) as pipeline:
        tickets = [await pipeline.submit(1), await pipeline.submit(2)]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_name() == "aiocuda-pipeline-item":
                task.cancel()
        for ticket in tickets:
            with pytest.raises(ClosedError, match="was cancelled"):
                await quickly(ticket)
        assert value(await quickly(await quickly(pipeline.submit(3)))) == 10
    assert_quiet(pipeline)


@pytest.mark.asyncio
async def test_stage_that_is_cancelled_by_its_own_work(device: Device) -> None:
    async def cancelled(slot: Slot) -> None:
        task = asyncio.create_task(asyncio.sleep(9))
        task.cancel()
        await task

    async with Pipeline(device, [Stage("cancelled", cancelled)]) as pipeline:
        ticket = await pipeline.submit(1)
        with pytest.raises(ClosedError, match="item 0 of the pipeline, counted from 0, was cancelled"):
            await quickly(ticket)


def test_loop_that_ends_with_tickets() -> None:
    kept: list[Ticket] = []

    async def main() -> None:
        device = await aiocuda.open_device(driver="host")
        try:
            one = Held(device)
            async with one.pipeline as pipeline:
                kept.append(await pipeline.submit(1))
                raise KeyError
        except KeyError:
            kept.append(kept[0])
        await device.aclose()

    asyncio.run(main())
    assert isinstance(kept[0].exception(), ClosedError)


# -- task factories --------------------------------------------------------------------------------------------------


async def none(slot: Slot) -> None:
    await asyncio.sleep(0)


@pytest.mark.asyncio
@each_factory
async def test_each_task_factory_serves_items_and_runs(device: Device, factory: str) -> None:
    """More items than slots: none of them keeps a slot."""
    fork = [Stage("up", up), Stage("left", none, after=["up"]), Stage("right", none, after=["up"])]
    fork.append(Stage("echo", echo, after=["left", "right"]))
    for plan in (stages(), [Stage("echo", echo)], fork):
        with factory_of_tasks(factory):
            async with Pipeline(device, plan, 2) as pipeline:
                tickets = [await pipeline.submit(number) for number in range(5)]
                alone = [await ticket for ticket in tickets]
                together = [result async for result in pipeline.run(range(5))]
        assert [value(each) for each in alone] == [value(each) for each in together]
        assert_quiet(pipeline)


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@each_factory
async def test_each_task_factory_serves_items_that_are_ended_early(device: Device, factory: str) -> None:
    # A wrapper that is cancelled before its first step leaves the coroutine that it wraps: see the filter above.
    with factory_of_tasks(factory):
        for plan in (stages(), [Stage("echo", echo)]):
            with pytest.raises(KeyError):
                async with Pipeline(device, plan, 2) as pipeline:
                    tickets = [await pipeline.submit(number) for number in range(2)]
                    raise KeyError
            assert all(ticket.done() for ticket in tickets)
            assert_quiet(pipeline)
        gc.collect()
