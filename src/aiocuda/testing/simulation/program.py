"""A random program: tasks that enqueue, wait, cancel, abandon, free and close, as a seed says."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from ... import open_device
from ..._device import Device
from ...driver.simulated import SimulatedDriver
from ...errors import AiocudaError, ClosedError, DeviceFault
from .actions import Actions, actor
from .check import Checker

__all__ = ["Program"]

#: Virtual seconds: a slow operation is no reason to leave something behind.
_PATIENCE = 600.0


class _LeftEarlyError(Exception):
    """The program leaves its device by an exception."""


class Program:
    """One program, decided by its seed.

    Parameters
    ----------
    seed
        Decides what it does.
    driver
        What it runs on: on all of its devices.
    checker
        Is told of every operation.
    asynchronous
        False: its devices have their default streams only, see `aiocuda.open_device`.
    """

    @staticmethod
    def devices(seed: int) -> int:
        """How many it is for: two in a quarter of all cases."""
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
        #: Seconds after which its loop is closed in the middle of everything; None if it ends by itself.
        self.vanishes = 0.03 * self._random.random() if self._random.random() < 0.1 else None

    def _one(self, of: list[Any]) -> Any:
        return of[int(len(of) * self._random.random())]

    async def main(self) -> None:
        """Open the devices, let some tasks loose on them, and leave them in one way or another."""
        with contextlib.suppress(_LeftEarlyError, DeviceFault):
            async with contextlib.AsyncExitStack() as opened:
                for index in range(self._driver.model.devices):
                    device = await opened.enter_async_context(await self._open(index))
                    device.drain_timeout = _PATIENCE
                await self._run(self._begun())
        await asyncio.sleep(0)
        if self.actions is not None:
            self.actions.compare()
            self.actions.forget()

    async def begin(self) -> None:
        """Open the devices and let the tasks loose, for somebody who closes the loop under them."""
        with contextlib.suppress(DeviceFault):
            for index in range(self._driver.model.devices):
                await self._open(index)
            actions = self._begun()
            await asyncio.gather(*(self._act(actions, index) for index in range(self._one([2, 3, 4, 5]))))

    async def end(self) -> None:
        """Close the devices, on another loop."""
        if self.actions is not None:
            self.actions.forget()
        self._checker.at_end.clear()  # what they would ask holds tasks of the loop that has gone
        for device in self._devices:
            await device.aclose()

    def _begun(self) -> Actions:
        self.actions = Actions(self._seed, self._devices, self._checker)
        return self.actions

    async def _run(self, actions: Actions) -> None:
        ending = self._one(["drain", "drain", "drain", "raise", "cancel"])
        actors = [asyncio.ensure_future(self._act(actions, index)) for index in range(self._one([2, 3, 4, 5]))]
        try:
            if ending != "drain":
                await asyncio.wait(actors, timeout=self._random.random() * 0.05)
                actions.count(ending)
                if ending == "raise":
                    raise _LeftEarlyError
                for each in actors:
                    each.cancel()
            await asyncio.wait(actors)
        finally:
            self._closing = True
            for each in actors:
                each.cancel()
            await asyncio.wait(actors)
            for each in actors:
                error = None if each.cancelled() else each.exception()
                if isinstance(error, Exception) and not self._may_fail(error):
                    raise error

    async def _open(self, index: int) -> Device:
        policy = self._one(["balanced", "latency", "efficient"])
        limit = self._one([400, 400, 8, 3])
        if not self._asynchronous:
            limit = 400  # which all streams share: with less, each would get on by one operation a millisecond
        chunks = self._one([16, 3])  # few enough that copies wait for each other's
        while True:
            try:
                device = await open_device(
                    index, driver=self._driver, policy=policy, max_in_flight=limit, asynchronous=self._asynchronous
                )
                device._loop_states.here().staging.most_chunks = chunks
                self._devices.append(device)
                self._checker.watch(device)
                return device
            except DeviceFault:
                raise
            except AiocudaError as error:
                self._checker.heard.error(error)
                if not self._driver.upsets.happened:
                    raise  # else it was refused by plan, which comes once

    async def _act(self, actions: Actions, index: int) -> None:
        actor.set(index)
        for _ in range(8 + int(24 * self._random.random())):
            try:
                await actions.any()
            except Exception as error:
                self._checker.heard.error(error)
                if not self._may_fail(error):
                    raise
                if isinstance(error, DeviceFault) or self._closing:
                    return
                actions.count(type(error).__name__)

    def _may_fail(self, error: Exception) -> bool:
        """Is this an error that the program has asked for?"""
        if isinstance(error, ClosedError | TimeoutError) or self._checker.heard.is_scarce(error):
            return True
        if isinstance(error, ExceptionGroup):
            return all(isinstance(each, Exception) and self._may_fail(each) for each in error.exceptions)
        return isinstance(error, AiocudaError) and bool(self._driver.upsets.happened)
