"""How a loop learns that work is done: polls, sleeps, notifiers, the watchdog; and how little that costs the loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import CompletionPolicy, Device, Kernel, Operation, Stream
from aiocuda._device_resources import resources_of
from aiocuda.driver import _port as ports
from aiocuda.driver.protocol import Notifier, Port
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import Latch, SimulatedLoop
from aiocuda.testing.kernels import SPIN as SPIN_SAMPLE
from tests.helpers import AFFINE, SPIN, UVLOOP, Peer, Reports, block_until, open_peer, quickly, refusal, turns, until

pytestmark = pytest.mark.asyncio

MS = 1_000_000


async def warmed(latch: Latch, stream: Stream) -> None:
    latch.hold(stream)
    await latch.held()
    latch.release()
    await stream.synchronize()


class Turns:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._going = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.count += 1
        if self._going:
            asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> None:
        self._going = False


@pytest.mark.parametrize("policy", ["latency", "balanced", "efficient"])
@pytest.mark.parametrize("polls_freely", [True, False])
async def test_every_policy_resolves_everything(policy: Any, polls_freely: bool) -> None:
    async with open_peer(Peer(polls_freely=polls_freely), policy=policy) as (_, device):
        assert device.policy.name == policy
        stream = device.stream()
        for nanoseconds in (0, 100_000, 3 * MS, 12 * MS):
            for _ in range(2):
                await quickly(stream.launch(SPIN, 1, 1, nanoseconds))
        assert device.statistics().lost_wakes == 0
        assert device.statistics().in_flight == 0


async def test_policy_of_ones_own() -> None:
    policy = CompletionPolicy("mine", unknown=1e-3, lead=1e-3, grace=1e-3)
    async with aiocuda.open_device(driver="host", policy=policy) as device:
        assert device.policy.name == "mine"
        async with device.stream() as stream:
            await quickly(stream.synchronize())


async def test_unknown_policy() -> None:
    with pytest.raises(aiocuda.InvalidArgumentError, match="balanced, efficient, latency"):
        aiocuda.open_device(driver="host", policy="fast")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(aiocuda.InvalidTypeError):
        aiocuda.open_device(driver="host", policy=7)  # type: ignore[arg-type]  # that is the point


# Fairness


async def test_awaits_that_return_at_once_let_the_loop_turn_all_the_same() -> None:
    """Each is done when it is awaited, so that none of them suspends by itself."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        turns = Turns()
        before = turns.count
        for _ in range(640):
            operation = stream.fill(buffer, 1)
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fill")
            await operation
        turns.stop()
        assert 640 // 65 <= turns.count - before < 640


async def test_awaits_that_return_at_once_do_not_make_a_long_turn() -> None:
    """What is done between them counts: 60 awaits with 1 ms of work beside each are not one turn of 60 ms."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        turns = Turns()
        before = turns.count
        for _ in range(60):
            operation = stream.fill(buffer, 1)
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fill")
            work_until = time.perf_counter() + 0.001
            while time.perf_counter() < work_until:
                pass
            await operation
        turns.stop()
        assert turns.count - before >= 60 // 3


async def test_gathers_that_return_at_once_let_the_loop_turn_all_the_same() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        turns = Turns()
        before = turns.count
        for _ in range(200):
            operations = [stream.fill(buffer, 1), stream.fill(buffer, 2)]
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the fills")
            await aiocuda.gather(*operations)
        turns.stop()
        assert turns.count - before >= 200 // 65


async def test_no_turn_resolves_more_than_its_share() -> None:
    """2 000 operations that are done all at once are resolved over several turns of the loop."""
    async with open_peer(max_in_flight=4000) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            await warmed(latch, stream)
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
        assert most <= 512  # 256 by whoever polls, and as many by what falls into the same turn
        await asyncio.gather(*tasks)


async def test_long_wait_costs_no_polling(device: Device, stream: Stream, latch: Latch) -> None:
    """Parked: the watchdog looks, and the loop itself ever more rarely, however many wait."""
    await warmed(latch, stream)
    hold = latch.hold(stream)
    waiters = [asyncio.create_task(hold.wait()) for _ in range(100)]
    await latch.held()
    await until(lambda: device.statistics().armed, "the notifier")
    before = device.statistics()
    await until(lambda: device.statistics().watchdog_wakes >= before.watchdog_wakes + 8, "some ticks")
    after = device.statistics()
    ticks = after.watchdog_wakes - before.watchdog_wakes
    assert after.polls - before.polls <= ticks + 40  # each look comes 1.125 times as late as the one before
    assert after.parks == before.parks
    latch.release()
    await quickly(asyncio.gather(*waiters))


async def test_parked_it_looks_once_each_time() -> None:
    """However early the alarm rings, which allows for its own lateness: between two looks nothing is polled."""
    async with open_peer(Peer(polls_freely=True)) as (_, device):
        stream = device.stream()
        with Latch(device) as latch:
            await warmed(latch, stream)
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
            assert after.polls - before.polls <= ticks + 40
            latch.release()
            await quickly(hold)


async def test_one_bell_for_a_stream_however_many_wait(device: Device, stream: Stream, latch: Latch) -> None:
    await warmed(latch, stream)
    latch.hold(stream)
    buffer = stream.empty(4)
    operations = [stream.fill(buffer, 1) for _ in range(50)]
    tasks = [asyncio.create_task(operation.wait()) for operation in operations]
    await latch.held()
    await until(lambda: device.statistics().armed, "the notifier")
    assert device.statistics().armed == 1
    latch.release()
    await quickly(asyncio.gather(*tasks))


async def test_no_more_bells_than_there_are(device: Device) -> None:
    """Streams beyond that are asked by a timer, and their waits end as well."""
    limit = device.driver.notifier_limit(device.index)
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(device.stream()) for _ in range(limit + 8)]
        with Latch(device) as latch:
            await warmed(latch, streams[0])
            holds = [latch.hold(stream) for stream in streams]
            tasks = [asyncio.create_task(hold.wait()) for hold in holds]
            await until(lambda: device.statistics().armed == limit, "all notifiers")
            ticks = device.statistics().watchdog_wakes
            await until(lambda: device.statistics().watchdog_wakes > ticks + 2, "the watchdog")
            assert device.statistics().armed == limit
            latch.release()
            await quickly(asyncio.gather(*tasks))
        await until(lambda: device.statistics().armed == 0, "the notifiers")
        assert device.statistics().lost_wakes == 0


async def test_without_any_bell() -> None:
    with Peer() as peer:
        peer.__dict__["notifier_limit"] = lambda device: 0
        async with aiocuda.open_device(driver=peer.driver) as device:
            streams = [device.stream() for _ in range(4)]
            with Latch(device) as latch:
                await warmed(latch, streams[0])
                tasks = [asyncio.create_task(latch.hold(stream).wait()) for stream in streams]
                await latch.held()
                latch.release()
                await quickly(asyncio.gather(*tasks))
            assert device.statistics().parks == 0
            assert peer.calls["notifier"] == 0


async def test_bell_that_cannot_be_had() -> None:
    with Peer() as peer, Reports() as reports:
        peer.refuse("notifier", times=1000)
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            with Latch(device) as latch:
                await warmed(latch, stream)
                task = asyncio.create_task(latch.hold(stream).wait())
                await until(lambda: peer.calls["notifier"], "an attempt")
                latch.release()
                await quickly(task)
        assert len(reports.failures) <= 1  # told once, not at each attempt


class Deaf(Peer):
    """Rings as told, but not all tags arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.swallow: Callable[[int], bool] = lambda tag: True

    def notifier(self, device: int, port: Port) -> Notifier:
        notifier, deaf = self.inner.notifier(device, port), self

        class Muffled:
            def ring(self, event: int, tag: int) -> None:
                if not deaf.swallow(tag):
                    notifier.ring(event, tag)

        return Muffled()


async def test_bells_that_never_ring_are_counted_and_the_waits_end() -> None:
    with Deaf() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            streams = [device.stream() for _ in range(3)]
            with Latch(device) as latch:
                await warmed(latch, streams[0])
                before = device.statistics().lost_wakes
                tasks = [asyncio.create_task(latch.hold(stream).wait()) for stream in streams]
                await until(lambda: device.statistics().armed == 3, "the notifiers")
                latch.release()
                await quickly(asyncio.gather(*tasks))
            await until(lambda: device.statistics().lost_wakes == before + 3, "the notifiers to be missed")
            assert device.statistics().armed == 0
            peer.swallow = lambda tag: False  # notifiers that are whole take their places
            with Latch(device) as latch:
                tasks = [asyncio.create_task(latch.hold(stream).wait()) for stream in streams]
                await until(lambda: device.statistics().armed == 3, "the notifiers")
                latch.release()
                await quickly(asyncio.gather(*tasks))
            await until(lambda: device.statistics().armed == 0, "the notifiers")
            assert device.statistics().lost_wakes == before + 3


async def test_tags_of_nobody_are_ignored() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        port = resources_of(device).loop_states.here().reactor.notifier_pool.port
        for tag in (0, 1, 2**62 + 2**40, 2**44 * 5 + 3, 2**61):
            port.put(tag)  # type: ignore[attr-defined]  # as a notifier's host function does
        await quickly(stream.synchronize())
        with Latch(device) as latch:
            task = asyncio.create_task(latch.hold(stream).wait())
            await latch.held()
            for tag in range(100):
                port.put(tag)  # type: ignore[attr-defined]
            await turns()
            assert not task.done()  # a notification proves nothing
            latch.release()
            await quickly(task)


async def test_abandoning_what_a_bell_was_armed_for_loses_no_bell(device: Device, stream: Stream, latch: Latch) -> None:
    """The device has not come there yet: that the notifier is silent is as it should be."""
    await warmed(latch, stream)
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
    assert device.statistics().lost_wakes == 0


async def test_wait_that_outlives_its_prediction_is_watched_on() -> None:
    """Predicted to take 4 ms; the loop is busy at that time; it takes longer. A notifier wakes it, not the watchdog."""
    async with open_peer(Peer(polls_freely=True)) as (_, device):
        stream = device.stream()
        spin = Kernel(SPIN_SAMPLE.name, source=SPIN_SAMPLE.source, host=SPIN_SAMPLE.host)
        for _ in range(6):
            await stream.launch(spin, 1, 1, 4 * MS)
        operation = stream.launch(spin, 1, 1, 300 * MS)
        task = asyncio.create_task(operation.wait())
        await asyncio.sleep(0)
        ended = time.monotonic() + 0.03
        block_until(lambda: time.monotonic() > ended)
        await until(lambda: device.statistics().armed == 1, "the notifier")
        assert not task.done()
        await quickly(task)


async def test_prediction_makes_waits_sleep_and_then_poll() -> None:
    async with open_peer(Peer(polls_freely=True)) as (_, device):
        stream = device.stream()
        spin = Kernel(SPIN_SAMPLE.name, source=SPIN_SAMPLE.source, host=SPIN_SAMPLE.host)
        for _ in range(8):
            await stream.launch(spin, 1, 1, 8 * MS)
        assert device.statistics().sleeps > 0


# Ports


class Undescribed(Peer):
    """As where loops cannot watch descriptors."""

    def open_port(self, wake: Callable[[], None]) -> Port:
        return ports.open_port(wake, watchable=False)


async def test_port_without_a_descriptor() -> None:
    with Undescribed() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream, other = device.stream(), device.stream()
            array = np.arange(6 << 20, dtype=np.uint8)
            with Latch(device) as latch:
                await warmed(latch, stream)
                buffer = await quickly(stream.upload(array))
                task = asyncio.create_task(latch.hold(other).wait())
                await until(lambda: device.statistics().armed, "the notifier")
                latch.release()
                await quickly(task)
            assert np.array_equal(await quickly(other.download(buffer)), array)
            assert (await device.pinned(100)).size == 100
            assert device.statistics().notifications > 3
            assert device.statistics().lost_wakes == 0


@pytest.mark.parametrize("factory", [factory for factory in (asyncio.new_event_loop, UVLOOP) if factory])
async def test_port_without_a_descriptor_whose_loop_is_closed(factory: Callable[[], Any]) -> None:
    """Wakes that come afterwards meet a closed loop, on a thread that must not die of it."""
    with Undescribed() as peer:
        kept: list[Any] = []

        async def leave() -> None:
            device = await aiocuda.open_device(driver=peer.driver)
            stream = device.stream()
            latch = Latch(device)
            await warmed(latch, stream)
            task = asyncio.create_task(latch.hold(stream).wait())
            await latch.held()
            await until(lambda: device.statistics().armed, "the notifier")
            task.cancel()
            kept.extend((device, stream, latch))

        def run() -> None:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(leave())

        await asyncio.to_thread(run)
        device, stream, latch = kept
        latch.release()
        await until(lambda: peer.inner.stream_query(stream._queue.handle), "the held kernel")
        mine = device.stream()
        await quickly(mine.synchronize())
        await device.drain()
        await device.aclose()


# Queries of others


async def test_interrupted_wait_is_taken_up_again(stream: Stream) -> None:
    """KeyboardInterrupt out of a query: what it was about is asked again."""
    async with open_peer() as (peer, device):
        mine = device.stream()
        operation = mine.fill(mine.empty(4), 1)
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


async def test_chain_awaited_one_by_one(stream: Stream) -> None:
    buffer = await stream.upload(np.zeros(1, np.uint32))
    operations: list[Operation[Any]] = [stream.launch(AFFINE, 1, 1, buffer, 1, 1, 1) for _ in range(500)]
    finished: list[int] = []

    async def wait(index: int) -> None:
        await operations[index]
        finished.append(index)

    await quickly(asyncio.gather(*(wait(index) for index in range(500))))
    assert finished == sorted(finished)
    assert (await stream.download(buffer))[0] == 500


async def test_begin_and_end_of_queries_are_balanced_while_others_may_capture() -> None:
    """CuPy or PyTorch in the process may be capturing: a query of ours must not spoil it."""
    async with open_peer() as (peer, device):
        resources_of(device).device_state.guarded = True
        stream = device.stream()
        with Latch(device) as latch:
            await warmed(latch, stream)
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
        with Latch(device, seconds=60) as latch:
            held = latch.hold(gate)
            await latch.held()
            for stream in streams:
                stream.wait(held)
            waits = [asyncio.create_task(stream.synchronize().wait()) for stream in streams]
            await asyncio.sleep(2.0)  # the longer a stream has waited, the more rarely it is queried
            began = time.thread_time()
            await asyncio.sleep(1.0)
            seconds = time.thread_time() - began
            latch.release()
            await quickly(asyncio.gather(*waits))
    assert seconds <= 0.05


async def test_256_waiting_streams_are_polled_at_most_7_000_times_a_second() -> None:
    """A poll every millisecond of each stream without a notifier takes 30 % of a core."""

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
            warnings.simplefilter("ignore", ResourceWarning)  # the streams close with their device
            return runner.run(main())

    polls = await asyncio.to_thread(run)
    assert 1_000 < polls <= 7_000
