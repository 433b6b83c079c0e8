"""A case: bad input for a device of a driver, and the error that it must cause."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiocuda
from aiocuda import Device, Kernel
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Driver
from aiocuda.testing import SimulatedDriver
from tests.helpers import until

T = TypeVar("T")


class DroppedBlock(Exception):  # noqa: N818 - nothing is wrong
    """The exception with which a case leaves the objects that it has created."""


#: A kernel that is loaded in every world.
KERNEL = Kernel(
    "scale",
    source="__global__ void scale(float* x, int n, float by) { int i = threadIdx.x; if (i < n) x[i] *= by; }",
    host=lambda x, n, by: x.__imul__(by),
)


#: Parts of messages that differ between calls or machines: addresses, ids and states of operations, sizes, numbers of
#: devices.
_PASSING = re.compile(
    r"0x[0-9a-f]+|Operation \d+|submitted(; coroutine: .wait\(\))?|\bdone\b|"
    r"\d+ unfinished|\d+(,\d{3})+|\d+ live|has \d+, counted from 0.*"
)


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """A device of one driver, with the objects that cases use. Untyped, because a type checker refuses bad input."""

    driver: Driver
    device: Any
    stream: Any
    other: Any
    buffer: Any  #: 16 items of float32
    managed: Any  #: 16 items of float32, unified memory
    second: Any  #: another device of the driver, if it has two
    distant: Any  #: a stream of the second device
    made: list[Any] = dataclasses.field(default_factory=list)  #: objects to leave at the end of a case

    def holding(self, thing: T) -> T:
        """Register an object with streams of its own, to leave it at the end of the case."""
        self.made.append(thing)
        return thing

    async def leave(self) -> None:
        """Leave the objects that the case has created, as an exception does."""
        while self.made:
            await self.made.pop().__aexit__(DroppedBlock, DroppedBlock(), None)

    @property
    def calls(self) -> int:
        """Number of driver calls so far."""
        return self.driver.statistics()["calls"]

    def plain(self, text: str) -> str:
        """Return a message without parts that differ between calls and drivers: device names, addresses, numbers."""
        for name in (self.device.name, f"{self.driver.name} driver", f"{self.driver.name}:"):
            text = text.replace(name, "…")
        return _PASSING.sub("…", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A bad input of a row of the contract, and its error.

    Attributes
    ----------
    row
        The number of the row of the contract.
    name
        Name of the input.
    verb
        Makes the call, with the world and the result of ``given``. An awaitable result is awaited.
    error
        The class of the error; a subclass is wrong.
    says
        Text that the message must contain, with the value.
    given
        Prepares an argument for the call; its driver calls are not counted.
    reaches
        True if the row allows driver calls.
    devices
        Number of devices that the driver must have.
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
        """Make the call. Return the message in the form that is equal for all drivers."""
        await world.device.drain()  # the driver is polled for unfinished operations
        given = None if self.given is None else self.given(world)
        if inspect.iscoroutine(given):  # but not an operation, which may be the argument
            given = await given
        gc.disable()  # a collection would free what an earlier case has left
        before = world.calls
        try:
            try:
                result = self.verb(world, given)
                if inspect.isawaitable(result):
                    result = await result
            finally:
                reached = world.calls - before
                gc.enable()
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
    """Return the verb of a case from a function that takes a value."""
    return lambda world, _: verb(world, value)


async def settled(device: Device | None) -> None:
    """Wait until the device's threads are idle: they page-lock staging buffers by driver calls."""
    if device is not None:
        await until(lambda: not resources_of(device).loop_states.blocking())


def make_driver(name: str) -> Driver | str:
    """Return a driver with two devices; for cuda, its name."""
    if name == "host":
        return HostDriver(devices=2)
    return SimulatedDriver(devices=2) if name == "simulated" else name


@contextlib.asynccontextmanager
async def open_world(name: str) -> AsyncIterator[World]:
    """Open a world of a driver."""
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
