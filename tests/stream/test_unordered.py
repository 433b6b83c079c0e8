"""E10: the checker finds each planted race, and reports nothing of a correct program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from aiocuda import StaleHandleError
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from tests.stream import unordered
from tests.stream.unordered import CORRECT, RACES, TWO_DEVICES, Program, World, world_of

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


@pytest.mark.parametrize("program", CORRECT, ids=name_of)
async def test_correct_program_is_not_reported(driver: Callable[[], Any], program: Program) -> None:
    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            await program(world)
            assert [str(conflict) for conflict in world.conflicts] == []


async def test_use_after_free_is_refused(driver: Callable[[], Any]) -> None:
    async def program(world: World) -> None:
        world.left.fill(world.x, 1)
        world.x.free()
        with pytest.raises(StaleHandleError, match="has been freed"):
            world.right.download(world.x)

    with contextlib.closing(driver()) as made:
        async with world_of(made) as world:
            await program(world)
