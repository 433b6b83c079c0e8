"""`SimulatedLoop` raises `LostWakeupError` as soon as all tasks wait and nothing will wake them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from aiocuda._base._wakeups import WATCHDOG_SECONDS
from aiocuda.testing import LostWakeupError, SimulatedLoop


def _of_aiocuda(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__module__ = "aiocuda.completion._reactor"
    return function


class Timers:
    """Sets a timer again and again, like aiocuda's reactor while an operation is unresolved."""

    def __init__(self, loop: SimulatedLoop, seconds: float = WATCHDOG_SECONDS) -> None:
        self.loop = loop
        self.seconds = seconds
        self.ticks = 0
        #: Called by a tick, like the rescue of a lost notification.
        self.rescues: dict[int, Callable[[], object]] = {}
        loop.call_later(seconds, self._tick)

    @_of_aiocuda
    def _tick(self) -> None:
        self.ticks += 1
        self.rescues.get(self.ticks, lambda: None)()
        self.loop.call_later(self.seconds, self._tick)

    @_of_aiocuda
    def spin(self) -> None:
        """Run in every turn of the loop."""
        self.loop.call_soon(self.spin)


def test_every_unfinished_task_is_named_with_its_place() -> None:
    ends: list[str] = []

    async def waits_for_event() -> None:
        await asyncio.Event().wait()

    async def waits_in_steps(queue: asyncio.Queue[None]) -> None:
        await asyncio.sleep(1)
        await queue.get()

    async def consume() -> None:
        await waits_for_event()

    async def main() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(consume(), name="consumer")
                group.create_task(waits_in_steps(asyncio.Queue()))
        finally:
            ends.append("wound up")

    with pytest.raises(LostWakeupError) as caught, asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    assert ends == ["wound up"]
    first, *places = str(caught.value).splitlines()
    assert first.startswith("lost wake-up at 1.00000")
    assert "no timer is set" in first
    here = re.escape(__file__)
    expected: list[tuple[str, tuple[Any, ...]]] = [
        ("Task-1", (main,)),
        ("consumer", (waits_for_event, consume)),
        ("Task-3", (waits_in_steps,)),
    ]
    for place, (name, functions) in zip(places, expected, strict=True):
        lines = ", awaited at ".join(rf"{here}:(\d+) in \S*\.{each.__name__}" for each in functions)
        found = re.fullmatch(f"  {name} at {lines}", place)
        assert found, place
        for line, function in zip(found.groups(), functions, strict=True):
            assert function.__code__.co_firstlineno < int(line) <= function.__code__.co_firstlineno + 5


def test_future_that_is_never_resolved_is_lost(loop: SimulatedLoop) -> None:
    with pytest.raises(LostWakeupError, match="unfinished: no task"):
        loop.run_until_complete(loop.create_future())
    with pytest.raises(LostWakeupError):
        loop.run_forever()


def test_cancelled_or_infinite_timer_wakes_no_task(loop: SimulatedLoop) -> None:
    loop.call_later(3600, print).cancel()
    with pytest.raises(LostWakeupError, match=r"at 0\.00000"):
        loop.run_until_complete(asyncio.sleep(float("inf")))


def test_entry_of_the_clock_may_wake_a_task(loop: SimulatedLoop) -> None:
    async def main() -> None:
        await event.wait()

    event = asyncio.Event()
    loop.clock.at(10 * 10**9, None, lambda: None)  # without an effect
    loop.clock.at(60 * 10**9, None, event.set)
    timers = Timers(loop)
    loop.run_until_complete(main())
    assert timers.ticks == 60 / WATCHDOG_SECONDS


@pytest.mark.parametrize("seconds", [WATCHDOG_SECONDS, 0.001], ids=["watchdog", "tick"])
def test_timers_of_aiocuda_do_not_hide_it(loop: SimulatedLoop, seconds: float) -> None:
    timers = Timers(loop, seconds)
    with pytest.raises(LostWakeupError, match=r"at 0\.2[0-9]+ s .* aiocuda's own timers .*\n  Task-1 at .*locks\.py:"):
        loop.run_until_complete(asyncio.Event().wait())
    assert timers.ticks <= 0.25 / seconds


@pytest.mark.slow
def test_polling_of_aiocuda_does_not_hide_it(loop: SimulatedLoop) -> None:
    timers = Timers(loop)
    timers.spin()
    with pytest.raises(LostWakeupError, match=r"at 0\.2[0-9]+ s"):
        loop.run_until_complete(asyncio.Event().wait())


@pytest.mark.parametrize("tick", [1, 3, 7])
def test_rescue_by_the_watchdog_is_no_lost_wakeup(loop: SimulatedLoop, tick: int) -> None:
    async def main() -> None:
        for number in range(1, 6):  # each rescue starts the count again
            event = asyncio.Event()
            timers.rescues[timers.ticks + tick] = event.set
            await asyncio.wait_for(event.wait(), None)
            assert timers.ticks == number * tick

    timers = Timers(loop)
    loop.run_until_complete(main())


def test_timer_of_the_program_may_wake_a_task(loop: SimulatedLoop) -> None:
    timers = Timers(loop)
    loop.run_until_complete(asyncio.sleep(60))
    assert timers.ticks > 2000


def test_long_timer_of_aiocuda_may_wake_a_task(loop: SimulatedLoop) -> None:
    event = asyncio.Event()
    give_up = _of_aiocuda(lambda: event.set())
    loop.call_later(5, give_up)
    Timers(loop)
    loop.run_until_complete(event.wait())
    assert 5 <= loop.time() < 5.001


def test_task_that_the_watchdog_wakes_runs_before_the_check(loop: SimulatedLoop) -> None:
    event = asyncio.Event()
    timers = Timers(loop)
    timers.rescues = dict.fromkeys(range(9, 12), event.set)  # the tick at which the wake-up would count as lost
    loop.run_until_complete(event.wait())
    assert timers.ticks == 9
