"""E2, E4, E6: AsyncCoordinator: dependencies on the device, places, withdrawal, closing."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import (
    AsyncCoordinator,
    BusyError,
    ClosedError,
    Device,
    Event,
    EventPool,
    InvalidArgumentError,
    InvalidTypeError,
    ManagedContext,
    Operation,
    StaleHandleError,
    Stream,
    WrongLoopError,
)
from aiocuda.lowlevel import resources_of
from tests.coordination.graphs import BLEND, BUMP, ITEMS
from tests.helpers import SPIN, Latch, in_thread, quickly, until

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def test_fork_and_join_are_awaited_once(device: Device, coordinator: AsyncCoordinator) -> None:
    """One upload, two kernels, their sum: the host is notified of the awaited node only."""
    await device.load(BLEND)
    buffers = [coordinator.compute_stream.empty(ITEMS, np.uint32) for _ in range(3)]
    await until(
        lambda: not resources_of(device).loop_states.blocking()
    )  # the end of what a thread page-locks is a notification, too
    before = device.statistics()
    up = coordinator.upload(np.arange(ITEMS, dtype=np.uint32))
    left = coordinator.compute(BLEND, 1, 32, buffers[0], up, up, ITEMS, writes=[buffers[0]])
    right = coordinator.compute(BLEND, 1, 32, buffers[1], up, up, ITEMS, writes=[buffers[1]])
    join = coordinator.compute(BLEND, 1, 32, buffers[2], buffers[0], buffers[1], ITEMS, writes=[buffers[2]])
    down = coordinator.download(buffers[2])
    assert left.stream is not right.stream
    assert set(join.dependencies) == {left, right}
    np.testing.assert_array_equal(await quickly(down), np.arange(ITEMS) * 16)
    after = device.statistics()
    assert after.parks - before.parks <= 1
    assert after.notifications - before.notifications <= 1
    coordinator.poll()
    found = coordinator.statistics()
    assert (found.registered, found.done, found.waiting, found.in_flight) == (5, 5, 0, 0)
    assert found.by_kind == {"transfer": 2, "kernel": 3}
    assert up.result() is up.buffer


async def test_host_learns_of_a_graph_once_for_each_sink(device: Device, coordinator: AsyncCoordinator) -> None:
    await device.load(BUMP)
    buffers = [coordinator.compute_stream.empty(ITEMS, np.uint32) for _ in range(3)]
    for buffer in buffers:
        coordinator.upload(ONES, buffer)
    await coordinator.drain()
    before = device.statistics().notifications
    for _ in range(10):
        for buffer in buffers:
            coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS)
    downs = [coordinator.download(buffer) for buffer in buffers]
    await asyncio.gather(*downs)
    assert device.statistics().notifications - before <= len(downs)


async def test_order_holds_while_a_stream_is_held(coordinator: AsyncCoordinator, stream: Stream, latch: Latch) -> None:
    """Dependents of a held stream wait on the device: they are submitted, and have not run."""
    up = coordinator.upload(np.zeros(ITEMS, np.uint32))
    await up
    await coordinator.compute(BUMP, 1, 32, up, 0, ITEMS)  # loaded
    latch.hold(stream)
    await latch.held()
    first = coordinator.compute(BUMP, 1, 32, up, 1, ITEMS, stream=stream)
    second = coordinator.compute(BUMP, 1, 32, up, 2, ITEMS)
    unrelated = coordinator.upload(ONES)
    down = coordinator.download(up)
    await quickly(unrelated)
    assert (first.state, second.state, down.state) == ("submitted",) * 3
    latch.release()
    np.testing.assert_array_equal(await quickly(down), 7 * ONES)


async def test_at_most_so_many_are_in_flight(device: Device, stream: Stream, latch: Latch) -> None:
    await device.load(SPIN)  # CUDA loads no kernel while another one runs
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=3) as coordinator:
        nodes = [coordinator.compute(SPIN, 1, 1, 1000, stream=stream) for _ in range(8)]
        await until(lambda: nodes[2].operation is not None)
        assert [node.state == "waiting" for node in nodes] == [False] * 3 + [True] * 5
        assert coordinator.statistics().in_flight == 3
        assert coordinator.statistics().waiting == 5
        latch.release()
        await quickly(nodes[-1])
    assert coordinator.statistics().done == 8


async def test_places_go_by_priority(device: Device, stream: Stream, latch: Latch) -> None:
    order: list[str] = []
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        coordinator.compute(SPIN, 1, 1, 1000, stream=stream)
        for priority in ("cleanup", "low", "normal", "high", "critical", "low"):
            node = coordinator.compute(SPIN, 1, 1, 1000, priority=priority, description=priority)
            node.add_done_callback(lambda node: order.append(node.description))
        latch.release()
        await quickly(coordinator.drain())
        await asyncio.sleep(0)
    assert order == ["critical", "high", "normal", "low", "low", "cleanup"]


async def test_withdrawn_before_it_is_given_never_runs(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = stream.empty(ITEMS, np.uint32)
    await stream.fill(buffer, 1)
    await device.load(BUMP)
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        given = coordinator.compute(SPIN, 1, 1, 1000, stream=stream)
        withdrawn = coordinator.compute(BUMP, 1, 32, buffer, 1, ITEMS)
        waiter = asyncio.create_task(withdrawn.wait())
        await asyncio.sleep(0)
        assert withdrawn.abandon()
        assert not withdrawn.abandon()
        assert withdrawn.state == "abandoned"
        with pytest.raises(ClosedError, match="it never ran"):
            await quickly(waiter)
        latch.release()
        await quickly(given)
        assert not given.abandon()
    async with device.stream() as reader:
        np.testing.assert_array_equal(await reader.download(buffer), ONES)
    assert coordinator.statistics().abandoned == 1


async def test_cancelled_await_changes_nothing_but_itself(device: Device, stream: Stream, latch: Latch) -> None:
    """Of what waits for a place, too."""
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        nodes = [coordinator.compute(SPIN, 1, 1, 1000, stream=stream) for _ in range(2)]
        waiters = [asyncio.create_task(nodes[1].wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]
        latch.release()
        await quickly(waiters[1])
        assert nodes[1].state == "done"


async def test_callbacks_see_the_variables_of_who_submitted(coordinator: AsyncCoordinator) -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who")
    seen: list[tuple[str, str]] = []

    async def submit(name: str) -> None:
        who.set(name)
        node = coordinator.upload(ONES, description=name)
        node.add_done_callback(lambda node: seen.append((node.description, who.get())))

    await asyncio.gather(*(asyncio.create_task(submit(name)) for name in "abc"))
    await coordinator.drain()
    await asyncio.sleep(0)
    assert sorted(seen) == [(name, name) for name in "abc"]


async def test_late_callback_runs_once_and_removed_callback_never(coordinator: AsyncCoordinator) -> None:
    told: list[object] = []
    node = coordinator.upload(ONES)
    node.add_done_callback(told.append)
    assert node.remove_done_callback(told.append) == 1
    await node
    await asyncio.sleep(0)
    assert told == []
    node.add_done_callback(told.append)
    await asyncio.sleep(0)
    assert told == [node]


async def test_host_function_runs_between_two_transfers(coordinator: AsyncCoordinator) -> None:
    """It begins when its prerequisites are done, and its dependents run after it."""
    array = np.zeros(ITEMS, np.uint32)
    up = coordinator.upload(3 * ONES)
    down = coordinator.download(up, out=array)
    plain = coordinator.host(lambda: np.multiply(array, 2, out=array).sum(), reads=[array], writes=[array])

    async def halve() -> str:
        await asyncio.sleep(0)
        array[:] //= 3
        return "halved"

    class Awaits:
        async def __call__(self) -> str:
            return await halve()

    coroutine = coordinator.host(halve, after=plain, reads=[array], writes=[array])
    coordinator.host(lambda: np.multiply(array, 3, out=array), reads=[array], writes=[array])
    called = coordinator.host(Awaits(), reads=[array], writes=[array])
    again = coordinator.upload(array, up.buffer)
    result = coordinator.download(up)
    np.testing.assert_array_equal(await quickly(result), 2 * ONES)
    await coordinator.drain()
    assert (await plain, await coroutine, await called) == (6 * ITEMS, "halved", "halved")
    assert down.state == again.state == "done"


async def test_upload_of_an_array_waits_for_the_download_that_fills_it(coordinator: AsyncCoordinator) -> None:
    """The host uses the bytes, so the coordinator waits on the host: no `BusyError`, and no await in the program."""
    array = np.zeros(ITEMS, np.uint32)
    up = coordinator.upload(5 * ONES)
    coordinator.download(up, out=array)
    second = coordinator.upload(array)
    np.testing.assert_array_equal(await quickly(coordinator.download(second)), 5 * ONES)


async def test_work_of_others_counts_as_an_operation(coordinator: AsyncCoordinator) -> None:
    up = coordinator.upload(ONES)
    async with coordinator.operation("reduction", reads=[up.buffer], writes=[up.buffer]) as bracket:
        assert bracket.state == "open"
        assert bracket.stream is not None
        bracket.stream.launch(BUMP, 1, 32, up.buffer, 1, ITEMS)
        later = coordinator.download(up)
        bracket.set_result("six")
    assert bracket in later.dependencies
    np.testing.assert_array_equal(await quickly(later), 6 * ONES)
    assert await bracket == "six"
    assert coordinator.statistics().by_kind["reduction"] == 1


async def test_bracket_cancelled_before_its_turn_is_withdrawn(device: Device) -> None:
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        entered = asyncio.Event()
        leave = asyncio.Event()

        async def hold() -> None:
            async with coordinator.operation("kernel"):
                entered.set()
                await leave.wait()

        async def never() -> None:
            async with coordinator.operation("kernel"):
                pytest.fail("there was no place")

        holder = asyncio.create_task(hold())
        await entered.wait()
        waiter = asyncio.create_task(never())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        leave.set()
        await holder
        await quickly(coordinator.upload(ONES))
    assert (coordinator.statistics().abandoned, coordinator.statistics().in_flight) == (1, 0)


async def test_nodes_wait_for_events_and_operations_of_other_streams(
    coordinator: AsyncCoordinator, device: Device, stream: Stream, latch: Latch
) -> None:
    await device.load(BUMP)
    buffer = stream.empty(ITEMS, np.uint32)
    latch.hold(stream)
    filled = stream.fill(buffer, 2)
    event = stream.record()
    await latch.held()
    nodes = [coordinator.compute(BUMP, 1, 32, buffer, 0, ITEMS, after=behind) for behind in (filled, [event])]
    down = coordinator.download(buffer)
    assert [node.state for node in nodes] == ["submitted"] * 2
    latch.release()
    np.testing.assert_array_equal(await quickly(down), 50 * ONES)


@pytest.mark.parametrize("recorded", [True, False])
async def test_released_event_is_refused_in_after(device: Device, stream: Stream, recorded: bool) -> None:
    event = EventPool(device).acquire_nowait()
    if recorded:
        stream.record(event=event)
    event.release()
    async with AsyncCoordinator(device) as coordinator:
        with pytest.raises(StaleHandleError, match="this event has been released"):
            coordinator.upload(ONES, after=event)
        assert coordinator.statistics().registered == 0


@pytest.mark.parametrize("point", [Stream.record, lambda stream: stream.record().operation])
async def test_point_of_a_stream_of_another_loop_is_refused_in_after(
    device: Device, stream: Stream, point: Callable[[Stream], Event | Operation[None]]
) -> None:
    recorded = point(stream)

    async def elsewhere() -> None:
        async with AsyncCoordinator(device) as coordinator:
            with pytest.raises(WrongLoopError):
                coordinator.upload(ONES, after=recorded)
            assert coordinator.statistics().registered == 0

    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_leaving_by_an_exception_withdraws_waiting_nodes(device: Device, stream: Stream, latch: Latch) -> None:
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    with pytest.raises(ZeroDivisionError):
        async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
            given = coordinator.compute(SPIN, 1, 1, 1000, stream=stream)
            waiting = coordinator.compute(SPIN, 1, 1, 1000)
            raise ZeroDivisionError
    assert (given.state, waiting.state) == ("submitted", "abandoned")
    with pytest.raises(ClosedError, match="make another"):
        coordinator.upload(ONES)
    latch.release()
    await quickly(given)


async def test_cancelled_while_it_drains_it_is_left(device: Device, stream: Stream, latch: Latch) -> None:
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    coordinator = AsyncCoordinator(device)

    async def work() -> None:
        async with coordinator:
            coordinator.compute(SPIN, 1, 1, 1000, stream=stream)

    task = asyncio.create_task(work())
    await until(lambda: coordinator.statistics().in_flight == 1)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)
    with pytest.raises(ClosedError):
        coordinator.poll()
        coordinator.upload(ONES)


@pytest.mark.parametrize("chained", [False, True])
async def test_room_holds_a_producer_back(device: Device, chained: bool) -> None:
    """Memory is flat past the limit: at most `max_in_flight` nodes wait, for a place or for each other."""
    await device.load(SPIN)
    async with AsyncCoordinator(device, max_in_flight=8) as coordinator:
        most = 0
        last: Any = ()
        for _ in range(60):
            for _ in range(8):
                last = coordinator.compute(SPIN, 1, 1, 1000, after=last if chained else ())
            await coordinator.room()
            most = max(most, coordinator.statistics().waiting)
    assert most <= 8
    assert coordinator.statistics().done == 480


async def test_room_does_not_block_inside_an_open_bracket(device: Device) -> None:
    async with AsyncCoordinator(device, max_in_flight=2) as coordinator:
        async with coordinator.operation("kernel") as bracket:
            for _ in range(10):
                coordinator.upload(ONES, after=bracket)
            await quickly(coordinator.room())
    assert coordinator.statistics().done == 11


async def test_finished_nodes_are_not_kept(device: Device) -> None:
    async with AsyncCoordinator(device, max_in_flight=4) as coordinator:
        kept: list[weakref.ref[object]] = []
        for _ in range(50):
            up = coordinator.upload(ONES)
            kernel = coordinator.compute(BUMP, 1, 32, up, 1, ITEMS)
            await coordinator.download(up)
            kept += [weakref.ref(thing) for thing in (up, up.buffer, kernel)]
        await coordinator.drain()
        del up, kernel
        assert len(coordinator._scheduler.graph) == 0
        assert [ref() for ref in kept if ref() is not None] == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": "urgent"}, InvalidArgumentError),
        ({"stream": "left"}, InvalidTypeError),
        ({"after": "first"}, InvalidTypeError),
        ({"after": [1]}, InvalidTypeError),
    ],
)
async def test_bad_options_are_refused_at_the_call(
    coordinator: AsyncCoordinator, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        coordinator.upload(ONES, **options)  # type: ignore[arg-type]
    assert coordinator.statistics().registered == 0


async def test_bad_arguments_are_refused_at_the_call(device: Device, coordinator: AsyncCoordinator) -> None:
    up = coordinator.upload(ONES)
    with pytest.raises(InvalidTypeError, match="takes 3 arguments"):
        coordinator.compute(BUMP, 1, 32, up)
    with pytest.raises(InvalidArgumentError, match="grid"):
        coordinator.compute(BUMP, 0, 32, up, 1, ITEMS)
    with pytest.raises(InvalidTypeError, match="only an upload"):
        coordinator.download(coordinator.download(up))  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError):
        coordinator.compute("bump", 1, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="kind is one of"):
        coordinator.operation("launch")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="max_in_flight"):
        AsyncCoordinator(device, max_in_flight=0)
    with pytest.raises(BusyError):
        coordinator.upload(ONES, stream=None).result()
    async with AsyncCoordinator(device) as another:
        with pytest.raises(InvalidArgumentError, match="another coordinator"):
            another.download(up)
    assert in_thread_error(coordinator) is WrongLoopError


@pytest.mark.parametrize("closes", ["device", "context"])
async def test_host_function_cannot_close_its_device(closes: str) -> None:
    """The end of the device waits for the function. The function may close it no longer once it has returned."""
    async with ManagedContext(driver="host") as context, AsyncCoordinator(context.device) as coordinator:
        closed = context if closes == "context" else context.device

        async def close() -> None:
            await closed.aclose()

        with pytest.raises(BusyError, match="waits for its own functions when it closes"):
            await quickly(coordinator.host(close).wait())
        assert await quickly(coordinator.host(int).wait()) == 0
        await quickly(closed.aclose())


@pytest.mark.parametrize(
    ("array", "error", "reason"),
    [
        (np.zeros(ITEMS + 1, np.uint32), InvalidArgumentError, "sizes differ"),
        (np.zeros((ITEMS, 1), np.uint32), InvalidArgumentError, "shapes differ"),
        (np.zeros(ITEMS, np.float32), InvalidTypeError, "dtypes differ"),
    ],
    ids=["size", "shape", "dtype"],
)
async def test_copy_of_another_shape_or_dtype_is_refused_at_the_call(
    coordinator: AsyncCoordinator, array: Any, error: type[Exception], reason: str
) -> None:
    """No node is registered, and neither side is poisoned."""
    up = coordinator.upload(ONES)
    with pytest.raises(error, match=reason):
        coordinator.upload(array, up.buffer)
    for buffer in (up, up.buffer):
        with pytest.raises(error, match=reason):
            coordinator.download(buffer, array)
    np.testing.assert_array_equal(await quickly(coordinator.download(up)), ONES)
    assert (await quickly(coordinator.upload(array))).shape == array.shape
    await coordinator.drain()
    assert (coordinator.statistics().registered, coordinator.statistics().done) == (3, 3)


async def test_copies_of_raw_bytes_fit_any_shape_and_dtype(coordinator: AsyncCoordinator) -> None:
    raw = ONES.view(np.uint8)
    up = coordinator.upload(raw, coordinator.upload_stream.empty(ITEMS, np.uint32))
    np.testing.assert_array_equal(await quickly(coordinator.download(up, np.empty_like(raw))), raw)
    np.testing.assert_array_equal(await quickly(coordinator.download(up)), ONES)


def in_thread_error(coordinator: AsyncCoordinator) -> type[BaseException] | None:
    async def main() -> type[BaseException] | None:
        try:
            coordinator.upload(ONES)
        except WrongLoopError as error:
            return type(error)
        return None

    found: type[BaseException] | None = in_thread(main)
    return found


@pytest.mark.parametrize("description", [None, 7, b"name", np.array([object(), object()])], ids=type)
async def test_description_that_is_no_string_is_refused(coordinator: AsyncCoordinator, description: Any) -> None:
    with pytest.raises(InvalidTypeError, match="description is a str"):
        coordinator.host(int, description=description)


async def test_array_of_things_that_are_no_operations_is_refused_as_after(coordinator: AsyncCoordinator) -> None:
    """The array is iterated, and not compared with an empty tuple."""
    with pytest.raises(InvalidTypeError, match="after names nodes"):
        coordinator.host(int, after=np.array([object(), object()]))
    assert await coordinator.host(int, after=np.array([], object)) == 0


async def test_program_cannot_close_a_stream_of_the_coordinator(coordinator: AsyncCoordinator) -> None:
    """Every later operation there failed."""
    with pytest.raises(BusyError, match="is closed by its coordinator, which still needs it"):
        async with coordinator.compute_stream:
            raise AssertionError("it was entered")
    with pytest.raises(BusyError, match="is closed by its coordinator"):
        await coordinator.compute_stream.aclose()
    await quickly(coordinator.compute_stream.synchronize())
