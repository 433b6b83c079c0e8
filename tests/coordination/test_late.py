"""E5: what only takes long is logged, and is an error only after the `deadlock_timeout` of the program."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    BrokenBarrierError,
    ClosedError,
    DeadlockError,
    Device,
    DeviceFault,
    Event,
    EventPool,
    InvalidArgumentError,
    InvalidTypeError,
    SkippedError,
    StreamBarrier,
)
from aiocuda._base._deadlock import find_stuck
from aiocuda.coordination import Node
from tests.coordination.graphs import ITEMS
from tests.coordination.test_found_by_simulation import LONG, simulated
from tests.helpers import SPIN, TRAP, quickly, turns, until

ONES = np.ones(ITEMS, np.uint32)
SEVENS = np.full(ITEMS, 7, np.uint32)

#: Returns when the time has come for what is late.
Late: TypeAlias = Callable[[], Awaitable[object]]


class Log:
    """The events ``coordinator_still`` so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def events(self) -> list[dict[str, Any]]:
        messages: list[Any] = [record.msg for record in self._caplog.records if record.name == "aiocuda"]
        return [message for message in messages if message["event"] == "coordinator_still"]

    @property
    def errors(self) -> list[str]:
        return [event["error"] for event in self.events]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.WARNING, "aiocuda")
    return Log(caplog)


def now() -> float:
    return asyncio.get_running_loop().time()


def unrecorded(device: Device) -> Event:
    return EventPool(device).acquire_nowait()


def timers() -> int:
    """How many timers of coordinators the running `SimulatedLoop` has."""
    handles: list[asyncio.TimerHandle] = [entry[2] for entry in asyncio.get_running_loop()._timers]  # type: ignore[attr-defined]
    return sum(not handle.cancelled() and "DeadlockDetector" in repr(handle) for handle in handles)


# -- correct programs --------------------------------------------------------------------------------------------------


async def bracket(device: Device, late: Late) -> None:
    async with AsyncCoordinator(device) as coordinator:
        buffer = coordinator.upload_stream.empty(ITEMS, np.uint32)
        entered = coordinator.operation("kernel", description="what is late")
        behind = asyncio.create_task(coordinator.download(buffer, after=entered).wait())
        await late()
        async with entered:
            assert entered.stream is not None
            entered.stream.fill(buffer, 7)
        np.testing.assert_array_equal(await quickly(behind), SEVENS)
        assert coordinator.statistics().deadlocks == 0


async def event(device: Device, late: Late) -> None:
    recorded = unrecorded(device)
    async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
        buffer = stream.empty(ITEMS, np.uint32)
        behind = asyncio.create_task(coordinator.download(buffer, after=recorded).wait())
        await late()
        stream.fill(buffer, 7)
        stream.record(event=recorded)
        np.testing.assert_array_equal(await quickly(behind), SEVENS)
        assert coordinator.statistics().deadlocks == 0


async def party(device: Device, late: Late) -> None:
    barrier = StreamBarrier(2)
    async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
        buffer = stream.empty(ITEMS, np.uint32)

        async def meet() -> None:
            async with coordinator.operation("barrier", writes=[buffer]) as inside:
                assert inside.stream is not None
                await barrier.wait(inside.stream)
                inside.stream.fill(buffer, 7)

        early = asyncio.create_task(meet())
        await until(lambda: barrier.n_waiting == 1)
        await late()
        stream.fill(buffer, 1)
        await barrier.wait(stream)
        await quickly(early)
        np.testing.assert_array_equal(await quickly(coordinator.download(buffer)), SEVENS)
        assert coordinator.statistics().deadlocks == 0


WHAT = {
    bracket: "transfer 2 waits for kernel 1 'what is late'; everything in the coordinator is blocked",
    event: "transfer 1 waits for an event that was never recorded, <Event never recorded>; everything",
    party: "waits for 1 of 2 parties of <StreamBarrier: 1 of 2 have come>",
}
each = pytest.mark.parametrize("program", WHAT)


@each
def test_what_is_ten_seconds_late_is_waited_for_and_logged_once(program: Any, log: Log) -> None:
    async def main(device: Device) -> None:
        began = now()

        async def late() -> None:
            await asyncio.sleep(0.49)
            assert log.events == []
            await asyncio.sleep(9.51)

        await program(device, late)
        assert 10 <= now() - began < 11
        assert timers() == 0

    simulated(main)
    (written,) = log.events
    assert WHAT[program] in written["error"]
    assert (written["level"], written["blocked"], written["seconds"]) == ("warning", 1, 0.5)
    assert written["device"].startswith("simulated")


@pytest.mark.slow
@pytest.mark.asyncio
@each
async def test_what_comes_when_it_has_been_logged_is_waited_for(program: Any, device: Device, log: Log) -> None:
    await program(device, lambda: until(lambda: log.events))
    assert len(log.events) == 1


def test_nothing_is_logged_while_the_device_works(log: Log) -> None:
    """A task may wait for the device, and then record the event."""

    async def main(device: Device) -> None:
        recorded = unrecorded(device)
        async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
            behind = coordinator.upload(ONES, after=recorded)
            for _ in range(5):
                await stream.launch(SPIN, 1, 1, LONG)
            stream.record(event=recorded)
            await behind

    simulated(main)
    assert log.events == []


def test_nothing_is_logged_while_a_task_works_inside_a_bracket(log: Log) -> None:
    async def main(device: Device) -> None:
        async with AsyncCoordinator(device, max_in_flight=1, deadlock_timeout=1) as coordinator:
            async with coordinator.operation("kernel"):
                behind = asyncio.create_task(coordinator.upload(ONES).wait())
                await asyncio.sleep(10)  # for a database
            await behind

    simulated(main)
    assert log.events == []


def test_abandoned_node_keeps_its_place_behind_a_late_event() -> None:
    """The next writer of its bytes comes after everything that the event stands for."""

    async def main(device: Device) -> None:
        recorded = unrecorded(device)
        async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
            buffer = stream.empty(ITEMS, np.uint32)
            assert coordinator.upload(SEVENS, buffer, after=recorded).abandon()
            last = coordinator.upload(ONES, buffer)
            await asyncio.sleep(10)
            assert last.state == "waiting"
            stream.fill(buffer, 3)
            stream.record(event=recorded)
            await last
            np.testing.assert_array_equal(await coordinator.download(buffer), ONES)

    simulated(main)


# -- the log -----------------------------------------------------------------------------------------------------------


def test_log_comes_again_for_another_set_of_blocked_nodes(log: Log) -> None:
    async def main(device: Device) -> None:
        first, second = unrecorded(device), unrecorded(device)
        async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
            coordinator.upload(ONES, after=first, description="a")
            await asyncio.sleep(5)
            assert len(log.events) == 1
            coordinator.upload(ONES, after=second, description="b")
            await asyncio.sleep(5)
            assert [each["blocked"] for each in log.events] == [1, 2]
            for _ in range(3):  # other work comes and goes
                await coordinator.upload(ONES)
                await asyncio.sleep(5)
            assert len(log.events) == 2
            stream.record(event=first)
            await asyncio.sleep(5)
            assert len(log.events) == 2  # `b` alone has been named
            coordinator.upload(ONES, after=(third := unrecorded(device)), description="c")
            await asyncio.sleep(5)
            stream.record(event=second)
            stream.record(event=third)

    simulated(main)
    names = [[name for name in "abc" if f"'{name}'" in error] for error in log.errors]
    assert names == [["a"], ["a", "b"], ["b", "c"]]


def test_log_event_has_no_label_of_a_task_and_describes_a_few_nodes(log: Log) -> None:
    async def main(device: Device) -> None:
        recorded = unrecorded(device)
        async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
            with aiocuda.label("request 7"):
                for _ in range(100):
                    coordinator.upload(ONES, after=recorded)
            await asyncio.sleep(1)
            stream.record(event=recorded)

    simulated(main)
    (written,) = log.events
    assert "label" not in written
    assert written["blocked"] == 100
    assert written["error"].count("request 7") == 4
    assert written["error"].endswith("; and 96 more")


# -- deadlock_timeout --------------------------------------------------------------------------------------------------


def test_deadlock_timeout_raises_after_that_time(log: Log) -> None:
    async def main(device: Device) -> None:
        async with AsyncCoordinator(device, deadlock_timeout=30) as coordinator:
            behind = coordinator.upload(ONES, after=unrecorded(device))
            with pytest.raises(DeadlockError, match="was never recorded") as caught:
                await asyncio.wait_for(behind.wait(), 100)
            assert 30 <= now() - began < 31
            assert log.errors == [str(caught.value)]
            assert coordinator.statistics().deadlocks == 1

    began = 0.0
    simulated(main)


def test_deadlock_timeout_counts_from_the_last_progress() -> None:
    async def main(device: Device) -> None:
        async with AsyncCoordinator(device, deadlock_timeout=30) as coordinator:
            behind = asyncio.create_task(coordinator.upload(ONES, after=unrecorded(device)).wait())
            await asyncio.sleep(20)
            await coordinator.upload(ONES)
            await asyncio.sleep(29)
            assert not behind.done()
            await asyncio.sleep(2)
            with pytest.raises(DeadlockError):
                await behind

    simulated(main)


def test_party_inside_a_bracket_gets_the_error_after_the_deadlock_timeout() -> None:
    """The time counts from its wait at this barrier. The party outside learns that the barrier is broken."""

    async def main(device: Device) -> None:
        first, second = StreamBarrier(2), StreamBarrier(3)
        async with AsyncCoordinator(device, deadlock_timeout=4) as coordinator:

            async def meet() -> None:
                async with coordinator.operation("barrier"):
                    await first.wait()
                    await second.wait()

            inside, outside = asyncio.create_task(meet()), asyncio.create_task(second.wait())
            await asyncio.sleep(3)
            await first.wait()
            arrived = now()
            await asyncio.sleep(3.9)
            assert not inside.done()
            with pytest.raises(DeadlockError, match="1 of 3 parties"):
                await asyncio.wait_for(inside, 100)
            assert 4 <= now() - arrived < 5
            with pytest.raises(BrokenBarrierError):
                await outside

    simulated(main)


def test_party_outside_of_brackets_waits_as_long_as_its_own_timeout() -> None:
    async def main(device: Device) -> None:
        barrier = StreamBarrier(2)
        async with AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
            alone = asyncio.create_task(barrier.wait(timeout=50))
            behind = coordinator.upload(ONES, after=unrecorded(device))
            with pytest.raises(DeadlockError):
                await behind
            began = now()
            with pytest.raises(TimeoutError):
                await alone
            assert now() - began > 48

    simulated(main)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan])
@pytest.mark.asyncio
async def test_deadlock_timeout_is_more_than_0_seconds(device: Device, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"deadlock_timeout is .*0 seconds"):
        AsyncCoordinator(device, deadlock_timeout=value)


@pytest.mark.parametrize("value", ["1", True, [1]])
@pytest.mark.asyncio
async def test_deadlock_timeout_is_a_number(device: Device, value: Any) -> None:
    with pytest.raises(InvalidTypeError, match="deadlock_timeout is a number of seconds"):
        AsyncCoordinator(device, deadlock_timeout=value)


def test_infinite_deadlock_timeout_is_none(log: Log) -> None:
    async def main(device: Device) -> None:
        recorded = unrecorded(device)
        async with AsyncCoordinator(device, deadlock_timeout=math.inf) as coordinator, device.stream() as stream:
            behind = coordinator.upload(ONES, after=recorded)
            await asyncio.sleep(1000)
            stream.record(event=recorded)
            await behind

    simulated(main)
    assert len(log.events) == 1


# -- proof -------------------------------------------------------------------------------------------------------------


def test_tasks_that_wait_for_each_others_bracket_get_the_error_immediately(log: Log) -> None:
    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            entered = asyncio.Barrier(2)
            a, b = (coordinator.operation("kernel", description=name) for name in "ab")

            async def body(own: Any, other: Node[Any]) -> None:
                async with own:
                    await entered.wait()
                    await other

            began = now()
            told = await asyncio.gather(body(a, b), body(b, a), return_exceptions=True)
            assert [type(error) for error in told] == [DeadlockError, DeadlockError]
            assert all(name in str(error) for error in told for name in ("'a'", "'b'"))
            assert now() - began < 0.1

    simulated(main)
    assert log.events == []


def test_nodes_behind_a_bracket_that_was_not_entered_are_skipped_when_the_coordinator_closes(log: Log) -> None:
    """No task can enter it any more. A failure that no task has received leaves the block."""

    async def main(device: Device) -> None:
        with pytest.raises(ClosedError, match=r"^barrier 1 'meeting' was never entered by `async with`, .* closes: "):
            async with AsyncCoordinator(device) as coordinator:
                meeting = coordinator.operation("barrier", description="meeting")
                behind = coordinator.upload(ONES, after=meeting)
                function = coordinator.host(int, after=behind)
                await asyncio.sleep(0.1)
        assert now() - began < 0.2
        assert (behind.state, function.state, meeting.state) == ("skipped", "skipped", "abandoned")
        for node in (behind, function):
            with pytest.raises(SkippedError, match="was never entered") as caught:
                node.result()
            assert isinstance(caught.value.__cause__, ClosedError)
        with pytest.raises(ClosedError, match="never ran"):
            meeting.result()
        assert coordinator.statistics().deadlocks == 0

    began = 0.0
    simulated(main)
    assert log.events == []


def test_failure_behind_a_bracket_that_was_not_entered_is_raised_once() -> None:
    async def main(device: Device) -> None:
        async def receive(node: Node[Any]) -> None:
            with pytest.raises(SkippedError):
                await node

        async with AsyncCoordinator(device) as coordinator:
            meeting = coordinator.operation("barrier")
            waiter = asyncio.create_task(receive(coordinator.upload(ONES, after=meeting)))
            stream = coordinator.compute_stream
            await device.load(SPIN)
            coordinator.compute(SPIN, 1, 1, LONG, stream=stream)
            await asyncio.sleep(0.1)
        await waiter

    simulated(main)


def test_withdrawn_bracket_makes_no_deadlock() -> None:
    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            meeting = coordinator.operation("barrier")
            behind = coordinator.upload(ONES, after=meeting)
            assert meeting.abandon()
        assert behind.state == "skipped"

    simulated(main)


# -- the end -----------------------------------------------------------------------------------------------------------


async def drained(coordinator: AsyncCoordinator, within: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(within):
            await coordinator.drain()
    assert len(coordinator._scheduler.waiting) == 2
    with pytest.raises(InterruptedError):
        async with coordinator:
            raise InterruptedError


async def closed(coordinator: AsyncCoordinator, within: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(within):
            await coordinator.aclose()


async def left(coordinator: AsyncCoordinator, within: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(within), coordinator:
            pass


@pytest.mark.parametrize("within", [0.1, 3])
@pytest.mark.parametrize("end", [drained, closed, left])
def test_wait_for_an_event_at_the_end_is_left_by_a_timeout(end: Any, within: float, log: Log) -> None:
    """The log names the event after 0.5 s. Nothing is left, although the event exists on."""

    async def main(device: Device) -> None:
        recorded = unrecorded(device)
        coordinator = AsyncCoordinator(device)
        upload = coordinator.upload(ONES, after=recorded)
        function = coordinator.host(int, after=recorded)
        never = coordinator.operation("kernel", after=recorded)
        waiter = asyncio.create_task(upload.wait())
        await asyncio.sleep(0)
        began, tasks = now(), len(asyncio.all_tasks())
        await end(coordinator, within)
        assert within <= now() - began < within + 0.01
        with pytest.raises(ClosedError):
            await waiter
        assert (upload.state, function.state, never.state) == ("abandoned",) * 3
        assert (timers(), len(asyncio.all_tasks())) == (0, tasks - 1)
        assert not recorded._expected
        assert not coordinator._scheduler.waiting
        gone = [weakref.ref(thing) for thing in (coordinator, coordinator._scheduler, upload, function, upload.buffer)]
        del coordinator, upload, function, never, waiter
        await turns(3)
        gc.collect()
        assert [thing() for thing in gone if thing() is not None] == []
        with pytest.raises(aiocuda.InvalidArgumentError):
            recorded.done()

    simulated(main)
    assert len(log.events) == (within > 0.5)


def test_event_that_is_recorded_while_the_coordinator_closes_is_waited_for(log: Log) -> None:
    async def main(device: Device) -> None:
        recorded = unrecorded(device)
        stream = device.stream()

        async def record() -> None:
            await asyncio.sleep(5)
            stream.record(event=recorded)

        async with AsyncCoordinator(device) as coordinator:
            upload = coordinator.upload(ONES, after=recorded)
            task = asyncio.create_task(record())
        assert upload.state == "done"
        assert now() >= 5
        await task
        await stream.aclose()

    simulated(main)
    assert len(log.events) == 1


@pytest.mark.asyncio
async def test_coordinator_ends_after_a_fault_although_nodes_wait_for_a_task() -> None:
    """No event is recorded any more, no bracket entered. Not on a GPU, where the fault would end the test process."""
    device = await aiocuda.open_device(driver="host")
    coordinator = AsyncCoordinator(device)
    bracket = coordinator.operation("kernel")
    nodes: list[Node[Any]] = [
        coordinator.upload(ONES, after=unrecorded(device)),
        coordinator.host(int, after=unrecorded(device)),
        coordinator.upload(ONES, after=bracket),
        bracket,
    ]
    with pytest.raises(DeviceFault):
        async with device.stream() as stream:
            await quickly(stream.launch(TRAP, 1, 1))
    for node in nodes:
        with pytest.raises(DeviceFault):
            await quickly(node)
    await quickly(coordinator.drain())
    await quickly(coordinator.aclose())
    assert not coordinator._scheduler.waiting
    await device.aclose()


def test_nothing_grows_with_many_waits(log: Log) -> None:
    """What waited for an event that exists on is forgotten, and so are the waits at a barrier."""

    async def main(device: Device) -> None:
        recorded = unrecorded(device)
        gone: list[weakref.ref[object]] = []
        async with asyncio.timeout(1000), AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
            for _ in range(50):
                upload = coordinator.upload(ONES, after=recorded)
                gone += [weakref.ref(upload), weakref.ref(upload.buffer)]
                with pytest.raises(DeadlockError):
                    await upload
                with pytest.raises(DeadlockError):
                    async with coordinator.operation("barrier"):
                        await StreamBarrier(2).wait()
            del upload
            gc.collect()
            assert [thing() for thing in gone if thing() is not None] == []
            assert not recorded._expected
            assert len(coordinator._scheduler.detector._logged) <= 1
            assert timers() <= 1
            assert find_stuck(asyncio.get_running_loop(), patient=False) == []

    simulated(main)
    assert len(log.events) == 100
