"""The parts of a cluster that need no process."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiocuda._base._wakeups import MOST_WOKEN
from aiocuda.cluster._replica import Changes, Restarts
from aiocuda.cluster._server import SeenIds
from aiocuda.cluster._statistics import MethodTimes
from tests.helpers import PATIENCE


class TestRestarts:
    def test_the_delay_doubles_up_to_5_seconds(self) -> None:
        restarts = Restarts(9)
        delays = [restarts.delay(0.0) for _ in range(9)]
        assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])

    def test_no_restart_after_the_limit(self) -> None:
        restarts = Restarts(2)
        assert restarts.delay(0.0) is not None
        assert restarts.delay(1.0) is not None
        assert restarts.delay(2.0) is None
        assert restarts.delay(59.0) is None

    def test_without_restarts_there_is_none(self) -> None:
        assert Restarts(0).delay(0.0) is None

    def test_a_restart_is_forgotten_60_seconds_after_it(self) -> None:
        restarts = Restarts(1)
        assert restarts.delay(10.0) == pytest.approx(0.1)
        assert restarts.delay(70.0) is None  # the restart was at 10.1
        assert restarts.delay(70.2) == pytest.approx(0.1)

    def test_a_limit_of_thousands_does_not_overflow(self) -> None:
        restarts = Restarts(5000)
        assert [restarts.delay(0.0) for _ in range(5000)][-1] == 5.0


class TestSeenIds:
    def test_each_integer_is_new_once(self) -> None:
        seen = SeenIds()
        order = [number for number in range(100) for _ in range(2)]
        random.Random(1).shuffle(order)
        assert sum(seen.add(number) for number in order) == 100
        assert not any(seen.add(number) for number in range(100))

    def test_a_gap_is_new(self) -> None:
        seen = SeenIds()
        assert seen.add(0)
        assert seen.add(2)
        assert seen.add(1)
        assert not seen.add(1)
        assert seen.add(3)

    def test_integers_in_order_need_no_memory(self) -> None:
        seen = SeenIds()
        for number in reversed(range(1000)):
            seen.add(number)
        assert not seen._after
        assert seen._below == 1000


class TestMethodTimes:
    def test_a_second_is_predicted_before_the_first_measurement(self) -> None:
        assert MethodTimes().predicted(1, "run") == 1.0

    def test_the_first_measurement_is_the_prediction(self) -> None:
        times = MethodTimes()
        times.note(1, "run", 0.25)
        assert times.predicted(1, "run") == 0.25

    def test_later_measurements_have_an_eighth_of_the_weight(self) -> None:
        times = MethodTimes()
        times.note(1, "run", 1.0)
        times.note(1, "run", 2.0)
        assert times.predicted(1, "run") == pytest.approx(1.125)

    def test_an_unknown_method_has_the_mean_of_the_others(self) -> None:
        times = MethodTimes()
        times.note(1, "fast", 0.0)
        times.note(2, "slow", 4.0)
        assert times.predicted(1, "slow") == pytest.approx(2.0)

    def test_a_forgotten_object_has_no_measurements(self) -> None:
        times = MethodTimes()
        times.note(1, "run", 3.0)
        times.note(2, "run", 5.0)
        times.forget(1)
        assert times.predicted(1, "run") == 5.0
        assert times.predicted(2, "run") == 5.0


@pytest.mark.asyncio
class TestChanges:
    async def test_a_change_wakes_all_tasks_that_wait(self) -> None:
        changes = Changes(asyncio.get_running_loop())
        waiting = [asyncio.create_task(changes.wait()) for _ in range(2 * MOST_WOKEN)]
        await asyncio.sleep(0)
        assert len(changes) == len(waiting)
        changes.notify()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*waiting)
        assert not len(changes)

    async def test_one_iteration_wakes_a_limited_number(self) -> None:
        changes = Changes(asyncio.get_running_loop())
        waiting = [asyncio.create_task(changes.wait()) for _ in range(2 * MOST_WOKEN)]
        await asyncio.sleep(0)
        changes.notify()
        await asyncio.sleep(0)
        assert 0 < sum(task.done() for task in waiting) <= MOST_WOKEN
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*waiting)

    async def test_a_task_that_waits_after_the_change_is_not_woken(self) -> None:
        changes = Changes(asyncio.get_running_loop())
        changes.notify()
        waiting = asyncio.create_task(changes.wait())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        changes.notify()
        async with asyncio.timeout(PATIENCE):
            await waiting

    async def test_a_cancelled_task_waits_no_longer(self) -> None:
        changes = Changes(asyncio.get_running_loop())
        waiting = asyncio.create_task(changes.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not len(changes)
