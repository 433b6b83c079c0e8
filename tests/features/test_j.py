"""The managed context, and which driver serves: the rows J of docs/reference/features.md."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import ManagedContext
from tests.helpers import quickly
from tests.project.tree import SOURCE

PROGRAM = """
    import asyncio, sys, warnings
    import aiocuda

    async def main():
        for driver in sys.argv[1:]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    async with aiocuda.ManagedContext(driver=driver) as context:
                        print(driver, context.statistics().driver, *(warning.category.__name__ for warning in caught))
                except aiocuda.AiocudaError as error:
                    print(driver, type(error).__name__)

    asyncio.run(main())
"""


def opened(*drivers: str, **environment: str) -> list[str]:
    """What opening each of the drivers gives in a process that sees no GPU."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIOCUDA_")}
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *drivers],
        env={**inherited, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return finished.stdout.splitlines()


@pytest.mark.slow
def test_falls_back_to_the_host_driver_with_one_warning_unless_cuda_was_asked_for_by_name() -> None:
    """J5: the default falls back visibly; a name that cannot be had is an error."""
    assert opened("auto", "host", "cuda") == [
        "auto host HostDriverWarning",
        "host host",
        "cuda DriverNotAvailableError",
    ]


@pytest.mark.slow
def test_the_environment_can_name_the_driver() -> None:
    """J5: asked for by name, the host driver comes without a warning, and CUDA not at all."""
    assert opened("auto", AIOCUDA_DRIVER="host") == ["auto host"]
    assert opened("auto", AIOCUDA_DRIVER="cuda") == ["auto DriverNotAvailableError"]


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_synchronize_waits_for_all_work_in_both_modes(name: Any, asynchronous: bool) -> None:
    """J8: of streams by purpose, the pool, the coordinator, steps, and streams of the program."""
    context = ManagedContext(driver=name, asynchronous=asynchronous)
    assert context.asynchronous is asynchronous
    async with context, context.device.stream() as stream:
        array = np.ones(1000, np.float32)
        work: list[Any] = [context.stream(purpose).upload(array) for purpose in ("upload", "control", "telemetry")]
        async with context.pool.stream() as leased:
            work.append(leased.upload(array))
        work += [context.coordinator.upload(array), stream.upload(array)]
        await context.triple_buffered_step(aiocuda.StepConfig({"x": array}, download=["x"]))
        await quickly(context.synchronize())
        assert all(each.done() for each in work)
        (telemetry,) = await context.flush()
        np.testing.assert_array_equal(telemetry.outputs["x"], array)
        assert context.asynchronous is asynchronous
