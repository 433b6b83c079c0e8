"""What a random program expects to stand in its buffers, and what it orders before what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, InvalidArgumentError, SkippedError
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing.simulation.content import Tracked, Version
from aiocuda.testing.simulation.loop import SimulatedLoop


class Ended:
    """An operation, as far as a version looks at it."""

    def __init__(self, state: str = "done") -> None:
        self.state = state


def version(state: str, compute: Callable[..., Any] | None, *parents: Version) -> Version:
    return Version(Ended(state), parents, compute)  # type: ignore[arg-type]


def test_version_is_computed_from_those_before_it() -> None:
    one = version("done", lambda: np.array([2]))
    two = version("done", lambda before: before * 3 + 1, one)
    assert two.value() == np.array([7])


@pytest.mark.parametrize("state", ["failed", "abandoned", "submitted"])
def test_nobody_knows_what_stands_behind_an_operation_that_was_not_done(state: str) -> None:
    one = version(state, lambda: np.array([2]))
    assert version("done", lambda before: before, one).value() is None
    assert one.value() is None


def test_a_buffer_that_nobody_has_written_holds_anything() -> None:
    assert Version(None, (), None).value() is None


def test_a_version_is_computed_once_and_lets_go_of_what_it_stands_on() -> None:
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


def test_a_read_comes_behind_the_last_write_and_a_write_behind_the_reads_too() -> None:
    async def main(device: Device) -> None:
        async with device.stream() as one, device.stream() as two, device.stream() as three:
            tracked = Tracked(one.empty(16), one)
            write = one.fill(tracked.buffer, 1)
            tracked.used(one, write, writes=True)
            assert tracked.before(one, writes=True) == []  # its own stream keeps that order
            assert tracked.before(two, writes=False) == [write]
            read = two.download(tracked.buffer)
            tracked.used(two, read, writes=False)
            assert tracked.before(three, writes=False) == [write]
            assert tracked.before(three, writes=True) == [write, read]
            await aiocuda.gather(write, read)
            assert tracked.before(three, writes=True) == []  # the host has seen them end

    simulated(main)


def test_what_did_not_run_orders_nothing_and_what_it_was_to_come_behind_is_named_again() -> None:
    async def main(device: Device) -> None:
        async with device.stream() as one, device.stream() as two, device.stream() as three:
            tracked = Tracked(one.empty(16), one)
            read = one.download(tracked.buffer)
            tracked.used(one, read, writes=False)
            failed = two.fill(tracked.buffer, 1)
            tracked.used(two, failed, writes=True)
            assert tracked.before(three, writes=True) == [failed, read]
            skipped = two.fill(tracked.buffer, 2)
            tracked.used(two, skipped, writes=True)
            assert tracked.before(three, writes=True) == [skipped, read]
            with pytest.raises(InvalidArgumentError, match="fill: refused"):
                await failed
            with pytest.raises(SkippedError):
                await skipped

    simulated(main, Upset("refuse", 1, "fill", 1))
