"""Steps in virtual time, in both modes: each step returns its telemetry once, in order, or fails, or is dropped."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from aiocuda import ManagedContext
from aiocuda.context import StepTelemetry
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.context.programs import affine, everything, numbered, value, zeros
from tests.helpers import Reports

T = TypeVar("T")

#: For `test_random_calls`. 1 000 of them, in each mode, were tried once.
SEEDS = 8


def in_virtual_time(main: Callable[[ManagedContext], Awaitable[T]], seed: int, asynchronous: bool) -> T:
    """Run a coroutine function in a context, and see that no rule was broken."""

    async def run() -> T:
        driver = SimulatedDriver(seed)
        async with ManagedContext(driver=driver, asynchronous=asynchronous) as context:
            result = await main(context)
        assert driver.violations == []
        assert asynchronous or not driver.statistics()["streams_created"]
        driver.close()
        return result

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


def test_all_parts_bring_the_same_in_any_order_of_events() -> None:
    """J2: three seeds in each mode."""
    found = [in_virtual_time(everything, seed, mode) for mode in (True, False) for seed in range(3)]
    assert all(each == found[0] for each in found)


def broken(slot: object) -> None:
    raise LookupError


class Caller:
    """Makes random calls, and checks what each of them returns or raises."""

    def __init__(self, context: ManagedContext, seed: int) -> None:
        self.context = context
        self.random = random.Random(seed)
        self.reports = Reports()
        self.values: list[int] = []  # of the steps begun, since the last reset
        self.pending: list[int] = []  # numbers of steps that are neither returned nor dropped

    async def run(self, calls: int) -> None:
        with self.reports:
            await self._run(calls)

    async def _run(self, calls: int) -> None:
        state = await zeros(self.context)
        for _ in range(calls):
            match self.random.choice(["step"] * 12 + ["broken", "cancelled", "cancelled", "flush", "reset"]):
                case "step":
                    await self.step(affine(state))
                case "broken":
                    await self.step(broken)
                case "cancelled":
                    await self.step(affine(state), turns=self.random.randrange(60))
                case "flush":
                    await self.flush()
                case "reset":
                    await self.context.reset_pipeline()
                    self.reports.contexts.clear()  # of a step that failed, and was dropped
                    self.values, self.pending = [], []
        while self.pending:
            await self.flush()
        assert await self.context.flush() == []
        assert self.context.triple_buffer.states == ("free",) * 3

    async def step(self, compute: Any, turns: int | None = None) -> None:
        number = self.random.randrange(1 << 20)
        begun = self.context._step_runner._begun
        task = asyncio.create_task(self.context.triple_buffered_step(numbered(number, compute)))
        if turns is not None:
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        if self.context._step_runner._begun > begun:
            self.pending.append(len(self.values))
            self.values.append(number)
        if task.cancelled():
            for report in self.reports.contexts:  # a failure that no call could raise
                self.failed(report["exception"])
            self.reports.contexts.clear()
            return
        if task.exception() is not None:
            self.failed(task.exception())
        elif task.result() is not None:
            self.told(task.result())
        else:
            assert len(self.pending) < 3

    async def flush(self) -> None:
        try:
            told = await self.context.flush()
        except LookupError as error:
            self.failed(error)
            return
        for telemetry in told:
            self.told(telemetry)

    def told(self, telemetry: StepTelemetry | None) -> None:
        """Of the oldest, and of nothing but that."""
        assert telemetry is not None
        assert telemetry.step == self.pending.pop(0)
        assert value(telemetry.outputs["x"]) == self.values[telemetry.step]

    def failed(self, error: BaseException | None) -> None:
        """The oldest step: later steps end, and their failures are its notes."""
        assert isinstance(error, LookupError)
        own, *others = error.__notes__
        assert own == f"in stage 'compute' of item {self.pending[0]}, counted from 0"
        note = re.compile(r"step \d+, which began after it, has failed, too: LookupError")
        assert all(note.match(one) for one in others)
        self.pending = []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_random_calls(asynchronous: bool) -> None:
    """J3: steps, failures, cancellations, flushes and resets."""
    for seed in range(SEEDS):
        try:
            in_virtual_time(lambda context: Caller(context, seed).run(30), seed, asynchronous)  # noqa: B023 - called here
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
