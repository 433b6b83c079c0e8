"""What random programs on the simulated driver found in pipelines, each as the few steps that it takes.

Without seeds: what a seed does changes with the programs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Kernel, Operation, Pipeline, Slot, Stage
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing import SimulatedLoop, kernels
from tests.helpers import SPIN
from tests.pipeline.virtual import in_virtual_time, kernel


def spin(slot: Slot) -> Operation[Any]:
    """Sleep for the item's seconds and a nanosecond."""
    return slot.stream.launch(SPIN, 1, 1, 1 + slot.item * 1_000_000_000)


def fill(slot: Slot) -> Operation[Any]:
    return slot.stream.fill(slot.buffer("x", 4, np.uint32), 1)


BESIDE_EACH_OTHER = [Stage("spin", spin), Stage("fill", fill, after=())]


def refused(verb: str, nth: int, main: Callable[[Device, list[BaseException]], Awaitable[None]]) -> list[Any]:
    """Return the codes of the errors that the loop's handler gets, or ``main`` raises, if the driver refuses a call."""
    driver = SimulatedDriver(None, upsets=[Upset("refuse", nth, verb, 802)])
    told: list[BaseException] = []

    async def opened() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        async with aiocuda.open_device(driver=driver) as device:
            await main(device, told)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []
    assert sum(driver.upsets.happened.values()) == 1
    return [getattr(error, "code", None) for error in told]


@pytest.mark.parametrize(("alone", "nth"), [(True, 1), (True, 2), *((False, nth) for nth in range(1, 7))])
def test_a_wait_refused_after_the_consumer_left_is_reported(alone: bool, nth: int) -> None:
    """The wait is the pipeline's own and has no reader; the operations skipped because of it counted as seen."""
    affine = Kernel("affine", source=kernels.AFFINE.source, host=kernels.AFFINE.host)  # which is loaded first

    def up(slot: Slot) -> Operation[Any]:
        return slot.stream.copy(slot.buffer("x", 4, np.uint32), slot.item)

    def compute(slot: Slot) -> Operation[Any]:
        return slot.stream.launch(affine, 1, 4, slot.buffer("x", 4, np.uint32), 4, 3, 1)

    def down(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("x", 4, np.uint32))

    async def main(device: Device, _told: list[BaseException]) -> None:
        stages = [Stage("up", up), Stage("compute", compute), Stage("down", down)]
        async with Pipeline(device, stages, depth=3) as pipeline:
            results = pipeline.run([np.zeros(4, np.uint32)] * 3)
            one = pipeline.execute_iteration(np.zeros(4, np.uint32)) if alone else anext(results)
            consumer = asyncio.ensure_future(one)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            consumer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await consumer
            await results.aclose()

    assert refused("stream_wait", nth, main) == [802]


@pytest.mark.parametrize("way", ["run", "left", "one"])
def test_a_failure_is_reported_if_its_consumer_is_cancelled_while_others_end(way: str) -> None:
    """The failure was lost when the wait for unfinished operations was cancelled."""
    items = [1, 0] if way == "left" else [0, 1]  # of which 0 fails, and 1 takes a second

    async def main(device: Device, _told: list[BaseException]) -> None:
        await device.load(SPIN)
        async with Pipeline(device, BESIDE_EACH_OTHER) as pipeline:
            if way == "one":
                consumer, other = (asyncio.ensure_future(pipeline.execute_iteration(item)) for item in items)
            else:
                consumer = other = asyncio.ensure_future(anext(pipeline.run(items)))
            for _ in range(
                1 + (way == "left")
            ):  # the first cancellation leaves the run, the second one the wait for its end
                await asyncio.sleep(0.1)
                consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer
            with contextlib.suppress(asyncio.CancelledError):
                await other

    assert refused("fill", 1 + items.index(0), main) == [802]


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_refused_record_is_reported_if_its_consumer_is_cancelled(nth: int) -> None:
    """The record is the pipeline's own. The skipped operations had been read, and the consumer was gone."""

    async def main(device: Device, told: list[BaseException]) -> None:
        await device.load(SPIN)
        async with Pipeline(device, BESIDE_EACH_OTHER) as pipeline:
            consumer = asyncio.ensure_future(anext(pipeline.run([1])))
            await asyncio.sleep(0.1)
            consumer.cancel()
            await asyncio.wait({consumer})
            if not consumer.cancelled():  # it came before
                told.extend(filter(None, [consumer.exception()]))

    assert refused("event_record", nth, main) == [802]


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("seconds", [0.0, 1e-6])
def test_items_that_end_with_their_device_are_not_reported(branches: int, seconds: float) -> None:
    """The device had begun to close, and was not closed yet; and two branches of an item failed together."""
    told: list[dict[str, Any]] = []

    def launch(slot: Slot) -> Operation[Any]:
        return slot.stream.launch(kernel(5.0), 1, 1, 0)  # which is loaded first, and waits on the host

    async def host(slot: Slot) -> None: ...

    stages: list[Stage] = []
    for branch in range(branches):
        stages.append(Stage(f"launch {branch}", launch, after=()))
        stages.append(Stage(f"host {branch}", host, after=f"launch {branch}"))

    async def main(device: Device) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        async def consume() -> None:
            async for _ in Pipeline(device, stages).run(range(5)):
                pass

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(seconds)
        consumer.cancel()
        raise InterruptedError  # it leaves the device without a drain

    with contextlib.suppress(InterruptedError):
        in_virtual_time(main, policy="balanced")
    assert told == []


@pytest.mark.parametrize("turns", range(12))
def test_a_failure_is_told_if_the_consumer_is_cancelled_while_the_streams_close(turns: int) -> None:
    """The cancellation replaced the failure, which was on its way to the consumer, and nothing reported it."""
    raised: list[int] = []

    async def main(device: Device, told: list[BaseException]) -> None:
        failing = asyncio.Event()

        def fill_and_tell(slot: Slot) -> Operation[Any]:
            operation = fill(slot)
            operation.add_done_callback(lambda _: failing.set())
            return operation

        async def consume() -> None:
            try:
                async for _ in Pipeline(device, [Stage("fill", fill_and_tell)]).run([1]):
                    pass
            except aiocuda.errors.DriverError as error:
                raised.append(error.code)

        task = asyncio.create_task(consume())
        await failing.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert refused("fill", 1, main) + raised == [802]
