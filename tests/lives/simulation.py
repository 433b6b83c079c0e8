"""Random programs that end objects at random places, in virtual time on the simulated device.

``python -m tests.lives.simulation [--seeds N] [--first S]``: exit 1 and a line ``seed S: E2 …`` at the first violation.

====  ==========================================================================================================
E1    an object whose end has returned refuses new work, and cannot be entered again
E2    a call that has returned has waited for the first one
E3    a first call that is cancelled ends at once, or within the deadline
E4    everything ends: work with its result or with an error that names the end
E5    nothing is left: no stream, no task, no byte of device memory, no error that only the loop gets
====  ==========================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
import warnings
from typing import Any

import aiocuda
from aiocuda import BusyError, ClosedError, Device, SkippedError, StaleHandleError
from aiocuda.errors import DrainTimeoutWarning
from tests.lives.rows import ROWS, Life, Row
from tests.random_programs import check, command, run_in_virtual_time

__all__ = ["run"]

#: Virtual seconds that accepted work has if an object is left.
DEADLINE = 0.4

#: Virtual seconds for an end that waits for nothing: it destroys streams and joins threads.
AT_ONCE = 0.01

_ENDED = (ClosedError, SkippedError, StaleHandleError, BusyError)


class LeftError(Exception):
    """Ends a block."""


class Object:
    """One object of a program, and the calls that end it."""

    def __init__(self, program: Program, name: str, row: Row, life: Life) -> None:
        self.chance = program.chance
        self.name = name
        self.row = row
        self.thing = life.thing
        self.life = life
        self.work: list[asyncio.Task[Any]] = []
        self.first: asyncio.Task[Any] | None = None  # that ends it
        self.left = False

    def check(self, rule: str, holds: bool, text: str) -> None:
        check(rule, holds, f"{self.name}: {text}")

    async def begin(self) -> None:
        """Begin work, as a task that the end may interrupt."""

        async def work() -> None:
            with contextlib.suppress(*_ENDED):
                await self.life.work()

        self.work.append(asyncio.create_task(work()))

    async def close(self, wait: float) -> None:
        """End the object after some time, by a call that may be cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(wait)
        call = asyncio.create_task(self.thing.aclose())
        is_first = self.first is None
        self.first = self.first or call
        if self.chance.random() < 0.5:
            done, _ = await asyncio.wait({call}, timeout=self.chance.choice([0.0, 1e-5, 0.01, 0.1]))
            if not done:
                began = loop.time()
                call.cancel()
                if self.chance.random() < 0.3:
                    await asyncio.sleep(self.chance.random() * 0.1)
                    call.cancel()
                await asyncio.wait({call})
                limit = (DEADLINE if self.row.drains and is_first else 0.1 * (not is_first)) + AT_ONCE + 0.1
                self.check("E3", loop.time() - began <= limit, f"its end took {loop.time() - began:.3g} s")
        await asyncio.wait({call})
        error = None if call.cancelled() else call.exception()
        stale = self.row.ended is StaleHandleError and isinstance(error, StaleHandleError)
        self.check("E2", error is None or stale, f"its end raised {error!r}")
        if call.cancelled() and not is_first:
            return
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self.row.ended is not StaleHandleError:  # a lease ends with whichever of its calls is first
            self.check("E2", self.first.done(), "a call has returned before the first one")
        try:
            await self.thing.__aenter__()
        except self.row.ended:
            pass
        else:
            self.check("E1", False, "it was entered after its end")

    async def live(self) -> None:
        """Use the object in a block, which may be left by an exception, beside calls that end it."""
        chance = self.chance
        closing: list[asyncio.Task[None]] = []
        with contextlib.suppress(LeftError, *_ENDED):
            async with self.thing:
                for _ in range(chance.randint(0, 3)):
                    await self.begin()
                    await asyncio.sleep(chance.choice([0.0, 1e-5, 0.05]))
                waits = chance.choices([0.0, 0.0, 1e-5, 0.05, 0.2], k=chance.choice([0, 0, 1, 2, 3]))
                closing += [asyncio.create_task(self.close(wait)) for wait in waits]
                await asyncio.sleep(chance.choice([0.0, 1e-5, 0.05, 0.3]))
                if chance.random() < 0.4:
                    raise LeftError
        for task in closing:
            await task
        for task in self.work:
            await asyncio.wait({task})
            error = None if task.cancelled() else task.exception()
            self.check("E4", error is None, f"its work has failed: {error!r}")


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"aiocuda lives {seed}")

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        reported: list[str] = []
        loop.set_exception_handler(lambda loop, context: reported.append(f"{context}"))
        tasks = len(asyncio.all_tasks())
        device = await aiocuda.open_device(driver="simulated")
        device.drain_timeout = DEADLINE
        names = self.chance.choices(sorted(ROWS), k=self.chance.randint(1, 4))
        lives = [asyncio.create_task(self.live(device, name)) for name in names]
        for life in lives:
            if self.chance.random() < 0.2:  # a handler that times out
                loop.call_later(self.chance.choice([0.0, 1e-5, 0.1]), life.cancel)
        await asyncio.wait(lives)
        for life in lives:
            if not life.cancelled():
                life.result()
        del lives, life
        await device.drain()
        gc.collect()
        await asyncio.sleep(1.0)
        gc.collect()
        check("E5", device.statistics().streams == 0, f"{device.statistics().streams} streams of {names} are left")
        live = device.memory.statistics().live_bytes
        check("E5", live == 0, f"{live} bytes of {names} are left")
        await device.aclose()
        await asyncio.sleep(0.1)
        check("E5", len(asyncio.all_tasks()) == tasks, f"tasks are left: {asyncio.all_tasks()}")
        check("E5", not reported, f"the loop was told of {reported} by {names}")
        check("E4", loop.time() < 60, f"it took {loop.time():.3g} s of virtual time")

    async def live(self, device: Device, name: str) -> None:
        async with ROWS[name].make(device) as life:
            one = Object(self, name, ROWS[name], life)
            try:
                await one.live()
            finally:
                for task in one.work:
                    if not task.done():
                        task.cancel()


def run(seed: int) -> None:
    """Run a program. Raise `Violation` if it breaks a rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DrainTimeoutWarning)
        warnings.simplefilter("ignore", aiocuda.PerformanceWarning)
        run_in_virtual_time(Program(seed).main(), "E4")


if __name__ == "__main__":
    sys.exit(command(run, "tests.lives.simulation", "Random ends."))
