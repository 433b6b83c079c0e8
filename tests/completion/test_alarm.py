"""Alarms fire once, at the time that they were set to, and close their descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import sys
import time
from collections.abc import Callable

import pytest

import aiocuda
from aiocuda import Device
from aiocuda.completion import _alarm as module
from aiocuda.completion._alarm import MOST_EARLY, Alarm
from tests.completion.interrupts import sweep
from tests.helpers import PATIENCE, quickly

now = time.perf_counter

linux = pytest.mark.skipif(sys.platform != "linux", reason="timerfd exists only on Linux")


class FiringAlarm:
    """An alarm, and the times at which it fired."""

    def __init__(self, *, watches: bool = True, clock: Callable[[], float] = now) -> None:
        self.times: list[float] = []
        self.fired = asyncio.Event()
        self.alarm = Alarm(asyncio.get_running_loop(), clock, self._fire, watches=watches)

    def _fire(self, when: float) -> None:
        self.times.append(when)
        self.fired.set()

    def set_and_wait(self) -> tuple[float, int]:
        """Set the alarm, and block this iteration of the loop until its time has come.

        Returns
        -------
        tuple[float, int]
            The time at which the alarm was set, in seconds, and its descriptor.
        """
        start, descriptor = now(), self.alarm._descriptor
        assert descriptor is not None
        self.alarm.set(start + 0.001, start)
        select.select([descriptor], [], [], PATIENCE)
        return start, descriptor

    async def next(self) -> float:
        await quickly(self.fired.wait())
        self.fired.clear()
        return self.times[-1]


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_alarm_fires_once_at_its_time(watches: bool) -> None:
    firing = FiringAlarm(watches=watches)
    start = now()
    firing.alarm.set(start + 0.01, start)
    assert firing.alarm.at == start + 0.01
    fired_at = await firing.next()
    assert fired_at >= start + 0.01  # the alarm has not measured its lateness yet
    assert firing.alarm.at == float("inf")
    await asyncio.sleep(0.02)
    assert len(firing.times) == 1
    firing.alarm.close()


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_alarm_set_to_two_times_fires_at_the_earlier_one(watches: bool) -> None:
    firing = FiringAlarm(watches=watches)
    start = now()
    firing.alarm.set(start + 3000.0, start)
    firing.alarm.set(start + 0.01, start)
    firing.alarm.set(start + 2000.0, start)
    await firing.next()
    await asyncio.sleep(0)
    assert firing.alarm.at == float("inf")
    firing.alarm.close()


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_alarm_set_to_a_past_time_fires_in_a_later_iteration(watches: bool) -> None:
    firing = FiringAlarm(watches=watches)
    firing.alarm.set(now() - 1.0, now())
    assert not firing.times
    await firing.next()
    firing.alarm.close()


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_alarm_learns_its_lateness(watches: bool) -> None:
    """By its clock it is 3 ms late, and then fires a millisecond early. Later it is punctual."""
    clock = [100.0]
    firing = FiringAlarm(watches=watches, clock=lambda: clock[0])
    early: dict[float, float] = {}
    for late in (0.003, 0.0):
        for _ in range(20):
            start = clock[0]
            firing.alarm.set(start + 0.005, start)
            clock[0] = start + 0.005 - firing.alarm.early + late
            await firing.next()
        early[late] = firing.alarm.early
    assert early[0.003] == MOST_EARLY
    assert early[0.0] < MOST_EARLY / 4
    firing.alarm.close()


@linux
@pytest.mark.asyncio
async def test_alarm_is_more_precise_than_timers_of_the_loop() -> None:
    """Timers of the loop round up to whole milliseconds, twice.

    The smallest lateness of each kind contains no other delay.
    """
    late: dict[bool, list[float]] = {True: [], False: []}
    for watches in (True, False) * 8:
        firing = FiringAlarm(watches=watches)
        start = now()
        firing.alarm.set(start + 0.0085, start)
        late[watches].append(await firing.next() - start - 0.0085)
        firing.alarm.close()
    assert min(late[True]) < min(late[False]) / 2


@linux
@pytest.mark.asyncio
async def test_alarm_set_again_while_its_callback_is_pending() -> None:
    """The descriptor was readable when the loop polled it, and is not readable now.

    The alarm waits for the new time.
    """
    firing = FiringAlarm()
    start, _ = firing.set_and_wait()
    firing.alarm.at = float("inf")
    firing.alarm.set(start + 3000.0, start)
    firing.alarm._rang()  # the callback that the loop has queued
    assert not firing.times
    assert firing.alarm.at == start + 3000.0
    firing.alarm.close()


@linux
@pytest.mark.asyncio
async def test_alarm_without_a_descriptor_uses_timers_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_create", lambda clock, flags: -1)
    firing = FiringAlarm()
    assert firing.alarm._descriptor is None
    firing.alarm.set(now() + 0.002, now())
    await firing.next()
    firing.alarm.close()


@linux
@pytest.mark.asyncio
async def test_alarm_fires_after_other_code_has_closed_its_descriptor() -> None:
    """It does not touch the new file that has this number.

    A process that becomes a daemon closes all descriptors.
    """
    firing = FiringAlarm()
    descriptor = firing.alarm._descriptor
    assert descriptor is not None
    asyncio.get_running_loop().remove_reader(descriptor)  # after a close, epoll forgets the descriptor
    os.dup2(2, descriptor)  # closes the old file, too
    firing.alarm.set(now() + 0.002, now())
    await firing.next()
    firing.alarm.close()
    os.close(descriptor)  # raises if the alarm has closed it


@linux
@pytest.mark.asyncio
async def test_alarm_can_be_closed_after_other_code_has_closed_its_descriptor() -> None:
    firing = FiringAlarm()
    descriptor = firing.alarm._descriptor
    assert descriptor is not None
    firing.alarm.set(now() + 30.0, now())
    os.close(descriptor)
    firing.alarm.close()
    firing.alarm.close()


@linux
@pytest.mark.asyncio
async def test_alarm_fires_when_it_is_set_again_after_other_code_has_read_its_descriptor() -> None:
    """A child that was forked while the loop ran shares the descriptor, and reads it if it continues the loop."""
    firing = FiringAlarm()
    start, descriptor = firing.set_and_wait()
    os.read(descriptor, 8)
    firing.alarm.set(start + 30.0, start + 0.001)  # the callback may still come
    assert firing.alarm.at == start + 0.001
    firing.alarm.set(start + 30.0, start + 1.0)
    await firing.next()
    assert firing.alarm.at == float("inf")
    firing.alarm.close()


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.asyncio
async def test_alarm_can_be_set_again_after_an_interrupt(watches: bool) -> None:
    """After Ctrl-C at any place, the alarm is not set to a past time. In a notebook, the loop continues."""
    for interrupt in sweep(module, least=10 if watches and sys.platform == "linux" else 2):
        firing = FiringAlarm(watches=watches)
        start = now()
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            firing.alarm.set(start + 0.001, start)
            if firing.alarm._descriptor is not None:
                select.select([firing.alarm._descriptor], [], [], PATIENCE)
                firing.alarm._rang()
        firing.fired.clear()
        firing.alarm.set(start + 1.001, start + 1.0)
        await firing.next()
        assert firing.alarm.at == float("inf"), interrupt.where
        firing.alarm.close()


@pytest.mark.asyncio
async def test_alarm_that_fires_without_being_set_keeps_its_learned_lateness() -> None:
    """The time of such an alarm is infinite, so its lateness has no value."""
    firing = FiringAlarm(watches=False)
    firing.alarm._handle = asyncio.get_running_loop().call_later(0.0, firing.alarm._rang)
    await firing.next()
    assert 0.0 <= firing.alarm.early <= MOST_EARLY
    for _ in range(40):
        start = now()
        firing.alarm.set(start, start)
        await firing.next()
    assert 0.0 < firing.alarm.early <= MOST_EARLY
    firing.alarm.close()


@linux
@pytest.mark.asyncio
async def test_closed_alarm_closes_its_descriptor_and_does_not_fire() -> None:
    firing = FiringAlarm()
    descriptor = firing.alarm._descriptor
    assert descriptor is not None
    firing.alarm.set(now() + 0.001, now())
    firing.alarm.close()
    firing.alarm.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    await asyncio.sleep(0.01)
    assert not firing.times


@linux
def test_alarms_of_a_device_close_their_descriptors() -> None:
    """A closed device has no descriptor of an alarm. An open device has one at most, that of its last loop."""

    def timers() -> int:
        places = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum("timerfd" in os.readlink(place) for place in places if os.path.lexists(place))

    async def use(device: Device) -> None:
        async with device.stream() as stream:
            await stream.synchronize()

    async def main() -> None:
        async with aiocuda.open_device(driver="host") as device:
            await use(device)
            assert timers() == before + 1

    async def open_and_use() -> Device:
        device = await aiocuda.open_device(driver="host")
        await use(device)
        return device

    gc.collect()  # objects that earlier tests have dropped
    before = timers()
    asyncio.run(main())
    assert timers() == before
    device = asyncio.run(open_and_use())
    for _ in range(3):
        asyncio.run(use(device))
    assert timers() <= before + 1
    asyncio.run(device.aclose())
    assert timers() == before


@linux
def test_dropped_alarm_closes_its_descriptor() -> None:
    async def main() -> int:
        descriptor = FiringAlarm().alarm._descriptor
        assert descriptor is not None
        return descriptor

    descriptor = asyncio.run(main())
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@linux
def test_alarm_on_a_loop_with_another_clock_uses_its_timers() -> None:
    class Shifted(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return super().time() + 1e6

    async def main() -> None:
        firing = FiringAlarm()
        assert firing.alarm._descriptor is None
        firing.alarm.set(now() + 0.002, now())
        await firing.next()
        firing.alarm.close()

    with asyncio.Runner(loop_factory=Shifted) as runner:
        runner.run(main())
