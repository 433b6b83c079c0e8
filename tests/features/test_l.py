"""Beyond the usual: the rows L of docs/reference/features.md that hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

import aiocuda
from aiocuda import CompletionPolicy, Device, DeviceFault
from aiocuda.completion._wait_rule import PolicyName
from tests.helpers import PATIENCE, SPIN, TRAP, Peer, open_peer, quickly
from tests.pipeline.virtual import in_virtual_time

T = TypeVar("T")

pytestmark = pytest.mark.asyncio

DRIVERS = ["simulated", pytest.param("cuda", marks=pytest.mark.gpu)]


async def measured(driver: str, policy: PolicyName | CompletionPolicy, main: Callable[[Device], Awaitable[T]]) -> T:
    """Return the result of a coroutine function on a GPU, or on a simulated device in virtual time."""
    if driver == "cuda":
        async with aiocuda.open_device(driver="cuda", policy=policy) as device:
            return await main(device)
    return await asyncio.to_thread(in_virtual_time, main, policy=policy)


async def counted(device: Device, nanoseconds: int, times: int) -> tuple[int, int, int]:
    """(polls, sleeps, parks) of so many awaited kernels, one at a time."""
    async with device.stream() as stream:
        await stream.launch(SPIN, 2, 1, 1000)  # loaded in advance; another grid has another prediction
        before = device.statistics()
        for _ in range(times):
            await quickly(stream.launch(SPIN, 1, 1, nanoseconds))
        after = device.statistics()
    return after.polls - before.polls, after.sleeps - before.sleeps, after.parks - before.parks


@pytest.mark.parametrize("driver", DRIVERS)
async def test_waits_that_repeat_are_slept_through(driver: str) -> None:
    """L1: a kernel of unknown length is parked; when it has come again and again, it is polled around its end, too."""

    async def main(device: Device) -> None:
        _, sleeps, parks = await counted(device, 20_000_000, 1)
        assert (sleeps, parks) == (0, 1)
        await counted(device, 20_000_000, 6)
        _, sleeps, parks = await counted(device, 20_000_000, 3)
        assert parks == 3
        assert sleeps >= (3 if driver == "simulated" else 2)  # other processes on a GPU make one of them longer

    await measured(driver, "balanced", main)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_policy_decides_between_polling_and_parking(driver: str) -> None:
    """L1: for the same kernels, each policy arms a host callback, one also polls, and ``efficient`` hardly does."""
    eager = CompletionPolicy("eager", unknown=PATIENCE, lead=PATIENCE, grace=PATIENCE, share=1.0)
    eager_polls, _, parks = await measured(driver, eager, lambda device: counted(device, 5_000_000, 3))
    assert 1 <= parks <= 3  # one that is still armed for the kernel before serves, too
    polls, sleeps, parks = await measured(driver, "efficient", lambda device: counted(device, 5_000_000, 3))
    assert (sleeps, parks) == (0, 3)
    assert polls <= 27 < eager_polls  # one for each await, and one for each millisecond


@pytest.mark.parametrize("policy", ["latency", "balanced"])
async def test_threads_of_this_process_are_not_polled(policy: PolicyName) -> None:
    """L1: on the host driver every policy parks, since a loop that polls takes the GIL from the twins."""
    async with aiocuda.open_device(driver="host", policy=policy) as device:
        polls, sleeps, parks = await counted(device, 5_000_000, 3)
        assert (sleeps, parks) == (0, 3)
        assert polls <= 27


async def test_fault_reaches_every_pending_operation() -> None:
    """L3: awaited or not, in the stream that faulted and in others; later calls raise immediately."""
    async with open_peer(Peer()) as (peer, device):
        bad, good = device.stream(), device.stream()
        buffer = await good.upload(np.zeros(8))
        slow = good.launch(SPIN, 1, 1, 10_000_000_000)
        unheard = good.fill(buffer, 1)
        waiting = asyncio.create_task(slow.wait())
        with pytest.raises(DeviceFault):
            await quickly(bad.launch(TRAP, 1, 1))
        with pytest.raises(DeviceFault):
            await quickly(waiting)
        assert isinstance(unheard.exception(), DeviceFault)
        calls = peer.calls.copy()
        with pytest.raises(DeviceFault):
            good.fill(buffer, 1)
        assert peer.calls - calls == {}
