"""A command that ends by a MemoryError is a fault: no waiter hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aiocuda
from aiocuda import DeviceFault, Kernel
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from tests.helpers import quickly

pytestmark = pytest.mark.asyncio


class HostWithoutMemory(HostDriver):
    """Has no memory for the arguments of a command, or for its end."""

    place = ""

    def _bytes_at(self, *range_: Any) -> npt.NDArray[np.uint8]:
        if self.place == "arguments":
            raise MemoryError
        return super()._bytes_at(*range_)

    def _end(self, runner: Any, command: Any) -> Any:
        if self.place == "end":
            raise MemoryError
        return super()._end(runner, command)


class SimulatedWithoutMemory(SimulatedDriver):
    """Has no memory for the arguments of a command."""

    place = ""

    def _bytes_at(self, *range_: Any) -> npt.NDArray[np.uint8]:
        if self.place == "arguments":
            raise MemoryError
        return super()._bytes_at(*range_)


def _in_parts(data: npt.NDArray[np.uint32]) -> Iterator[float]:
    yield 0.001
    data += 1


IN_PARTS = Kernel("in_parts", source='extern "C" __global__ void in_parts(unsigned *data) { }', host=_in_parts)


@pytest.mark.parametrize("kind", ["upload", "fill", "copy", "kernel"])
@pytest.mark.parametrize(
    ("make", "place"),
    [(HostWithoutMemory, "arguments"), (HostWithoutMemory, "end"), (SimulatedWithoutMemory, "arguments")],
)
async def test_command_without_memory_is_a_fault(make: Any, place: str, kind: str) -> None:
    driver = make()
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        x = await stream.upload(np.arange(4, dtype=np.uint32))
        y = stream.empty_like(x)
        await device.load(IN_PARTS)
        await stream.synchronize()
        driver.place = place
        operation = {
            "upload": lambda: stream.copy(x, np.zeros(4, np.uint32)),
            "fill": lambda: stream.fill(x, 1),
            "copy": lambda: stream.copy(y, x),
            "kernel": lambda: stream.launch(IN_PARTS, 1, 1, x),
        }[kind]()
        with pytest.raises(DeviceFault, match="MemoryError") as caught:
            await quickly(operation)
        assert isinstance(caught.value.__cause__, MemoryError)
    driver.close()
