"""The rule of waits: a host callback ends a wait, a poll only makes it quicker, and a query comes without both."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import pytest

import aiocuda
from aiocuda import AsyncCoordinator, CompletionPolicy, Device, Stream
from aiocuda._core import Estimate, ReactorHot, Watch
from aiocuda._core._estimate import CALLBACK_SECONDS
from aiocuda.completion._reactor import PollAllowance
from aiocuda.completion._wait_rule import (
    FIRST_POLL,
    GRACE,
    LONGEST,
    OVERDUE,
    SHORT_WAIT,
    SHORTEST,
    first_poll,
    next_look,
)
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing import SimulatedLoop
from tests.benchmarks.durations import PATTERNS, SURPRISING, durations
from tests.helpers import SPIN, Latch, Peer, open_peer, quickly, until

BALANCED, LATENCY, EFFICIENT = map(CompletionPolicy.named, ("balanced", "latency", "efficient"))  # type: ignore[arg-type]  # names


def simulated(
    main: Callable[[Device, SimulatedDriver], Awaitable[None]],
    *,
    policy: Any = "balanced",
    seed: int | None = 1,
    upsets: tuple[Upset, ...] = (),
) -> None:
    """Run ``main`` in virtual time, in which notifications are 0.03 to 3 ms late."""
    driver = SimulatedDriver(seed, upsets=upsets)

    async def opened() -> None:
        async with aiocuda.open_device(driver=driver, policy=policy) as device:
            await device.load(SPIN)
            await main(device, driver)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []


def parked(*, predicted: float = 0.0, repeats: bool = False, armed: bool = True) -> Watch:
    watch = Watch()
    watch.since, watch.predicted, watch.repeats = 100.0, predicted, repeats
    watch.armed = object() if armed else None  # the rule asks whether there is one
    return watch


# The functions


@pytest.mark.parametrize("policy", [BALANCED, LATENCY])
def test_wait_with_a_far_end_is_armed_at_once_and_others_are_polled_for_150_us(policy: CompletionPolicy) -> None:
    assert first_poll(policy, 100.0, 100.0 + SHORT_WAIT + 1e-5) == 100.0
    for predicted in (None, 99.0, 100.0, 100.0 + FIRST_POLL - GRACE):
        assert first_poll(policy, 100.0, predicted) == pytest.approx(100.0 + FIRST_POLL)
    assert first_poll(policy, 100.0, 100.0002) == pytest.approx(100.0002 + GRACE)


def test_efficient_arms_at_once() -> None:
    assert [first_poll(EFFICIENT, 100.0, predicted) for predicted in (None, 100.0, 101.0)] == [100.0] * 3


def test_balanced_polls_around_the_end_only_where_durations_repeat_and_while_it_may() -> None:
    begin, end = next_look(BALANCED, parked(predicted=100.005, repeats=True), 100.0, polls=True, held_up=False, waits=1)
    assert (begin, end) == pytest.approx((100.00492, 100.0051))
    for watch, polls in ((parked(predicted=100.005), True), (parked(predicted=100.005, repeats=True), False)):
        begin, end = next_look(BALANCED, watch, 100.0, polls=polls, held_up=False, waits=1)
        assert (begin >= 100.0 + SHORTEST, end) == (True, 0.0)


def test_poll_that_begins_within_10_ms_needs_no_check_before_it() -> None:
    for milliseconds, is_poll in ((9.98, True), (10.1, False)):
        watch = parked(predicted=100.0 + milliseconds * 1e-3, repeats=True)
        begin, end = next_look(BALANCED, watch, 100.0, polls=True, held_up=False, waits=1)
        assert (end > 0.0) == is_poll
        assert begin <= 100.0 + LONGEST


def test_latency_always_polls_around_the_end() -> None:
    assert next_look(LATENCY, parked(predicted=100.005), 100.0018, polls=True, held_up=False, waits=1) == pytest.approx(
        (100.002, 100.055)
    )
    assert next_look(LATENCY, parked(), 100.001, polls=True, held_up=False, waits=1) == pytest.approx((100.001, 100.05))


@pytest.mark.parametrize("policy", [BALANCED, LATENCY, EFFICIENT])
@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("predicted", [0.0, 100.002, 100.2])
def test_parked_wait_is_queried_from_a_millisecond_on_at_most_10_ms_apart(
    policy: CompletionPolicy, polls: bool, repeats: bool, predicted: float
) -> None:
    watch = parked(predicted=predicted, repeats=repeats and predicted > 0.0)
    now, gaps = 100.0, []
    while now < 101.0:
        begin, end = next_look(policy, watch, now, polls=polls, held_up=False, waits=1)
        assert begin > now or end > now
        gaps.append(begin - now)
        now = max(begin, end)
    assert max(gaps) <= LONGEST + 1e-9
    if watch.repeats and not polls:
        after = [gap for gap in gaps if gap >= SHORTEST]
        assert min(after) <= 2 * SHORTEST + 1e-9


def test_grid_of_many_waits_is_coarser_unless_callbacks_are_late() -> None:
    for waits, milliseconds in ((1, 1), (15, 1), (16, 2), (200, 2)):
        following, _ = next_look(EFFICIENT, parked(), 100.0, polls=False, held_up=False, waits=waits)
        assert round(following * 1000) % milliseconds == 0
        assert following - 100.0 <= milliseconds * 1.25e-3 + 1e-9
        following, _ = next_look(EFFICIENT, parked(), 100.0, polls=False, held_up=True, waits=waits)
        assert following - 100.0 <= 1.25e-3 + 1e-9


def test_predictions_count_for_nothing_while_callbacks_are_late() -> None:
    watch = parked(predicted=100.02, repeats=True)
    begin, _ = next_look(EFFICIENT, watch, 100.0, polls=False, held_up=True, waits=1)
    assert begin <= 100.0 + 2 * SHORTEST
    begin, _ = next_look(EFFICIENT, watch, 100.0, polls=False, held_up=False, waits=1)
    assert begin >= 100.0 + LONGEST - 2 * SHORTEST


def test_wait_that_nothing_predicts_is_found_a_twelfth_of_its_time_late_at_most() -> None:
    watch, now = parked(), 100.0
    while now < 100.1:
        following, _ = next_look(BALANCED, watch, now, polls=False, held_up=False, waits=1)
        assert following - now <= 1.25 * max(SHORTEST, (now - 100.0) / 12) + 1e-9
        now = following


def test_more_waits_than_notifiers_share_two_percent_of_a_core() -> None:
    for waits in (1, 8, 200):
        watch = parked(armed=False)
        now = 110.0  # long after it began
        following, end = next_look(BALANCED, watch, now, polls=True, held_up=False, waits=waits)
        assert end == 0.0
        assert following - now >= 0.25 * 0.5 * min(waits * 500e-6, 10.0 / 20)


@pytest.mark.asyncio
async def test_check_is_made_if_no_callback_has_come_for_a_millisecond_or_no_query_for_10(stream: Stream) -> None:
    queue = stream._queue
    reactor = ReactorHot(queue.loop, queue.now)
    reactor.attended[queue] = None
    watch = queue.watch = parked()
    for heard, looked, is_due in ((99.9995, 99.995, False), (99.9989, 99.995, True), (99.9995, 99.99, True)):
        watch.poll_from, watch.looked = 100.0, looked
        due, following = reactor.due(100.0, heard + SHORTEST, OVERDUE, SHORTEST)
        assert due == [queue] * is_due
        assert following == (math.inf if is_due else pytest.approx(100.001))
    queue.watch = Watch()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_allowance_holds_in_each_second(share: float) -> None:
    """The loop polls whenever it may, in passes of 40 µs."""
    allowance, now, passes = PollAllowance(share), 1.0, []
    while now < 4.0:
        if allowance.is_left(now):
            allowance.spend(now, now + 40e-6)
            passes.append(now)
        now += 50e-6
    for begin in (1.0, 1.3, 2.0, 2.7):
        polled = 50e-6 * sum(begin <= each < begin + 1.0 for each in passes)
        assert 0.7 * share < polled <= share


def test_allowance_without_a_limit_and_without_polls() -> None:
    for share, may in ((1.0, True), (0.0, False)):
        allowance = PollAllowance(share)
        for now in range(1, 10):
            assert allowance.is_left(now) == may
            allowance.spend(now, now + 1)


# What an estimate learns


def test_durations_repeat_after_four_of_a_kind_and_one_outlier_changes_nothing() -> None:
    estimate = Estimate()
    for _ in range(2):
        estimate.add(0.0095, 0.010)
    assert estimate.agreed < 3
    for _ in range(3):
        estimate.add(0.00999, 0.010)
    assert estimate.agreed == 4
    estimate.add(0.0, 0.025)
    assert estimate.agreed >= 3
    assert estimate.seconds == pytest.approx(0.010)


@pytest.mark.parametrize("pattern", SURPRISING)
def test_durations_that_vary_do_not_count_as_repeated(pattern: str) -> None:
    estimate, chance, repeated = Estimate(), random.Random(3), 0
    for seconds in islice(durations(pattern, 3), 1000):
        found = seconds + chance.uniform(3e-5, 7e-4)
        estimate.add(found - CALLBACK_SECONDS, found)
        repeated += estimate.agreed >= 3
    assert repeated < 250


def test_sample_that_was_not_foreseen_does_not_count_as_repeated() -> None:
    """Streams in step: all durations of one round agree, and the prediction of each was made in the round before."""
    estimate = Estimate()
    for seconds, before in islice(zip(itertools.cycle([0.001, 0.010]), itertools.cycle([0.010, 0.001])), 10):
        for _ in range(16):
            estimate.add(seconds - 5e-4, seconds, 1, before)
            assert estimate.agreed == 0
    for _ in range(4):
        estimate.add(0.0095, 0.010, 1, 0.010)
    assert estimate.agreed >= 3


def test_new_duration_is_learned() -> None:
    estimate = Estimate()
    for seconds in (0.010, 0.003):
        for _ in range(8):
            estimate.add(seconds - 5e-4, seconds)
        assert estimate.seconds == pytest.approx(seconds)
        assert estimate.agreed >= 3


def test_sample_of_a_late_callback_is_corrected_by_a_poll() -> None:
    """A callback finds the end 0.4 ms late; the poll that begins before that finds it at once, and then exactly."""
    estimate = Estimate()
    for _ in range(5):
        estimate.add(0.0097, 0.0104)
    assert estimate.seconds == pytest.approx(0.0104)
    estimate.add(0.0, 0.0102)
    assert estimate.seconds == pytest.approx(0.0102)
    for _ in range(20):
        estimate.add(0.00999, 0.010)
    assert estimate.seconds == pytest.approx(0.010, rel=1e-3)


def test_polls_come_before_the_end_after_few_late_callbacks() -> None:
    """Callbacks are 0.2 to 0.5 ms late. A poll that begins after the end finds it at its first query."""
    estimate, end = Estimate(), 0.010
    for late in (0.4e-3, 0.2e-3, 0.5e-3, 0.3e-3, 0.45e-3):
        estimate.add(end + late - CALLBACK_SECONDS, end + late)
    polls = 0
    while (begin := (estimate.seconds or 0.0) - BALANCED.lead) > end:
        estimate.add(begin - CALLBACK_SECONDS, begin)
        polls += 1
    assert polls <= 4
    assert begin > end - 2 * BALANCED.lead


def test_end_that_nobody_has_waited_for_teaches_no_duration() -> None:
    estimate = Estimate()
    for _ in range(5):
        estimate.add(0.0097, 0.010)
    agreed = estimate.agreed
    estimate.add(0.0, 0.040)
    assert estimate.agreed == agreed
    assert estimate.seconds == pytest.approx(0.010)
    estimate.add(0.0, 0.004)  # it ended before
    assert estimate.agreed == agreed - 1


# In virtual time


def test_streams_in_step_with_durations_in_turn_are_not_polled() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async def each(stream: Stream, count: int) -> None:
            for number in range(count):
                await stream.launch(SPIN, 1, 1, (1_000_000, 10_000_000)[number % 2])

        streams = [device.stream() for _ in range(16)]
        await asyncio.gather(*(each(stream, 4) for stream in streams))
        before = device.statistics().sleeps
        await asyncio.gather(*(each(stream, 20) for stream in streams))
        assert device.statistics().sleeps - before <= 16 * 20 // 20
        for stream in streams:
            await stream.aclose()

    simulated(main)


async def lateness(stream: Stream, driver: SimulatedDriver, pattern: str, count: int = 60) -> list[float]:
    """Return how late a task resumes after each kernel, in seconds."""
    late = []
    for seconds in islice(durations(pattern, 5), count):
        began = driver.now()
        await stream.launch(SPIN, 1, 1, int(seconds * 1e9))
        late.append(driver.now() - began - seconds)
    return late


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("policy", ["balanced", "latency", "efficient"])
def test_no_wait_is_much_later_than_its_callback(policy: str, pattern: str) -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            late = await lateness(stream, driver, pattern)
        assert max(late) < 0.0035  # a simulated callback is at most 3 ms late
        if policy == "balanced" and pattern == "constant":
            assert sorted(late)[30] < 0.00015

    simulated(main, policy=policy)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_callback_that_is_20_ms_late_costs_a_twelfth_of_the_wait_at_most(pattern: str) -> None:
    """Another library's host function holds up all callbacks."""

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            late = await lateness(stream, driver, pattern)
        # Until the first late callback has come, a kind that has repeated has queries each 10 ms.
        assert sorted(late)[-3] <= 0.003
        assert max(late) <= 0.0105

    simulated(main, upsets=tuple(Upset("delay", nth, seconds=0.02) for nth in range(1, 200)))


@pytest.mark.parametrize("policy", ["balanced", "efficient"])
def test_wait_of_unknown_length_arms_a_notifier_within_150_us(policy: str) -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            waiting = asyncio.create_task(stream.launch(SPIN, 1, 1, 50_000_000).wait())
            await asyncio.sleep(0.0002)
            assert device.statistics().armed == 1
            polls = device.statistics().polls
            await asyncio.sleep(0.0007)
            assert device.statistics().polls == polls  # none until the first check
            await waiting

    simulated(main, policy=policy)


def test_callback_after_a_query_that_has_found_the_end_arms_the_next_wait_without_a_query() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            await stream.launch(SPIN, 1, 1, 1_500_000)
            waiting = asyncio.create_task(stream.launch(SPIN, 1, 1, 40_000_000).wait())
            await asyncio.sleep(0)
            before = after = device.statistics()
            while after.notifications == before.notifications:
                before = after
                await asyncio.sleep(30e-6)
                after = device.statistics()
            assert (after.parks, after.armed) == (before.parks + 1, 1)
            assert after.polls == before.polls
            await waiting

    simulated(main, policy="efficient", upsets=tuple(Upset("delay", nth, seconds=0.0053) for nth in range(1, 9)))


def test_gather_arms_the_last_operation_of_each_stream() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as one, device.stream() as two:
            began = driver.now()
            work = [stream.launch(SPIN, 1, 1, 5_000_000) for _ in range(3) for stream in (one, two)]
            waiting = asyncio.create_task(aiocuda.gather(*work).wait())
            await asyncio.sleep(0.0002)
            ids = [each.id for each in one._queue.reactor.notifier_pool.armed.values()]
            assert sorted(ids) == [work[-2].id, work[-1].id]
            await waiting
            assert driver.now() - began < 0.0185
            assert device.statistics().notifications <= 2 + 4

    simulated(main)


def test_oldest_wait_is_armed_although_a_later_one_is() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            first, second = (stream.launch(SPIN, 1, 1, 5_000_000) for _ in range(2))
            later = asyncio.create_task(second.wait())
            await asyncio.sleep(0.001)
            waiting = asyncio.create_task(first.wait())
            await asyncio.sleep(0.0002)
            ids = [each.id for each in stream._queue.reactor.notifier_pool.armed.values()]
            assert sorted(ids) == [first.id, second.id]
            await waiting
            await later

    simulated(main)


def test_more_streams_than_notifiers_are_gathered_in_the_time_of_their_kernels() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        names = [f"s{number}" for number in range(32)]
        async with aiocuda.StreamGroup(device, names) as streams:
            for _ in range(3):
                began = driver.now()
                await aiocuda.gather(*[streams[name].launch(SPIN, 1, 1, 10_000_000) for name in names])
                assert driver.now() - began < 0.0115

    simulated(main, seed=None)


# Without an await


@pytest.mark.asyncio
async def test_program_that_asks_without_an_await_sees_the_end(device: Device, stream: Stream, latch: Latch) -> None:
    """The loop does not turn meanwhile: only a query of the driver finds the end."""
    buffer = stream.empty(4)
    latch.hold(stream)
    await latch.held()
    fill = stream.fill(buffer, 1)
    event = stream.record()
    both = aiocuda.gather(fill, stream.synchronize())
    asks: list[Callable[[], bool]] = [fill.done, event.done, both.done, lambda: fill.state == "done"]
    asks.append(lambda: buffer.satisfied)
    assert [ask() for ask in asks] == [False] * 5
    latch.release()
    for ask in asks:
        while not ask():
            pass
    assert repr(fill).endswith("done>")
    assert both.result() == [None, None]


@pytest.mark.asyncio
async def test_node_that_is_asked_without_an_await_is_submitted_and_done(device: Device) -> None:
    """The second node waits for the place of the first one: to ask frees it, and submits the second."""
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        await device.load(SPIN)
        nodes = [coordinator.compute(SPIN, 1, 1, 1000) for _ in range(3)]
        for node in reversed(nodes):
            while not node.done():
                pass
            assert node.state == "done"
        mixed = aiocuda.gather(coordinator.compute(SPIN, 1, 1, 1000), coordinator.compute(SPIN, 1, 1, 1000))
        while not mixed.done():
            pass
        assert mixed.result() == [None, None]


@pytest.mark.asyncio
async def test_stream_is_queried_at_most_once_in_20_us() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            held = latch.hold(stream)
            await latch.held()
            clock = peer.driver.now()
            before = device.statistics().polls
            asked = 0
            while peer.driver.now() < clock + 0.01:
                held.done()
                asked += 1
            assert device.statistics().polls - before <= 0.01 / 20e-6 + 2
            assert asked > 0
            latch.release()
            await quickly(held)


@pytest.mark.asyncio
async def test_text_of_an_operation_makes_no_query() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            held = latch.hold(stream)
            await latch.held()
            calls = peer.calls["event_query"]
            for text in (repr(held), str(held), repr(aiocuda.gather(held))):
                assert "submitted" in text or "unfinished" in text
            assert peer.calls["event_query"] == calls
            latch.release()
            await quickly(held)


@pytest.mark.asyncio
async def test_other_thread_that_asks_makes_no_query() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            held = latch.hold(stream)
            await latch.held()
            latch.release()
            await until(lambda: peer.inner.stream_query(stream._queue.handle), "the kernel")
            assert await asyncio.to_thread(held.done) in (False, True)
            await quickly(held)


def test_ring_without_an_await_reaches_the_bound() -> None:
    """Three streams, 2 ms up, 5 ms of kernel, 2 ms down: 9 ms for each item on one stream, and 5 ms at best."""
    kernel = aiocuda.Kernel(
        "k", source="__global__ void k(unsigned char *x) {}", host=lambda x: None, host_seconds=5e-3
    )

    async def main() -> float:
        driver = SimulatedDriver(None, bandwidth=1e6, latency=0.0)
        async with aiocuda.open_device(driver=driver) as device, aiocuda.StreamGroup(device, ("up", "on", "down")) as s:
            pinned = [await device.pinned(2000, "u1") for _ in range(3)]
            async with aiocuda.TripleBuffer(buffers={"x": (2000, "u1")}, device=device) as ring:
                began, left = driver.now(), 50
                while left or ring.busy:
                    if left and (slot := ring.upload_slot(left)):
                        left -= 1
                        slot.enter("uploading", until=s["up"].copy(slot.buffer("x"), pinned[slot.number]))
                    if slot := ring.compute_slot():
                        slot.enter("processing", until=s["on"].launch(kernel, 1, 1, slot.buffer("x")))
                    if slot := ring.download_slot():
                        slot.enter("downloading", until=s["down"].copy(pinned[slot.number], slot.buffer("x")))
                    await asyncio.sleep(0.0005)  # the other work of the program
                    ring.advance()
                return (driver.now() - began) / 50

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(main()) <= 0.0053


@pytest.mark.asyncio
async def test_closed_and_captured_streams_are_not_asked(device: Device) -> None:
    async with open_peer(Peer(polls_freely=True)) as (peer, other):
        stream = other.stream()
        with Latch(other) as latch:
            held = latch.hold(stream)
            await latch.held()
            queue = stream._queue
            for flag in ("closed", "recorded"):
                setattr(queue, flag, True)
                calls = peer.calls["event_query"]
                assert not held.done()
                assert peer.calls["event_query"] == calls
                setattr(queue, flag, False)
            latch.release()
            await quickly(held)
