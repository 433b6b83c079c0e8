"""A case: something that cannot be, thrown at a driver's device; and what must come of it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiocuda
from aiocuda import Device, Kernel
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Driver
from aiocuda.testing import SimulatedDriver
from tests.helpers import until

T = TypeVar("T")


class DroppedBlock(Exception):  # noqa: N818 - nothing is wrong
    """By which a case leaves what it has made."""


#: What every world has loaded.
KERNEL = Kernel(
    "scale",
    source="__global__ void scale(float* x, int n, float by) { int i = threadIdx.x; if (i < n) x[i] *= by; }",
    host=lambda x, n, by: x.__imul__(by),
)


#: What differs from one call, or one machine, to the next: addresses, numbers of operations and how far they are,
#: sizes, how many devices there are.
_PASSING = re.compile(r"0x[0-9a-f]+|Operation \d+|submitted|\bdone\b|\d+ unfinished|\d+(,\d{3})+|\d+ live|has \d+$")


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """A device of one driver, with what cases are tried on. Untyped: they throw what no type checker lets by."""

    driver: Driver
    device: Any
    stream: Any
    other: Any
    buffer: Any  #: 16 items of float32
    managed: Any  #: as many
    second: Any  #: another device of the same driver, where that has two
    distant: Any  #: a stream of the second device
    made: list[Any] = dataclasses.field(default_factory=list)  #: what is left at the end of a case

    def holding(self, thing: T) -> T:
        """What has streams of its own, to be left at the end of the case."""
        self.made.append(thing)
        return thing

    async def leave(self) -> None:
        """Leave what the case has made, as an exception does."""
        while self.made:
            await self.made.pop().__aexit__(DroppedBlock, DroppedBlock(), None)

    @property
    def calls(self) -> int:
        """How many verbs have reached the device."""
        return self.driver.statistics()["calls"]

    def plain(self, text: str) -> str:
        """An error's text without what differs from one call to the next: names of devices, addresses, numbers."""
        for name in (self.device.name, f"{self.driver.name} driver", f"{self.driver.name}:"):
            text = text.replace(name, "…")
        return _PASSING.sub("…", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One input of a row, and the error that it gets.

    Attributes
    ----------
    row
        The number of the row of the contract.
    name
        What is thrown.
    verb
        Throws it; called with the world and what ``given`` made. What it returns is awaited if it can be.
    error
        The class that must be raised, and no subclass of it.
    says
        What stands in the text, among it the value.
    given
        Makes, beforehand and uncounted, what the verb is called with.
    reaches
        The verb may reach the driver: the row says so.
    devices
        How many devices the driver must have.
    """

    row: int
    name: str
    verb: Callable[[World, Any], Any]
    error: type[BaseException]
    says: str
    given: Callable[[World], Any] | None = None
    reaches: bool = False
    devices: int = 1

    def __str__(self) -> str:
        return f"{self.row}-{self.name}"

    async def refused(self, world: World) -> str:
        """Throw it. The text of the error, as every driver would have it."""
        await world.device.drain()  # what is under way is asked about
        given = None if self.given is None else self.given(world)
        if inspect.iscoroutine(given):  # and not an operation, which is what a case wants
            given = await given
        before = world.calls
        try:
            try:
                result = self.verb(world, given)
                if inspect.isawaitable(result):
                    result = await result
            finally:
                reached = world.calls - before
                await world.leave()
        except self.error as error:
            caught: BaseException = error
        else:
            raise AssertionError(f"row {self} was taken by the {world.driver.name} driver: {result!r}")
        assert type(caught) is self.error, f"row {self}: {type(caught).__name__}: {caught}"
        assert self.says in str(caught), f"row {self} says {str(caught)!r}, and nothing of {self.says!r}"
        assert self.reaches or not reached, f"row {self} reached the driver {reached} times"
        return world.plain(str(caught))


def each_of(verb: Callable[[World, Any], Any], value: Any) -> Callable[[World, Any], Any]:
    """A case's verb, of one that takes a value."""
    return lambda world, _: verb(world, value)


async def settled(device: Device | None) -> None:
    """Wait until the device's own threads have nothing to do: they page-lock what serves copies, by calls."""
    if device is not None:
        await until(lambda: not device._loop_states.blocking())


def make_driver(name: str) -> Driver | str:
    """A driver of two devices; the cuda driver as it is."""
    if name == "host":
        return HostDriver(devices=2)
    return SimulatedDriver(devices=2) if name == "simulated" else name


@contextlib.asynccontextmanager
async def open_world(name: str) -> AsyncIterator[World]:
    """A world of a driver."""
    made = make_driver(name)
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(made, HostDriver):
            stack.callback(made.close)
        device = await stack.enter_async_context(aiocuda.open_device(driver=made))  # type: ignore[arg-type]
        stream = await stack.enter_async_context(device.stream(name="left"))
        other = await stack.enter_async_context(device.stream(name="right"))
        second = distant = None
        if device.driver.device_count() > 1:
            second = await stack.enter_async_context(aiocuda.open_device(1, driver=device.driver))
            distant = await stack.enter_async_context(second.stream(name="distant"))
        buffer = stream.empty(16)
        await stream.fill(buffer, 0)
        await device.load(KERNEL)
        managed = device.unified(16)
        for opened in (device, second):
            await settled(opened)
        yield World(device.driver, device, stream, other, buffer, managed, second, distant)


__all__ = ["KERNEL", "Case", "World", "each_of", "open_world", "settled"]
