"""What fails and is nobody's operation: hooks, sweeps, hand-overs. The loop is told, and all else goes on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aiocuda
from aiocuda import Device, DriverError
from aiocuda._device_resources import resources_of
from aiocuda.completion._device_state import CAPTURERS
from aiocuda.testing import Latch
from tests.helpers import PATIENCE, Peer, Reports, block_until, open_peer, quickly, refusal, until

pytestmark = pytest.mark.asyncio


class Hooks:
    """An instrument that raises where it is told to."""

    def __init__(self, fails: str, timing: bool) -> None:
        self.fails = fails
        self.timing = timing
        self.heard: list[str] = []

    def _hear(self, hook: str) -> None:
        self.heard.append(hook)
        if hook == self.fails:
            raise ZeroDivisionError

    def on_submit(self, operation: Any) -> None:
        self._hear("on_submit")

    def on_resolve(self, operation: Any, start: int, end: int) -> None:
        self._hear("on_resolve")


@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("fails", ["on_submit", "on_resolve"])
async def test_instrument_that_raises_hears_no_more(fails: str, timing: bool) -> None:
    """Nobody's operation is to blame: those that it was told of resolve once, and with their results."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        hooks = Hooks(fails, timing)
        with Reports() as reports, device.listen(hooks):
            with Latch(device) as latch:
                latch.hold(stream)
                operations = [stream.fill(buffer, value) for value in range(5)]
                await latch.held()
                latch.release()
                for operation in operations:
                    assert await quickly(operation) is None
                    assert await quickly(operation) is None
            assert hooks.heard.count(fails) == 1
            assert [type(failure) for failure in reports.failures] == [ZeroDivisionError]
            assert "listens no more" in reports.contexts[0]["message"]
        assert device.statistics().in_flight == 0
        assert device.statistics().failed == 0
    assert peer.inner.statistics()["events"] == 0


async def test_another_instrument_is_not_detached_for_it() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        first, second = Hooks("on_resolve", False), Hooks("", False)
        with Reports():
            with device.listen(first):
                operation = stream.synchronize()
            with device.listen(second):
                await quickly(operation)
                await quickly(stream.synchronize())
        assert second.heard.count("on_submit") == 1
        assert first.heard == ["on_submit"]


async def test_watchdog_survives_a_sweep_that_fails() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        buffers = [stream.empty(16) for _ in range(3)]
        await stream.synchronize()
        with Latch(device) as latch, Reports() as reports:
            latch.hold(other)
            await latch.held()
            peer.refuse("deallocate")
            buffers.clear()
            await until(lambda: reports.contexts, "the report")
            wakes = device.statistics().watchdog_wakes
            await until(lambda: device.statistics().watchdog_wakes > wakes + 2, "the watchdog")
            await until(lambda: peer.calls["deallocate"] >= 3, "the other buffers")
            assert [type(failure) for failure in reports.failures] == [DriverError]
            latch.release()


async def test_watchdog_survives_an_interrupt() -> None:
    """Ctrl-C in the middle of a look, under a loop that goes on (Jupyter)."""
    async with open_peer() as (_, device):
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            reactor = resources_of(device).loop_states.here().reactor
            sweeps = reactor.sweeps

            def interrupted() -> None:
                reactor.sweeps = sweeps
                raise KeyboardInterrupt

            reactor.sweeps = (interrupted,)
            assert reactor._watchdog is not None
            reactor._watchdog.cancel()
            with pytest.raises(KeyboardInterrupt):
                reactor._watch()
            wakes = device.statistics().watchdog_wakes
            await until(lambda: device.statistics().watchdog_wakes > wakes + 1, "the watchdog")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
async def test_one_hand_over_that_fails_loses_no_other(error: type[BaseException]) -> None:
    async with open_peer() as (_, device):
        reactor = resources_of(device).loop_states.here().reactor
        done: list[int] = []

        def fail(result: object, failure: BaseException | None) -> None:
            raise error

        await until(lambda: not reactor.jobs.running and not len(reactor.jobs), "quiet")
        with Reports() as reports:
            reactor.jobs.start(int, fail)
            for index in range(3):
                reactor.jobs.start(int, lambda result, failure, index=index: done.append(index))  # type: ignore[misc]
            block_until(lambda: not reactor.jobs.running, "all jobs")
            block_until(lambda: len(reactor.notifier_pool.port._tags) == 4, "all tags")  # type: ignore[attr-defined]
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    reactor._on_port()
            await until(lambda: len(done) == 3, "the others")
            assert len(reports.contexts) == (error is ZeroDivisionError)


# Somebody else's capture


async def watched(device: Device, condition: Callable[[], object]) -> None:
    """Until it has come true, and the watchdog has looked once more."""
    await until(condition)
    wakes = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > wakes, "the watchdog")


async def test_no_query_where_the_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """P26: what cannot be done without disturbing a capture is not done; it is tried again."""
    monkeypatch.setitem(sys.modules, CAPTURERS[0], object())
    depth = 0
    unguarded: list[int] = []

    async with open_peer(Peer(polls_freely=True)) as (peer, device):

        def begin() -> None:
            nonlocal depth
            if refused:
                refused.pop()
                raise refusal()
            depth += 1

        def end() -> None:
            nonlocal depth
            depth -= 1

        refused: list[int] = []
        peer.before["begin_queries"] = begin
        peer.before["end_queries"] = end
        peer.before["event_query"] = lambda event: None if depth else unguarded.append(event)
        stream = device.stream()
        with Reports() as reports, Latch(device) as latch:
            for times in (1, 2, 3, 8):
                hold = latch.hold(stream)
                task = asyncio.create_task(hold.wait())
                await latch.held()
                refused.extend([0] * times)
                await watched(device, lambda: not refused)
                latch.release()
                await asyncio.wait_for(task, PATIENCE)
            assert all(isinstance(failure, DriverError) for failure in reports.failures)
            assert len(reports.failures) == 1
        assert not unguarded
        assert depth == 0


# The same order in every process


async def test_lanes_are_looked_at_in_the_order_in_which_they_came() -> None:
    """And not in that of their addresses, which is another one in each process: a seed gives one simulation."""
    async with open_peer() as (_, device):
        streams = [device.stream() for _ in range(50)]
        queues = [stream._queue for stream in streams]
        loop_state = resources_of(device).loop_states.here()
        first = device.stream()
        with Latch(device) as latch:
            hold = latch.hold(first)
            await latch.held()
            tasks = [asyncio.create_task(stream.wait(hold).wait()) for stream in streams]
            await until(lambda: len(loop_state.reactor.attended) >= 50, "the waits")
            for ordered in (
                loop_state.queues,
                loop_state.reactor.queues,
                loop_state.reactor.attended,
                loop_state.reactor.opened,
            ):
                assert [queue for queue in ordered if queue in queues] == queues
            latch.release()
            await quickly(asyncio.gather(*tasks))


async def test_lanes_that_follow_another_come_in_order() -> None:
    async with open_peer(max_in_flight=1) as (_, device):
        streams = [device.stream() for _ in range(50)]
        first = device.stream()
        with Latch(device) as latch:
            latch.hold(first)
            await latch.held()
            queued = first.synchronize()
            waits = [stream.wait(queued) for stream in streams]
            assert list(first._queue.host_queue.followers) == [stream._queue for stream in streams]
            latch.release()
            await quickly(aiocuda.gather(*waits))
