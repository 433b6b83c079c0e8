"""Errors in hooks, sweeps and finished jobs belong to no operation. They are reported, and all else continues."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aiocuda
from aiocuda import Device, DeviceFault, DriverError
from aiocuda.completion._device_state import CAPTURERS
from aiocuda.completion._idle_moment import is_idle
from aiocuda.device._resources import resources_of
from aiocuda.memory import Adaptor
from tests.helpers import PATIENCE, Latch, Peer, Reports, block_until, in_thread, open_peer, quickly, refusal, until

pytestmark = pytest.mark.asyncio


class Hooks:
    """A listener with one hook that raises."""

    def __init__(self, failing_hook: str, timing: bool) -> None:
        self.failing_hook = failing_hook
        self.timing = timing
        self.calls: list[str] = []

    def _called(self, hook: str) -> None:
        self.calls.append(hook)
        if hook == self.failing_hook:
            raise ZeroDivisionError

    def on_submit(self, operation: Any) -> None:
        self._called("on_submit")

    def on_resolve(self, operation: Any, start: int, end: int) -> None:
        self._called("on_resolve")


@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("failing_hook", ["on_submit", "on_resolve"])
async def test_listener_that_raises_is_removed(failing_hook: str, timing: bool) -> None:
    """Its error does not affect the operations: each resolves once, with its result."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        hooks = Hooks(failing_hook, timing)
        with Reports() as reports, device.listen(hooks):
            with Latch(device) as latch:
                latch.hold(stream)
                operations = [stream.fill(buffer, value) for value in range(5)]
                await latch.held()
                latch.release()
                for operation in operations:
                    assert await quickly(operation) is None
                    assert await quickly(operation) is None
            assert hooks.calls.count(failing_hook) == 1
            assert [type(failure) for failure in reports.failures] == [ZeroDivisionError]
            assert "the listener was removed" in reports.contexts[0]["message"]
        assert device.statistics().in_flight == 0
        assert device.statistics().failed == 0
    assert peer.inner.statistics()["events"] == 0


@pytest.mark.parametrize("failing_hook", ["on_submit", "on_resolve"])
async def test_other_listeners_hear_of_the_operation_of_a_hook_that_raised(failing_hook: str) -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        before, failing, after = Hooks("", False), Hooks(failing_hook, False), Hooks("", False)
        with Reports() as reports, device.listen(before), device.listen(failing), device.listen(after):
            await quickly(stream.synchronize())
            await quickly(stream.synchronize())
        assert len(reports.failures) == 1
        assert failing.calls.count(failing_hook) == 1
        assert before.calls == after.calls == ["on_submit", "on_resolve"] * 2


async def test_listener_that_raises_does_not_remove_another_one() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        first, second = Hooks("on_resolve", False), Hooks("", False)
        with Reports():
            with device.listen(first):
                operation = stream.synchronize()
            with device.listen(second):
                await quickly(operation)
                await quickly(stream.synchronize())
        assert second.calls.count("on_submit") == 1
        assert first.calls == ["on_submit"]


async def test_watchdog_continues_after_a_sweep_that_fails() -> None:
    async with open_peer() as (peer, device):
        device.memory.use(Adaptor)  # without the free lists
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


async def test_watchdog_continues_after_an_interrupt() -> None:
    """Ctrl-C comes during a tick, and the loop continues, as in Jupyter."""
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
async def test_error_at_the_end_of_a_job_does_not_affect_other_jobs(error: type[BaseException]) -> None:
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


# Captures of other libraries


async def wait_and_tick(device: Device, condition: Callable[[], object]) -> None:
    """Wait until ``condition`` is true and the watchdog has ticked once more."""
    await until(condition)
    wakes = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > wakes, "the watchdog")


async def test_no_query_while_the_capture_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """P26: a query that could end a capture is not made. It is repeated later."""
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
                await wait_and_tick(device, lambda: not refused)
                latch.release()
                await asyncio.wait_for(task, PATIENCE)
            assert all(isinstance(failure, DriverError) for failure in reports.failures)
            assert len(reports.failures) == 1
        assert not unguarded
        assert depth == 0


def fault() -> DeviceFault:
    return DeviceFault("the device has faulted", code=719, device=0, operation=None)


@pytest.mark.parametrize("error", [refusal, fault])
async def test_end_of_the_capture_guard_that_is_refused_fails_no_operation(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]
) -> None:
    monkeypatch.setitem(sys.modules, CAPTURERS[0], object())
    async with open_peer(Peer(polls_freely=True)) as (peer, device):
        refused: list[int] = []

        def end() -> None:
            refused.append(1)
            raise error()

        stream = device.stream()
        with Reports() as reports, Latch(device) as latch:
            peer.before["end_queries"] = end
            await stream.synchronize()  # queried by the await
            by_await = len(refused)
            hold = latch.hold(stream)
            task = asyncio.create_task(hold.wait())
            await latch.held()
            await wait_and_tick(device, lambda: len(refused) > by_await)  # by the reactor
            latch.release()
            await asyncio.wait_for(task, PATIENCE)
            del peer.before["end_queries"]
            assert by_await > 0
            assert len(reports.failures) == (error is refusal)


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
async def test_streams_of_a_closed_loop_are_queried_in_the_capture_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CAPTURERS[0], object())
    async with open_peer() as (peer, device):
        latches: list[Latch] = []

        async def leave() -> None:
            stream = device.stream()
            latches.append(Latch(device))
            latches[0].hold(stream)
            await latches[0].held()

        await asyncio.to_thread(in_thread, leave)
        calls: list[str] = []
        for name in ("begin_queries", "event_query", "end_queries"):
            peer.before[name] = lambda *arguments, name=name: calls.append(name)
        assert not resources_of(device).loop_states.reclaim()
        assert not is_idle(device.driver)
        assert calls == ["begin_queries", "event_query", "end_queries"] * 2
        latches[0].release()
        await until(resources_of(device).loop_states.reclaim)
        assert is_idle(device.driver)


# The same order in every process


async def test_queues_are_kept_in_the_order_in_which_they_were_opened() -> None:
    """The order of addresses differs between processes, and a seed must always give the same simulation."""
    async with open_peer() as (_, device):
        streams = [device.stream() for _ in range(30)]  # beyond 32 queues, the watchdog rotates them
        queues = [stream._queue for stream in streams]
        loop_state = resources_of(device).loop_states.here()
        first = device.stream()
        with Latch(device) as latch:
            hold = latch.hold(first)
            await latch.held()
            tasks = [asyncio.create_task(stream.wait(hold).wait()) for stream in streams]
            await until(lambda: len(loop_state.reactor.hot.attended) >= 30, "the waits")
            for ordered in (
                loop_state.queues,
                loop_state.reactor.queues,
                loop_state.reactor.hot.attended,
                loop_state.reactor.opened,
            ):
                assert [queue for queue in ordered if queue in queues] == queues
            latch.release()
            await quickly(asyncio.gather(*tasks))


async def test_queues_that_wait_for_another_one_are_kept_in_order() -> None:
    async with open_peer(max_in_flight=1) as (_, device):
        streams = [device.stream() for _ in range(50)]
        first = device.stream()
        with Latch(device) as latch:
            latch.hold(first)
            await latch.held()
            queued = first.synchronize()
            waits = [stream.wait(queued) for stream in streams]
            assert list(first._queue.rare.host_queue.followers) == [stream._queue for stream in streams]
            latch.release()
            await quickly(aiocuda.gather(*waits))
