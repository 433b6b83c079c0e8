"""Running `SimulatedLoop`: time, the end of a run, `on_step`, and runners of other packages."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest

from aiocuda._base._clock import running_clock
from aiocuda.testing._loop import TURN_NS, SimulatedLoop

pytest_plugins = ["pytester"]


# -- time ----------------------------------------------------------------------------------------------------------


def test_hours_pass_in_no_time(runner: asyncio.Runner) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(24):
            await asyncio.sleep(3600)
        return loop.time() - began

    assert runner.run(main()) == pytest.approx(24 * 3600, abs=0.001)


def test_turns_let_the_time_go_on(loop: SimulatedLoop) -> None:
    async def main() -> int:
        while loop.time() < 0.001:
            await asyncio.sleep(0)
        return loop.clock.now_ns

    assert loop.run_until_complete(main()) == math.ceil(1_000_000 / TURN_NS) * TURN_NS


def test_agenda_comes_before_a_timer_of_the_same_moment(loop: SimulatedLoop) -> None:
    happened: list[object] = []
    loop.call_later(0.001, happened.append, "timer")
    loop.clock.at(1_000_000, None, lambda: happened.append(running_clock()))
    loop.call_later(0.002, loop.stop)
    loop.run_forever()
    assert happened == [loop.clock, "timer"]
    assert running_clock() is None


def test_what_the_agenda_makes_ready_runs_at_that_time(loop: SimulatedLoop) -> None:
    async def main() -> int:
        await event.wait()
        return loop.clock.now_ns

    event = asyncio.Event()
    loop.clock.at(5_000_000, None, lambda: None)
    loop.clock.at(10_000_000, None, lambda: loop.call_soon_threadsafe(event.set))
    loop.call_later(3600, print)
    assert loop.run_until_complete(main()) == 10_000_000 + TURN_NS


def test_timers_fire_to_the_nanosecond_and_never_early(loop: SimulatedLoop) -> None:
    fired: list[tuple[int, float]] = []
    moments = [0.1 + 0.2, 0.3e-9, 2e-9, 1 / 3, 2.0, 12345.6789]
    for when in moments:
        loop.call_at(when, lambda when=when: fired.append((loop.clock.now_ns, when)))  # type: ignore[misc]
    loop.call_at(20000.0, loop.stop)
    loop.run_forever()
    assert [when for _, when in fired] == sorted(moments)
    assert all(ns / 1e9 >= when for ns, when in fired)
    assert [ns for ns, _ in fired[-4:]] == [300_000_001, 333_333_334, 2_000_000_000, 12_345_678_900_000]


@pytest.mark.parametrize("delay", [math.inf, sys.float_info.max])
def test_timer_that_never_comes_does_not_fire(loop: SimulatedLoop, delay: float) -> None:
    fired: list[str] = []
    never = loop.call_later(delay, fired.append, "never")
    loop.call_later(-math.inf, fired.append, "at once")
    loop.call_later(1e6, loop.stop)
    loop.run_forever()
    assert fired == ["at once"]
    assert never.when() == math.inf


def test_cancelled_timers_are_swept_out(loop: SimulatedLoop) -> None:
    loop.call_later(1.0, loop.stop)
    for _ in range(10_000):
        loop.call_later(3600, print, "never").cancel()
    assert len(loop._timers) <= 128
    loop.run_forever()
    assert loop.time() < 1.001


@pytest.mark.parametrize("delay", [None, math.nan, "soon"])
def test_delay_that_is_none_is_refused(loop: SimulatedLoop, delay: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        loop.call_later(delay, print)
    with pytest.raises((TypeError, ValueError)):
        loop.call_at(delay, print)


# -- running and stopping ------------------------------------------------------------------------------------------


def test_stopping_too_early_raises(loop: SimulatedLoop) -> None:
    loop.call_soon(loop.stop)
    future = loop.create_future()
    with pytest.raises(RuntimeError, match=r"^Event loop stopped before Future completed\.$"):
        loop.run_until_complete(future)


def test_stop_before_running_runs_one_turn(loop: SimulatedLoop) -> None:
    ran: list[int] = []
    loop.call_soon(lambda: loop.call_soon(ran.append, 2))
    loop.call_soon(ran.append, 1)
    loop.stop()
    loop.run_forever()
    assert ran == [1]


def test_one_loop_runs_at_a_time(loop: SimulatedLoop) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="This event loop is already running"):
            loop.run_forever()
        with pytest.raises(RuntimeError, match="Cannot close a running event loop"):
            loop.close()
        other = SimulatedLoop()
        with pytest.raises(RuntimeError, match="Cannot run the event loop while another loop is running"):
            other.run_forever()
        other.close()

    loop.run_until_complete(main())


def test_closed_loop_takes_nothing(loop: SimulatedLoop) -> None:
    loop.close()
    loop.close()
    coroutine = asyncio.sleep(0)
    uses: list[Callable[[], object]] = [
        loop.run_forever,
        lambda: loop.call_soon(print),
        lambda: loop.call_later(0, print),
        lambda: loop.create_task(coroutine),
        lambda: loop.run_in_executor(None, print),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            use()
    coroutine.close()
    assert loop.is_closed()


def test_unclosed_loop_warns() -> None:
    with pytest.warns(ResourceWarning, match="unclosed event loop <SimulatedLoop"):
        SimulatedLoop()
        gc.collect()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exit_leaves_the_loop_immediately(loop: SimulatedLoop, error: type[BaseException]) -> None:
    ran: list[str] = []

    def leave() -> None:
        raise error

    loop.call_soon(leave)
    loop.call_soon(ran.append, "later")
    with pytest.raises(error):
        loop.run_forever()
    assert ran == []
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert ran == ["later"]


def test_exit_of_the_main_task_is_raised_once(loop: SimulatedLoop) -> None:
    async def main() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        loop.run_until_complete(main())
    loop.run_until_complete(asyncio.sleep(0))


def test_ctrl_c_cancels_the_main_task(runner: asyncio.Runner) -> None:
    ends: list[str] = []

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        runner.run(main())
    assert ends == ["cancelled"]


# -- a look after each step ----------------------------------------------------------------------------------------


def test_each_step_can_be_looked_at(loop: SimulatedLoop) -> None:
    seen: list[int] = []
    loop.on_step = lambda: seen.append(loop.steps)
    loop.call_soon(print).cancel()
    loop.run_until_complete(asyncio.sleep(0))
    assert seen == list(range(1, loop.steps + 1))
    assert loop.steps == 3  # two of the task, one that stops the loop


def test_look_that_fails_ends_the_run_and_not_its_winding_up() -> None:
    simulated = SimulatedLoop()
    ends: list[str] = []

    def look() -> None:
        assert simulated.steps < 5, "V1"

    async def main() -> None:
        try:
            await asyncio.gather(*(asyncio.sleep(hours * 3600) for hours in range(1, 9)))
        finally:
            ends.append("wound up")

    with pytest.raises(AssertionError, match="V1"), asyncio.Runner(loop_factory=lambda: simulated) as runner:
        simulated.on_step = look
        runner.run(main())
    assert ends == ["wound up"]
    assert simulated.on_step is None


# -- other people's runners ----------------------------------------------------------------------------------------

_TESTS = """
import asyncio, pytest
from aiocuda.testing._loop import TURN_NS, SimulatedLoop

@pytest.fixture
def anyio_backend():
    return "asyncio", {"loop_factory": SimulatedLoop}

async def program():
    assert isinstance(asyncio.get_running_loop(), SimulatedLoop)
    await asyncio.wait_for(asyncio.sleep(3600), 7200)

@pytest.mark.asyncio(loop_factories=["simulated"])
async def test_pytest_asyncio():
    await program()

@pytest.mark.anyio
async def test_anyio(anyio_backend):
    import anyio
    with anyio.move_on_after(1800):
        await anyio.sleep_forever()
    async with anyio.create_task_group() as group:
        group.start_soon(program)
"""
_OPTIONS = ["-o", "asyncio_default_fixture_loop_scope=function"]
_CONFTEST = """
import asyncio
from aiocuda.testing._loop import TURN_NS, SimulatedLoop

def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "simulated": SimulatedLoop}
"""


def test_test_runners_take_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_CONFTEST)
    pytester.makepyfile(_TESTS)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", *_OPTIONS).assert_outcomes(passed=2)


def test_awaitables_of_any_kind_are_run(loop: SimulatedLoop) -> None:
    class Three:
        def __await__(self) -> Generator[Any, None, int]:
            yield from asyncio.sleep(0).__await__()
            return 3

    assert loop.run_until_complete(Three()) == 3
