"""Alarms: they ring once, at the moment that they are set to, and keep no descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import sys
import time

import pytest

import aiocuda
from aiocuda import Device
from aiocuda.completion import _alarm as module
from aiocuda.completion._alarm import MOST_EARLY, Alarm
from tests.completion.interrupts import sweep

now = time.perf_counter

linux = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's own")


class Rung:
    """An alarm, and when it rang."""

    def __init__(self, *, watches: bool = True) -> None:
        self.times: list[float] = []
        self.told = asyncio.Event()
        self.alarm = Alarm(asyncio.get_running_loop(), now, self._ring, watches=watches)

    def _ring(self, when: float) -> None:
        self.times.append(when)
        self.told.set()

    def ripe(self) -> tuple[float, int]:
        """Set it, and stay in this turn of the loop until its moment has come. When it was set; its descriptor."""
        begun, descriptor = now(), self.alarm._descriptor
        assert descriptor is not None
        self.alarm.set(begun + 0.001, begun)
        select.select([descriptor], [], [], 10)
        return begun, descriptor

    async def next(self) -> float:
        await asyncio.wait_for(self.told.wait(), 10)
        self.told.clear()
        return self.times[-1]


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_it_rings_once_at_its_moment(watches: bool) -> None:
    rung = Rung(watches=watches)
    begun = now()
    rung.alarm.set(begun + 0.01, begun)
    assert rung.alarm.at == begun + 0.01
    rang = await rung.next()
    assert rang >= begun + 0.01  # nothing is known yet of how late it is
    assert rung.alarm.at == float("inf")
    await asyncio.sleep(0.02)
    assert len(rung.times) == 1
    rung.alarm.close()


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_of_two_moments_the_earlier_counts(watches: bool) -> None:
    rung = Rung(watches=watches)
    begun = now()
    rung.alarm.set(begun + 30.0, begun)
    rung.alarm.set(begun + 0.01, begun)
    rung.alarm.set(begun + 20.0, begun)
    assert await rung.next() < begun + 10.0
    await asyncio.sleep(0)
    assert rung.alarm.at == float("inf")
    rung.alarm.close()


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_a_moment_that_has_passed_rings_in_the_next_turns(watches: bool) -> None:
    rung = Rung(watches=watches)
    rung.alarm.set(now() - 1.0, now())
    assert not rung.times
    await rung.next()
    rung.alarm.close()


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_it_learns_how_late_it_is(watches: bool) -> None:
    """A loop that is busy for 3 ms in each turn is late by most of that: the alarm rings a millisecond early."""
    rung = Rung(watches=watches)
    early = []

    async def busy() -> None:
        while True:
            until = now() + 0.003
            while now() < until:
                pass
            await asyncio.sleep(0)

    other = asyncio.create_task(busy())
    for _ in range(10):
        begun = now()
        rung.alarm.set(begun + 0.005, begun)
        await rung.next()
        early.append(rung.alarm.early)
    assert MOST_EARLY / 2 < max(early) <= MOST_EARLY
    other.cancel()
    rung.alarm.close()


@linux
@pytest.mark.asyncio
async def test_it_is_finer_than_the_loops_timers() -> None:
    """Which round up to whole milliseconds, and once more. Of each, the one that nothing else has delayed."""
    late: dict[bool, list[float]] = {True: [], False: []}
    for watches in (True, False) * 8:
        rung = Rung(watches=watches)
        begun = now()
        rung.alarm.set(begun + 0.0085, begun)
        late[watches].append(await rung.next() - begun - 0.0085)
        rung.alarm.close()
    assert min(late[True]) < min(late[False]) / 2


@linux
@pytest.mark.asyncio
async def test_set_anew_after_the_loop_has_seen_it() -> None:
    """The descriptor was ready, and is not any more: nothing rings before the new moment."""
    rung = Rung()
    begun, _ = rung.ripe()
    rung.alarm.at = float("inf")
    rung.alarm.set(begun + 30.0, begun)
    rung.alarm._rang()  # what the loop had queued
    assert not rung.times
    assert rung.alarm.at == begun + 30.0
    rung.alarm.close()


@linux
@pytest.mark.asyncio
async def test_where_there_is_no_timer_left_the_loops_own_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_create", lambda clock, flags: -1)
    rung = Rung()
    assert rung.alarm._descriptor is None
    rung.alarm.set(now() + 0.002, now())
    await rung.next()
    rung.alarm.close()


@linux
@pytest.mark.asyncio
async def test_its_descriptor_is_closed_by_somebody_else() -> None:
    """It rings all the same, and leaves alone what has that number now. Who becomes a daemon closes all of them."""
    rung = Rung()
    descriptor = rung.alarm._descriptor
    assert descriptor is not None
    asyncio.get_running_loop().remove_reader(descriptor)  # epoll would have forgotten it by itself
    os.dup2(2, descriptor)  # closes it, too
    rung.alarm.set(now() + 0.002, now())
    await rung.next()
    rung.alarm.close()
    os.close(descriptor)  # raises if the alarm has done so


@linux
@pytest.mark.asyncio
async def test_closed_by_somebody_else_it_can_be_closed() -> None:
    rung = Rung()
    descriptor = rung.alarm._descriptor
    assert descriptor is not None
    rung.alarm.set(now() + 30.0, now())
    os.close(descriptor)
    rung.alarm.close()
    rung.alarm.close()


@linux
@pytest.mark.asyncio
async def test_what_somebody_else_has_read_rings_at_once_when_it_is_set_again() -> None:
    """A child that was forked while the loop ran shares the descriptor, and reads it if it goes on with the loop."""
    rung = Rung()
    begun, descriptor = rung.ripe()
    os.read(descriptor, 8)
    rung.alarm.set(begun + 30.0, begun + 0.001)  # it may still come
    assert rung.alarm.at == begun + 0.001
    rung.alarm.set(begun + 30.0, begun + 1.0)
    await rung.next()
    assert rung.alarm.at == float("inf")
    rung.alarm.close()


@pytest.mark.slow  # as all that trace by instructions: newer Pythons show less of them
@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_interrupted_it_can_be_set_again(watches: bool) -> None:
    """Wherever Ctrl-C comes, it does not stay set to a moment that has passed: in a notebook the loop goes on."""
    for interrupt in sweep(module, least=10 if watches and sys.platform == "linux" else 2):
        rung = Rung(watches=watches)
        begun = now()
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            rung.alarm.set(begun + 0.001, begun)
            if rung.alarm._descriptor is not None:
                select.select([rung.alarm._descriptor], [], [], 10)
                rung.alarm._rang()
        rung.told.clear()
        rung.alarm.set(begun + 1.001, begun + 1.0)
        await rung.next()
        assert rung.alarm.at == float("inf"), interrupt.where
        rung.alarm.close()


@pytest.mark.asyncio
async def test_a_ring_that_nobody_set_spoils_nothing_that_was_learned() -> None:
    """How late it was cannot be said: its moment is infinite."""
    rung = Rung(watches=False)
    rung.alarm._handle = asyncio.get_running_loop().call_later(0.0, rung.alarm._rang)
    await rung.next()
    assert 0.0 <= rung.alarm.early <= MOST_EARLY
    for _ in range(40):
        begun = now()
        rung.alarm.set(begun, begun)
        await rung.next()
    assert 0.0 < rung.alarm.early <= MOST_EARLY
    rung.alarm.close()


@linux
@pytest.mark.asyncio
async def test_closed_it_keeps_no_descriptor_and_rings_no_more() -> None:
    rung = Rung()
    descriptor = rung.alarm._descriptor
    assert descriptor is not None
    rung.alarm.set(now() + 0.001, now())
    rung.alarm.close()
    rung.alarm.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    await asyncio.sleep(0.01)
    assert not rung.times


@linux
def test_device_keeps_no_descriptor() -> None:
    """Whose loops come and go: one that is closed has none, and one that is left open has that of its last loop."""

    def timers() -> int:
        places = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum("timerfd" in os.readlink(place) for place in places if os.path.lexists(place))

    async def used(device: Device) -> None:
        async with device.stream() as stream:
            await stream.synchronize()

    async def main() -> None:
        async with aiocuda.open_device(driver="host") as device:
            await used(device)
            assert timers() == before + 1

    async def left() -> Device:
        device = await aiocuda.open_device(driver="host")
        await used(device)
        return device

    gc.collect()  # what others have left
    before = timers()
    asyncio.run(main())
    assert timers() == before
    device = asyncio.run(left())
    for _ in range(3):
        asyncio.run(used(device))
    assert timers() <= before + 1
    asyncio.run(device.aclose())
    assert timers() == before


@linux
def test_forgotten_with_its_loop_it_keeps_no_descriptor() -> None:
    async def main() -> int:
        descriptor = Rung().alarm._descriptor
        assert descriptor is not None
        return descriptor

    descriptor = asyncio.run(main())
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@linux
def test_a_loop_with_a_time_of_its_own_keeps_its_timers() -> None:
    class Shifted(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return super().time() + 1e6

    async def main() -> None:
        rung = Rung()
        assert rung.alarm._descriptor is None
        rung.alarm.set(now() + 0.002, now())
        await rung.next()
        rung.alarm.close()

    with asyncio.Runner(loop_factory=Shifted) as runner:
        runner.run(main())
