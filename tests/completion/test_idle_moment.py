"""Functions that wait for an idle moment: no operation of the process is unfinished on any device of the driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aiocuda
from aiocuda import ClosedError, Device, DeviceFault, DrainTimeoutWarning
from aiocuda.completion._idle_moment import is_idle
from aiocuda.completion._reactor import Reactor
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import SimulatedLoop
from tests.helpers import PATIENCE, SPIN, TRAP, Latch, Peer, in_thread, jobs_done, open_peer, quickly, turns, until


def reactor_of(device: Device) -> Reactor:
    return resources_of(device).loop_states.here().reactor


class Call:
    """A function that notes its thread, and whether the moment was idle; its ``finish`` notes what it gets."""

    def __init__(self, device: Device, error: BaseException | None = None) -> None:
        self.threads: list[int] = []
        self.idle: list[bool] = []
        self.ends: list[tuple[Any, ...]] = []  # the arguments of ``finish``
        self._device = device
        self._error = error

    def __call__(self) -> str:
        self.idle.append(is_idle(self._device.driver))
        self.threads.append(threading.get_ident())
        if self._error is not None:
            raise self._error
        return "done"

    def start(self, seconds: float = PATIENCE) -> Any:
        return reactor_of(self._device).idle_moments.start(self, lambda *end: self.ends.append(end), seconds)

    async def ended(self) -> None:
        await until(lambda: self.ends, "the end")


@pytest.mark.asyncio
async def test_at_an_idle_moment_it_is_called_at_once_on_a_worker_thread() -> None:
    async with aiocuda.open_device(driver="host") as device:
        call = Call(device)
        call.start()
        assert not call.threads
        await call.ended()
        assert call.ends == [("done", None, True)]
        assert call.threads != [threading.get_ident()]
        assert await reactor_of(device).idle_moments.run(call, PATIENCE) == ("done", True)


@pytest.mark.asyncio
async def test_it_waits_for_the_end_of_running_work_that_nobody_awaits() -> None:
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            call = Call(device)
            call.start()
            running = asyncio.create_task(reactor_of(device).idle_moments.run(lambda: latch.running, PATIENCE))
            await turns()
            assert not call.threads
            latch.release()
            assert await quickly(running) == (0, True)
            await call.ended()
            assert call.ends == [("done", None, True)]
            assert call.idle == [True]


@pytest.mark.asyncio
async def test_after_its_time_it_is_called_although_work_runs() -> None:
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            assert await quickly(reactor_of(device).idle_moments.run(lambda: latch.running, 0.01)) == (1, False)
            call = Call(device)
            job = call.start()
            await turns()
            assert not call.threads
            job.hurry()
            await call.ended()
            assert call.ends == [("done", None, False)]


def in_virtual_time(main: Callable[[SimulatedDriver], Any]) -> Any:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main(SimulatedDriver(None)))


def test_the_end_of_work_that_nobody_awaits_is_seen_within_milliseconds() -> None:
    """The watchdog alone would see it after up to 25 ms."""

    async def main(driver: SimulatedDriver) -> None:
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            await device.load(SPIN)
            for milliseconds in (3, 7, 60):
                stream.launch(SPIN, 1, 1, milliseconds * 1_000_000)
                began = driver.now()
                at, was_idle = await reactor_of(device).idle_moments.run(driver.now, PATIENCE)
                assert milliseconds <= (at - began) * 1e3 < milliseconds + 3
                assert was_idle

    in_virtual_time(main)


def test_its_time_is_that_of_the_loop() -> None:
    async def main(driver: SimulatedDriver) -> None:
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            await device.load(SPIN)
            stream.launch(SPIN, 1, 1, 60_000_000)
            began = driver.now()
            at, was_idle = await reactor_of(device).idle_moments.run(driver.now, 0.03)
            assert 0.03 <= at - began < 0.032
            assert not was_idle

    in_virtual_time(main)


@pytest.mark.asyncio
async def test_work_on_another_device_of_the_driver_counts() -> None:
    with Peer(HostDriver(devices=2)) as peer:
        async with (
            aiocuda.open_device(driver=peer.driver) as device,
            aiocuda.open_device(1, driver=peer.driver) as other,
        ):
            stream = other.stream()
            with Latch(other) as latch:
                latch.hold(stream)
                await latch.held()
                call = Call(device)
                call.start()
                await turns()
                assert not call.threads
                latch.release()
                await call.ended()
                assert call.ends == [("done", None, True)]


@pytest.mark.asyncio
async def test_work_of_another_loop_counts_while_that_runs_and_after_it_was_closed() -> None:
    """The stream of a closed loop is queried, since nothing resolves its operations any more."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            holding, closing, latches = threading.Event(), threading.Event(), []

            async def hold() -> None:
                stream = device.stream()
                latches.append(Latch(device))
                latches[0].hold(stream)
                await latches[0].held()
                holding.set()
                await until(closing.is_set)

            thread = asyncio.create_task(asyncio.to_thread(in_thread, hold))
            await until(holding.is_set)
            call = Call(device)
            call.start()
            await turns()
            assert not call.threads
            closing.set()
            with pytest.warns(ResourceWarning, match="unclosed <Stream"):
                await quickly(thread)
            await turns()
            assert not call.threads
            resources_of(device).loop_states.reclaim()  # the stream is an orphan from now on
            await turns()
            assert not call.threads
            latches[0].release()
            await call.ended()
            assert call.ends == [("done", None, True)]
            assert call.idle == [True]


@pytest.mark.asyncio
async def test_an_operation_that_waits_on_the_host_does_not_count() -> None:
    """A launch waits there for its kernel, which is loaded at an idle moment."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        await jobs_done(device)
        with peer.holding_jobs():
            launch = stream.launch(SPIN, 1, 1, 0)
            assert launch.state == "queued"
            assert is_idle(device.driver)
        await launch


@pytest.mark.asyncio
async def test_work_that_begins_before_the_thread_does_is_waited_for() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()  # its kernel is loaded, and its memory is locked
            latch.release()
            await stream.synchronize()
            await jobs_done(device)
            call = Call(device)
            with peer.holding_jobs():
                call.start()
                await until(lambda: len(reactor_of(device).jobs), "the job")
                latch.hold(stream)
                await latch.held()
            await jobs_done(device)
            assert not call.threads
            latch.release()
            await call.ended()
            assert call.ends == [("done", None, True)]
            assert call.idle == [True]


@pytest.mark.asyncio
async def test_cancelling_the_wait_does_not_stop_it() -> None:
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            call = Call(device)
            waiting = asyncio.create_task(reactor_of(device).idle_moments.run(call, PATIENCE))
            await turns()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await quickly(waiting)
            assert not call.threads
            latch.release()
            await until(lambda: not reactor_of(device).idle_moments.is_busy, "the end")
            assert call.idle == [True]


@pytest.mark.asyncio
async def test_its_failure_is_the_waiters() -> None:
    async with aiocuda.open_device(driver="host") as device:
        with pytest.raises(ValueError, match="why"):
            await reactor_of(device).idle_moments.run(Call(device, ValueError("why")), PATIENCE)
        assert not reactor_of(device).idle_moments.is_busy


@pytest.mark.parametrize("interrupted", ["a look", "the function"])
def test_ctrl_c_leaves_the_loop_and_the_rest_goes_on(interrupted: str) -> None:
    with Peer() as peer, asyncio.Runner() as runner:

        async def main() -> tuple[Device, Call]:
            device = await aiocuda.open_device(driver=peer.driver)
            await jobs_done(device)
            if interrupted == "a look":
                peer.refuse("offload", error=KeyboardInterrupt)
            else:
                Call(device, KeyboardInterrupt()).start()
            call = Call(device)
            call.start()
            state.extend((device, call))
            await asyncio.Event().wait()
            raise AssertionError

        state: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            runner.run(main())
        device, call = state

        async def rest() -> None:
            await call.ended()
            assert call.ends == [("done", None, True)]
            await quickly(device.aclose())

        runner.run(rest())


@pytest.mark.asyncio
async def test_second_thread_that_gets_it_neither_calls_nor_ends_it() -> None:
    """Ctrl-C in a look, after a thread has got the function, gives it to another thread, too."""
    async with aiocuda.open_device(driver="host") as device:
        begun, go_on, ends = threading.Event(), threading.Event(), list[Any]()

        def work() -> str:
            begun.set()
            return "done" if go_on.wait(PATIENCE) else "late"

        reactor = reactor_of(device)
        job = reactor.idle_moments.start(work, lambda *end: ends.append(end), PATIENCE)
        await until(begun.is_set)
        reactor.idle_moments._give(job)
        await until(lambda: len(reactor.jobs) == 1, "the end of the second thread's turn")
        assert not ends
        go_on.set()
        await until(lambda: ends)
        assert ends == [("done", None, True)]


@pytest.mark.asyncio
async def test_after_a_fault_it_is_called_at_once() -> None:
    """The driver raises the fault in the call, or does nothing."""
    async with aiocuda.open_device(driver="host") as device:
        stream, held = device.stream(), device.stream()
        with Latch(device) as latch:
            hold = latch.hold(held)
            await latch.held()
            call = Call(device)
            call.start()
            await turns()
            assert not call.threads
            for operation in (stream.launch(TRAP, 1, 1), hold):
                with pytest.raises(DeviceFault):
                    await operation
            await call.ended()
            assert call.ends == [("done", None, True)]


@pytest.mark.asyncio
async def test_the_close_of_its_device_waits_for_it_at_most_for_its_time() -> None:
    with Peer(HostDriver(devices=2)) as peer:
        async with aiocuda.open_device(1, driver=peer.driver) as other:
            stream = other.stream()
            with Latch(other) as latch:
                latch.hold(stream)
                await latch.held()
                device = await aiocuda.open_device(driver=peer.driver)
                call, reactor = Call(device), reactor_of(device)
                job = call.start()
                closing = asyncio.create_task(device.aclose())
                await turns()
                assert not closing.done()
                assert not call.threads
                job.hurry()  # as at the end of its time
                await call.ended()
                assert call.ends == [("done", None, False)]
                latch.release()  # the close unlocks memory, which waits for it
                await quickly(closing)
                with pytest.raises(ClosedError):
                    await reactor.idle_moments.run(call, PATIENCE)
                assert len(call.threads) == 1


@pytest.mark.asyncio
async def test_it_is_dropped_with_a_device_that_is_left_at_work() -> None:
    with Peer() as peer:
        with pytest.raises(ZeroDivisionError), pytest.warns(DrainTimeoutWarning):
            async with aiocuda.open_device(driver=peer.driver) as device:
                device.drain_timeout = 0.02
                stream, latch = device.stream(), Latch(device)
                latch.hold(stream)
                await latch.held()
                call = Call(device)
                call.start()
                waiting = asyncio.create_task(reactor_of(device).idle_moments.run(call, PATIENCE))
                await turns()
                raise ZeroDivisionError
        with pytest.raises(ClosedError):
            await quickly(waiting)
        ((result, error, was_idle),) = call.ends
        assert (result, was_idle) == (None, False)
        assert isinstance(error, ClosedError)
        latch.release()
        await until(lambda: is_idle(peer.driver), "the end of the work that was left")
        assert not call.threads


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
def test_it_is_dropped_with_its_loop() -> None:
    with Peer() as peer:

        async def leave() -> tuple[Device, Latch, Call]:
            device = await aiocuda.open_device(driver=peer.driver)
            stream, latch = device.stream(), Latch(device)
            latch.hold(stream)
            await latch.held()
            call = Call(device)
            call.start()
            return device, latch, call

        with asyncio.Runner() as runner:
            device, latch, call = runner.run(leave())

        async def close() -> None:
            latch.release()
            await quickly(device.aclose())

        asyncio.run(close())
        assert not call.threads
        assert not call.ends
