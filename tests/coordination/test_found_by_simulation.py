"""What random programs on the simulated driver found in coordination, each as the few steps that it takes.

Without seeds: what a seed does changes with the programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, BusyError, ClosedError, Device, DeviceFault, SkippedError, StaleHandleError
from aiocuda.coordination import Node
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing import SimulatedLoop
from tests.helpers import AFFINE, SPIN, TRAP

#: Nanoseconds of a kernel that is long beside everything else: one second.
LONG = 1_000_000_000


def simulated(main: Callable[[Device], Awaitable[None]], *upsets: Upset) -> int:
    """Run it on a device of a driver that decides nothing by chance; how many steps the loop took."""
    driver, loop, steps = SimulatedDriver(None, upsets=upsets), SimulatedLoop(), 0

    async def opened() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await device.load(SPIN)
            await main(device)

    def step() -> None:
        nonlocal steps
        steps += 1

    loop.on_step = step
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(opened())
    assert driver.violations == []
    return steps


def test_callback_of_an_abandoned_node_runs_immediately() -> None:
    """An abandoned operation is finished; its callbacks were called when the device was, too, and often never."""
    told: list[Node[None]] = []

    async def main(device: Device) -> None:
        with pytest.raises(InterruptedError):
            async with AsyncCoordinator(device) as coordinator:
                nodes = [coordinator.compute(SPIN, 1, 1, LONG) for _ in range(2)]
                for node in nodes:
                    node.add_done_callback(told.append)
                await asyncio.sleep(1e-3)
                nodes[0].abandon()
                await asyncio.sleep(1e-3)
                assert told == nodes[:1]
                raise InterruptedError
        await asyncio.sleep(3)
        assert told == nodes

    simulated(main)


def test_drain_after_an_abandoned_operation_sleeps() -> None:
    """It is finished, and the device is not: the loop turned 300 000 times to wait for a second."""

    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            node = coordinator.compute(SPIN, 1, 1, LONG)
            await asyncio.sleep(1e-3)
            assert node.abandon()
            await coordinator.drain()

    assert simulated(main) < 2_000


def test_edge_that_is_added_to_a_function_of_the_host_is_waited_for() -> None:
    """It waits on the host until the prerequisite is done, not only until it is submitted."""

    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            gate = asyncio.Event()
            before = coordinator.host(gate.wait)
            after = coordinator.host(lambda: work.done(), after=before)
            work = coordinator.compute(SPIN, 1, 1, LONG)
            coordinator.add_dependency(after, work)
            gate.set()
            assert await after is True
            assert (await before) is True

    simulated(main)


def test_running_host_function_accepts_no_more_edges() -> None:
    """The edge was accepted, and withdrawing the node then failed."""

    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            gate = asyncio.Event()
            runs, waits = coordinator.host(gate.wait), coordinator.host(np.ones, 1)
            await asyncio.sleep(0)
            with pytest.raises(ClosedError, match="runs already"):
                coordinator.add_dependency(runs, coordinator.host(gate.wait))
            gate.set()
            await waits

    simulated(main)


@pytest.mark.parametrize("leaves", [False, True])
def test_waiters_of_an_unentered_bracket_wake_at_the_end(leaves: bool) -> None:
    """The coordinator did not count the bracket before it was entered."""

    async def main(device: Device) -> None:
        with pytest.raises(InterruptedError) if leaves else contextlib.nullcontext():
            async with AsyncCoordinator(device) as coordinator:
                bracket = coordinator.operation("kernel")
                waits = asyncio.ensure_future(bracket.wait())
                await asyncio.sleep(1e-3)
                if leaves:
                    raise InterruptedError
        with pytest.raises(ClosedError, match="never ran"):
            await waits

    simulated(main)


def test_block_that_raises_after_a_fault_makes_no_more_driver_calls() -> None:
    """An event was recorded after the enqueued work, on a device that was known to have faulted."""

    async def main(device: Device) -> None:
        driver = device.driver
        assert isinstance(driver, SimulatedDriver)
        coordinator = AsyncCoordinator(device)
        with pytest.raises(InterruptedError):
            async with coordinator.operation("kernel") as bracket:
                assert bracket.stream is not None
                with pytest.raises(DeviceFault):
                    await bracket.stream.launch(TRAP, 1, 1)
                refused = len(driver.refused)
                raise InterruptedError
        assert len(driver.refused) == refused
        assert bracket.state == "failed"

    simulated(main)


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_function_of_the_host_that_is_cancelled_before_it_begins_ends(is_coroutine: bool) -> None:
    """A task that is cancelled before its first step runs no code, so the function that reports its end did not run
    either.
    """

    async def called() -> None:
        raise AssertionError("it was to be cancelled")

    async def main(device: Device) -> None:
        with pytest.raises(InterruptedError):
            async with AsyncCoordinator(device) as coordinator:
                node = coordinator.host(called if is_coroutine else int)
                raise InterruptedError
        with pytest.raises(ClosedError, match="left by CancelledError"):
            await node

    simulated(main)


def test_edge_added_to_a_ready_node_skips_it() -> None:
    """The failure of its prerequisite was checked when the node was admitted, but not when it got its place."""

    async def main(device: Device) -> None:
        async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
            busy, failed, late = (coordinator.compute(SPIN, 1, 1, LONG) for _ in range(3))
            assert failed.abandon()
            coordinator.add_dependency(late, failed)
            with pytest.raises(SkippedError, match="was abandoned"):
                await late
            await busy

    simulated(main)


def test_closed_stream_gets_no_wait() -> None:
    """One of the caller's own: the driver was given a stream that it had destroyed."""

    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            before = coordinator.compute(SPIN, 1, 1, LONG)
            async with device.stream() as stream:
                pass
            node = coordinator.compute(SPIN, 1, 1, LONG, after=before, stream=stream)
            with pytest.raises(ClosedError, match="has been closed"):
                await node

    simulated(main)


def test_barrier_before_a_fault_reads_no_time() -> None:
    """Its streams had passed it; then the driver was asked for a time, on a device that was known to have faulted."""

    async def main(device: Device) -> None:
        driver = device.driver
        assert isinstance(driver, SimulatedDriver)
        async with device.stream() as stream:
            start, end = stream.record(timing=True), stream.record(timing=True)
            await end
            assert start.elapsed_ms(end) >= 0
            with pytest.raises(DeviceFault):
                await stream.launch(TRAP, 1, 1)
            refused = len(driver.refused)
            with pytest.raises(DeviceFault):
                start.elapsed_ms(end)
            assert len(driver.refused) == refused

    simulated(main)


def test_prerequisites_replace_a_node_refused_by_a_poisoned_stream() -> None:
    """The stream had skipped the wait, too: the refused operation finished before its prerequisites."""

    async def main(device: Device) -> None:
        own = device.stream()
        buffer = await own.upload(np.zeros(4, np.uint32))
        began = device.driver.now()
        async with AsyncCoordinator(device) as coordinator:
            coordinator.compute(SPIN, 1, 1, LONG, writes=[buffer])
            failed = own.fill(buffer, 1)  # this failure is not read, so the stream runs nothing more
            refused = coordinator.compute(AFFINE, 1, 4, buffer, 4, 1, 1, stream=own)
            last = coordinator.upload(np.full(4, 7, np.uint32), buffer)  # waits for it, whatever its outcome
            with pytest.raises(SkippedError):
                await refused
            assert device.driver.now() - began > LONG / 1e9
            await last
        assert failed.exception() is not None
        assert (await own.download(buffer) == 7).all()

    simulated(main, Upset("refuse", 1, "fill", 802))


def test_dependents_of_work_withdrawn_later_are_skipped() -> None:
    """Its operation was skipped with the wait before it, and the node counted as one that had failed by itself."""

    async def main(device: Device) -> None:
        own = device.stream()
        target = own.empty(20_000, np.uint32)
        array = np.zeros(20_000, np.uint32)
        async with AsyncCoordinator(device) as coordinator:
            with contextlib.suppress(InterruptedError):
                async with device.stream() as stream:
                    buffer = stream.empty_like(array)
                    first, second = stream.copy(buffer, array), stream.copy(buffer, array)
                    assert (first.state, second.state) == ("staging", "queued")
                    assert second.abandon()  # drops only its result, so its dependents wait
                    behind = coordinator.upload(array, target, after=second)
                    after = coordinator.compute(AFFINE, 1, 4, target, 4, 1, 1)
                    raise InterruptedError
            for node in (behind, after):
                with pytest.raises(SkippedError, match="stream-1 was left by an exception") as told:
                    await node
                assert isinstance(told.value.__cause__, ClosedError)
                assert node.state == "skipped"

    simulated(main)


@pytest.mark.parametrize("reads", [False, True])
def test_failure_of_outside_work_is_delivered_although_a_graph_depends_on_it(reads: bool) -> None:
    """The node skipped because of it counted as its delivery, even if no task read that node."""
    told: list[Any] = []

    async def main(device: Device) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        async with device.stream() as stream:
            buffer = stream.empty(4, np.uint32)
            async with AsyncCoordinator(device) as coordinator:
                failed = stream.fill(buffer, 1)
                node = coordinator.compute(AFFINE, 1, 4, buffer, 4, 1, 1, after=failed)
                del failed
                if reads:
                    with pytest.raises(SkippedError, match="fill on stream-"):
                        await node
            assert node.state == "skipped"

    with contextlib.nullcontext() if reads else pytest.raises(BusyError, match="refused"):
        simulated(main, Upset("refuse", 1, "fill", 802))
    gc.collect()
    assert told == []  # the block has raised it, or a waiter of the node has got it


def test_dependents_of_an_upload_with_a_refused_chunk_are_skipped() -> None:
    """The upload had finished when the coordinator noticed the failure, and counted as successful."""

    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            upload = coordinator.upload(np.ones(20_000, np.uint32))
            download = coordinator.download(upload)
            await asyncio.sleep(1)  # no task waits for either
            with pytest.raises(SkippedError, match="refused"):
                await download
            with pytest.raises(StaleHandleError):
                await upload

    simulated(main, Upset("refuse", 1, "upload", 400))


def test_order_edge_to_a_skipped_node_does_not_skip() -> None:
    """Not even if its substitute is outside work that was withdrawn, with an unread failure."""

    async def main(device: Device) -> None:
        async with device.stream() as own:
            buffer, array = own.empty(20_000, np.uint32), np.full(20_000, 7, np.uint32)
            began = device.driver.now()
            with contextlib.suppress(InterruptedError):
                async with device.stream() as left:
                    left.launch(SPIN, 1, 1, LONG)
                    withdrawn = left.copy(left.empty_like(array), array)
                    raise InterruptedError
            async with AsyncCoordinator(device) as coordinator:
                skipped = coordinator.compute(AFFINE, 1, 4, buffer, 4, 1, 1, after=withdrawn)
                await coordinator.upload(array, buffer)
                assert device.driver.now() - began > LONG / 1e9
                with pytest.raises(SkippedError):
                    await skipped
            assert (await own.download(buffer) == array).all()

    simulated(main)


def test_refused_work_of_a_raising_bracket_fails_no_later_work() -> None:
    """Its stream ran nothing more: what was given to that next failed with what the block had been refused."""

    async def main(device: Device) -> None:
        async with device.stream() as own:
            buffer = own.empty(4, np.uint32)
            with pytest.raises(BusyError, match="802"):  # which was not read
                async with AsyncCoordinator(device) as coordinator:
                    with contextlib.suppress(InterruptedError):
                        async with coordinator.operation("kernel") as bracket:
                            assert bracket.stream is not None
                            bracket.stream.fill(buffer, 1)
                            raise InterruptedError
                    await coordinator.compute(SPIN, 1, 1, 1)

    simulated(main, Upset("refuse", 1, "fill", 802))


def test_next_node_follows_work_that_a_bracket_left_on_the_host() -> None:
    """The block raised. The marker of its end was enqueued before a copy that was still being staged."""

    async def main(device: Device) -> None:
        async with device.stream() as own, AsyncCoordinator(device) as coordinator:
            buffer, array = own.empty(20_000, np.uint32), np.zeros(20_000, np.uint32)
            with contextlib.suppress(InterruptedError):
                async with coordinator.operation("kernel", writes=[buffer]) as bracket:
                    assert bracket.stream is not None
                    assert bracket.stream.copy(buffer, array).state == "staging"
                    raise InterruptedError
            async with coordinator.operation("kernel", writes=[buffer], priority="high") as bracket:
                assert bracket.stream is not None
                bracket.stream.fill(buffer, 7)
            assert (await coordinator.download(buffer) == 7).all()

    simulated(main)


def test_state_of_a_finished_host_function_before_any_await() -> None:
    """The node depended on an abandoned operation. When that had finished, reading the state raised AssertionError."""

    async def main(device: Device) -> None:
        async with AsyncCoordinator(device) as coordinator:
            before = coordinator.compute(SPIN, 1, 1, LONG)
            host = coordinator.host(int, after=before)
            assert before.abandon()
            await asyncio.sleep(0.1)
            assert host.state == "submitted"
            await asyncio.sleep(2)
            assert host.state == "done"

    simulated(main)
