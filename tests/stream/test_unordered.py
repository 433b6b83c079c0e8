"""E10: the checker finds each planted race, and reports nothing of a correct program."""

from __future__ import annotations

import asyncio
import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import DriverError, StaleHandleError, UnorderedAccessWarning
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from tests.helpers import Peer, quickly
from tests.stream import unordered
from tests.stream.unordered import CORRECT, HOST_ARRAYS, RACES, TWO_DEVICES, N, Program, World, world_of

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.parametrize("driver", [lambda: HostDriver(devices=2), lambda: SimulatedDriver(devices=2)],
                            ids=["host", "simulated"]),
]  # fmt: skip


def name_of(program: Program) -> str:
    return str(getattr(program, "__name__", program))


@pytest.mark.parametrize("program", [*RACES, *TWO_DEVICES], ids=name_of)
async def test_race_is_found(driver: Callable[[], Any], program: Program) -> None:
    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            await program(world)
            assert world.conflicts
            for conflict in world.conflicts:  # both lines are those of the program
                assert unordered.__file__ in conflict.first
                assert unordered.__file__ in conflict.second


@pytest.mark.parametrize("program", HOST_ARRAYS, ids=name_of)
async def test_host_array_that_is_written_too_early_is_found(driver: Callable[[], Any], program: Program) -> None:
    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            await program(world)
            assert world.conflicts
            for conflict in world.conflicts:
                assert unordered.__file__ in conflict.first
                assert conflict.second == ""
                assert re.search(
                    r"the program has written the host array of shape \(.*\) \w+ before the end of the \w+ on left at "
                    r".*:\d+, which reads it, by a line that the checker cannot name: await the \w+ before that line",
                    str(conflict),
                )


@pytest.mark.parametrize("program", CORRECT, ids=name_of)
async def test_correct_program_is_not_reported(driver: Callable[[], Any], program: Program) -> None:
    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            await program(world)
            assert [str(conflict) for conflict in world.conflicts] == []


@pytest.mark.parametrize(("nbytes", "found"), [(1 << 20, True), ((1 << 20) + 1, False)])
async def test_arrays_of_up_to_a_mebibyte_are_compared(driver: Callable[[], Any], nbytes: int, found: bool) -> None:
    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            host = np.zeros(nbytes, np.uint8)
            uploaded = world.left.upload(host)
            host[-1] = 1
            await quickly(uploaded)
            assert bool(world.conflicts) == found


async def test_array_of_a_copy_that_failed_is_not_compared(driver: Callable[[], Any]) -> None:
    with Peer(driver()) as peer:
        async with world_of(peer) as world:
            host = np.zeros(N, np.uint32)
            peer.refuse("upload")
            copied = world.left.copy(world.x, host)
            host[:] = 1
            with pytest.raises(DriverError):
                await quickly(copied)
            assert world.conflicts == []


async def test_warning_of_a_host_array_that_is_an_error_goes_to_the_handler_of_the_loop(
    driver: Callable[[], Any],
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            warnings.simplefilter("error", UnorderedAccessWarning)
            host = np.zeros(N, np.uint32)
            copied = world.left.copy(world.x, host)
            host[:] = 1
            await quickly(copied)
            assert len(world.conflicts) == 1
            await quickly(world.left.fill(world.x, 1))
    assert [type(error["exception"]) for error in errors] == [UnorderedAccessWarning]


async def test_use_after_free_is_refused(driver: Callable[[], Any]) -> None:
    async def program(world: World) -> None:
        world.left.fill(world.x, 1)
        world.x.free()
        with pytest.raises(StaleHandleError, match="has been freed"):
            world.right.download(world.x)

    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            await program(world)
