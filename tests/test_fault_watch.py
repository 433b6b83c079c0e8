"""The watch of device faults: on the loop, at each fault, until it is stopped or dropped."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

import aiocuda
from aiocuda._base._fault_watch import FaultWatch
from aiocuda._base._faults import FAULTS
from aiocuda.errors import DeviceFault
from aiocuda.serving import Batch, MicroBatcher


class Holder:
    """Counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def on_fault(self) -> None:
        self.calls += 1


def report() -> DeviceFault:
    fault = DeviceFault("device 0: planted")
    FAULTS.report(fault, ends_process=False)
    return fault


@pytest.mark.asyncio
async def test_calls_the_method_in_the_next_iteration_for_each_fault_until_it_is_stopped() -> None:
    holder = Holder()
    watch = FaultWatch(asyncio.get_running_loop(), holder.on_fault)
    for number in (1, 2):
        fault = report()
        assert (watch.fault, holder.calls) == (fault, number - 1)
        await asyncio.sleep(0)
        assert holder.calls == number
    watch.stop()
    watch.stop()
    report()
    await asyncio.sleep(0)
    assert holder.calls == 2


@pytest.mark.asyncio
async def test_dropped_watch_is_told_of_nothing() -> None:
    """A forgotten watch stayed in the process for ever, and each fault woke its loop."""
    gc.collect()
    watches, holder = FAULTS.watches, Holder()
    dropped, kept = (FaultWatch(asyncio.get_running_loop(), holder.on_fault) for _ in range(2))
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert reference() is None
    assert FAULTS.watches == [*watches, kept]
    report()
    await asyncio.sleep(0)
    assert holder.calls == 1
    kept.stop()
    assert FAULTS.watches == watches


def test_fault_after_the_loop_has_closed_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    holder = Holder()
    watch = FaultWatch(loop, holder.on_fault)
    loop.close()
    assert watch.fault is None
    assert report() is watch.fault
    watch.stop()


def test_batcher_whose_loop_has_closed_leaves_no_watch() -> None:
    gc.collect()
    watches = FAULTS.watches

    async def leave() -> None:
        async with aiocuda.open_device(driver="host") as device:
            batcher = MicroBatcher(_answer, device=device, max_batch_size=4)
            await batcher.__aenter__()
            assert len(FAULTS.watches) == len(watches) + 1

    asyncio.run(leave())
    gc.collect()
    assert FAULTS.watches == watches


async def _answer(batch: Batch[int]) -> list[int]:
    return list(batch.items)
