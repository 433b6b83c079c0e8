"""How a loop finds out that work is done (polls, sleeps, notifiers, the watchdog), and the cost for the loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, CompletionPolicy, Device, Kernel, Operation, Stream
from aiocuda._core import stream_operation
from aiocuda.device._resources import resources_of
from aiocuda.driver import _port as ports
from aiocuda.driver.protocol import Notifier, Port
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import SimulatedLoop
from aiocuda.testing.kernels import SPIN as SPIN_SAMPLE
from tests.helpers import (
    AFFINE,
    SPIN,
    UVLOOP,
    Latch,
    Peer,
    Reports,
    block_until,
    open_peer,
    quickly,
    refusal,
    turns,
    until,
)

pytestmark = pytest.mark.asyncio

MS = 1_000_000


async def warm_up(latch: Latch, stream: Stream) -> None:
    latch.hold(stream)
    await latch.held()
    latch.release()
    await stream.synchronize()


class IterationCounter:
    """Counts the iterations of the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = True
        asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.count += 1
        if self._counting:
            asyncio.get_running_loop().call_soon(self._count)

    def stop(self) -> None:
        self._counting = False


@pytest.mark.parametrize("policy", ["latency", "balanced", "efficient"])
@pytest.mark.parametrize("polls_freely", [True, False])
async def test_each_policy_resolves_all_operations(policy: Any, polls_freely: bool) -> None:
    async with open_peer(Peer(polls_freely=polls_freely), policy=policy) as (_, device):
        assert device.policy.name == policy
        stream = device.stream()
        for nanoseconds in (0, 100_000, 3 * MS, 12 * MS):
            for _ in range(2):
                await quickly(stream.launch(SPIN, 1, 1, nanoseconds))
        assert device.statistics().in_flight == 0


async def test_user_defined_policy() -> None:
    policy = CompletionPolicy("custom", unknown=1e-3, lead=1e-3, grace=1e-3)
    async with aiocuda.open_device(driver="host", policy=policy) as device:
        assert device.policy.name == "custom"
        async with device.stream() as stream:
            await quickly(stream.synchronize())


async def test_unknown_policy_is_refused() -> None:
    with pytest.raises(aiocuda.InvalidArgumentError, match="balanced, efficient, latency"):
        aiocuda.open_device(driver="host", policy="fast")  # type: ignore[arg-type]  # a wrong argument on purpose
    with pytest.raises(aiocuda.InvalidTypeError):
        aiocuda.open_device(driver="host", policy=7)  # type: ignore[arg-type]  # a wrong argument on purpose


# Fairness


async def test_awaits_of_finished_operations_let_the_loop_run() -> None:
    """Each operation is done before its await, so the await itself does not have to suspend."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        iterations = IterationCounter()
        before = iterations.count
        for _ in range(640):
            operation = stream.fill(buffer, 1)
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fill")
            await operation
        iterations.stop()
        assert 640 // 65 <= iterations.count - before < 640


async def test_awaits_of_finished_operations_do_not_make_a_long_iteration() -> None:
    """The time between awaits counts: 60 awaits, each with 1 ms of work, must not become one iteration of 60 ms."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        iterations = IterationCounter()
        before = iterations.count
        for _ in range(60):
            operation = stream.fill(buffer, 1)
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fill")
            work_until = time.perf_counter() + 0.001
            while time.perf_counter() < work_until:
                pass
            await operation
        iterations.stop()
        assert iterations.count - before >= 60 // 3


async def test_gathers_of_finished_operations_let_the_loop_run() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        iterations = IterationCounter()
        before = iterations.count
        for _ in range(200):
            operations = [stream.fill(buffer, 1), stream.fill(buffer, 2)]
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fills")
            await aiocuda.gather(*operations)
        iterations.stop()
        assert iterations.count - before >= 200 // 65


Awaits: TypeAlias = Callable[[Operation[Any]], Awaitable[Any]]

#: The ways to await one finished operation.
AWAITS: dict[str, Awaits] = {
    "operation": lambda operation: operation,
    "wait": lambda operation: operation.wait(),
    "gather": lambda operation: aiocuda.gather(operation, operation),
}


class StoppableClock(Peer):
    """A driver whose time can be stopped: then no await ends an iteration of the loop because it took long."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: float | None = None

    def now(self) -> float:
        now: float = self.inner.now()
        return now if self.stopped is None else self.stopped


@pytest.mark.parametrize("how", AWAITS)
async def test_awaits_of_an_operation_that_has_finished_let_the_loop_run(how: str) -> None:
    async with open_peer(clock := StoppableClock()) as (_, device), device.stream() as stream:
        operation = stream.synchronize()
        await operation
        clock.stopped = clock.now()
        iterations = IterationCounter()
        before = iterations.count
        for _ in range(640):
            await AWAITS[how](operation)
        iterations.stop()
        assert 640 // 65 <= iterations.count - before < 640 // 32
        clock.stopped = None


async def test_awaits_of_a_finished_node_and_event_let_the_loop_run() -> None:
    async with (
        open_peer(clock := StoppableClock()) as (_, device),
        AsyncCoordinator(device) as coordinator,
        device.stream() as stream,
    ):
        event = stream.record()
        node = coordinator.upload(np.ones(4, np.float32))
        for thing in (event, node):
            await thing
            clock.stopped = clock.now()
            iterations = IterationCounter()
            before = iterations.count
            for _ in range(640):
                await thing
            iterations.stop()
            assert 640 // 65 <= iterations.count - before < 640 // 32
            clock.stopped = None


async def test_awaits_of_a_finished_operation_do_not_make_a_long_iteration(stream: Stream) -> None:
    operation = stream.synchronize()
    await operation
    iterations = IterationCounter()
    before = iterations.count
    for _ in range(60):
        work_until = time.perf_counter() + 0.001
        while time.perf_counter() < work_until:
            pass
        await operation
    iterations.stop()
    assert iterations.count - before >= 60 // 3


async def test_many_tasks_that_await_a_finished_operation_do_not_suspend(stream: Stream) -> None:
    """The limit is that of one task: `asyncio.gather` makes a task for each operation."""
    operation = stream.synchronize()
    await operation
    tasks = [asyncio.create_task(operation.wait()) for _ in range(500)]
    await asyncio.sleep(0)
    assert all(task.done() for task in tasks)


async def test_finished_operation_is_awaited_in_another_loop(stream: Stream) -> None:
    operation = stream.synchronize()
    await operation

    async def many() -> None:
        for _ in range(200):
            await operation

    await asyncio.to_thread(asyncio.run, many())


async def test_task_that_has_awaited_a_finished_operation_is_not_kept(stream: Stream) -> None:
    operation = stream.synchronize()
    await operation
    task = asyncio.create_task(operation.wait())
    await task
    known = weakref.ref(task)
    del task
    await asyncio.sleep(0)
    gc.collect()
    assert known() is None


async def test_tasks_of_asyncio_gather_share_queries() -> None:
    """All operations are done when the tasks begin: the newest one of each stream is queried, and not each of them."""
    async with open_peer() as (peer, device):
        streams = [device.stream() for _ in range(4)]
        buffers = [stream.empty(4) for stream in streams]
        operations = [
            stream.fill(buffer, 1) for stream, buffer in zip(streams, buffers, strict=True) for _ in range(16)
        ]
        for stream in streams:
            block_until(functools.partial(peer.inner.stream_query, stream._queue.handle), "the fills")
        before = device.statistics().polls
        await asyncio.gather(*operations)
        assert device.statistics().polls - before <= 2 * len(streams)


async def test_newest_operation_is_rarely_queried_in_vain() -> None:
    """Each await finds its operation done, and the newest one of the stream never is."""
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            operations = [stream.fill(buffer, 1) for _ in range(60)]
            latch.hold(stream)
            lease = stream_operation(operations[-1]).lease
            assert lease is not None
            block_until(functools.partial(peer.inner.event_query, lease.handle), "the fills")
            await other.synchronize()
            before = device.statistics().polls
            for operation in operations:
                await operation
            assert device.statistics().polls - before <= 60 + 8
            latch.release()


async def test_one_iteration_resolves_a_limited_number_of_operations() -> None:
    """2 000 operations that finish together are resolved in several iterations of the loop."""
    async with open_peer(max_in_flight=4000) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warm_up(latch, stream)
            latch.hold(stream)
            operations = [stream.fill(buffer, 1) for _ in range(2000)]
            tasks = [asyncio.create_task(operation.wait()) for operation in operations[::100]]
            await latch.held()
            latch.release()
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fills")
        most = 0
        done = sum(operation.done() for operation in operations)
        while done < 2000:
            await asyncio.sleep(0)
            now = sum(operation.done() for operation in operations)
            most, done = max(most, now - done), now
        assert most <= 512  # 256 by each of two polls in one iteration
        await asyncio.gather(*tasks)


async def test_parked_wait_is_rarely_polled(device: Device, stream: Stream, latch: Latch) -> None:
    """The watchdog queries a parked stream in each tick, and the loop more and more rarely."""
    await warm_up(latch, stream)
    hold = latch.hold(stream)
    waiters = [asyncio.create_task(hold.wait()) for _ in range(100)]
    await latch.held()
    await until(lambda: device.statistics().armed, "the notifier")
    before = device.statistics()
    await until(lambda: device.statistics().watchdog_wakes >= before.watchdog_wakes + 8, "some ticks")
    after = device.statistics()
    ticks = after.watchdog_wakes - before.watchdog_wakes
    assert after.polls - before.polls <= ticks + 80  # each interval is a twelfth of the wait, from 1 to 8 ms
    assert after.parks == before.parks
    latch.release()
    await quickly(asyncio.gather(*waiters))


async def test_parked_stream_is_queried_once_at_each_alarm() -> None:
    """The alarm fires early to allow for its lateness.

    The loop does not poll from then until the time of the query.
    """
    async with open_peer(Peer(polls_freely=True)) as (_, device):
        stream = device.stream()
        with Latch(device) as latch:
            await warm_up(latch, stream)
            hold = asyncio.create_task(latch.hold(stream).wait())
            await latch.held()
            await until(lambda: device.statistics().armed, "the notifier")
            alarm = stream._queue.reactor.alarm
            before = device.statistics()
            while device.statistics().watchdog_wakes < before.watchdog_wakes + 8:
                alarm.early = alarm._mean = 0.0009
                await asyncio.sleep(0.001)
            after = device.statistics()
            ticks = after.watchdog_wakes - before.watchdog_wakes
            assert after.polls - before.polls <= ticks + 80
            latch.release()
            await quickly(hold)


async def test_stream_has_one_notifier_for_any_number_of_waiters(device: Device, stream: Stream, latch: Latch) -> None:
    await warm_up(latch, stream)
    latch.hold(stream)
    buffer = stream.empty(4)
    operations = [stream.fill(buffer, 1) for _ in range(50)]
    tasks = [asyncio.create_task(operation.wait()) for operation in operations]
    await latch.held()
    await until(lambda: device.statistics().armed, "the notifier")
    assert device.statistics().armed == 1
    latch.release()
    await quickly(asyncio.gather(*tasks))


async def test_armed_notifiers_are_limited(device: Device) -> None:
    """A timer queries the streams that have no notifier, and their waits end as well."""
    limit = device.driver.notifier_limit(device.index)
    # A new stream, also of a notifier, may wait for the kernels of this test.
    await asyncio.to_thread(device.driver.stream_reserve, device.index, 2 * limit + 16)
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(device.stream()) for _ in range(limit + 8)]
        with Latch(device) as latch:
            await warm_up(latch, streams[0])
            holds = [latch.hold(stream) for stream in streams]
            tasks = [asyncio.create_task(hold.wait()) for hold in holds]
            await until(lambda: device.statistics().armed == limit, "all notifiers")
            ticks = device.statistics().watchdog_wakes
            await until(lambda: device.statistics().watchdog_wakes > ticks + 2, "the watchdog")
            assert device.statistics().armed == limit
            latch.release()
            await quickly(asyncio.gather(*tasks))
        await until(lambda: device.statistics().armed == 0, "the notifiers")


async def test_device_without_notifiers() -> None:
    with Peer() as peer:
        peer.__dict__["notifier_limit"] = lambda device: 0
        async with aiocuda.open_device(driver=peer.driver) as device:
            streams = [device.stream() for _ in range(4)]
            with Latch(device) as latch:
                await warm_up(latch, streams[0])
                tasks = [asyncio.create_task(latch.hold(stream).wait()) for stream in streams]
                await latch.held()
                latch.release()
                await quickly(asyncio.gather(*tasks))
            assert device.statistics().parks == 0
            assert peer.calls["notifier"] == 0


async def test_notifier_that_cannot_be_created() -> None:
    with Peer() as peer, Reports() as reports:
        peer.refuse("notifier", times=1000)
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            with Latch(device) as latch:
                await warm_up(latch, stream)
                task = asyncio.create_task(latch.hold(stream).wait())
                await until(lambda: peer.calls["notifier"], "an attempt")
                latch.release()
                await quickly(task)
        assert len(reports.failures) <= 1  # reported once, not at each attempt


class LossyPeer(Peer):
    """A driver with notifiers that lose the tags that ``swallow`` selects."""

    def __init__(self) -> None:
        super().__init__()
        self.swallow: Callable[[int], bool] = lambda tag: True

    def notifier(self, device: int, port: Port) -> Notifier:
        notifier, peer = self.inner.notifier(device, port), self

        class LossyNotifier:
            def ring(self, event: int, tag: int) -> None:
                if not peer.swallow(tag):
                    notifier.ring(event, tag)

        return LossyNotifier()


async def test_lost_notifications_are_counted_and_the_waits_end() -> None:
    with LossyPeer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            streams = [device.stream() for _ in range(3)]
            with Latch(device) as latch:
                await warm_up(latch, streams[0])
                before = device.statistics().lost_wakes
                tasks = [asyncio.create_task(latch.hold(stream).wait()) for stream in streams]
                await until(lambda: device.statistics().armed == 3, "the notifiers")
                latch.release()
                await quickly(asyncio.gather(*tasks))
            await until(lambda: device.statistics().lost_wakes == before + 3, "the lost wakes")
            assert device.statistics().armed == 0
            peer.swallow = lambda tag: False  # new notifiers replace the quarantined ones
            with Latch(device) as latch:
                tasks = [asyncio.create_task(latch.hold(stream).wait()) for stream in streams]
                await until(lambda: device.statistics().armed == 3, "the notifiers")
                heard = device.statistics().notifications
                latch.release()
                await quickly(asyncio.gather(*tasks))
            await until(lambda: device.statistics().notifications >= heard + 3, "the notifications")
            assert device.statistics().armed == 0


async def test_notifier_is_used_again_once_its_late_tag_has_come() -> None:
    with LossyPeer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as stream:
            pool = resources_of(device).loop_states.here().reactor.notifier_pool
            with Latch(device) as latch:
                await warm_up(latch, stream)
                await until(lambda: device.statistics().armed == 0, "the notifiers")
                task = asyncio.create_task(latch.hold(stream).wait())
                await until(lambda: device.statistics().armed == 1, "the notifier")
                ((tag, armed),) = pool.armed.items()
                latch.release()
                await quickly(task)
                await until(lambda: tag in pool.quarantined, "the quarantine")
                assert armed.index not in pool._free
                pool.port.put(tag)  # type: ignore[attr-defined]  # as the host function of the notifier does, late
                await until(lambda: tag not in pool.quarantined, "the tag")
                assert armed.index in pool._free


async def test_late_notifier_does_not_hold_its_operation() -> None:
    with LossyPeer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as stream:
            pool = resources_of(device).loop_states.here().reactor.notifier_pool
            with Latch(device) as latch:
                await warm_up(latch, stream)
                await until(lambda: device.statistics().armed == 0, "the notifiers")
                latch.hold(stream)
                with aiocuda.label("late"):
                    late: Any = stream.synchronize()
                waiter = asyncio.create_task(late.wait())
                await until(lambda: device.statistics().armed == 1, "the notifier")
                (armed,) = pool.armed.values()
                operation, number = weakref.ref(late), late.id
                del late
                assert not armed.is_settled
                latch.release()
                await quickly(waiter)
            del waiter
            assert operation() is None
            assert (armed.id, armed.label, armed.is_settled) == (number, "late", True)


async def test_unknown_tags_are_ignored() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        port = resources_of(device).loop_states.here().reactor.notifier_pool.port
        for tag in (0, 1, 2**62 + 2**40, 2**44 * 5 + 3, 2**61):
            port.put(tag)  # type: ignore[attr-defined]  # as the host function of a notifier does
        await quickly(stream.synchronize())
        with Latch(device) as latch:
            task = asyncio.create_task(latch.hold(stream).wait())
            await latch.held()
            for tag in range(100):
                port.put(tag)  # type: ignore[attr-defined]
            await turns()
            assert not task.done()  # a notification alone does not resolve an operation
            latch.release()
            await quickly(task)


async def test_abandoning_an_operation_with_an_armed_notifier_loses_no_notifier(
    device: Device, stream: Stream, latch: Latch
) -> None:
    """The device has not reached the event of the notifier, so its silence is correct."""
    await warm_up(latch, stream)
    hold = latch.hold(stream)
    task = asyncio.create_task(hold.wait())
    await latch.held()
    await until(lambda: device.statistics().armed, "the notifier")
    hold.abandon()
    with pytest.raises(aiocuda.ClosedError):
        await task
    ticks = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > ticks + 5, "the watchdog")
    assert device.statistics().lost_wakes == 0
    assert device.statistics().armed == 1
    latch.release()
    await quickly(stream.synchronize())
    await until(lambda: device.statistics().armed == 0, "the notifier")


async def test_wait_that_is_longer_than_predicted_gets_a_notifier() -> None:
    """The loop is busy at the predicted end, after 4 ms.

    The kernel takes longer: a notifier wakes it, not the watchdog.
    """
    released = threading.Event()

    def spin(nanoseconds: int) -> Iterator[float]:
        """Without a time, run until the test has released it."""
        while not (nanoseconds or released.is_set()):
            yield 0.001
        yield nanoseconds / 1e9

    async with open_peer(Peer(polls_freely=True)) as (_, device):
        stream = device.stream()
        kernel = Kernel(SPIN_SAMPLE.name, source=SPIN_SAMPLE.source, host=spin)
        try:
            for _ in range(6):
                await stream.launch(kernel, 1, 1, 4 * MS)
            operation = stream.launch(kernel, 1, 1, 0)
            task = asyncio.create_task(operation.wait())
            await asyncio.sleep(0)
            deadline = time.monotonic() + 0.03
            block_until(lambda: time.monotonic() > deadline)
            await until(lambda: device.statistics().armed == 1, "the notifier")
            assert not task.done()
        finally:
            released.set()
        await quickly(task)


async def test_predicted_waits_sleep_and_then_poll() -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(None)) as device, device.stream() as stream:
            for _ in range(8):
                await stream.launch(SPIN, 1, 1, 8 * MS)
            assert device.statistics().sleeps > 0

    def run() -> None:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(main())

    await asyncio.to_thread(run)


# Ports


class PeerWithoutDescriptors(Peer):
    """A driver for loops that cannot watch descriptors."""

    def open_port(self, wake: Callable[[], None]) -> Port:
        return ports.open_port(wake, watchable=False)


async def test_port_without_a_descriptor() -> None:
    with PeerWithoutDescriptors() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream, other = device.stream(), device.stream()
            array = np.arange(6 << 20, dtype=np.uint8)
            with Latch(device) as latch:
                await warm_up(latch, stream)
                buffer = await quickly(stream.upload(array))
                task = asyncio.create_task(latch.hold(other).wait())
                await until(lambda: device.statistics().armed, "the notifier")
                latch.release()
                await quickly(task)
            assert np.array_equal(await quickly(other.download(buffer)), array)
            assert (await device.pinned(100)).size == 100
            assert device.statistics().notifications > 3


@pytest.mark.parametrize("factory", [factory for factory in (asyncio.new_event_loop, UVLOOP) if factory])
async def test_port_without_a_descriptor_after_its_loop_is_closed(factory: Callable[[], Any]) -> None:
    """Later wake-ups find the loop closed. They come on a thread of the driver, which must not end with an error."""
    with PeerWithoutDescriptors() as peer:
        kept: list[Any] = []

        async def close_loop_early() -> None:
            device = await aiocuda.open_device(driver=peer.driver)
            stream = device.stream()
            latch = Latch(device)
            await warm_up(latch, stream)
            task = asyncio.create_task(latch.hold(stream).wait())
            await latch.held()
            await until(lambda: device.statistics().armed, "the notifier")
            task.cancel()
            kept.extend((device, stream, latch))

        def run() -> None:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(close_loop_early())

        await asyncio.to_thread(run)
        device, stream, latch = kept
        latch.release()
        await until(lambda: peer.inner.stream_query(stream._queue.handle), "the held kernel")
        own_stream = device.stream()
        await quickly(own_stream.synchronize())
        await device.drain()
        await device.aclose()


# Queries that are interrupted, refused or guarded


async def test_wait_continues_after_an_interrupted_query(stream: Stream) -> None:
    """A query raises `KeyboardInterrupt`. The next wait queries again."""
    async with open_peer() as (peer, device):
        own_stream = device.stream()
        operation = own_stream.fill(own_stream.empty(4), 1)
        peer.refuse("event_query", error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            operation.__await__().send(None)
        assert await quickly(operation) is None


async def test_refused_queries_are_reported_once() -> None:
    with Reports() as reports:
        async with open_peer() as (peer, device):
            stream = device.stream()
            buffer = stream.empty(4)
            peer.refuse("event_query", times=30, error=refusal)
            for _ in range(5):
                await quickly(stream.fill(buffer, 1))
        assert len(reports.failures) == 1
        assert "asked again" in reports.contexts[0]["message"]


async def test_chain_of_operations_awaited_one_by_one(stream: Stream) -> None:
    buffer = await stream.upload(np.zeros(1, np.uint32))
    operations: list[Operation[Any]] = [stream.launch(AFFINE, 1, 1, buffer, 1, 1, 1) for _ in range(500)]
    finished: list[int] = []

    async def wait(index: int) -> None:
        await operations[index]
        finished.append(index)

    await quickly(asyncio.gather(*(wait(index) for index in range(500))))
    assert finished == sorted(finished)
    assert (await stream.download(buffer))[0] == 500


async def test_begin_and_end_of_queries_are_balanced_while_other_libraries_may_capture() -> None:
    """CuPy or PyTorch in the same process may be capturing a stream. A query must not end that capture."""
    async with open_peer() as (peer, device):
        resources_of(device).device_state.hot.guarded = True
        stream = device.stream()
        with Latch(device) as latch:
            await warm_up(latch, stream)
            peer.calls.clear()
            task = asyncio.create_task(latch.hold(stream).wait())
            await latch.held()
            await until(lambda: device.statistics().armed, "the notifier")
            latch.release()
            await quickly(task)
            await quickly(stream.fill(stream.empty(4), 1))
        assert peer.calls["begin_queries"] == peer.calls["end_queries"] > 0


@pytest.mark.gpu
async def test_256_waiting_streams_take_at_most_5_percent_of_a_core() -> None:
    async with aiocuda.open_device(driver="cuda") as device:
        gate, streams = device.stream(), [device.stream() for _ in range(256)]
        with Latch(device) as latch:
            held = latch.hold(gate)
            await latch.held()
            for stream in streams:
                stream.wait(held)
            waits = [asyncio.create_task(stream.synchronize().wait()) for stream in streams]
            await asyncio.sleep(2.0)  # the longer a stream has waited, the more rarely it is queried
            start = time.thread_time()
            await asyncio.sleep(1.0)
            seconds = time.thread_time() - start
            latch.release()
            await quickly(asyncio.gather(*waits))
    assert seconds <= 0.05


async def test_256_waiting_streams_are_polled_at_most_8_000_times_a_second() -> None:
    """One poll per millisecond of each stream without a notifier would take 30 % of a core."""

    async def main() -> int:
        async with aiocuda.open_device(driver=SimulatedDriver(0)) as device:
            spin = [device.stream().launch(SPIN, 1, 1, 6_000 * MS) for _ in range(256)]
            waits = [asyncio.create_task(operation.wait()) for operation in spin]
            await asyncio.sleep(3.0)
            polls = device.statistics().polls
            await asyncio.sleep(1.0)
            polls = device.statistics().polls - polls
            await asyncio.gather(*waits)
            return polls

    def run() -> int:
        with warnings.catch_warnings(), asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            warnings.simplefilter("ignore", ResourceWarning)  # the streams are closed with their device
            return runner.run(main())

    polls = await asyncio.to_thread(run)
    assert 1_000 < polls <= 8_000  # 2 400 of the 24 with a notifier, which are queried at most 10 ms apart
