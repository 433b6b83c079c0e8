"""The content that a random program expects in its buffers, and the waits that it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, InvalidArgumentError, SkippedError
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing import SimulatedLoop
from tests.simulation.buffers import TrackedBuffer, Version


class Ended:
    """The part of an operation that a version reads."""

    def __init__(self, state: str = "done") -> None:
        self.state = state


def version(state: str, compute: Callable[..., Any] | None, *parents: Version) -> Version:
    return Version(Ended(state), parents, compute)  # type: ignore[arg-type]


def test_version_is_computed_from_its_parents() -> None:
    one = version("done", lambda: np.array([2]))
    two = version("done", lambda before: before * 3 + 1, one)
    assert two.value() == np.array([7])


@pytest.mark.parametrize("state", ["failed", "abandoned", "submitted"])
def test_content_is_unknown_after_an_operation_that_was_not_done(state: str) -> None:
    one = version(state, lambda: np.array([2]))
    assert version("done", lambda before: before, one).value() is None
    assert one.value() is None


def test_content_of_an_unwritten_buffer_is_unknown() -> None:
    assert Version(None, (), None).value() is None


def test_version_is_computed_once_and_then_drops_its_parents() -> None:
    calls: list[int] = []
    one = version("done", lambda: calls.append(1))
    one.value()
    one.value()
    assert calls == [1]
    assert (one.operation, one.parents) == (None, ())


def simulated(main: Callable[[Device], Awaitable[None]], *upsets: Upset) -> None:
    async def opened() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(None, upsets=upsets)) as device:
            await main(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())


def test_read_waits_for_the_last_write_and_write_also_for_the_reads() -> None:
    async def main(device: Device) -> None:
        async with device.stream() as one, device.stream() as two, device.stream() as three:
            tracked = TrackedBuffer(one.empty(16), one)
            write = one.fill(tracked.buffer, 1)
            tracked.note_use(one, write, writes=True)
            assert tracked.operations_before(one, writes=True) == []  # its own stream keeps the order
            assert tracked.operations_before(two, writes=False) == [write]
            read = two.download(tracked.buffer)
            tracked.note_use(two, read, writes=False)
            assert tracked.operations_before(three, writes=False) == [write]
            assert tracked.operations_before(three, writes=True) == [write, read]
            await aiocuda.gather(write, read)
            assert tracked.operations_before(three, writes=True) == []  # the host has seen them end

    simulated(main)


def test_failed_write_orders_nothing_so_its_own_waits_are_named_again() -> None:
    async def main(device: Device) -> None:
        async with device.stream() as one, device.stream() as two, device.stream() as three:
            tracked = TrackedBuffer(one.empty(16), one)
            read = one.download(tracked.buffer)
            tracked.note_use(one, read, writes=False)
            failed = two.fill(tracked.buffer, 1)
            tracked.note_use(two, failed, writes=True)
            assert tracked.operations_before(three, writes=True) == [failed, read]
            skipped = two.fill(tracked.buffer, 2)
            tracked.note_use(two, skipped, writes=True)
            assert tracked.operations_before(three, writes=True) == [skipped, read]
            with pytest.raises(InvalidArgumentError, match="fill: refused"):
                await failed
            with pytest.raises(SkippedError):
                await skipped

    simulated(main, Upset("refuse", 1, "fill", 1))
