"""What a row gets."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiocuda
from aiocuda.driver.host import HostDriver

from .c_bound import CBound, c_bound
from .peers.raw import Raw
from .turns import TurnMeter

#: The devices of the host driver.
HOST_DEVICES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """An open device, the bare driver beside it, and the row's sizes."""

    device: aiocuda.Device
    raw: Raw
    turns: TurnMeter
    sizes: Mapping[str, float]
    streams: list[aiocuda.Stream] = dataclasses.field(default_factory=list)

    def stream(self) -> aiocuda.Stream:
        """A new stream of the device, kept until the device is closed, which closes it."""
        stream = self.device.stream()
        self.streams.append(stream)
        return stream

    def c_bound(self) -> CBound | str:
        """Return the bounds in C of this machine, or the note that says why there are none."""
        return c_bound(self.raw)

    def count(self, name: str) -> int:
        """A size that is a number of things."""
        return int(self.sizes[name])


@contextlib.asynccontextmanager
async def open_setting(driver: str, sizes: Mapping[str, float], turns: TurnMeter) -> AsyncIterator[Setting]:
    """Open the device with its defaults, as a user would, then the bare driver on the same one."""
    chosen: Any = HostDriver(devices=HOST_DEVICES) if driver == "host" else driver
    async with aiocuda.open_device(driver=chosen) as device:
        yield Setting(device, _raw(chosen), turns, sizes)


def _raw(driver: Any) -> Raw:
    if isinstance(driver, HostDriver):
        from .peers.raw_host import RawHost

        return RawHost(driver)
    from .peers.raw import RawCuda

    return RawCuda()
