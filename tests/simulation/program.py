"""A random program: it opens devices, lets tasks perform random actions on them, and closes or leaves them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Final, TypeVar

from aiocuda import Device, open_device
from aiocuda.completion._wait_rule import PolicyName
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.errors import AiocudaError, ClosedError, DeviceFault
from tests.simulation import internals
from tests.simulation.actions import Actions, current_task
from tests.simulation.checker import Checker

__all__ = ["Program"]

_T = TypeVar("_T")

#: Virtual seconds that closing a device waits for its work. Long enough for every slow operation.
_DRAIN_TIMEOUT = 600.0

_POLICIES: Final[tuple[PolicyName, ...]] = ("balanced", "latency", "efficient")


class _LeftEarlyError(Exception):
    """The program leaves the blocks of its devices by this error."""


class Program:
    """One random program. Its seed decides everything that it does.

    Either `main` runs it to its end, or `start` runs until the loop is closed and `close` closes the devices on another
    loop; see `close_loop_after`.

    Parameters
    ----------
    seed
        Decides everything.
    driver
        The program uses all devices of this driver.
    checker
        Is given the devices and every operation.
    asynchronous
        False: the devices have only their default streams, see `aiocuda.open_device`.

    Attributes
    ----------
    actions : Actions or None
        The actions, once the devices are open.
    close_loop_after : float or None
        Virtual seconds after which the event loop is to be closed while tasks run. None in nine programs of ten.
    """

    @staticmethod
    def device_count(seed: int) -> int:
        """Return the number of devices of a program: two in a quarter of all programs, else one."""
        return 2 if random.Random(f"aiocuda devices {seed}").random() < 0.25 else 1

    def __init__(self, seed: int, driver: SimulatedDriver, checker: Checker, *, asynchronous: bool = True) -> None:
        self._seed = seed
        self._random = random.Random(f"aiocuda program {seed}")
        self._driver = driver
        self._checker = checker
        self._asynchronous = asynchronous
        self._closing = False
        self._devices: list[Device] = []
        self.actions: Actions | None = None
        self.close_loop_after = 0.03 * self._random.random() if self._random.random() < 0.1 else None

    def _choose(self, choices: Sequence[_T]) -> _T:
        return choices[int(len(choices) * self._random.random())]

    async def main(self) -> None:
        """Open the devices, run some tasks, and drain the devices, leave them by an error, or cancel the tasks."""
        try:
            async with contextlib.AsyncExitStack() as opened:
                for index in range(self._driver.model.devices):
                    device = await opened.enter_async_context(await self.open_device(index))
                    device.drain_timeout = _DRAIN_TIMEOUT
                await self._run_tasks(self._make_actions())
        except (_LeftEarlyError, DeviceFault):
            pass
        except Exception as error:
            # The block of a device raises a failure that no task has read: each one was cancelled.
            if not any("no code has awaited it" in note for note in getattr(error, "__notes__", ())):
                raise
        await asyncio.sleep(0)
        if self.actions is not None:
            self.actions.compare_downloads()
            self.actions.drop_all()

    async def start(self) -> None:
        """Open the devices and run some tasks. The loop may be closed at any time."""
        with contextlib.suppress(DeviceFault):
            for index in range(self._driver.model.devices):
                await self.open_device(index)
            actions = self._make_actions()
            await asyncio.gather(*(self._run_task(actions, number) for number in range(self._choose([2, 3, 4, 5]))))

    async def close(self) -> None:
        """Close the devices, on another loop than that of `start`."""
        if self.actions is not None:
            self.actions.drop_all()
        self._checker.final_checks.clear()  # they hold tasks of the closed loop
        for device in self._devices:
            await device.aclose()

    def _make_actions(self) -> Actions:
        self.actions = Actions(self._seed, self._devices, self._checker)
        return self.actions

    async def _run_tasks(self, actions: Actions) -> None:
        ending = self._choose(["drain", "drain", "drain", "raise", "cancel"])
        tasks = [asyncio.ensure_future(self._run_task(actions, number)) for number in range(self._choose([2, 3, 4, 5]))]
        try:
            if ending != "drain":
                await asyncio.wait(tasks, timeout=self._random.random() * 0.05)
                actions.count(ending)
                if ending == "raise":
                    raise _LeftEarlyError
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)
        finally:
            self._closing = True
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                error = None if task.cancelled() else task.exception()
                if isinstance(error, Exception) and not self._is_expected(error):
                    raise error

    async def open_device(self, index: int) -> Device:
        """Open a device with random settings. If an injected fault makes it fail, try again."""
        policy = self._choose(_POLICIES)
        limit = self._choose([400, 400, 8, 3])
        if not self._asynchronous:
            limit = 400  # all streams share it: with a low limit, each would submit one operation a millisecond
        chunks = self._choose([16, 3])  # few chunks, so that copies wait for each other's
        while True:
            try:
                device = await open_device(
                    index, driver=self._driver, policy=policy, max_in_flight=limit, asynchronous=self._asynchronous
                )
                internals.limit_chunks(device, chunks)
                self._devices.append(device)
                self._checker.watch(device)
                return device
            except DeviceFault:
                raise
            except AiocudaError as error:
                self._checker.errors.record(error)
                if not self._driver.upsets.happened:
                    raise

    async def _run_task(self, actions: Actions, number: int) -> None:
        """Perform 8 to 31 actions."""
        current_task.set(number)
        for _ in range(8 + int(24 * self._random.random())):
            try:
                await actions.run_one()
            except Exception as error:
                self._checker.errors.record(error)
                if not self._is_expected(error):
                    raise
                if isinstance(error, DeviceFault) or self._closing:
                    return
                actions.count(type(error).__name__)

    def _is_expected(self, error: Exception) -> bool:
        """True if something that the program does, or an injected fault, explains this error."""
        if isinstance(error, ClosedError | TimeoutError) or self._checker.errors.is_planned_shortage(error):
            return True
        if isinstance(error, ExceptionGroup):
            return all(isinstance(each, Exception) and self._is_expected(each) for each in error.exceptions)
        return isinstance(error, AiocudaError) and bool(self._driver.upsets.happened)
