"""``aiocuda doctor``: checks this machine, and names the cure of each problem."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from ...driver import DriverName, driver_name
from ._driver_checks import check_driver, check_nvrtc, check_pinned, check_queues, check_versions
from ._finding import Finding, Problem, Result, as_json
from ._machine import Machine
from ._settings_checks import check_cache, check_core, check_environment, check_event_loop
from ._time_checks import check_gil, check_timers

__all__ = ["CHECKS", "as_json", "diagnose"]

#: Seconds that a check may take.
CHECK_SECONDS: Final = 30.0

#: The checks, in the order of the findings. One at a time, because some of them measure times.
CHECKS: Final[Mapping[str, Callable[[Machine], Awaitable[Result]]]] = {
    "driver": check_driver,
    "versions": check_versions,
    "nvrtc": check_nvrtc,
    "hardware_queues": check_queues,
    "pinned_limit": check_pinned,
    "gil_contention": check_gil,
    "timer_latency": check_timers,
    "core": check_core,
    "cache": check_cache,
    "environment": check_environment,
    "event_loop": check_event_loop,
}


async def diagnose(driver: DriverName) -> list[Finding]:
    """Run every check, and return a finding for each.

    Raises
    ------
    InvalidArgumentError
        No driver has this name. A wrong ``AIOCUDA_DRIVER`` is a finding.
    """
    if driver != "auto":
        driver_name(driver)
    machine = await Machine.look(driver)
    return [await _finding(name, check, machine) for name, check in CHECKS.items()]


async def _finding(name: str, check: Callable[[Machine], Awaitable[Result]], machine: Machine) -> Finding:
    """Return the finding of a check. An error of the check is a finding, too, so that the others are still shown."""
    try:
        async with asyncio.timeout(CHECK_SECONDS) as limit:
            result = await check(machine)
    except Exception as error:  # noqa: BLE001 - the finding shows it
        why = f"no answer within {CHECK_SECONDS:g} s" if limit.expired() else f"{type(error).__name__}: {error}"
        result = Result([], [Problem(f"this check failed: {why}", "report this with the output of `aiocuda info`")])
    return Finding.of(name, result)
